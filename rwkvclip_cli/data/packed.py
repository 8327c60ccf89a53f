"""A packed data set as its users see it: where the records are, how many captions each holds.

>>> open_packed("pairs.rec").count
"""

import os
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from rwkvclip_cli.console import RwkvClipError, counted
from rwkvclip_cli.data.record_index import read_index, spread_over
from rwkvclip_cli.data.recordio import MAGIC, MAGIC_BYTES
from rwkvclip_cli.data.shards import SetFiles, Shard, locate

FIRST_WORDS = struct.Struct("<IIIfQ")  # of a record: magic, flag and length, number of label values, label, id
SOURCE_INFO = b" at index "  # what DALI writes between the path of a .rec and a record's offset in it
BLOCK_RECORDS = 1 << 20
# Records that are looked at, of all files together; of each of them at least the first and the last.
LOOKED_AT, FEWEST_LOOKED_AT = 64, 2
LABEL_WIDTH_PUBLISHED = (3, 77)  # captions and context length of a file without a manifest, as the reference's are


Offsets = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True)
class PackedSet:
    """The .rec files of a set as one run of records, and its manifest.

    rec: the name of the set. recs: its files in order. starts: (files + 1,) where each begins in all of them
    joined, the end included. offsets: (count,) byte offset of each record in the joined files, rising.
    """

    rec: Path
    recs: tuple[Path, ...]
    captions: int
    context_length: int
    manifest: dict[str, Any]
    starts: Offsets
    offsets: Offsets

    @property
    def count(self) -> int:
        """Number of records."""
        return len(self.offsets)

    @property
    def size_bytes(self) -> int:
        """Bytes of all .rec files."""
        return int(self.starts[-1])

    @property
    def content_hash(self) -> str | None:
        """What the manifest says about the bytes of the joined .rec files; None without a manifest."""
        value = self.manifest.get("content_hash")
        return None if value is None else str(value)

    @cached_property
    def _start_of(self) -> dict[bytes, int]:
        return {os.fsencode(rec): int(start) for rec, start in zip(self.recs, self.starts[:-1], strict=True)}

    def ordinals(self, places: Iterable[bytes]) -> Offsets:
        """What DALI calls the source of each record (B), `PATH at index OFFSET` -> the records' ordinals (B,)."""
        split = (place.rsplit(SOURCE_INFO, 1) for place in places)
        offsets = np.array([self._start_of[path] + int(offset) for path, offset in split], dtype=np.int64)
        found = np.searchsorted(self.offsets, offsets)
        if found.size and (found.max() >= self.count or not np.array_equal(self.offsets[found], offsets)):
            raise RwkvClipError(f"{self.rec}: the reader returned a record that is not in its index")
        return found.astype(np.int64)

    def write_index(self, path: Path, ranges: list[tuple[int, int]]) -> list[Path]:
        """Write the index by which DALI reads the records in `ranges` of ordinals, half-open, one range after another.

        Returns the files to give to DALI with it. It takes them for one file, in which a record lasts until the next
        one that the index has. So a range that begins before its predecessor ends has files of its own, though they be
        the same ones: then nothing lies between two records, and what is left out is never read.
        """
        files: list[Path] = []
        joined_bytes = 0
        with path.open("w", encoding="ascii") as index:
            for first, end in ranges:
                borders = np.searchsorted(self.offsets, self.starts).clip(first, end)
                for number in np.flatnonzero(borders[1:] > borders[:-1]):
                    moved_by = joined_bytes - int(self.starts[number])
                    for block in range(int(borders[number]), int(borders[number + 1]), BLOCK_RECORDS):
                        part = self.offsets[block : min(block + BLOCK_RECORDS, int(borders[number + 1]))] + moved_by
                        # DALI looks at the offsets alone.
                        index.write("0\t" + "\n0\t".join(map(str, part.tolist())) + "\n")
                    files.append(self.recs[number])
                    joined_bytes += int(self.starts[number + 1] - self.starts[number])
        return files


def open_packed(path: str | Path) -> PackedSet:
    """Open a packed set by any name that `shards.locate` knows, with the indexes and the manifest beside it.

    Raises RwkvClipError where a file is missing, an index is damaged, or they do not fit each other.
    """
    files = locate(path)
    if files.fault:
        raise RwkvClipError(f"{files.manifest_path}: damaged manifest: {files.fault}")
    files.check_there()
    offsets, starts = [], [0]
    for shard in files.shards:
        offsets.append(_read_offsets(shard, files) + starts[-1])
        starts.append(starts[-1] + shard.rec.stat().st_size)
    captions, context_length = LABEL_WIDTH_PUBLISHED
    if files.manifest:
        captions, context_length = files.manifest["captions"], files.manifest["context_length"]
    for shard, start, of_shard in zip(files.shards, starts, offsets, strict=False):
        _check_first_record(shard, files, int(of_shard[0]) - start, captions, context_length)
        _check_some_begin(shard, files, of_shard, start)
    return PackedSet(
        files.name,
        tuple(shard.rec for shard in files.shards),
        captions,
        context_length,
        files.manifest,
        np.array(starts, dtype=np.int64),
        np.concatenate(offsets),
    )


def _check_first_record(shard: Shard, files: SetFiles, first_offset: int, captions: int, context_length: int) -> None:
    """Compare what a file's first record holds with what the manifest promises, or the published layout without one."""
    rec = shard.rec
    with rec.open("rb") as file:
        file.seek(first_offset)
        head = file.read(FIRST_WORDS.size)
    magic, _, labels, _, number = FIRST_WORDS.unpack(head) if len(head) == FIRST_WORDS.size else (0, 0, 0, 0, 0)
    if magic != MAGIC:
        raise RwkvClipError(
            f"{rec}: no record at byte {first_offset:,}, where its index has the first one", hint=_again(files)
        )
    if labels != captions * context_length:
        raise RwkvClipError(
            f"{rec}: its first record has {labels} label values, not {captions} captions of {context_length} tokens "
            f"({captions * context_length})",
            hint=f'put {{"count": N, "captions": C, "context_length": T}} into {files.manifest_path}, '
            f"with C x T = {labels}",
        )
    if "shards" in files.manifest and number != shard.first:
        raise RwkvClipError(
            f"{rec} begins with record {number:,}, where {files.manifest_path.name} has record {shard.first:,}: "
            "shards are exchanged, or not of one pack",
            hint=f"rwkvclip inspect {files.name} --verify",
        )


def _check_some_begin(shard: Shard, files: SetFiles, offsets: Offsets, start: int) -> None:
    """See that records begin at some of a file's offsets, the last among them; the file itself begins at `start`."""
    with shard.rec.open("rb", buffering=0) as file:
        for ordinal in spread_over(len(offsets), max(LOOKED_AT // len(files.shards), FEWEST_LOOKED_AT)):
            offset = int(offsets[ordinal]) - start
            file.seek(offset)
            if file.read(len(MAGIC_BYTES)) != MAGIC_BYTES:
                raise RwkvClipError(
                    f"{shard.rec}: no record at byte {offset:,}, where its index has record {ordinal:,}",
                    hint=f"rwkvclip inspect {files.name} --verify",
                )


def _again(files: SetFiles) -> str:
    return f"rwkvclip pack SOURCE... {files.rec} --overwrite"


def _read_offsets(shard: Shard, files: SetFiles) -> Offsets:
    """The offsets of a shard's index, none of them outside the file, and as many as the manifest says."""
    rec, idx = shard.rec, shard.idx
    if not idx.is_file():
        raise RwkvClipError(f"{idx}: no such file", hint=f"rwkvclip inspect {files.name} --rebuild-index")
    offsets = np.array(read_index(idx), dtype=np.int64)
    if not offsets.size:
        raise RwkvClipError(f"{idx}: the index is empty", hint=_again(files))
    size_bytes = rec.stat().st_size
    if offsets[-1] >= size_bytes:
        raise RwkvClipError(
            f"{idx}: offset {offsets[-1]:,} lies outside the {size_bytes:,} bytes of {rec.name}",
            hint=f"rwkvclip inspect {files.name} --salvage SAVED.rec",
        )
    if shard.size_bytes not in (None, size_bytes):
        raise RwkvClipError(
            f"{rec} has {size_bytes:,} bytes, its manifest says {shard.size_bytes}: cut off or replaced",
            hint=f"copy it again, or: {_again(files)}",
        )
    if shard.count not in (None, len(offsets)):
        raise RwkvClipError(
            f"{idx} lists {counted(len(offsets), 'record')}, {files.manifest_path.name} says "
            f"{shard.count:,}: the files beside {rec.name} are not of one pack",
            hint=_again(files),
        )
    return offsets
