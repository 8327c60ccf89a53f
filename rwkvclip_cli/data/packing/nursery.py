"""A process that has loaded what workers need and forks into them: each costs milliseconds and little memory.

>>> nursery = Nursery("decode")
>>> ticket = nursery.fork(there.fileno(), shared.fileno())  # a worker that serves the other end of `there`
>>> nursery.wait(ticket)  # when it has ended
0

It is a plain child of the packing process, neither a fork of it, which would copy the threads of whatever its caller
has loaded, nor multiprocessing's, which would run the caller's script again. It has one thread itself and never
decodes: DALI may be forked after it was loaded, not after it was used.
"""

import contextlib
import gc
import os
import signal
import socket
import struct
import subprocess
import sys
import traceback

from rwkvclip_cli.data.captions import Tokenizer
from rwkvclip_cli.data.packing import worker
from rwkvclip_cli.data.packing.channel import open_in_memory
from rwkvclip_cli.data.packing.images import formats

END_WAIT_S = 5.0
CANNOT_FORK = os.EX_OSERR  # the exit code of a worker that the system did not let begin

# A worker runs on one core: what its libraries would start besides only gets in the way of the others.
ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")

START = (
    "import gc, sys; gc.disable(); sys.path[:] = {path!r};"
    " from rwkvclip_cli.data.packing.nursery import main; main({descriptor}, {proof!r})"
)

FORK, WAIT = b"F", b"W"
_REQUEST = struct.Struct("<cI")  # what to do, with the worker of which ticket
_CODE = struct.Struct("<i")


class Nursery:
    """Starts the process, `pid`, which loads DALI for the proof `decode`."""

    def __init__(self, proof: str) -> None:
        self._socket, there = socket.socketpair()
        self._log = open_in_memory("rwkvclip-worker")
        self._tickets = 0
        path = [entry or os.getcwd() for entry in map(str, sys.path)]  # callers put Path objects there
        with there:
            self._process = subprocess.Popen(
                [sys.executable, "-c", START.format(path=path, descriptor=there.fileno(), proof=proof)],
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=self._log,
                env=os.environ | ONE_THREAD,
                pass_fds=[there.fileno()],
                process_group=0,  # Ctrl-C is for the packing process, which then lets its workers end
            )

    def fork(self, descriptor: int, shared: int) -> int:
        """Have a worker serve a socket and a file; its ticket. Where that fails, the socket finds no other end."""
        ticket, self._tickets = self._tickets, self._tickets + 1
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            socket.send_fds(self._socket, [_REQUEST.pack(FORK, ticket)], [descriptor, shared])
        return ticket

    def wait(self, ticket: int) -> int:
        """The exit code of a worker that has ended, or of the nursery where that has; minus the signal's number."""
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self._socket.sendall(_REQUEST.pack(WAIT, ticket))
            if answer := self._socket.recv(_CODE.size):
                return int(_CODE.unpack(answer)[0])
        return self._process.wait()

    @property
    def pid(self) -> int:
        """Of the process."""
        return self._process.pid

    @property
    def has_ended(self) -> bool:
        """Whether it can start no more workers."""
        return self._process.poll() is not None

    @property
    def log(self) -> str:
        """What it and its workers have printed lately."""
        self._log.seek(0)
        return self._log.read().decode("utf-8", "replace").strip()

    def dismiss(self) -> None:
        """Let it end once all its workers have, without waiting for that."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)

    def close(self, *, kill: bool = False) -> None:
        """Wait for the end of workers that nobody talks to any more, a few seconds at most; or end them all now."""
        self.dismiss()
        # Popen's own wait with a timeout looks at times alone.
        self._socket.settimeout(END_WAIT_S)
        if kill or not self._has_closed_its_end():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._socket.close()
        self._log.close()

    def _has_closed_its_end(self) -> bool:
        """Wait for that; False where the time was not enough."""
        try:
            while self._socket.recv(_CODE.size):
                pass
        except TimeoutError:
            return False
        except ConnectionResetError:
            pass
        return True


def main(descriptor: int, proof: str) -> None:
    """Serve the inherited socket until its other end is closed and all workers have ended."""
    Tokenizer().encode("")
    if proof == "decode":
        from nvidia.dali import Pipeline  # noqa: F401 - loaded for the workers

        formats()
    gc.freeze()  # what is there stays, and stays shared: collections look at what comes later alone
    gc.enable()
    children: dict[int, int | None] = {}
    with socket.socket(fileno=descriptor) as requests:
        while True:
            request, descriptors, _, _ = socket.recv_fds(requests, _REQUEST.size, 2)
            if not request:
                break
            what, ticket = _REQUEST.unpack(request)
            if what == WAIT:
                requests.sendall(_CODE.pack(_wait_for(children.pop(ticket))))
                continue
            try:
                children[ticket] = os.fork()
            except OSError:
                children[ticket] = None
            if children[ticket] == 0:
                requests.detach()
                os.close(descriptor)
                _become_worker(*descriptors)
            for each in descriptors:
                os.close(each)
        for child in children.values():
            _wait_for(child)


def _wait_for(child: int | None) -> int:
    return CANNOT_FORK if child is None else os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def _become_worker(descriptor: int, shared: int) -> None:
    """Serve, and end without the nursery's own end."""
    code = 1
    try:
        worker.main(descriptor, shared)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)
