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
    processors: int
    """Multiprocessors of the GPU; 0 without one."""

    @classmethod
    def of(cls, x: Tensor, heads: int, grid: tuple[int, int] | None) -> "Layout":
        return _layout(*x.shape, heads, grid, x.device)

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

    def programs(self, each: int) -> int:
        """Programs that sum parameter gradients, so many for each multiprocessor, and each leaving one row of sums."""
        return each * self.processors or 2

    @functools.cached_property
    def places(self) -> dict[str, int]:
        """What kernels that look at neighbours are compiled for."""
        return {
            "C": self.width, "HEAD": self.head, "PART": self.part, "VECTOR": self.vector,
            "TOKENS": self.tokens, "LINES": self.lines, "COLUMNS": self.columns,
        }  # fmt: skip


@functools.cache
def _layout(
    batch: int, tokens: int, width: int, heads: int, grid: tuple[int, int] | None, device: torch.device
) -> Layout:
    lines, columns = grid or (1, tokens)
    return Layout(batch, tokens, width, heads, lines, columns, 4 if grid else 2, _processors(device))


@functools.cache
def _processors(device: torch.device) -> int:
    if device.type != "cuda":
        return 0
    processors: int = torch.cuda.get_device_properties(device).multi_processor_count
    return processors


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
    return 1.0 / (1.0 + tl.exp2(x * -LOG2_E))


@triton.jit
def take_row(pointer, channel, mask):
    """Load the channels of a (C) tensor, as float32, for all rows of a tile: each thread reads what it needs itself."""
    return tl.load(tl.broadcast_to((pointer + channel)[None, :], mask.shape), mask=mask, other=0.0).to(tl.float32)


@triton.jit
def columns_inside(channel, C: tl.constexpr, CHANNELS: tl.constexpr):
    """Which of a block of CHANNELS channels there are. Where blocks fill C that is known when compiling: no masks."""
    if C % CHANNELS == 0:
        return tl.full(channel.shape, 1, tl.int1)
    else:
        return channel < C


@triton.jit
def neighbour(
    row, channel,
    C: tl.constexpr, HEAD: tl.constexpr, PART: tl.constexpr, VECTOR: tl.constexpr,
    TOKENS: tl.constexpr, LINES: tl.constexpr, COLUMNS: tl.constexpr, BACK: tl.constexpr,
):  # fmt: skip
    """What the shift brings to each token (rows) and channel (columns): how many elements away, and whether any is.

    With BACK all directions are turned round, which makes it the transposed shift.
    """
    # All work on divisions is that of a row or of a channel alone; the two meet in one shift of bits.
    way = (channel % HEAD) // PART
    if BACK:
        way = way ^ 1
    step = tl.where(way < 2, C, COLUMNS * C)
    step = tl.where((way & 1) == 0, -step, step)[None, :]
    token = row % TOKENS
    # Without a class token a row's own number tells its column: one division less after the other.
    column = (row if TOKENS == LINES * COLUMNS else token) % COLUMNS
    ways = (column > 0).to(tl.int32) + (column < COLUMNS - 1).to(tl.int32) * 2
    ways += (token >= COLUMNS).to(tl.int32) * 4 + (token < COLUMNS * (LINES - 1)).to(tl.int32) * 8
    if TOKENS > LINES * COLUMNS:  # the class token has itself for neighbour
        patch = token < LINES * COLUMNS
        ways = tl.where(patch, ways, 15)
        step = tl.where(patch[:, None], step, 0)
    exists = ((ways[:, None] >> way[None, :]) & 1) != 0
    return step, tl.max_constancy(exists, [1, VECTOR])


@triton.jit
def take_neighbour(pointer, at, step, mask, VECTOR: tl.constexpr):
    """Load float32 values `step` elements from `at`; runs of VECTOR channels lie together there too."""
    there = tl.max_contiguous(tl.multiple_of(at + step, [1, VECTOR]), [1, VECTOR])
    return take(pointer + there, mask)
