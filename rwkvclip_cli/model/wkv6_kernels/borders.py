"""Decays as factors, and which tokens lie between which: the exponents of WKV6's scores.

>>> down, up, half = around_half(decay_size(w, None, place, lane, at, inside, False), 64, False)

Every exponent is a sum of some tokens' log decays, which a product with a matrix of small constants gives. Legend: M
tokens of a tile, 16 tokens of a chunk and channels of a block.
"""

import triton
import triton.language as tl

from rwkvclip_cli.model.wkv6_kernels.parts import weighed

CHUNK = tl.constexpr(16)
TREE_LEVELS = tl.constexpr(5)
"""Sizes of blocks, from pairs of tokens to the tree's tile, whose two halves meet at a border."""
TREE_CHUNKS = tl.constexpr(2)
"""Chunks of the tree's tile, 2^TREE_LEVELS tokens: a larger one has no room for all the masked scores."""
LARGEST_HALF = tl.constexpr(100.0)
"""The largest exponent (of 2) that the short form takes: with as large a one of the other sign float32 holds both."""
LARGEST_HALF_FULL = tl.constexpr(24.0)
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
def around_half(size, M: tl.constexpr, FULL: tl.constexpr):
    """A tile's factors by which later tokens receive (`down`) and earlier send (`up`), and their largest exponent.

    down_t * up_s is the decay between s < t, and up_t * down_s that between t < s: with c the sum of all log decays
    before a token, down = 2^(c - half) and up = 2^(half - c - own), where half of the tile's sum keeps both in range.
    """
    row = tl.arange(0, M)[:, None]
    column = tl.arange(0, M)[None, :]
    down = tl.exp2(weighed(tl.where(column >= row, 0.5, -0.5), size, None, FULL))
    up = tl.exp2(weighed(tl.where(column <= row, 0.5, -0.5), size, None, FULL))
    half = weighed(tl.full((M, M), 0.5, tl.float32), size, None, FULL)
    return down, up, half


@triton.jit
def to_border(half: tl.constexpr, row, column):
    """Which tokens (columns) lie between a token (row) and the border of its block of twice `half` tokens."""
    same = row // half == column // half
    right = (row // half) % 2 == 1
    return same & ((right & (column < row)) | (~right & (column > row)))


@triton.jit
def parted_at(half: tl.constexpr, row, column):
    """Which pairs of tokens are parted by the middle of a block of twice `half` tokens."""
    return (row // (2 * half) == column // (2 * half)) & (row // half != column // half)


@triton.jit
def beyond(row, column, before: tl.constexpr):
    """Which tokens (columns) lie between a token (row) and the tile's first edge (`before`) or its last."""
    if before:
        return column < row
    else:
        return column > row


@triton.jit
def any_strong(strong, tiles):
    """Whether any of a head's tiles is too strong for the short form."""
    found = tl.load(strong)
    for tile in range(1, tiles):
        found = found | tl.load(strong + tile)
    return found


@triton.jit
def head_place(head, heads, tokens, N: tl.constexpr):
    """Where a head (of B H) begins in (B, T, H, N) tensors, how far its tokens lie apart, and where in (H, N) ones."""
    stride = heads * N
    channel = (head % heads) * N
    return (head // heads).to(tl.int64) * tokens * stride + channel, stride, channel
