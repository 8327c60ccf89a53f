"""The order of `pack --shuffle`: every record of a finished set in a place of its own, drawn over the whole set.

>>> shuffle(unshuffled, files, sources, seed=0, after_each=lambda: None)

The records are written in their sources' order first, and then copied in the drawn one: a record is read where the
index says that it lies, so memory holds the order alone (16 bytes a record) and the disk both files for a while.
"""

from array import array
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from rwkvclip_cli.console import progress
from rwkvclip_cli.data.mixing import mixed
from rwkvclip_cli.data.packed import line_starts
from rwkvclip_cli.data.packing.output import TextFile
from rwkvclip_cli.data.packing.record_files import RecordFiles
from rwkvclip_cli.data.recordio import RecordReader

TAB = "\t"


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
    unshuffled: Unshuffled, files: RecordFiles, sources: TextFile, seed: int, after_each: Callable[[], object]
) -> None:
    """Append the records that `files` does not hold yet, and their lines, in the seed's order.

    `after_each` is called when both have taken one. Raises RwkvClipError where the disk does not take the copy.
    """
    starts = line_starts(unshuffled.sources)
    with (
        RecordReader(unshuffled.rec, unshuffled.idx) as reader,
        unshuffled.sources.open("rb") as lines,
        progress(len(reader), "shuffling", "records", files.count) as bar,
    ):
        order = shuffled_order(len(reader), seed)
        for new, old in enumerate(map(int, order[files.count :]), files.count):
            record = reader.record(old)
            files.write(array("f", record.labels), record.image)
            lines.seek(int(starts[old]))
            line = lines.readline().decode()
            sources.write(f"{new}\t{line.partition(TAB)[2]}")
            bar.advance(1)
            after_each()
