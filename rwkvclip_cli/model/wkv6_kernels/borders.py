"""Decays as factors, and which tokens lie between which: the exponents of WKV6's scores.

>>> down, up = around_half(decay_size(w, None, place, lane, at, inside, False), 64, False)

Every exponent is a sum of some tokens' log decays, which a product with a matrix of small constants gives. Legend: M
tokens of a tile, 16 tokens of a chunk and channels of a block.
"""

import triton
import triton.language as tl

from rwkvclip_cli.model.wkv6_kernels.parts import as_weighed, weighed

CHUNK = tl.constexpr(16)
TILE = tl.constexpr(64)
"""Tokens of a tile of the short form; the last may have fewer."""
LARGEST_FACTOR = tl.constexpr(2.0**100)
"""The largest factor that the short form takes: with as large a one's inverse float32 holds both."""
LARGEST_FACTOR_FULL = tl.constexpr(2.0**24)
"""For float32 tensors: the rounding of a larger exponent would show in their results."""
LOG2_E = tl.constexpr(1.4426950408889634)
LOG2_LOG2_E = tl.constexpr(0.5287663729448977)
LARGEST_LOG2_SIZE = tl.constexpr(15.8)
"""2 to the power of minus 2 to this power is 0 in float32, and float16 holds the latter."""
NO_DECAY = tl.constexpr(-1e30)
"""A raw decay whose exponential is 0."""


@triton.jit
def decay_size(w, base, place, lane, at, inside, HAS_BASE: tl.constexpr):
    """The decays of 16 channels of a tile as base-2 logarithms without their sign, 0 where there is no token."""
    raw = tl.load(w + place + at, mask=inside, other=NO_DECAY).to(tl.float32)
    if HAS_BASE:
        raw += tl.load(base + at + lane)[None, :].to(tl.float32)
    # exp(raw) * log2(e), kept below what float16 can hold; a NaN stays one.
    return tl.exp2(tl.minimum(raw * LOG2_E + LOG2_LOG2_E, LARGEST_LOG2_SIZE, propagate_nan=tl.PropagateNan.ALL))


@triton.jit
def half_weights(row, column):
    """Of which log decays (columns) the sum leads from half of a tile's decay back to before a token (row)."""
    return tl.where(column >= row, 0.5, -0.5)


@triton.jit
def around_half(size, M: tl.constexpr, FULL: tl.constexpr):
    """A tile's factors by which later tokens receive (`down`) and earlier send (`up`); the largest is down's first.

    down_t * up_s is the decay between s < t, and up_t * down_s that between t < s: with c the sum of all log decays
    before a token, down = 2^(half - c) and up = 2^(c + own - half), where half of the tile's sum keeps both in range.
    """
    row = tl.arange(0, M)
    exponent = weighed(half_weights(row[:, None], row[None, :]), size, None, FULL)
    return tl.exp2(exponent), tl.exp2(as_weighed(size, FULL) - exponent)


@triton.jit
def beyond(row, column, before: tl.constexpr):
    """Which tokens (columns) lie between a token (row) and the tile's first edge (`before`) or its last."""
    if before:
        return column < row
    else:
        return column > row


@triton.jit
def head_place(head, heads, tokens, N: tl.constexpr):
    """Where a head (of B H) begins in (B, T, H, N) tensors, how far its tokens lie apart, and where in (H, N) ones."""
    stride = heads * N
    channel = (head % heads) * N
    return (head // heads).to(tl.int64) * tokens * stride + channel, stride, channel
