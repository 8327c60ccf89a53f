"""The forward pass of WKV6 for one tile of rows; exchanged arguments make it that of the gradient of v.

>>> forward_kernel[(batch * heads * tiles,)](r, k, v, w, u, base, y, ...)

Legend: M tokens of a tile, 16 channels of a block.
"""

import triton
import triton.language as tl

from rwkvclip_cli.model.wkv6_kernels.borders import (
    CHUNK,
    LARGEST_HALF,
    LARGEST_HALF_FULL,
    TREE_LEVELS,
    any_strong,
    around_half,
    beyond,
    decay_size,
    head_place,
    parted_at,
    to_border,
)
from rwkvclip_cli.model.wkv6_kernels.parts import (
    dot_across,
    dot_parts_stored,
    dot_stored,
    exponents,
    parts,
    store_parts,
)


@triton.jit
def forward_kernel(
    r, k, v, w, u, base, y, other, products, strong, tokens, heads,
    N: tl.constexpr, CHUNKS: tl.constexpr, FULL: tl.constexpr, HAS_BASE: tl.constexpr, WITH_PRODUCTS: tl.constexpr,
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
            size = decay_size(w, base, place, lane, at, inside, HAS_BASE)
            down, up, half = around_half(size, M, FULL)
            largest = tl.maximum(largest, half, propagate_nan=tl.PropagateNan.ALL)
            bonus += r_tile * tl.load(u + at + lane)[None, :].to(tl.float32) * k_tile
            r_down, r_down_low = parts(r_tile * down, FULL)
            k_up, k_up_low = parts(k_tile * up, FULL)
            below = dot_across(r_down, r_down_low, k_up, k_up_low, below, FULL)
            r_up, r_up_low = parts(r_tile * up, FULL)
            k_down, k_down_low = parts(k_tile * down, FULL)
            above = dot_across(r_up, r_up_low, k_down, k_down_low, above, FULL)
        tl.store(strong + head * tiles + tile, tl.max(largest) > (LARGEST_HALF_FULL if FULL else LARGEST_HALF))
    else:
        for block in range(BLOCKS):
            at = block * CHUNK
            r_tile = tl.load(r + place + at, mask=inside, other=0.0).to(tl.float32)
            k_tile = tl.load(k + place + at, mask=inside, other=0.0).to(tl.float32)
            size = decay_size(w, base, place, lane, at, inside, HAS_BASE)
            bonus += r_tile * tl.load(u + at + lane)[None, :].to(tl.float32) * k_tile
            for level in tl.static_range(TREE_LEVELS):
                border = to_border(2**level, row[:, None], row[None, :])
                factor = tl.exp2(-exponents(border, size, None, TREE, FULL))
                r_part, r_low = parts(r_tile * factor, FULL)
                k_part, k_low = parts(k_tile * factor, FULL)
                scores = dot_across(r_part, r_low, k_part, k_low, None, FULL)
                below += tl.where(parted_at(2**level, row[:, None], row[None, :]), scores, 0.0)
        above = below
    scores = tl.where(earlier, below, tl.where(diagonal, tl.sum(bonus, axis=1)[:, None], above))
    high, low = parts(scores, FULL)
    totals = ()
    for block in tl.static_range(BLOCKS):
        totals = totals + (dot_parts_stored(high, low, v_tiles[block], tl.zeros((M, CHUNK), tl.float32), FULL),)
    if WITH_PRODUCTS:
        other += first
        products += (head.to(tl.int64) * tiles * M + own[:, None]) * (tiles * M)
        low_products = products + (tl.num_programs(0) // tiles).to(tl.int64) * (tiles * M) * (tiles * M)
        product = _products(v_tiles, other, stride, own, tokens, N, M, FULL)
        store_parts(products, low_products, own[None, :], product, FULL)

    # Other tiles, the nearer first, to the left and then to the right; `between` sums the decays of tiles passed by.
    for side in tl.static_range(2 if MANY else 0):
        received = ()
        received_low = ()
        between = ()
        for block in tl.static_range(BLOCKS):
            size = decay_size(w, base, place, lane, block * CHUNK, inside, HAS_BASE)
            factor = tl.exp2(-exponents(beyond(row[:, None], row[None, :], side == 0), size, None, TREE, FULL))
            r_tile = tl.load(r + place + block * CHUNK, mask=inside, other=0.0).to(tl.float32)
            part, rest = parts(r_tile * factor, FULL)
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
                size = decay_size(w, base, there_place, lane, block * CHUNK, there_inside, HAS_BASE)
                away = beyond(row[:, None], row[None, :], side == 1)
                factor = tl.exp2(-exponents(away, size, between[block], TREE, FULL))
                k_tile = tl.load(k + there_place + block * CHUNK, mask=there_inside, other=0.0).to(tl.float32)
                part, rest = parts(k_tile * factor, FULL)
                scores = dot_across(received[block], received_low[block], part, rest, scores, FULL)
                passed = passed + (exponents(row[:, None] >= 0 * row[None, :], size, between[block], TREE, FULL),)
            between = passed
            high, low = parts(scores, FULL)
            added = ()
            for block in tl.static_range(BLOCKS):
                added = added + (dot_parts_stored(high, low, there_v[block], totals[block], FULL),)
            totals = added
            if WITH_PRODUCTS:
                product = _products(v_tiles, other, stride, there, tokens, N, M, FULL)
                store_parts(products, low_products, there[None, :], product, FULL)
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
