"""The .rec and .idx files of a pack while they grow: one pair, or one for every so many records; hashed, continued.

>>> with RecordFiles("native", lambda number: (Path("out.rec"), Path("out.idx"))) as files:
...     files.write(array("f", [49406, 49407]), jpeg)
"""

import hashlib
import os
from array import array
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from rwkvclip_cli.console import progress
from rwkvclip_cli.data.packing.growing import BLOCK_BYTES, Extent, FollowingHash, cannot_continue
from rwkvclip_cli.data.packing.writers import Writer, open_writer
from rwkvclip_cli.data.recordio import Written

HASH_EVERY_RECORDS = 256


@dataclass(frozen=True)
class PairExtent:
    """How far one .rec and its index are written, and how many records that is."""

    count: int
    rec: Extent
    idx: Extent


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
        done: Sequence[PairExtent] = (),
    ) -> None:
        self._kind = writer
        self._paths = paths
        self._shard_size = shard_size
        # Of one file alone, its own hash is that of all.
        self._sha256 = hashlib.sha256() if shard_size else None
        self._finished = list(done[:-1])
        self._writer: Writer | None = None
        self._rec_hash: FollowingHash | None = None
        self._idx_hash: FollowingHash | None = None
        self._in_shard = 0
        self.count = sum(shard.count for shard in done)
        if done:
            self._continue(done)

    def _continue(self, done: Sequence[PairExtent]) -> None:
        last = done[-1]
        blocks = sum(-(-shard.rec.size_bytes // BLOCK_BYTES) for shard in done)
        with ExitStack() as opened:
            opened.callback(self._close_hashes)
            with progress(blocks, "checking what was packed", "MiB") as bar:
                for number, shard in enumerate(done):
                    self._close_hashes()
                    rec, idx = self._paths(number)
                    self._rec_hash, self._idx_hash = FollowingHash(rec, self._sha256), FollowingHash(idx)
                    self._rec_hash.check(shard.rec, bar.advance)
                    self._idx_hash.check(shard.idx)
                    for path, extent in ((rec, shard.rec), (idx, shard.idx)):
                        _cut(path, extent)
            after = Written(last.count, last.rec.size_bytes, last.idx.size_bytes)
            self._writer = open_writer(self._kind, rec, idx, after)
            opened.pop_all()  # now `__exit__` closes them
        self._in_shard = last.count

    def write(self, labels: "array[float]", image: bytes) -> None:
        """Append a record: float32 token ids of all slots, then the JPEG."""
        if self._in_shard == self._shard_size:
            self._finish()
        if self._writer is None:
            rec, idx = self._paths(len(self._finished))
            self._writer = open_writer(self._kind, rec, idx)
            self._rec_hash, self._idx_hash = FollowingHash(rec, self._sha256), FollowingHash(idx)
        self._writer.write(labels, image, self.count)
        self.count += 1
        self._in_shard += 1
        if self.count % HASH_EVERY_RECORDS == 0 and self._rec_hash is not None:
            self._rec_hash.follow()

    def flush(self) -> list[PairExtent] | None:
        """Wait until all is on the disk; how far each file is, or None where the writer could not continue them."""
        if self._writer is None:
            return list(self._finished)
        if self._writer.flush() is None:
            return None
        return [*self._finished, self._shard()]

    def close(self) -> list[PairExtent]:
        """Wait until all is on the disk and close the files; what each holds."""
        self._finish()
        return list(self._finished)

    @property
    def content_hash(self) -> str:
        """The SHA-256 (hexadecimal) of the bytes of all closed .rec files, one after the other."""
        if self._sha256 is not None:
            return self._sha256.hexdigest()
        return self._finished[0].rec.content_hash if self._finished else hashlib.sha256().hexdigest()

    def _shard(self) -> PairExtent:
        """What the pair that is being written holds, all of it in the files."""
        assert self._rec_hash is not None
        assert self._idx_hash is not None
        return PairExtent(self._in_shard, self._rec_hash.update(), self._idx_hash.update())

    def _finish(self) -> None:
        """Close the pair that is being written."""
        if self._writer is None:
            return
        writer, self._writer = self._writer, None
        writer.__exit__(None, None, None)
        self._finished.append(self._shard())
        self._close_hashes()
        self._in_shard = 0

    def _close_hashes(self) -> None:
        for following in (self._rec_hash, self._idx_hash):
            if following is not None:
                following.close()
        self._rec_hash = self._idx_hash = None

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
            self._close_hashes()


def _cut(path: Path, extent: Extent) -> None:
    """Cut off what a file holds behind its extent: only the last of several is opened again."""
    try:
        os.truncate(path, extent.size_bytes)
    except OSError as error:
        raise cannot_continue(path, str(error.strerror)) from error
