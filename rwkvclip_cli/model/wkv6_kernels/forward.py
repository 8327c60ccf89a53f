"""The forward pass of WKV6 for one tile of tokens; exchanged arguments make it that of the gradient of v.

>>> forward_kernel[(batch * heads * count,)](r, k, v, w, u, base, y, carried, strong, ...)

Legend: M tokens of a tile, 16 channels of a block; v's channels are cut into pieces.
"""

import triton
import triton.language as tl

from rwkvclip_cli.model.wkv6_kernels.borders import (
    CHUNK,
    LARGEST_FACTOR,
    LARGEST_FACTOR_FULL,
    TILE,
    around_half,
    decay_size,
    head_place,
)
from rwkvclip_cli.model.wkv6_kernels.carry import carried_place
from rwkvclip_cli.model.wkv6_kernels.parts import dot_across, dot_parts_stored, filled, load_parts, parts


@triton.jit
def forward_kernel(
    r, k, v, w, u, base, y, carried, strong, first_tile, count, tiles, tokens, heads,
    N: tl.constexpr, M: tl.constexpr, STARTS: tl.constexpr, WIDTHS: tl.constexpr, FULL: tl.constexpr,
    HAS_BASE: tl.constexpr, CARRIED: tl.constexpr,
):  # fmt: skip
    """y = scores @ v of a tile, of `count` from `first_tile` on, and what others sent it (CARRIED, see `carry`).

    `strong` (B H, tiles) tells whether the tile's decays are too strong for this form.
    """
    BLOCKS: tl.constexpr = N // CHUNK
    PIECES: tl.constexpr = len(WIDTHS)
    tile = first_tile + tl.program_id(0) % count
    head = tl.program_id(0) // count
    first, stride, channel = head_place(head, heads, tokens, N)
    u += channel
    if HAS_BASE:
        base += channel
    r, k, v, w, y = r + first, k + first, v + first, w + first, y + first
    all_heads = (tl.num_programs(0) // count).to(tl.int64)
    from_earlier = carried_place(head, 0, tile, tiles, all_heads, N)
    from_later = carried_place(head, 1, tile, tiles, all_heads, N)
    plane = carried_place(0, 2, 0, tiles, all_heads, N)

    row = tl.arange(0, M)
    lane = tl.arange(0, CHUNK)
    own = tile * TILE + row
    inside = (own < tokens)[:, None]
    place = own[:, None] * stride + lane[None, :]
    earlier = row[:, None] > row[None, :]
    diagonal = row[:, None] == row[None, :]

    # Asked for first, used last.
    v_tiles = ()
    totals = ()
    for piece in tl.static_range(PIECES):
        channels = STARTS[piece] + tl.arange(0, WIDTHS[piece])[None, :]
        v_tiles = v_tiles + (tl.load(v + own[:, None] * stride + channels, mask=inside, other=0.0),)
        totals = totals + (filled(M, WIDTHS[piece], 0.0),)
    below = tl.zeros((M, M), tl.float32)
    above = tl.zeros((M, M), tl.float32)
    bonus = tl.zeros((M, CHUNK), tl.float32)
    largest = tl.zeros((M, CHUNK), tl.float32)
    for block in range(BLOCKS):
        at = block * CHUNK
        r_tile = tl.load(r + place + at, mask=inside, other=0.0).to(tl.float32)
        k_tile = tl.load(k + place + at, mask=inside, other=0.0).to(tl.float32)
        size = decay_size(w, base, place, lane, at, inside, HAS_BASE)
        down, up = around_half(size, M, FULL)
        largest = tl.maximum(largest, down)
        bonus += r_tile * tl.load(u + at + lane)[None, :].to(tl.float32) * k_tile
        r_down, r_down_low = parts(r_tile * down, FULL)
        k_up, k_up_low = parts(k_tile * up, FULL)
        below = dot_across(r_down, r_down_low, k_up, k_up_low, below, FULL)
        r_up, r_up_low = parts(r_tile * up, FULL)
        k_down, k_down_low = parts(k_tile * down, FULL)
        above = dot_across(r_up, r_up_low, k_down, k_down_low, above, FULL)
        if CARRIED:
            added = ()
            for piece in tl.static_range(PIECES):
                line = STARTS[piece] + tl.arange(0, WIDTHS[piece])[:, None]
                where = (at * N + line * CHUNK) + lane[None, :]
                sums, low = load_parts(carried + from_earlier, plane, where, lane[None, :] < CHUNK * tile, FULL)
                total = dot_across(r_down, r_down_low, sums, low, totals[piece], FULL)
                last = lane[None, :] < CHUNK * (tiles - 1 - tile)
                sums, low = load_parts(carried + from_later, plane, where, last, FULL)
                added = added + (dot_across(r_up, r_up_low, sums, low, total, FULL),)
            totals = added
    tl.store(strong + head * tiles + tile, tl.max(largest) > (LARGEST_FACTOR_FULL if FULL else LARGEST_FACTOR))
    scores = tl.where(earlier, below, tl.where(diagonal, tl.sum(bonus, axis=1)[:, None], above))
    high, low = parts(scores, FULL)
    for piece in tl.static_range(PIECES):
        total = dot_parts_stored(high, low, v_tiles[piece], totals[piece], FULL)
        channels = STARTS[piece] + tl.arange(0, WIDTHS[piece])[None, :]
        tl.store(y + own[:, None] * stride + channels, total, mask=inside)
