"""WKV6 in Triton kernels, forward and backward, for NVIDIA GPUs.

    >>> y = wkv6_triton(r, k, v, w, u)

Legend: B batch, T tokens, H heads, N channels of a head.

A score is a product of two vectors, each decayed to a border between its tokens (see `wkv6_matrix`). Inside a tile of
64 tokens the short form takes one border for all pairs, the middle of the tile's decay, and so exponents of either
sign; where they would leave float32's range, which a head's weaker decays do not, the tree of borders of `wkv6_matrix`
does that head again, without a positive exponent. Tiles pass sums of k v^T to each other, N x N a head (see `carry`).

The gradient of v is the forward pass with r and k exchanged; a second kernel makes those of r, k, w and u. Operands are
rounded to no less than 16 bits and sums are float32, so that results are exact up to their own rounding; nothing is
added atomically, so they repeat.
"""

import functools
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from rwkvclip_cli.model.launching import ceil_div, launch
from rwkvclip_cli.model.wkv6_kernels.backward import backward_kernel
from rwkvclip_cli.model.wkv6_kernels.borders import CHUNK, TILE
from rwkvclip_cli.model.wkv6_kernels.carry import carry_kernel, half_decay_kernel
from rwkvclip_cli.model.wkv6_kernels.forward import forward_kernel
from rwkvclip_cli.model.wkv6_kernels.tree import TREE_TOKENS, tree_backward_kernel, tree_forward_kernel

TREE_WARPS = 2


def wkv6_triton(r: Tensor, k: Tensor, v: Tensor, w: Tensor, u: Tensor) -> Tensor:
    """WKV6 through kernels; arguments, result and types as `wkv6.wkv6` describes them, on one GPU, N a multiple of 16.

    Beside the result the backward pass takes (B, H, T, T) for a moment, and either pass of more than 64 tokens some
    (B, H, T / 64, N, N). Gradients are exact up to the rounding of the results; second ones there are none.
    """
    y: Tensor = _Wkv6.apply(r, k, v, w, u)  # type: ignore[no-untyped-call]
    return y


class _Wkv6(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *inputs: Tensor) -> Tensor:
        r, k, v, w, u = (tensor.contiguous() for tensor in inputs)
        ctx.save_for_backward(r, k, v, w, u)
        return forward(r, k, v, w, u)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor, ...]:
        r, k, v, w, u = ctx.saved_tensors
        grad_r, grad_k, grad_v, grad_w, grad_u, _ = backward(r, k, v, w, u, None, grad_y.contiguous())
        return grad_r, grad_k, grad_v, grad_w, grad_u.to(u.dtype)


def forward(r: Tensor, k: Tensor, v: Tensor, w: Tensor, u: Tensor, base: Tensor | None = None) -> Tensor:
    """y of `wkv6.wkv6`, outside autograd, for contiguous tensors; with `base` (H, N) the raw decay is w + base."""
    y = torch.empty_like(r)
    r, k, v, w = _without_float16(r, k, v, w)
    if len(r):
        full = _is_full(r, k)
        strong = _launch_forward(r, k, v, w, u, base, y, _carry(k, v, w, base, _halves(w, base, full), full), full)
        _launch_tree(r, k, v, w, u, base, y, strong, full)
    return y


def backward(
    r: Tensor,
    k: Tensor,
    v: Tensor,
    w: Tensor,
    u: Tensor,
    base: Tensor | None,
    grad_y: Tensor,
    out: tuple[Tensor, Tensor, Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None]:
    """Gradients of `forward`'s r, k, v, w, u and base; u's and base's are float32 (H, N).

    `out`: contiguous tensors for the first four, in the order r, k, v, w.
    """
    batch, tokens, heads, channels = r.shape
    grad_r, grad_k, grad_v, grad_w = out or tuple(torch.empty_like(tensor) for tensor in (r, k, v, w))
    r, k, v, w, grad_y = _without_float16(r, k, v, w, grad_y)
    tree_tiles = ceil_div(tokens, TREE_TOKENS.value)
    sums = r.new_zeros((2, batch, heads, tree_tiles, channels), dtype=torch.float32)
    if batch:
        full = _is_full(r, k)
        halves = _halves(w, base, full)
        returned = _carry(r, grad_y, w, base, halves, full)
        strong = _launch_forward(k, r, grad_y, w, u, base, grad_v, returned, full)
        carried = _carry(k, v, w, base, halves, full)
        for tiles in _tiles(tokens):
            launch(
                backward_kernel, (batch * heads * tiles.count,),
                r, k, v, w, u, base, grad_y, carried, returned, grad_r, grad_k, grad_w, sums[0], sums[1],
                tiles.first, tiles.count, strong.shape[1], tokens, heads, N=channels, FULL=full,
                HAS_BASE=base is not None, CARRIED=carried is not None, PARTS=tree_tiles, **_pieces(channels),
                **tiles.backward_settings(carried is not None, channels),
            )  # fmt: skip
        side = tree_tiles * TREE_TOKENS.value
        products = r.new_empty(_parts_shape(full, batch * heads, side, side), dtype=_parts_type(full))
        _launch_tree(k, r, grad_y, w, u, base, grad_v, strong, full, v, products)
        several = triton.next_power_of_2(tree_tiles)
        gaps = r.new_zeros((batch * heads, several, channels), dtype=torch.float32) if several > 1 else sums
        launch(
            tree_backward_kernel, (batch * heads,),
            r, k, w, u, base, products, grad_r, grad_k, grad_w, sums[0], sums[1], gaps, strong, tokens, heads,
            N=channels, GAPS=several, FULL=full, HAS_BASE=base is not None, FLAGS=strong.shape[1], PARTS=tree_tiles,
            num_warps=TREE_WARPS, num_stages=1,
        )  # fmt: skip
    grad_u, grad_base = sums.sum((1, 3)).unbind()
    return grad_r, grad_k, grad_v, grad_w, grad_u, None if base is None else grad_base


def _launch_forward(
    r: Tensor,
    k: Tensor,
    v: Tensor,
    w: Tensor,
    u: Tensor,
    base: Tensor | None,
    y: Tensor,
    carried: Tensor | None,
    full: bool,
) -> Tensor:
    """Fill y by the short form; return (B H, tiles) which tiles' decays were too strong for it."""
    batch, tokens, heads, channels = r.shape
    count = ceil_div(tokens, TILE.value)
    strong = r.new_empty((batch * heads, count), dtype=torch.bool)
    for tiles in _tiles(tokens):
        launch(
            forward_kernel, (batch * heads * tiles.count,),
            r, k, v, w, u, base, y, carried, strong, tiles.first, tiles.count, count, tokens, heads, N=channels,
            FULL=full, HAS_BASE=base is not None, CARRIED=carried is not None, **_pieces(channels),
            **tiles.forward_settings(carried is not None),
        )  # fmt: skip
    return strong


def _launch_tree(
    r: Tensor,
    k: Tensor,
    v: Tensor,
    w: Tensor,
    u: Tensor,
    base: Tensor | None,
    y: Tensor,
    strong: Tensor,
    full: bool,
    other: Tensor | None = None,
    products: Tensor | None = None,
) -> None:
    """Fill y, and `products` where given, of those heads that have a tile with `strong` decays."""
    batch, tokens, heads, channels = r.shape
    launch(
        tree_forward_kernel, (batch * heads * ceil_div(tokens, TREE_TOKENS.value),),
        r, k, v, w, u, base, y, other, products, strong, tokens, heads, N=channels, FULL=full,
        HAS_BASE=base is not None, WITH_PRODUCTS=products is not None, FLAGS=strong.shape[1], num_warps=TREE_WARPS,
        num_stages=1,
    )  # fmt: skip


def _halves(w: Tensor, base: Tensor | None, full: bool) -> Tensor | None:
    """The decays over half of each tile, (B H, tiles, N); of one tile none."""
    batch, tokens, heads, channels = w.shape
    tiles = ceil_div(tokens, TILE.value)
    if tiles == 1:
        return None
    halves = w.new_empty((batch * heads, tiles, channels), dtype=torch.float32)
    launch(
        half_decay_kernel, (batch * heads * tiles,),
        w, base, halves, tiles, tokens, heads, N=channels, FULL=full, HAS_BASE=base is not None, num_warps=1,
    )  # fmt: skip
    return halves


def _carry(k: Tensor, v: Tensor, w: Tensor, base: Tensor | None, halves: Tensor | None, full: bool) -> Tensor | None:
    """The sums that tiles pass to each other, as parts of (2, B H, tiles, N N); of one tile none."""
    if halves is None:
        return None
    batch, tokens, heads, channels = k.shape
    tiles = halves.shape[1]
    carried = k.new_empty((*_parts_shape(full, 2, batch * heads), tiles, channels**2), dtype=_parts_type(full))
    ends = _tiles(tokens)
    for side, end in enumerate((ends[0], ends[-1])):
        launch(
            carry_kernel, (batch * heads,),
            k, v, w, base, halves, carried, tiles, tokens, heads, N=channels, SIDE=side, ROWS=end.rows,
            MORE=tiles > 2, FULL=full, HAS_BASE=base is not None, num_warps=TILE.value // CHUNK.value, num_stages=1,
        )  # fmt: skip
    return carried


def _without_float16(*tensors: Tensor) -> tuple[Tensor, ...]:
    """float16 tensors as float32: sums can leave their range, and mixed with float32 ones they read out of bounds.

    The latter on an H200 with Triton 3.6: of all types only those with float16 among them, at 64 rows and heads of 80.
    """
    return tuple(tensor.float() if tensor.dtype == torch.float16 else tensor for tensor in tensors)


def _is_full(r: Tensor, k: Tensor) -> bool:
    """Whether operands stay float32."""
    return r.dtype == k.dtype == torch.float32


def _parts_shape(full: bool, *shape: int) -> tuple[int, ...]:
    return (1 if full else 2, *shape)


def _parts_type(full: bool) -> torch.dtype:
    return torch.float32 if full else torch.bfloat16


@dataclass(frozen=True)
class _Tiles:
    """Tiles of one number of rows, which as many warps work on as the rows make chunks."""

    first: int
    count: int
    rows: int

    def forward_settings(self, carried: bool) -> dict[str, Any]:
        # A few registers less let one program more run beside; with sums to read there are none to spare.
        registers = 168 if self.rows == TILE.value and not carried else None
        return {"M": self.rows, "num_warps": self.rows // CHUNK.value, "num_stages": 3, "maxnreg": registers}

    def backward_settings(self, carried: bool, channels: int) -> dict[str, Any]:
        # Loads are made ahead as far as the shared memory of two programs goes.
        stages = 3 if self.rows == TILE.value and not (carried and channels > 64) else 2
        return {"M": self.rows, "num_warps": self.rows // CHUNK.value, "num_stages": stages}


@functools.cache
def _tiles(tokens: int) -> tuple[_Tiles, ...]:
    """Whole tiles, and a last one of no more rows than it needs."""
    whole, rest = divmod(tokens, TILE.value)
    rows = max(CHUNK.value, triton.next_power_of_2(rest))
    if rest and rows == TILE.value:
        whole, rest = whole + 1, 0
    return tuple(tiles for tiles in (_Tiles(0, whole, TILE.value), _Tiles(whole, min(rest, 1), rows)) if tiles.count)


@functools.cache
def _pieces(channels: int) -> dict[str, tuple[int, ...]]:
    """Into what pieces of widths that are powers of two v's channels are cut, and where they start."""
    widths = (64,) * (channels // 64) + (CHUNK.value,) * (channels % 64 // CHUNK.value)
    return {"WIDTHS": widths, "STARTS": tuple(sum(widths[:index]) for index in range(len(widths)))}
