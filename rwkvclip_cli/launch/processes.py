"""Find and end the processes of a job through /proc, whoever their parent has become.

>>> [worker.rank for worker in workers_of(torchrun_pid)]
"""

import contextlib
import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc")


@dataclass(frozen=True)
class Worker:
    """A rank's process."""

    pid: int
    rank: int


def workers_of(parent: int) -> list[Worker]:
    """The ranks that torchrun `parent` has started, by rank: its children that have a LOCAL_RANK."""
    found = []
    for pid in _pids():
        if _parent_of(pid) == parent:
            environ = _environ(pid)
            if "LOCAL_RANK" in environ:
                found.append(Worker(pid, int(environ.get("RANK", "0"))))
    return sorted(found, key=lambda worker: worker.rank)


def kill_all_with(name: str, value: str) -> list[Worker]:
    """SIGKILL every process, and its group, whose environment holds NAME=VALUE; returns the ranks among them."""
    found = [(pid, environ) for pid in _pids() if (environ := _environ(pid)).get(name) == value and pid != os.getpid()]
    ranks = [Worker(pid, int(environ.get("RANK", "0"))) for pid, environ in found if "LOCAL_RANK" in environ]
    for pid, _ in found:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            # torchrun makes each rank the leader of a group, which its loader processes belong to.
            if os.getpgid(pid) == pid:
                os.killpg(pid, signal.SIGKILL)
            else:
                os.kill(pid, signal.SIGKILL)
    return ranks


def _pids() -> Iterator[int]:
    for entry in os.listdir(PROC):
        if entry.isdigit():
            yield int(entry)


def _parent_of(pid: int) -> int | None:
    try:
        # The command in parentheses may hold spaces and parentheses itself; the parent is second after it.
        return int((PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()[1])
    except (OSError, IndexError):
        return None


def _environ(pid: int) -> dict[str, str]:
    try:
        text = os.fsdecode((PROC / str(pid) / "environ").read_bytes())
    except OSError:
        return {}
    return dict(item.split("=", 1) for item in text.split("\0") if "=" in item)
