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
    rounded,
    take,
    take_neighbour,
)

RANK = tl.constexpr(MIX_RANK)
MIX_ROWS, MIX_CHANNELS = 8, 256


class Tile(NamedTuple):
    """What one program works on at a time, and how it is compiled."""

    rows: int
    channels: int
    num_warps: int
    num_stages: int


# By bytes of an element: what fits registers and shared memory. `BACK` needs most, for five sums at a time.
FIVE = {2: Tile(64, 128, 8, 1), 4: Tile(32, 64, 8, 1)}
BACK = {2: Tile(64, 64, 8, 1), 4: Tile(16, 32, 4, 1)}


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
    share = take(share_a + channel, wide)
    if INVERSE:
        share = 1.0 - share
    put(mixed_a + start + at, own + delta * share[None, :], inside)
    if TWO:
        share = take(share_b + channel, wide)
        if INVERSE:
            share = 1.0 - share
        put(mixed_b + start + at, own + delta * share[None, :], inside)


def mix(shares: tuple[Tensor, ...], normed: Tensor, layout: Layout, *, inverse: bool = False) -> tuple[Tensor, ...]:
    """normed + (shifted - normed) * share for one or two shares (C); with `inverse` a share is the token's own."""
    mixed = tuple(torch.empty_like(normed) for _ in shares)
    two = len(shares) == 2
    _mix_kernel[_tiles(layout, MIX_ROWS, MIX_CHANNELS)](
        normed, shares[0], shares[1] if two else None, mixed[0], mixed[1] if two else None,
        layout.rows, **layout.places,
        ROWS=MIX_ROWS, CHANNELS=MIX_CHANNELS, TWO=two, INVERSE=inverse, num_warps=4,
    )  # fmt: skip
    return mixed


@triton.jit
def _share(inner, outer, fixed, index: tl.constexpr, row, channel, here, wide, C: tl.constexpr, P: tl.constexpr):
    """The tile of one mix's shares, float32, with the tile of `outer` that is in it."""
    lane = tl.arange(0, RANK)
    left = tl.load(inner + row[:, None] * (5 * RANK) + index * RANK + lane[None, :],
                   mask=here[:, None], other=0.0)  # fmt: skip
    right = tl.load(outer + (lane + index * RANK)[:, None] * C + channel[None, :], mask=wide[None, :], other=0.0)
    return dot(left, right, P) + take(fixed + index * C + channel, wide)[None, :], right


@triton.jit
def _five_mixes_kernel(
    normed, inner, outer, fixed, share_x, mixed, mixed_x, plane, rows,
    C: tl.constexpr, HEAD: tl.constexpr, PART: tl.constexpr, VECTOR: tl.constexpr,
    TOKENS: tl.constexpr, LINES: tl.constexpr, COLUMNS: tl.constexpr,
    ROWS: tl.constexpr, CHANNELS: tl.constexpr, PRECISION: tl.constexpr, SIX: tl.constexpr,
):  # fmt: skip
    """A tile of all five mixes, and of that of a fixed share."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    here, wide = row < rows, columns_inside(channel, C, CHANNELS)
    inside = here[:, None] & wide[None, :]
    start = tl.program_id(0).to(tl.int64) * (ROWS * C)
    at = tl.arange(0, ROWS)[:, None] * C + channel[None, :]
    step, exists = neighbour(row, channel, C, HEAD, PART, VECTOR, TOKENS, LINES, COLUMNS, False)
    normed += start
    own = take(normed + at, inside)
    delta = take_neighbour(normed, at, step, inside & exists, VECTOR) - own
    for index in tl.static_range(5):
        share, _ = _share(inner, outer, fixed, index, row, channel, here, wide, C, PRECISION)
        put(mixed + start + index * plane + at, own + delta * share, inside)
    if SIX:
        put(mixed_x + start + at, own + delta * take(share_x + channel, wide)[None, :], inside)


def five_mixes(
    normed: Tensor,
    inner: Tensor,
    outer: Tensor,
    fixed: Tensor,
    layout: Layout,
    share_x: Tensor | None = None,
    mixed_x: Tensor | None = None,
) -> Tensor:
    """(5, L, C): normed + (shifted - normed) * (fixed + inner @ outer), five ways.

    Args:
        normed: (L, C).
        inner: (L, 5 R) in the type of `normed`.
        outer: (5, R, C) in the type of `normed`.
        fixed: (5, C) float32.
        share_x, mixed_x: in the same pass, write the mix of the fixed share (C) to `mixed_x` (L, C).
    """
    mixed = torch.empty((5, *normed.shape), dtype=normed.dtype, device=normed.device)
    tile = FIVE[normed.itemsize]
    _five_mixes_kernel[_tiles(layout, tile.rows, tile.channels)](
        normed, inner, outer, fixed, share_x, mixed, mixed_x, layout.rows * layout.width,
        layout.rows, **layout.places,
        ROWS=tile.rows, CHANNELS=tile.channels, PRECISION=precision(normed.dtype), SIX=mixed_x is not None,
        num_warps=tile.num_warps, num_stages=tile.num_stages,
    )  # fmt: skip
    return mixed


@triton.jit
def _five_back_kernel(
    grads, normed, inner, outer, fixed, grad_own, grad_near, grad_before, plane, rows,
    C: tl.constexpr, HEAD: tl.constexpr, PART: tl.constexpr, VECTOR: tl.constexpr,
    TOKENS: tl.constexpr, LINES: tl.constexpr, COLUMNS: tl.constexpr,
    ROWS: tl.constexpr, CHANNELS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Rows of the gradients of tokens, of their neighbours, of what the tanh reads, and of the shares (in `grads`)."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    here = row < rows
    start = tl.program_id(0).to(tl.int64) * (ROWS * C)
    grads += start
    normed += start
    grad_own += start
    grad_near += start
    lane = tl.arange(0, RANK)
    totals = ()
    for _ in tl.static_range(5):
        totals = totals + (tl.zeros((ROWS, RANK), tl.float32),)
    for first in range(0, C, CHANNELS):
        channel = first + tl.arange(0, CHANNELS)
        wide = columns_inside(channel, C, CHANNELS)
        inside = here[:, None] & wide[None, :]
        at = tl.arange(0, ROWS)[:, None] * C + channel[None, :]
        # All are read before the first is overwritten: so the reads overlap.
        given = ()
        for index in tl.static_range(5):
            given = given + (tl.load(grads + index * plane + at, mask=inside, other=0.0),)
        step, exists = neighbour(row, channel, C, HEAD, PART, VECTOR, TOKENS, LINES, COLUMNS, False)
        delta = take_neighbour(normed, at, step, inside & exists, VECTOR) - take(normed + at, inside)
        own = tl.zeros((ROWS, CHANNELS), tl.float32)
        near = tl.zeros((ROWS, CHANNELS), tl.float32)
        added = ()
        for index in tl.static_range(5):
            grad = given[index].to(tl.float32)
            share, right = _share(inner, outer, fixed, index, row, channel, here, wide, C, PRECISION)
            passed = grad * share
            own += grad - passed
            near += passed
            grad_share = rounded(grad * delta, right.dtype)
            tl.store(grads + index * plane + at, grad_share, mask=inside)
            added = added + (totals[index] + dot(grad_share, tl.trans(right), PRECISION),)
        totals = added
        put(grad_own + at, own, inside)
        put(grad_near + at, near, inside)
    for index in tl.static_range(5):
        at_inner = row[:, None] * (5 * RANK) + index * RANK + lane[None, :]
        result = take(inner + at_inner, here[:, None])
        put(grad_before + at_inner, totals[index] * (1.0 - result * result), here[:, None])


def five_mixes_backward(
    grads: Tensor, normed: Tensor, inner: Tensor, outer: Tensor, fixed: Tensor, layout: Layout
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients, in the type of `normed`, from those of `five_mixes`' result (5, L, C), which the shares' overwrite.

    Returns:
        That of `normed` as the token itself (L, C), as the neighbour, before it is shifted back (L, C), and of what the
        tanh behind `inner` read (L, 5 R).
    """
    own, near, before = torch.empty_like(normed), torch.empty_like(normed), torch.empty_like(inner)
    tile = BACK[normed.itemsize]
    programs = max(1, triton.cdiv(layout.rows, tile.rows))
    _five_back_kernel[(programs,)](
        grads, normed, inner, outer, fixed, own, near, before, layout.rows * layout.width,
        layout.rows, **layout.places,
        ROWS=tile.rows, CHANNELS=tile.channels, PRECISION=precision(normed.dtype),
        num_warps=tile.num_warps, num_stages=tile.num_stages,
    )  # fmt: skip
    return own, near, before


def _tiles(layout: Layout, rows: int, channels: int) -> tuple[int, int]:
    return max(1, triton.cdiv(layout.rows, rows)), triton.cdiv(layout.width, channels)
