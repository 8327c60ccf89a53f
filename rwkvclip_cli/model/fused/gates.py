"""What lies between the matrix products behind the mixes: norm and gate of the heads, squared ReLU, the output gate.

    >>> z = head_gate(y, g, weight, bias, eps, layout)

Legend: B batch, T tokens, L = B T rows, C channels, H heads, N = C / H channels of a head.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from rwkvclip_cli.model.fused.layout import Layout, put, sigmoid, take
from rwkvclip_cli.model.launching import ceil_div, launch

HEAD_ROWS, HEAD_BACK_ROWS, HEAD_WARPS = 32, 16, 4
HEAD_PROGRAMS = 6
"""A multiprocessor's, of all heads, in the backward direction: two rounds of the three that its registers hold."""
FLAT = 2048
OUTPUT_ROWS, OUTPUT_CHANNELS = 16, 128


@triton.jit
def _head_gate_kernel(
    y, g, weight, bias, z, rows, eps,
    C: tl.constexpr, HEAD: tl.constexpr, CHUNK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """A tile of one head's rows of GroupNorm(y) * SiLU(g)."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = tl.broadcast_to((row < rows)[:, None], (ROWS, CHUNK))
    first = tl.program_id(1) * HEAD
    start = row.to(tl.int64)[:, None] * C
    values, gates = (), ()
    for index in tl.static_range(HEAD // CHUNK):
        at = start + (first + index * CHUNK + tl.arange(0, CHUNK))[None, :]
        values, gates = values + (take(y + at, inside),), gates + (take(g + at, inside),)
    hats, _ = _normalised(values, eps, HEAD, CHUNK)
    for index in tl.static_range(HEAD // CHUNK):
        channel = first + index * CHUNK + tl.arange(0, CHUNK)
        gate = gates[index]
        normed = hats[index] * tl.load(weight + channel)[None, :] + tl.load(bias + channel)[None, :]
        put(z + start + channel[None, :], normed * gate * sigmoid(gate), inside)


@triton.jit
def _normalised(values, eps, HEAD: tl.constexpr, CHUNK: tl.constexpr):
    """Rows, which lie in several chunks, of mean 0 and variance 1, and what they were multiplied by."""
    along = values[0]
    for index in tl.static_range(1, HEAD // CHUNK):
        along += values[index]
    centre = tl.sum(along, 1)[:, None] / HEAD
    squares = (values[0] - centre) * (values[0] - centre)
    for index in tl.static_range(1, HEAD // CHUNK):
        squares += (values[index] - centre) * (values[index] - centre)
    scale = (1.0 / tl.sqrt(tl.sum(squares, 1) / HEAD + eps))[:, None]
    hats = ()
    for index in tl.static_range(HEAD // CHUNK):
        hats = hats + ((values[index] - centre) * scale,)
    return hats, scale


def head_gate(y: Tensor, g: Tensor, weight: Tensor, bias: Tensor, eps: float, layout: Layout) -> Tensor:
    """GroupNorm of y over each head, times SiLU(g); y and g (L, C), the result in the type of g."""
    z = torch.empty_like(g)
    launch(
        _head_gate_kernel, (max(1, ceil_div(layout.rows, HEAD_ROWS)), layout.heads),
        y, g, weight, bias, z, layout.rows, eps,
        C=layout.width, HEAD=layout.head, CHUNK=_chunk(layout), ROWS=HEAD_ROWS, num_warps=HEAD_WARPS,
    )  # fmt: skip
    return z


@triton.jit
def _head_gate_back_kernel(
    grad_z, y, g, weight, bias, z, grad_y, grad_g, sums, rows, eps,
    C: tl.constexpr, HEAD: tl.constexpr, CHUNK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Some tiles of one head's rows, and their sums for the norm's weight and bias."""
    chunks: tl.constexpr = HEAD // CHUNK
    head = tl.program_id(1) * HEAD
    totals = ()
    for _ in tl.static_range(2 * chunks):
        totals = totals + (tl.zeros((ROWS, CHUNK), tl.float32),)
    for first in range(tl.program_id(0) * ROWS, rows, tl.num_programs(0) * ROWS):
        row = first + tl.arange(0, ROWS)
        inside = tl.broadcast_to((row < rows)[:, None], (ROWS, CHUNK))
        start = row.to(tl.int64)[:, None] * C
        # All are read before anything is written, so that no read waits for another.
        values, gates, given = (), (), ()
        for index in tl.static_range(chunks):
            at = start + (head + index * CHUNK + tl.arange(0, CHUNK))[None, :]
            values, gates = values + (take(y + at, inside),), gates + (take(g + at, inside),)
            given = given + (take(grad_z + at, inside),)
        hats, scale = _normalised(values, eps, HEAD, CHUNK)
        added, grads = (), ()
        straight = tl.zeros((ROWS, CHUNK), tl.float32)
        along = tl.zeros((ROWS, CHUNK), tl.float32)
        for index in tl.static_range(chunks):
            channel = head + index * CHUNK + tl.arange(0, CHUNK)
            at = start + channel[None, :]
            factor, hat, gate = tl.load(weight + channel)[None, :], hats[index], gates[index]
            normed = hat * factor + tl.load(bias + channel)[None, :]
            opened = sigmoid(gate)
            swish = gate * opened
            put(z + at, normed * swish, inside)
            put(grad_g + at, given[index] * normed * (opened + swish * (1.0 - opened)), inside)
            grad = given[index] * swish
            added = added + (totals[2 * index] + grad * hat, totals[2 * index + 1] + grad)
            grad *= factor
            straight += grad
            along += grad * hat
            grads = grads + (grad,)
        totals = added
        lift = tl.sum(straight, 1)[:, None] / HEAD
        turn = tl.sum(along, 1)[:, None] / HEAD
        for index in tl.static_range(chunks):
            at = start + (head + index * CHUNK + tl.arange(0, CHUNK))[None, :]
            put(grad_y + at, (grads[index] - lift - hats[index] * turn) * scale, inside)
    place = sums + tl.program_id(0) * 2 * C + head
    for index in tl.static_range(chunks):
        channel = index * CHUNK + tl.arange(0, CHUNK)
        tl.store(place + channel, tl.sum(totals[2 * index], 0))
        tl.store(place + C + channel, tl.sum(totals[2 * index + 1], 0))


def head_gate_backward(
    grad_z: Tensor, y: Tensor, g: Tensor, weight: Tensor, bias: Tensor, eps: float, grad_g: Tensor, layout: Layout
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradient of `head_gate`'s y, its result again, and (2, C) float32: the gradients of weight and bias.

    The gradient of g goes to `grad_g`.
    """
    z, grad_y = torch.empty_like(g), torch.empty_like(y)
    programs = max(1, min(layout.programs(HEAD_PROGRAMS) // layout.heads, ceil_div(layout.rows, HEAD_BACK_ROWS)))
    sums = torch.empty((programs, 2, layout.width), dtype=torch.float32, device=y.device)
    launch(
        _head_gate_back_kernel, (programs, layout.heads),
        grad_z, y, g, weight, bias, z, grad_y, grad_g, sums, layout.rows, eps,
        C=layout.width, HEAD=layout.head, CHUNK=_chunk(layout), ROWS=HEAD_BACK_ROWS, num_warps=HEAD_WARPS,
    )  # fmt: skip
    return grad_y, z, sums.sum(0)


@triton.jit
def _squared_relu_kernel(hidden, count, FLAT: tl.constexpr):
    """max(0, hidden)^2, in place."""
    at = tl.program_id(0).to(tl.int64) * FLAT + tl.arange(0, FLAT)
    value = take(hidden + at, at < count)
    # Not maximum(): a NaN has to stay one.
    value = tl.where(value < 0, 0.0, value)
    put(hidden + at, value * value, at < count)


def squared_relu_(hidden: Tensor) -> Tensor:
    """max(0, hidden)^2 in place of a contiguous tensor."""
    launch(_squared_relu_kernel, _flat(hidden), hidden, hidden.numel(), FLAT=FLAT, num_warps=4)
    return hidden


@triton.jit
def _squared_relu_back_kernel(grad, squared, count, FLAT: tl.constexpr):
    """grad * 2 sqrt(squared), in place of grad."""
    at = tl.program_id(0).to(tl.int64) * FLAT + tl.arange(0, FLAT)
    slope = 2.0 * tl.sqrt(take(squared + at, at < count))
    put(grad + at, take(grad + at, at < count) * slope, at < count)


def squared_relu_backward_(grad: Tensor, squared: Tensor) -> Tensor:
    """The gradient of `squared_relu_`'s input, from its result, in place of that of its result."""
    launch(_squared_relu_back_kernel, _flat(grad), grad, squared, grad.numel(), FLAT=FLAT, num_warps=4)
    return grad


@triton.jit
def _tanh_back_kernel(grad, result, count, FLAT: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * FLAT + tl.arange(0, FLAT)
    value = take(result + at, at < count)
    put(grad + at, take(grad + at, at < count) * (1.0 - value * value), at < count)


def tanh_backward_(grad: Tensor, result: Tensor) -> Tensor:
    """The gradient of tanh's input, from its result, in place of that of its result."""
    launch(_tanh_back_kernel, _flat(grad), grad, result, grad.numel(), FLAT=FLAT, num_warps=4)
    return grad


@triton.jit
def _output_kernel(
    x, openness, value, keep, out, rows, tokens,
    C: tl.constexpr, ROWS: tl.constexpr, CHANNELS: tl.constexpr, KEEP: tl.constexpr,
):  # fmt: skip
    """A tile of x + sigmoid(openness) * value * keep."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    here = row < rows
    inside = here[:, None] & (channel < C)[None, :]
    at = row.to(tl.int64)[:, None] * C + channel[None, :]
    change = sigmoid(take(openness + at, inside)) * take(value + at, inside)
    if KEEP:
        change *= take(keep + row // tokens, here)[:, None]
    put(out + at, take(x + at, inside) + change, inside)


def gated_sum(x: Tensor, openness: Tensor, value: Tensor, keep: Tensor | None, layout: Layout) -> Tensor:
    """x + sigmoid(openness) * value * keep, float32, for x (L, C) float32, openness and value (L, C), keep (B)."""
    out = torch.empty_like(x)
    launch(
        _output_kernel, _output_tiles(layout),
        x, openness, value, keep, out, layout.rows, layout.tokens,
        C=layout.width, ROWS=OUTPUT_ROWS, CHANNELS=OUTPUT_CHANNELS, KEEP=keep is not None, num_warps=4,
    )  # fmt: skip
    return out


@triton.jit
def _output_back_kernel(
    grad, openness, value, keep, grad_openness, grad_value, rows, tokens,
    C: tl.constexpr, ROWS: tl.constexpr, CHANNELS: tl.constexpr, KEEP: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    here = row < rows
    inside = here[:, None] & (channel < C)[None, :]
    at = row.to(tl.int64)[:, None] * C + channel[None, :]
    change = take(grad + at, inside)
    if KEEP:
        change *= take(keep + row // tokens, here)[:, None]
    opened = sigmoid(take(openness + at, inside))
    change *= opened
    put(grad_value + at, change, inside)
    put(grad_openness + at, change * take(value + at, inside) * (1.0 - opened), inside)


def gated_sum_backward(
    grad: Tensor, openness: Tensor, value: Tensor, keep: Tensor | None, layout: Layout
) -> tuple[Tensor, Tensor]:
    """The gradients of `gated_sum`'s openness and value, in their types; that of x is `grad` itself."""
    grad_openness, grad_value = torch.empty_like(openness), torch.empty_like(value)
    launch(
        _output_back_kernel, _output_tiles(layout),
        grad, openness, value, keep, grad_openness, grad_value, layout.rows, layout.tokens,
        C=layout.width, ROWS=OUTPUT_ROWS, CHANNELS=OUTPUT_CHANNELS, KEEP=keep is not None, num_warps=4,
    )  # fmt: skip
    return grad_openness, grad_value


def _chunk(layout: Layout) -> int:
    """Channels of the pieces that a head is read in: the largest power of two that divides it, so no thread is idle."""
    return layout.head & -layout.head


def _flat(x: Tensor) -> tuple[int]:
    return (max(1, ceil_div(x.numel(), FLAT)),)


def _output_tiles(layout: Layout) -> tuple[int, int]:
    return max(1, ceil_div(layout.rows, OUTPUT_ROWS)), ceil_div(layout.width, OUTPUT_CHANNELS)
