"""The way into the fused block: `Block.forward` as one autograd function over kernels and matrix products.

    >>> y = fused_block(block, x_btc, Shift(heads=8, grid=(7, 7)), torch.bfloat16)

The residual stream and its gradient are float32. All else lies in memory in the compute type, and all arithmetic
between the products is float32. The backward pass recomputes the mixes from the norms rather than keep them. Gradients
of parameters are float32, summed in a fixed order.
"""

import operator
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
import triton
from torch import Tensor

from rwkvclip_cli.model.blocks import Block, Kind, layer_norm
from rwkvclip_cli.model.fused import attention, channels
from rwkvclip_cli.model.fused.attention import Eps
from rwkvclip_cli.model.fused.layout import Layout
from rwkvclip_cli.model.shift import Shift


@dataclass(frozen=True)
class _Call:
    """All that is no tensor."""

    kind: Kind
    eps: Eps
    layout: Layout
    dtype: torch.dtype

    @property
    def names(self) -> tuple[str, ...]:
        return (*attention.NAMES, *channels.names(self.kind))


def supported(block: Block, x: Tensor) -> bool:
    """Whether `fused_block` takes such a block and stream x (B, T, C): its device, types and sizes."""
    width, heads = x.shape[-1], block.att.heads
    return (
        (x.is_cuda or triton.knobs.runtime.interpret)
        and x.dtype == torch.float32 == block.att.key.weight.dtype
        and x.shape[-2] >= 1
        and width % 16 == 0
        and width % heads == 0
        and (width // heads) % 16 == 0
        and not block.dropout
    )


def fused_block(
    block: Block, x: Tensor, shift: Shift, dtype: torch.dtype, drop_path_uniform: Tensor | None = None
) -> Tensor:
    """`Block.forward` without dropout, for a block and stream that `supported` agrees to.

    Args:
        x: the residual stream, (B, T, C) float32; T is the grid's patches, or one more for a class token.
        shift: the heads, and the grid of patches or None for text.
        dtype: compute type: what products read and what is stored between them; float32 or 16 bits.
        drop_path_uniform: (2, B), which branches each sample keeps.

    Returns:
        (B, T, C) float32.
    """
    if block.ln0 is not None:
        x = layer_norm(x, block.ln0)
    keep: channels.Keep = (None, None)
    if drop_path_uniform is not None and block.drop_path > 0:
        first, second = (drop_path_uniform >= block.drop_path).float() / (1.0 - block.drop_path)
        keep = first, second
    eps = Eps(block.ln1.eps, block.att.ln_x.eps, block.ln2.eps)
    call = _Call(block.ffn.kind, eps, Layout.of(x, shift.heads, shift.grid), dtype)
    result: Tensor = _FusedBlock.apply(call, x, *keep, *operator.attrgetter(*call.names)(block))
    return result


class _FusedBlock(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, call: _Call, x: Tensor, keep_1: Tensor | None, keep_2: Tensor | None, *tensors: Tensor
    ) -> Tensor:
        parameters = dict(zip(call.names, tensors, strict=True))
        stream = x.contiguous().view(-1, call.layout.width)
        with torch.autocast(x.device.type, enabled=False):
            change, att, att_weights = attention.forward(stream, parameters, call.eps, call.layout, call.dtype)
            out, ffn, ffn_weights = channels.forward(
                stream, change, (keep_1, keep_2), parameters, call.kind, call.eps, call.layout, call.dtype
            )
        ctx.call = call
        # The copies of the matrices are kept too: a few hundred MiB in all, where casting again would cost time.
        ctx.save_for_backward(keep_1, keep_2, *att, *att_weights, *ffn, *ffn_weights, *tensors)
        return out.view(x.shape)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        call: _Call = ctx.call
        keep_1, keep_2, *saved = ctx.saved_tensors
        rest = iter(saved)
        att = attention.Kept(*islice(rest, len(attention.Kept._fields)))
        att_weights = attention.Weights(*islice(rest, len(attention.Weights._fields)))
        ffn = channels.Kept(*islice(rest, len(channels.Kept._fields)))
        ffn_weights = channels.Weights(*islice(rest, len(channels.Weights._fields)))
        parameters = dict(zip(call.names, rest, strict=True))
        needs = ctx.needs_input_grad[4:]
        needed = frozenset(name for name, need in zip(call.names, needs, strict=True) if need)
        with torch.autocast(grad.device.type, enabled=False):
            grad_total, grad_change, grads = channels.backward(
                grad.contiguous().view(att.x.shape), ffn, ffn_weights, (keep_1, keep_2), parameters, needed,
                call.kind, call.layout,
            )  # fmt: skip
            grad_x, more = attention.backward(
                grad_change, grad_total, att, att_weights, parameters, needed, call.eps, call.layout
            )
        grads.update(more)
        of_parameters = (grads[name].view(parameters[name].shape) if name in needed else None for name in call.names)
        return None, grad_x.view(grad.shape), None, None, *of_parameters
