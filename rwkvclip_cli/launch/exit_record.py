"""How a worker tells the launcher why it ended: a small JSON file, since torchrun's exit code is always 1.

>>> with exit_recorded():
...     train(config)
"""

import contextlib
import json
import os
import signal
import socket
import time
import traceback
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from rwkvclip_cli.console import EXIT_FAILED, EXIT_SIGNAL, EXIT_STOPPED, RwkvClipError, page
from rwkvclip_cli.launch.lifeline import adopt_stderr, die_with_parent

FOLDER_VARIABLE = "RWKVCLIP_EXIT_DIR"
SUFFIX = ".exit.json"
BEGUN = "attempt-{}"  # a file of this name says that a rank of this attempt has begun


@dataclass(frozen=True)
class ExitRecord:
    """Why one rank ended. `time_s` is the wall clock in seconds, `attempt` counts torchrun's restarts."""

    code: int
    message: str
    hint: str
    traceback: str
    rank: int
    host: str
    time_s: float
    attempt: int


def has_launcher() -> bool:
    """Whether a launcher started this rank, and will tell what `record_exit` writes down."""
    return FOLDER_VARIABLE in os.environ and "LOCAL_RANK" in os.environ


def record_exit(code: int, message: str = "", traceback: str = "", hint: str = "") -> None:
    """Write down how this rank ends, whole or not at all, for the launcher; without a launcher do nothing.

    The first record of a rank stays: what follows is usually its consequence.
    """
    if not has_launcher():
        return
    rank, attempt = int(os.environ.get("RANK", "0")), _attempt()
    record = ExitRecord(code, message, hint, traceback, rank, socket.gethostname(), time.time(), attempt)
    target = Path(os.environ[FOLDER_VARIABLE]) / f"rank-{rank}-attempt-{attempt}{SUFFIX}"
    aside = target.with_suffix(f".{os.getpid()}")
    # A folder that is gone or full must not hide the fault that is being recorded.
    with contextlib.suppress(OSError):
        if not target.exists():
            aside.write_text(json.dumps(asdict(record)), encoding="utf-8")
            aside.replace(target)


def has_begun(folder: Path, attempt: int) -> bool:
    """Whether a rank of this attempt has begun, torchrun's restarts counting from 0."""
    return (folder / BEGUN.format(attempt)).exists()


def read_exits(folder: Path, attempt: int) -> list[ExitRecord]:
    """All records of an attempt, the earliest first."""
    names = {field.name for field in fields(ExitRecord)}
    records = []
    for path in folder.glob(f"*{SUFFIX}"):
        document = json.loads(path.read_text(encoding="utf-8"))
        records.append(ExitRecord(**{name: document[name] for name in names}))
    return sorted((record for record in records if record.attempt == attempt), key=lambda record: record.time_s)


@contextlib.contextmanager
def exit_recorded() -> Iterator[None]:
    """Around a whole worker: tie it to the launcher, record how it ends, and leave the telling to the launcher.

    Without a launcher nothing changes. A stop with everything saved (75) leaves with 0, or torchrun would
    kill the ranks that are still saving and restart the job; the launcher reads 75 from the record. Rank 0 says
    itself where everything is, before it leaves so.
    """
    if not has_launcher():
        yield
        return
    with contextlib.suppress(OSError):
        (Path(os.environ[FOLDER_VARIABLE]) / BEGUN.format(_attempt())).touch()
    die_with_parent()
    adopt_stderr(os.environ[FOLDER_VARIABLE])
    try:
        yield
    except RwkvClipError as error:
        record_exit(error.exit_code, page([error.message, *error.details]), "", error.hint)
        raise SystemExit(error.exit_code) from None
    except KeyboardInterrupt:
        record_exit(EXIT_SIGNAL + signal.SIGINT, "interrupted")
        raise SystemExit(EXIT_SIGNAL + signal.SIGINT) from None
    except SystemExit as leaving:
        code = _code_of(leaving)
        if code:
            record_exit(code, leaving.code if isinstance(leaving.code, str) else "")
        raise SystemExit(0 if code == EXIT_STOPPED else code) from None
    except BaseException as error:
        record_exit(EXIT_FAILED, f"{type(error).__name__}: {error}", traceback.format_exc())
        raise SystemExit(EXIT_FAILED) from None


def _attempt() -> int:
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def _code_of(leaving: SystemExit) -> int:
    if leaving.code is None:
        return 0
    return leaving.code if isinstance(leaving.code, int) else EXIT_FAILED
