"""What a pack has met before: pictures, of which `--dedupe` keeps the first, and captions, which are counted.

>>> with Seen(folder, dedupe=True) as seen:
...     for outcome in seen.sift(pool.run(items)): ...
...     seen.repeated_captions()
3

Everything is in files of the pack's partial folder that only grow: for each record 24 bytes and its source's name, for
each caption 8 bytes. Memory holds 8 bytes and a slot of a hash table for each record, so about 20. A pack that goes on
gives what `flush` told: what was appended later is cut off.
"""

from array import array
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np

from rwkvclip_cli.data.packing.digest import CAPTION_BYTES, DIGEST_BYTES
from rwkvclip_cli.data.packing.growing import Extent, GrowingFile
from rwkvclip_cli.data.packing.pool import Outcome
from rwkvclip_cli.data.packing.samples import Reject
from rwkvclip_cli.data.packing.worker import Packed

PICTURES, NAMES, CAPTIONS = "seen-pictures", "seen-names", "seen-captions"
WORD_BYTES = 8
NOTHING: Mapping[Path, Extent] = {}
FIRST_SLOTS = 1 << 16
COUNTED_AT_ONCE = 1 << 22


class Seen:
    """The pictures and captions that a pack has written, as `done` (what `flush` returned) says, and further ones."""

    def __init__(self, folder: Path, *, dedupe: bool, done: Mapping[Path, Extent] = NOTHING) -> None:
        with ExitStack() as opened:
            self._captions = GrowingFile(folder / CAPTIONS, done.get(folder / CAPTIONS))
            opened.callback(self._captions.abandon)
            self._pictures = SeenPictures(folder, done) if dedupe else None
            opened.pop_all()  # now `__exit__` closes them

    def sift(self, outcomes: Iterable[Outcome]) -> Iterator[Outcome]:
        """Yield the outcomes, those that show the picture of an earlier record as rejects. Never reads ahead."""
        for outcome in outcomes:
            if not isinstance(outcome, Packed):
                yield outcome
                continue
            first = self._pictures.add(outcome.digest, outcome.source) if self._pictures else None
            if first is not None:
                yield Reject(outcome.source, "duplicate", f"{outcome.source}: the same picture as {first}")
                continue
            self._captions.append(outcome.hashes)
            yield outcome

    def repeated_captions(self) -> int:
        """How many captions an earlier one equals: all of them less the different ones, by their 64-bit hashes."""
        total = self._captions.size_bytes // CAPTION_BYTES
        parts = -(-total // COUNTED_AT_ONCE)
        return total - sum(self._count_different(part, parts) for part in range(parts))

    def _count_different(self, part: int, parts: int) -> int:
        """The different hashes among those that leave `part` when divided by `parts`: what memory holds at once."""
        found = [np.empty(0, np.uint64)]
        step_bytes = COUNTED_AT_ONCE * CAPTION_BYTES
        for start in range(0, self._captions.size_bytes, step_bytes):
            hashes = np.frombuffer(self._captions.read(start, step_bytes), np.uint64)
            found.append(hashes[hashes % np.uint64(parts) == part])
        return len(np.unique(np.concatenate(found)))

    def flush(self) -> dict[Path, Extent]:
        """Wait until all of it is on the disk; how far each file is written."""
        pictures = self._pictures.flush() if self._pictures else {}
        return {self._captions.path: self._captions.flush(), **pictures}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._captions.abandon()
        if self._pictures:
            self._pictures.close()


class SeenPictures:
    """The digest of every record's picture and the source that it came from; files in `folder`, up to `done`."""

    ENTRY_BYTES = DIGEST_BYTES + WORD_BYTES  # a digest, and where in the file of names the record's name ends

    def __init__(self, folder: Path, done: Mapping[Path, Extent] = NOTHING) -> None:
        self._table = _Table()
        with ExitStack() as opened:
            self._entries = GrowingFile(folder / PICTURES, done.get(folder / PICTURES))
            opened.callback(self._entries.abandon)
            self._names = GrowingFile(folder / NAMES, done.get(folder / NAMES))
            opened.callback(self._names.abandon)
            self._fill_table()
            opened.pop_all()  # now `close` does it

    def _fill_table(self) -> None:
        step_bytes = FIRST_SLOTS * self.ENTRY_BYTES
        for start in range(0, self._entries.size_bytes, step_bytes):
            block = self._entries.read(start, step_bytes)
            for at in range(0, len(block), self.ENTRY_BYTES):
                self._table.add(int.from_bytes(block[at : at + WORD_BYTES], "little"))

    def add(self, digest: bytes, source: str) -> str | None:
        """The source of the first picture of that digest; None for a new one, which is now the first."""
        word = int.from_bytes(digest[:WORD_BYTES], "little")
        for number in self._table.find(word):
            if self._entries.read(number * self.ENTRY_BYTES, DIGEST_BYTES) == digest:
                start, end = self._name_end(number - 1), self._name_end(number)
                return self._names.read(start, end - start).decode("utf-8", "surrogatepass")
        self._table.add(word)
        self._names.append(source.encode("utf-8", "surrogatepass"))
        self._entries.append(digest + self._names.size_bytes.to_bytes(WORD_BYTES, "little"))
        return None

    def _name_end(self, number: int) -> int:
        if number < 0:
            return 0
        return int.from_bytes(self._entries.read(number * self.ENTRY_BYTES + DIGEST_BYTES, WORD_BYTES), "little")

    def flush(self) -> dict[Path, Extent]:
        """Wait until all of it is on the disk; how far each file is written."""
        return {file.path: file.flush() for file in (self._names, self._entries)}

    def close(self) -> None:
        """Close the files."""
        self._names.abandon()
        self._entries.abandon()


class _Table:
    """The numbers 0, 1, 2, ... of 64-bit words in the order in which they were added, found by the word.

    Open addressing: 8 bytes for the word and, on average, 8 for its slots.
    """

    def __init__(self) -> None:
        self._words = array("Q")
        self._slots = array("I", bytes(4 * FIRST_SLOTS))  # 0: free; else the number and one

    def find(self, word: int) -> Iterator[int]:
        """Yield the numbers of equal words."""
        words, slots, mask = self._words, self._slots, len(self._slots) - 1
        place = word & mask
        while slot := slots[place]:
            if words[slot - 1] == word:
                yield slot - 1
            place = (place + 1) & mask

    def add(self, word: int) -> None:
        """Take in a word."""
        self._words.append(word)
        if 3 * len(self._words) > 2 * len(self._slots):
            self._slots = array("I", bytes(4 * 2 * len(self._slots)))
            for number, earlier in enumerate(self._words):
                self._put(earlier, number)
        else:
            self._put(word, len(self._words) - 1)

    def _put(self, word: int, number: int) -> None:
        slots, mask = self._slots, len(self._slots) - 1
        place = word & mask
        while slots[place]:
            place = (place + 1) & mask
        slots[place] = number + 1
