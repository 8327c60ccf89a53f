"""The records of a set by ordinal, whichever file they lie in.

>>> with Records(beside) as records:
...     records.count, records.place(7).offset, type(records.read(7)).__name__
(59, 28116, 'Whole')
"""

from array import array
from bisect import bisect_right
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from rwkvclip_cli.console import RwkvClipError
from rwkvclip_cli.inspect.files import Beside, Part
from rwkvclip_cli.inspect.index import read_listing
from rwkvclip_cli.inspect.scan import Damage, RecFile, Whole


@dataclass(frozen=True)
class Place:
    """Where a record lies; offset: in its file, None where no record of that number is in it, or no file is there."""

    part: Part
    offset: int | None


class Records:
    """Reads records; those of one file after those of another. RwkvClipError for damage where there is no index."""

    def __init__(self, beside: Beside) -> None:
        self._parts = beside.parts
        self._firsts: list[int] = []
        self._offsets: list[array[int]] = []
        self._file: RecFile | None = None
        self.count = 0
        for part in beside.parts:
            if part.shard.first is not None:
                self.count = part.shard.first - beside.files.first_number
            offsets = list_offsets(part, beside)
            self._firsts.append(self.count)
            self._offsets.append(offsets)
            self.count += len(offsets) if part.rec is not None else part.shard.count or 0

    def place(self, ordinal: int) -> Place:
        """Where a record lies."""
        number = bisect_right(self._firsts, ordinal) - 1
        offsets, position = self._offsets[number], ordinal - self._firsts[number]
        return Place(self._parts[number], offsets[position] if position < len(offsets) else None)

    def read(self, ordinal: int) -> Whole | str:
        """A record, or what is wrong with it."""
        place = self.place(ordinal)
        if place.part.rec is None:
            return f"{place.part.shard.rec.name} is not there"
        if place.offset is None:
            return f"{place.part.rec.name} has fewer records than the manifest says"
        if self._file is None or self._file.path != place.part.rec:
            self.close()
            self._file = RecFile(place.part.rec)
        return self._file.read(place.offset)

    def close(self) -> None:
        """Close the file that is open."""
        if self._file is not None:
            self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def list_offsets(part: Part, beside: Beside) -> "array[int]":
    """The offsets of all records of a part: of a sound index, else from walking the file; none without a file.

    Raises RwkvClipError where that meets damage.
    """
    if part.rec is None:
        return array("Q")
    if part.idx is not None and part.idx.is_file():
        listing = read_listing(part.idx)
        if listing.offsets and not listing.faults.total:
            return listing.offsets
    offsets = array("Q")
    with RecFile(part.rec) as file:
        for found in file.walk():
            if isinstance(found, Damage):
                raise RwkvClipError(
                    f"{part.rec}: record {len(offsets)} at byte {found.offset:,} is damaged: {found.message}",
                    f"rwkvclip inspect {beside.files.name} --verify",
                )
            offsets.append(found)
    return offsets
