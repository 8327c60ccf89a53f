"""The fused block against the plain one: results and all gradients, in every kind of tower and number."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

pytest.importorskip("triton", reason="the fused block is made of Triton kernels")

from rwkvclip_cli.model.blocks import Block, Geometry, Kind
from rwkvclip_cli.model.fused import attention, fused_block, hidden, supported
from rwkvclip_cli.model.shift import Shift
from rwkvclip_cli.model.wkv6 import wkv6_loop

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HEADS = 2
SEED = 7
# kind, grid, tokens
PLACES: dict[str, tuple[Kind, tuple[int, int] | None, int]] = {
    "image": ("image", (2, 3), 6),
    "class token": ("image", (2, 3), 7),
    "column": ("image", (3, 1), 3),
    "text": ("text", None, 5),
    "one token": ("text", None, 1),
    "one patch": ("image", (1, 1), 1),
}
every_place = pytest.mark.parametrize("place", PLACES)


def _wkv_forward(r: Tensor, k: Tensor, v: Tensor, w: Tensor, u: Tensor, base: Tensor) -> Tensor:
    return wkv6_loop(r, k, v, w.float() + base, u)


def _wkv_backward(
    r: Tensor, k: Tensor, v: Tensor, w: Tensor, u: Tensor, base: Tensor, grad_y: Tensor, out: tuple[Tensor, ...]
) -> tuple[Tensor, ...]:
    with torch.enable_grad():
        leaves = [x.detach().float().requires_grad_() for x in (r, k, v, w, u, base)]
        wkv6_loop(*leaves[:3], leaves[3] + leaves[5], leaves[4]).backward(grad_y.float())
    for target, leaf in zip(out, leaves, strict=False):
        target.copy_(leaf.grad)
    return *out, leaves[4].grad, leaves[5].grad


@pytest.fixture
def plain_wkv(monkeypatch: pytest.MonkeyPatch) -> None:
    """WKV6 by its definition, so that what fails is the block."""
    monkeypatch.setattr(attention, "wkv6_triton", SimpleNamespace(forward=_wkv_forward, backward=_wkv_backward))


def make(
    kind: Kind, tokens: int, *, width: int = 64, batch: int = 2, layer: int = 1, drop_path: float = 0.0
) -> tuple[Block, Tensor, Tensor]:
    """A block with no parameter at a special value, a stream, and a gradient, in float32."""
    draw = torch.Generator().manual_seed(SEED)
    hidden = 5 * width if kind == "image" else 7 * width // 2
    # Of a single token the norm takes the size of keys and receptances away, unless epsilon is large.
    eps = 64e-5 if tokens > 1 else 1.0
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        block = Block(Geometry(width, HEADS, hidden, layers=3, norm_eps=eps), layer, kind, drop_path=drop_path)
    with torch.no_grad():
        for name, parameter in block.named_parameters():
            scale = parameter.shape[-1] ** -0.5 if parameter.ndim == 2 and "faaaa" not in name else 0.2
            parameter.add_(torch.randn(parameter.shape, generator=draw), alpha=scale)
    x, grad = torch.randn((2, batch, tokens, width), generator=draw)
    return block.to(DEVICE), x.to(DEVICE), grad.to(DEVICE)


def results(function: Any, block: Block, x: Tensor, grad: Tensor) -> dict[str, Tensor]:
    """The result, and the gradients of the stream and of every parameter."""
    for parameter in block.parameters():
        parameter.grad = None
    x = x.detach().clone().requires_grad_()
    y = function(x)
    y.backward(grad)
    gradients = {name: p.grad.clone() for name, p in block.named_parameters() if p.grad is not None}
    return {"y": y.detach(), "x": x.grad, **gradients}


def fused(block: Block, grid: tuple[int, int] | None, dtype: torch.dtype, uniform: Tensor | None = None) -> Any:
    return lambda x: fused_block(block, x, Shift(HEADS, grid), dtype, uniform)


def plain(block: Block, grid: tuple[int, int] | None, uniform: Tensor | None = None) -> Any:
    def shift(x: Tensor) -> Tensor:
        return Shift(HEADS, grid)(x)

    return lambda x: block(x, shift, uniform)


def exact(
    block: Block, grid: tuple[int, int] | None, x: Tensor, grad: Tensor, uniform: Any = None
) -> dict[str, Tensor]:
    """The plain block's results in float64; the block is float32 again afterwards."""
    reference = results(plain(block.double(), grid, uniform), block, x.double(), grad.double())
    block.float()
    return reference


def relative_l2(value: Tensor, reference: Tensor) -> float:
    assert value.shape == reference.shape
    return ((value.double() - reference).norm() / reference.norm().clamp_min(1e-12)).item()


@every_place
@pytest.mark.usefixtures("plain_wkv")
def test_in_float32_it_is_the_plain_block(place: str) -> None:
    kind, grid, tokens = PLACES[place]
    block, x, grad = make(kind, tokens)
    assert supported(block, x)
    got = results(fused(block, grid, torch.float32), block, x, grad)
    reference = exact(block, grid, x, grad)
    assert got.keys() == reference.keys()
    for name, value in reference.items():
        assert got[name].dtype == torch.float32
        assert relative_l2(got[name], value) < 1e-5, name


@pytest.mark.usefixtures("plain_wkv")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("place", ["class token", "text"])
def test_in_16_bits_no_error_is_larger_than_the_plain_blocks(place: str, dtype: torch.dtype) -> None:
    kind, grid, tokens = PLACES[place]
    block, x, grad = make(kind, tokens, batch=4)
    got = results(fused(block, grid, dtype), block, x, grad)
    with torch.autocast(DEVICE, dtype):
        usual = results(plain(block, grid), block, x, grad)
    errors = {
        name: (relative_l2(got[name], value), relative_l2(usual[name], value))
        for name, value in exact(block, grid, x, grad).items()
    }
    assert all(value.dtype == torch.float32 for value in got.values())
    # The errors of one gradient are as large or small as chance has it, and so alike for all of its numbers.
    assert sum(error for error, _ in errors.values()) < 1.05 * sum(usual for _, usual in errors.values())
    for name, (error, usual_error) in errors.items():
        assert error < (1.1 if name == "y" else 2) * usual_error + 1e-4, name


@pytest.mark.parametrize(("rows", "channels", "columns"), [(3, 64, 48), (130, 80, 272), (0, 32, 32)])
def test_the_squared_relu_as_part_of_the_product(rows: int, channels: int, columns: int) -> None:
    draw = torch.Generator().manual_seed(5)
    shapes = (rows, channels), (columns, channels)
    x, key = (torch.randn(shape, generator=draw).to(DEVICE, torch.bfloat16) for shape in shapes)
    relu = (x.double() @ key.double().t()).relu()
    squared = hidden.squared_relu_product(x, key)
    assert relative_l2(squared, relu.square()) < 2**-8


@pytest.mark.usefixtures("plain_wkv")
def test_each_branch_is_left_out_where_the_draw_says() -> None:
    block, x, grad = make("image", 6, batch=3, drop_path=0.5)
    # Sample 0 keeps the first branch alone, sample 1 the second, sample 2 neither.
    uniform = torch.tensor([[0.5, 0.4, 0.1], [0.2, 0.9, 0.3]], device=DEVICE)
    got = results(fused(block, (2, 3), torch.float32, uniform), block, x, grad)
    for name, value in exact(block, (2, 3), x, grad, uniform).items():
        assert relative_l2(got[name], value) < 1e-5, name
    assert torch.equal(got["y"][2], x[2])
    assert torch.equal(got["x"][2], grad[2])


@pytest.mark.usefixtures("plain_wkv")
def test_the_first_layer_has_a_norm_of_its_own() -> None:
    block, x, grad = make("text", 5, layer=0)
    got = results(fused(block, None, torch.float32), block, x, grad)
    for name, value in exact(block, None, x, grad).items():
        assert relative_l2(got[name], value) < 1e-5, name


@pytest.mark.usefixtures("plain_wkv")
@pytest.mark.parametrize("width", [96, 160, 256])
def test_widths_that_fill_tiles_or_do_not(width: int) -> None:
    block, x, grad = make("image", 6, width=width)
    assert supported(block, x)
    got = results(fused(block, (3, 2), torch.float32), block, x, grad)
    for name, value in exact(block, (3, 2), x, grad).items():
        assert relative_l2(got[name], value) < 1e-5, name


@pytest.mark.usefixtures("plain_wkv")
def test_rows_beyond_one_tile_and_one_program() -> None:
    # 66 rows: no multiple of any tile, and more than one tile of each kernel.
    block, x, grad = make("text", 33, width=16)
    got = results(fused(block, None, torch.float32), block, x, grad)
    for name, value in exact(block, None, x, grad).items():
        assert relative_l2(got[name], value) < 2e-5, name


@pytest.mark.usefixtures("plain_wkv")
def test_results_repeat_bit_for_bit() -> None:
    block, x, grad = make("image", 6, width=32)
    first, second = (results(fused(block, (2, 3), torch.bfloat16), block, x, grad) for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.usefixtures("plain_wkv")
@pytest.mark.parametrize("trained", ["att.time_maa_w1", "ffn.receptance.weight", "x"])
def test_what_is_frozen_gets_no_gradient_and_changes_no_other(trained: str) -> None:
    block, x, grad = make("text", 3, width=32)
    expected = results(fused(block, None, torch.float32), block, x, grad)[trained]
    for name, parameter in block.named_parameters():
        parameter.requires_grad_(name == trained)
        parameter.grad = None
    x.requires_grad_(trained == "x")
    fused(block, None, torch.float32)(x).backward(grad)
    found = {"x": x.grad, **{name: parameter.grad for name, parameter in block.named_parameters()}}
    assert [name for name, gradient in found.items() if gradient is not None] == [trained]
    assert torch.equal(found[trained], expected)


@pytest.mark.usefixtures("plain_wkv")
def test_checkpointing_changes_nothing_and_keeps_the_stream_alone() -> None:
    block, x, grad = make("image", 6, width=32)
    function = fused(block, (2, 3), torch.bfloat16)
    expected = results(function, block, x, grad)
    got = results(lambda x: checkpoint(function, x, use_reentrant=False), block, x, grad)
    assert all(torch.equal(got[name], expected[name]) for name in expected)


@pytest.mark.usefixtures("plain_wkv")
def test_without_gradients_nothing_is_kept() -> None:
    block, x, _ = make("image", 6, width=32)
    with torch.no_grad():
        y = fused(block, (2, 3), torch.float32)(x)
    assert y.grad_fn is None
    assert torch.equal(y, fused(block, (2, 3), torch.float32)(x))


@pytest.mark.usefixtures("plain_wkv")
def test_an_empty_batch() -> None:
    block, x, grad = make("text", 5, width=32, batch=0)
    got = results(fused(block, None, torch.bfloat16), block, x, grad)
    assert got["y"].shape == (0, 5, 32)
    assert all(gradient.count_nonzero() == 0 for gradient in got.values())
    assert got.keys() == {"y", "x", *(name for name, _ in block.named_parameters())}


@pytest.mark.usefixtures("plain_wkv")
def test_autocast_around_it_changes_nothing() -> None:
    block, x, _ = make("text", 5, width=32)
    with torch.no_grad():
        expected = fused(block, None, torch.float32)(x)
        with torch.autocast(DEVICE, torch.bfloat16):
            assert torch.equal(fused(block, None, torch.float32)(x), expected)


def test_what_it_does_not_take() -> None:
    block, x, _ = make("text", 5, width=32)
    assert supported(block, x)
    assert not supported(block, x.double())
    assert not supported(block, x[..., :24])
    block.dropout = 0.1
    assert not supported(block, x)
    narrow, x, _ = make("text", 5, width=72)
    assert not supported(narrow, x)
