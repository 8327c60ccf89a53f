"""The order of `pack --shuffle`: every record of a finished set in a place of its own, drawn over the whole set.

>>> shuffle(output, "native", seed=0)

The records are written in their sources' order first, and then copied in the drawn one: a record is read where the
index says that it lies, so memory holds the order alone (16 bytes a record) and the disk both files for a while.
"""

import os
from array import array

import numpy as np

from rwkvclip_cli.console import RwkvClipError, progress
from rwkvclip_cli.data.mixing import mixed
from rwkvclip_cli.data.packed import line_starts
from rwkvclip_cli.data.packing.output import OutputSet
from rwkvclip_cli.data.packing.writers import open_writer
from rwkvclip_cli.data.recordio import RecordReader

SHUFFLED = ("rec", "idx", "sources")


def shuffled_order(count: int, seed: int) -> "np.ndarray[tuple[int], np.dtype[np.int64]]":
    """The old places of records in their new order, (count,): from the seed alone, the same on every machine."""
    return np.argsort(mixed(np.arange(count), seed=seed), kind="stable").astype(np.int64)


def shuffle(output: OutputSet, writer: str, seed: int) -> None:
    """Put the records that `output` has taken, and their lines in OUT.sources.tsv, in the seed's order.

    Raises RwkvClipError where the disk does not take the copy.
    """
    output.sources.close()
    partial = {part: output.partial[part] for part in SHUFFLED}
    made = {part: path.with_name(f".{path.name}.shuffled") for part, path in partial.items()}
    try:
        starts = line_starts(partial["sources"])
        with (
            RecordReader(partial["rec"], partial["idx"]) as reader,
            open_writer(writer, made["rec"], made["idx"]) as copy,
            partial["sources"].open("rb") as lines,
            made["sources"].open("wb") as sources,
            progress(len(reader), "shuffling", "records") as bar,
        ):
            for new, old in enumerate(map(int, shuffled_order(len(reader), seed))):
                record = reader.record(old)
                copy.write(array("f", record.labels), record.image)
                lines.seek(int(starts[old]))
                sources.write(b"%d\t%s" % (new, lines.readline().partition(b"\t")[2]))
                bar.advance(1)
            sources.flush()
            os.fsync(sources.fileno())
        for part in SHUFFLED:
            os.replace(made[part], partial[part])
    except OSError as error:
        folder = output.final["rec"].absolute().parent
        raise RwkvClipError(f"--shuffle: cannot write the copy: {error.strerror}", f"df -h {folder}") from error
    output.hash_anew()
