"""Mixes of each token with its neighbours: by fixed shares, and the five whose shares depend on the token.

    >>> mixed_x = mix((maa_x,), normed, layout)

Legend: L tokens of a batch, C channels, R = 32 inner channels of a share.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from rwkvclip_cli.model.blocks import MIX_RANK
from rwkvclip_cli.model.fused.layout import (
    Layout,
    columns_inside,
    dot,
    neighbour,
    precision,
    put,
    take,
    take_neighbour,
    take_row,
)
from rwkvclip_cli.model.launching import ceil_div, launch

RANK = tl.constexpr(MIX_RANK)
MIX_ROWS, MIX_CHANNELS = 8, 128


class Tile(NamedTuple):
    """What one program works on at a time, and how it is compiled."""

    rows: int
    channels: int
    num_warps: int
    num_stages: int
    maxnreg: int | None = None
    """Most registers of a thread, where a few spilled ones let more programs run side by side."""

    def settings(self) -> dict[str, int | None]:
        """What a launch names beside its arguments."""
        return {
            "ROWS": self.rows, "CHANNELS": self.channels,
            "num_warps": self.num_warps, "num_stages": self.num_stages, "maxnreg": self.maxnreg,
        }  # fmt: skip


# By bytes of an element: what leaves registers for several programs at a time.
FIVE = {2: Tile(64, 128, 8, 1, 128), 4: Tile(32, 64, 8, 1)}
BACK = {2: Tile(32, 64, 8, 1), 4: Tile(32, 32, 8, 1)}
INNER = {2: Tile(64, 64, 4, 4), 4: Tile(32, 32, 4, 2)}


@triton.jit
def _mix_kernel(
    normed, share_a, share_b, mixed_a, mixed_b, rows,
    C: tl.constexpr, HEAD: tl.constexpr, PART: tl.constexpr, VECTOR: tl.constexpr,
    TOKENS: tl.constexpr, LINES: tl.constexpr, COLUMNS: tl.constexpr,
    ROWS: tl.constexpr, CHANNELS: tl.constexpr, TWO: tl.constexpr, INVERSE: tl.constexpr,
):  # fmt: skip
    """A tile of one or two mixes of fixed shares."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    wide = columns_inside(channel, C, CHANNELS)
    inside = (row < rows)[:, None] & wide[None, :]
    start = tl.program_id(0).to(tl.int64) * (ROWS * C)
    at = tl.arange(0, ROWS)[:, None] * C + channel[None, :]
    step, exists = neighbour(row, channel, C, HEAD, PART, VECTOR, TOKENS, LINES, COLUMNS, False)
    normed += start
    own = take(normed + at, inside)
    delta = take_neighbour(normed, at, step, inside & exists, VECTOR) - own
    # Read before anything is written, so that no read waits for another.
    part_a = take_row(share_a, channel, inside)
    if TWO:
        part_b = take_row(share_b, channel, inside)
        put(mixed_b + start + at, own + delta * (1.0 - part_b if INVERSE else part_b), inside)
    put(mixed_a + start + at, own + delta * (1.0 - part_a if INVERSE else part_a), inside)


def mix(shares: tuple[Tensor, ...], normed: Tensor, layout: Layout, *, inverse: bool = False) -> tuple[Tensor, ...]:
    """normed + (shifted - normed) * share for one or two shares (C); with `inverse` a share is the token's own."""
    mixed = tuple(torch.empty_like(normed) for _ in shares)
    two = len(shares) == 2
    launch(
        _mix_kernel, _tiles(layout, MIX_ROWS, MIX_CHANNELS),
        normed, shares[0], shares[1] if two else None, mixed[0], mixed[1] if two else None,
        layout.rows, **layout.places,
        ROWS=MIX_ROWS, CHANNELS=MIX_CHANNELS, TWO=two, INVERSE=inverse, num_warps=4,
    )  # fmt: skip
    return mixed


@triton.jit
def _share(inner, outer, fixed, index, row, channel, here, wide, C: tl.constexpr, P: tl.constexpr):
    """The tile of one mix's shares, float32."""
    lane = tl.arange(0, RANK)
    left = tl.load(inner + row[:, None] * (5 * RANK) + index * RANK + lane[None, :],
                   mask=here[:, None], other=0.0)  # fmt: skip
    right = tl.load(outer + (lane + index * RANK)[:, None] * C + channel[None, :], mask=wide[None, :], other=0.0)
    return dot(left, right, P) + take(fixed + index * C + channel, wide)[None, :]


@triton.jit
def _five_mixes_kernel(
    normed, inner, outer, fixed, mixed, plane, rows,
    C: tl.constexpr, HEAD: tl.constexpr, PART: tl.constexpr, VECTOR: tl.constexpr,
    TOKENS: tl.constexpr, LINES: tl.constexpr, COLUMNS: tl.constexpr,
    ROWS: tl.constexpr, CHANNELS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A tile of all five mixes."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    here, wide = row < rows, columns_inside(channel, C, CHANNELS)
    inside = here[:, None] & wide[None, :]
    start = tl.program_id(0).to(tl.int64) * (ROWS * C)
    at = tl.arange(0, ROWS)[:, None] * C + channel[None, :]
    step, exists = neighbour(row, channel, C, HEAD, PART, VECTOR, TOKENS, LINES, COLUMNS, False)
    normed += start
    mixed += start
    own = take(normed + at, inside)
    delta = take_neighbour(normed, at, step, inside & exists, VECTOR) - own
    # A loop, not five copies of its body: so few registers are in use at a time, and more programs run side by side.
    for index in range(5):
        share = _share(inner, outer, fixed, index, row, channel, here, wide, C, PRECISION)
        put(mixed + at, own + delta * share, inside)
        mixed += plane


def five_mixes(normed: Tensor, inner: Tensor, outer: Tensor, fixed: Tensor, layout: Layout) -> Tensor:
    """(5, L, C): normed + (shifted - normed) * (fixed + inner @ outer), five ways.

    Args:
        normed: (L, C).
        inner: (L, 5 R) in the type of `normed`.
        outer: (5, R, C) in the type of `normed`.
        fixed: (5, C) float32.
    """
    mixed = torch.empty((5, *normed.shape), dtype=normed.dtype, device=normed.device)
    tile = FIVE[normed.itemsize]
    launch(
        _five_mixes_kernel, _tiles(layout, tile.rows, tile.channels),
        normed, inner, outer, fixed, mixed, layout.rows * layout.width, layout.rows, **layout.places,
        PRECISION=precision(normed.dtype), **tile.settings(),
    )  # fmt: skip
    return mixed


@triton.jit
def _five_back_kernel(
    grads, normed, inner, outer, fixed, share_x, mixed, mixed_x, grad_own, grad_near, plane, rows,
    C: tl.constexpr, HEAD: tl.constexpr, PART: tl.constexpr, VECTOR: tl.constexpr,
    TOKENS: tl.constexpr, LINES: tl.constexpr, COLUMNS: tl.constexpr,
    ROWS: tl.constexpr, CHANNELS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A tile of the six mixes, and of the gradients of tokens, of their neighbours, and of the shares (in `grads`)."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    here, wide = row < rows, columns_inside(channel, C, CHANNELS)
    inside = here[:, None] & wide[None, :]
    start = tl.program_id(0).to(tl.int64) * (ROWS * C)
    at = tl.arange(0, ROWS)[:, None] * C + channel[None, :]
    step, exists = neighbour(row, channel, C, HEAD, PART, VECTOR, TOKENS, LINES, COLUMNS, False)
    normed += start
    grads += start
    mixed += start
    given = tl.load(grads + at, mask=inside, other=0.0)
    own = take(normed + at, inside)
    delta = take_neighbour(normed, at, step, inside & exists, VECTOR) - own
    put(mixed_x + start + at, own + delta * take(share_x + channel, wide)[None, :], inside)
    whole = tl.zeros((ROWS, CHANNELS), tl.float32)
    near = tl.zeros((ROWS, CHANNELS), tl.float32)
    for index in range(5):
        grad = given.to(tl.float32)
        # The next is read before this one is overwritten: so the reads overlap.
        given = tl.load(grads + plane + at, mask=inside & (index < 4), other=0.0)
        share = _share(inner, outer, fixed, index, row, channel, here, wide, C, PRECISION)
        whole += grad
        near += grad * share
        put(mixed + at, own + delta * share, inside)
        put(grads + at, grad * delta, inside)
        mixed += plane
        grads += plane
    put(grad_own + start + at, whole - near, inside)
    put(grad_near + start + at, near, inside)


class FiveBack(NamedTuple):
    """What the backward pass makes of the five mixes, all (L, C) or (5, L, C) in the type of the mixes."""

    mixed: Tensor
    """The mixes again."""
    mixed_x: Tensor
    """The mix of a fixed share."""
    grad_own: Tensor
    """Gradient of `normed` as the token itself."""
    grad_near: Tensor
    """Gradient of `normed` as the neighbour, before it is shifted back."""


def five_mixes_backward(
    grads: Tensor, normed: Tensor, inner: Tensor, outer: Tensor, fixed: Tensor, share_x: Tensor, layout: Layout
) -> FiveBack:
    """The mixes again, that of the fixed share `share_x` (C) too, and the gradients behind them, in one pass.

    Args:
        grads: gradients (5, L, C) of `five_mixes`' result, which those of the shares overwrite.
        normed, inner, outer, fixed: what `five_mixes` was given.
    """
    back = FiveBack(torch.empty_like(grads), *(torch.empty_like(normed) for _ in range(3)))
    tile = BACK[normed.itemsize]
    launch(
        _five_back_kernel, _tiles(layout, tile.rows, tile.channels),
        grads, normed, inner, outer, fixed, share_x, *back, layout.rows * layout.width, layout.rows, **layout.places,
        PRECISION=precision(normed.dtype), **tile.settings(),
    )  # fmt: skip
    return back


@triton.jit
def _inner_back_kernel(
    grad_shares, inner, outer, grad_before, plane, rows,
    C: tl.constexpr, ROWS: tl.constexpr, CHANNELS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Some rows, for one of the five mixes, of grad_shares @ outer^T times the slope of tanh."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    here = (row < rows)[:, None]
    lane, channel = tl.arange(0, RANK), tl.arange(0, CHANNELS)
    index = tl.program_id(1)
    left = grad_shares + index.to(tl.int64) * plane + row.to(tl.int64)[:, None] * C + channel[None, :]
    right = outer + (index * RANK + lane)[None, :] * C + channel[:, None]
    total = tl.zeros((ROWS, RANK), tl.float32)
    for first in range(0, C, CHANNELS):
        wide = columns_inside(first + channel, C, CHANNELS)
        grad_share = tl.load(left, mask=here & wide[None, :], other=0.0)
        total += dot(grad_share, tl.load(right, mask=wide[:, None], other=0.0), PRECISION)
        left += CHANNELS
        right += CHANNELS
    at = row[:, None] * (5 * RANK) + index * RANK + lane[None, :]
    result = take(inner + at, here)
    put(grad_before + at, total * (1.0 - result * result), here)


def inner_backward(grad_shares: Tensor, inner: Tensor, outer: Tensor, layout: Layout) -> Tensor:
    """The gradient (L, 5 R) of what the tanh behind `inner` read, from the shares' (5, L, C)."""
    before = torch.empty_like(inner)
    tile = INNER[inner.itemsize]
    launch(
        _inner_back_kernel, (max(1, ceil_div(layout.rows, tile.rows)), 5),
        grad_shares, inner, outer, before, layout.rows * layout.width, layout.rows,
        C=layout.width, PRECISION=precision(inner.dtype), **tile.settings(),
    )  # fmt: skip
    return before


def _tiles(layout: Layout, rows: int, channels: int) -> tuple[int, int]:
    return max(1, ceil_div(layout.rows, rows)), ceil_div(layout.width, channels)
