"""RecordIO, byte for byte as MXNet 1.9.1 writes it: a .rec of records beside a .idx of their offsets.

>>> RecordReader("pairs.rec")[0][:4]  # the header's flag: how many float labels follow
b'\\xe7\\x00\\x00\\x00'

A record is one part or several; a part is the magic word, a word of flag (3 bits) and length (29 bits), the data, and
zeros up to a multiple of four bytes. Where the payload itself holds the magic word at a multiple of four, it is split
there: the word is left out and the parts are flagged first, middle or last. Everything is little-endian.
"""

import contextlib
import os
import stat
import struct
import sys
import zlib
from array import array
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, NoReturn

from rwkvclip_cli.console import RwkvClipError, cannot_write
from rwkvclip_cli.data.record_index import PathLike, default_index_path, index_error, open_to_read, read_index

MAGIC = 0xCED7230A
MAGIC_BYTES = MAGIC.to_bytes(4, "little")
LENGTH_BITS = 29
MAX_PAYLOAD_BYTES = 2**LENGTH_BITS - 1
WHOLE, FIRST, MIDDLE, LAST = range(4)

_PART = struct.Struct("<II")  # magic, flag << 29 | length
_HEADER = struct.Struct("<IfQQ")  # number of float labels, scalar label, id, id2
HEADER_BYTES = _HEADER.size
_BUFFER_BYTES = 1 << 20
_MOST_PIECES = 512  # that one call writes: IOV_MAX is 1,024 on Linux and macOS


@dataclass(frozen=True, slots=True)
class Record:
    """One image with its labels, as `fn.readers.mxnet` and `mxnet.recordio.unpack` see it.

    labels: float32 values, any number of them (231: three captions of 77 token ids).
    image: the encoded image. id, id2: unsigned 64-bit.
    label: the header's own float32, which readers look at only where `labels` is empty.
    """

    labels: Sequence[float]
    image: bytes
    id: int = 0
    id2: int = 0
    label: float = 0.0


def pack_record(record: Record) -> bytes:
    """The payload of `record`: 24 bytes of header, its labels as float32, then the image.

    Fastest where `labels` is an `array("f")`; any sequence of numbers will do. Raises RwkvClipError where header or
    labels hold the magic word: such a record is split before its image begins, where DALI 2.4 cannot join it.
    """
    return _pack_head(record) + record.image


def _pack_head(record: Record) -> bytes:
    """What precedes the image, a multiple of four bytes."""
    head = _HEADER.pack(len(record.labels), record.label, record.id, record.id2) + _float32_bytes(record.labels)
    if MAGIC_BYTES in head and (found := _find_magic(head)) >= 0:
        place = f"label {(found - HEADER_BYTES) // 4}" if found >= HEADER_BYTES else "the header"
        raise RwkvClipError(
            f"the record with id {record.id}, id2 {record.id2} holds the bytes {MAGIC_BYTES.hex()} in {place};"
            " DALI cannot read it",
            "number the records from 0 and label them with token ids",
        )
    return head


def unpack_record(payload: bytes, where: str = "the payload") -> Record:
    """The record that `payload` holds; its labels are an `array("f")`. `where` names the record in errors.

    Raises RwkvClipError where the header is cut off or promises more labels than there are bytes.
    """
    if len(payload) < HEADER_BYTES:
        raise RwkvClipError(f"{where} has {len(payload)} bytes, fewer than an image record's header of {HEADER_BYTES}")
    count, label, id_, id2 = _HEADER.unpack_from(payload)
    image_at = HEADER_BYTES + 4 * count
    if len(payload) < image_at:
        raise RwkvClipError(
            f"{where} promises {count} labels, {4 * count} bytes, but only {len(payload) - HEADER_BYTES} bytes follow"
        )
    labels = array("f")
    labels.frombytes(payload[HEADER_BYTES:image_at])
    if sys.byteorder == "big":
        labels.byteswap()
    return Record(labels, payload[image_at:], id_, id2, label)


def _find_magic(data: bytes, start: int = 0) -> int:
    """Where the next magic word at a multiple of four from `start`, itself one, lies in `data`, or -1."""
    import numpy as np

    # Words compared four bytes at a time take an eighth of the time of a search at every byte.
    found = (
        (np.frombuffer(data, "<u4", (len(data) - start) // 4, start) == MAGIC).argmax() if len(data) >= start + 4 else 0
    )
    at = start + 4 * int(found)
    return at if data[at : at + 4] == MAGIC_BYTES else -1


def record_checksum(labels: Sequence[float], image: bytes) -> int:
    """The CRC-32 of a record's labels and image, all that follows its header, which OUT.sources.tsv has."""
    return zlib.crc32(image, zlib.crc32(_float32_bytes(labels)))


def _float32_bytes(values: Sequence[float]) -> bytes:
    floats = values if isinstance(values, array) and values.typecode == "f" else array("f", values)
    if sys.byteorder == "big":
        floats = floats[:]
        floats.byteswap()
    return floats.tobytes()


@dataclass(frozen=True, slots=True)
class Written:
    """How far a .rec and its .idx are written."""

    count: int
    size_bytes: int
    index_bytes: int


class RecordWriter:
    """Writes a .rec and its .idx as a stream, in constant memory; what exists under the two names is replaced.

    >>> with RecordWriter("pairs.rec") as writer:
    ...     writer.write(pack_record(Record([49406, 320, 2368, 49407], jpeg)))
    0

    Where the `with` block raises, both files are closed as they are and left for the caller. A write that fails (a
    full disk, say) raises RwkvClipError, at the latest from `close`, which also waits until the data is on the disk
    (`sync=False` leaves that to the system).

    With `after`, what an earlier writer's `flush` returned, the two files are kept up to there and continued.
    """

    def __init__(
        self, path: PathLike, index_path: PathLike | None = None, *, sync: bool = True, after: Written | None = None
    ) -> None:
        self.path = Path(path)
        self.index_path = default_index_path(path) if index_path is None else Path(index_path)
        if self.path == self.index_path:
            raise RwkvClipError(f"{path}: records and index need two files", "give the records the suffix .rec")
        after = after or Written(0, 0, 0)
        self.count = after.count
        self.size_bytes = after.size_bytes
        self._sync = sync
        self._failed = False
        self._pending: list[bytes | memoryview] = []
        self._pending_bytes = 0
        self._file = _open_at(self.path, after.size_bytes, buffering=0)
        try:
            self._index = _open_at(self.index_path, after.index_bytes)
        except RwkvClipError:
            self._file.close()
            raise

    def write(self, payload: bytes, key: int | None = None) -> int:
        """Append one record and return its offset in bytes. `key`, by default its ordinal, goes into the index.

        Raises RwkvClipError for 2**29 bytes or more, which the format cannot hold, and where the disk refuses.
        """
        return self._append(b"", payload, key)

    def write_record(self, record: Record) -> int:
        """Append an image record and return its offset: as `write(pack_record(record))`, with less copying."""
        return self._append(_pack_head(record), record.image)

    def _append(self, head: bytes, body: bytes, key: int | None = None) -> int:
        """Append the payload of `head`, a multiple of four bytes without the magic word, and `body`."""
        body = bytes(body)  # no copy of bytes; of what a caller may change before it is written, one
        size_bytes = len(head) + len(body)
        if size_bytes > MAX_PAYLOAD_BYTES:
            raise RwkvClipError(
                f"record {self.count} of {self.path} has {size_bytes:,} bytes; RecordIO holds at most"
                f" {MAX_PAYLOAD_BYTES:,}",
                "rwkvclip pack --max-side 2048 ... makes images smaller",
            )
        self._refuse_after_failure()
        offset = self.size_bytes
        try:
            self._write_parts(head, body)
            self._index.write(b"%d\t%d\n" % (self.count if key is None else key, offset))
        except OSError as error:
            self._fail(error)
        self.count += 1
        return offset

    def _write_parts(self, head: bytes, body: bytes) -> None:
        flag, start = WHOLE, 0
        while (found := _find_magic(body, start)) >= 0:
            self._write_part(FIRST if flag == WHOLE else MIDDLE, head, memoryview(body)[start:found])
            head, flag, start = b"", LAST, found + 4
        self._write_part(flag, head, memoryview(body)[start:] if start else body)

    def _write_part(self, flag: int, head: bytes, body: bytes | memoryview) -> None:
        length = len(head) + len(body)
        padding = -length % 4
        self._pending += (_PART.pack(MAGIC, flag << LENGTH_BITS | length) + head, body, bytes(padding))
        self._pending_bytes += _PART.size + length + padding
        self.size_bytes += _PART.size + length + padding
        if self._pending_bytes >= _BUFFER_BYTES or len(self._pending) >= _MOST_PIECES:
            self._write_pending()

    def _write_pending(self) -> None:
        """Have the system take the pieces from where they are: they are large, and a buffer would copy them first."""
        pieces, left_bytes = self._pending, self._pending_bytes
        self._pending, self._pending_bytes = [], 0
        while left_bytes:
            taken = os.writev(self._file.fileno(), pieces)
            left_bytes -= taken
            while pieces and taken >= len(pieces[0]):
                taken -= len(pieces.pop(0))
            if pieces and taken:
                pieces[0] = memoryview(pieces[0])[taken:]

    def flush(self) -> Written:
        """Wait until both files are on the disk, RwkvClipError where that fails; how far they are written."""
        self._refuse_after_failure()
        try:
            self._write_out()
            return Written(self.count, self.size_bytes, self._index.tell())
        except OSError as error:
            self._fail(error)

    def _write_out(self) -> None:
        self._write_pending()
        for file in (self._file, self._index):
            file.flush()
            if self._sync:
                os.fsync(file.fileno())

    def close(self) -> None:
        """Write out what is buffered and close both files, RwkvClipError where that fails. Again: nothing happens."""
        if self._file.closed:
            return
        try:
            self._refuse_after_failure()
            self._write_out()
        except OSError as error:
            self._fail(error)
        finally:
            self._abandon()

    def _abandon(self) -> None:
        """Close both files whatever happens: an error that matters has been raised already."""
        with contextlib.suppress(OSError):
            self._write_pending()
        for file in (self._file, self._index):
            with contextlib.suppress(OSError):
                file.close()

    def _refuse_after_failure(self) -> None:
        if self._failed:
            raise RwkvClipError(f"{self.path} is incomplete: an earlier write failed")

    def _fail(self, error: OSError) -> NoReturn:
        self._failed = True
        where = f"{self.path} or its index at record {self.count}, byte {self.size_bytes:,}"
        raise cannot_write(where, error, self.path.parent) from error

    def __enter__(self) -> "RecordWriter":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:
            self._abandon()


def _open_at(path: Path, size_bytes: int, buffering: int = _BUFFER_BYTES) -> BinaryIO:
    """Open a file to write on behind its first `size_bytes`; 0 makes it anew."""
    try:
        if not size_bytes:
            return open(path, "wb", buffering=buffering)
        with contextlib.ExitStack() as opened:
            file = opened.enter_context(open(path, "r+b", buffering=buffering))
            file.truncate(size_bytes)
            file.seek(size_bytes)
            opened.pop_all()  # the writer closes it
        return file
    except OSError as error:
        raise cannot_write(path, error, path.parent) from error


class RecordReader:
    """The payloads of a .rec, by ordinal in file order or streamed; threads may share one reader.

    >>> with RecordReader("pairs.rec") as reader:
    ...     captions = [unpack_record(payload).labels for payload in reader]

    The offsets come from `index_path`, or from the .idx beside the file, or, where there is none, from walking the
    file. An index may name a part of the records. `offsets` holds the first byte of each record, ascending.
    Every kind of damage raises RwkvClipError with path, record and byte: in the index at once, in a record when it is
    read (at once where the file is walked).
    """

    def __init__(self, path: PathLike, index_path: PathLike | None = None) -> None:
        self.path = Path(path)
        self._file = open_to_read(self.path)
        try:
            status = os.fstat(self._file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise RwkvClipError(f"{path} is no regular file; records are read by their place in it")
            self.size_bytes = status.st_size
            beside = default_index_path(path)
            if index_path is None and not (beside != self.path and beside.exists()):
                self.index_path: Path | None = None
                self.offsets = array("Q", self._walk())
            else:
                self.index_path = Path(index_path) if index_path is not None else beside
                self.offsets = read_index(self.index_path)
                self._check_index(self.index_path)
        except BaseException:
            self._file.close()
            raise

    def __len__(self) -> int:
        return len(self.offsets)

    def __getitem__(self, ordinal: int) -> bytes:
        """The payload of one record; negative ordinals count from the end."""
        count = len(self.offsets)
        if not -count <= ordinal < count:
            raise IndexError(f"{self.path} has {count} records; there is no record {ordinal}")
        ordinal %= count
        start = self.offsets[ordinal]
        end = self.offsets[ordinal + 1] if ordinal + 1 < count else self.size_bytes
        # Nearly always the whole record, in one system call.
        window = self._pread(min(end - start, _BUFFER_BYTES), start)
        pieces = []
        for data_at, length in self._parts(start, ordinal, window):
            piece = window[data_at - start : data_at - start + length]
            if len(piece) < length:
                piece = self._pread(length, data_at)
                if len(piece) < length:
                    self._damaged(
                        ordinal, start, f"the file has shrunk from {self.size_bytes:,} bytes since it was opened"
                    )
            pieces.append(piece)
        return pieces[0] if len(pieces) == 1 else MAGIC_BYTES.join(pieces)

    def __iter__(self) -> Iterator[bytes]:
        return (self[ordinal] for ordinal in range(len(self.offsets)))

    def record(self, ordinal: int) -> Record:
        """The labels and image of one record; RwkvClipError where it is no image record."""
        return unpack_record(self[ordinal], f"record {ordinal} of {self.path}")

    def close(self) -> None:
        """Close the file; reading on raises ValueError."""
        self._file.close()

    def __enter__(self) -> "RecordReader":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _pread(self, count: int, offset: int) -> bytes:
        """`count` bytes at `offset`, fewer only at the file's end: a single call may return less (at 2 GiB, say)."""
        data = os.pread(self._file.fileno(), count, offset)
        while 0 < len(data) < count:
            more = os.pread(self._file.fileno(), count - len(data), offset + len(data))
            if not more:
                break
            data += more
        return data

    def _walk(self) -> Iterator[int]:
        """The offset of each record, found from the parts' lengths alone."""
        ordinal = offset = 0
        while offset < self.size_bytes:
            yield offset
            for data_at, length in self._parts(offset, ordinal, b""):
                offset = data_at + length + -length % 4
            ordinal += 1

    def _parts(self, record_at: int, ordinal: int, window: bytes) -> Iterator[tuple[int, int]]:
        """Offset and length of the data of each part of the record at `record_at`, whose first bytes are `window`."""
        part_at, number, flag = record_at, 0, FIRST
        while flag in (FIRST, MIDDLE):
            header = window[part_at - record_at : part_at - record_at + _PART.size]
            if len(header) < _PART.size:
                header = self._pread(_PART.size, part_at)
            if len(header) < _PART.size:
                self._damaged(ordinal, record_at, f"only {len(header)} bytes of a part's head at byte {part_at:,}")
            magic, word = _PART.unpack(header)
            flag, length = word >> LENGTH_BITS, word & MAX_PAYLOAD_BYTES
            if magic != MAGIC:
                self._damaged(ordinal, record_at, f"0x{magic:08x} at byte {part_at:,}, not the magic 0x{MAGIC:08x}")
            if flag not in ((MIDDLE, LAST) if number else (WHOLE, FIRST)):
                wanted = "2 (middle) or 3 (last)" if number else "0 (whole) or 1 (first)"
                self._damaged(ordinal, record_at, f"part {number} at byte {part_at:,} has flag {flag}, not {wanted}")
            end = part_at + _PART.size + length + -length % 4
            if end > self.size_bytes:
                cut = f"part {number} would end at byte {end:,}, but the file ends at {self.size_bytes:,}"
                self._damaged(ordinal, record_at, cut)
            yield part_at + _PART.size, length
            part_at, number = end, number + 1

    def _damaged(self, ordinal: int, offset: int, what: str) -> NoReturn:
        raise RwkvClipError(
            f"{self.path}: record {ordinal} at byte {offset:,} is damaged: {what}",
            f"rwkvclip inspect {self.path} --verify",
        )

    def _check_index(self, index_path: Path) -> None:
        if self.size_bytes and not self.offsets:
            raise index_error(index_path, f"lists no record, but {self.path} holds {self.size_bytes:,} bytes")
        outside = bisect_left(self.offsets, self.size_bytes)
        if outside < len(self.offsets):
            raise index_error(
                index_path,
                f"line {outside + 1}: record {outside} would start at byte {self.offsets[outside]:,},"
                f" but {self.path} ends at {self.size_bytes:,}",
            )
