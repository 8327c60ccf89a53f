"""The records of a .rec one after another, damaged or not: what is whole is yielded, what is not is passed over.

>>> for found in RecFile(Path("pairs.rec")).scan(): print(found.offset, type(found).__name__)

The format splits a payload wherever it holds the magic word at a multiple of four (`data.recordio`). So in a sound file
such a word always begins a part, and after damage the next one that begins a whole record is where to go on.
"""

import os
import stat
import struct
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rwkvclip_cli.console import RwkvClipError
from rwkvclip_cli.data.record_index import open_to_read
from rwkvclip_cli.data.recordio import (
    FIRST,
    HEADER_BYTES,
    LAST,
    LENGTH_BITS,
    MAGIC,
    MAGIC_BYTES,
    MAX_PAYLOAD_BYTES,
    MIDDLE,
    WHOLE,
)

PART = struct.Struct("<II")  # magic, flag << 29 | length
SEARCH_BYTES = 1 << 20
FIRST_BYTES = 1 << 12
JPEG_END = b"\xff\xd9"
# A record that nothing follows is only read, to see which of the two is damaged, up to this size.
DOUBTFUL_BYTES = 1 << 26


@dataclass(frozen=True, slots=True)
class Whole:
    """A record whose parts are in order. end: where the next one begins. flaw: what is wrong with its padding."""

    offset: int
    end: int
    payload: bytes
    flaw: str = ""


@dataclass(frozen=True, slots=True)
class Damage:
    """A stretch without a whole record; at `end` one begins, or the file is over. kind: framing or cut-off."""

    offset: int
    end: int
    kind: str
    message: str


@dataclass(frozen=True, slots=True)
class _Frame:
    """Where the data of a record's parts lies: (offset, length) of each."""

    parts: list[tuple[int, int]]
    end: int


class RecFile:
    """A .rec that may be damaged, read at any place. Raises RwkvClipError where it is no regular, readable file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        if path.exists() and not stat.S_ISREG(path.stat().st_mode):
            raise RwkvClipError(f"{path} is no regular file; records are read by their place in it")
        self._file = open_to_read(path)
        self.size_bytes = os.fstat(self._file.fileno()).st_size

    def scan(self, known: Sequence[int] = (), width: int | None = None) -> Iterator[Whole | Damage]:
        """Every record and every damaged stretch, in file order; together they cover the file.

        known: rising offsets of an index, which help to tell which of two neighbours is damaged. width: the number of
        labels of a record that is found again behind damage, where known.
        """
        offset = 0
        while offset < self.size_bytes:
            found = self.read(offset)
            if isinstance(found, Whole) and not self._is_followed(found.end) and not _is_end(found, known):
                found = f"no record follows at byte {found.end:,}, where its length says that it ends"
            if isinstance(found, Whole):
                yield found
                offset = min(found.end, self.size_bytes)
                continue
            again = self._find_record(offset + 4, known, width)
            is_cut = again == self.size_bytes and "the file ends" in found
            yield Damage(offset, again, "cut-off" if is_cut else "framing", found)
            offset = again

    def walk(self) -> Iterator[int | Damage]:
        """The offset of each record from the heads of the parts alone; where they end in damage, that, at last."""
        offset = 0
        while offset < self.size_bytes:
            frame = self._frame(offset)
            if isinstance(frame, str) or frame.end > self.size_bytes:
                message = frame if isinstance(frame, str) else "the file ends within its padding"
                yield Damage(offset, self.size_bytes, "framing", message)
                return
            yield offset
            offset = frame.end

    def read(self, offset: int) -> Whole | str:
        """The record at `offset`, or what is wrong there."""
        frame = self._frame(offset)
        if isinstance(frame, str):
            return frame
        length = sum(length for _, length in frame.parts)
        if not self._is_followed(frame.end) and length > DOUBTFUL_BYTES:
            return f"{length:,} bytes long, and no record follows at byte {frame.end:,}"
        pieces = []
        flaw = ""
        for data_at, part_length in frame.parts:
            data_end = data_at + part_length
            piece = self._read_data(data_at, part_length)
            if isinstance(piece, str):
                return piece
            padding = self.pread(-part_length % 4, data_end)
            if len(padding) < -part_length % 4:
                flaw = f"its padding is cut off: the file ends at byte {self.size_bytes:,}, not {frame.end:,}"
            elif any(padding):
                flaw = f"its padding at byte {data_end:,} holds {padding.hex()}, not zeros"
            pieces.append(piece)
        return Whole(offset, frame.end, MAGIC_BYTES.join(pieces), flaw)

    def _read_data(self, data_at: int, length: int) -> bytes | str:
        """The data of a part, or what is wrong; a length that is made up is noticed before all of it is read."""
        blocks: list[bytes] = []
        at, step = data_at, FIRST_BYTES
        while at < data_at + length:
            block = self.pread(min(step, data_at + length - at), at)
            unsplit = _aligned_magic(block)
            if unsplit >= 0:
                return f"its length is wrong: another part begins within it, at byte {at + unsplit:,}"
            if not block:
                return f"the file ends at byte {at:,} while it is read"
            blocks.append(block)
            at, step = at + len(block), SEARCH_BYTES
        return b"".join(blocks)

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def __enter__(self) -> "RecFile":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _frame(self, record_at: int) -> _Frame | str:
        parts: list[tuple[int, int]] = []
        part_at, flag, total = record_at, FIRST, 0
        while flag in (FIRST, MIDDLE):
            head = self.pread(PART.size, part_at)
            if len(head) < PART.size:
                return f"the file ends at byte {self.size_bytes:,}, within the head of part {len(parts)}"
            magic, word = PART.unpack(head)
            flag, length = word >> LENGTH_BITS, word & MAX_PAYLOAD_BYTES
            if magic != MAGIC:
                return f"0x{magic:08x} at byte {part_at:,}, not the magic 0x{MAGIC:08x}"
            if flag not in ((MIDDLE, LAST) if parts else (WHOLE, FIRST)):
                wanted = "2 (middle) or 3 (last)" if parts else "0 (whole) or 1 (first)"
                return f"part {len(parts)} at byte {part_at:,} has flag {flag}, not {wanted}"
            data_at = part_at + PART.size
            if data_at + length > self.size_bytes:
                end = data_at + length
                return f"part {len(parts)} would end at byte {end:,}, but the file ends at {self.size_bytes:,}"
            total += length + 4 * bool(parts)
            if total > MAX_PAYLOAD_BYTES:
                return f"its parts hold more than {MAX_PAYLOAD_BYTES:,} bytes"
            parts.append((data_at, length))
            part_at = data_at + length + -length % 4
        return _Frame(parts, part_at)

    def _is_followed(self, end: int) -> bool:
        """Whether a part, or the file's end, follows at `end`."""
        if end >= self.size_bytes:
            return True
        following = self.pread(4, end)
        return MAGIC_BYTES.startswith(following)

    def _find_record(self, start: int, known: Sequence[int], width: int | None) -> int:
        """Where the next whole record begins, from `start` on; the file's end where there is none."""
        offset = start
        while offset < self.size_bytes:
            block = self.pread(SEARCH_BYTES, offset)
            place = _aligned_magic(block)
            while place >= 0:
                found = self.read(offset + place)
                if (
                    isinstance(found, Whole)
                    and _is_plausible(found.payload, width)
                    and (self._is_followed(found.end) or _is_end(found, known))
                ):
                    return offset + place
                place = _aligned_magic(block, place + 4)
            # Blocks are multiples of four long, so no aligned word lies across two.
            offset += SEARCH_BYTES
        return self.size_bytes

    def pread(self, count: int, offset: int) -> bytes:
        """`count` bytes at `offset`, fewer at the file's end alone."""
        try:
            data = os.pread(self._file.fileno(), count, offset)
            while 0 < len(data) < count and (
                more := os.pread(self._file.fileno(), count - len(data), offset + len(data))
            ):
                data += more
        except OSError as error:
            raise RwkvClipError(f"cannot read {self.path} at byte {offset:,}: {error.strerror}", "dmesg") from error
        return data


def label_count(payload: bytes) -> int:
    """How many labels the header of a payload promises; -1 where there is no header."""
    return int.from_bytes(payload[:4], "little") if len(payload) >= HEADER_BYTES else -1


def _aligned_magic(data: bytes, start: int = 0) -> int:
    found = data.find(MAGIC_BYTES, start)
    while found >= 0 and found % 4:
        found = data.find(MAGIC_BYTES, found + 1)
    return found


def _is_plausible(payload: bytes, width: int | None) -> bool:
    count = label_count(payload)
    return count >= 0 and HEADER_BYTES + 4 * count <= len(payload) and width in (None, count)


def _is_end(record: Whole, known: Sequence[int]) -> bool:
    """Whether a record ends where it says although nothing follows there: the index or the image's end mark tells."""
    place = bisect_left(known, record.end)
    if place < len(known) and known[place] == record.end:
        return True
    return record.payload[-8:].rstrip(b"\0").endswith(JPEG_END) and not record.flaw
