"""The norms of a block's two branches, with the sum before them forward and the shift behind them backward.

    >>> total, normed, mean, rstd = add_norm(x, weight, bias, eps, torch.bfloat16, layout, change, keep)

Legend: B batch, T tokens, L = B T rows, C channels.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from rwkvclip_cli.model.fused.layout import Layout, columns_inside, neighbour, put, take, take_neighbour, take_row
from rwkvclip_cli.model.launching import ceil_div, launch

WARPS = 2
# A warp to a row, which it reads in pieces of CHUNK channels: so widths like 640 leave no thread idle, and a row's sums
# stay inside the warp.
ROWS, CHUNK = 2, 128
BACK_PROGRAMS = 4
"""A multiprocessor's in the backward direction: as many as its registers hold, each leaving one row of sums."""


@triton.jit
def _add_norm_kernel(
    x, change, keep, weight, bias, total, normed, mean, rstd, rows, eps,
    C: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr, CHUNK: tl.constexpr,
    ADD: tl.constexpr, KEEP: tl.constexpr,
):  # fmt: skip
    """ROWS rows of LayerNorm(x + change * keep), of the sum, and of the norm's statistics."""
    chunks: tl.constexpr = (C + CHUNK - 1) // CHUNK
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    here = row < rows
    start = row.to(tl.int64)[:, None] * C
    if KEEP:
        kept = take(keep + row // TOKENS, here)[:, None]
    values = ()
    along = tl.zeros((ROWS, CHUNK), tl.float32)
    for index in tl.static_range(chunks):
        channel = index * CHUNK + tl.arange(0, CHUNK)
        inside = here[:, None] & columns_inside(channel, C, CHUNK)[None, :]
        at = start + channel[None, :]
        value = take(x + at, inside)
        if ADD:
            added = take(change + at, inside)
            if KEEP:
                added *= kept
            value += added
        values = values + (value,)
        along += value
    centre = tl.sum(along, 1) / C
    squares = tl.zeros((ROWS, CHUNK), tl.float32)
    # Whatever is read is read before anything is written, so that no read waits for another.
    factors, shifts = (), ()
    for index in tl.static_range(chunks):
        channel = index * CHUNK + tl.arange(0, CHUNK)
        inside = here[:, None] & columns_inside(channel, C, CHUNK)[None, :]
        centred = tl.where(inside, values[index] - centre[:, None], 0.0)
        squares += centred * centred
        factors = factors + (take_row(weight, channel, inside),)
        shifts = shifts + (take_row(bias, channel, inside),)
    scale = 1.0 / tl.sqrt(tl.sum(squares, 1) / C + eps)
    for index in tl.static_range(chunks):
        channel = index * CHUNK + tl.arange(0, CHUNK)
        inside = here[:, None] & columns_inside(channel, C, CHUNK)[None, :]
        at = start + channel[None, :]
        if ADD:
            put(total + at, values[index], inside)
        hat = (values[index] - centre[:, None]) * scale[:, None]
        put(normed + at, hat * factors[index] + shifts[index], inside)
    put(mean + row, centre, here)
    put(rstd + row, scale, here)


class Normed(NamedTuple):
    """A norm's input (L, C) float32, its result (L, C), and its statistics (L) float32; kept for the backward pass."""

    total: Tensor
    normed: Tensor
    mean: Tensor
    rstd: Tensor


def add_norm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    eps: float,
    dtype: torch.dtype,
    layout: Layout,
    change: Tensor | None = None,
    keep: Tensor | None = None,
) -> Normed:
    """LayerNorm(x + change * keep) in `dtype`, for x (L, C) float32, change (L, C) and keep (B) float32."""
    total = x if change is None else torch.empty_like(x)
    normed = torch.empty_like(x, dtype=dtype)
    mean, rstd = torch.empty((2, layout.rows), dtype=torch.float32, device=x.device)
    launch(
        _add_norm_kernel, (max(1, ceil_div(layout.rows, ROWS)),),
        x, change, keep, weight, bias, total, normed, mean, rstd, layout.rows, eps,
        C=layout.width, TOKENS=layout.tokens, ROWS=ROWS, CHUNK=CHUNK, ADD=change is not None, KEEP=keep is not None,
        num_warps=WARPS,
    )  # fmt: skip
    return Normed(total, normed, mean, rstd)


@triton.jit
def _norm_backward_kernel(
    grad_a, grad_b, share_a, share_b, grad_own, grad_near, x, mean, rstd, weight, bias, grad_total, keep,
    grad_x, grad_change, sums, rows,
    C: tl.constexpr, HEAD: tl.constexpr, PART: tl.constexpr, VECTOR: tl.constexpr,
    TOKENS: tl.constexpr, LINES: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr, CHUNK: tl.constexpr,
    TWO: tl.constexpr, INVERSE: tl.constexpr, PARTS: tl.constexpr, CHANGE: tl.constexpr, KEEP: tl.constexpr,
):  # fmt: skip
    """From the gradients of one or two mixes of a norm's result and its neighbours to that of the norm's input.

    `sums` (programs, 4, C) receives those of the two shares, of the norm's weight and of its bias. A share's is the sum
    of the mix's gradient times what the neighbour has more than the token: here the gradient is shifted back instead,
    which the norm needs anyway, and no neighbour's own number is read.
    """
    chunks: tl.constexpr = (C + CHUNK - 1) // CHUNK
    totals = ()
    for _ in tl.static_range(4 * chunks):
        totals = totals + (tl.zeros((ROWS, CHUNK), tl.float32),)
    for first in range(tl.program_id(0) * ROWS, rows, tl.num_programs(0) * ROWS):
        row = first + tl.arange(0, ROWS)
        here = row < rows
        start = row.to(tl.int64)[:, None] * C
        scale, centre = take(rstd + row, here)[:, None], take(mean + row, here)[:, None]
        added, grads, hats = (), (), ()
        straight = tl.zeros((ROWS, CHUNK), tl.float32)
        along = tl.zeros((ROWS, CHUNK), tl.float32)
        for index in tl.static_range(chunks):
            channel = index * CHUNK + tl.arange(0, CHUNK)
            inside = here[:, None] & columns_inside(channel, C, CHUNK)[None, :]
            at = start + channel[None, :]
            step, exists = neighbour(row, channel, C, HEAD, PART, VECTOR, TOKENS, LINES, COLUMNS, True)
            exists = inside & exists
            factor = take_row(weight, channel, inside)
            hat = (take(x + at, inside) - centre) * scale
            result = hat * factor + take_row(bias, channel, inside)
            grad = take(grad_a + at, inside)
            moved = take_neighbour(grad_a, at, step, exists, VECTOR) - grad
            grad += moved * _part(share_a, channel, inside, INVERSE)
            sum_a, sum_b = totals[4 * index] + moved * result, totals[4 * index + 1]
            if TWO:
                other = take(grad_b + at, inside)
                moved = take_neighbour(grad_b, at, step, exists, VECTOR) - other
                grad += other + moved * _part(share_b, channel, inside, INVERSE)
                sum_b += moved * result
            if PARTS:
                grad += take(grad_own + at, inside) + take_neighbour(grad_near, at, step, exists, VECTOR)
            added = added + (sum_a, sum_b, totals[4 * index + 2] + grad * hat, totals[4 * index + 3] + grad)
            grad *= factor
            straight += grad
            along += grad * hat
            grads, hats = grads + (grad,), hats + (hat,)
        totals = added
        # Read before anything is written, so that no read waits for another.
        passed = ()
        for index in tl.static_range(chunks):
            channel = index * CHUNK + tl.arange(0, CHUNK)
            inside = here[:, None] & columns_inside(channel, C, CHUNK)[None, :]
            passed = passed + (take(grad_total + start + channel[None, :], inside),)
        if KEEP:
            kept = take(keep + row // TOKENS, here)[:, None]
        lift = tl.sum(straight, 1)[:, None] / C
        turn = tl.sum(along, 1)[:, None] / C
        for index in tl.static_range(chunks):
            channel = index * CHUNK + tl.arange(0, CHUNK)
            inside = here[:, None] & columns_inside(channel, C, CHUNK)[None, :]
            at = start + channel[None, :]
            grad = (grads[index] - lift - hats[index] * turn) * scale + passed[index]
            put(grad_x + at, grad, inside)
            if CHANGE:
                if KEEP:
                    grad *= kept
                put(grad_change + at, grad, inside)
    place = sums + tl.program_id(0) * 4 * C
    for index in tl.static_range(chunks):
        channel = index * CHUNK + tl.arange(0, CHUNK)
        wide = columns_inside(channel, C, CHUNK)
        for which in tl.static_range(4):
            total = tl.sum(totals[4 * index + which], 0)
            if INVERSE and which < 2:
                total = -total
            tl.store(place + which * C + channel, total, mask=wide)


@triton.jit
def _part(share, channel, inside, INVERSE: tl.constexpr):
    """The neighbours' shares of a mix."""
    part = take_row(share, channel, inside)
    return 1.0 - part if INVERSE else part


def norm_backward(
    grads: tuple[Tensor, ...],
    shares: tuple[Tensor, ...],
    saved: Normed,
    weight: Tensor,
    bias: Tensor,
    grad_total: Tensor,
    layout: Layout,
    *,
    inverse: bool = False,
    parts: tuple[Tensor, Tensor] | None = None,
    change_dtype: torch.dtype | None = None,
    keep: Tensor | None = None,
) -> tuple[Tensor, Tensor | None, Tensor]:
    """The gradient of the sum that a norm read, from all that used the norm's result and the sum itself.

    Args:
        grads, shares: gradients (L, C) of one or two mixes, and the mixes' shares (C) of the neighbours.
        grad_total: gradient (L, C) float32 of the sum itself.
        inverse: the shares are the token's own.
        parts: gradients (L, C) of the norm's result and of its neighbours from further uses.
        change_dtype: also give the gradient times `keep` in this type: that of the change in the sum.

    Returns:
        The gradient (L, C) float32, the change's or None, and (4, C) float32: the gradients of the shares (0 for one
        that is not there), the norm's weight and its bias.
    """
    x = saved.total
    grad_x = torch.empty_like(x)
    grad_change = None if change_dtype is None else torch.empty_like(x, dtype=change_dtype)
    programs = max(1, min(layout.programs(BACK_PROGRAMS), ceil_div(layout.rows, ROWS)))
    sums = torch.empty((programs, 4, layout.width), dtype=torch.float32, device=x.device)
    two = len(grads) == 2
    own, near = parts or (None, None)
    launch(
        _norm_backward_kernel, (programs,),
        grads[0], grads[1] if two else None, shares[0], shares[1] if two else None, own, near,
        x, saved.mean, saved.rstd, weight, bias, grad_total, keep, grad_x, grad_change, sums, layout.rows,
        **layout.places, ROWS=ROWS, CHUNK=CHUNK, TWO=two, INVERSE=inverse, PARTS=parts is not None,
        CHANGE=grad_change is not None, KEEP=keep is not None, num_warps=WARPS,
    )  # fmt: skip
    return grad_x, grad_change, sums.sum(0)
