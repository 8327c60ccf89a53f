"""WKV6 in Triton kernels, forward and backward, for NVIDIA GPUs.

    >>> y = wkv6_triton(r, k, v, w, u)

Legend: B batch, T tokens, H heads, N channels of a head; M tokens of a tile, 16 tokens of a chunk.

The mathematics is `wkv6_matrix`'s: every pair of tokens is parted by one border, and its score is a product of two
vectors, each decayed to that border, so no exponent is ever positive. Inside a tile the borders are those of a binary
tree; between two tiles it is the edge of the receiving one. Every exponent is a sum of some tokens' log decays, which a
product with a matrix of zeros and ones gives; the same matrix transposed brings the gradients of the exponents back to
the tokens, so no running difference cancels. Channels are walked in blocks of 16, which any multiple of 16 divides
without waste. The gradient of v is the forward pass with r and k exchanged; that pass also leaves the T x T gradients of
the scores in memory, from which a second kernel makes the gradients of r, k and w, one block of channels at a time.
Nothing is added atomically, so results repeat bit for bit.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
CHUNK = tl.constexpr(16)
LARGEST_HALF = tl.constexpr(100.0)
LARGEST_HALF_FULL = tl.constexpr(24.0)
LOG2_E = tl.constexpr(1.4426950408889634)
LOG2_LOG2_E = tl.constexpr(0.5287663729448977)
# 2 to this power is 0 in float32, and float16, which carries the log decays into their sums, still holds it.
LEAST_EXPONENT = tl.constexpr(-60000.0)
NO_DECAY = tl.constexpr(-1e30)  # a raw decay: exp of it is 0


@triton.jit
def _dot_16(a, b, total):
    """a @ b + total for operands of 16 bits."""
    if INTERPRETED:  # whose own dot takes bfloat16's bits for integers
        return tl.dot(a.to(tl.float32), b.to(tl.float32), total)
    else:
        return tl.dot(a, b, total)


@triton.jit
def _split(x):
    """x as the sum of two bfloat16 numbers: its upper 16 bits, and what they leave out."""
    high = (x.to(tl.int32, bitcast=True) & -65536).to(tl.float32, bitcast=True)
    return high.to(tl.bfloat16), (x - high).to(tl.bfloat16)


@triton.jit
def _dot(a, b, total, MODE: tl.constexpr):
    """a @ b + total with float32 sums: operands in 16 bits (0), split into two 16-bit parts (1), or float32 (2)."""
    if MODE == 0:
        return _dot_16(a.to(tl.bfloat16), b.to(tl.bfloat16), total)
    elif MODE == 1:
        a_high, a_low = _split(a)
        b_high, b_low = _split(b)
        return _dot_16(a_high, b_low, _dot_16(a_low, b_high, _dot_16(a_high, b_high, total)))
    else:
        return tl.dot(a, b, total, input_precision="ieee")


@triton.jit
def _dot_stored(a, b, total, MODE: tl.constexpr):
    """a @ b + total for b as it lies in memory: where that is bfloat16, only a has to be rounded or split."""
    if MODE <= 1 and b.dtype == tl.bfloat16:
        if MODE == 0:
            return _dot_16(a.to(tl.bfloat16), b, total)
        else:
            high, low = _split(a)
            return _dot_16(low, b, _dot_16(high, b, total))
    else:
        return _dot(a, b.to(tl.float32), total, MODE)


@triton.jit
def _dot_both_stored(a, b, total, MODE: tl.constexpr):
    """a @ b + total for a and b as they lie in memory: exact products where both have 16 bits."""
    if a.dtype == b.dtype and a.dtype != tl.float32:
        return _dot_16(a, b, total)
    else:
        return _dot(a.to(tl.float32), b.to(tl.float32), total, MODE)


@triton.jit
def _summed(selection, x, MODE: tl.constexpr):
    """selection @ x, where `selection` holds truth values: sums of rows of x, precise to 2^-11 of its largest at least."""
    if MODE == 2:
        return tl.dot(selection.to(tl.float32), x, input_precision="ieee")
    else:
        return _dot_16(selection.to(tl.float32).to(tl.float16), x.to(tl.float16), None)


@triton.jit
def _summed_exactly(selection, x, MODE: tl.constexpr):
    """selection @ x for x of any range: 16 bits of x's precision at least."""
    if MODE == 2:
        return tl.dot(selection.to(tl.float32), x, input_precision="ieee")
    else:
        ones = selection.to(tl.float32).to(tl.bfloat16)
        high, low = _split(x)
        return _dot_16(ones, low, _dot_16(ones, high, None))


@triton.jit
def _to_border(half: tl.constexpr, row, column):
    """Which tokens (columns) lie between a token (row) and the border of its block of twice `half` tokens."""
    same = row // half == column // half
    right = (row // half) % 2 == 1
    return same & ((right & (column < row)) | (~right & (column > row)))


@triton.jit
def _parted(half: tl.constexpr, row, column):
    """Which pairs of tokens are parted by the middle of a block of twice `half` tokens."""
    return (row // (2 * half) == column // (2 * half)) & (row // half != column // half)


@triton.jit
def _chunked(x, CHUNKS: tl.constexpr):
    return tl.reshape(x, (CHUNKS, CHUNK, CHUNK))


@triton.jit
def _transposed(x):
    """The last two axes exchanged."""
    if len(x.shape) == 3:
        return tl.permute(x, (0, 2, 1))
    else:
        return tl.trans(x)


@triton.jit
def _parts(x, MODE: tl.constexpr):
    """x as two tensors of the operands' type that add up to it; the second counts in the split mode alone."""
    if MODE == 0:
        high = x.to(tl.bfloat16)
        return high, high
    elif MODE == 1:
        return _split(x)
    else:
        return x, x


@triton.jit
def _dot_parts(a_high, a_low, b_high, b_low, total, MODE: tl.constexpr):
    """a @ b + total of two tensors' parts."""
    if MODE == 2:
        return tl.dot(a_high, b_high, total, input_precision="ieee")
    else:
        total = _dot_16(a_high, b_high, total)
        if MODE == 1:
            total = _dot_16(a_high, b_low, _dot_16(a_low, b_high, total))
        return total


@triton.jit
def _dot_back(a_high, a_low, b_high, b_low, total, MODE: tl.constexpr):
    """a^T @ b + total of two tensors' parts."""
    return _dot_parts(tl.trans(a_high), tl.trans(a_low), b_high, b_low, total, MODE)


@triton.jit
def _dot_across(a_high, a_low, b_high, b_low, total, MODE: tl.constexpr):
    """a @ b^T + total of two tensors' parts."""
    return _dot_parts(a_high, a_low, tl.trans(b_high), tl.trans(b_low), total, MODE)


@triton.jit
def _store_parts(high_pointer, low_pointer, where, x, MODE: tl.constexpr):
    """Keep x in the precision of the mode's operands."""
    high, low = _parts(x, MODE)
    tl.store(high_pointer + where, high)
    if MODE == 1:
        tl.store(low_pointer + where, low)


@triton.jit
def _load_parts(high_pointer, low_pointer, where, MODE: tl.constexpr):
    """What `_store_parts` kept."""
    x = tl.load(high_pointer + where).to(tl.float32)
    if MODE == 1:
        x += tl.load(low_pointer + where).to(tl.float32)
    return x


@triton.jit
def _forward_kernel(
    r, k, v, w, u, base, y, other, products, strong, tokens, heads,
    N: tl.constexpr, CHUNKS: tl.constexpr, MODE: tl.constexpr, HAS_BASE: tl.constexpr, WITH_PRODUCTS: tl.constexpr,
    MANY: tl.constexpr, TREE: tl.constexpr, FLAGS: tl.constexpr,
):  # fmt: skip
    """One tile of rows of y = scores @ v. With WITH_PRODUCTS also the rows of v @ other^T into `products`, padded.

    The short form (not TREE) leaves in `strong` whether the decays are too strong for it; the tree then does those.
    """
    M: tl.constexpr = CHUNKS * CHUNK
    BLOCKS: tl.constexpr = N // CHUNK
    tiles = tl.cdiv(tokens, M)
    tile = tl.program_id(0) % tiles
    head = tl.program_id(0) // tiles
    if TREE:
        if not _any_strong(strong + head * FLAGS, FLAGS):
            return
    stride = heads * N
    first = (head // heads).to(tl.int64) * tokens * stride + (head % heads) * N
    u += (head % heads) * N
    if HAS_BASE:
        base += (head % heads) * N
    r, k, v, w, y = r + first, k + first, v + first, w + first, y + first

    row = tl.arange(0, M)
    lane = tl.arange(0, CHUNK)
    own = tile * M + row
    inside = (own < tokens)[:, None]
    place = own[:, None] * stride + lane[None, :]
    earlier = row[:, None] > row[None, :]
    diagonal = row[:, None] == row[None, :]

    # Asked for first, used last.
    v_tiles = ()
    for block in tl.static_range(BLOCKS):
        v_tiles = v_tiles + (tl.load(v + place + block * CHUNK, mask=inside, other=0.0),)
    below = tl.zeros((M, M), tl.float32)
    above = tl.zeros((M, M), tl.float32)
    bonus = tl.zeros((M, CHUNK), tl.float32)
    largest = tl.zeros((M, CHUNK), tl.float32)
    if not TREE:
        for block in range(BLOCKS):
            at = block * CHUNK
            r_tile = tl.load(r + place + at, mask=inside, other=0.0).to(tl.float32)
            k_tile = tl.load(k + place + at, mask=inside, other=0.0).to(tl.float32)
            size = _decay_size(w, base, place, lane, at, inside, HAS_BASE)
            down, up, half = _around_half(size, M, MODE)
            largest = tl.maximum(largest, half, propagate_nan=tl.PropagateNan.ALL)
            bonus += r_tile * tl.load(u + at + lane)[None, :].to(tl.float32) * k_tile
            r_down, r_down_low = _parts(r_tile * down, MODE)
            k_up, k_up_low = _parts(k_tile * up, MODE)
            below = _dot_across(r_down, r_down_low, k_up, k_up_low, below, MODE)
            r_up, r_up_low = _parts(r_tile * up, MODE)
            k_down, k_down_low = _parts(k_tile * down, MODE)
            above = _dot_across(r_up, r_up_low, k_down, k_down_low, above, MODE)
        tl.store(strong + head * tiles + tile, tl.max(largest) > (LARGEST_HALF_FULL if MODE == 2 else LARGEST_HALF))
    else:
        for block in range(BLOCKS):
            at = block * CHUNK
            r_tile = tl.load(r + place + at, mask=inside, other=0.0).to(tl.float32)
            k_tile = tl.load(k + place + at, mask=inside, other=0.0).to(tl.float32)
            size = _decay_size(w, base, place, lane, at, inside, HAS_BASE)
            bonus += r_tile * tl.load(u + at + lane)[None, :].to(tl.float32) * k_tile
            for level in tl.static_range(0, 4 if CHUNKS == 1 else 5 if CHUNKS == 2 else 6):
                factor = tl.exp2(-_counted(_to_border(2**level, row[:, None], row[None, :]), size, None, MODE))
                r_part, r_low = _parts(r_tile * factor, MODE)
                k_part, k_low = _parts(k_tile * factor, MODE)
                scores = _dot_across(r_part, r_low, k_part, k_low, None, MODE)
                below += tl.where(_parted(2**level, row[:, None], row[None, :]), scores, 0.0)
        above = below
    scores = tl.where(earlier, below, tl.where(diagonal, tl.sum(bonus, axis=1)[:, None], above))
    high, low = _parts(scores, MODE)
    totals = ()
    for block in tl.static_range(BLOCKS):
        totals = totals + (_dot_parts_stored(high, low, v_tiles[block], tl.zeros((M, CHUNK), tl.float32), MODE),)
    if WITH_PRODUCTS:
        other += first
        products += (head.to(tl.int64) * tiles * M + own[:, None]) * (tiles * M)
        low_products = products + (tl.num_programs(0) // tiles).to(tl.int64) * (tiles * M) * (tiles * M)
        product = _products(v_tiles, other, stride, own, tokens, N, M, MODE)
        _store_parts(products, low_products, own[None, :], product, MODE)

    # Other tiles, the nearer first, to the left and then to the right; `between` sums the decays of tiles passed by.
    for side in tl.static_range(2 if MANY else 0):
        received = ()
        received_low = ()
        between = ()
        for block in tl.static_range(BLOCKS):
            size = _decay_size(w, base, place, lane, block * CHUNK, inside, HAS_BASE)
            factor = tl.exp2(-_counted(_beyond(row[:, None], row[None, :], side == 0), size, None, MODE))
            r_tile = tl.load(r + place + block * CHUNK, mask=inside, other=0.0).to(tl.float32)
            part, rest = _parts(r_tile * factor, MODE)
            received = received + (part,)
            received_low = received_low + (rest,)
            between = between + (tl.zeros((M, CHUNK), tl.float32),)
        count = tile if side == 0 else tiles - 1 - tile
        for distance in range(1, count + 1):
            there = (tile - distance if side == 0 else tile + distance) * M + row
            there_inside = (there < tokens)[:, None]
            there_place = there[:, None] * stride + lane[None, :]
            there_v = ()
            for block in tl.static_range(BLOCKS):
                there_v = there_v + (tl.load(v + there_place + block * CHUNK, mask=there_inside, other=0.0),)
            scores = tl.zeros((M, M), tl.float32)
            passed = ()
            for block in tl.static_range(BLOCKS):
                size = _decay_size(w, base, there_place, lane, block * CHUNK, there_inside, HAS_BASE)
                away = _beyond(row[:, None], row[None, :], side == 1)
                factor = tl.exp2(-_counted(away, size, between[block], MODE))
                k_tile = tl.load(k + there_place + block * CHUNK, mask=there_inside, other=0.0).to(tl.float32)
                part, rest = _parts(k_tile * factor, MODE)
                scores = _dot_across(received[block], received_low[block], part, rest, scores, MODE)
                passed = passed + (_counted(row[:, None] >= 0 * row[None, :], size, between[block], MODE),)
            between = passed
            high, low = _parts(scores, MODE)
            added = ()
            for block in tl.static_range(BLOCKS):
                added = added + (_dot_parts_stored(high, low, there_v[block], totals[block], MODE),)
            totals = added
            if WITH_PRODUCTS:
                product = _products(v_tiles, other, stride, there, tokens, N, M, MODE)
                _store_parts(products, low_products, there[None, :], product, MODE)
    for block in tl.static_range(BLOCKS):
        tl.store(y + place + block * CHUNK, totals[block], mask=inside)


@triton.jit
def _any_strong(strong, tiles):
    """Whether any of a head's tiles is too strong for the short form."""
    found = tl.load(strong)
    for tile in range(1, tiles):
        found = found | tl.load(strong + tile)
    return found


@triton.jit
def _decay_size(w, base, place, lane, at, inside, HAS_BASE: tl.constexpr):
    """The decays of 16 channels of a tile as base-2 logarithms without their sign, 0 where there is no token."""
    raw = tl.load(w + place + at, mask=inside, other=NO_DECAY).to(tl.float32)
    if HAS_BASE:
        raw += tl.load(base + at + lane)[None, :].to(tl.float32)
    # exp(raw) * log2(e), kept below what float16 can hold; a NaN stays one.
    return tl.exp2(tl.minimum(raw * LOG2_E + LOG2_LOG2_E, 15.8, propagate_nan=tl.PropagateNan.ALL))


@triton.jit
def _around_half(size, M: tl.constexpr, MODE: tl.constexpr):
    """A tile's factors by which later tokens receive (`down`) and earlier send (`up`), and their largest exponent.

    down_t * up_s is the decay between s < t, and up_t * down_s that between t < s: with c the sum of all log decays
    before a token, down = 2^(c - half) and up = 2^(half - c - own), where half of the tile's sum keeps both in range.
    """
    row = tl.arange(0, M)[:, None]
    column = tl.arange(0, M)[None, :]
    down = tl.exp2(_weighed(tl.where(column >= row, 0.5, -0.5), size, None, MODE))
    up = tl.exp2(_weighed(tl.where(column <= row, 0.5, -0.5), size, None, MODE))
    half = _weighed(tl.full((M, M), 0.5, tl.float32), size, None, MODE)
    return down, up, half


@triton.jit
def _counted(selection, size, total, MODE: tl.constexpr):
    """selection @ size + total, where `selection` holds truth values."""
    return _weighed(selection.to(tl.float32), size, total, MODE)


@triton.jit
def _weighed(weights, x, total, MODE: tl.constexpr):
    """weights @ x + total, precise to 2^-11 of each summand; float16 holds the `weights` exactly."""
    if MODE == 2:
        return tl.dot(weights, x, total, input_precision="ieee")
    else:
        return _dot_16(weights.to(tl.float16), x.to(tl.float16), total)


@triton.jit
def _beyond(row, column, before: tl.constexpr):
    """Which tokens (columns) lie between a token (row) and the tile's first edge (`before`) or its last."""
    if before:
        return column < row
    else:
        return column > row


@triton.jit
def _products(v_tiles, other, stride, columns, tokens, N: tl.constexpr, M: tl.constexpr, MODE: tl.constexpr):
    """v @ other^T for some rows of both, (M, M)."""
    total = tl.zeros((M, M), tl.float32)
    channel = tl.arange(0, CHUNK)[None, :]
    for block in tl.static_range(N // CHUNK):
        where = columns[:, None] * stride + channel + block * CHUNK
        right = tl.load(other + where, mask=(columns < tokens)[:, None], other=0.0)
        total = _dot_both_stored(v_tiles[block], tl.trans(right), total, MODE)
    return total


@triton.jit
def _dot_parts_stored(high, low, b, total, MODE: tl.constexpr):
    """a @ b + total for the parts of a and for b as it lies in memory."""
    if MODE <= 1 and b.dtype == tl.bfloat16:
        total = _dot_16(high, b, total)
        if MODE == 1:
            total = _dot_16(low, b, total)
        return total
    else:
        b_high, b_low = _parts(b.to(tl.float32), MODE)
        return _dot_parts(high, low, b_high, b_low, total, MODE)


@triton.jit
def _backward_kernel(
    r, k, w, u, base, products, grad_r, grad_k, grad_w, grad_u, grad_base, gaps, strong, tokens, heads,
    N: tl.constexpr, CHUNKS: tl.constexpr, GAPS: tl.constexpr, MODE: tl.constexpr, HAS_BASE: tl.constexpr,
    TREE: tl.constexpr, FLAGS: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """One head's gradients of r, k, w, u and base from `products`, the gradients of its scores."""
    M: tl.constexpr = CHUNKS * CHUNK
    BLOCKS: tl.constexpr = N // CHUNK
    tiles = tl.cdiv(tokens, M)
    head = tl.program_id(0)
    if TREE:
        if not _any_strong(strong + head * FLAGS, FLAGS):
            return
    stride = heads * N
    first = (head // heads).to(tl.int64) * tokens * stride + (head % heads) * N
    u += (head % heads) * N
    if HAS_BASE:
        base += (head % heads) * N
    r, k, w = r + first, k + first, w + first
    grad_r, grad_k, grad_w = grad_r + first, grad_k + first, grad_w + first
    padded = tiles * M
    products += head.to(tl.int64) * padded * padded
    low_products = products + tl.num_programs(0).to(tl.int64) * padded * padded
    gaps += head.to(tl.int64) * GAPS * N

    row = tl.arange(0, M)
    lane = tl.arange(0, CHUNK)
    tile_of_gap = tl.arange(0, GAPS)
    earlier = row[:, None] > row[None, :]
    later = row[:, None] < row[None, :]

    for tile in range(tiles):
        own = tile * M + row
        inside = (own < tokens)[:, None]
        place = own[:, None] * stride + lane[None, :]
        square = own[:, None] * padded + own[None, :]

        # The gradients of what tokens receive: from earlier ones (below the diagonal), later ones and themselves.
        product = tl.load(products + square)
        rest = product
        if MODE == 1:
            rest = tl.load(low_products + square)
        below = tl.where(earlier, product, 0.0)
        above = tl.where(later, product, 0.0)
        below_low = tl.where(earlier, rest, 0.0)
        above_low = tl.where(later, rest, 0.0)
        diagonal = _load_parts(products, low_products, own * padded + own, MODE)[:, None]

        for block in range(BLOCKS):
            at = block * CHUNK
            r_tile = tl.load(r + place + at, mask=inside, other=0.0).to(tl.float32)
            k_tile = tl.load(k + place + at, mask=inside, other=0.0).to(tl.float32)
            size = _decay_size(w, base, place, lane, at, inside, HAS_BASE)
            u_row = tl.load(u + at + lane)[None, :].to(tl.float32)
            grad_r_tile = diagonal * u_row * k_tile
            grad_k_tile = diagonal * u_row * r_tile
            total_u = tl.sum(diagonal * r_tile * k_tile, axis=0)
            if not TREE:
                down, up, _ = _around_half(size, M, MODE)
                part, low = _parts(k_tile * up, MODE)
                r_below = down * _dot_parts(below, below_low, part, low, None, MODE)
                part, low = _parts(k_tile * down, MODE)
                r_above = up * _dot_parts(above, above_low, part, low, None, MODE)
                part, low = _parts(r_tile * down, MODE)
                k_below = up * _dot_parts(tl.trans(below), tl.trans(below_low), part, low, None, MODE)
                part, low = _parts(r_tile * up, MODE)
                k_above = down * _dot_parts(tl.trans(above), tl.trans(above_low), part, low, None, MODE)
                grad_r_tile += r_below + r_above
                grad_k_tile += k_below + k_above
                into_up = r_tile * r_above + k_tile * k_below
                change = r_tile * r_below + k_tile * k_above - into_up
                grad_decay = _summed_exactly(later, change, MODE) - into_up
            else:
                grad_decay = tl.zeros((M, CHUNK), tl.float32)
                for level in tl.static_range(0, 4 if CHUNKS == 1 else 5 if CHUNKS == 2 else 6):
                    factor = tl.exp2(-_counted(_to_border(2**level, row[:, None], row[None, :]), size, None, MODE))
                    parted = _parted(2**level, row[:, None], row[None, :])
                    here = tl.where(parted, product, 0.0)
                    here_low = tl.where(parted, rest, 0.0)
                    part, low = _parts(k_tile * factor, MODE)
                    level_r = factor * _dot_parts(here, here_low, part, low, None, MODE)
                    part, low = _parts(r_tile * factor, MODE)
                    level_k = factor * _dot_parts(tl.trans(here), tl.trans(here_low), part, low, None, MODE)
                    grad_r_tile += level_r
                    grad_k_tile += level_k
                    spanned = _to_border(2**level, row[None, :], row[:, None])
                    grad_decay += _summed_exactly(spanned, r_tile * level_r + k_tile * level_k, MODE)

            # Other tiles, the nearer first. A pair with whole tiles between it leaves its sum for those in `gaps`;
            # the barriers part what some threads of the program write there from what others read.
            if GAPS > 1:
                gap = gaps + tile_of_gap[:, None] * N + at + lane[None, :]
                farther = (tile_of_gap > tile) & (tile_of_gap < tiles)
                grad_decay += tl.sum(tl.load(gap, mask=farther[:, None], other=0.0), axis=0)[None, :]
                tl.debug_barrier()
                for side in tl.static_range(2):
                    own_factor = tl.exp2(-_counted(_beyond(row[:, None], row[None, :], side == 0), size, None, MODE))
                    passed = tl.zeros((M, CHUNK), tl.float32)
                    weight = tl.zeros((M, CHUNK), tl.float32)
                    count = tile if side == 0 else tiles - 1 - tile
                    for distance in range(1, count + 1):
                        other_tile = tile - distance if side == 0 else tile + distance
                        there = other_tile * M + row
                        there_inside = (there < tokens)[:, None]
                        there_place = there[:, None] * stride + lane[None, :]
                        there_r = tl.load(r + there_place + at, mask=there_inside, other=0.0).to(tl.float32)
                        there_k = tl.load(k + there_place + at, mask=there_inside, other=0.0).to(tl.float32)
                        there_size = _decay_size(w, base, there_place, lane, at, there_inside, HAS_BASE)
                        received_at = own[:, None] * padded + there[None, :]
                        sent_at = there[:, None] * padded + own[None, :]
                        received = tl.load(products + received_at)
                        sent = tl.load(products + sent_at)
                        received_low = received
                        sent_low = sent
                        if MODE == 1:
                            received_low = tl.load(low_products + received_at)
                            sent_low = tl.load(low_products + sent_at)
                        away = _beyond(row[:, None], row[None, :], side == 1)
                        factor = tl.exp2(-_counted(away, there_size, passed, MODE))
                        passed = _counted(row[:, None] >= 0 * row[None, :], there_size, passed, MODE)
                        part, low = _parts(there_k * factor, MODE)
                        pair_r = own_factor * _dot_parts(received, received_low, part, low, None, MODE)
                        part, low = _parts(there_r * factor, MODE)
                        pair_k = own_factor * _dot_parts(tl.trans(sent), tl.trans(sent_low), part, low, None, MODE)
                        grad_r_tile += pair_r
                        grad_k_tile += pair_k
                        pair_weight = r_tile * pair_r + k_tile * pair_k
                        weight += pair_weight
                        if side == 1 and distance > 1:
                            gap_there = gaps + other_tile * N + at + lane
                            tl.store(gap_there, tl.load(gap_there) + tl.sum(pair_weight, axis=0))
                    grad_decay += _summed_exactly(_beyond(row[None, :], row[:, None], side == 0), weight, MODE)
                tl.debug_barrier()

            grad_w_tile = grad_decay * (size * (-1.0 / LOG2_E))
            tl.store(grad_r + place + at, grad_r_tile, mask=inside)
            tl.store(grad_k + place + at, grad_k_tile, mask=inside)
            tl.store(grad_w + place + at, grad_w_tile, mask=inside)
            sums = (head * PARTS + tile) * N + at + lane
            tl.store(grad_u + sums, total_u)
            if HAS_BASE:
                tl.store(grad_base + sums, tl.sum(grad_w_tile, axis=0))


def wkv6_triton(r: Tensor, k: Tensor, v: Tensor, w: Tensor, u: Tensor) -> Tensor:
    """WKV6 through kernels; arguments, result and types as `wkv6.wkv6` describes them, on one GPU, N a multiple of 16.

    Memory beside the result is small; the backward pass takes (B, H, T, T) for a moment. Gradients are exact up to the
    rounding of the results; second ones there are none.
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
    _launch_forward(r, k, v, w, u, base, y)
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
    mode = _mode(k)
    short, tree = plans = _plans(tokens)
    kind = torch.float32 if mode == FULL else torch.bfloat16
    products = r.new_empty((1 + (mode == SPLIT), batch * heads, short.side, short.side), dtype=kind)
    strong = _launch_forward(k, r, grad_y, w, u, base, grad_v, v, products)
    sums = r.new_zeros((2, batch, heads, tree.tiles, channels), dtype=torch.float32)
    for plan in plans if batch else ():
        several = triton.next_power_of_2(plan.tiles)
        gaps = r.new_zeros((batch * heads, several, channels), dtype=torch.float32) if several > 1 else sums
        _backward_kernel[(batch * heads,)](
            r, k, w, u, base, products, grad_r, grad_k, grad_w, sums[0], sums[1], gaps, strong, tokens, heads,
            N=channels, CHUNKS=plan.chunks, GAPS=several, MODE=mode, HAS_BASE=base is not None, TREE=plan is tree,
            FLAGS=short.tiles, PARTS=tree.tiles, num_warps=plan.chunks, num_stages=plan.stages,
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
    other: Tensor | None = None,
    products: Tensor | None = None,
) -> Tensor:
    """Fill y, and `products` where given; return which tiles' decays were too strong for the short form."""
    batch, tokens, heads, channels = r.shape
    short, tree = plans = _plans(tokens)
    strong = r.new_empty(batch * heads * short.tiles, dtype=torch.bool)
    for plan in plans if batch else ():
        _forward_kernel[(batch * heads * plan.tiles,)](
            r, k, v, w, u, base, y, other, products, strong, tokens, heads,
            N=channels, CHUNKS=plan.chunks, MODE=_mode(k), HAS_BASE=base is not None,
            WITH_PRODUCTS=products is not None and plan is short, MANY=plan.tiles > 1, TREE=plan is tree,
            FLAGS=short.tiles, num_warps=plan.chunks, num_stages=plan.stages,
        )  # fmt: skip
    return strong


ROUNDED, SPLIT, FULL = range(3)


class _Plan(NamedTuple):
    """How tokens are cut into tiles of as many chunks as warps work on them."""

    chunks: int
    tiles: int
    stages: int

    @property
    def side(self) -> int:
        """Tokens of all tiles, real or not."""
        return self.tiles * self.chunks * CHUNK.value


def _plans(tokens: int) -> tuple[_Plan, _Plan]:
    """The plans of the short form and of the tree: of the same side, as the one reads what the other left."""
    tree = triton.cdiv(tokens, 2 * CHUNK.value)
    short = _Plan(4, 1, 3) if tree == 2 else _Plan(2, tree, 2)
    return short, _Plan(2, tree, 1)


def _mode(x: Tensor) -> int:
    return FULL if x.dtype == torch.float32 else SPLIT
