"""The order of `pack --shuffle`: every record of a finished set in a place of its own, drawn over the whole set.

>>> shuffle(unshuffled, files, sources, seed=0, after_each=lambda: None)

The records are written in their sources' order first, and then copied in the drawn one: a record is read where the
index says that it lies. So memory holds the places of record and line and the order, 24 bytes a record (40 while the
order is drawn), and the disk both files for a while.
"""

from array import array
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from rwkvclip_cli.console import RwkvClipError, progress
from rwkvclip_cli.data.mixing import mixed
from rwkvclip_cli.data.packing.growing import GrowingFile, cannot_continue
from rwkvclip_cli.data.packing.record_files import RecordFiles
from rwkvclip_cli.data.recordio import Record, RecordReader, record_checksum

TAB = "\t"
NEWLINE = ord("\n")
SCAN_BYTES = 1 << 24


@dataclass(frozen=True)
class Unshuffled:
    """Records in their sources' order, and the lines of OUT.sources.tsv for them."""

    rec: Path
    idx: Path
    sources: Path


def shuffled_order(count: int, seed: int) -> "np.ndarray[tuple[int], np.dtype[np.int64]]":
    """The old places of records in their new order, (count,): from the seed alone, the same on every machine."""
    return np.argsort(mixed(np.arange(count), seed=seed), kind="stable").astype(np.int64)


def shuffle(
    unshuffled: Unshuffled, files: RecordFiles, sources: GrowingFile, seed: int, after_each: Callable[[], object]
) -> None:
    """Append the records that `files` does not hold yet, and their lines, in the seed's order.

    `after_each` is called when both have taken one. Raises RwkvClipError where the disk does not take the copy,
    UsageError where records and index are not those that `unshuffled.sources` has the checksums of.
    """
    starts = _line_starts(unshuffled.sources)
    with (
        _open(unshuffled, len(starts) - 1) as reader,
        unshuffled.sources.open("rb") as lines,
        progress(len(reader), "shuffling", "records", files.count) as bar,
    ):

        def take(old: int) -> tuple[Record, str]:
            lines.seek(int(starts[old]))
            line = lines.readline().decode()
            return _read(reader, old, line), line

        left = shuffled_order(len(reader), seed)[files.count :]
        # A file that was cut off is told at once; other damage where it lies, for to find it all would have to be read.
        if len(left):
            take(len(reader) - 1)
        for new, old in enumerate(map(int, left), files.count):
            record, line = take(old)
            files.write(array("f", record.labels), record.image)
            sources.write(f"{new}\t{line.partition(TAB)[2]}")
            bar.advance(1)
            after_each()


def _open(unshuffled: Unshuffled, count: int) -> RecordReader:
    try:
        reader = RecordReader(unshuffled.rec, unshuffled.idx)
    except RwkvClipError as error:
        raise cannot_continue(unshuffled.idx, error.message) from error
    if len(reader) != count:
        reader.close()
        raise cannot_continue(unshuffled.idx, f"it lists {len(reader):,} of {count:,} records")
    return reader


def _read(reader: RecordReader, ordinal: int, line: str) -> Record:
    """A record, if it is the one that its line has the checksum of."""
    try:
        record = reader.record(ordinal)
    except RwkvClipError as error:
        raise cannot_continue(reader.path, error.message) from error
    if f"{record_checksum(record.labels, record.image):08x}" != line.rstrip("\n").rpartition(TAB)[2]:
        raise cannot_continue(reader.path, f"record {ordinal:,} is not what was written")
    return record


def _line_starts(path: Path) -> "np.ndarray[tuple[int], np.dtype[np.int64]]":
    """Where each line of a text file starts, and where the last one ends: (lines + 1,) byte offsets."""
    text = np.memmap(path, dtype=np.uint8, mode="r")
    ends = [
        first + 1 + np.flatnonzero(text[first : first + SCAN_BYTES] == NEWLINE)
        for first in range(0, len(text), SCAN_BYTES)
    ]
    starts = np.concatenate([np.zeros(1, dtype=np.int64), *ends])
    return starts if starts[-1] == len(text) else np.append(starts, len(text))
