"""The values that collectives carry: exact, and different wherever a result could be wrong."""

import pytest
import torch

from rwkvclip_cli.nccl import collectives
from rwkvclip_cli.nccl.collectives import COLLECTIVES, Place, Wrong, fill, first_wrong, position_period, total_weight

CPU = torch.device("cpu")
NAN = float("nan")


def test_fill_by_hand() -> None:
    tensor = torch.empty(5)
    fill(tensor, factor=10, offset=1, period=3)
    assert tensor.tolist() == [20.0, 30.0, 10.0, 20.0, 30.0]


def test_chunks_join_without_a_seam(monkeypatch: pytest.MonkeyPatch) -> None:
    whole, parts = torch.empty(100), torch.empty(100)
    fill(whole, 3, 5, 127)
    monkeypatch.setattr(collectives, "CHUNK", 7)
    fill(parts, 3, 5, 127)
    assert torch.equal(whole, parts)
    parts[93] = 0
    assert first_wrong(parts, 3, 5, 127) == Wrong(93, 0.0, 3.0 * 99)


@pytest.mark.parametrize("got", [NAN, float("inf"), 2.0, -1.0, 1.0000001])
def test_first_wrong_is_exact(got: float) -> None:
    tensor = torch.tensor([1.0, 2.0, 3.0])
    assert first_wrong(tensor, 1, 0, 127) is None
    tensor[0] = got
    wrong = first_wrong(tensor, 1, 0, 127)
    assert wrong is not None
    assert (wrong.index, wrong.expected) == (0, 1.0)


@pytest.mark.parametrize("world_size", [1, 2, 8, 96, 97, 98, 1024, 4096, 100_000])
def test_sums_stay_exact_in_any_order(world_size: int) -> None:
    assert total_weight(world_size) * position_period(world_size) <= 1 << 24


def test_weights_of_few_ranks_differ() -> None:
    assert len({collectives.weight(rank) for rank in range(97)}) == 97


def outputs(op: str, world_size: int, count: int) -> list[torch.Tensor]:
    """What each rank should hold, worked out from all ranks' inputs by plain sums and slices."""
    inputs = [COLLECTIVES[op].start(Place(rank, world_size, CPU), count)[0] for rank in range(world_size)]
    if op == "all_reduce":
        return [torch.stack(inputs).sum(0)] * world_size
    if op == "all_gather":
        return [torch.cat(inputs)] * world_size
    if op == "broadcast":
        return [inputs[0]] * world_size
    return list(torch.stack(inputs).sum(0).chunk(world_size))


@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
@pytest.mark.parametrize("op", sorted(COLLECTIVES))
def test_checks_accept_the_right_result_and_no_other(op: str, world_size: int) -> None:
    count = 130 * world_size
    for rank, right in enumerate(outputs(op, world_size, count)):
        place = Place(rank, world_size, CPU)
        assert COLLECTIVES[op].check(place, count, right) is None
        wrong = right.clone()
        wrong[77] += 1
        found = COLLECTIVES[op].check(place, count, wrong)
        assert found == Wrong(77, float(wrong[77]), float(right[77]))
        shifted = COLLECTIVES[op].check(place, count, right.roll(64))
        assert shifted is not None


@pytest.mark.parametrize("op", sorted(COLLECTIVES))
def test_an_untouched_output_is_wrong(op: str) -> None:
    place = Place(1, 2, CPU)
    _, output = COLLECTIVES[op].start(place, 8)
    assert COLLECTIVES[op].check(place, 8, output) is not None


@pytest.mark.parametrize(
    ("op", "of_two", "of_eight"),
    [("all_reduce", 1.0, 1.75), ("all_gather", 0.5, 0.875), ("reduce_scatter", 0.5, 0.875), ("broadcast", 1.0, 1.0)],
)
def test_bus_factors_are_those_of_nccl_tests(op: str, of_two: float, of_eight: float) -> None:
    assert (COLLECTIVES[op].bus_factor(2), COLLECTIVES[op].bus_factor(8)) == (of_two, of_eight)
