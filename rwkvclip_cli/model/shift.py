"""The token shifts: which neighbour each channel looks at beside its own token.

    >>> neighbours = Shift(heads=10)(x_btc)

Legend: B batch, T tokens, C channels. Source: the shift of Duan et al., "Vision-RWKV" (arXiv 2403.02308), head by head.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor


class Shift(NamedTuple):
    """A tower's token shift: `shift_image` on a grid of patches, `shift_text` without one."""

    heads: int
    grid: tuple[int, int] | None = None

    def __call__(self, x: Tensor) -> Tensor:
        """Each channel of x (B, T, C) from the neighbour that it looks at."""
        return shift_text(x, self.heads) if self.grid is None else shift_image(x, self.heads, self.grid)


def shift_text(x: Tensor, heads: int) -> Tensor:
    """Of each head, the first half of the channels from token t - 1 and the second half from t + 1, zero at the ends.

    x is (B, T, C); the result has its shape and type.
    """
    shifted: Tensor = _Shift.apply(x, heads, None)  # type: ignore[no-untyped-call]
    return shifted


def shift_image(x: Tensor, heads: int, grid: tuple[int, int]) -> Tensor:
    """Of each head, a quarter of the channels each from the left, right, upper and lower patch, zero at the edges.

    x is (B, T, C) with T = grid[0] * grid[1], rows of patches one after the other, or one more: a class token, which
    comes last, keeps its own channels. The result has the shape and type of x.
    """
    shifted: Tensor = _Shift.apply(x, heads, grid)  # type: ignore[no-untyped-call]
    return shifted


class _Shift(torch.autograd.Function):
    """A shift is linear, so its gradient is the same shift with all directions turned round: one pass either way."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, heads: int, grid: tuple[int, int] | None) -> Tensor:
        ctx.heads, ctx.grid = heads, grid
        return _moved(x, heads, grid, back=False)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _moved(grad, ctx.heads, ctx.grid, back=True), None, None


def _moved(x: Tensor, heads: int, grid: tuple[int, int] | None, back: bool) -> Tensor:
    batch, length, channels = x.shape
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    if grid is None:
        source = x.reshape(batch, length, heads, 2, channels // (2 * heads)).unbind(3)
        target = out.view(batch, length, heads, 2, channels // (2 * heads)).unbind(3)
        for part, (after, before) in enumerate(zip(target, source, strict=True)):
            _move(after, before, dim=1, forward=(part == 0) != back)
        return out
    rows, columns = grid
    patches = rows * columns
    shape = (batch, rows, columns, heads, 4, channels // (4 * heads))
    source = x[:, :patches].reshape(shape).unbind(4)
    target = out[:, :patches].view(shape).unbind(4)
    for part, (after, before) in enumerate(zip(target, source, strict=True)):
        _move(after, before, dim=2 if part < 2 else 1, forward=(part % 2 == 0) != back)
    out[:, patches:] = x[:, patches:]
    return out


def _move(target: Tensor, source: Tensor, dim: int, forward: bool) -> None:
    """Write `source` into `target`, one place on along `dim` (or one back), with zeros where nothing comes from."""
    size = source.shape[dim]
    if forward:
        target.narrow(dim, 1, size - 1).copy_(source.narrow(dim, 0, size - 1))
        target.narrow(dim, 0, 1).zero_()
    else:
        target.narrow(dim, 0, size - 1).copy_(source.narrow(dim, 1, size - 1))
        target.narrow(dim, size - 1, 1).zero_()
