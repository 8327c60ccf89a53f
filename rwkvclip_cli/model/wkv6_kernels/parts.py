"""Products of tiles with float32 sums, exact beyond the rounding of 16-bit results: operands as pairs of 16-bit parts.

>>> high, low = parts(x, FULL=False)
>>> total = dot_parts(a_high, a_low, b_high, b_low, total, FULL=False)

A float32 number is the sum of two bfloat16 ones to 16 bits, so three fast products stand for one of float32 operands.
FULL, for float32 tensors, takes the operands as they are; the matrix units then have no part in it.
"""

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def filled(rows: tl.constexpr, columns: tl.constexpr, value):
    """A float32 tensor of one value, whose sizes may be items of a tuple."""
    return tl.full((rows, columns), value, tl.float32)


@triton.jit
def _dot_16(a, b, total):
    """a @ b + total for operands of 16 bits."""
    if INTERPRETED:  # whose own dot takes bfloat16's bits for integers
        return tl.dot(a.to(tl.float32), b.to(tl.float32), total)
    else:
        return tl.dot(a, b, total)


@triton.jit
def cut(x, FULL: tl.constexpr):
    """x without the last 8 of its 24 bits, so that its two parts hold it exactly; with FULL x itself."""
    if FULL:
        return x
    else:
        return (x.to(tl.int32, bitcast=True) & -256).to(tl.float32, bitcast=True)


@triton.jit
def split(x):
    """x as the sum of two bfloat16 numbers: its upper 16 bits, and what they leave out."""
    high = (x.to(tl.int32, bitcast=True) & -65536).to(tl.float32, bitcast=True)
    return high.to(tl.bfloat16), (x - high).to(tl.bfloat16)


@triton.jit
def parts(x, FULL: tl.constexpr):
    """The two operands that stand for x; with FULL the first alone does."""
    if FULL:
        return x, x
    else:
        return split(x)


@triton.jit
def dot_parts(a_high, a_low, b_high, b_low, total, FULL: tl.constexpr):
    """a @ b + total of two tensors' parts."""
    if FULL:
        return tl.dot(a_high, b_high, total, input_precision="ieee")
    else:
        total = _dot_16(a_high, b_high, total)
        return _dot_16(a_high, b_low, _dot_16(a_low, b_high, total))


@triton.jit
def dot_parts_wholly(a_high, a_low, b, total, FULL: tl.constexpr):
    """a @ b + total for the parts of a and for b that was `cut`: all four products, so that the sum is float32's."""
    b_high, b_low = parts(b, FULL)
    total = dot_parts(a_high, a_low, b_high, b_low, total, FULL)
    if not FULL:
        total = _dot_16(a_low, b_low, total)
    return total


@triton.jit
def dot_across(a_high, a_low, b_high, b_low, total, FULL: tl.constexpr):
    """a @ b^T + total of two tensors' parts."""
    return dot_parts(a_high, a_low, tl.trans(b_high), tl.trans(b_low), total, FULL)


@triton.jit
def dot_parts_stored(high, low, b, total, FULL: tl.constexpr):
    """a @ b + total for the parts of a and for b as it lies in memory: bfloat16 is exact as it is."""
    if b.dtype == tl.bfloat16:
        return _dot_16(low, b, _dot_16(high, b, total))
    else:
        b_high, b_low = parts(b.to(tl.float32), FULL)
        return dot_parts(high, low, b_high, b_low, total, FULL)


@triton.jit
def dot_stored_parts(a, high, low, total, FULL: tl.constexpr):
    """a @ b + total for a as it lies in memory and the parts of b."""
    if a.dtype == tl.bfloat16:
        return _dot_16(a, low, _dot_16(a, high, total))
    else:
        a_high, a_low = parts(a.to(tl.float32), FULL)
        return dot_parts(a_high, a_low, high, low, total, FULL)


@triton.jit
def dot_stored(a, b, total, FULL: tl.constexpr):
    """a @ b + total for a and b as they lie in memory: products of 16-bit numbers are exact."""
    if a.dtype == b.dtype and a.dtype != tl.float32:
        return _dot_16(a, b, total)
    else:
        a_high, a_low = parts(a.to(tl.float32), FULL)
        b_high, b_low = parts(b.to(tl.float32), FULL)
        return dot_parts(a_high, a_low, b_high, b_low, total, FULL)


@triton.jit
def weighed(weights, x, total, FULL: tl.constexpr):
    """weights @ x + total, precise to 2^-11 of each summand; float16 holds the `weights` exactly."""
    if FULL:
        return tl.dot(weights, x, total, input_precision="ieee")
    else:
        return _dot_16(weights.to(tl.float16), x.to(tl.float16), total)


@triton.jit
def as_weighed(x, FULL: tl.constexpr):
    """x as `weighed` rounds it."""
    if FULL:
        return x
    else:
        return x.to(tl.float16).to(tl.float32)


@triton.jit
def counted(selection, x, total, FULL: tl.constexpr):
    """selection @ x + total, where `selection` holds truth values; precise to 2^-11 of each summand."""
    return weighed(selection.to(tl.float32), x, total, FULL)


@triton.jit
def counted_exactly(selection, x, total, FULL: tl.constexpr):
    """selection @ x + total for x of any range: 16 bits of x's precision at least."""
    if FULL:
        return tl.dot(selection.to(tl.float32), x, total, input_precision="ieee")
    else:
        ones = selection.to(tl.float32).to(tl.bfloat16)
        high, low = split(x)
        return _dot_16(ones, low, _dot_16(ones, high, total))


@triton.jit
def counted_wholly(selection, x, total, FULL: tl.constexpr):
    """selection @ x + total with all bits of x, for sums that cancel."""
    if not FULL:
        ones = selection.to(tl.float32).to(tl.bfloat16)
        last = (x - cut(x, FULL)).to(tl.bfloat16)
        total = _dot_16(ones, last, total)
    return counted_exactly(selection, cut(x, FULL), total, FULL)


@triton.jit
def store_parts(high_pointer, plane, where, x, mask, FULL: tl.constexpr):
    """Keep x in memory as its parts, `plane` apart."""
    high, low = parts(x, FULL)
    tl.store(high_pointer + where, high, mask=mask)
    if not FULL:
        tl.store(high_pointer + plane + where, low, mask=mask)


@triton.jit
def load_parts(high_pointer, plane, where, mask, FULL: tl.constexpr):
    """The parts that `store_parts` kept `plane` apart, 0 where masked."""
    other: tl.constexpr = None if mask is None else 0.0
    high = tl.load(high_pointer + where, mask=mask, other=other)
    if FULL:
        return high, high
    else:
        return high, tl.load(high_pointer + plane + where, mask=mask, other=other)


@triton.jit
def whole(high, low, FULL: tl.constexpr):
    """The float32 number of two parts."""
    if FULL:
        return high
    else:
        return high.to(tl.float32) + low.to(tl.float32)
