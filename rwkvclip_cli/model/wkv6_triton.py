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
def _log_decay(w, base, place, lane, at, inside, HAS_BASE: tl.constexpr):
    """Base-2 logarithms of the decays of 16 channels of a tile, 0 where there is no token."""
    raw = tl.load(w + place + at, mask=inside, other=0.0).to(tl.float32)
    if HAS_BASE:
        raw += tl.load(base + at + lane)[None, :].to(tl.float32)
    decay = -tl.exp2(raw * LOG2_E) * LOG2_E
    # Not maximum(): a NaN has to stay one.
    decay = tl.where(decay < LEAST_EXPONENT, LEAST_EXPONENT, decay)
    return tl.where(inside, decay, 0.0)


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
    MANY: tl.constexpr, ONLY_STRONG: tl.constexpr,
):  # fmt: skip
    """One tile of rows of y = scores @ v. With WITH_PRODUCTS also the rows of v @ other^T into `products`, padded."""
    M: tl.constexpr = CHUNKS * CHUNK
    BLOCKS: tl.constexpr = N // CHUNK
    tiles = tl.cdiv(tokens, M)
    tile = tl.program_id(0) % tiles
    head = tl.program_id(0) // tiles
    if ONLY_STRONG:
        if not tl.load(strong + head):
            return
    stride = heads * N
    first = (head // heads).to(tl.int64) * tokens * stride + (head % heads) * N
    u += (head % heads) * N
    if HAS_BASE:
        base += (head % heads) * N
    r, k, v, w, y = r + first, k + first, v + first, w + first, y + first

    row = tl.arange(0, M)
    column = tl.arange(0, M)
    lane = tl.arange(0, CHUNK)
    own = tile * M + row
    inside = (own < tokens)[:, None]
    place = own[:, None] * stride + lane[None, :]
    chunk3 = tl.arange(0, CHUNKS)[:, None, None]
    # A selection needs its first axis in full, for the product of three-dimensional tiles.
    row3 = tl.arange(0, CHUNK)[None, :, None] + 0 * chunk3
    column3 = tl.arange(0, CHUNK)[None, None, :]

    near = tl.zeros((CHUNKS, CHUNK, CHUNK), tl.float32)
    far = tl.zeros((M, M), tl.float32)
    farther = tl.zeros((M, M), tl.float32)
    bonus = tl.zeros((M,), tl.float32)
    for block in range(BLOCKS):
        at = block * CHUNK
        r_tile = tl.load(r + place + at, mask=inside, other=0.0).to(tl.float32)
        k_tile = tl.load(k + place + at, mask=inside, other=0.0).to(tl.float32)
        decay = _log_decay(w, base, place, lane, at, inside, HAS_BASE)
        bonus += tl.sum(r_tile * tl.load(u + at + lane)[None, :].to(tl.float32) * k_tile, axis=1)
        r3 = _chunked(r_tile, CHUNKS)
        k3 = _chunked(k_tile, CHUNKS)
        decay3 = _chunked(decay, CHUNKS)
        near += tl.where(_parted(1, row3, column3), _dot(r3, _transposed(k3), None, MODE), 0.0)
        for level in tl.static_range(1, 4):
            factor = tl.exp2(_summed(_to_border(2**level, row3, column3), decay3, MODE))
            scores = _dot(r3 * factor, _transposed(k3 * factor), None, MODE)
            near += tl.where(_parted(2**level, row3, column3), scores, 0.0)
        if CHUNKS >= 2:
            factor = tl.exp2(_summed(_to_border(16, row[:, None], column[None, :]), decay, MODE))
            far = _dot(r_tile * factor, tl.trans(k_tile * factor), far, MODE)
        if CHUNKS >= 4:
            factor = tl.exp2(_summed(_to_border(32, row[:, None], column[None, :]), decay, MODE))
            farther = _dot(r_tile * factor, tl.trans(k_tile * factor), farther, MODE)
    near += tl.where(row3 == column3, tl.reshape(bonus, (CHUNKS, CHUNK))[:, :, None], 0.0)
    if CHUNKS >= 2:
        far = tl.where(_parted(16, row[:, None], column[None, :]), far, 0.0)
    if CHUNKS >= 4:
        far += tl.where(_parted(32, row[:, None], column[None, :]), farther, 0.0)

    own3 = tile * M + chunk3 * CHUNK + tl.arange(0, CHUNK)[None, :, None]
    place3 = own3 * stride + column3
    totals = ()
    for block in tl.static_range(BLOCKS):
        v3 = tl.load(v + place3 + block * CHUNK, mask=own3 < tokens, other=0.0)
        total = tl.reshape(_dot_stored(near, v3, None, MODE), (M, CHUNK))
        if CHUNKS >= 2:
            v_tile = tl.load(v + place + block * CHUNK, mask=inside, other=0.0)
            total = _dot_stored(far, v_tile, total, MODE)
        totals = totals + (total,)
    if WITH_PRODUCTS:
        products += (head.to(tl.int64) * tiles * M + own[:, None]) * (tiles * M)
        low_products = products + (tl.num_programs(0) // tiles).to(tl.int64) * (tiles * M) * (tiles * M)
        other += first
        product = _products(v, other, stride, own, own, tokens, N, M, MODE)
        _store_parts(products, low_products, own[None, :], product, MODE)

    # Other tiles, the nearer first, to the left and then to the right; `between` sums the decays of tiles passed by.
    for side in tl.static_range(2 if MANY else 0):
        selection = _beyond(row[:, None], column[None, :], side == 0)
        away = _beyond(row[:, None], column[None, :], side == 1)
        received = ()
        between = ()
        for block in tl.static_range(BLOCKS):
            decay = _log_decay(w, base, place, lane, block * CHUNK, inside, HAS_BASE)
            factor = tl.exp2(_summed(selection, decay, MODE))
            r_tile = tl.load(r + place + block * CHUNK, mask=inside, other=0.0).to(tl.float32)
            received = received + (r_tile * factor,)
            between = between + (tl.zeros((CHUNK,), tl.float32),)
        count = tile if side == 0 else tiles - 1 - tile
        for distance in range(1, count + 1):
            there = (tile - distance if side == 0 else tile + distance) * M + row
            there_inside = (there < tokens)[:, None]
            there_place = there[:, None] * stride + lane[None, :]
            scores = tl.zeros((M, M), tl.float32)
            passed = ()
            for block in tl.static_range(BLOCKS):
                decay = _log_decay(w, base, there_place, lane, block * CHUNK, there_inside, HAS_BASE)
                factor = tl.exp2(_summed(away, decay, MODE) + between[block][None, :])
                k_tile = tl.load(k + there_place + block * CHUNK, mask=there_inside, other=0.0).to(tl.float32)
                scores = _dot(received[block], tl.trans(k_tile * factor), scores, MODE)
                passed = passed + (between[block] + tl.sum(decay, axis=0),)
            between = passed
            added = ()
            for block in tl.static_range(BLOCKS):
                v_tile = tl.load(v + there_place + block * CHUNK, mask=there_inside, other=0.0)
                added = added + (_dot_stored(scores, v_tile, totals[block], MODE),)
            totals = added
            if WITH_PRODUCTS:
                product = _products(v, other, stride, own, there, tokens, N, M, MODE)
                _store_parts(products, low_products, there[None, :], product, MODE)
    for block in tl.static_range(BLOCKS):
        tl.store(y + place + block * CHUNK, totals[block], mask=inside)


@triton.jit
def _beyond(row, column, before: tl.constexpr):
    """Which tokens (columns) lie between a token (row) and the tile's first edge (`before`) or its last."""
    if before:
        return column < row
    else:
        return column > row


@triton.jit
def _products(v, other, stride, rows, columns, tokens, N: tl.constexpr, M: tl.constexpr, MODE: tl.constexpr):
    """v @ other^T for some rows of both, (M, M)."""
    total = tl.zeros((M, M), tl.float32)
    channel = tl.arange(0, CHUNK)[None, :]
    for at in range(0, N, CHUNK):
        left = tl.load(v + rows[:, None] * stride + channel + at, mask=(rows < tokens)[:, None], other=0.0)
        right = tl.load(other + columns[:, None] * stride + channel + at, mask=(columns < tokens)[:, None], other=0.0)
        total = _dot_both_stored(left, tl.trans(right), total, MODE)
    return total


@triton.jit
def _backward_kernel(
    r, k, w, u, base, products, grad_r, grad_k, grad_w, grad_u, grad_base, gaps, strong, tokens, heads,
    N: tl.constexpr, CHUNKS: tl.constexpr, GAPS: tl.constexpr, MODE: tl.constexpr, HAS_BASE: tl.constexpr,
    ONLY_STRONG: tl.constexpr,
):  # fmt: skip
    """One head's gradients of r, k, w, u and base from `products`, the gradients of its scores."""
    M: tl.constexpr = CHUNKS * CHUNK
    BLOCKS: tl.constexpr = N // CHUNK
    tiles = tl.cdiv(tokens, M)
    head = tl.program_id(0)
    if ONLY_STRONG:
        if not tl.load(strong + head):
            return
    stride = heads * N
    first = (head // heads).to(tl.int64) * tokens * stride + (head % heads) * N
    u += (head % heads) * N
    if HAS_BASE:
        base += (head % heads) * N
    r, k, w = r + first, k + first, w + first
    grad_r, grad_k, grad_w = grad_r + first, grad_k + first, grad_w + first
    products += head.to(tl.int64) * (tiles * M) * (tiles * M)
    low_products = products + tl.num_programs(0).to(tl.int64) * (tiles * M) * (tiles * M)
    gaps += head.to(tl.int64) * GAPS * N

    row = tl.arange(0, M)
    column = tl.arange(0, M)
    lane = tl.arange(0, CHUNK)
    chunk3 = tl.arange(0, CHUNKS)[:, None, None]
    row3 = tl.arange(0, CHUNK)[None, :, None] + 0 * chunk3
    column3 = tl.arange(0, CHUNK)[None, None, :]
    tile_of_gap = tl.arange(0, GAPS)

    for tile in range(tiles):
        own = tile * M + row
        inside = (own < tokens)[:, None]
        place = own[:, None] * stride + lane[None, :]

        # The gradients of what a token receives from the others, and, exchanged, of what it sends them; level by level.
        from3 = tile * M + chunk3 * CHUNK + tl.arange(0, CHUNK)[None, :, None]
        to3 = tile * M + chunk3 * CHUNK + column3
        product3 = _load_parts(products, low_products, from3 * (tiles * M) + to3, MODE)
        exchanged3 = tl.permute(product3, (0, 2, 1))
        product = _load_parts(products, low_products, own[:, None] * (tiles * M) + own[None, :], MODE)
        exchanged = tl.trans(product)
        diagonal = _load_parts(products, low_products, own * (tiles * M) + own, MODE)[:, None]

        for block in range(BLOCKS):
            at = block * CHUNK
            r_tile = tl.load(r + place + at, mask=inside, other=0.0).to(tl.float32)
            k_tile = tl.load(k + place + at, mask=inside, other=0.0).to(tl.float32)
            decay = _log_decay(w, base, place, lane, at, inside, HAS_BASE)
            r3 = _chunked(r_tile, CHUNKS)
            k3 = _chunked(k_tile, CHUNKS)
            decay3 = _chunked(decay, CHUNKS)

            # Inside chunks.
            parted = _parted(1, row3, column3)
            grad_r3 = _dot(tl.where(parted, product3, 0.0), k3, None, MODE)
            grad_k3 = _dot(tl.where(parted, exchanged3, 0.0), r3, None, MODE)
            grad_decay3 = tl.zeros((CHUNKS, CHUNK, CHUNK), tl.float32)
            for level in tl.static_range(1, 4):
                factor = tl.exp2(_summed(_to_border(2**level, row3, column3), decay3, MODE))
                parted = _parted(2**level, row3, column3)
                level_r = factor * _dot(tl.where(parted, product3, 0.0), k3 * factor, None, MODE)
                level_k = factor * _dot(tl.where(parted, exchanged3, 0.0), r3 * factor, None, MODE)
                grad_r3 += level_r
                grad_k3 += level_k
                between = _to_border(2**level, column3 + 0 * chunk3, row3)
                grad_decay3 += _summed_exactly(between, r3 * level_r + k3 * level_k, MODE)
            grad_r_tile = tl.reshape(grad_r3, (M, CHUNK))
            grad_k_tile = tl.reshape(grad_k3, (M, CHUNK))
            grad_decay = tl.reshape(grad_decay3, (M, CHUNK))

            # The token itself.
            u_row = tl.load(u + at + lane)[None, :].to(tl.float32)
            grad_r_tile += diagonal * u_row * k_tile
            grad_k_tile += diagonal * u_row * r_tile
            total_u = tl.sum(diagonal * r_tile * k_tile, axis=0)

            # Between the chunks of the tile.
            for level in tl.static_range(4, 4 if CHUNKS == 1 else 5 if CHUNKS == 2 else 6):
                factor = tl.exp2(_summed(_to_border(2**level, row[:, None], column[None, :]), decay, MODE))
                parted = _parted(2**level, row[:, None], column[None, :])
                level_r = factor * _dot(tl.where(parted, product, 0.0), k_tile * factor, None, MODE)
                level_k = factor * _dot(tl.where(parted, exchanged, 0.0), r_tile * factor, None, MODE)
                grad_r_tile += level_r
                grad_k_tile += level_k
                between = _to_border(2**level, column[None, :], row[:, None])
                grad_decay += _summed_exactly(between, r_tile * level_r + k_tile * level_k, MODE)

            # Other tiles, the nearer first. A pair with whole tiles between it leaves its sum for those in `gaps`;
            # the barriers part what some threads of the program write there from what others read.
            if GAPS > 1:
                gap = gaps + tile_of_gap[:, None] * N + at + lane[None, :]
                later = (tile_of_gap > tile) & (tile_of_gap < tiles)
                grad_decay += tl.sum(tl.load(gap, mask=later[:, None], other=0.0), axis=0)[None, :]
                tl.debug_barrier()
                for side in tl.static_range(2):
                    away = _beyond(row[:, None], column[None, :], side == 1)
                    own_factor = tl.exp2(_summed(_beyond(row[:, None], column[None, :], side == 0), decay, MODE))
                    passed = tl.zeros((CHUNK,), tl.float32)
                    weight = tl.zeros((M, CHUNK), tl.float32)
                    count = tile if side == 0 else tiles - 1 - tile
                    for distance in range(1, count + 1):
                        other_tile = tile - distance if side == 0 else tile + distance
                        there = other_tile * M + row
                        there_inside = (there < tokens)[:, None]
                        there_place = there[:, None] * stride + lane[None, :] + at
                        there_decay = _log_decay(w, base, there_place - at, lane, at, there_inside, HAS_BASE)
                        factor = tl.exp2(_summed(away, there_decay, MODE) + passed[None, :])
                        passed += tl.sum(there_decay, axis=0)
                        there_r = tl.load(r + there_place, mask=there_inside, other=0.0).to(tl.float32) * factor
                        there_k = tl.load(k + there_place, mask=there_inside, other=0.0).to(tl.float32) * factor
                        received = _load_parts(products, low_products, own[:, None] * (tiles * M) + there[None, :], MODE)
                        sent = _load_parts(products, low_products, there[:, None] * (tiles * M) + own[None, :], MODE)
                        pair_r = own_factor * _dot(received, there_k, None, MODE)
                        pair_k = own_factor * _dot(tl.trans(sent), there_r, None, MODE)
                        grad_r_tile += pair_r
                        grad_k_tile += pair_k
                        pair_weight = r_tile * pair_r + k_tile * pair_k
                        weight += pair_weight
                        if side == 1 and distance > 1:
                            gap_there = gaps + other_tile * N + at + lane
                            tl.store(gap_there, tl.load(gap_there) + tl.sum(pair_weight, axis=0))
                    grad_decay += _summed_exactly(_beyond(column[None, :], row[:, None], side == 0), weight, MODE)
                tl.debug_barrier()

            grad_w_tile = grad_decay * (decay / LOG2_E)
            tl.store(grad_r + place + at, grad_r_tile, mask=inside)
            tl.store(grad_k + place + at, grad_k_tile, mask=inside)
            tl.store(grad_w + place + at, grad_w_tile, mask=inside)
            sums = (head * tiles + tile) * N + at + lane
            tl.store(grad_u + sums, total_u)
            if HAS_BASE:
                tl.store(grad_base + sums, tl.sum(grad_w_tile, axis=0))


@triton.jit
def _decay_size(w, base, place, lane, at, inside, HAS_BASE: tl.constexpr):
    """The decays of 16 channels of a tile as base-2 logarithms without their sign, 0 where there is no token."""
    raw = tl.load(w + place + at, mask=inside, other=-1e30).to(tl.float32)
    if HAS_BASE:
        raw += tl.load(base + at + lane)[None, :].to(tl.float32)
    # exp(raw) * log2(e), kept below what float16 can hold; a NaN stays one.
    return tl.exp2(tl.minimum(raw * LOG2_E + LOG2_LOG2_E, 15.8, propagate_nan=tl.PropagateNan.ALL))


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
def _whole_places(stride, tokens, TILE: tl.constexpr, TILES: tl.constexpr):
    """For each tile the offsets of its tokens' first 16 channels, (TILE, 16), and which tokens there are, (TILE, 1)."""
    place = ()
    inside = ()
    for tile in tl.static_range(TILES):
        token = (tl.arange(0, TILE) + tile * TILE)[:, None]
        place = place + (token * stride + tl.arange(0, CHUNK)[None, :],)
        inside = inside + (token < tokens,)
    return place, inside


@triton.jit
def _whole_factors(
    w, base, place, inside, at, TILE: tl.constexpr, TILES: tl.constexpr, HAS_BASE: tl.constexpr, MODE: tl.constexpr
):
    """For 16 channels, each tile's factors by which later tokens receive (`down`) and earlier send (`up`).

    down_t * up_s is the decay between s < t, and up_t * down_s that between t < s: with c the sum of all log decays
    before a token, down = 2^(c - half) and up = 2^(half - c - own), where half of the sum over all tokens keeps both in
    range. Third, that half, all rows alike.
    """
    row = tl.arange(0, TILE)[:, None]
    column = tl.arange(0, TILE)[None, :]
    lane = tl.arange(0, CHUNK)
    sizes = ()
    halves = ()
    for tile in tl.static_range(TILES):
        size = _decay_size(w, base, place[tile], lane, at, inside[tile], HAS_BASE)
        sizes = sizes + (size,)
        halves = halves + (_weighed(tl.full((TILE, TILE), 0.5, tl.float32), size, None, MODE),)
    downs = ()
    ups = ()
    for tile in tl.static_range(TILES):
        others = tl.zeros((TILE, CHUNK), tl.float32)
        for there in tl.static_range(TILES):
            if there > tile:
                others += halves[there]
            elif there < tile:
                others -= halves[there]
        downs = downs + (tl.exp2(_weighed(tl.where(column >= row, 0.5, -0.5), sizes[tile], others, MODE)),)
        ups = ups + (tl.exp2(_weighed(tl.where(column <= row, 0.5, -0.5), sizes[tile], -others, MODE)),)
    half = halves[0]
    for tile in tl.static_range(1, TILES):
        half += halves[tile]
    return downs, ups, half


@triton.jit
def _weighed(weights, x, total, MODE: tl.constexpr):
    """weights @ x + total, precise to 2^-11 of each summand; `weights` are halves, of which float16 loses nothing."""
    if MODE == 2:
        return tl.dot(weights, x, total, input_precision="ieee")
    else:
        return _dot_16(weights.to(tl.float16), x.to(tl.float16), total)


@triton.jit
def _forward_whole(
    r, k, v, w, u, base, y, other, products, strong, tokens, heads,
    N: tl.constexpr, TILE: tl.constexpr, TILES: tl.constexpr, FIRST: tl.constexpr, LAST: tl.constexpr,
    MODE: tl.constexpr, HAS_BASE: tl.constexpr, WITH_PRODUCTS: tl.constexpr,
):  # fmt: skip
    """Tiles FIRST to LAST - 1 of a head's y = scores @ v; leaves in `strong` whether its decays are too strong for it.

    With WITH_PRODUCTS also these rows of v @ other^T, in two parts, into `products`.
    """
    BLOCKS: tl.constexpr = N // CHUNK
    head = tl.program_id(0)
    stride = heads * N
    first = (head // heads).to(tl.int64) * tokens * stride + (head % heads) * N
    u += (head % heads) * N
    if HAS_BASE:
        base += (head % heads) * N
    r, k, v, w, y = r + first, k + first, v + first, w + first, y + first
    row = tl.arange(0, TILE)
    lane = tl.arange(0, CHUNK)
    place, inside = _whole_places(stride, tokens, TILE, TILES)

    # Scores of what tokens receive from earlier ones and from later ones; of a tile from itself both ways apart.
    scores = ()
    above = ()
    bonus = ()
    for _ in tl.static_range(FIRST, LAST):
        for _ in tl.static_range(TILES):
            scores = scores + (tl.zeros((TILE, TILE), tl.float32),)
        above = above + (tl.zeros((TILE, TILE), tl.float32),)
        bonus = bonus + (tl.zeros((TILE, CHUNK), tl.float32),)
    largest = tl.zeros((TILE, CHUNK), tl.float32)
    for block in range(BLOCKS):
        at = block * CHUNK
        downs, ups, half = _whole_factors(w, base, place, inside, at, TILE, TILES, HAS_BASE, MODE)
        largest = tl.maximum(largest, half, propagate_nan=tl.PropagateNan.ALL)
        u_row = tl.load(u + at + lane)[None, :].to(tl.float32)
        k_tiles = ()
        for tile in tl.static_range(TILES):
            k_tiles = k_tiles + (tl.load(k + place[tile] + at, mask=inside[tile], other=0.0).to(tl.float32),)
        more = ()
        more_above = ()
        more_bonus = ()
        for tile in tl.static_range(FIRST, LAST):
            r_tile = tl.load(r + place[tile] + at, mask=inside[tile], other=0.0).to(tl.float32)
            down, down_low = _parts(r_tile * downs[tile], MODE)
            up, up_low = _parts(r_tile * ups[tile], MODE)
            for there in tl.static_range(TILES):
                total = scores[(tile - FIRST) * TILES + there]
                if there <= tile:
                    high, low = _parts(k_tiles[there] * ups[there], MODE)
                    total = _dot_parts(down, down_low, tl.trans(high), tl.trans(low), total, MODE)
                else:
                    high, low = _parts(k_tiles[there] * downs[there], MODE)
                    total = _dot_parts(up, up_low, tl.trans(high), tl.trans(low), total, MODE)
                more = more + (total,)
            high, low = _parts(k_tiles[tile] * downs[tile], MODE)
            total = _dot_parts(up, up_low, tl.trans(high), tl.trans(low), above[tile - FIRST], MODE)
            more_above = more_above + (total,)
            more_bonus = more_bonus + (bonus[tile - FIRST] + r_tile * u_row * k_tiles[tile],)
        scores = more
        above = more_above
        bonus = more_bonus
    tl.store(strong + head, tl.max(largest) > (LARGEST_HALF_FULL if MODE == 2 else LARGEST_HALF))

    high_scores = ()
    low_scores = ()
    for tile in tl.static_range(FIRST, LAST):
        for there in tl.static_range(TILES):
            score = scores[(tile - FIRST) * TILES + there]
            if there == tile:
                own = tl.sum(bonus[tile - FIRST], axis=1)[:, None]
                earlier = row[:, None] > row[None, :]
                score = tl.where(earlier, score, tl.where(row[:, None] == row[None, :], own, above[tile - FIRST]))
            high, low = _parts(score, MODE)
            high_scores = high_scores + (high,)
            low_scores = low_scores + (low,)
    for block in tl.static_range(BLOCKS):
        v_tiles = ()
        for tile in tl.static_range(TILES):
            v_tiles = v_tiles + (tl.load(v + place[tile] + block * CHUNK, mask=inside[tile], other=0.0),)
        for tile in tl.static_range(FIRST, LAST):
            total = tl.zeros((TILE, CHUNK), tl.float32)
            for there in tl.static_range(TILES):
                high = high_scores[(tile - FIRST) * TILES + there]
                low = low_scores[(tile - FIRST) * TILES + there]
                total = _dot_parts_stored(high, low, v_tiles[there], total, MODE)
            tl.store(y + place[tile] + block * CHUNK, total, mask=inside[tile])

    if WITH_PRODUCTS:
        other += first
        padded: tl.constexpr = TILES * TILE
        products += head.to(tl.int64) * padded * padded
        low_products = products + tl.num_programs(0).to(tl.int64) * padded * padded
        for tile in tl.static_range(FIRST, LAST):
            for there in tl.static_range(TILES):
                total = tl.zeros((TILE, TILE), tl.float32)
                for at in range(0, N, CHUNK):
                    left = tl.load(v + place[tile] + at, mask=inside[tile], other=0.0)
                    right = tl.load(other + place[there] + at, mask=inside[there], other=0.0)
                    total = _dot_both_stored(left, tl.trans(right), total, MODE)
                where = (row + tile * TILE)[:, None] * padded + (row + there * TILE)[None, :]
                _store_parts(products, low_products, where, total, MODE)


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
def _backward_whole(
    r, k, w, u, base, products, grad_r, grad_k, grad_w, grad_u, grad_base, tokens, heads,
    N: tl.constexpr, TILE: tl.constexpr, TILES: tl.constexpr, MODE: tl.constexpr, HAS_BASE: tl.constexpr,
    PARTS: tl.constexpr,
):  # fmt: skip
    """One head's gradients of r, k, w, u and base from `products`, the gradients of its scores."""
    BLOCKS: tl.constexpr = N // CHUNK
    head = tl.program_id(0)
    stride = heads * N
    first = (head // heads).to(tl.int64) * tokens * stride + (head % heads) * N
    u += (head % heads) * N
    if HAS_BASE:
        base += (head % heads) * N
    r, k, w = r + first, k + first, w + first
    grad_r, grad_k, grad_w = grad_r + first, grad_k + first, grad_w + first
    padded: tl.constexpr = TILES * TILE
    products += head.to(tl.int64) * padded * padded
    low_products = products + tl.num_programs(0).to(tl.int64) * padded * padded
    row = tl.arange(0, TILE)
    lane = tl.arange(0, CHUNK)
    place, inside = _whole_places(stride, tokens, TILE, TILES)
    lower = row[:, None] > row[None, :]
    higher = row[:, None] < row[None, :]

    # What each tile's tokens receive from each tile's, parted by direction on the diagonal.
    below = ()
    below_low = ()
    above = ()
    above_low = ()
    own = ()
    for tile in tl.static_range(TILES):
        token = row + tile * TILE
        own = own + (_load_parts(products, low_products, token * padded + token, MODE)[:, None],)
        for there in tl.static_range(TILES):
            where = token[:, None] * padded + (row + there * TILE)[None, :]
            product = tl.load(products + where)
            rest = product
            if MODE == 1:
                rest = tl.load(low_products + where)
            if there == tile:
                below = below + (tl.where(lower, product, 0.0),)
                above = above + (tl.where(higher, product, 0.0),)
                below_low = below_low + (tl.where(lower, rest, 0.0),)
                above_low = above_low + (tl.where(higher, rest, 0.0),)
            else:
                below = below + (product,)
                above = above + (product,)
                below_low = below_low + (rest,)
                above_low = above_low + (rest,)

    for block in range(BLOCKS):
        at = block * CHUNK
        downs, ups, half = _whole_factors(w, base, place, inside, at, TILE, TILES, HAS_BASE, MODE)
        u_row = tl.load(u + at + lane)[None, :].to(tl.float32)
        r_tiles = ()
        k_tiles = ()
        for tile in tl.static_range(TILES):
            r_tiles = r_tiles + (tl.load(r + place[tile] + at, mask=inside[tile], other=0.0).to(tl.float32),)
            k_tiles = k_tiles + (tl.load(k + place[tile] + at, mask=inside[tile], other=0.0).to(tl.float32),)
        total_u = tl.zeros((TILE, CHUNK), tl.float32)
        total_base = tl.zeros((TILE, CHUNK), tl.float32)
        later = tl.zeros((TILE, CHUNK), tl.float32)
        for tile in tl.static_range(TILES - 1, -1, -1):
            r_below = tl.zeros((TILE, CHUNK), tl.float32)
            r_above = tl.zeros((TILE, CHUNK), tl.float32)
            k_below = tl.zeros((TILE, CHUNK), tl.float32)
            k_above = tl.zeros((TILE, CHUNK), tl.float32)
            for there in tl.static_range(TILES):
                if there <= tile:
                    high, low = _parts(k_tiles[there] * ups[there], MODE)
                    r_below = _dot_parts(below[tile * TILES + there], below_low[tile * TILES + there], high, low, r_below, MODE)
                    high, low = _parts(r_tiles[there] * ups[there], MODE)
                    k_above = _dot_back(above[there * TILES + tile], above_low[there * TILES + tile], high, low, k_above, MODE)
                if there >= tile:
                    high, low = _parts(k_tiles[there] * downs[there], MODE)
                    r_above = _dot_parts(above[tile * TILES + there], above_low[tile * TILES + there], high, low, r_above, MODE)
                    high, low = _parts(r_tiles[there] * downs[there], MODE)
                    k_below = _dot_back(below[there * TILES + tile], below_low[there * TILES + tile], high, low, k_below, MODE)
            r_below *= downs[tile]
            r_above *= ups[tile]
            k_below *= ups[tile]
            k_above *= downs[tile]
            into_up = r_tiles[tile] * r_above + k_tiles[tile] * k_below
            change = r_tiles[tile] * r_below + k_tiles[tile] * k_above - into_up
            # Sums of signed changes: what the split leaves out would not cancel as they do, so it is on in every mode.
            high, low = _parts(change, 1 if MODE == 0 else MODE)
            grad_decay = _selected(higher, high, low, later, MODE) - into_up
            if tile > 0:
                later = _selected(row[:, None] >= 0 * row[None, :], high, low, later, MODE)
            size = _decay_size(w, base, place[tile], lane, at, inside[tile], HAS_BASE)
            grad_w_tile = grad_decay * (size * (-1.0 / LOG2_E))
            own_u = own[tile] * u_row
            tl.store(grad_r + place[tile] + at, r_below + r_above + own_u * k_tiles[tile], mask=inside[tile])
            tl.store(grad_k + place[tile] + at, k_below + k_above + own_u * r_tiles[tile], mask=inside[tile])
            tl.store(grad_w + place[tile] + at, grad_w_tile, mask=inside[tile])
            total_u += own[tile] * r_tiles[tile] * k_tiles[tile]
            total_base += grad_w_tile
        sums = head * PARTS * N + at + lane
        tl.store(grad_u + sums, tl.sum(total_u, axis=0))
        if HAS_BASE:
            tl.store(grad_base + sums, tl.sum(total_base, axis=0))


@triton.jit
def _selected(selection, high, low, total, MODE: tl.constexpr):
    """selection @ (high + low) + total, where `selection` holds truth values."""
    if MODE == 2:
        return tl.dot(selection.to(tl.float32), high, total, input_precision="ieee")
    else:
        ones = selection.to(tl.float32).to(tl.bfloat16)
        return _dot_16(ones, low, _dot_16(ones, high, total))


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
    plan = _Plan.of(tokens)
    products = r.new_empty((1 + (mode == SPLIT), batch * heads, plan.padded, plan.padded), dtype=PRODUCTS[mode])
    strong = _launch_forward(k, r, grad_y, w, u, base, grad_v, v, products)
    partial = r.new_zeros((2, batch, heads, plan.parts, channels), dtype=torch.float32)
    if batch and plan.whole:
        _backward_whole[(batch * heads,)](
            r, k, w, u, base, products, grad_r, grad_k, grad_w, partial[0], partial[1], tokens, heads,
            N=channels, TILE=plan.tile, TILES=plan.tiles, MODE=mode, HAS_BASE=base is not None, PARTS=plan.parts,
            num_warps=plan.warps, num_stages=1,
        )  # fmt: skip
    if batch:
        gaps = r.new_zeros((batch * heads, plan.gaps, channels), dtype=torch.float32) if plan.gaps > 1 else partial
        _backward_kernel[(batch * heads,)](
            r, k, w, u, base, products, grad_r, grad_k, grad_w, partial[0], partial[1], gaps, strong, tokens, heads,
            N=channels, CHUNKS=plan.chunks, GAPS=plan.gaps, MODE=mode, HAS_BASE=base is not None,
            ONLY_STRONG=plan.whole, num_warps=plan.chunks,
        )  # fmt: skip
    grad_base = None if base is None else partial[1].sum((0, 2))
    return grad_r, grad_k, grad_v, grad_w, partial[0].sum((0, 2)), grad_base


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
    batch, tokens, heads, channels = r.shape
    plan = _Plan.of(tokens)
    mode = _mode(k)
    strong = torch.empty(batch * heads, dtype=torch.bool, device=r.device)
    if batch and plan.whole:
        for first in range(0, plan.tiles, plan.rows):
            _forward_whole[(batch * heads,)](
                r, k, v, w, u, base, y, other, products, strong, tokens, heads,
                N=channels, TILE=plan.tile, TILES=plan.tiles, FIRST=first, LAST=min(first + plan.rows, plan.tiles),
                MODE=mode, HAS_BASE=base is not None, WITH_PRODUCTS=products is not None,
                num_warps=plan.warps, num_stages=plan.stages,
            )  # fmt: skip
    if batch:
        _forward_kernel[(batch * heads * plan.parts,)](
            r, k, v, w, u, base, y, other, products, strong, tokens, heads,
            N=channels, CHUNKS=plan.chunks, MODE=mode, HAS_BASE=base is not None,
            WITH_PRODUCTS=products is not None and not plan.whole, MANY=plan.parts > 1, ONLY_STRONG=plan.whole,
            num_warps=plan.chunks,
        )  # fmt: skip
    return strong


ROUNDED, SPLIT, FULL = range(3)
PRODUCTS = {ROUNDED: torch.bfloat16, SPLIT: torch.bfloat16, FULL: torch.float32}


class _Plan(NamedTuple):
    """How a number of tokens is cut up, for both forms of the kernels."""

    whole: bool
    tile: int
    tiles: int
    rows: int
    warps: int
    stages: int
    chunks: int
    parts: int
    gaps: int
    padded: int

    @classmethod
    def of(cls, tokens: int) -> "_Plan":
        tile, rows, warps, stages = (64, 1, 4, 1) if 32 < tokens <= 64 else (32, 3, 2, 1)
        if OVERRIDE:
            tile, rows, warps, stages = OVERRIDE
        tiles = triton.cdiv(tokens, tile)
        whole = tile * tiles <= 128 or bool(OVERRIDE)
        chunks = 4 if 32 < tokens <= 64 else 2
        parts = triton.cdiv(tokens, chunks * CHUNK.value)
        padded = parts * chunks * CHUNK.value if not OVERRIDE else max(tile * tiles, parts * chunks * CHUNK.value)
        return cls(whole, tile, tiles, rows, warps, stages, chunks, parts, triton.next_power_of_2(parts), padded)


OVERRIDE = None


def _mode(x: Tensor) -> int:
    return FULL if x.dtype == torch.float32 else SPLIT
