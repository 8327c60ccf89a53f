"""The inputs of all sources in order, from any place on, and how far what was done with them has come.

>>> reading = Reading(parts_of(find_sources(["./imgs"], options)), options)
>>> for item in reading.items():
...     reading.advance(item.source)
>>> reading.position.items
60
"""

import os
import zlib
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from rwkvclip_cli.console import RwkvClipError, UsageError
from rwkvclip_cli.data.packing.growing import ANEW
from rwkvclip_cli.data.packing.samples import Item, SourceOptions, printable
from rwkvclip_cli.data.packing.sources import KINDS


@dataclass(frozen=True)
class Part:
    """What is read in one go: a folder, or one file with its bytes and the time of its last change.

    kind: a key of `sources.KINDS`.
    """

    kind: str
    path: str
    size_bytes: int | None = None
    changed_ns: int | None = None


@dataclass(frozen=True)
class Position:
    """Behind `items` inputs of the part of that number; `names` is the CRC-32 of what these are called."""

    part: int = 0
    items: int = 0
    names: int = 0


def parts_of(found: Iterable[tuple[str, str]]) -> list[Part]:
    """The parts of all sources, as `sources.find_sources` gives these; UsageError for a file that is not there."""
    return [look_at(kind, file) for path, kind in found for file in KINDS[kind].parts(path)]


def look_at(kind: str, path: str) -> Part:
    """A part as it is now: of a folder no more than its name, because its files are looked at one by one."""
    if os.path.isdir(path):
        return Part(kind, path)
    try:
        status = os.stat(path)
    except OSError as error:
        raise UsageError(f"{printable(path)}: {error.strerror}") from error
    return Part(kind, path, status.st_size, status.st_mtime_ns)


class Reading:
    """Reads parts from `start` on. `items` may be ahead of `position`, which counts what `advance` was told.

    Raises UsageError where the inputs before `start` are no longer those that they were.
    """

    def __init__(self, parts: Sequence[Part], options: SourceOptions, start: Position | None = None) -> None:
        self.position = start or Position()
        self._parts = parts
        self._options = options
        self._given = self._done = 0
        # The number of each part that reading has come to since, and how many items came before.
        self._begun: deque[tuple[int, int]] = deque()
        self._first = self._behind(self.position) if self.position.items else None

    def items(self) -> Iterator[Item]:
        """Yield the items; RwkvClipError where a file changes or vanishes before all of it is read."""
        for number in range(self.position.part, len(self._parts)):
            part = self._parts[number]
            if self._first is None:
                self._begun.append((number, self._given))
            items, self._first = self._first or KINDS[part.kind].read(part.path, self._options), None
            _check_unchanged(part)
            try:
                for item in items:
                    self._given += 1
                    yield item
            except OSError as error:
                raise RwkvClipError(f"cannot read {printable(part.path)}: {error.strerror}") from error
            _check_unchanged(part)

    def advance(self, source: str) -> None:
        """Count the next item, whose source that is, as done."""
        part, items, names = self.position.part, self.position.items, self.position.names
        while self._begun and self._begun[0][1] <= self._done:
            part, items, names = self._begun.popleft()[0], 0, 0
        self._done += 1
        self.position = Position(part, items + 1, _with_name(names, source))

    def _behind(self, position: Position) -> Iterator[Item]:
        """The items of the first part to read, those before the position left out and, where listed, compared."""
        part = self._parts[position.part]
        kind = KINDS[part.kind]
        if kind.read_on:
            return kind.read_on(part.path, self._options, position.items)
        items = kind.read(part.path, self._options)
        passed = names = 0
        for item in islice(items, position.items):
            passed, names = passed + 1, _with_name(names, item.source)
        if (passed, names) != (position.items, position.names):
            raise UsageError(
                f"{printable(part.path)}: its first {position.items:,} inputs are not those that were packed; some "
                "were added, removed or renamed",
                ANEW,
            )
        return items


def _with_name(names: int, source: str) -> int:
    return zlib.crc32(source.encode("utf-8", "surrogatepass") + b"\0", names)


def _check_unchanged(part: Part) -> None:
    try:
        if look_at(part.kind, part.path) == part:
            return
        what = "has changed"
    except UsageError:
        what = "has vanished"
    raise RwkvClipError(
        f"{printable(part.path)} {what} since this pack began; which of its inputs are packed cannot be said",
        f"ls -l {printable(part.path)}",
    )
