"""The five files of a packed data set, written aside and shown together, or not at all.

>>> with OutputSet("out.rec", overwrite=False) as output:
...     output.rejects.write('{"source": "cat.jpg"}\\n')
...     output.commit(manifest={"count": 1})

No file system renames five files at once. So a commit moves the old files into a folder of their own, the .rec first,
then the new ones to their places, the .rec last, and then removes that folder. A .rec thus never stands beside files of
another pack. And while the folder exists, a missing .rec says that the switch is to be undone, a .rec in its place that
it is done: to a commit that failed, and to the next pack where the process was killed.
"""

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
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
# In the folder of replaced files, beside them: the names of all that there were.
REPLACED_LIST = "replaced.json"


class OutputSet:
    """The files of one pack in a hidden folder beside their targets. Leaving it without `commit` removes them.

    Holds a lock on the target; a second pack into it is refused. What a killed run left behind is undone and removed.
    Raises UsageError for a target that cannot be, or that exists without `overwrite`, before anything is written.
    """

    def __init__(self, out: str, overwrite: bool) -> None:
        self.final = final_paths(out)
        self._folder = self.final["rec"].parent
        self._hidden = f".{self.final['rec'].name}"
        self._lock = _Lock(self._folder / f"{self._hidden}.lock", out)
        self._aside = self._folder / f"{self._hidden}.partial-{os.getpid()}"
        self._replaced = self._folder / f"{self._hidden}.replaced"
        self.partial = {part: self._aside / path.name for part, path in self.final.items()}
        self._texts: dict[str, _Text] = {}
        self._hash = FollowingHash(self.partial["rec"])
        try:
            self._clean_up()
            _refuse_existing(self.final, overwrite)
        except BaseException:
            self._lock.release()
            raise

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

    def hash_anew(self) -> None:
        """Forget what has been hashed: another .rec lies in the partial one's place."""
        self._hash.close()
        self._hash = FollowingHash(self.partial["rec"])

    def commit(self, manifest: dict[str, Any]) -> None:
        """Write the manifest, put every file on the disk and then in its place; where that fails, the old ones stay."""
        try:
            for text in self._texts.values():
                text.close()
            _write_synced(self.partial["manifest"], json.dumps(manifest, indent=2, ensure_ascii=False) + "\n")
            self._switch()
        except OSError as error:
            kept = f"; what it was to replace waits in {self._replaced} for the next pack, which puts it back"
            _refuse(self.final["rec"], error, kept if self._replaced.is_dir() else "")

    def _switch(self) -> None:
        """Replace the old files by the new ones, in the order that the module's first lines explain."""
        old = [part for part in reversed(SUFFIXES) if os.path.lexists(self.final[part])]
        # The folder appears with its list in it, in one step.
        listing = self._aside / "replaced"
        listing.mkdir()
        _write_synced(listing / REPLACED_LIST, json.dumps([self.final[part].name for part in old]))
        _sync_folder(listing)
        try:
            os.rename(listing, self._replaced)
            for part in old:
                os.rename(self.final[part], self._replaced / self.final[part].name)
            for part in SUFFIXES:
                os.rename(self.partial[part], self.final[part])
            _sync_folder(self._folder)
        finally:
            self._settle()

    def _settle(self) -> None:
        """End a switch: undo it where it has not come to its end, then remove the folder of replaced files.

        Killed at any point, it does the rest when called again.
        """
        listing = self._replaced / REPLACED_LIST
        if listing.exists() and not os.path.lexists(self.final["rec"]):
            old = json.loads(listing.read_text("utf-8"))
            for path in self.final.values():
                replaced = self._replaced / path.name
                if os.path.lexists(replaced):
                    os.replace(replaced, path)
                elif path.name not in old:
                    path.unlink(missing_ok=True)
            _sync_folder(self._folder)
        shutil.rmtree(self._replaced, ignore_errors=True)

    def _clean_up(self) -> None:
        """Bring what killed runs left behind to a good end."""
        try:
            if self._replaced.is_dir():
                self._settle()
            for stale in self._folder.glob(f"{_glob_escape(self._hidden)}.partial-*"):
                shutil.rmtree(stale)
        except OSError as error:
            _refuse(self.final["rec"], error)

    def __enter__(self) -> Self:
        try:
            try:
                self._aside.mkdir()
            except OSError as error:
                _refuse(self.final["rec"], error)
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
        shutil.rmtree(self._aside, ignore_errors=True)
        self._lock.release()


def final_paths(out: str) -> dict[str, Path]:
    """The files of a pack into `out`, by part, the .rec last; UsageError where there can be none."""
    rec = Path(out)
    if rec.suffix != ".rec" or not rec.stem:
        raise UsageError(f"{out}: the output's name has to end in .rec", f"{out.rstrip('/')}.rec")
    if not rec.parent.is_dir():
        raise UsageError(f"{out}: no folder {rec.parent}", f"mkdir -p {rec.parent}")
    return {part: rec.with_name(rec.name.removesuffix(".rec") + suffix) for part, suffix in SUFFIXES.items()}


def _refuse_existing(final: dict[str, Path], overwrite: bool) -> None:
    for path in final.values():
        if path.is_dir():
            raise UsageError(f"{path}: is a folder; a pack writes a file of that name")
        if os.path.lexists(path) and not overwrite:
            raise UsageError(f"{path} exists already", "--overwrite replaces it")


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


def _write_synced(path: Path, text: str) -> None:
    with open(path, "w", encoding="utf-8", errors="backslashreplace") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # some network file systems cannot
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _glob_escape(name: str) -> str:
    return "".join(f"[{letter}]" if letter in "*?[" else letter for letter in name)


def _refuse(path: Path, error: OSError, besides: str = "") -> NoReturn:
    raise RwkvClipError(f"cannot write {path}: {error.strerror}{besides}", f"df -h {path.absolute().parent}") from error
