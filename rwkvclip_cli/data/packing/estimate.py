"""How many inputs sources hold, roughly and quickly: what a progress bar needs to show the time left.

>>> estimate_inputs([("./imgs", "folder")], SourceOptions())
59
"""

import os
import time
from collections.abc import Callable, Sequence

from rwkvclip_cli.data.packing.samples import SourceOptions
from rwkvclip_cli.data.packing.sources import count_inputs, tars_of
from rwkvclip_cli.data.packing.tars import count_samples

BUDGET_S = 2.0
BLOCK_BYTES = 1 << 20


def estimate_inputs(
    sources: Sequence[tuple[str, str]], options: SourceOptions, budget_s: float = BUDGET_S
) -> int | None:
    """The number of inputs of (path, kind) pairs: exact for folders, parquet and plain tars, near for other tables.

    Files too large to count in `budget_s` seconds are extrapolated by their bytes. None where even that cannot be said:
    folders and parquet of that size, compressed tars.
    """
    deadline = time.monotonic() + budget_s

    def enough() -> bool:
        return time.monotonic() > deadline

    total = 0
    for path, kind in sources:
        try:
            estimate = ESTIMATORS.get(kind)
            count = estimate(path, enough) if estimate else count_inputs([(path, kind)], options, enough)
        except OSError:
            return None
        if count is None:
            return None
        total += count
    return total


def _estimate_rows(path: str, enough: Callable[[], bool]) -> int:
    """Lines, which are rows but for line ends inside quotes, less the header."""
    size_bytes = os.stat(path).st_size
    lines = read_bytes = 0
    last = b"\n"
    with open(path, "rb") as file:
        while block := file.read(BLOCK_BYTES):
            lines += block.count(b"\n")
            read_bytes += len(block)
            last = block[-1:]
            if enough():
                return round(lines * size_bytes / read_bytes)
    header = 0 if path.lower().endswith(".jsonl") else 1
    return max(0, lines + (last != b"\n") - header)


def _estimate_tars(path: str, enough: Callable[[], bool]) -> int | None:
    tars = tars_of(path)
    total_bytes = sum(os.stat(tar).st_size for tar in tars)
    count = read_bytes = 0
    for tar in tars:
        counted = count_samples(tar, enough)
        if counted is None:
            return None
        count += counted[0]
        read_bytes += counted[1]
        if enough():
            return round(count * total_bytes / read_bytes) if read_bytes else None
    return count


# Of the kinds whose inputs `sources` counts in no way but by reading them.
ESTIMATORS: dict[str, Callable[[str, Callable[[], bool]], int | None]] = {
    "table": _estimate_rows,
    "webdataset": _estimate_tars,
}
