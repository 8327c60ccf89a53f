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

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from rwkvclip_cli.model.wkv6_kernels.backward import backward_kernel
from rwkvclip_cli.model.wkv6_kernels.borders import CHUNK, TREE_CHUNKS
from rwkvclip_cli.model.wkv6_kernels.forward import forward_kernel

TOKENS: int = CHUNK.value


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
    short, tree = plans = _plans(tokens)
    kind = torch.float32 if full else torch.bfloat16
    products = r.new_empty((1 if full else 2, batch * heads, short.side, short.side), dtype=kind)
    strong = _launch_forward(k, r, grad_y, w, u, base, grad_v, v, products)
    sums = r.new_zeros((2, batch, heads, tree.tiles, channels), dtype=torch.float32)
    for plan in plans if batch else ():
        several = triton.next_power_of_2(plan.tiles)
        gaps = r.new_zeros((batch * heads, several, channels), dtype=torch.float32) if several > 1 else sums
        backward_kernel[(batch * heads,)](
            r, k, w, u, base, products, grad_r, grad_k, grad_w, sums[0], sums[1], gaps, strong, tokens, heads,
            N=channels, CHUNKS=plan.chunks, GAPS=several, FULL=full, HAS_BASE=base is not None, TREE=plan is tree,
            FLAGS=short.tiles, PARTS=tree.tiles, num_warps=plan.chunks, num_stages=plan.stages,
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
    short, tree = plans = _plans(tokens)
    strong = r.new_empty(batch * heads * short.tiles, dtype=torch.bool)
    for plan in plans if batch else ():
        forward_kernel[(batch * heads * plan.tiles,)](
            r, k, v, w, u, base, y, other, products, strong, tokens, heads,
            N=channels, CHUNKS=plan.chunks, FULL=_is_full(r, k), HAS_BASE=base is not None,
            WITH_PRODUCTS=products is not None and plan is short, MANY=plan.tiles > 1, TREE=plan is tree,
            FLAGS=short.tiles, num_warps=plan.chunks, num_stages=plan.stages, maxnreg=plan.forward_registers,
        )  # fmt: skip
    return strong


def _is_full(r: Tensor, k: Tensor) -> bool:
    """Whether operands stay float32: beside float16, whose range sums can leave, r alone is float32."""
    return r.dtype == k.dtype == torch.float32


class _Plan(NamedTuple):
    """How tokens are cut into tiles of as many chunks as warps work on them."""

    chunks: int
    tiles: int
    stages: int
    forward_registers: int | None = None
    """Most registers of a thread of the forward kernel, where a few less let one more program run beside."""

    @property
    def side(self) -> int:
        """Tokens of all tiles, real or not."""
        return self.tiles * self.chunks * TOKENS


def _plans(tokens: int) -> tuple[_Plan, _Plan]:
    """The plans of the short form and of the tree: of the same side, as the one reads what the other left."""
    tree = triton.cdiv(tokens, TREE_CHUNKS.value * TOKENS)
    short = _Plan(4, 1, 3, 168) if tree == 2 else _Plan(2, tree, 2)
    return short, _Plan(TREE_CHUNKS.value, tree, 1)
