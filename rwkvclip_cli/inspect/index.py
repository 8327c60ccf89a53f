"""The .idx beside a .rec, read whatever is wrong with it, and made anew.

>>> listed = read_listing(Path("pairs.idx"))
>>> listed.offsets[:2], listed.faults.total
(array('Q', [0, 2116]), 0)
"""

import contextlib
import operator
import os
from array import array
from pathlib import Path

import numpy as np

from rwkvclip_cli.console import Progress, RwkvClipError, cannot_write, counted, progress
from rwkvclip_cli.data.record_index import LINE, LINES
from rwkvclip_cli.inspect.faults import Fault, FaultLog
from rwkvclip_cli.inspect.files import Beside, Part
from rwkvclip_cli.inspect.scan import Damage, RecFile

BLOCK_BYTES = 1 << 20
MAX_LINE_BYTES = 4096


class Listing:
    """The offsets that an index lists, rising, with the line of each.

    It holds 8 bytes a record, 16 where the index is shuffled; while it is read, about 30 and, shuffled, 95.

    keys: of the offsets, where they rise as they should but are not 0, 1, 2, ...; else None.
    """

    def __init__(self) -> None:
        self.offsets = array("Q")
        self.faults = FaultLog()
        self.keys: array[int] | None = None
        self._lines: array[int] | None = None  # where they are not 1, 2, 3, ...

    def line(self, position: int) -> int:
        """The line, from 1, of `offsets[position]`."""
        return position + 1 if self._lines is None else self._lines[position]

    def sort(self, lines: "array[int]") -> None:
        """Bring the offsets into rising order, each with its line."""
        if self.faults.total:
            order = np.argsort(np.frombuffer(self.offsets, np.uint64), kind="stable")
            self.offsets = array("Q", np.frombuffer(self.offsets, np.uint64)[order].tobytes())
            self._lines = array("Q", np.frombuffer(lines, np.uint64)[order].tobytes())


def read_listing(path: Path) -> Listing:
    """Read every line that can be read; the faults name the others, and what goes back or comes twice."""
    listing, lines, keys = Listing(), array("Q"), array("Q")
    number = 0
    try:
        with path.open("rb") as file:
            while block := file.read(BLOCK_BYTES) + file.readline(MAX_LINE_BYTES):
                if LINES.fullmatch(block):
                    fields = block.split()
                    keys.extend(map(int, fields[0::2]))
                    listing.offsets.extend(map(int, fields[1::2]))
                    lines.extend(range(number + 1, number + 1 + len(fields) // 2))
                    number += len(fields) // 2
                    continue
                for line in block.removesuffix(b"\n").split(b"\n"):
                    number += 1
                    match = LINE.fullmatch(line)
                    if match is None:
                        message = f"{line[:60]!r} is not a key, a tab and an offset"
                        listing.faults.add(Fault("index-line", message, line=number))
                        continue
                    keys.append(int(match[1]))
                    listing.offsets.append(int(match[2]))
                    lines.append(number)
    except OSError as error:
        listing.faults.add(Fault("index-missing", f"cannot read {path.name}: {error.strerror}"))
    _check_offsets(listing, lines)
    _check_keys(listing, keys, lines)
    # Of rising whole numbers only 0, 1, 2, ... have as many before the last as it says.
    if keys and not listing.faults.total and keys[-1] != len(keys) - 1:
        listing.keys = keys
    listing.sort(lines)
    return listing


def _check_offsets(listing: Listing, lines: "array[int]") -> None:
    offsets = np.frombuffer(listing.offsets, np.uint64)
    for place in np.flatnonzero(offsets[1:] < offsets[:-1]):
        message = f"offset {offsets[place + 1]:,} follows offset {offsets[place]:,}"
        listing.faults.add(Fault("index-order", message, line=lines[place + 1]))


def _check_keys(listing: Listing, keys: "array[int]", lines: "array[int]") -> None:
    # The usual index has ascending keys; only others cost a set.
    if all(map(operator.lt, keys, memoryview(keys)[1:])):
        return
    seen = set[int]()
    last = -1
    for key, line in zip(keys, lines, strict=True):
        if key in seen:
            listing.faults.add(Fault("index-duplicate", f"repeats the key {key}", line=line))
        elif key < last:
            listing.faults.add(Fault("index-order", f"key {key} follows key {last}", line=line))
        seen.add(key)
        last = key


def rebuild_indexes(beside: Beside) -> list[tuple[Path, int]]:
    """Write the .idx of every .rec of a set anew; return their paths, each with its count of records.

    Raises RwkvClipError for the first one that is missing, damaged or of another length than the manifest says, once
    all the others are done.
    """
    done = []
    fault: RwkvClipError | None = None
    with progress(beside.manifest.get("count"), "walking", "records") as bar:
        for part in beside.parts:
            try:
                done.append(_rebuild_index(part, f"rwkvclip inspect {beside.files.name} --salvage OUT.rec", bar))
            except RwkvClipError as error:
                fault = fault or error
    if fault is not None:
        raise fault
    return done


def _rebuild_index(part: Part, salvage: str, bar: Progress) -> tuple[Path, int]:
    """Write one .idx anew, in one step, from the heads of the records.

    Raises RwkvClipError at the first damage: where the next record begins would be a guess.
    """
    rec = part.rec
    if rec is None:
        raise RwkvClipError(f"{part.shard.rec}: no such file, but the manifest lists it", salvage)
    idx = rec.with_suffix(".idx")
    aside = idx.with_name(f".{idx.name}.partial-{os.getpid()}")
    count = 0
    try:
        with RecFile(rec) as file, aside.open("w", encoding="ascii", newline="\n") as index:
            for found in file.walk():
                if isinstance(found, Damage):
                    raise RwkvClipError(
                        f"{rec}: record {count} at byte {found.offset:,} is damaged: {found.message}", salvage
                    )
                index.write(f"{count}\t{found}\n")
                count += 1
                bar.advance()
            if not count:
                raise RwkvClipError(f"{rec} is empty: there is no record to list")
            if part.shard.count not in (None, count):
                raise RwkvClipError(
                    f"{rec} holds {counted(count, 'record')}, its manifest says {part.shard.count:,}", salvage
                )
            index.flush()
            os.fsync(index.fileno())
        os.replace(aside, idx)
    except OSError as error:
        raise cannot_write(idx, error, rec.parent) from error
    finally:
        with contextlib.suppress(OSError):
            aside.unlink(missing_ok=True)
    return idx, count
