"""What tiles of tokens pass on to the next: the sums of k v^T that a receiving tile reads, one way and the other.

>>> half_decay_kernel[(batch * heads * tiles,)](w, base, halves, ...)
>>> carry_kernel[(batch * heads,)](k, v, w, base, halves, carried, ...)

With r and grad_y in place of k and v it is what the gradients of k and v need. Legend: 16 channels of a block.
"""

import triton
import triton.language as tl

from rwkvclip_cli.model.wkv6_kernels.borders import CHUNK, TILE, beyond, decay_size, head_place
from rwkvclip_cli.model.wkv6_kernels.parts import as_weighed, counted, dot_stored_parts, parts, store_parts


@triton.jit
def carried_place(head, side, tile, tiles, all_heads, N: tl.constexpr):
    """Where a tile's sums of one side begin (0: from earlier tiles, 1: from later ones), (blocks, N of v, 16)."""
    return ((side * all_heads + head) * tiles + tile) * (N * N)


@triton.jit
def half_decay_kernel(
    w, base, halves, tiles, tokens, heads, N: tl.constexpr, FULL: tl.constexpr, HAS_BASE: tl.constexpr
):
    """The decay over half of a tile, (B H, tiles, N)."""
    tile = tl.program_id(0) % tiles
    head = tl.program_id(0) // tiles
    first, stride, channel = head_place(head, heads, tokens, N)
    if HAS_BASE:
        base += channel
    lane = tl.arange(0, CHUNK)
    own = (tile * TILE + tl.arange(0, TILE))[:, None]
    for block in range(N // CHUNK):
        at = block * CHUNK
        size = decay_size(w + first, base, own * stride + lane[None, :], lane, at, own < tokens, HAS_BASE)
        half = tl.exp2(-0.5 * tl.sum(as_weighed(size, FULL), axis=0))
        tl.store(halves + tl.program_id(0) * N + at + lane, half)


@triton.jit
def carry_kernel(
    k, v, w, base, halves, carried, tiles, tokens, heads,
    N: tl.constexpr, SIDE: tl.constexpr, ROWS: tl.constexpr, MORE: tl.constexpr, FULL: tl.constexpr,
    HAS_BASE: tl.constexpr,
):  # fmt: skip
    """The sums of one head from its first tile, of ROWS tokens at most, on (SIDE 0), or from its last.

    `carried` is parts of (2, B H, tiles, blocks, N, 16). The receiving tile's factors `down` and `up` (see
    `around_half`) are decays from and to half of its decay; so its sums are decayed to that half before they are kept.
    """
    all_heads = tl.num_programs(0).to(tl.int64)
    head = tl.program_id(0)
    first, stride, channel = head_place(head, heads, tokens, N)
    if HAS_BASE:
        base += channel
    k, v, w = k + first, v + first, w + first
    halves += head * tiles * N
    carried += carried_place(head, SIDE, 0, tiles, all_heads, N)
    plane = carried_place(0, 2, 0, tiles, all_heads, N)
    tile = 0 if SIDE == 0 else tiles - 1
    sums = _pass_on(k, v, w, base, halves, carried, plane, tile, stride, tokens, None, N, SIDE, ROWS, FULL, HAS_BASE)
    for step in range(1, tiles - 1 if MORE else 1):
        tile = step if SIDE == 0 else tiles - 1 - step
        sums = _pass_on(
            k, v, w, base, halves, carried, plane, tile, stride, tokens, sums, N, SIDE, TILE, FULL, HAS_BASE
        )


@triton.jit
def _pass_on(
    k, v, w, base, halves, carried, plane, tile, stride, tokens, sums,
    N: tl.constexpr, SIDE: tl.constexpr, ROWS: tl.constexpr, FULL: tl.constexpr, HAS_BASE: tl.constexpr,
):  # fmt: skip
    """Add a tile of ROWS tokens to the sums, and keep them for the next."""
    # v's channels in pieces of as many as a tile has tokens, though fewer be there: tensors of one shape stay in place.
    PIECES: tl.constexpr = (N + TILE - 1) // TILE
    row = tl.arange(0, ROWS)
    line = tl.arange(0, TILE)
    lane = tl.arange(0, CHUNK)
    own = tile * TILE + row
    inside = (own < tokens)[:, None]
    place = own[:, None] * stride + lane[None, :]
    after = beyond(row[:, None], row[None, :], SIDE == 1)
    v_tiles = ()
    for piece in tl.static_range(PIECES):
        channels = piece * TILE + line[None, :]
        v_place = own[:, None] * stride + channels
        v_tiles = v_tiles + (tl.load(v + v_place, mask=inside & (channels < N), other=0.0),)
    target = tile + 1 - 2 * SIDE
    added = ()
    for block in tl.static_range(N // CHUNK):
        at = block * CHUNK
        size = decay_size(w, base, place, lane, at, inside, HAS_BASE)
        k_tile = tl.load(k + place + at, mask=inside, other=0.0).to(tl.float32)
        part, rest = parts(k_tile * tl.exp2(-counted(after, size, None, FULL)), FULL)
        half = tl.load(halves + tile * N + at + lane)[None, :]
        target_half = tl.load(halves + target * N + at + lane)[None, :]
        for piece in tl.static_range(PIECES):
            kept = None
            if sums is not None:
                kept = sums[block * PIECES + piece] * (half * half)
            total = dot_stored_parts(tl.trans(v_tiles[piece]), part, rest, kept, FULL)
            channels = piece * TILE + line[:, None]
            where = target * (N * N) + at * N + channels * CHUNK + lane[None, :]
            store_parts(carried, plane, where, total * target_half, channels < N, FULL)
            added = added + (total,)
    return added
