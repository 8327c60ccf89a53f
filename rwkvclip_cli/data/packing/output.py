"""The five files of a packed data set, written aside and shown together, or not at all.

>>> with OutputSet("out.rec", overwrite=False) as output:
...     output.rejects.write('{"source": "cat.jpg"}\\n')
...     output.commit(manifest={"count": 1})
"""

import contextlib
import fcntl
import hashlib
import json
import os
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn, Self, TextIO

from rwkvclip_cli.console import RwkvClipError, UsageError

SUFFIXES = {
    "idx": ".idx",
    "manifest": ".manifest.json",
    "rejects": ".rejects.jsonl",
    "sources": ".sources.tsv",
    "rec": ".rec",
}


class OutputSet:
    """The files of one pack under hidden names beside their targets. Leaving it without `commit` removes them.

    Holds a lock on the target; a second pack into it is refused. What a killed run left behind is removed.
    """

    def __init__(self, out: str, overwrite: bool) -> None:
        self.final = check_target(out, overwrite)
        self._folder = self.final["rec"].parent
        self._lock = _Lock(self._folder / f".{self.final['rec'].name}.lock", out)
        for path in self.final.values():
            for stale in self._folder.glob(f".{_glob_escape(path.name)}.partial-*"):
                stale.unlink(missing_ok=True)
        self.partial = {
            part: path.with_name(f".{path.name}.partial-{os.getpid()}") for part, path in self.final.items()
        }
        self._texts: dict[str, _Text] = {}
        self._hash = FollowingHash(self.partial["rec"])

    @property
    def rejects(self) -> "_Text":
        """OUT.rejects.jsonl, to write lines to."""
        return self._texts["rejects"]

    @property
    def sources(self) -> "_Text":
        """OUT.sources.tsv, to write lines to."""
        return self._texts["sources"]

    def hash_written(self) -> str:
        """Take in what has been written to the .rec since the last call; the SHA-256 (hexadecimal) so far."""
        return self._hash.update()

    def commit(self, manifest: dict[str, Any]) -> None:
        """Write the manifest, put every file on the disk and then under its final name, the .rec last."""
        try:
            for text in self._texts.values():
                text.close()
            with open(self.partial["manifest"], "w", encoding="utf-8", errors="backslashreplace") as file:
                json.dump(manifest, file, indent=2, ensure_ascii=False)
                file.write("\n")
                file.flush()
                os.fsync(file.fileno())
            # An old .rec never stands beside a new index.
            self.final["rec"].unlink(missing_ok=True)
            for part in SUFFIXES:
                os.replace(self.partial[part], self.final[part])
            _sync_folder(self._folder)
        except OSError as error:
            _refuse(self.final["rec"], error)

    def __enter__(self) -> Self:
        try:
            for part in ("rejects", "sources"):
                self._texts[part] = _Text(self.partial[part])
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for text in self._texts.values():
            text.abandon()
        self._hash.close()
        for path in self.partial.values():
            path.unlink(missing_ok=True)
        self._lock.release()


def check_target(out: str, overwrite: bool) -> dict[str, Path]:
    """The final paths of a pack into `out`; UsageError where it cannot be, before any work."""
    rec = Path(out)
    if rec.suffix != ".rec" or not rec.stem:
        raise UsageError(f"{out}: the output's name has to end in .rec", f"{out.rstrip('/')}.rec")
    if not rec.parent.is_dir():
        raise UsageError(f"{out}: no folder {rec.parent}", f"mkdir -p {rec.parent}")
    final = {part: rec.with_name(rec.name.removesuffix(".rec") + suffix) for part, suffix in SUFFIXES.items()}
    for path in final.values():
        if path.is_dir():
            raise UsageError(f"{path}: is a folder; a pack writes a file of that name")
        if os.path.lexists(path) and not overwrite:
            raise UsageError(f"{path} exists already", "--overwrite replaces it")
    return final


class FollowingHash:
    """SHA-256 of a file that is still growing: each update reads what is new while it is in memory anyway."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._sha256 = hashlib.sha256()
        self._descriptor = -1

    def update(self) -> str:
        """Read on to the present end; the hash (hexadecimal) up to there."""
        if self._descriptor < 0:
            self._descriptor = os.open(self._path, os.O_RDONLY)
        while block := os.read(self._descriptor, 1 << 20):
            self._sha256.update(block)
        return self._sha256.hexdigest()

    def close(self) -> None:
        """Let go of the file."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


class _Text:
    """A text file whose faults name it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._file: TextIO = open(path, "w", encoding="utf-8", newline="\n")  # noqa: SIM115 - closed by its owner
        except OSError as error:
            _refuse(path, error)

    def write(self, text: str) -> None:
        try:
            self._file.write(text)
        except OSError as error:
            _refuse(self._path, error)

    def close(self) -> None:
        if not self._file.closed:
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()

    def abandon(self) -> None:
        with contextlib.suppress(OSError):
            self._file.close()


class _Lock:
    """Holds OUT for this process, for as long as it lives."""

    def __init__(self, path: Path, out: str) -> None:
        self._path = path
        while True:
            try:
                self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            except OSError as error:
                _refuse(path, error)
            try:
                fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(self._descriptor)
                raise RwkvClipError(f"{out}: another pack is writing it", "wait for it, or give another name") from None
            except OSError:
                return  # a file system without locks: nothing to hold on to
            # The holder before us may have removed the file between our open and our lock.
            with contextlib.suppress(OSError):
                if os.fstat(self._descriptor).st_ino == os.stat(path).st_ino:
                    return
            os.close(self._descriptor)

    def release(self) -> None:
        with contextlib.suppress(OSError):
            self._path.unlink()
        os.close(self._descriptor)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # some network file systems cannot
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _glob_escape(name: str) -> str:
    return "".join(f"[{letter}]" if letter in "*?[" else letter for letter in name)


def _refuse(path: Path, error: OSError) -> NoReturn:
    raise RwkvClipError(f"cannot write {path}: {error.strerror}", f"df -h {path.absolute().parent}") from error
