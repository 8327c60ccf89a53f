"""WKV6 in Triton kernels, forward and backward, for NVIDIA GPUs.

    >>> y = wkv6_triton(r, k, v, w, u)

Legend: B batch, T tokens, H heads, N channels of a head.

A score is a product of two vectors, each decayed to a border between its tokens (see `wkv6_matrix`). Inside a tile of
tokens the short form takes one border for all pairs, the middle of the tile's decay, and so exponents of either sign;
where they would leave float32's range, which a head's weaker decays do not, the tree of borders of `wkv6_matrix` does
that head again, without a positive exponent. Between two tiles the border is the edge of the receiving one.

The gradient of v is the forward pass with r and k exchanged. That pass also leaves the (T, T) gradients of the scores
in memory, from which a second kernel makes those of r, k, w and u. Operands are rounded to no less than 16 bits and
sums are float32, so that results are exact up to their own rounding; nothing is added atomically, so they repeat.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from rwkvclip_cli.model.wkv6_kernels.backward import backward_kernel
from rwkvclip_cli.model.wkv6_kernels.borders import CHUNK, TREE_CHUNKS
from rwkvclip_cli.model.wkv6_kernels.forward import forward_kernel
from rwkvclip_cli.model.wkv6_kernels.whole import backward_whole_kernel, forward_whole_kernel

TOKENS: int = CHUNK.value
TILE: int = TREE_CHUNKS.value * TOKENS
LARGEST_MAIN = 64
"""Tokens whose scores one program holds: the least that Hopper's matrix units take in one step."""
WIDE, WIDE_BACK = 16, 16
"""Channels of a block, of the two kernels that take whole heads."""


def wkv6_triton(r: Tensor, k: Tensor, v: Tensor, w: Tensor, u: Tensor) -> Tensor:
    """WKV6 through kernels; arguments, result and types as `wkv6.wkv6` describes them, on one GPU, N a multiple of 16.

    Memory beside the result is small; the backward pass takes (B, H, T, T) for a moment. Gradients are exact up to the
    rounding of the results; second ones there are none.
    """
    y: Tensor = _Wkv6.apply(r, k, v, w, u)  # type: ignore[no-untyped-call]
    return y


class _Wkv6(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *inputs: Tensor) -> Tensor:
        r, k, v, w, u = (tensor.contiguous() for tensor in inputs)
        ctx.save_for_backward(r, k, v, w, u)
        return forward(r, k, v, w, u)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor, ...]:
        r, k, v, w, u = ctx.saved_tensors
        grad_r, grad_k, grad_v, grad_w, grad_u, _ = backward(r, k, v, w, u, None, grad_y.contiguous())
        return grad_r, grad_k, grad_v, grad_w, grad_u.to(u.dtype)


def forward(r: Tensor, k: Tensor, v: Tensor, w: Tensor, u: Tensor, base: Tensor | None = None) -> Tensor:
    """y of `wkv6.wkv6`, outside autograd, for contiguous tensors; with `base` (H, N) the raw decay is w + base."""
    y = torch.empty_like(r)
    _launch_forward(r, k, v, w, u, base, y)
    return y


def backward(
    r: Tensor,
    k: Tensor,
    v: Tensor,
    w: Tensor,
    u: Tensor,
    base: Tensor | None,
    grad_y: Tensor,
    out: tuple[Tensor, Tensor, Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None]:
    """Gradients of `forward`'s r, k, v, w, u and base; u's and base's are float32 (H, N).

    `out`: contiguous tensors for the first four, in the order r, k, v, w.
    """
    batch, tokens, heads, channels = r.shape
    grad_r, grad_k, grad_v, grad_w = out or tuple(torch.empty_like(tensor) for tensor in (r, k, v, w))
    full = _is_full(r, k)
    plan = _Plan.of(tokens)
    kind = torch.float32 if full else torch.bfloat16
    products = r.new_empty((1 if full else 2, batch * heads, plan.side, plan.side), dtype=kind)
    strong = _launch_forward(k, r, grad_y, w, u, base, grad_v, v, products)
    sums = r.new_zeros((2, batch, heads, plan.tree, channels), dtype=torch.float32)
    several = triton.next_power_of_2(plan.tree)
    gaps = r.new_zeros((batch * heads, several, channels), dtype=torch.float32) if several > 1 else sums
    shared = {"N": channels, "FULL": full, "HAS_BASE": base is not None, "PARTS": plan.tree}
    grid = (batch * heads,)
    if batch and plan.whole:
        backward_whole_kernel[grid](
            r, k, w, u, base, products, grad_r, grad_k, grad_w, sums[0], sums[1], tokens, heads,
            M=plan.main, X=plan.tail, WIDE=_wide(channels, WIDE_BACK), num_warps=plan.warps, num_stages=3, **shared,
        )  # fmt: skip
    for tree in plan.forms if batch else ():
        backward_kernel[grid](
            r, k, w, u, base, products, plan.side, grad_r, grad_k, grad_w, sums[0], sums[1], gaps, strong, tokens,
            heads, CHUNKS=TREE_CHUNKS.value, GAPS=several, TREE=tree, FLAGS=plan.flags,
            num_warps=TREE_CHUNKS.value, num_stages=1 if tree else 2, **shared,
        )  # fmt: skip
    grad_u, grad_base = sums.sum((1, 3)).unbind()
    return grad_r, grad_k, grad_v, grad_w, grad_u, None if base is None else grad_base


def _launch_forward(
    r: Tensor,
    k: Tensor,
    v: Tensor,
    w: Tensor,
    u: Tensor,
    base: Tensor | None,
    y: Tensor,
    other: Tensor | None = None,
    products: Tensor | None = None,
) -> Tensor:
    """Fill y, and `products` where given; return which tiles' decays were too strong for the short form."""
    batch, tokens, heads, channels = r.shape
    plan = _Plan.of(tokens)
    strong = r.new_empty(batch * heads * plan.flags, dtype=torch.bool)
    shared = {"N": channels, "FULL": _is_full(r, k), "HAS_BASE": base is not None}
    if batch and plan.whole:
        forward_whole_kernel[(batch * heads,)](
            r, k, v, w, u, base, y, other, products, strong, tokens, heads,
            M=plan.main, X=plan.tail, WIDE=_wide(channels, WIDE), WITH_PRODUCTS=products is not None,
            num_warps=plan.warps, num_stages=3, **shared,
        )  # fmt: skip
    for tree in plan.forms if batch else ():
        forward_kernel[(batch * heads * plan.tree,)](
            r, k, v, w, u, base, y, other, products, strong, tokens, heads,
            CHUNKS=TREE_CHUNKS.value, WITH_PRODUCTS=products is not None and not tree, MANY=plan.tree > 1, TREE=tree,
            FLAGS=plan.flags, num_warps=TREE_CHUNKS.value, num_stages=1 if tree else 2, **shared,
        )  # fmt: skip
    return strong


def _is_full(r: Tensor, k: Tensor) -> bool:
    """Whether operands stay float32: beside float16, whose range sums can leave, r alone is float32."""
    return r.dtype == k.dtype == torch.float32


def _wide(channels: int, most: int) -> int:
    """The largest power of 2 up to `most` that divides a head's channels."""
    return math.gcd(channels, most)


@dataclass(frozen=True)
class _Plan:
    """How a head's tokens are cut into tiles."""

    main: int
    tail: int
    """Tokens of the main tile and of the tail of a head that one program takes whole; 0 and 0 for longer ones."""
    tree: int
    """Tiles of the tree, which are also those of longer heads."""

    @classmethod
    def of(cls, tokens: int) -> "_Plan":
        tree = triton.cdiv(tokens, TILE)
        main = TILE if tree == 1 else LARGEST_MAIN
        tail = max(tokens - main, 0)
        if tail > TILE:
            return cls(0, 0, tree)
        return cls(main, TOKENS * triton.next_power_of_2(triton.cdiv(tail, TOKENS)) if tail else 0, tree)

    @property
    def whole(self) -> bool:
        return self.main > 0

    @property
    def forms(self) -> tuple[bool, ...]:
        """The forms, of which the tree is one, that the kernels for tiles take after or instead of the whole head's."""
        return (True,) if self.whole else (False, True)

    @property
    def side(self) -> int:
        """Tokens of all tiles of the short form, real or not."""
        return self.main + self.tail if self.whole else self.tree * TILE

    @property
    def flags(self) -> int:
        """Tiles of the short form that may each be too strong for it."""
        return 1 if self.whole else self.tree

    @property
    def warps(self) -> int:
        return self.main // 16
