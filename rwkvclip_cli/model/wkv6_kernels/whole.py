"""WKV6 of a whole head in one program, in the short form: M tokens and, behind them, a tail of fewer.

>>> forward_whole_kernel[(batch * heads,)](r, k, v, w, u, base, y, ...)
>>> backward_whole_kernel[(batch * heads,)](r, k, w, u, base, products, ...)

The border of the M tokens is the middle of their decay, and so is the tail's. A pair of one token each takes the first
border: the tail's factor `across` reaches from it to the tail's token. Legend: M main tokens, X tokens of the tail.
"""

import triton
import triton.language as tl

from rwkvclip_cli.model.wkv6_kernels.borders import (
    LARGEST_HALF,
    LARGEST_HALF_FULL,
    LOG2_E,
    around_half,
    beyond,
    decay_size,
    head_place,
)
from rwkvclip_cli.model.wkv6_kernels.parts import (
    counted,
    cut_made_good,
    dot_across_cut,
    dot_parts,
    dot_parts_stored,
    dot_stored,
    load_parts,
    parts,
    store_parts,
    weighed,
)


@triton.jit
def _at(first_token, tokens, stride, at, M: tl.constexpr, WIDE: tl.constexpr):
    """Where M tokens' WIDE channels lie, and which of the tokens there are."""
    row = first_token + tl.arange(0, M)[:, None]
    return row * stride + at + tl.arange(0, WIDE)[None, :], row < tokens


@triton.jit
def _take(pointer, first_token, tokens, stride, at, M: tl.constexpr, WIDE: tl.constexpr):
    """A block of M tokens and WIDE channels."""
    place, inside = _at(first_token, tokens, stride, at, M, WIDE)
    return tl.load(pointer + place, mask=inside, other=0.0)


@triton.jit
def _size(w, base, first_token, tokens, stride, at, M: tl.constexpr, WIDE: tl.constexpr, HAS_BASE: tl.constexpr):
    """The decays of a block of M tokens as `decay_size` gives them."""
    place, inside = _at(first_token, tokens, stride, 0, M, WIDE)
    return decay_size(w, base, place, tl.arange(0, WIDE), at, inside, HAS_BASE)


@triton.jit
def _across(size, main_size, X: tl.constexpr, M: tl.constexpr, FULL: tl.constexpr):
    """The decay from the main border to each token of the tail, and half of the main decays, which is in it."""
    row = tl.arange(0, X)
    half = weighed(tl.full((X, M), 0.5, tl.float32), main_size, None, FULL)
    return tl.exp2(-counted(beyond(row[:, None], row[None, :], True), size, half, FULL)), half


@triton.jit
def _own(r_tile, k_tile, down, up, below, above, FULL: tl.constexpr):
    """Scores of tokens from one another: of pairs whose first sends, and of those whose second does."""
    below = dot_across_cut(r_tile * down, k_tile * up, below, FULL)
    return below, dot_across_cut(r_tile * up, k_tile * down, above, FULL)


@triton.jit
def _whole(below, above, bonus, M: tl.constexpr, FULL: tl.constexpr):
    """The scores of tokens from one another and from themselves."""
    row = tl.arange(0, M)[:, None]
    column = tl.arange(0, M)[None, :]
    others = cut_made_good(tl.where(row > column, below, above), FULL)
    return tl.where(row == column, tl.sum(bonus, axis=1)[:, None], others)


@triton.jit
def forward_whole_kernel(
    r, k, v, w, u, base, y, other, products, strong, tokens, heads,
    N: tl.constexpr, M: tl.constexpr, X: tl.constexpr, WIDE: tl.constexpr, FULL: tl.constexpr,
    HAS_BASE: tl.constexpr, WITH_PRODUCTS: tl.constexpr,
):  # fmt: skip
    """A head's y = scores @ v, with WITH_PRODUCTS also v @ other^T into `products`; `strong` as `forward_kernel`'s."""
    SIDE: tl.constexpr = M + X
    head = tl.program_id(0)
    first, stride, channel = head_place(head, heads, tokens, N)
    u += channel
    if HAS_BASE:
        base += channel
    r, k, v, w, y = r + first, k + first, v + first, w + first, y + first

    below = tl.zeros((M, M), tl.float32)
    above = tl.zeros((M, M), tl.float32)
    bonus = tl.zeros((M, WIDE), tl.float32)
    largest = tl.zeros((X or M, WIDE), tl.float32)
    if X:
        tail_below = tl.zeros((X, X), tl.float32)
        tail_above = tl.zeros((X, X), tl.float32)
        tail_bonus = tl.zeros((X, WIDE), tl.float32)
        # Rows are the main tokens in both: what the tail receives from them lies across.
        to_main = tl.zeros((M, X), tl.float32)
        to_tail = tl.zeros((M, X), tl.float32)
    for at in range(0, N, WIDE):
        u_row = tl.load(u + at + tl.arange(0, WIDE))[None, :].to(tl.float32)
        r_tile = _take(r, 0, tokens, stride, at, M, WIDE).to(tl.float32)
        k_tile = _take(k, 0, tokens, stride, at, M, WIDE).to(tl.float32)
        size = _size(w, base, 0, tokens, stride, at, M, WIDE, HAS_BASE)
        down, up, exponent = around_half(size, M, FULL)
        if not X:
            largest = tl.maximum(largest, exponent, propagate_nan=tl.PropagateNan.ALL)
        bonus += r_tile * u_row * k_tile
        below, above = _own(r_tile, k_tile, down, up, below, above, FULL)
        if X:
            tail_r = _take(r, M, tokens, stride, at, X, WIDE).to(tl.float32)
            tail_k = _take(k, M, tokens, stride, at, X, WIDE).to(tl.float32)
            tail_size = _size(w, base, M, tokens, stride, at, X, WIDE, HAS_BASE)
            across, half = _across(tail_size, size, X, M, FULL)
            to_main = dot_across_cut(r_tile * up, tail_k * across, to_main, FULL)
            to_tail = dot_across_cut(k_tile * up, tail_r * across, to_tail, FULL)
            down, up, exponent = around_half(tail_size, X, FULL)
            largest = tl.maximum(largest, exponent, propagate_nan=tl.PropagateNan.ALL)
            largest = tl.maximum(largest, half, propagate_nan=tl.PropagateNan.ALL)
            tail_bonus += tail_r * u_row * tail_k
            tail_below, tail_above = _own(tail_r, tail_k, down, up, tail_below, tail_above, FULL)
    # What is no number goes to the tree, which does not cut it off.
    weak = largest <= (LARGEST_HALF_FULL if FULL else LARGEST_HALF)
    tl.store(strong + head, tl.min(weak.to(tl.int32)) == 0)

    high, low = parts(_whole(below, above, bonus, M, FULL), FULL)
    if X:
        right, right_low = parts(cut_made_good(to_main, FULL), FULL)
        left, left_low = parts(cut_made_good(to_tail, FULL), FULL)
        tail, tail_low = parts(_whole(tail_below, tail_above, tail_bonus, X, FULL), FULL)
    for at in range(0, N, WIDE):
        v_tile = _take(v, 0, tokens, stride, at, M, WIDE)
        total = dot_parts_stored(high, low, v_tile, None, FULL)
        if X:
            tail_v = _take(v, M, tokens, stride, at, X, WIDE)
            total = dot_parts_stored(right, right_low, tail_v, total, FULL)
            received = dot_parts_stored(tl.trans(left), tl.trans(left_low), v_tile, None, FULL)
            received = dot_parts_stored(tail, tail_low, tail_v, received, FULL)
            place, inside = _at(M, tokens, stride, at, X, WIDE)
            tl.store(y + place, received, mask=inside)
        place, inside = _at(0, tokens, stride, at, M, WIDE)
        tl.store(y + place, total, mask=inside)

    if WITH_PRODUCTS:
        other += first
        products += head.to(tl.int64) * (SIDE * SIDE)
        low_products = products + tl.num_programs(0).to(tl.int64) * (SIDE * SIDE)
        _store_product(v, other, products, low_products, stride, tokens, 0, 0, N, M, M, SIDE, WIDE, FULL)
        if X:
            _store_product(v, other, products, low_products, stride, tokens, 0, M, N, M, X, SIDE, WIDE, FULL)
            _store_product(v, other, products, low_products, stride, tokens, M, 0, N, X, M, SIDE, WIDE, FULL)
            _store_product(v, other, products, low_products, stride, tokens, M, M, N, X, X, SIDE, WIDE, FULL)


@triton.jit
def _store_product(
    v, other, products, low_products, stride, tokens, first_row, first_column,
    N: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, SIDE: tl.constexpr, WIDE: tl.constexpr,
    FULL: tl.constexpr,
):  # fmt: skip
    """Some rows and columns of v @ other^T."""
    product = tl.zeros((ROWS, COLUMNS), tl.float32)
    for at in range(0, N, WIDE):
        left = _take(v, first_row, tokens, stride, at, ROWS, WIDE)
        right = _take(other, first_column, tokens, stride, at, COLUMNS, WIDE)
        product = dot_stored(left, tl.trans(right), product, FULL)
    store_parts(products, low_products, _square(first_row, first_column, ROWS, COLUMNS, SIDE), product, FULL)


@triton.jit
def _square(first_row, first_column, ROWS: tl.constexpr, COLUMNS: tl.constexpr, SIDE: tl.constexpr):
    row = first_row + tl.arange(0, ROWS)
    return row[:, None] * SIDE + first_column + tl.arange(0, COLUMNS)[None, :]


@triton.jit
def _parts_at(products, low_products, where, FULL: tl.constexpr):
    """Both parts as they were stored."""
    high = tl.load(products + where)
    if FULL:
        return high, high
    else:
        return high, tl.load(low_products + where)


@triton.jit
def _diagonal(products, low_products, first_row, M: tl.constexpr, SIDE: tl.constexpr, FULL: tl.constexpr):
    row = first_row + tl.arange(0, M)
    return load_parts(products, low_products, row * (SIDE + 1), row >= 0, FULL)[:, None]


@triton.jit
def _triangles(square, M: tl.constexpr):
    """What lies below and above a square's diagonal."""
    row = tl.arange(0, M)[:, None]
    column = tl.arange(0, M)[None, :]
    return tl.where(row > column, square, 0.0), tl.where(row < column, square, 0.0)


@triton.jit
def _received(high, low, x, FULL: tl.constexpr):
    """products @ x, from both operands' parts."""
    part, rest = parts(x, FULL)
    return dot_parts(high, low, part, rest, None, FULL)


@triton.jit
def _sent(high, low, x, FULL: tl.constexpr):
    """products^T @ x, from both operands' parts."""
    part, rest = parts(x, FULL)
    return dot_parts(tl.trans(high), tl.trans(low), part, rest, None, FULL)


@triton.jit
def _decay_gradient(change, into_up, M: tl.constexpr, FULL: tl.constexpr):
    """Of each token's log decay, what all pairs around it weigh: those that end later less those that begin later."""
    row = tl.arange(0, M)
    return counted(row[:, None] < row[None, :], change, None, FULL) - into_up


@triton.jit
def backward_whole_kernel(
    r, k, w, u, base, products, grad_r, grad_k, grad_w, grad_u, grad_base, tokens, heads,
    N: tl.constexpr, M: tl.constexpr, X: tl.constexpr, WIDE: tl.constexpr, FULL: tl.constexpr,
    HAS_BASE: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """A head's gradients of r, k, w, u and base from `products`, the gradients of its scores."""
    SIDE: tl.constexpr = M + X
    head = tl.program_id(0)
    first, stride, channel = head_place(head, heads, tokens, N)
    u += channel
    if HAS_BASE:
        base += channel
    r, k, w = r + first, k + first, w + first
    grad_r, grad_k, grad_w = grad_r + first, grad_k + first, grad_w + first
    products += head.to(tl.int64) * (SIDE * SIDE)
    low_products = products + tl.num_programs(0).to(tl.int64) * (SIDE * SIDE)

    high, low = _parts_at(products, low_products, _square(0, 0, M, M, SIDE), FULL)
    below, above = _triangles(high, M)
    below_low, above_low = _triangles(low, M)
    diagonal = _diagonal(products, low_products, 0, M, SIDE, FULL)
    if X:
        right, right_low = _parts_at(products, low_products, _square(0, M, M, X, SIDE), FULL)
        left, left_low = _parts_at(products, low_products, _square(M, 0, X, M, SIDE), FULL)
        tail, tail_low = _parts_at(products, low_products, _square(M, M, X, X, SIDE), FULL)
        tail_below, tail_above = _triangles(tail, X)
        tail_below_low, tail_above_low = _triangles(tail_low, X)
        tail_diagonal = _diagonal(products, low_products, M, X, SIDE, FULL)

    for at in range(0, N, WIDE):
        u_row = tl.load(u + at + tl.arange(0, WIDE))[None, :].to(tl.float32)
        r_tile = _take(r, 0, tokens, stride, at, M, WIDE).to(tl.float32)
        k_tile = _take(k, 0, tokens, stride, at, M, WIDE).to(tl.float32)
        size = _size(w, base, 0, tokens, stride, at, M, WIDE, HAS_BASE)
        down, up, _ = around_half(size, M, FULL)
        into_down_r = _received(below, below_low, k_tile * up, FULL)
        into_up_r = _received(above, above_low, k_tile * down, FULL)
        into_up_k = _sent(below, below_low, r_tile * down, FULL)
        into_down_k = _sent(above, above_low, r_tile * up, FULL)
        total_u = tl.sum(diagonal * r_tile * k_tile, axis=0)
        if X:
            tail_r = _take(r, M, tokens, stride, at, X, WIDE).to(tl.float32)
            tail_k = _take(k, M, tokens, stride, at, X, WIDE).to(tl.float32)
            tail_size = _size(w, base, M, tokens, stride, at, X, WIDE, HAS_BASE)
            across, _ = _across(tail_size, size, X, M, FULL)
            into_up_r += _received(right, right_low, tail_k * across, FULL)
            into_up_k += _sent(left, left_low, tail_r * across, FULL)
            tail_grad_r = across * _received(left, left_low, k_tile * up, FULL)
            tail_grad_k = across * _sent(right, right_low, r_tile * up, FULL)
            # What pairs of a main token and one of the tail weigh, by the latter.
            parted = tail_r * tail_grad_r + tail_k * tail_grad_k
            tail_down, tail_up, _ = around_half(tail_size, X, FULL)
            r_below = tail_down * _received(tail_below, tail_below_low, tail_k * tail_up, FULL)
            r_above = tail_up * _received(tail_above, tail_above_low, tail_k * tail_down, FULL)
            k_below = tail_up * _sent(tail_below, tail_below_low, tail_r * tail_down, FULL)
            k_above = tail_down * _sent(tail_above, tail_above_low, tail_r * tail_up, FULL)
            into_up = tail_r * r_above + tail_k * k_below
            change = tail_r * r_below + tail_k * k_above - into_up + parted
            tail_grad_r += r_below + r_above + tail_diagonal * u_row * tail_k
            tail_grad_k += k_below + k_above + tail_diagonal * u_row * tail_r
            tail_grad_w = _decay_gradient(change, into_up, X, FULL) * (tail_size * (-1.0 / LOG2_E))
            total_u += tl.sum(tail_diagonal * tail_r * tail_k, axis=0)
            place, inside = _at(M, tokens, stride, at, X, WIDE)
            tl.store(grad_r + place, tail_grad_r, mask=inside)
            tl.store(grad_k + place, tail_grad_k, mask=inside)
            tl.store(grad_w + place, tail_grad_w, mask=inside)
        into_up = up * (r_tile * into_up_r + k_tile * into_up_k)
        change = down * (r_tile * into_down_r + k_tile * into_down_k) - into_up
        grad_decay = _decay_gradient(change, into_up, M, FULL)
        if X:
            grad_decay = counted(tl.full((M, X), 1, tl.int1), parted, grad_decay, FULL)
        grad_w_tile = grad_decay * (size * (-1.0 / LOG2_E))
        place, inside = _at(0, tokens, stride, at, M, WIDE)
        tl.store(grad_r + place, down * into_down_r + up * into_up_r + diagonal * u_row * k_tile, mask=inside)
        tl.store(grad_k + place, down * into_down_k + up * into_up_k + diagonal * u_row * r_tile, mask=inside)
        tl.store(grad_w + place, grad_w_tile, mask=inside)
        sums = head * PARTS * N + at + tl.arange(0, WIDE)
        tl.store(grad_u + sums, total_u)
        if HAS_BASE:
            total_w = tl.sum(grad_w_tile, axis=0)
            if X:
                total_w += tl.sum(tail_grad_w, axis=0)
            tl.store(grad_base + sums, total_w)
