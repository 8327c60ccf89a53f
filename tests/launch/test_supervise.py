"""Signals, exit codes and orphans, with real processes: a stub of torchrun for most, torchrun itself for a few."""

import contextlib
import os
import pty
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers import plain_environment

HERE = Path(__file__).parent
PATIENCE_S = 60.0
LAUNCHER = """
import os, sys
from rwkvclip_cli.config import LaunchConfig
from rwkvclip_cli.launch.plan import NodeCommand, plan
from rwkvclip_cli.launch.preflight import survey
from rwkvclip_cli.launch.supervise import supervise
agent, mode, grace_s = sys.argv[1:]
config = LaunchConfig(cpus=2, max_restarts=int(mode.startswith("restart")))
node = NodeCommand((sys.executable, agent, mode), {})
if agent == "torchrun":
    node = plan(config, (mode,), survey(config), module="stub_worker").here
sys.exit(supervise(node, stop_grace_s=float(grace_s)))
"""
STUB = str(HERE / "stub_agent.py")
TORCHRUN = "torchrun"


class Launched:
    """A launcher with its ranks, in a process of its own."""

    def __init__(
        self, folder: Path, mode: str, agent: str, grace_s: float, ignore_hangup: bool, env: dict[str, str]
    ) -> None:
        self.out, self.err, self.temporary = folder / "out", folder / "err", folder / "temporary"
        self.temporary.mkdir()
        with self.out.open("w") as out, self.err.open("w") as err:
            self.process = subprocess.Popen(
                [sys.executable, "-c", LAUNCHER, agent, mode, str(grace_s)],
                env=plain_environment({"PYTHONPATH": str(HERE), "TMPDIR": str(self.temporary), **env}),
                stdout=out,
                stderr=err,
                preexec_fn=(lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN)) if ignore_hangup else None,
            )

    def words(self, first: str) -> list[list[str]]:
        """The lines on stdout that begin with a word, without it."""
        return [line.split()[1:] for line in self.out.read_text().splitlines() if line.split()[:1] == [first]]

    def wait_for(self, first: str, count: int = 1) -> list[list[str]]:
        end_s = time.monotonic() + PATIENCE_S
        while len(self.words(first)) < count:
            assert time.monotonic() < end_s, f"no {first!r}: {self.out.read_text()} {self.err.read_text()}"
            time.sleep(0.02)
        return self.words(first)

    def ranks(self) -> list[int]:
        """The process ids of both ranks, once they can be signalled."""
        return [int(pid) for _, pid in self.wait_for("ready", 2)]

    def end(self) -> tuple[int, str]:
        """(exit code, stderr) once the launcher has ended."""
        return self.process.wait(PATIENCE_S), self.err.read_text()


def is_alive(pid: int) -> bool:
    """Whether a process still runs; a dead one that nobody has waited for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def assert_gone(pids: list[int]) -> None:
    end_s = time.monotonic() + PATIENCE_S
    while any(is_alive(pid) for pid in pids):
        assert time.monotonic() < end_s, f"still there: {[pid for pid in pids if is_alive(pid)]}"
        time.sleep(0.02)


@contextlib.contextmanager
def launched(
    folder: Path, mode: str, agent: str = STUB, grace_s: float = 60, *, ignore_hangup: bool = False, **env: str
) -> Iterator[Launched]:
    run = Launched(folder, mode, agent, grace_s, ignore_hangup, env)
    try:
        yield run
    finally:
        run.process.kill()
        run.process.wait()


def test_a_run_that_ends_well_leaves_nothing(tmp_path: Path) -> None:
    with launched(tmp_path, "ok") as run:
        assert run.end() == (0, "")
        assert list(run.temporary.iterdir()) == []


def test_ranks_speak_through_the_launchers_own_stderr(tmp_path: Path) -> None:
    with launched(tmp_path, "ok") as run:
        assert sorted(run.wait_for("stderr", 2)) == [["of", str(rank), "is", str(run.err)] for rank in range(2)]


def test_the_exit_code_is_the_failing_ranks_own(tmp_path: Path) -> None:
    with launched(tmp_path, "code") as run:
        code, err = run.end()
    assert code == 7
    assert err == f"rwkvclip: rank 1 on {os.uname().nodename} failed with exit code 7\n"


def test_a_bug_keeps_its_traceback_once(tmp_path: Path) -> None:
    with launched(tmp_path, "bug") as run:
        code, err = run.end()
    assert code == 1
    assert err.count("Traceback") == 1
    assert err.endswith(f"rwkvclip: rank 1 on {os.uname().nodename}: ValueError: a bug in the loss\n")


def test_a_bug_keeps_its_traceback_where_the_launcher_is_itself_a_rank(tmp_path: Path) -> None:
    with launched(tmp_path, "bug", RANK="1", LOCAL_RANK="1") as run:
        code, err = run.end()
    assert code == 1
    assert err.count("Traceback") == 1
    assert err.endswith(f"rank 1 on {os.uname().nodename}: ValueError: a bug in the loss\n")


@pytest.mark.parametrize(("sent", "received"), [("SIGTERM", "SIGTERM"), ("SIGHUP", "SIGTERM"), ("SIGUSR1", "SIGUSR1")])
def test_a_stop_reaches_every_rank_once_saved_exits_75(tmp_path: Path, sent: str, received: str) -> None:
    with launched(tmp_path, "graceful") as run:
        ranks = run.ranks()
        run.process.send_signal(signal.Signals[sent])
        code, err = run.end()
        assert code == 75
        assert sorted(run.words("saved")) == [["0", received], ["1", received]]
    assert err.splitlines() == [
        f"{sent}: waiting up to 60 s for the workers to stop",
        "stopped on request behind step 3; everything is in run",
        "rwkvclip: the same command continues",
    ]
    assert_gone(ranks)


def test_ranks_that_outstay_the_grace_are_killed(tmp_path: Path) -> None:
    with launched(tmp_path, "stubborn", grace_s=0.5) as run:
        ranks = run.ranks()
        run.process.terminate()
        code, err = run.end()
    assert code == 128 + signal.SIGTERM
    assert "killed for not stopping within 0.5 s: rank 0, 1; unsaved steps are lost" in err
    assert_gone(ranks)


def test_ranks_without_a_handler_do_not_count_as_saved(tmp_path: Path) -> None:
    with launched(tmp_path, "sleep") as run:
        run.ranks()
        run.process.terminate()
        code, err = run.end()
    assert code == 128 + signal.SIGTERM
    assert "ended by SIGTERM" in err


def test_ctrl_c_is_130(tmp_path: Path) -> None:
    with launched(tmp_path, "sleep") as run:
        ranks = run.ranks()
        run.process.send_signal(signal.SIGINT)
        code, err = run.end()
    assert code == 130
    assert err.splitlines()[-1] == "rwkvclip: interrupted"
    assert_gone(ranks)


def test_a_terminal_reaches_the_ranks_but_its_ctrl_c_the_launcher_alone() -> None:
    pid, terminal = pty.fork()
    if pid == 0:
        environ = plain_environment({"PYTHONPATH": str(HERE)})
        os.execve(sys.executable, [sys.executable, "-c", LAUNCHER, STUB, "terminal", "60"], environ)
    seen, typed = b"", False
    with contextlib.suppress(OSError):  # how a terminal without a writer ends
        while data := os.read(terminal, 4096):
            seen += data
            if seen.count(b"ready") == 2 and not typed:
                typed = os.write(terminal, b"\x03") == 1
    os.close(terminal)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 130
    assert seen.count(b"terminal=True") == 2
    assert seen.count(b"interrupts=1") == 2


def test_second_ctrl_c_kills_at_once(tmp_path: Path) -> None:
    with launched(tmp_path, "stubborn", grace_s=3600) as run:
        ranks = run.ranks()
        run.process.terminate()
        end_s = time.monotonic() + PATIENCE_S
        while "waiting up to" not in run.err.read_text():
            assert time.monotonic() < end_s
            time.sleep(0.02)
        run.process.send_signal(signal.SIGINT)
        code, err = run.end()
    assert code == 128 + signal.SIGTERM
    assert "killed at once, as asked: rank 0, 1; unsaved steps are lost" in err
    assert_gone(ranks)


def test_nohup_keeps_the_run_when_the_terminal_goes(tmp_path: Path) -> None:
    with launched(tmp_path, "graceful", ignore_hangup=True) as run:
        ranks = run.ranks()
        run.process.send_signal(signal.SIGHUP)
        time.sleep(0.3)
        assert all(is_alive(pid) for pid in ranks)
        run.process.terminate()
        code, err = run.end()
    assert code == 75
    assert "SIGHUP" not in err


def test_a_stop_before_any_rank_started(tmp_path: Path) -> None:
    with launched(tmp_path, "waiting") as run:
        agent = int(run.wait_for("agent")[0][0])
        run.process.terminate()
        code, err = run.end()
    assert code == 75
    assert err.splitlines()[-1] == "rwkvclip: stopped on request before any rank had started"
    assert_gone([agent])


@pytest.mark.parametrize("mode", ["sleep", "loose"])
def test_no_orphan_after_torchruns_death(tmp_path: Path, mode: str) -> None:
    with launched(tmp_path, mode) as run:
        ranks = run.ranks()
        os.kill(int(run.words("agent")[0][0]), signal.SIGKILL)
        code, err = run.end()
    assert code == 128 + signal.SIGKILL
    assert "torchrun was ended by SIGKILL" in err
    assert_gone(ranks)


def test_no_orphan_after_the_launchers_death(tmp_path: Path) -> None:
    with launched(tmp_path, "stubborn", TORCHRUN) as run:
        ranks = run.ranks()
        run.process.kill()
        run.process.wait()
        assert_gone(ranks)


def test_torchrun_user_error_is_short(tmp_path: Path) -> None:
    with launched(tmp_path, "user", TORCHRUN) as run:
        code, err = run.end()
    assert code == 3
    assert err.splitlines() == [
        f"rwkvclip: rank 1 on {os.uname().nodename}: pairs.rec ends in the middle of a record",
        "  try: rwkvclip pack",
    ]


def test_torchrun_rank_killed_by_a_signal(tmp_path: Path) -> None:
    with launched(tmp_path, "killed", TORCHRUN) as run:
        code, err = run.end()
    assert code == 128 + signal.SIGKILL
    assert err.splitlines()[0] == f"rwkvclip: rank 1 on {os.uname().nodename} was ended by SIGKILL"


def test_torchrun_traceback_that_nobody_recorded(tmp_path: Path) -> None:
    with launched(tmp_path, "raw", TORCHRUN) as run:
        code, err = run.end()
    assert code == 1
    assert err.count("ValueError: a bug before anything is recorded") == 1
    assert "ChildFailedError" not in err
    assert err.splitlines()[-1] == f"rwkvclip: rank 1 on {os.uname().nodename} failed with exit code 1"


def test_torchrun_restart_that_works_ends_well(tmp_path: Path) -> None:
    with launched(tmp_path, "restart", TORCHRUN) as run:
        code, err = run.end()
        assert sorted(run.words("again")) == [["0"], ["1"]]
    assert code == 0
    assert err.splitlines() == [
        f"rwkvclip: rank 1 on {os.uname().nodename}: the disk is full",
        "  try: df -h",
        "restart 1: torchrun has started the ranks again",
    ]


def test_torchrun_restart_that_fails_is_judged_by_its_own_end(tmp_path: Path) -> None:
    with launched(tmp_path, "restart-killed", TORCHRUN) as run:
        code, err = run.end()
    assert code == 128 + signal.SIGKILL
    assert err.count("the disk is full") == 1
    assert err.splitlines()[3] == f"rwkvclip: rank 1 on {os.uname().nodename} was ended by SIGKILL"


def test_torchrun_stop_on_request(tmp_path: Path) -> None:
    with launched(tmp_path, "graceful", TORCHRUN) as run:
        run.ranks()
        run.process.send_signal(signal.SIGUSR1)
        code, err = run.end()
        assert sorted(run.words("saved")) == [["0", "SIGUSR1"], ["1", "SIGUSR1"]]
    assert code == 75
    assert len(err.splitlines()) == 3
