"""Run torchrun as a child: pass signals to its workers, leave no orphan, end with the first failing rank's code.

>>> sys.exit(supervise(node, stop_grace_s=300))
"""

import contextlib
import functools
import os
import selectors
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from rwkvclip_cli import console
from rwkvclip_cli.console import RwkvClipError
from rwkvclip_cli.launch import lifeline, processes
from rwkvclip_cli.launch.exit_record import FOLDER_VARIABLE, has_begun, read_exits
from rwkvclip_cli.launch.peers import Cause, Peers
from rwkvclip_cli.launch.plan import NodeCommand
from rwkvclip_cli.launch.torchrun_log import TorchrunLog
from rwkvclip_cli.launch.verdict import HARMLESS, Stop, Verdict, blame, judge

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
# A worker knows SIGTERM and SIGUSR1 as the wish to save and stop; a lost terminal is the same wish.
FORWARDED_AS: dict[int, int] = {signal.SIGHUP: signal.SIGTERM}
POLL_S = 0.1
IDLE_GRACE_S = 5.0  # for a torchrun that waits for other nodes and has started no worker
DRAIN_S = 2.0
CAUSE_WAIT_S = 5.0  # for another node to tell what this one only felt
# What ranks get to end by themselves once another node's have failed, as torchrun gives those of the same node.
FATE_GRACE_S = 30.0


def supervise(node: NodeCommand, *, stop_grace_s: float, peers: Peers | None = None, meeting: str = "") -> int:
    """Run the node's command to its end and return the exit code to leave with.

    0 done; 75 stopped on request with everything saved; 130 after Ctrl-C; 128+n where signal n ended the
    workers before they had saved; else the code of the rank that failed first, on whatever node `peers` reach,
    which is shown on stderr. `meeting` says in an error who was to meet where.
    """
    with tempfile.TemporaryDirectory(prefix="rwkvclip-") as folder, _caught_signals() as caught:
        return _Supervisor(node, folder, caught, stop_grace_s, peers, meeting).run()


@contextlib.contextmanager
def _caught_signals() -> Iterator[list[int]]:
    """Collect stop signals in a list, which a loop looks through, instead of ending the process."""
    caught: list[int] = []
    before = {}
    for number in STOP_SIGNALS:
        # Under nohup SIGHUP is ignored, and stays so.
        if signal.getsignal(number) is not signal.SIG_IGN:
            before[number] = signal.signal(number, lambda received, _: caught.append(received))
    try:
        yield caught
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class _Supervisor:
    """The state of one run: torchrun's process, what it said, and what was asked of it."""

    def __init__(
        self,
        node: NodeCommand,
        folder: str,
        caught: list[int],
        stop_grace_s: float,
        peers: Peers | None,
        meeting: str,
    ) -> None:
        self.node, self.folder, self.caught, self.stop_grace_s = node, folder, caught, stop_grace_s
        self.peers, self.meeting = peers, meeting
        self.log = TorchrunLog()
        self.attempt = 0
        self.stop_signal: int | None = None
        self.deadline_s = float("inf")
        self.signalled: set[int] = set()
        self.hurried = False
        self.killed: tuple[int, ...] = ()
        self.is_fated = False  # the ranks were killed because another node's had failed

    def run(self) -> int:
        environ = self.node.environment(os.environ)
        environ |= {FOLDER_VARIABLE: self.folder, lifeline.LAUNCHER_VARIABLE: str(os.getpid())}
        with contextlib.ExitStack() as stack:
            listener = lifeline.offer_stderr(self.folder)
            if listener is not None:
                stack.enter_context(listener)
            # A session of its own: Ctrl-C and a lost terminal reach the launcher alone, which decides what to do.
            torchrun = subprocess.Popen(
                self.node.argv,
                env=environ,
                stdin=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                start_new_session=True,
                preexec_fn=functools.partial(lifeline.tie_to, os.getpid()),
            )
            # Whatever ends the loop, nothing of the job outlives it.
            stack.callback(torchrun.wait)
            stack.callback(processes.kill_all_with, FOLDER_VARIABLE, self.folder)
            assert torchrun.stderr is not None
            pipe = stack.enter_context(torchrun.stderr).fileno()
            self._watch(torchrun, pipe, listener)
            processes.kill_all_with(FOLDER_VARIABLE, self.folder)
            self._drain(pipe)
        return self._conclude(torchrun.returncode)

    def _watch(self, torchrun: "subprocess.Popen[bytes]", pipe: int, listener: socket.socket | None) -> None:
        """Relay torchrun's words, answer workers and other nodes, pass signals on, until torchrun has ended."""
        os.set_blocking(pipe, False)
        with selectors.DefaultSelector() as selector:
            selector.register(pipe, selectors.EVENT_READ)
            if listener is not None:
                selector.register(listener, selectors.EVENT_READ)
            if self.peers is not None:
                selector.register(self.peers, selectors.EVENT_READ)
            while torchrun.poll() is None:
                for key, _ in selector.select(POLL_S):
                    if key.fileobj is listener:
                        lifeline.hand_out_stderr(listener)
                    elif key.fileobj is self.peers:
                        self.peers.receive()
                    elif not self._relay(pipe):
                        selector.unregister(pipe)
                self._tell_restart()
                self._take_signals()
                if self.stop_signal is not None:
                    self._pursue_stop(torchrun)
                if self.peers is not None:
                    self._share_fate(self.peers)

    def _share_fate(self, peers: Peers) -> None:
        """End ranks that do not notice that another node's are gone, as those that wait for NCCL do not."""
        peers.greet()
        if peers.cause is not None and time.monotonic() - peers.heard_s > FATE_GRACE_S:
            self.is_fated = True
            processes.kill_all_with(FOLDER_VARIABLE, self.folder)

    def _tell_restart(self) -> None:
        """Say why an attempt failed once the next one has begun: its ranks left the telling to the launcher."""
        while has_begun(Path(self.folder), self.attempt + 1):
            _show(blame(read_exits(Path(self.folder), self.attempt), self.log.tracebacks()))
            self.log.forget_tracebacks()
            self.attempt += 1
            console.say(f"restart {self.attempt}: torchrun has started the ranks again")

    def _relay(self, pipe: int) -> bool:
        """Pass on what can be read now; False at the end of the pipe."""
        try:
            data = os.read(pipe, 1 << 16)
        except BlockingIOError:
            return True
        _write_stderr(self.log.feed(data))
        return bool(data)

    def _drain(self, pipe: int) -> None:
        end_s = time.monotonic() + DRAIN_S
        with selectors.DefaultSelector() as selector:
            selector.register(pipe, selectors.EVENT_READ)
            while selector.select(max(0.0, end_s - time.monotonic())) and self._relay(pipe):
                pass
        _write_stderr(self.log.finish())

    def _take_signals(self) -> None:
        while self.caught:
            number = self.caught.pop(0)
            if self.stop_signal is None:
                self.stop_signal = number
                self.deadline_s = time.monotonic() + self.stop_grace_s
                again = ", Ctrl-C again kills them" if number == signal.SIGINT else ""
                name = signal.Signals(number).name
                console.say(f"{name}: waiting up to {self.stop_grace_s:g} s for the workers to stop{again}")
            elif number == signal.SIGINT:
                self.hurried, self.deadline_s = True, 0.0

    def _pursue_stop(self, torchrun: "subprocess.Popen[bytes]") -> None:
        """Tell every worker once, those too that start only now, and kill what outstays the grace."""
        assert self.stop_signal is not None
        # torchrun itself must not hear of it: SIGUSR1 kills it, and 30 s after SIGTERM it kills its workers.
        for worker in processes.workers_of(torchrun.pid):
            if worker.pid not in self.signalled:
                self.signalled.add(worker.pid)
                with contextlib.suppress(ProcessLookupError):
                    os.kill(worker.pid, FORWARDED_AS.get(self.stop_signal, self.stop_signal))
        if not self.signalled:
            # No rank runs: torchrun waits for other nodes, with nothing to save.
            self.signalled.add(torchrun.pid)
            torchrun.terminate()
            self.deadline_s = min(self.deadline_s, time.monotonic() + IDLE_GRACE_S)
        if time.monotonic() > self.deadline_s:
            killed = processes.kill_all_with(FOLDER_VARIABLE, self.folder)
            self.killed += tuple(sorted(worker.rank for worker in killed))

    def _conclude(self, torchrun_code: int) -> int:
        self._tell_restart()
        stop = (
            None if self.stop_signal is None else Stop(self.stop_signal, self.stop_grace_s, self.killed, self.hurried)
        )
        records, failures = read_exits(Path(self.folder), self.attempt), self.log.failures()
        verdict = judge(records, failures, torchrun_code, stop, self.log.tracebacks(), self.meeting)
        if self.peers is not None:
            verdict = self._compare(verdict, self.peers)
        _show(verdict)
        return verdict.exit_code

    def _compare(self, verdict: Verdict, peers: Peers) -> Verdict:
        """The verdict in the light of what other nodes told, who are told this one's if it is the cause.

        Before any rank has started there is nothing to share: whoever fails then may be started again, and the
        others still wait for it.
        """
        peers.receive()
        if verdict.exit_code in HARMLESS or not has_begun(Path(self.folder), 0):
            return verdict
        if verdict.elsewhere or self.is_fated:
            cause = peers.wait(CAUSE_WAIT_S)
            if cause is None:
                return verdict
            if peers.hosting:
                peers.tell(cause)
            return Verdict(cause.exit_code, cause.message, hint=cause.hint)
        here = socket.gethostname()
        message = verdict.message if here in verdict.message else f"{here}: {verdict.message}"
        peers.tell(Cause(verdict.exit_code, message, verdict.hint))
        return verdict


def _show(verdict: Verdict) -> None:
    """Write the verdict to stderr, even where this process itself is a rank of something else."""
    if verdict.traceback:
        console.say_on_any_rank(*verdict.traceback.split("\n"))
    if verdict.message:
        message, *details = verdict.message.split("\n")
        console.show_error(RwkvClipError(message, verdict.hint, details=details))


def _write_stderr(data: bytes) -> None:
    with contextlib.suppress(OSError):  # a closed stderr must not end a training run
        while data:
            data = data[os.write(2, data) :]
