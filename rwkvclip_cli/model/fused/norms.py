"""The norms of a block's two branches, with the sum before them forward and the shift behind them backward.

    >>> total, normed, mean, rstd = add_norm(x, weight, bias, eps, torch.bfloat16, layout, change, keep)

Legend: B batch, T tokens, L = B T rows, C channels.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from rwkvclip_cli.model.fused.layout import Layout, neighbour, put, take, take_neighbour

NORM_ROWS = 4
NORM_WARPS = 4
# One row at a time: while it is worked on, the next one is already on its way.
BACK_WARPS, BACK_STAGES = 4, 3


@triton.jit
def _add_norm_kernel(
    x, change, keep, weight, bias, total, normed, mean, rstd, rows, tokens, eps,
    C: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, ADD: tl.constexpr, KEEP: tl.constexpr,
):  # fmt: skip
    """ROWS rows of LayerNorm(x + change * keep), of the sum, and of the norm's statistics."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    channel = tl.arange(0, BLOCK)
    here, wide = row < rows, channel < C
    inside = here[:, None] & wide[None, :]
    at = row.to(tl.int64)[:, None] * C + channel[None, :]
    value = take(x + at, inside)
    if ADD:
        added = take(change + at, inside)
        if KEEP:
            added *= take(keep + row // tokens, here)[:, None]
        value += added
        put(total + at, value, inside)
    centre = tl.sum(value, 1) / C
    centred = tl.where(inside, value - centre[:, None], 0.0)
    scale = 1.0 / tl.sqrt(tl.sum(centred * centred, 1) / C + eps)
    result = centred * scale[:, None] * take(weight + channel, wide)[None, :] + take(bias + channel, wide)[None, :]
    put(normed + at, result, inside)
    put(mean + row, centre, here)
    put(rstd + row, scale, here)


class Normed(NamedTuple):
    """A norm's input (L, C) float32, its result (L, C), and its statistics (L) float32."""

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
    _add_norm_kernel[(max(1, triton.cdiv(layout.rows, NORM_ROWS)),)](
        x, change, keep, weight, bias, total, normed, mean, rstd, layout.rows, layout.tokens, eps,
        C=layout.width, BLOCK=triton.next_power_of_2(layout.width), ROWS=NORM_ROWS, ADD=change is not None,
        KEEP=keep is not None, num_warps=NORM_WARPS,
    )  # fmt: skip
    return Normed(total, normed, mean, rstd)


@triton.jit
def _norm_backward_kernel(
    grad_a, grad_b, share_a, share_b, grad_own, grad_near, normed, x, mean, rstd, weight, grad_total, keep,
    grad_x, grad_change, sums, rows, tokens, lines, columns,
    C: tl.constexpr, BLOCK: tl.constexpr, HEAD: tl.constexpr, PART: tl.constexpr, VECTOR: tl.constexpr,
    TWO: tl.constexpr, INVERSE: tl.constexpr, PARTS: tl.constexpr, CHANGE: tl.constexpr, KEEP: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """From the gradients of one or two mixes of a norm's result and its neighbours to that of the norm's input.

    `sums` (programs, 4, C) receives those of the two shares, of the norm's weight and of its bias.
    """
    channel = tl.arange(0, BLOCK)
    wide = channel < C
    part_a = take(share_a + channel, wide)
    if INVERSE:
        part_a = 1.0 - part_a
    if TWO:
        part_b = take(share_b + channel, wide)
        if INVERSE:
            part_b = 1.0 - part_b
    factor = take(weight + channel, wide)[None, :]
    sum_a = tl.zeros((1, BLOCK), tl.float32)
    sum_b = tl.zeros((1, BLOCK), tl.float32)
    sum_weight = tl.zeros((1, BLOCK), tl.float32)
    sum_bias = tl.zeros((1, BLOCK), tl.float32)
    for first in tl.range(tl.program_id(0), rows, tl.num_programs(0), num_stages=STAGES):
        row = first + tl.arange(0, 1)
        inside = wide[None, :]
        at = row.to(tl.int64)[:, None] * C + channel[None, :]
        step, exists = neighbour(row % tokens, channel, lines, columns, C, HEAD, PART, VECTOR, False)
        delta = take_neighbour(normed, at, step, inside & exists, VECTOR) - take(normed + at, inside)
        step, exists = neighbour(row % tokens, channel, lines, columns, C, HEAD, PART, VECTOR, True)
        exists = inside & exists
        mixed = take(grad_a + at, inside)
        sum_a += mixed * delta
        grad = mixed * (1.0 - part_a)[None, :] + take_neighbour(grad_a, at, step, exists, VECTOR) * part_a[None, :]
        if TWO:
            mixed = take(grad_b + at, inside)
            sum_b += mixed * delta
            grad += mixed * (1.0 - part_b)[None, :]
            grad += take_neighbour(grad_b, at, step, exists, VECTOR) * part_b[None, :]
        if PARTS:
            grad += take(grad_own + at, inside) + take_neighbour(grad_near, at, step, exists, VECTOR)
        scale = tl.load(rstd + row)[:, None]
        hat = tl.where(inside, (take(x + at, inside) - tl.load(mean + row)[:, None]) * scale, 0.0)
        sum_weight += grad * hat
        sum_bias += grad
        grad *= factor
        along = tl.sum(grad * hat, 1)[:, None] / C
        grad = (grad - tl.sum(grad, 1)[:, None] / C - hat * along) * scale + take(grad_total + at, inside)
        put(grad_x + at, grad, inside)
        if CHANGE:
            if KEEP:
                grad *= tl.load(keep + row // tokens)[:, None]
            put(grad_change + at, grad, inside)
    place = sums + tl.program_id(0) * 4 * C + channel[None, :]
    if INVERSE:
        sum_a, sum_b = -sum_a, -sum_b
    tl.store(place, sum_a, mask=wide[None, :])
    tl.store(place + C, sum_b, mask=wide[None, :])
    tl.store(place + 2 * C, sum_weight, mask=wide[None, :])
    tl.store(place + 3 * C, sum_bias, mask=wide[None, :])


def norm_backward(
    grads: tuple[Tensor, ...],
    shares: tuple[Tensor, ...],
    saved: Normed,
    weight: Tensor,
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
    programs = max(1, min(layout.programs, layout.rows))
    sums = torch.empty((programs, 4, layout.width), dtype=torch.float32, device=x.device)
    two = len(grads) == 2
    own, near = parts or (None, None)
    _norm_backward_kernel[(programs,)](
        grads[0], grads[1] if two else None, shares[0], shares[1] if two else None, own, near,
        saved.normed, x, saved.mean, saved.rstd, weight, grad_total, keep, grad_x, grad_change, sums,
        layout.rows, layout.tokens, layout.lines, layout.columns,
        C=layout.width, BLOCK=triton.next_power_of_2(layout.width), HEAD=layout.head, PART=layout.part,
        VECTOR=layout.vector, TWO=two, INVERSE=inverse, PARTS=parts is not None,
        CHANGE=grad_change is not None, KEEP=keep is not None, STAGES=BACK_STAGES, num_warps=BACK_WARPS,
    )  # fmt: skip
    return grad_x, grad_change, sums.sum(0)
