"""WKV6: every implementation against recorded cases, against the loop in float64, and at its edges."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from rwkvclip_cli.model.wkv6 import IMPLEMENTATIONS, Implementation, wkv6, wkv6_loop
from rwkvclip_cli.model.wkv6_matrix import seams, wkv6_matrix

CASES = torch.load(Path(__file__).parent.parent / "golden" / "wkv6_cases.pt", weights_only=True)["cases"]
NAMES = ("r", "k", "v", "w", "u")
# Kernels take float32 and 16-bit tensors on a GPU; test_wkv6_triton.py has them, interpreted, on the CPU.
PLAIN = [row for row in IMPLEMENTATIONS if row.takes(torch.zeros(1, 1, 1, 16))]
every_plain_implementation = pytest.mark.parametrize("row", PLAIN, ids=[row.name for row in PLAIN])
every_implementation = pytest.mark.parametrize("row", IMPLEMENTATIONS, ids=[row.name for row in IMPLEMENTATIONS])


def random_inputs(
    batch: int, length: int, heads: int, channels: int, raw_decay: tuple[float, float] = (-6.0, -1.0), seed: int = 0
) -> list[Tensor]:
    """r, k, v, w, u in float64, as float32 can hold them."""
    draw = torch.Generator().manual_seed(seed)
    shape = (batch, length, heads, channels)
    r, k, v = (torch.randn(shape, generator=draw) for _ in range(3))
    w = torch.empty(shape).uniform_(*raw_decay, generator=draw)
    u = torch.randn(heads, channels, generator=draw)
    return [x.double() for x in (r, k, v, w, u)]


def run(function: Any, inputs: list[Tensor], grad_y: Tensor) -> list[Tensor]:
    """The result and the five gradients."""
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    y = function(*leaves)
    y.backward(grad_y.to(y.dtype))
    return [y.detach(), *(leaf.grad for leaf in leaves)]


def relative_l2(value: Tensor, reference: Tensor) -> float:
    assert value.shape == reference.shape
    return ((value.double() - reference).norm() / reference.norm().clamp_min(1e-30)).item()


@every_plain_implementation
@pytest.mark.parametrize("case", CASES, ids=[f"T{case['T']}H{case['H']}N{case['N']}" for case in CASES])
def test_recorded_cases(case: dict[str, Any], row: Implementation) -> None:
    shape = (case["B"], case["T"], case["H"], case["N"])
    inputs = [case[name].view(shape) for name in "rkvw"] + [case["u"]]
    y, *gradients = run(row.function, inputs, case["gy"].view(shape))
    assert (y - case["y"].view(shape)).abs().max() < 1e-5 * case["y"].abs().max()
    for name, gradient in zip(NAMES, gradients, strict=True):
        assert relative_l2(gradient, case[f"g{name}"].view(gradient.shape).double()) < 1e-4, name


def test_two_tokens_by_hand() -> None:
    # One channel: nothing lies between the tokens, so no decay counts, and u counts once for each token itself.
    r, k, v = (torch.tensor(values).view(1, 2, 1, 1) for values in ([2.0, 3.0], [5.0, 7.0], [11.0, 13.0]))
    w, u = torch.tensor([0.3, -0.4]).view(1, 2, 1, 1), torch.tensor([[0.5]])
    y = wkv6(r, k, v, w, u)
    assert y.flatten().tolist() == [2 * 0.5 * 5 * 11 + 2 * 7 * 13, 3 * 0.5 * 7 * 13 + 3 * 5 * 11]


def test_only_decays_strictly_between_count() -> None:
    # Only token 0 sends and only tokens 1, 2 and 3 listen: 1 hears it whole, 2 through d1, 3 through d1 d2.
    decay = torch.tensor([0.9, 0.5, 0.25, 0.8], dtype=torch.float64)
    w = torch.log(-torch.log(decay)).view(1, 4, 1, 1)
    k = torch.tensor([1.0, 0, 0, 0], dtype=torch.float64).view(1, 4, 1, 1)
    one = torch.ones_like(k)
    y = wkv6(one, k, one, w, torch.zeros(1, 1, dtype=torch.float64))
    assert y.flatten().tolist() == pytest.approx([0, 1, 0.5, 0.125])


@pytest.mark.parametrize("length", [1, 2, 3, 15, 16, 17, 33, 49, 77, 197])
@pytest.mark.parametrize(("heads", "channels"), [(1, 80), (2, 8)])
@pytest.mark.parametrize("row", [row for row in PLAIN if row.name != "loop"], ids=lambda row: row.name)
def test_odd_sizes_against_the_loop(length: int, heads: int, channels: int, row: Implementation) -> None:
    inputs = random_inputs(2, length, heads, channels)
    grad_y = torch.randn_like(inputs[0])
    expected = run(wkv6_loop, inputs, grad_y)
    for value, reference in zip(run(row.function, inputs, grad_y), expected, strict=True):
        assert relative_l2(value, reference) < 1e-12
    for value, reference in zip(run(row.function, [x.float() for x in inputs], grad_y), expected, strict=True):
        assert value.dtype == torch.float32
        assert relative_l2(value, reference) < 2e-6


@pytest.mark.slow
@pytest.mark.parametrize("length", [*range(1, 40), 64, 65, 127, 128, 129])
def test_all_small_sizes_against_the_loop(length: int) -> None:
    inputs = random_inputs(1, length, 3, 4)
    grad_y = torch.randn_like(inputs[0])
    expected = run(wkv6_loop, inputs, grad_y)
    for value, reference in zip(run(wkv6_matrix, inputs, grad_y), expected, strict=True):
        assert relative_l2(value, reference) < 1e-12


@every_plain_implementation
def test_gradients_by_finite_differences(row: Implementation) -> None:
    inputs = [x.requires_grad_() for x in random_inputs(2, 5, 2, 3, raw_decay=(-2.0, 1.0))]
    assert torch.autograd.gradcheck(row.function, inputs)


@every_plain_implementation
@pytest.mark.parametrize("raw_decay", [(-8.0, 3.0), (2.5, 3.0), (-8.0, -7.5)])
def test_extreme_decays(raw_decay: tuple[float, float], row: Implementation) -> None:
    inputs = random_inputs(1, 77, 2, 16, raw_decay)
    grad_y = torch.randn_like(inputs[0])
    expected = run(wkv6_loop, inputs, grad_y)
    found = run(row.function, [x.float() for x in inputs], grad_y)
    for value, reference in zip(found, expected, strict=True):
        assert value.isfinite().all()
        assert relative_l2(value, reference) < 1e-5


def test_decays_beyond_floating_point() -> None:
    # exp(w) is infinite or zero here: tokens then hear their neighbours alone, or everyone in full.
    r, k, v, _, u = (x.float() for x in random_inputs(1, 20, 1, 4))
    for raw, neighbours_alone in ((200.0, True), (-200.0, False)):
        y, *gradients = run(wkv6_matrix, [r, k, v, torch.full_like(r, raw), u], torch.ones_like(r))
        scores = torch.einsum("btn,bsn->bts", r[:, :, 0], k[:, :, 0])
        distance = (torch.arange(20)[:, None] - torch.arange(20)).abs()
        scores = scores * ((distance == 1) if neighbours_alone else (distance > 0))
        own = (r * u * k).sum(-1, keepdim=True) * v
        torch.testing.assert_close(y[:, :, 0], scores @ v[:, :, 0] + own[:, :, 0])
        assert all(gradient.isfinite().all() for gradient in gradients)


@every_plain_implementation
def test_the_ends_decays_count_for_nothing(row: Implementation) -> None:
    inputs = [x.float() for x in random_inputs(2, 21, 2, 8)]
    grad_w = run(row.function, inputs, torch.randn_like(inputs[0]))[4]
    assert not grad_w[:, 0].any()
    assert not grad_w[:, -1].any()
    assert grad_w[:, 1:-1].all()


@every_plain_implementation
def test_value_gradient_is_the_forward_with_r_and_k_exchanged(row: Implementation) -> None:
    r, k, v, w, u = random_inputs(2, 21, 2, 8)
    grad_y = torch.randn_like(v)
    grad_v = run(row.function, [r, k, v, w, u], grad_y)[3]
    torch.testing.assert_close(grad_v, row.function(k, r, grad_y, w, u))


@every_plain_implementation
def test_bfloat16_inputs_are_summed_in_float32(row: Implementation) -> None:
    r, k, v, w, u = random_inputs(2, 77, 2, 16)
    r, k, v = (x.bfloat16() for x in (r, k, v))
    grad_y = torch.randn(r.shape).bfloat16()
    found = run(row.function, [r, k, v, w.float(), u.float()], grad_y)
    expected = run(wkv6_loop, [x.double() for x in (r, k, v, w, u)], grad_y)
    assert [x.dtype for x in found] == [torch.bfloat16] * 4 + [torch.float32] * 2
    for value, reference in zip(found[:4], expected[:4], strict=True):
        assert relative_l2(value, reference) < 2**-8  # one rounding to bfloat16, no more
    for value, reference in zip(found[4:], expected[4:], strict=True):
        assert relative_l2(value, reference) < 1e-5


def test_autocast_leaves_the_sums_alone() -> None:
    inputs = [x.float() for x in random_inputs(2, 40, 2, 16)]
    grad_y = torch.randn_like(inputs[0])
    plain = run(wkv6, inputs, grad_y)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = run(wkv6, inputs, grad_y)
    assert all(torch.equal(a, b) for a, b in zip(plain, inside, strict=True))


@every_plain_implementation
def test_empty_batch(row: Implementation) -> None:
    inputs = random_inputs(0, 7, 2, 4)
    y, *gradients = run(row.function, inputs, torch.empty(0, 7, 2, 4))
    assert y.shape == (0, 7, 2, 4)
    assert [g.shape for g in gradients] == [x.shape for x in inputs]
    assert not gradients[4].any()


@every_plain_implementation
def test_strided_inputs_and_gradients(row: Implementation) -> None:
    inputs = random_inputs(3, 10, 2, 4)
    grad_y = torch.randn_like(inputs[0])
    strided = [x.transpose(0, 1).contiguous().transpose(0, 1) for x in inputs[:4]] + inputs[4:]
    assert not strided[0].is_contiguous()
    for a, b in zip(
        run(row.function, inputs, grad_y), run(row.function, strided, grad_y.mT.contiguous().mT), strict=True
    ):
        torch.testing.assert_close(a, b)


@every_plain_implementation
def test_repeats_bit_for_bit(row: Implementation) -> None:
    inputs = [x.float() for x in random_inputs(2, 33, 2, 8)]
    grad_y = torch.randn_like(inputs[0])
    first, second = run(row.function, inputs, grad_y), run(row.function, inputs, grad_y)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


class LargestTensor(TorchDispatchMode):
    """Notes the size of the largest tensor that any operation makes."""

    numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else (out,):
            if isinstance(tensor, Tensor):
                self.numel = max(self.numel, tensor.untyped_storage().nbytes() // tensor.element_size())
        return out


def test_memory_stays_far_below_all_pairs_of_all_channels() -> None:
    inputs = [x.float() for x in random_inputs(1, 128, 1, 64)]
    with LargestTensor() as seen:
        run(wkv6_matrix, inputs, torch.ones_like(inputs[0]))
    assert 128 * 128 <= seen.numel <= 128 * 128 * 64 // 32


def test_seams_part_every_pair_once() -> None:
    for length in range(1, 70):
        parted = torch.zeros(length, length, dtype=torch.long)
        for left, right, start, pairs in seams(length):
            for pair in range(pairs):
                first = start + pair * (left + right)
                assert first + left + right <= length
                parted[first : first + left, first + left : first + left + right] += 1
        assert torch.equal(parted, torch.ones(length, length, dtype=torch.long).triu(1))


def test_the_first_row_that_takes_the_input_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    only_floats = Implementation("half", lambda r, k, v, w, u: r + 1, takes=lambda r: r.dtype == torch.float32)
    monkeypatch.setattr("rwkvclip_cli.model.wkv6.IMPLEMENTATIONS", (only_floats, *IMPLEMENTATIONS))
    inputs = random_inputs(1, 3, 1, 2)
    torch.testing.assert_close(wkv6(*inputs), wkv6_loop(*inputs))
    assert torch.equal(wkv6(*(x.float() for x in inputs)), inputs[0].float() + 1)


def test_shapes_that_do_not_belong_together() -> None:
    r, k, v, w, u = random_inputs(1, 3, 2, 4)
    with pytest.raises(ValueError, match=r"T >= 1.*r \(1, 0, 2, 4\)"):
        wkv6(r[:, :0], k[:, :0], v[:, :0], w[:, :0], u)
    with pytest.raises(ValueError, match=r"u \(8,\)"):
        wkv6(r, k, v, w, u.flatten())


def test_compiled_as_one_operator() -> None:
    inputs = [x.float() for x in random_inputs(2, 20, 2, 8)]
    grad_y = torch.randn_like(inputs[0])
    compiled = torch.compile(wkv6, backend="aot_eager", fullgraph=True)
    for value, reference in zip(run(compiled, inputs, grad_y), run(wkv6, inputs, grad_y), strict=True):
        assert torch.equal(value, reference)


@pytest.mark.gpu
@pytest.mark.parametrize("length", [1, 49, 77])
@every_implementation
def test_on_a_gpu(length: int, row: Implementation) -> None:
    inputs = random_inputs(2, length, 2, 80)
    grad_y = torch.randn_like(inputs[0])
    expected = run(wkv6_loop, inputs, grad_y)
    if row.takes(inputs[0].float().cuda()):
        found = run(row.function, [x.float().cuda() for x in inputs], grad_y.cuda())
        for value, reference in zip(found, expected, strict=True):
            assert relative_l2(value.cpu(), reference) < 1e-5
