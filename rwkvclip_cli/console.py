"""What every command says and how it ends: errors with a next step, exit codes, results and progress.

Results go to stdout, everything else to stderr, and only rank 0 speaks.

>>> raise RwkvClipError("no index beside data.rec", hint="rwkvclip pack FOLDER data.rec")
"""

import errno
import json
import os
import re
import resource
import shlex
import signal
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol, TextIO

EXIT_DONE = 0
EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_UNABLE = 3
EXIT_STOPPED = 75  # EX_TEMPFAIL of sysexits.h: stopped early on request, everything saved
EXIT_SIGNAL = 128  # plus the signal's number, as shells report it

PLAIN_LINE_EVERY_S = 10.0
# Control characters but the tab, what ends a line or turns the direction of writing, and bytes that are no UTF-8.
UNSAFE = re.compile("[\x00-\x08\x0a-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


class RwkvClipError(Exception):
    """A fault that the user can mend: what is wrong, where, and what to type next.

    `message` names the place (path, record, rank) and the value received, `hint` the next command. `details`: further
    lines, shown between the two.
    """

    exit_code = EXIT_FAILED

    def __init__(self, message: str, hint: str = "", exit_code: int | None = None, details: Sequence[str] = ()) -> None:
        super().__init__("\n".join([message, *details]))  # what a Python caller's traceback shows
        self.message = message
        self.hint = hint
        self.details = tuple(details)
        if exit_code is not None:
            self.exit_code = exit_code


class UsageError(RwkvClipError):
    """An option or argument that cannot mean anything (exit code 2)."""

    exit_code = EXIT_USAGE


class UnableError(RwkvClipError):
    """This machine lacks what the command needs, a GPU for instance (exit code 3)."""

    exit_code = EXIT_UNABLE


def cannot_write(what: object, error: OSError, folder: Path, besides: str = "") -> RwkvClipError:
    """The error for a file, or for what `what` says, that the system does not take in `folder`."""
    return RwkvClipError(f"cannot write {what}: {error.strerror or error}{besides}", write_hint(error, folder))


@contextmanager
def writing(what: object, folder: Path) -> Iterator[None]:
    """Turn what the system says while `what` is written in `folder` into the error of `cannot_write`."""
    try:
        yield
    except OSError as error:
        raise cannot_write(what, error, folder) from error


def write_hint(error: Exception, folder: Path) -> str:
    """The command that shows, or ends, what keeps the system from writing in a folder."""
    folder = folder.absolute()
    # What a failed pack wrote into may be gone before the hint is read.
    folder = next((each.parent for each in (folder, *folder.parents) if each.name.endswith(".partial")), folder)
    shown = shlex.quote(str(folder))
    if not isinstance(error, OSError) or error.errno is None:
        return f"df -h {shown}"  # torch, safetensors and mxnet do not say what it was; most often it is this
    if error.errno == errno.ENOSPC:
        return f"df -{'i' if _has_no_inodes(folder) else 'h'} {shown}"
    if error.errno == errno.EFBIG:
        is_bound = resource.getrlimit(resource.RLIMIT_FSIZE)[0] != resource.RLIM_INFINITY
        return "ulimit -f unlimited" if is_bound else f"df -T {shown}"
    commands = {errno.EDQUOT: "quota -s", errno.EROFS: f"findmnt --target {shown}", errno.EIO: "dmesg"}
    return commands.get(error.errno, f"ls -ld {shown}")


def _has_no_inodes(folder: Path) -> bool:
    """Whether a file system with room left has none for another file."""
    try:
        left = os.statvfs(folder)
    except OSError:
        return False
    return left.f_bavail > 0 and left.f_files > 0 and left.f_favail == 0


def is_speaker() -> bool:
    """Whether this process may speak: rank 0, or no rank at all."""
    return _rank() == "0"


def _rank() -> str:
    """This process's rank. RANK without LOCAL_RANK is a node's number, which Kubernetes' operators give all of it."""
    return os.environ.get("RANK", "0") if "LOCAL_RANK" in os.environ else "0"


def visible(text: str) -> str:
    r"""`text` as one line that a terminal may have: what is unsafe there as \xNN or \uNNNN.

    File names, captions and column names are other people's: one that holds an escape sequence or a line end is to be
    read, not obeyed.
    """
    return UNSAFE.sub(_escaped, text)


def _escaped(found: re.Match[str]) -> str:
    code = ord(found[0])
    if 0xDC80 <= code <= 0xDCFF:  # PEP 383: a byte that is no UTF-8
        code -= 0xDC00
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"


def page(lines: Iterable[str]) -> str:
    """Lines as one text, which no line's content makes longer."""
    return "\n".join(map(visible, lines))


def counted(count: int, what: str) -> str:
    """A number of things in words: 1 fault, 2,000 faults. `what` is the name of one, which takes an s for several."""
    return f"{count:,} {what}{'' if count == 1 else 's'}"


def say(*lines: str) -> None:
    """Write log lines or hints to stderr, from rank 0 alone."""
    if is_speaker():
        say_on_any_rank(*lines)


def say_on_any_rank(*lines: str) -> None:
    """Write to stderr. Hours of work do not end because nobody reads its log any more, or the log's disk is full."""
    try:
        print(page(lines), file=sys.stderr, flush=True)
    except BrokenPipeError:
        # What is left in the buffer would fail again at the end.
        _silence(sys.stderr)
    except OSError:
        pass


def _silence(stream: TextIO) -> None:
    """Have a stream that nobody reads any more lead nowhere."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)


def warn(text: str) -> None:
    """Write a warning to stderr, from rank 0 alone."""
    say(f"warning: {text}")


def result(text: str) -> None:
    """Write a command's result, a line or a `page`, to stdout, from rank 0 alone."""
    if is_speaker():
        _write_result(page(text.split("\n")))


def result_json(document: Any) -> None:
    """Write one JSON document to stdout, from rank 0 alone."""
    if is_speaker():
        lines = json.dumps(document, indent=2, ensure_ascii=False).split("\n")
        _write_result("\n".join(UNSAFE.sub(_json_escaped, line) for line in lines))


def _write_result(text: str) -> None:
    """Write to stdout. Where its reader has gone (`| head`) nothing is left to do: this ends the command as SIGPIPE."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        _silence(sys.stdout)
        raise SystemExit(EXIT_SIGNAL + signal.SIGPIPE) from None
    except OSError as error:
        _silence(sys.stdout)
        raise RwkvClipError(f"cannot write the result to stdout: {error.strerror}", "df -h") from error


def _json_escaped(found: re.Match[str]) -> str:
    return f"\\u{ord(found[0]):04x}"


def show_error(error: RwkvClipError) -> None:
    """Write the error and its hint to stderr. Every rank may: a fault on rank 3 must be seen."""
    where = "" if is_speaker() else f" [rank {_rank()}]"
    hint = [f"  try: {error.hint}"] if error.hint else []
    say_on_any_rank(f"rwkvclip{where}: {error.message}", *error.details, *hint)


class Progress(Protocol):
    """What `progress` yields: call `advance` after each piece of work."""

    def advance(self, count: int = 1, note: str = "") -> None:
        """Count `count` more units done; `note` (a loss, say) is shown beside them until the next one."""


@contextmanager
def progress(total: int | None, what: str, unit: str, done: int = 0) -> Iterator[Progress]:
    """Show progress on stderr: a bar with rate and time left, or a plain line every ten seconds.

    `total` may be None where the amount is unknown; `done` counts what an earlier run finished.
    """
    if is_speaker() and sys.stderr.isatty():
        with _bar(total, what, unit, done) as bar:
            yield bar
    else:
        plain = _PlainProgress(total, what, unit, done)
        yield plain
        plain.finish()


class _PlainProgress:
    """Progress for logs: one line now and then, one at the end."""

    def __init__(self, total: int | None, what: str, unit: str, done: int) -> None:
        self.total, self.what, self.unit = total, what, unit
        self.done = self.done_at_start = self.done_spoken = done
        self.note = ""
        self.started_s = self.spoke_s = time.monotonic()

    def advance(self, count: int = 1, note: str = "") -> None:
        self.done += count
        self.note = note or self.note
        if time.monotonic() - self.spoke_s >= PLAIN_LINE_EVERY_S:
            self._speak()

    def finish(self) -> None:
        if self.done > self.done_spoken:
            self._speak()

    def _speak(self) -> None:
        self.spoke_s, self.done_spoken = time.monotonic(), self.done
        rate = (self.done - self.done_at_start) / max(self.spoke_s - self.started_s, 1e-9)
        line = f"{self.what}: {self.done:,}"
        if self.total is not None:
            total = max(self.total, self.done)  # an estimate may fall short
            left_s = (total - self.done) / rate if rate > 0 else 0.0
            line += f" of {total:,} {self.unit}, {rate:,.1f} a second, {left_s:,.0f} s left"
        else:
            line += f" {self.unit}, {rate:,.1f} a second"
        say(f"{line}  {self.note}".rstrip())


@contextmanager
def _bar(total: int | None, what: str, unit: str, done: int) -> Iterator[Progress]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as RichProgress

    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=8),  # all columns together fit into 80
        MofNCompleteColumn(),
        TextColumn("{task.fields[rate]}"),
        TimeRemainingColumn(compact=True),
        TextColumn("{task.fields[note]}"),
    )
    with RichProgress(*columns, console=Console(stderr=True)) as rich_progress:
        task = rich_progress.add_task(what, total=total, completed=done, rate="", note="")
        started_s, advanced, shown = time.monotonic(), 0, ""

        class Bar:
            def advance(self, count: int = 1, note: str = "") -> None:
                nonlocal advanced, shown
                advanced, shown = advanced + count, note or shown
                rate = advanced / max(time.monotonic() - started_s, 1e-9)
                most = None if total is None else max(total, done + advanced)  # an estimate may fall short
                rich_progress.update(task, total=most, advance=count, rate=f"{rate:,.1f} {unit}/s", note=shown)

        yield Bar()
