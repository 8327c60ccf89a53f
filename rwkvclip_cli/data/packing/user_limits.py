"""The user's limits that many worker processes run into: open files (`ulimit -n`) and processes (`ulimit -u`).

>>> make_room_for_files(2 * workers)
"""

import contextlib
import errno
import os
import resource
from pathlib import Path

from rwkvclip_cli.console import UnableError

FOLDER = Path("/proc/self/fd")
USUALLY_OPEN = 32
SPARE_FILES = 32  # sources, their tables, the files of the set, what libraries open
# How a library says that it cannot start a thread, which counts as a process.
NO_THREADS = ("can't start new thread", "pthread_create", os.strerror(errno.EAGAIN))


def make_room_for_files(count: int, workers: int) -> None:
    """Let this process have `count` more files open, for so many workers; UnableError where the user may not."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = (len(list(FOLDER.iterdir())) if FOLDER.is_dir() else USUALLY_OPEN) + count + SPARE_FILES
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    limit = hard
    if hard == resource.RLIM_INFINITY or hard >= needed:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
            return
        limit = soft
    fitting = max(1, (limit - needed + count) * workers // count)
    raise UnableError(
        f"{workers:,} workers need {needed:,} open files, and the limit (ulimit -n) is {limit:,}",
        f"--workers {fitting}, or first: ulimit -n {needed}",
    )


def no_more_processes(workers: int, running: int) -> UnableError:
    """The error where the system starts no further process; `running` of so many `workers` there are."""
    soft = resource.getrlimit(resource.RLIMIT_NPROC)[0]
    limit = (
        "unlimited, so memory or the machine's own limit is spent" if soft == resource.RLIM_INFINITY else f"{soft:,}"
    )
    return UnableError(
        f"the system starts no more processes: {running:,} of {workers:,} workers run, and the user's limit (ulimit -u)"
        f" is {limit}",
        f"--workers {max(1, running // 2)}, or first a higher ulimit -u",
    )
