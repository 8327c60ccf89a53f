"""Collectives with values that show a wrong result: dependent on rank and position, sums exact in float32.

>>> COLLECTIVES["all_reduce"].bus_factor(8)
1.75

Legend: n ranks; count float32 elements of the whole message, all ranks' parts together, as nccl-tests counts.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist

from rwkvclip_cli.collective import gather_into, reduce_scatter_into

FLOAT32_EXACT = 1 << 24  # all whole numbers up to here are float32 numbers
RANK_WEIGHTS = 97  # primes: parts that change places by a power of two show
POSITION_PERIOD = 127
CHUNK = 1 << 24  # elements filled or compared at once, so that checking needs little memory


@dataclass(frozen=True)
class Place:
    """This rank among n, and its device."""

    rank: int
    world_size: int
    device: torch.device


@dataclass(frozen=True)
class Wrong:
    """The first wrong element of a rank's output."""

    index: int
    got: float
    expected: float


@dataclass(frozen=True)
class Collective:
    """An operation: buffers for `count` elements, the call, and the bus factor of n ranks.

    `start(place, count)` gives (input, output), with the rank's values in the input; `check(place, count,
    output)` finds the first wrong element. `run(input, output)` is what is timed.
    """

    start: Callable[[Place, int], tuple[torch.Tensor, torch.Tensor]]
    run: Callable[[torch.Tensor, torch.Tensor], object]
    check: Callable[[Place, int, torch.Tensor], Wrong | None]
    bus_factor: Callable[[int], float]


def weight(rank: int) -> int:
    """What a rank multiplies its values by."""
    return 1 + rank % RANK_WEIGHTS


def total_weight(world_size: int) -> int:
    """The sum of all ranks' weights: what a sum over ranks multiplies the positions' values by."""
    return sum(weight(rank) for rank in range(world_size))


def position_period(world_size: int) -> int:
    """After how many elements the values repeat, short enough that sums over the ranks stay exact."""
    return max(1, min(POSITION_PERIOD, FLOAT32_EXACT // total_weight(world_size)))


def fill(tensor: torch.Tensor, factor: int, offset: int, period: int) -> None:
    """Set element i of a flat float32 tensor to factor * (1 + (offset + i) mod period)."""
    for start in range(0, tensor.numel(), CHUNK):
        part = tensor[start : start + CHUNK]
        part.copy_(_values(part, factor, offset + start, period))


def first_wrong(tensor: torch.Tensor, factor: int, offset: int, period: int) -> Wrong | None:
    """The first element that is not what `fill` would set, by exact comparison (NaN is wrong)."""
    for start in range(0, tensor.numel(), CHUNK):
        part = tensor[start : start + CHUNK]
        expected = _values(part, factor, offset + start, period)
        wrong = (part != expected).nonzero()
        if wrong.numel():
            index = int(wrong[0, 0])
            return Wrong(start + index, float(part[index]), float(expected[index]))
    return None


def _values(part: torch.Tensor, factor: int, offset: int, period: int) -> torch.Tensor:
    positions = torch.arange(offset, offset + part.numel(), device=part.device)
    return ((positions % period + 1) * factor).to(torch.float32)


def _empty(place: Place, count: int) -> torch.Tensor:
    # NaN shows where a collective writes nothing.
    return torch.full((count,), float("nan"), device=place.device)


def _start_all_reduce(place: Place, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    both = _empty(place, count)
    fill(both, weight(place.rank), 0, position_period(place.world_size))
    return both, both


def _check_all_reduce(place: Place, count: int, output: torch.Tensor) -> Wrong | None:
    return first_wrong(output, total_weight(place.world_size), 0, position_period(place.world_size))


def _start_all_gather(place: Place, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    part = _empty(place, count // place.world_size)
    fill(part, weight(place.rank), place.rank * part.numel(), position_period(place.world_size))
    return part, _empty(place, count)


def _check_all_gather(place: Place, count: int, output: torch.Tensor) -> Wrong | None:
    part = count // place.world_size
    for rank in range(place.world_size):
        start = rank * part
        wrong = first_wrong(output[start : start + part], weight(rank), start, position_period(place.world_size))
        if wrong is not None:
            return Wrong(start + wrong.index, wrong.got, wrong.expected)
    return None


def _start_reduce_scatter(place: Place, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    whole = _empty(place, count)
    fill(whole, weight(place.rank), 0, position_period(place.world_size))
    return whole, _empty(place, count // place.world_size)


def _check_reduce_scatter(place: Place, count: int, output: torch.Tensor) -> Wrong | None:
    offset = place.rank * output.numel()
    return first_wrong(output, total_weight(place.world_size), offset, position_period(place.world_size))


def _start_broadcast(place: Place, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    both = _empty(place, count)
    if place.rank == 0:
        fill(both, weight(0), 0, position_period(place.world_size))
    return both, both


def _check_broadcast(place: Place, count: int, output: torch.Tensor) -> Wrong | None:
    return first_wrong(output, weight(0), 0, position_period(place.world_size))


# Bus factors: nccl-tests, doc/PERFORMANCE.md.
COLLECTIVES: Mapping[str, Collective] = {
    "all_reduce": Collective(
        _start_all_reduce, lambda _, output: dist.all_reduce(output), _check_all_reduce, lambda n: 2 * (n - 1) / n
    ),
    "all_gather": Collective(
        _start_all_gather,
        lambda part, output: gather_into(output, part),
        _check_all_gather,
        lambda n: (n - 1) / n,
    ),
    "reduce_scatter": Collective(
        _start_reduce_scatter,
        lambda whole, output: reduce_scatter_into(output, whole),
        _check_reduce_scatter,
        lambda n: (n - 1) / n,
    ),
    "broadcast": Collective(
        _start_broadcast, lambda _, output: dist.broadcast(output, src=0), _check_broadcast, lambda n: 1.0
    ),
}
