"""What the chunked loss does to its scores between the matrix products, in Triton kernels for NVIDIA GPUs.

    >>> add_normalisers(scores, row_max, row_norm, column_max, column_norm)

`losses._plain_normalisers` and `losses._plain_gradient` do the same with one pass over memory for each operation: at
65,536 pairs 25 passes of 16 GiB, as long as one of the four products. Here it is four passes: each statistic reads the
scores once, and the gradient replaces them where they are.

Legend: r rows of a chunk, K columns. Everything is float32. Nothing is added atomically, so results repeat bit for bit.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

COLUMNS_OF_A_ROW = 4096  # that one program takes at once along a row
TILE_ROWS, TILE_COLUMNS = 32, 64  # that one program takes at once down its columns; 256 bytes side by side
PIECE = 1024  # columns of one row whose scores one program replaces by their gradient


@triton.jit
def _rows_kernel(scores, row_max, row_norm, K, BLOCK: tl.constexpr):
    """One row of scores (r, K): its maximum, and the sum of exp(score - maximum)."""
    row = tl.program_id(0)
    scores += row.to(tl.int64) * K
    columns = tl.arange(0, BLOCK)
    largest = tl.full((), float("-inf"), tl.float32)
    norm = tl.full((), 0.0, tl.float32)
    for first in range(0, K, BLOCK):
        x = tl.load(scores + first + columns, mask=first + columns < K, other=float("-inf"))
        larger = tl.maximum(largest, tl.max(x, 0))
        # A score that is not a number escapes the maximum, and makes the norm not a number.
        norm = norm * tl.exp(largest - larger) + tl.sum(tl.exp(x - larger), 0)
        largest = larger
    tl.store(row_max + row, largest)
    tl.store(row_norm + row, norm)


@triton.jit(do_not_specialize=["R"])
def _columns_kernel(scores, column_max, column_norm, R, K, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """A few columns of scores (r, K), merged into their maximum so far and the sum of exp(score - maximum)."""
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    inside = columns < K
    rows = tl.arange(0, ROWS)
    largest = tl.load(column_max + columns, mask=inside, other=0.0)
    norm = tl.load(column_norm + columns, mask=inside, other=0.0)
    for first in range(0, R, ROWS):
        place = scores + (first + rows).to(tl.int64)[:, None] * K + columns[None, :]
        x = tl.load(place, mask=(first + rows < R)[:, None] & inside[None, :], other=float("-inf"))
        larger = tl.maximum(largest, tl.max(x, 0))
        norm = norm * tl.exp(largest - larger) + tl.sum(tl.exp(x - larger[None, :]), 0)
        largest = larger
    tl.store(column_max + columns, largest, mask=inside)
    tl.store(column_norm + columns, norm, mask=inside)


@triton.jit(do_not_specialize=["first"])
def _gradient_kernel(scores, row_max, row_norm, column_max, column_norm, first, K, BLOCK: tl.constexpr):
    """A piece of a row of scores (r, K), replaced by both softmaxes minus one each where column = first + row."""
    row = tl.program_id(0)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < K
    place = scores + row.to(tl.int64) * K + columns
    x = tl.load(place, mask=inside, other=0.0)
    norm = tl.load(row_norm + row)
    norms = tl.load(column_norm + columns, mask=inside, other=1.0)
    of_row = tl.exp(x - tl.load(row_max + row))
    of_column = tl.exp(x - tl.load(column_max + columns, mask=inside, other=0.0))
    pair = columns == first + row
    # The norm is subtracted before the division: of a pair nearly learnt, the difference is what counts.
    of_row = tl.where(pair, of_row - norm, of_row) / norm
    of_column = tl.where(pair, of_column - norms, of_column) / norms
    tl.store(place, of_row + of_column, mask=inside)


def add_normalisers(scores: Tensor, row_max: Tensor, row_norm: Tensor, column_max: Tensor, column_norm: Tensor) -> None:
    """Learn what the softmax over rows and over columns of scores (r, K) needs; all float32 and contiguous.

    Writes each row's maximum and sum of exp(score - maximum) into row_max and row_norm (r,), and merges those of the
    columns into column_max and column_norm (K,), which start as -inf and 0.
    """
    rows, columns = scores.shape
    with torch.cuda.device_of(scores):
        _rows_kernel[(rows,)](scores, row_max, row_norm, columns, BLOCK=COLUMNS_OF_A_ROW, num_warps=8)
        _columns_kernel[(triton.cdiv(columns, TILE_COLUMNS),)](
            scores, column_max, column_norm, rows, columns, ROWS=TILE_ROWS, COLUMNS=TILE_COLUMNS, num_warps=4
        )


def scores_to_gradient(
    scores: Tensor, row_max: Tensor, row_norm: Tensor, column_max: Tensor, column_norm: Tensor, first: int
) -> Tensor:
    """Replace scores (r, K), whose row i belongs to column first + i, by the gradient of both cross-entropies' sum."""
    rows, columns = scores.shape
    with torch.cuda.device_of(scores):
        _gradient_kernel[(rows, triton.cdiv(columns, PIECE))](
            scores, row_max, row_norm, column_max, column_norm, first, columns, BLOCK=PIECE, num_warps=4
        )
    return scores
