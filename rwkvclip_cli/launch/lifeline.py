"""What ties torchrun and its workers to the launcher: they end when it ends, and speak through its stderr.

>>> die_with_parent()

torchrun's own stderr goes through the launcher, which drops the long failure banner; a worker asks the launcher
for the real stderr, so that a progress bar still sees a terminal.
"""

import array
import contextlib
import ctypes
import os
import signal
import socket

LAUNCHER_VARIABLE = "RWKVCLIP_LAUNCH_PID"
SOCKET_NAME = "stderr"
PR_SET_PDEATHSIG = 1  # linux/prctl.h
CONNECT_TIMEOUT_S = 5.0


def die_with_parent() -> None:
    """Have the kernel kill this process when its parent ends, even by SIGKILL; Linux alone can.

    The signal is SIGKILL: a job whose launcher is gone has nobody left who would wait for it to save.
    A launcher that ended before this call is noticed too.
    """
    _set_parent_death_signal()
    launcher = os.environ.get(LAUNCHER_VARIABLE)
    if launcher is not None and not _is_alive(int(launcher)):
        os.kill(os.getpid(), signal.SIGKILL)


def tie_to(parent: int) -> None:
    """The same for a child that `parent` is about to start, between fork and exec."""
    _set_parent_death_signal()
    if os.getppid() != parent:
        os._exit(1)


def _set_parent_death_signal() -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if hasattr(libc, "prctl"):
        libc.prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def offer_stderr(folder: str) -> socket.socket | None:
    """Listen in `folder` for workers that ask for stderr; None where the path is too long for a socket."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(os.path.join(folder, SOCKET_NAME))
    except OSError:
        listener.close()
        return None
    listener.listen(1024)
    return listener


def hand_out_stderr(listener: socket.socket) -> None:
    """Answer one worker that asked: send it this process's stderr."""
    with contextlib.suppress(OSError):
        peer, _ = listener.accept()
        with peer:
            rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [2]))]
            peer.sendmsg([b"2"], rights)


def adopt_stderr(folder: str) -> None:
    """Make the launcher's stderr this process's own; without an answer keep what torchrun gave."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as asker:
        asker.settimeout(CONNECT_TIMEOUT_S)
        asker.connect(os.path.join(folder, SOCKET_NAME))
        _, descriptors, _, _ = socket.recv_fds(asker, 1, 1)
        for descriptor in descriptors:
            os.dup2(descriptor, 2)
            os.close(descriptor)
