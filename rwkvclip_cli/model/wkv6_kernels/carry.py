"""What tiles of tokens pass on to the next: the sums of k v^T that a receiving tile reads, one way and the other.

>>> carry_kernel[(2 * batch * heads,)](k, v, w, base, carried, ...)

With r and grad_y in place of k and v it is what the gradients of k and v need. Legend: 16 channels of a block.
"""

import triton
import triton.language as tl

from rwkvclip_cli.model.wkv6_kernels.borders import CHUNK, TILE, decay_size, half_weights, head_place, weighed
from rwkvclip_cli.model.wkv6_kernels.parts import dot_stored_parts, parts, store_parts


@triton.jit
def carried_place(head, side, tile, tiles, all_heads, N: tl.constexpr):
    """Where a tile's sums of one side begin (0: from earlier tiles, 1: from later ones), (blocks, N of v, 16)."""
    return ((side * all_heads + head) * tiles + tile) * (N * N)


@triton.jit
def carry_kernel(
    k, v, w, base, carried, tiles, tokens, heads,
    N: tl.constexpr, FULL: tl.constexpr, HAS_BASE: tl.constexpr,
):  # fmt: skip
    """The sums of one head, one way: `carried` as parts of (2, B H, tiles, blocks, N, 16), decayed to half a tile.

    A tile's factors `down` and `up` (see `around_half`) are decays from and to half of its decay, and so are its sums:
    what comes from tiles before has decayed to half of this one, which is half a tile too much for the first token.
    """
    BLOCKS: tl.constexpr = N // CHUNK
    # v's channels in pieces of as many as a tile has tokens, though fewer be there: tensors of one shape stay in place.
    PIECES: tl.constexpr = (N + TILE - 1) // TILE
    all_heads = (tl.num_programs(0) // 2).to(tl.int64)
    head = tl.program_id(0) // 2
    side = tl.program_id(0) % 2
    first, stride, channel = head_place(head, heads, tokens, N)
    if HAS_BASE:
        base += channel
    k, v, w = k + first, v + first, w + first
    carried += carried_place(head, side, 0, tiles, all_heads, N)
    plane = carried_place(0, 2, 0, tiles, all_heads, N)

    row = tl.arange(0, TILE)
    lane = tl.arange(0, CHUNK)
    weights = tl.where(side == 0, half_weights(row[None, :], row[:, None]), half_weights(row[:, None], row[None, :]))
    halves = tl.full((TILE, TILE), 0.5, tl.float32)
    sums = ()
    for _ in tl.static_range(BLOCKS):
        for piece in tl.static_range(PIECES):
            sums = sums + (tl.zeros((TILE, CHUNK), tl.float32),)
    for step in range(tiles):
        tile = step if side == 0 else tiles - 1 - step
        own = tile * TILE + row
        inside = (own < tokens)[:, None]
        place = own[:, None] * stride + lane[None, :]
        v_tiles = ()
        for piece in tl.static_range(PIECES):
            channels = piece * TILE + row[None, :]
            there = inside & (channels < N)
            v_tiles = v_tiles + (tl.load(v + own[:, None] * stride + channels, mask=there, other=0.0),)
        passed = ()
        for block in tl.static_range(BLOCKS):
            at = block * CHUNK
            size = decay_size(w, base, place, lane, at, inside, HAS_BASE)
            k_tile = tl.load(k + place + at, mask=inside, other=0.0).to(tl.float32)
            part, rest = parts(k_tile * tl.exp2(weighed(weights, size, None, FULL)), FULL)
            half = tl.exp2(-weighed(halves, size, None, FULL))
            for piece in tl.static_range(PIECES):
                received = sums[block * PIECES + piece] * half
                line = piece * TILE + row[:, None]
                where = tile * (N * N) + at * N + line * CHUNK + lane[None, :]
                store_parts(carried, plane, where, received, line < N, FULL)
                total = dot_stored_parts(tl.trans(v_tiles[piece]), part, rest, received, FULL)
                passed = passed + (total * half,)
        sums = passed
