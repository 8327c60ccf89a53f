"""What a pack has met before: pictures, of which `--dedupe` keeps the first, and captions, which are counted.

>>> with Seen(folder, dedupe=True) as seen:
...     for outcome in seen.sift(pool.run(items)): ...
...     seen.repeated_captions()
3

Everything is in files of the pack's partial folder that only grow: for each record 24 bytes and its source's name, for
each caption 8 bytes. Memory holds 8 bytes and a slot of a hash table for each record, so about 20. A pack that goes on
after `flush` gives the numbers of records and captions that it had then: what was appended later is cut off.
"""

import os
from array import array
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, NoReturn, Self

import numpy as np

from rwkvclip_cli.console import RwkvClipError
from rwkvclip_cli.data.packing.digest import CAPTION_BYTES, DIGEST_BYTES
from rwkvclip_cli.data.packing.pool import Outcome
from rwkvclip_cli.data.packing.samples import Reject
from rwkvclip_cli.data.packing.worker import Packed

PICTURES, NAMES, CAPTIONS = "seen-pictures", "seen-names", "seen-captions"
WORD_BYTES = 8
FIRST_SLOTS = 1 << 16
COUNTED_AT_ONCE = 1 << 22


class Seen:
    """The pictures and captions of the `records` and `captions` that a pack has written, and of further ones."""

    def __init__(self, folder: Path, *, dedupe: bool, records: int = 0, captions: int = 0) -> None:
        self._captions = GrowingFile(folder / CAPTIONS, captions * CAPTION_BYTES)
        self._pictures = SeenPictures(folder, records) if dedupe else None

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

    def flush(self) -> None:
        """Wait until all of it is on the disk."""
        self._captions.flush()
        if self._pictures:
            self._pictures.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._captions.close()
        if self._pictures:
            self._pictures.close()


class SeenPictures:
    """The digest of every record's picture and the source that it came from; files in `folder`, cut to `count`.

    Raises RwkvClipError where there are fewer than that.
    """

    ENTRY_BYTES = DIGEST_BYTES + WORD_BYTES  # a digest, and where in the file of names the record's name ends

    def __init__(self, folder: Path, count: int = 0) -> None:
        self._table = _Table()
        self._entries = GrowingFile(folder / PICTURES, count * self.ENTRY_BYTES)
        step_bytes = FIRST_SLOTS * self.ENTRY_BYTES
        for start in range(0, self._entries.size_bytes, step_bytes):
            block = self._entries.read(start, step_bytes)
            for at in range(0, len(block), self.ENTRY_BYTES):
                self._table.add(int.from_bytes(block[at : at + WORD_BYTES], "little"))
        self._names = GrowingFile(folder / NAMES, self._name_end(count - 1))

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

    def flush(self) -> None:
        """Wait until all of it is on the disk."""
        self._names.flush()
        self._entries.flush()

    def close(self) -> None:
        """Close the files."""
        self._names.close()
        self._entries.close()


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


class GrowingFile:
    """A file that is appended to behind its first `size_bytes` and read anywhere; 0 makes it anew.

    Raises RwkvClipError where it is shorter than that, or the disk refuses.
    """

    def __init__(self, path: Path, size_bytes: int = 0) -> None:
        self._path = path
        self.size_bytes = size_bytes
        self._is_written = True
        try:
            self._file: BinaryIO = open(path, "r+b" if size_bytes else "w+b")  # noqa: SIM115 - closed by its owner
            if os.fstat(self._file.fileno()).st_size < size_bytes:
                raise RwkvClipError(f"{path} has fewer than the {size_bytes:,} bytes that were written to it")
            if size_bytes:
                self._file.truncate(size_bytes)
                self._file.seek(size_bytes)
        except OSError as error:
            self._refuse(error)

    def append(self, data: bytes) -> None:
        """Write at the end."""
        try:
            self._file.write(data)
        except OSError as error:
            self._refuse(error)
        self.size_bytes += len(data)
        self._is_written = False

    def read(self, offset: int, count: int) -> bytes:
        """`count` bytes at `offset`, fewer at the end alone."""
        try:
            if not self._is_written:
                self._file.flush()
                self._is_written = True
            return os.pread(self._file.fileno(), count, offset)
        except OSError as error:
            self._refuse(error)

    def flush(self) -> None:
        """Wait until all of it is on the disk."""
        try:
            self._file.flush()
            os.fsync(self._file.fileno())
        except OSError as error:
            self._refuse(error)

    def close(self) -> None:
        """Close the file. What a full disk does not take is not missed: nobody reads it any more."""
        try:
            self._file.close()
        except OSError:
            self._is_written = True

    def _refuse(self, error: OSError) -> NoReturn:
        folder = self._path.absolute().parent.parent
        raise RwkvClipError(f"cannot write {self._path}: {error.strerror}", f"df -h {folder}") from error
