"""How many inputs sources hold, roughly and quickly: what a progress bar needs to show the time left.

>>> estimate_inputs([("./imgs", "folder")], SourceOptions())
59
"""

import os
import time
from collections.abc import Callable, Sequence

from rwkvclip_cli.data.packing.folders import read_folder
from rwkvclip_cli.data.packing.parquet import count_rows, parquet_files
from rwkvclip_cli.data.packing.samples import Ignored, SourceOptions
from rwkvclip_cli.data.packing.sources import tars_of
from rwkvclip_cli.data.packing.tars import count_samples

BUDGET_S = 2.0
BLOCK_BYTES = 1 << 20


def estimate_inputs(
    sources: Sequence[tuple[str, str]], options: SourceOptions, budget_s: float = BUDGET_S
) -> int | None:
    """The number of inputs of (path, kind) pairs: exact for folders, parquet and plain tars, near for other tables.

    Files too large to count in `budget_s` seconds are extrapolated by their bytes. None where even that cannot be said:
    folders of that size, compressed tars, kinds without a counter.
    """
    deadline = time.monotonic() + budget_s
    total = 0
    for path, kind in sources:
        try:
            count = COUNTERS[kind](path, options, deadline) if kind in COUNTERS else None
        except OSError:
            return None
        if count is None:
            return None
        total += count
    return total


def _count_folder(path: str, options: SourceOptions, deadline: float) -> int | None:
    count = 0
    for item in read_folder(path, options):
        count += not isinstance(item, Ignored)
        if count % 1024 == 0 and time.monotonic() > deadline:
            return None
    return count


def _count_rows(path: str, options: SourceOptions, deadline: float) -> int:
    """Lines, which are rows but for line ends inside quotes, less the header."""
    size_bytes = os.stat(path).st_size
    lines = read_bytes = 0
    last = b"\n"
    with open(path, "rb") as file:
        while block := file.read(BLOCK_BYTES):
            lines += block.count(b"\n")
            read_bytes += len(block)
            last = block[-1:]
            if time.monotonic() > deadline:
                return round(lines * size_bytes / read_bytes)
    header = 0 if path.lower().endswith(".jsonl") else 1
    return max(0, lines + (last != b"\n") - header)


def _count_tars(path: str, options: SourceOptions, deadline: float) -> int | None:
    tars = tars_of(path)
    total_bytes = sum(os.stat(tar).st_size for tar in tars)
    count = read_bytes = 0
    for tar in tars:
        counted = count_samples(tar, lambda: time.monotonic() > deadline)
        if counted is None:
            return None
        count += counted[0]
        read_bytes += counted[1]
        if time.monotonic() > deadline:
            return round(count * total_bytes / read_bytes) if read_bytes else None
    return count


def _count_parquets(path: str, options: SourceOptions, deadline: float) -> int | None:
    count = 0
    for file in parquet_files(path):
        count += count_rows(file)
        if time.monotonic() > deadline:
            return None
    return count


COUNTERS: dict[str, Callable[[str, SourceOptions, float], int | None]] = {
    "folder": _count_folder,
    "imagefolder": _count_folder,
    "table": _count_rows,
    "parquet": _count_parquets,
    "webdataset": _count_tars,
}
