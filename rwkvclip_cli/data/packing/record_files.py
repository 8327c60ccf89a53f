"""The .rec and .idx files of a pack while they grow: one pair, or one for every so many records; hashed, continued.

>>> with RecordFiles("native", lambda number: (Path("out.rec"), Path("out.idx"))) as files:
...     files.write(array("f", [49406, 49407]), jpeg)
"""

import hashlib
import os
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from rwkvclip_cli.console import UsageError, progress
from rwkvclip_cli.data.packing.reading import ANEW
from rwkvclip_cli.data.packing.writers import Writer, open_writer
from rwkvclip_cli.data.recordio import Written

HASH_EVERY_RECORDS = 256
BLOCK_BYTES = 1 << 20


@dataclass(frozen=True)
class Shard:
    """One .rec file: its records, its bytes, those of its index, and the SHA-256 (hexadecimal) of the .rec."""

    count: int
    size_bytes: int
    index_bytes: int
    content_hash: str


class RecordFiles:
    """Appends records, numbered from 0 over all files, to the pair of files `paths(0)`, `paths(1)` and so on.

    A file holds `shard_size` records, all of them without. `done`, what an earlier `flush` returned, is continued; the
    files are compared with it first, UsageError where they are not as it says.
    """

    def __init__(
        self,
        writer: str,
        paths: Callable[[int], tuple[Path, Path]],
        shard_size: int | None = None,
        done: Sequence[Shard] = (),
    ) -> None:
        self._kind = writer
        self._paths = paths
        self._shard_size = shard_size
        # Of one file alone, its own hash is that of all.
        self._sha256 = hashlib.sha256() if shard_size else None
        self._finished = list(done[:-1])
        self._writer: Writer | None = None
        self._hash: FollowingHash | None = None
        self._in_shard = 0
        self.count = sum(shard.count for shard in done)
        if done:
            self._continue(done)

    def _continue(self, done: Sequence[Shard]) -> None:
        megabytes = sum(shard.size_bytes for shard in done) // BLOCK_BYTES
        with progress(megabytes, "checking what was packed", "MiB") as bar:
            for number, shard in enumerate(done):
                rec, idx = self._paths(number)
                following = FollowingHash(rec, self._sha256)
                try:
                    content_hash = following.update(shard.size_bytes, bar.advance)
                    index_bytes = idx.stat().st_size
                except OSError as error:
                    raise UsageError(f"{rec}: cannot be continued: {error.strerror}", ANEW) from error
                if content_hash != shard.content_hash or index_bytes < shard.index_bytes:
                    following.close()
                    raise UsageError(f"{rec}: cannot be continued: it is not what the journal beside it says", ANEW)
                if number < len(done) - 1:
                    following.close()
        last = done[-1]
        self._in_shard, self._hash = last.count, following
        after = Written(last.count, last.size_bytes, last.index_bytes)
        self._writer = open_writer(self._kind, rec, idx, after)

    def write(self, labels: "array[float]", image: bytes) -> None:
        """Append a record: float32 token ids of all slots, then the JPEG."""
        if self._in_shard == self._shard_size:
            self._finish()
        if self._writer is None:
            rec, idx = self._paths(len(self._finished))
            self._writer, self._hash = open_writer(self._kind, rec, idx), FollowingHash(rec, self._sha256)
        self._writer.write(labels, image, self.count)
        self.count += 1
        self._in_shard += 1
        if self.count % HASH_EVERY_RECORDS == 0:
            self._hash_on()

    def flush(self) -> list[Shard] | None:
        """Wait until all is on the disk; how far each file is, or None where the writer could not continue them."""
        if self._writer is None:
            return list(self._finished)
        written = self._writer.flush()
        if written is None:
            return None
        shard = Shard(written.count, written.size_bytes, written.index_bytes, self._hash_on())
        return [*self._finished, shard]

    def close(self) -> list[Shard]:
        """Wait until all is on the disk and close the files; what each holds."""
        self._finish()
        return list(self._finished)

    @property
    def content_hash(self) -> str:
        """The SHA-256 (hexadecimal) of the bytes of all closed .rec files, one after the other."""
        if self._sha256 is not None:
            return self._sha256.hexdigest()
        return self._finished[0].content_hash if self._finished else hashlib.sha256().hexdigest()

    def _hash_on(self) -> str:
        assert self._hash is not None
        return self._hash.update()

    def _finish(self) -> None:
        """Close the pair that is being written."""
        if self._writer is None:
            return
        writer, self._writer = self._writer, None
        writer.__exit__(None, None, None)
        content_hash = self._hash_on()
        self._close_hash()
        rec, idx = self._paths(len(self._finished))
        self._finished.append(Shard(self._in_shard, rec.stat().st_size, idx.stat().st_size, content_hash))
        self._in_shard = 0

    def _close_hash(self) -> None:
        if self._hash is not None:
            self._hash.close()
            self._hash = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            if self._writer is not None:
                writer, self._writer = self._writer, None
                writer.__exit__(kind, error, traceback)
        finally:
            self._close_hash()


class FollowingHash:
    """SHA-256 of a file that is still growing: each update reads what is new while it is in memory anyway.

    `total`, a hash over several files, takes the same bytes in.
    """

    def __init__(self, path: Path, total: Any = None) -> None:
        self._path = path
        self._sha256 = hashlib.sha256()
        self._total = total
        self._descriptor = -1

    def update(self, limit: int | None = None, tell: Callable[[], object] = lambda: None) -> str:
        """Read on to the present end, at most `limit` bytes; the hash (hexadecimal) up to there.

        `tell` is called for every MiB.
        """
        if self._descriptor < 0:
            self._descriptor = os.open(self._path, os.O_RDONLY)
        left = limit
        while block := os.read(self._descriptor, BLOCK_BYTES if left is None else min(BLOCK_BYTES, left)):
            self._sha256.update(block)
            if self._total is not None:
                self._total.update(block)
            if left is not None:
                left -= len(block)
            tell()
        return self._sha256.hexdigest()

    def close(self) -> None:
        """Let go of the file."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
