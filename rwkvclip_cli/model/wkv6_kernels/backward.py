"""The backward pass of WKV6 for one tile of tokens: the gradients of r, k, w, u and base.

>>> backward_kernel[(batch * heads * count,)](r, k, v, w, u, base, grad_y, carried, returned, ...)

Legend: M tokens of a tile, 16 channels of a block; v's channels are cut into pieces.
"""

import triton
import triton.language as tl

from rwkvclip_cli.model.wkv6_kernels.borders import CHUNK, LOG2_E, TILE, around_half, decay_size, head_place
from rwkvclip_cli.model.wkv6_kernels.carry import carried_place
from rwkvclip_cli.model.wkv6_kernels.parts import (
    counted_wholly,
    cut,
    dot_parts_wholly,
    dot_stored,
    dot_stored_parts,
    load_parts,
    parts,
    whole,
)


@triton.jit
def backward_kernel(
    r, k, v, w, u, base, grad_y, carried, returned, grad_r, grad_k, grad_w, grad_u, grad_base, first_tile, count, tiles,
    tokens, heads,
    N: tl.constexpr, M: tl.constexpr, STARTS: tl.constexpr, WIDTHS: tl.constexpr, FULL: tl.constexpr,
    HAS_BASE: tl.constexpr, CARRIED: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """One tile's gradients, of `count` from `first_tile` on; u's and base's are parts of (B, H, PARTS, N).

    CARRIED: `carried` holds the sums of k v^T, `returned` those of r grad_y^T, see `carry`.
    """
    BLOCKS: tl.constexpr = N // CHUNK
    PIECES: tl.constexpr = len(WIDTHS)
    tile = first_tile + tl.program_id(0) % count
    head = tl.program_id(0) // count
    first, stride, channel = head_place(head, heads, tokens, N)
    u += channel
    if HAS_BASE:
        base += channel
    r, k, v, w, grad_y = r + first, k + first, v + first, w + first, grad_y + first
    grad_r, grad_k, grad_w = grad_r + first, grad_k + first, grad_w + first
    all_heads = (tl.num_programs(0) // count).to(tl.int64)
    from_earlier = carried_place(head, 0, tile, tiles, all_heads, N)
    from_later = carried_place(head, 1, tile, tiles, all_heads, N)
    plane = carried_place(0, 2, 0, tiles, all_heads, N)

    row = tl.arange(0, M)
    lane = tl.arange(0, CHUNK)
    own = tile * TILE + row
    inside = (own < tokens)[:, None]
    place = own[:, None] * stride + lane[None, :]
    has_earlier = lane[None, :] < CHUNK * tile
    has_later = lane[None, :] < CHUNK * (tiles - 1 - tile)

    # The gradients of what tokens receive: from earlier ones (below the diagonal), later ones and themselves.
    v_tiles = ()
    grad_tiles = ()
    product = tl.zeros((M, M), tl.float32)
    for piece in tl.static_range(PIECES):
        channels = own[:, None] * stride + STARTS[piece] + tl.arange(0, WIDTHS[piece])[None, :]
        v_tile = tl.load(v + channels, mask=inside, other=0.0)
        grad_tile = tl.load(grad_y + channels, mask=inside, other=0.0)
        product = dot_stored(grad_tile, tl.trans(v_tile), product, FULL)
        v_tiles = v_tiles + (v_tile,)
        grad_tiles = grad_tiles + (grad_tile,)
    diagonal = tl.sum(tl.where(row[:, None] == row[None, :], product, 0.0), axis=1)[:, None]
    below, below_low = parts(tl.where(row[:, None] > row[None, :], product, 0.0), FULL)
    above, above_low = parts(tl.where(row[:, None] < row[None, :], product, 0.0), FULL)
    later = row[:, None] < row[None, :]

    for block in range(BLOCKS):
        at = block * CHUNK
        r_tile = tl.load(r + place + at, mask=inside, other=0.0).to(tl.float32)
        k_tile = tl.load(k + place + at, mask=inside, other=0.0).to(tl.float32)
        size = decay_size(w, base, place, lane, at, inside, HAS_BASE)
        down, up = around_half(size, M, FULL)
        # Cut before they are multiplied, each pair's weight is the same in the sum over either of its tokens.
        r_down, r_up = cut(r_tile * down, FULL), cut(r_tile * up, FULL)
        k_down, k_up = cut(k_tile * down, FULL), cut(k_tile * up, FULL)
        r_below = tl.zeros((M, CHUNK), tl.float32)
        r_above = tl.zeros((M, CHUNK), tl.float32)
        k_below = tl.zeros((M, CHUNK), tl.float32)
        k_above = tl.zeros((M, CHUNK), tl.float32)
        beyond = tl.zeros((CHUNK,), tl.float32)
        if CARRIED:
            for piece in tl.static_range(PIECES):
                line = STARTS[piece] + tl.arange(0, WIDTHS[piece])[:, None]
                sums = at * N + (line * CHUNK + lane[None, :])
                high, low = load_parts(carried + from_earlier, plane, sums, has_earlier, FULL)
                r_below = dot_stored_parts(grad_tiles[piece], high, low, r_below, FULL)
                passing = whole(high, low, FULL)
                high, low = load_parts(returned + from_later, plane, sums, has_later, FULL)
                k_below = dot_stored_parts(v_tiles[piece], high, low, k_below, FULL)
                passing *= whole(high, low, FULL)
                high, low = load_parts(returned + from_earlier, plane, sums, has_earlier, FULL)
                k_above = dot_stored_parts(v_tiles[piece], high, low, k_above, FULL)
                passing_back = whole(high, low, FULL)
                high, low = load_parts(carried + from_later, plane, sums, has_later, FULL)
                r_above = dot_stored_parts(grad_tiles[piece], high, low, r_above, FULL)
                beyond += tl.sum(passing + passing_back * whole(high, low, FULL), axis=0)
            # Pairs of which only the later token is in a later tile.
            beyond += tl.sum(r_up * r_above + k_up * k_below, axis=0)
        r_below = dot_parts_wholly(below, below_low, k_up, r_below, FULL)
        r_above = dot_parts_wholly(above, above_low, k_down, r_above, FULL)
        k_below = dot_parts_wholly(tl.trans(below), tl.trans(below_low), r_down, k_below, FULL)
        k_above = dot_parts_wholly(tl.trans(above), tl.trans(above_low), r_up, k_above, FULL)
        into_up = r_up * r_above + k_up * k_below
        change = r_down * r_below + k_down * k_above - into_up
        bonus = diagonal * tl.load(u + at + lane)[None, :].to(tl.float32)
        tl.store(grad_r + place + at, bonus * k_tile + down * r_below + up * r_above, mask=inside)
        tl.store(grad_k + place + at, bonus * r_tile + up * k_below + down * k_above, mask=inside)
        # A decay counts with the pairs that it lies between: those that end later less those that begin no earlier.
        grad_decay = counted_wholly(later, change, None, FULL) - into_up + beyond[None, :]
        grad_w_tile = grad_decay * (size * (-1.0 / LOG2_E))
        tl.store(grad_w + place + at, grad_w_tile, mask=inside)
        part = (head * PARTS + tile) * N + at + lane
        tl.store(grad_u + part, tl.sum(diagonal * r_tile * k_tile, axis=0))
        if HAS_BASE:
            tl.store(grad_base + part, tl.sum(grad_w_tile, axis=0))
