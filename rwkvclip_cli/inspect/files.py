"""The files of a packed data set as they lie, damaged or missing ones included; nothing here raises for damage.

>>> beside = read_beside(locate("pairs.rec"))
>>> beside.width, beside.missing
(231, ('pairs.sources.tsv',))
"""

import os
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self

from rwkvclip_cli.data.packed import LABEL_WIDTH_PUBLISHED
from rwkvclip_cli.data.recordio import HEADER_BYTES
from rwkvclip_cli.data.shards import SetFiles, Shard, beside
from rwkvclip_cli.inspect.faults import Fault
from rwkvclip_cli.inspect.scan import PART, RecFile, Whole, label_count

SAMPLED_RECORDS = 16
MAX_LINE_BYTES = 1 << 16
_CHECKSUM = re.compile(r"[0-9a-f]{8}")


@dataclass(frozen=True)
class Part:
    """The records of one shard. shard: what the manifest says of it, the file's name included.

    rec: the file that holds them, under whatever name; None where none does. name: of that file, as faults call it;
    None where the user has named it.
    """

    shard: Shard
    rec: Path | None
    name: str | None

    @property
    def idx(self) -> Path | None:
        """The index of the file."""
        return None if self.rec is None else self.rec.with_suffix(".idx")


@dataclass(frozen=True)
class Beside:
    """A set as it lies.

    parts: its records in order. misplaced: a fault for each file that does not hold the records of its name.
    captions, context_length, width (their product): of the manifest, else as most of the first records say; 0 where
    there is no record. missing: names of files that are not there.
    """

    files: SetFiles
    parts: tuple[Part, ...]
    misplaced: tuple[Fault, ...]
    captions: int
    context_length: int
    missing: tuple[str, ...]

    @property
    def manifest(self) -> dict[str, Any]:
        """What the manifest says; {} without a readable one."""
        return self.files.manifest

    @property
    def fault(self) -> str:
        """What is wrong with the manifest."""
        return f"{self.files.manifest_path.name} is damaged: {self.files.fault}" if self.files.fault else ""

    @property
    def width(self) -> int:
        """Labels of a record."""
        return self.captions * self.context_length

    @property
    def size_bytes(self) -> int:
        """Bytes of all .rec files that are there."""
        return sum(part.rec.stat().st_size for part in self.parts if part.rec is not None)

    @property
    def is_ours(self) -> bool:
        """Whether pack wrote the set: then header, order and hash are known."""
        return "content_hash" in self.manifest


def read_beside(files: SetFiles) -> Beside:
    """See which files hold the records of a set, how its records are laid out, and what is missing."""
    parts, misplaced = _arrange(files)
    if files.manifest:
        captions, context_length = files.manifest["captions"], files.manifest["context_length"]
    else:
        captions, context_length = _layout(_usual_width(parts))
    paths = [shard.idx for shard in files.shards]
    paths += [beside(files.rec, part) for part in ("manifest", "rejects", "sources")]
    paths += [shard.rec for shard in files.shards]
    missing = tuple(path.name for path in paths if not path.is_file())
    return Beside(files, parts, misplaced, captions, context_length, missing)


def _arrange(files: SetFiles) -> tuple[tuple[Part, ...], tuple[Fault, ...]]:
    """Put each file at the place of the records that it holds; a file whose place is taken is left out."""
    holders = {shard.rec: shard.rec for shard in files.shards if shard.rec.exists()}
    strangers: dict[Path, Path] = {}
    if "shards" in files.manifest:
        places = {shard.rec: _place_of(shard, files.shards) for shard in files.shards if shard.rec in holders}
        strangers = {rec: place for rec, place in places.items() if place != rec}
    for rec in strangers:
        del holders[rec]
    for rec, place in strangers.items():
        holders.setdefault(place, rec)
    parts = []
    for shard in files.shards:
        holder = holders.get(shard.rec)
        parts.append(Part(shard, holder, files.shown(holder or shard.rec)))
    faults = [
        Fault("misplaced-shard", f"it holds the records of {place.name}", shard=rec.name)
        for rec, place in strangers.items()
    ]
    return tuple(parts), tuple(faults)


def _place_of(shard: Shard, shards: Sequence[Shard]) -> Path:
    """The shard whose records lie under this one's name: itself, where its first records do not agree on another."""
    with RecFile(shard.rec) as file:
        if file.pread(PART.size + HEADER_BYTES, 0)[PART.size + 8 : PART.size + 16] == _number_bytes(shard.first):
            return shard.rec
        records = islice((found for found in file.scan() if isinstance(found, Whole)), SAMPLED_RECORDS)
        firsts = Counter(int.from_bytes(found.payload[8:16], "little") - at for at, found in enumerate(records))
        first, agreeing = firsts.most_common(1)[0] if firsts else (shard.first, 0)
        place = next((other for other in shards if other.first == first), shard)
        # One record alone may have a damaged number.
        return place.rec if agreeing > 1 or place.size_bytes == file.size_bytes else shard.rec


def _number_bytes(number: int | None) -> bytes:
    """A record's number as its header has it."""
    return (number or 0).to_bytes(8, "little")


def _usual_width(parts: Sequence[Part]) -> int:
    for part in parts:
        if part.rec is None:
            continue
        with RecFile(part.rec) as file:
            records = (found for found in file.scan() if isinstance(found, Whole))
            counts = Counter(label_count(record.payload) for record in islice(records, SAMPLED_RECORDS))
        if counts:
            return max(counts.most_common(1)[0][0], 0)
    return 0


def _layout(width: int) -> tuple[int, int]:
    """Captions and context length of a width that no manifest explains."""
    captions, context_length = LABEL_WIDTH_PUBLISHED
    if width % context_length == 0:
        return width // context_length, context_length
    return (captions, width // captions) if width % captions == 0 else (1, width)


@dataclass(frozen=True, slots=True)
class Origin:
    """A line of OUT.sources.tsv. source: as printed there. checksum: CRC-32 of labels and image, None without."""

    source: str
    kept: str
    checksum: int | None


class Sources:
    """OUT.sources.tsv read forwards, as the records are. Without the file, or behind damage in it, nothing is known."""

    def __init__(self, rec: Path) -> None:
        """Of the set OUT.rec."""
        self._path = beside(rec, "sources")
        self._file: BinaryIO | None = None
        self._ahead: tuple[int, Origin] | None = None
        self._lines = iter(self._read())
        self.fault = ""
        self._number = 0

    def at(self, ordinal: int) -> Origin | None:
        """Where a record came from; ask in rising order."""
        while self._ahead is None or self._ahead[0] < ordinal:
            entry = next(self._lines, None)
            if entry is None:
                return None
            self._ahead = entry
        return self._ahead[1] if self._ahead[0] == ordinal else None

    def count(self) -> int | None:
        """How many records it lists, once the rest of it is read; None without the file."""
        for _ in self._lines:
            pass
        return None if self._file is None else self._number

    def _read(self) -> Iterator[tuple[int, Origin]]:
        if not self._path.is_file():
            self.fault = f"{self._path.name} is no regular file" if os.path.lexists(self._path) else ""
            return
        try:
            self._file = self._path.open("rb")
        except OSError as error:
            self.fault = f"cannot read {self._path.name}: {error.strerror}"
            return
        while line := self._file.readline(MAX_LINE_BYTES):
            cells = line.decode("utf-8", "backslashreplace").rstrip("\n").split("\t")
            if not line.endswith(b"\n") or not 3 <= len(cells) <= 4 or cells[0] != str(self._number):
                line_number = f"line {self._number + 1} of {self._path.name}"
                self.fault = f"{line_number} is not {self._number}, a source and how it was kept"
                return
            checksum = int(cells[3], 16) if len(cells) == 4 and _CHECKSUM.fullmatch(cells[3]) else None
            self._number += 1
            yield self._number - 1, Origin(cells[1], cells[2], checksum)

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()
