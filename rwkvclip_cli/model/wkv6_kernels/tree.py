"""WKV6 of heads whose decays are too strong for the short form: a tree of borders, so that no exponent is positive.

>>> tree_forward_kernel[(batch * heads * tiles,)](r, k, v, w, u, base, y, ...)

In each block of twice 2^level tokens the pairs that its middle parts decay to there; pairs of several tiles decay to
the edge of the receiving one. `strong` holds FLAGS truth values a head, and heads with none of them true are left as
they are. Legend: M tokens of a tile, 16 channels of a block.
"""

import triton
import triton.language as tl

from rwkvclip_cli.model.wkv6_kernels.borders import CHUNK, LOG2_E, decay_size, head_place
from rwkvclip_cli.model.wkv6_kernels.parts import (
    counted_exactly,
    dot_across,
    dot_parts,
    dot_parts_stored,
    dot_stored,
    load_parts,
    parts,
    store_parts,
    whole,
)

TREE_LEVELS = tl.constexpr(5)
"""Sizes of blocks, from pairs of tokens to the tree's tile, whose two halves meet at a border."""
TREE_TOKENS = tl.constexpr(32)
"""Tokens of the tree's tile, 2^TREE_LEVELS: a larger one has no room for all the masked scores."""


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
def any_strong(strong, tiles):
    """Whether any of a head's tiles is too strong for the short form."""
    found = tl.load(strong)
    for tile in range(1, tiles):
        found = found | tl.load(strong + tile)
    return found


@triton.jit
def _on_side(row, column, side):
    """Which tokens (columns) lie between a token (row) and the tile's first edge (side 0) or its last (1)."""
    return ((column < row) & (side == 0)) | ((column > row) & (side == 1))


@triton.jit
def tree_forward_kernel(
    r, k, v, w, u, base, y, other, products, strong, tokens, heads,
    N: tl.constexpr, FULL: tl.constexpr, HAS_BASE: tl.constexpr, WITH_PRODUCTS: tl.constexpr, FLAGS: tl.constexpr,
):  # fmt: skip
    """One tile of rows of y = scores @ v. With WITH_PRODUCTS also the rows of v @ other^T into `products`, padded."""
    M: tl.constexpr = TREE_TOKENS
    BLOCKS: tl.constexpr = N // CHUNK
    tiles = tl.cdiv(tokens, M)
    tile = tl.program_id(0) % tiles
    head = tl.program_id(0) // tiles
    if not any_strong(strong + head * FLAGS, FLAGS):
        return
    first, stride, channel = head_place(head, heads, tokens, N)
    u += channel
    if HAS_BASE:
        base += channel
    r, k, v, w, y = r + first, k + first, v + first, w + first, y + first

    row = tl.arange(0, M)
    lane = tl.arange(0, CHUNK)
    own = tile * M + row
    inside = (own < tokens)[:, None]
    place = own[:, None] * stride + lane[None, :]
    diagonal = row[:, None] == row[None, :]

    v_tiles = ()
    for block in tl.static_range(BLOCKS):
        v_tiles = v_tiles + (tl.load(v + place + block * CHUNK, mask=inside, other=0.0),)
    apart = tl.zeros((M, M), tl.float32)
    bonus = tl.zeros((M, CHUNK), tl.float32)
    for block in range(BLOCKS):
        at = block * CHUNK
        r_tile = tl.load(r + place + at, mask=inside, other=0.0).to(tl.float32)
        k_tile = tl.load(k + place + at, mask=inside, other=0.0).to(tl.float32)
        size = decay_size(w, base, place, lane, at, inside, HAS_BASE)
        bonus += r_tile * tl.load(u + at + lane)[None, :].to(tl.float32) * k_tile
        for level in tl.static_range(TREE_LEVELS):
            border = to_border(2**level, row[:, None], row[None, :])
            factor = tl.exp2(-counted_exactly(border, size, None, FULL))
            r_part, r_low = parts(r_tile * factor, FULL)
            k_part, k_low = parts(k_tile * factor, FULL)
            scores = dot_across(r_part, r_low, k_part, k_low, None, FULL)
            apart += tl.where(parted_at(2**level, row[:, None], row[None, :]), scores, 0.0)
    high, low = parts(tl.where(diagonal, tl.sum(bonus, axis=1)[:, None], apart), FULL)
    totals = ()
    for block in tl.static_range(BLOCKS):
        totals = totals + (dot_parts_stored(high, low, v_tiles[block], tl.zeros((M, CHUNK), tl.float32), FULL),)
    if WITH_PRODUCTS:
        other += first
        products += (head.to(tl.int64) * tiles * M + own[:, None]) * (tiles * M)
        plane = (tl.num_programs(0) // tiles).to(tl.int64) * (tiles * M) * (tiles * M)
        product = _products(v_tiles, other, stride, own, tokens, N, M, FULL)
        store_parts(products, plane, own[None, :], product, None, FULL)

    # Other tiles, the nearer first, to the left and then to the right; `between` sums the decays of tiles passed by.
    # One loop for both sides, and one body of code: it is compiled at every first start, and seldom used.
    for side in range(2):
        received = ()
        received_low = ()
        between = ()
        for block in tl.static_range(BLOCKS):
            size = decay_size(w, base, place, lane, block * CHUNK, inside, HAS_BASE)
            factor = tl.exp2(-counted_exactly(_on_side(row[:, None], row[None, :], side), size, None, FULL))
            r_tile = tl.load(r + place + block * CHUNK, mask=inside, other=0.0).to(tl.float32)
            part, rest = parts(r_tile * factor, FULL)
            received = received + (part,)
            received_low = received_low + (rest,)
            between = between + (tl.zeros((M, CHUNK), tl.float32),)
        count = tile + side * (tiles - 1 - 2 * tile)
        for distance in range(1, count + 1):
            there = (tile + (2 * side - 1) * distance) * M + row
            there_inside = (there < tokens)[:, None]
            there_place = there[:, None] * stride + lane[None, :]
            there_v = ()
            for block in tl.static_range(BLOCKS):
                there_v = there_v + (tl.load(v + there_place + block * CHUNK, mask=there_inside, other=0.0),)
            scores = tl.zeros((M, M), tl.float32)
            passed = ()
            for block in tl.static_range(BLOCKS):
                size = decay_size(w, base, there_place, lane, block * CHUNK, there_inside, HAS_BASE)
                away = _on_side(row[None, :], row[:, None], side)
                factor = tl.exp2(-counted_exactly(away, size, between[block], FULL))
                k_tile = tl.load(k + there_place + block * CHUNK, mask=there_inside, other=0.0).to(tl.float32)
                part, rest = parts(k_tile * factor, FULL)
                scores = dot_across(received[block], received_low[block], part, rest, scores, FULL)
                passed = passed + (counted_exactly(row[:, None] >= 0 * row[None, :], size, between[block], FULL),)
            between = passed
            high, low = parts(scores, FULL)
            added = ()
            for block in tl.static_range(BLOCKS):
                added = added + (dot_parts_stored(high, low, there_v[block], totals[block], FULL),)
            totals = added
            if WITH_PRODUCTS:
                product = _products(v_tiles, other, stride, there, tokens, N, M, FULL)
                store_parts(products, plane, there[None, :], product, None, FULL)
    for block in tl.static_range(BLOCKS):
        tl.store(y + place + block * CHUNK, totals[block], mask=inside)


@triton.jit
def _products(v_tiles, other, stride, columns, tokens, N: tl.constexpr, M: tl.constexpr, FULL: tl.constexpr):
    """v @ other^T for some rows of both, (M, M)."""
    total = tl.zeros((M, M), tl.float32)
    channel = tl.arange(0, CHUNK)[None, :]
    for block in tl.static_range(N // CHUNK):
        where = columns[:, None] * stride + channel + block * CHUNK
        right = tl.load(other + where, mask=(columns < tokens)[:, None], other=0.0)
        total = dot_stored(v_tiles[block], tl.trans(right), total, FULL)
    return total


@triton.jit
def tree_backward_kernel(
    r, k, w, u, base, products, grad_r, grad_k, grad_w, grad_u, grad_base, gaps, strong, tokens, heads,
    N: tl.constexpr, GAPS: tl.constexpr, FULL: tl.constexpr, HAS_BASE: tl.constexpr, FLAGS: tl.constexpr,
    PARTS: tl.constexpr,
):  # fmt: skip
    """One head's gradients of r, k, w, u and base from `products`, the gradients of its scores."""
    M: tl.constexpr = TREE_TOKENS
    BLOCKS: tl.constexpr = N // CHUNK
    tiles = tl.cdiv(tokens, M)
    head = tl.program_id(0)
    if not any_strong(strong + head * FLAGS, FLAGS):
        return
    first, stride, channel = head_place(head, heads, tokens, N)
    u += channel
    if HAS_BASE:
        base += channel
    r, k, w = r + first, k + first, w + first
    grad_r, grad_k, grad_w = grad_r + first, grad_k + first, grad_w + first
    padded = tiles * M
    products += head.to(tl.int64) * padded * padded
    plane = tl.num_programs(0).to(tl.int64) * padded * padded
    gaps += head.to(tl.int64) * GAPS * N

    row = tl.arange(0, M)
    lane = tl.arange(0, CHUNK)
    tile_of_gap = tl.arange(0, GAPS)

    for tile in range(tiles):
        own = tile * M + row
        inside = (own < tokens)[:, None]
        place = own[:, None] * stride + lane[None, :]
        square = own[:, None] * padded + own[None, :]

        product, rest = load_parts(products, plane, square, None, FULL)
        own_high, own_low = load_parts(products, plane, own * padded + own, None, FULL)
        diagonal = whole(own_high, own_low, FULL)[:, None]

        for block in range(BLOCKS):
            at = block * CHUNK
            r_tile = tl.load(r + place + at, mask=inside, other=0.0).to(tl.float32)
            k_tile = tl.load(k + place + at, mask=inside, other=0.0).to(tl.float32)
            size = decay_size(w, base, place, lane, at, inside, HAS_BASE)
            u_row = tl.load(u + at + lane)[None, :].to(tl.float32)
            grad_r_tile = diagonal * u_row * k_tile
            grad_k_tile = diagonal * u_row * r_tile
            total_u = tl.sum(diagonal * r_tile * k_tile, axis=0)
            grad_decay = tl.zeros((M, CHUNK), tl.float32)
            for level in tl.static_range(TREE_LEVELS):
                border = to_border(2**level, row[:, None], row[None, :])
                factor = tl.exp2(-counted_exactly(border, size, None, FULL))
                parted = parted_at(2**level, row[:, None], row[None, :])
                here = tl.where(parted, product, 0.0)
                here_low = tl.where(parted, rest, 0.0)
                part, low = parts(k_tile * factor, FULL)
                level_r = factor * dot_parts(here, here_low, part, low, None, FULL)
                part, low = parts(r_tile * factor, FULL)
                level_k = factor * dot_parts(tl.trans(here), tl.trans(here_low), part, low, None, FULL)
                grad_r_tile += level_r
                grad_k_tile += level_k
                spanned = to_border(2**level, row[None, :], row[:, None])
                grad_decay += counted_exactly(spanned, r_tile * level_r + k_tile * level_k, None, FULL)

            # Other tiles, the nearer first. A pair with whole tiles between it leaves its sum for those in `gaps`;
            # the barriers part what some threads of the program write there from what others read.
            if GAPS > 1:
                gap = gaps + tile_of_gap[:, None] * N + at + lane[None, :]
                farther = (tile_of_gap > tile) & (tile_of_gap < tiles)
                grad_decay += tl.sum(tl.load(gap, mask=farther[:, None], other=0.0), axis=0)[None, :]
                tl.debug_barrier()
                for side in range(2):
                    edge = _on_side(row[:, None], row[None, :], side)
                    own_factor = tl.exp2(-counted_exactly(edge, size, None, FULL))
                    passed = tl.zeros((M, CHUNK), tl.float32)
                    weight = tl.zeros((M, CHUNK), tl.float32)
                    count = tile + side * (tiles - 1 - 2 * tile)
                    for distance in range(1, count + 1):
                        other_tile = tile + (2 * side - 1) * distance
                        there = other_tile * M + row
                        there_inside = (there < tokens)[:, None]
                        there_place = there[:, None] * stride + lane[None, :]
                        there_r = tl.load(r + there_place + at, mask=there_inside, other=0.0).to(tl.float32)
                        there_k = tl.load(k + there_place + at, mask=there_inside, other=0.0).to(tl.float32)
                        there_size = decay_size(w, base, there_place, lane, at, there_inside, HAS_BASE)
                        received_at = own[:, None] * padded + there[None, :]
                        sent_at = there[:, None] * padded + own[None, :]
                        received, received_low = load_parts(products, plane, received_at, None, FULL)
                        sent, sent_low = load_parts(products, plane, sent_at, None, FULL)
                        away = _on_side(row[None, :], row[:, None], side)
                        factor = tl.exp2(-counted_exactly(away, there_size, passed, FULL))
                        passed = counted_exactly(row[:, None] >= 0 * row[None, :], there_size, passed, FULL)
                        part, low = parts(there_k * factor, FULL)
                        pair_r = own_factor * dot_parts(received, received_low, part, low, None, FULL)
                        part, low = parts(there_r * factor, FULL)
                        pair_k = own_factor * dot_parts(tl.trans(sent), tl.trans(sent_low), part, low, None, FULL)
                        grad_r_tile += pair_r
                        grad_k_tile += pair_k
                        pair_weight = r_tile * pair_r + k_tile * pair_k
                        weight += pair_weight
                        if (side == 1) & (distance > 1):
                            gap_there = gaps + other_tile * N + at + lane
                            tl.store(gap_there, tl.load(gap_there) + tl.sum(pair_weight, axis=0))
                    grad_decay += counted_exactly(_on_side(row[None, :], row[:, None], side), weight, None, FULL)
                tl.debug_barrier()

            grad_w_tile = grad_decay * (size * (-1.0 / LOG2_E))
            tl.store(grad_r + place + at, grad_r_tile, mask=inside)
            tl.store(grad_k + place + at, grad_k_tile, mask=inside)
            tl.store(grad_w + place + at, grad_w_tile, mask=inside)
            sums = (head * PARTS + tile) * N + at + lane
            tl.store(grad_u + sums, total_u)
            if HAS_BASE:
                tl.store(grad_base + sums, tl.sum(grad_w_tile, axis=0))
