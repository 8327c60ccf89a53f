"""What a check finds: ranks, rows and the verdict, as the ranks make it and the command shows it. Never imports torch.

>>> Report("all_reduce", "nccl", ranks, rows).document()["ok"]
True
"""

import dataclasses
from dataclasses import dataclass
from typing import Any

ELEMENT_BYTES = 4  # float32


@dataclass(frozen=True)
class RankInfo:
    """Where a rank runs and on what software; None where there is no such thing."""

    rank: int
    host: str
    device: str
    driver: str | None
    torch: str
    cuda: str | None
    nccl: str | None


@dataclass(frozen=True)
class Row:
    """One size of the sweep, times over the slowest rank: the mean is what bandwidths are made of.

    Bandwidths in GB/s (1e9 bytes) as nccl-tests defines them; None with one rank, which moves nothing.
    """

    size_bytes: int
    time_us: float
    median_us: float
    algbw: float | None
    busbw: float | None


@dataclass(frozen=True)
class Report:
    """What one run found; `failure` is empty where all is right."""

    op: str
    backend: str
    ranks: tuple[RankInfo, ...]
    rows: tuple[Row, ...]
    failure: str = ""
    hint: str = ""

    def document(self) -> dict[str, Any]:
        """The report as --json prints it."""
        return {"ok": not self.failure, **dataclasses.asdict(self)}


def readable(size_bytes: int) -> str:
    """8 B, 64 KiB, 1 GiB; a size that is no whole number of a unit keeps the smaller one."""
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if size_bytes % unit == 0 and size_bytes:
            return f"{size_bytes // unit} {name}"
    return f"{size_bytes} B"
