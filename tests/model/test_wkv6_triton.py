"""The WKV6 kernels: interpreted on the CPU, compiled where there is a GPU, against the loop in float64."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rwkvclip_cli.model.wkv6 import wkv6_loop, wkv6_matrix

wkv6_triton = pytest.importorskip("rwkvclip_cli.model.wkv6_triton", reason="needs Triton")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CASES = torch.load(Path(__file__).parent.parent / "golden" / "wkv6_cases.pt", weights_only=True)["cases"]
NAMES = ("y", "r", "k", "v", "w", "u")
WEAK, ANY, STRONG = (-8.0, -1.0), (-8.0, 3.0), (2.5, 6.0)


def random_inputs(
    batch: int, length: int, heads: int, channels: int, raw_decay: tuple[float, float] = WEAK
) -> list[Tensor]:
    """r, k, v, w, u and the gradient of y, float32, on the device."""
    draw = torch.Generator().manual_seed(length + channels)
    shape = (batch, length, heads, channels)
    r, k, v, grad_y = (torch.randn(shape, generator=draw) for _ in range(4))
    w = torch.empty(shape).uniform_(*raw_decay, generator=draw)
    return [x.to(DEVICE) for x in (r, k, v, w, torch.randn(heads, channels, generator=draw), grad_y)]


def run(function: Any, *inputs: Tensor) -> dict[str, Tensor]:
    """The result and the five gradients."""
    leaves = [x.detach().clone().requires_grad_() for x in inputs[:-1]]
    y = function(*leaves)
    y.backward(inputs[-1].to(y.dtype))
    return dict(zip(NAMES, [y.detach(), *(leaf.grad for leaf in leaves)], strict=True))


def relative_l2(value: Tensor, reference: Tensor) -> float:
    assert value.shape == reference.shape
    return ((value.double() - reference).norm() / reference.norm().clamp_min(1e-30)).item()


def off(name: str, value: Tensor, exact: dict[str, Tensor]) -> float:
    """The relative error; that of w, whose gradient is nothing where nothing lies between tokens, beside r's."""
    error = (value.double() - exact[name]).norm() / (exact[name].norm() + 0.1 * exact["r"].norm() * (name == "w"))
    return error.item()


def compare(inputs: list[Tensor]) -> None:
    exact = run(wkv6_loop, *(x.double() for x in inputs))
    for name, value in run(wkv6_triton.wkv6_triton, *inputs).items():
        assert off(name, value, exact) < (5e-6 if name == "w" else 2e-6), name


@pytest.mark.parametrize("raw_decay", [WEAK, ANY, STRONG])
# One chunk, one tile of two and of four, several tiles, and two and more whole tiles between the first and the last.
@pytest.mark.parametrize("length", [1, 2, 16, 17, 32, 33, 49, 64, 65, 77, pytest.param(130, marks=pytest.mark.slow)])
def test_every_kind_of_length(length: int, raw_decay: tuple[float, float]) -> None:
    compare(random_inputs(1, length, 1, 16, raw_decay))


@pytest.mark.parametrize(("heads", "channels"), [(1, 32), (3, 48), (2, 80)])
def test_heads_and_their_channels(heads: int, channels: int) -> None:
    compare(random_inputs(2, 19, heads, channels, ANY))


@pytest.mark.parametrize("case", [case for case in CASES if case["N"] % 16 == 0 and case["T"] <= 77])
def test_recorded_cases(case: dict[str, Any]) -> None:
    shape = (case["B"], case["T"], case["H"], case["N"])
    inputs = [case[name].view(shape).to(DEVICE) for name in "rkvw"] + [case["u"].to(DEVICE), case["gy"].view(shape)]
    found = run(wkv6_triton.wkv6_triton, *inputs[:-1], inputs[-1].to(DEVICE))
    assert (found["y"].cpu() - case["y"].view(shape)).abs().max() < 1e-5 * case["y"].abs().max()
    exact = {name: case[f"g{name}"].view(found[name].shape).double() for name in NAMES[1:]}
    for name in NAMES[1:]:
        assert off(name, found[name].cpu(), exact) < 1e-4, name


def test_one_strong_head_beside_a_weak_one() -> None:
    r, k, v, w, u, grad_y = random_inputs(2, 40, 2, 16, WEAK)
    w[1, :, 1] = 4.0
    compare([r, k, v, w, u, grad_y])


def test_the_base_of_the_decays() -> None:
    r, k, v, w, u, grad_y = random_inputs(2, 40, 2, 16, ANY)
    base = torch.linspace(-1, 1, 32, device=DEVICE).view(2, 16)
    whole = run(wkv6_triton.wkv6_triton, r, k, v, w + base, u, grad_y)
    assert relative_l2(wkv6_triton.forward(r, k, v, w, u, base), whole["y"].double()) < 1e-6
    out = tuple(torch.full_like(r, torch.nan) for _ in range(4))
    *found, grad_base = wkv6_triton.backward(r, k, v, w, u, base, grad_y, out)
    for name, value in zip(NAMES[1:], found, strict=True):
        assert relative_l2(value, whole[name].double()) < 1e-6, name
    assert all(value is given for value, given in zip(found, out, strict=False))
    assert relative_l2(grad_base, whole["w"].double().sum((0, 1))) < 1e-6


def test_an_empty_batch() -> None:
    found = run(wkv6_triton.wkv6_triton, *random_inputs(0, 5, 2, 16))
    assert found["y"].shape == found["w"].shape == (0, 5, 2, 16)
    assert torch.equal(found["u"], torch.zeros(2, 16, device=DEVICE))


@pytest.mark.parametrize("which", range(4))
def test_what_is_no_number_is_not_hidden(which: int) -> None:
    inputs = random_inputs(1, 20, 1, 16)
    inputs[which][0, 3, 0, 5] = torch.nan
    assert wkv6_triton.wkv6_triton(*inputs[:-1]).isnan().any()


def test_repeats_bit_for_bit() -> None:
    inputs = random_inputs(2, 40, 2, 32, ANY)
    first, second = (run(wkv6_triton.wkv6_triton, *inputs) for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in NAMES)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_tensors(dtype: torch.dtype) -> None:
    r, k, v, w, u, grad_y = random_inputs(1, 35, 2, 32, ANY)
    # The result has the type of r, which the model keeps float32 beside float16.
    given = [r.to(torch.float32 if dtype == torch.float16 else dtype), *(x.to(dtype) for x in (k, v, w)), u]
    exact = run(wkv6_loop, *(x.double() for x in given), grad_y.to(given[0].dtype).double())
    for name, value in run(wkv6_triton.wkv6_triton, *given, grad_y.to(given[0].dtype)).items():
        # The interpreter cuts float32 off where it writes bfloat16; rounding errs half as much.
        assert relative_l2(value, exact[name]) < (2e-3 if DEVICE == "cuda" else 4e-3), name


def test_strong_decays_are_not_rounded() -> None:
    """Of large log decays the lower bits show in the factor, and in w's gradient, which is all that is left of it."""
    *inputs, grad_y = (x.bfloat16() for x in random_inputs(1, 40, 1, 16, STRONG))
    inputs[4] = inputs[4].float()
    exact = run(wkv6_loop, *(x.double() for x in inputs), grad_y.double())
    out = tuple(torch.empty_like(x, dtype=torch.float32) for x in inputs[:4])
    wkv6_triton.backward(*inputs, None, grad_y, out)
    for name, value in zip("rkvw", out, strict=True):
        assert relative_l2(value, exact[name]) < 5e-4, name


@pytest.mark.gpu
@pytest.mark.parametrize("raw_decay", [WEAK, ANY, STRONG])
@pytest.mark.parametrize(("length", "heads", "channels"), [(1, 1, 32), (49, 8, 80), (77, 10, 64), (196, 8, 80)])
def test_bfloat16_errs_no_more_than_the_plain_path(
    length: int, heads: int, channels: int, raw_decay: tuple[float, float]
) -> None:
    inputs = [x.bfloat16() for x in random_inputs(4, length, heads, channels, raw_decay)]
    inputs[4] = inputs[4].float()
    exact = run(wkv6_loop, *(x.double() for x in inputs))
    plain = run(wkv6_matrix, *inputs)
    for name, value in run(wkv6_triton.wkv6_triton, *inputs).items():
        assert relative_l2(value, exact[name]) < 1.05 * relative_l2(plain[name], exact[name]) + 1e-5, name
