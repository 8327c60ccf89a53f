"""Sizes and small device functions that all kernels of a block share.

    >>> layout = Layout.of(x_btc, heads=8, grid=(7, 7))

Legend: B batch, T tokens, L = B T rows, C channels of the stream, H heads, N = C / H channels of a head.
"""

import functools
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
LOG2_E = tl.constexpr(1.4426950408889634)
PROGRAMS_PER_PROCESSOR = 12
"""Programs a multiprocessor that sum parameter gradients, each leaving one row of sums: whole rounds of 2, 3 or 4."""


@dataclass(frozen=True)
class Layout:
    """The sizes of one call. A text is a grid of one line, of whose four directions it uses two."""

    batch: int
    tokens: int
    width: int
    heads: int
    lines: int
    columns: int
    directions: int
    """4 on a grid, 2 in a text."""
    programs: int
    """Programs that sum parameter gradients."""

    @classmethod
    def of(cls, x: Tensor, heads: int, grid: tuple[int, int] | None) -> "Layout":
        batch, tokens, width = x.shape
        lines, columns = grid or (1, tokens)
        return cls(batch, tokens, width, heads, lines, columns, 4 if grid else 2, _programs(x.device))

    @property
    def rows(self) -> int:
        return self.batch * self.tokens

    @property
    def head(self) -> int:
        return self.width // self.heads

    @property
    def part(self) -> int:
        """Neighbouring channels that look the same way."""
        return self.head // self.directions

    @property
    def vector(self) -> int:
        """Channels that one thread may load at once from a neighbour."""
        return next(size for size in (8, 4, 2, 1) if self.part % size == 0)


@functools.cache
def _programs(device: torch.device) -> int:
    if device.type != "cuda":
        return 2
    processors: int = torch.cuda.get_device_properties(device).multi_processor_count
    return PROGRAMS_PER_PROCESSOR * processors


def precision(dtype: torch.dtype) -> str:
    """How products inside kernels treat float32 operands: as torch's own products do. 16-bit ones are exact."""
    return "tf32" if dtype == torch.float32 and torch.get_float32_matmul_precision() != "highest" else "ieee"


@triton.jit
def take(pointer, mask):
    """Load as float32, zero where the mask is false."""
    return tl.load(pointer, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def put(pointer, value, mask):
    """Store float32 values in the type of the memory, rounded to nearest even."""
    kind: tl.constexpr = pointer.dtype.scalar.element_ty
    tl.store(pointer, rounded(value, kind), mask=mask)


@triton.jit
def rounded(value, kind: tl.constexpr):
    """float32 values in another type, rounded to nearest even."""
    if INTERPRETED and kind == tl.bfloat16:  # whose own cast cuts bits off
        bits = value.to(tl.int32, bitcast=True)
        value = (bits + 0x7FFF + ((bits >> 16) & 1)).to(tl.float32, bitcast=True)
    return value.to(kind)


@triton.jit
def dot(a, b, PRECISION: tl.constexpr):
    """a @ b with float32 sums; exact products where a and b have 16 bits."""
    if INTERPRETED:  # whose own dot takes bfloat16's bits for integers
        return tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
    else:
        return tl.dot(a, b, input_precision=PRECISION)


@triton.jit
def sigmoid(x):
    return 1.0 / (1.0 + tl.exp2(-x * LOG2_E))


@triton.jit
def neighbour(
    token, channel, lines, columns,
    C: tl.constexpr, HEAD: tl.constexpr, PART: tl.constexpr, VECTOR: tl.constexpr, BACK: tl.constexpr,
):  # fmt: skip
    """What the shift brings to each token (rows) and channel (columns): how many elements away, and whether any is.

    With BACK all directions are turned round, which makes it the transposed shift.
    """
    direction = ((channel % HEAD) // PART)[None, :]
    before = ((direction % 2) == 0) != BACK
    sideways = direction < 2
    line, column = (token // columns)[:, None], (token % columns)[:, None]
    patch = (token < lines * columns)[:, None]
    place = tl.where(sideways, column, line)
    last = tl.where(sideways, columns, lines) - 1
    exists = tl.where(before, place > 0, place < last) | ~patch
    step = tl.where(sideways, C, columns * C)
    step = tl.where(patch, tl.where(before, -step, step), 0)
    return step, tl.max_constancy(exists, [1, VECTOR])


@triton.jit
def take_neighbour(pointer, at, step, mask, VECTOR: tl.constexpr):
    """Load float32 values `step` elements from `at`; runs of VECTOR channels lie together there too."""
    there = tl.max_contiguous(tl.multiple_of(at + step, [1, VECTOR]), [1, VECTOR])
    return take(pointer + there, mask)
