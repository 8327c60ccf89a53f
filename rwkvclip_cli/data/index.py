"""A packed data set as its users see it: where the records are, how many captions each holds.

>>> open_packed("pairs.rec").count
"""

import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from rwkvclip_cli.console import RwkvClipError

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
    def _lines(self) -> tuple[bytes, np.ndarray[Any, np.dtype[np.int64]]]:
        """The index as text in file order, and where each line starts in it, the end included."""
        lines = [b"%d\t%d\n" % pair for pair in enumerate(self.offsets.tolist())]
        starts = np.zeros(len(lines) + 1, dtype=np.int64)
        np.cumsum([len(line) for line in lines], out=starts[1:])
        return b"".join(lines), starts

    def write_index(self, path: Path, ranges: list[tuple[int, int]]) -> None:
        """Write an index of the records in the half-open `ranges` of ordinals alone."""
        text, starts = self._lines
        with path.open("wb") as file:
            for first, end in ranges:
                file.write(text[starts[first] : starts[end]])


def open_packed(path: str | Path) -> PackedSet:
    """Open OUT.rec with the index and manifest beside it.

    Raises RwkvClipError where a file is missing, the index is damaged or it does not fit the records.
    """
    rec = Path(path)
    if rec.suffix != ".rec":
        raise RwkvClipError(f"{rec}: not a packed .rec file", hint=f"rwkvclip pack {rec} data.rec")
    idx = rec.with_suffix(".idx")
    for file in (rec, idx):
        if not file.is_file():
            raise RwkvClipError(f"{file}: no such file", hint=f"rwkvclip pack SOURCE... {rec}")
    offsets = _read_offsets(idx, rec.stat().st_size)
    manifest = _read_manifest(rec.with_suffix(".manifest.json"))
    captions, context_length = LABEL_WIDTH_PUBLISHED
    if manifest:
        captions, context_length = int(manifest["captions"]), int(manifest["context_length"])
        if manifest["count"] != len(offsets):
            raise RwkvClipError(
                f"{idx} lists {len(offsets):,} records, {rec.with_suffix('.manifest.json').name} says "
                f"{manifest['count']:,}: the files beside {rec.name} are not of one pack",
                hint=f"rwkvclip pack SOURCE... {rec} --overwrite",
            )
    return PackedSet(rec, idx, captions, context_length, manifest, offsets)


def _read_offsets(idx: Path, rec_size_bytes: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """The offsets of an index, sorted as DALI sorts them; a damaged line is an error that names it."""
    rebuild = f"rwkvclip pack SOURCE... {idx.with_suffix('.rec')} --overwrite"
    try:
        table = np.loadtxt(idx, dtype=np.int64, delimiter="\t", ndmin=2)
    except ValueError as error:
        # DALI would end the list at such a line without a word, and train on a part of the data.
        raise RwkvClipError(f"{idx}: damaged index: {error}", hint=rebuild) from None
    if table.size == 0:
        raise RwkvClipError(f"{idx}: the index is empty", hint=rebuild)
    if table.shape[1] != 2:
        raise RwkvClipError(f"{idx}: an index line is a key and an offset, not {table.shape[1]} fields", hint=rebuild)
    offsets = np.sort(table[:, 1])
    if np.any(offsets[1:] == offsets[:-1]):
        raise RwkvClipError(f"{idx}: two lines name the same record", hint=rebuild)
    if offsets[0] < 0 or offsets[-1] >= rec_size_bytes:
        raise RwkvClipError(
            f"{idx}: offset {offsets[-1]:,} lies outside the {rec_size_bytes:,} bytes of its .rec file",
            hint=rebuild,
        )
    return offsets


def _read_manifest(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
        return {**manifest, "captions": int(manifest["captions"]), "count": int(manifest["count"])}
    except (ValueError, KeyError, TypeError) as error:
        raise RwkvClipError(f"{path}: damaged manifest: {error!r}") from None
