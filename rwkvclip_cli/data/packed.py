"""A packed data set as its users see it: where the records are, how many captions each holds.

>>> open_packed("pairs.rec").count
"""

import json
import struct
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from rwkvclip_cli.console import RwkvClipError, UsageError
from rwkvclip_cli.data.record_index import read_index
from rwkvclip_cli.data.recordio import MAGIC

FIRST_WORDS = struct.Struct("<III")  # of a record: magic, flag and length, number of label values
NEWLINE = ord("\n")
SCAN_BYTES = 1 << 24
LABEL_WIDTH_PUBLISHED = (3, 77)  # captions and context length of a file without a manifest, as the reference's are


@dataclass(frozen=True)
class PackedSet:
    """A .rec file, its index and its manifest."""

    rec: Path
    idx: Path
    captions: int
    context_length: int
    manifest: dict[str, Any]
    offsets: np.ndarray[Any, np.dtype[np.int64]]  # (count,) byte offset of each record, rising

    @property
    def count(self) -> int:
        """Number of records."""
        return len(self.offsets)

    @property
    def content_hash(self) -> str | None:
        """What the manifest says about the bytes of the .rec file; None without a manifest."""
        value = self.manifest.get("content_hash")
        return None if value is None else str(value)

    def ordinals(self, offsets: np.ndarray[Any, np.dtype[np.int64]]) -> np.ndarray[Any, np.dtype[np.int64]]:
        """Byte offsets (B,) -> the records' ordinals in the file (B,)."""
        found = np.searchsorted(self.offsets, offsets)
        if found.size and (found.max() >= self.count or not np.array_equal(self.offsets[found], offsets)):
            raise RwkvClipError(f"{self.rec}: the reader returned a record that is not in {self.idx}")
        return found.astype(np.int64)

    @cached_property
    def _line_starts(self) -> np.ndarray[Any, np.dtype[np.int64]]:
        """Where each record's line starts in the index, the end included: (count + 1,)."""
        return line_starts(self.idx)

    def write_index(self, path: Path, ranges: list[tuple[int, int]]) -> None:
        """Write an index of the records in the half-open, rising `ranges` of ordinals alone."""
        with self.idx.open("rb") as source, path.open("wb") as target:
            for first, end in ranges:
                source.seek(int(self._line_starts[first]))
                lines = source.read(int(self._line_starts[end] - self._line_starts[first]))
                target.write(lines if lines.endswith(b"\n") else lines + b"\n")


def line_starts(path: Path) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Where each line of a text file starts, and where the last one ends: (lines + 1,) byte offsets."""
    text = np.memmap(path, dtype=np.uint8, mode="r")
    ends = [
        first + 1 + np.flatnonzero(text[first : first + SCAN_BYTES] == NEWLINE)
        for first in range(0, len(text), SCAN_BYTES)
    ]
    starts = np.concatenate([np.zeros(1, dtype=np.int64), *ends])
    return starts if starts[-1] == len(text) else np.append(starts, len(text))


def open_packed(path: str | Path) -> PackedSet:
    """Open OUT.rec with the index and manifest beside it.

    Raises RwkvClipError where a file is missing, the index is damaged or it does not fit the records.
    """
    rec = Path(path)
    if rec.suffix != ".rec":
        raise RwkvClipError(f"{rec}: not a packed .rec file", hint=f"rwkvclip pack {rec} data.rec")
    idx = rec.with_suffix(".idx")
    if not rec.is_file():
        raise UsageError(f"{rec}: no such file", hint=f"rwkvclip pack SOURCE... {rec}")
    if not idx.is_file():
        raise RwkvClipError(f"{idx}: no such file", hint=f"rwkvclip inspect {rec} --rebuild-index")
    offsets = _read_offsets(rec, idx)
    size_bytes = rec.stat().st_size
    manifest = _read_manifest(rec.with_suffix(".manifest.json"))
    captions, context_length = LABEL_WIDTH_PUBLISHED
    if manifest:
        captions, context_length = manifest["captions"], manifest["context_length"]
        if manifest.get("size_bytes", size_bytes) != size_bytes:
            raise RwkvClipError(
                f"{rec} has {size_bytes:,} bytes, its manifest says {manifest['size_bytes']}: cut off or replaced",
                hint=f"copy it again, or: rwkvclip pack SOURCE... {rec} --overwrite",
            )
        if manifest["count"] != len(offsets):
            raise RwkvClipError(
                f"{idx} lists {len(offsets):,} records, {rec.with_suffix('.manifest.json').name} says "
                f"{manifest['count']:,}: the files beside {rec.name} are not of one pack",
                hint=f"rwkvclip pack SOURCE... {rec} --overwrite",
            )
    _check_label_width(rec, int(offsets[0]), captions, context_length)
    return PackedSet(rec, idx, captions, context_length, manifest, offsets)


def _check_label_width(rec: Path, first_offset: int, captions: int, context_length: int) -> None:
    """Compare what the first record holds with what the manifest promises, or the published layout without one."""
    with rec.open("rb") as file:
        file.seek(first_offset)
        head = file.read(FIRST_WORDS.size)
    magic, _, labels = FIRST_WORDS.unpack(head) if len(head) == FIRST_WORDS.size else (0, 0, 0)
    if magic != MAGIC:
        raise RwkvClipError(
            f"{rec}: no record at byte {first_offset:,}, where its index has the first one",
            hint=f"rwkvclip pack SOURCE... {rec} --overwrite",
        )
    if labels != captions * context_length:
        raise RwkvClipError(
            f"{rec}: its first record has {labels} label values, not {captions} captions of {context_length} tokens "
            f"({captions * context_length})",
            hint=f'put {{"count": N, "captions": C, "context_length": T}} into '
            f"{rec.with_suffix('.manifest.json')}, with C x T = {labels}",
        )


def _read_offsets(rec: Path, idx: Path) -> np.ndarray[Any, np.dtype[np.int64]]:
    """The offsets of an index, none of them outside its .rec file."""
    offsets = np.array(read_index(idx), dtype=np.int64)
    rebuild = f"rwkvclip pack SOURCE... {rec} --overwrite"
    if not offsets.size:
        raise RwkvClipError(f"{idx}: the index is empty", hint=rebuild)
    size_bytes = rec.stat().st_size
    if offsets[-1] >= size_bytes:
        raise RwkvClipError(
            f"{idx}: offset {offsets[-1]:,} lies outside the {size_bytes:,} bytes of {rec.name}", hint=rebuild
        )
    return offsets


def _read_manifest(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
        return {**manifest, **{name: int(manifest[name]) for name in ("captions", "context_length", "count")}}
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise RwkvClipError(f"{path}: damaged manifest: {error!r}") from None
