"""Files of a pack that only grow, and what shows later on that such a file is still what was written.

>>> with open(path, "ab") as file: ...
>>> extent = FollowingHash(path).update()
>>> check_extent(path, extent)
"""

import contextlib
import hashlib
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

from rwkvclip_cli.console import UsageError, cannot_write
from rwkvclip_cli.data.packing.samples import printable

BLOCK_BYTES = 1 << 20
ANEW = "--overwrite in place of --resume starts anew"


@dataclass(frozen=True)
class Extent:
    """How far a file is written: its bytes, and their SHA-256 (hexadecimal)."""

    size_bytes: int
    content_hash: str


class FollowingHash:
    """SHA-256 of a file that is still growing: each update reads what is new while it is in memory anyway.

    `total`, a hash over several files, takes the same bytes in.
    """

    def __init__(self, path: Path, total: Any = None) -> None:
        self._path = path
        self._sha256 = hashlib.sha256()
        self._total = total
        self._descriptor = -1
        self._size_bytes = 0
        self._thread: threading.Thread | None = None

    def follow(self) -> None:
        """Read on to the present end beside the caller, who may append meanwhile; every other method waits for it.

        Where the system starts no thread for that, the caller waits.
        """
        self._wait()
        # Up to what is whole by now: of what is being written nobody knows how far it can be read.
        behind = os.stat(self._path).st_size - self._size_bytes
        thread = threading.Thread(target=self._follow, args=(behind,), name="rwkvclip-hash")
        try:
            thread.start()
        except RuntimeError:
            self._follow(behind)
        else:
            self._thread = thread

    def _follow(self, limit: int) -> None:
        with contextlib.suppress(OSError):  # which the next update meets as well
            self._read_on(limit)

    def _wait(self) -> None:
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def update(self, limit: int | None = None, tell: Callable[[], object] = lambda: None) -> Extent:
        """Read on to the present end, at most `limit` bytes; the extent up to there.

        `tell` is called for every MiB.
        """
        self._wait()
        self._read_on(limit, tell)
        return Extent(self._size_bytes, self._sha256.hexdigest())

    def _read_on(self, limit: int | None, tell: Callable[[], object] = lambda: None) -> None:
        if self._descriptor < 0:
            self._descriptor = os.open(self._path, os.O_RDONLY)
        left = limit
        while block := os.read(self._descriptor, BLOCK_BYTES if left is None else min(BLOCK_BYTES, left)):
            self._sha256.update(block)
            self._size_bytes += len(block)
            if self._total is not None:
                self._total.update(block)
            if left is not None:
                left -= len(block)
            tell()

    def check(self, extent: Extent, tell: Callable[[], object] = lambda: None) -> None:
        """Read the first bytes, as many as `extent` says; UsageError where they are not those that were written."""
        try:
            found = self.update(extent.size_bytes, tell)
        except OSError as error:
            raise cannot_continue(self._path, str(error.strerror)) from error
        if found != extent:
            raise cannot_continue(self._path, "it is not what the journal beside it says")

    def close(self) -> None:
        """Let go of the file."""
        self._wait()
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def check_extent(path: Path, extent: Extent) -> None:
    """Raise UsageError where a file does not begin as `extent` says."""
    with contextlib.closing(FollowingHash(path)) as following:
        following.check(extent)


def cannot_continue(path: Path, why: str) -> UsageError:
    """The error for a partial file that is not what it was when the pack was interrupted."""
    return UsageError(f"{printable(str(path))}: cannot be continued: {why}", ANEW)


class GrowingFile:
    """A file that is appended to behind what `done` says of it and read anywhere; without `done` it is made anew.

    Raises UsageError where it is not what `done` says, RwkvClipError where the disk refuses.
    """

    def __init__(self, path: Path, done: Extent | None = None) -> None:
        self.path = path
        self.size_bytes = done.size_bytes if done else 0
        self._is_written = True
        self._hash = FollowingHash(path)
        with contextlib.ExitStack() as opened:
            opened.callback(self._hash.close)
            try:
                if done:
                    self._hash.check(done)
                self._file: BinaryIO = opened.enter_context(open(path, "r+b" if done else "w+b"))
                if done:
                    self._file.truncate(self.size_bytes)
                    self._file.seek(self.size_bytes)
            except OSError as error:
                self._refuse(error)
            opened.pop_all()  # now its owner closes it

    def append(self, data: bytes) -> None:
        """Write at the end."""
        try:
            self._file.write(data)
        except OSError as error:
            self._refuse(error)
        self.size_bytes += len(data)
        self._is_written = False

    def write(self, text: str) -> None:
        """Append text, as UTF-8."""
        self.append(text.encode())

    def read(self, offset: int, count: int) -> bytes:
        """`count` bytes at `offset`, fewer at the end alone."""
        try:
            if not self._is_written:
                self._file.flush()
                self._is_written = True
            return os.pread(self._file.fileno(), count, offset)
        except OSError as error:
            self._refuse(error)

    def flush(self) -> Extent:
        """Wait until all is on the disk; how far that is."""
        try:
            self._file.flush()
            os.fsync(self._file.fileno())
            return self._hash.update()
        except OSError as error:
            self._refuse(error)

    def close(self) -> Extent | None:
        """Wait until all is on the disk and close the file; how far it is written, None where it was closed already."""
        if self._file.closed:
            return None
        extent = self.flush()
        self.abandon()
        return extent

    def abandon(self) -> None:
        """Close the file whatever happens: nobody reads what a full disk does not take."""
        with contextlib.suppress(OSError):
            self._file.close()
        self._hash.close()

    def _refuse(self, error: OSError) -> NoReturn:
        self._hash.close()
        raise cannot_write(self.path, error, self.path.parent) from error
