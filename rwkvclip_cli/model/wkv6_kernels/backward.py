"""The backward pass of WKV6 for one head, from the gradients of its scores to those of r, k, w, u and base.

>>> backward_kernel[(batch * heads,)](r, k, w, u, base, products, ...)

Legend: M tokens of a tile, 16 channels of a block.
"""

import triton
import triton.language as tl

from rwkvclip_cli.model.wkv6_kernels.borders import (
    CHUNK,
    LOG2_E,
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
    counted_exactly,
    counted_wholly,
    cut,
    dot_parts,
    dot_parts_wholly,
    exponents,
    load_parts,
    parts,
)


@triton.jit
def backward_kernel(
    r, k, w, u, base, products, grad_r, grad_k, grad_w, grad_u, grad_base, gaps, strong, tokens, heads,
    N: tl.constexpr, CHUNKS: tl.constexpr, GAPS: tl.constexpr, FULL: tl.constexpr, HAS_BASE: tl.constexpr,
    TREE: tl.constexpr, FLAGS: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """One head's gradients of r, k, w, u and base from `products`, the gradients of its scores."""
    M: tl.constexpr = CHUNKS * CHUNK
    BLOCKS: tl.constexpr = N // CHUNK
    tiles = tl.cdiv(tokens, M)
    head = tl.program_id(0)
    if TREE:
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
        if not FULL:
            rest = tl.load(low_products + square)
        below = tl.where(earlier, product, 0.0)
        above = tl.where(later, product, 0.0)
        below_low = tl.where(earlier, rest, 0.0)
        above_low = tl.where(later, rest, 0.0)
        diagonal = load_parts(products, low_products, own * padded + own, FULL)[:, None]

        for block in range(BLOCKS):
            at = block * CHUNK
            r_tile = tl.load(r + place + at, mask=inside, other=0.0).to(tl.float32)
            k_tile = tl.load(k + place + at, mask=inside, other=0.0).to(tl.float32)
            size = decay_size(w, base, place, lane, at, inside, HAS_BASE)
            u_row = tl.load(u + at + lane)[None, :].to(tl.float32)
            grad_r_tile = diagonal * u_row * k_tile
            grad_k_tile = diagonal * u_row * r_tile
            total_u = tl.sum(diagonal * r_tile * k_tile, axis=0)
            if not TREE:
                down, up, _ = around_half(size, M, FULL)
                # Cut before they are multiplied, each pair's weight is the same in the sum over either of its tokens.
                r_down, r_up = cut(r_tile * down, FULL), cut(r_tile * up, FULL)
                k_down, k_up = cut(k_tile * down, FULL), cut(k_tile * up, FULL)
                r_below = dot_parts_wholly(below, below_low, k_up, None, FULL)
                r_above = dot_parts_wholly(above, above_low, k_down, None, FULL)
                k_below = dot_parts_wholly(tl.trans(below), tl.trans(below_low), r_down, None, FULL)
                k_above = dot_parts_wholly(tl.trans(above), tl.trans(above_low), r_up, None, FULL)
                grad_r_tile += down * r_below + up * r_above
                grad_k_tile += up * k_below + down * k_above
                into_up = r_up * r_above + k_up * k_below
                change = r_down * r_below + k_down * k_above - into_up
                grad_decay = counted_wholly(later, change, None, FULL) - into_up
            else:
                grad_decay = tl.zeros((M, CHUNK), tl.float32)
                for level in tl.static_range(TREE_LEVELS):
                    border = to_border(2**level, row[:, None], row[None, :])
                    factor = tl.exp2(-exponents(border, size, None, TREE, FULL))
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
                for side in tl.static_range(2):
                    edge = beyond(row[:, None], row[None, :], side == 0)
                    own_factor = tl.exp2(-exponents(edge, size, None, TREE, FULL))
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
                        there_size = decay_size(w, base, there_place, lane, at, there_inside, HAS_BASE)
                        received_at = own[:, None] * padded + there[None, :]
                        sent_at = there[:, None] * padded + own[None, :]
                        received = tl.load(products + received_at)
                        sent = tl.load(products + sent_at)
                        received_low = received
                        sent_low = sent
                        if not FULL:
                            received_low = tl.load(low_products + received_at)
                            sent_low = tl.load(low_products + sent_at)
                        away = beyond(row[:, None], row[None, :], side == 1)
                        factor = tl.exp2(-exponents(away, there_size, passed, TREE, FULL))
                        passed = exponents(row[:, None] >= 0 * row[None, :], there_size, passed, TREE, FULL)
                        part, low = parts(there_k * factor, FULL)
                        pair_r = own_factor * dot_parts(received, received_low, part, low, None, FULL)
                        part, low = parts(there_r * factor, FULL)
                        pair_k = own_factor * dot_parts(tl.trans(sent), tl.trans(sent_low), part, low, None, FULL)
                        grad_r_tile += pair_r
                        grad_k_tile += pair_k
                        pair_weight = r_tile * pair_r + k_tile * pair_k
                        weight += pair_weight
                        if side == 1 and distance > 1:
                            gap_there = gaps + other_tile * N + at + lane
                            tl.store(gap_there, tl.load(gap_there) + tl.sum(pair_weight, axis=0))
                    grad_decay += counted_exactly(beyond(row[None, :], row[:, None], side == 0), weight, None, FULL)
                tl.debug_barrier()

            grad_w_tile = grad_decay * (size * (-1.0 / LOG2_E))
            tl.store(grad_r + place + at, grad_r_tile, mask=inside)
            tl.store(grad_k + place + at, grad_k_tile, mask=inside)
            tl.store(grad_w + place + at, grad_w_tile, mask=inside)
            sums = (head * PARTS + tile) * N + at + lane
            tl.store(grad_u + sums, total_u)
            if HAS_BASE:
                tl.store(grad_base + sums, tl.sum(grad_w_tile, axis=0))
