"""A block's first branch, attention over tokens, forward and backward, from its norm to its output matrix.

    >>> change, kept = forward(x, parameters, eps, layout, torch.bfloat16)

Legend: B batch, T tokens, L = B T rows, C channels, H heads, N = C / H; mixes in the order w, k, v, r, g.
"""

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from rwkvclip_cli.model import wkv6_triton
from rwkvclip_cli.model.blocks import MIX_RANK
from rwkvclip_cli.model.fused.gates import head_gate, head_gate_backward, tanh_backward_
from rwkvclip_cli.model.fused.layout import Layout
from rwkvclip_cli.model.fused.mixes import five_mixes, five_mixes_backward, inner_backward, mix
from rwkvclip_cli.model.fused.norms import Normed, add_norm, norm_backward
from rwkvclip_cli.model.fused.products import cast_into, full_product

Parameters = Mapping[str, Tensor]
FIXED = ("att.time_maa_w", "att.time_maa_k", "att.time_maa_v", "att.time_maa_r", "att.time_maa_g")
SQUARE = ("att.key.weight", "att.value.weight", "att.receptance.weight", "att.gate.weight")
NAMES = (
    "ln1.weight", "ln1.bias", "att.time_maa_x", *FIXED, "att.time_maa_w1", "att.time_maa_w2", "att.time_decay",
    "att.time_decay_w1", "att.time_decay_w2", "att.time_faaaa", *SQUARE, "att.output.weight", "att.ln_x.weight",
    "att.ln_x.bias",
)  # fmt: skip


SUM_ROWS = 8
"""Rows of ones that sum over tokens beside a product: the fewest that the matrix units take whole."""


class Eps(NamedTuple):
    """What the norms of a block add to variances."""

    ln1: float
    heads: float
    ln2: float


class Kept(NamedTuple):
    """What the backward pass needs."""

    x: Tensor
    """(L, C) float32: the branch's input."""
    normed: Tensor
    """(L, C): the input's norm."""
    mean: Tensor
    rstd: Tensor
    inner: Tensor
    """(L, 160): the tanh inside the five mixes."""
    decay_inner: Tensor
    """(L, 64): the tanh inside the decay."""
    kvrg: Tensor
    """(4, L, C)."""
    y: Tensor
    """(L, C): the heads' outputs, float32 where the compute type is float16."""


class Weights(NamedTuple):
    """The branch's matrices in the compute type."""

    square: Tensor
    """(4, C, C), for k, v, r, g, each as `nn.Linear` has it."""
    output: Tensor
    mix_in: Tensor
    mix_out: Tensor
    decay_in: Tensor
    decay_out: Tensor

    @classmethod
    def of(cls, parameters: Parameters, dtype: torch.dtype) -> "Weights":
        matrices = ("output.weight", "time_maa_w1", "time_maa_w2", "time_decay_w1", "time_decay_w2")
        others = [parameters[f"att.{name}"] for name in matrices]
        squares = [parameters[name] for name in SQUARE]
        square = squares[0].new_empty((len(SQUARE), *squares[0].shape), dtype=dtype)
        copies = [torch.empty_like(tensor, dtype=dtype) for tensor in others]
        cast_into([*square.unbind(), *copies], [*squares, *others])
        return cls(square, *copies)


def forward(
    x: Tensor, parameters: Parameters, eps: Eps, layout: Layout, dtype: torch.dtype
) -> tuple[Tensor, Kept, Weights]:
    """The change (L, C), in `dtype`, that the branch makes to x (L, C) float32."""
    weights = Weights.of(parameters, dtype)
    norm = add_norm(x, parameters["ln1.weight"], parameters["ln1.bias"], eps.ln1, dtype, layout)
    normed = norm.normed
    (x_x,) = mix((parameters["att.time_maa_x"],), normed, layout)
    inner = torch.mm(x_x, weights.mix_in).tanh_()
    del x_x
    mixed = five_mixes(normed, inner, weights.mix_out, _fixed(parameters), layout)
    kvrg = torch.bmm(mixed[1:], weights.square.transpose(1, 2))
    decay_inner = torch.mm(mixed[0], weights.decay_in).tanh_()
    del mixed
    w = torch.mm(decay_inner, weights.decay_out)
    k, v, r, g = kvrg
    u, base = _bonus_and_decay(parameters, layout)
    r, k, v, w = _by_head(layout, _wide(r), k, v, w)
    y = wkv6_triton.forward(r, k, v, w, u, base).view(x.shape)
    z = head_gate(y, g, parameters["att.ln_x.weight"], parameters["att.ln_x.bias"], eps.heads, layout)
    return torch.mm(z, weights.output.t()), Kept(*norm, inner, decay_inner, kvrg, y), weights


def backward(
    grad_change: Tensor,
    grad_total: Tensor,
    kept: Kept,
    weights: Weights,
    parameters: Parameters,
    needed: frozenset[str],
    eps: Eps,
    layout: Layout,
) -> tuple[Tensor, dict[str, Tensor]]:
    """The gradient of x, and those of the parameters among `needed` (others may be there too).

    Args:
        grad_change: gradient (L, C) of the change, in the compute type.
        grad_total: gradient (L, C) float32 of x from all beside this branch.
    """
    k, v, r, g = kept.kvrg
    grads: dict[str, Tensor] = {}
    grad_kvrg = torch.empty_like(kept.kvrg)

    grad_y, z, sums = head_gate_backward(
        torch.mm(grad_change, weights.output), kept.y, g, parameters["att.ln_x.weight"],
        parameters["att.ln_x.bias"], eps.heads, grad_kvrg[3], layout,
    )  # fmt: skip
    grads["att.ln_x.weight"], grads["att.ln_x.bias"] = sums
    if "att.output.weight" in needed:
        grads["att.output.weight"] = full_product(grad_change.t(), z)
    del z

    w = torch.mm(kept.decay_inner, weights.decay_out)
    grad_w = torch.empty_like(w)
    u, base = _bonus_and_decay(parameters, layout)
    r, k, v, w, grad_y = _by_head(layout, _wide(r), k, v, w, grad_y)
    out_r, out_k, out_v, out_w = _by_head(layout, grad_kvrg[2], grad_kvrg[0], grad_kvrg[1], grad_w)
    *_, grads["att.time_faaaa"], grad_base = wkv6_triton.backward(
        r, k, v, w, u, base, grad_y, (out_r, out_k, out_v, out_w)
    )
    assert grad_base is not None
    grads["att.time_decay"] = grad_base
    del r, k, v, w, grad_y

    grad_decay_inner = tanh_backward_(torch.mm(grad_w, weights.decay_out.t()), kept.decay_inner)
    if "att.time_decay_w2" in needed:
        grads["att.time_decay_w2"] = full_product(kept.decay_inner.t(), grad_w)
    del grad_w

    fixed = _fixed(parameters)
    norm = Normed(kept.x, kept.normed, kept.mean, kept.rstd)
    share = parameters["att.time_maa_x"]
    shares = grad_kvrg.new_empty((len(FIXED), *kept.x.shape))
    torch.mm(grad_decay_inner, weights.decay_in.t(), out=shares[0])
    torch.bmm(grad_kvrg, weights.square, out=shares[1:])
    back = five_mixes_backward(shares, kept.normed, kept.inner, weights.mix_out, fixed, share, layout)
    # `shares` held the gradients of the mixes, and holds those of the shares by now.
    if needed & set(SQUARE):
        grads.update(zip(SQUARE, full_product(grad_kvrg.transpose(1, 2), back.mixed[1:]), strict=True))
    if "att.time_decay_w1" in needed:
        grads["att.time_decay_w1"] = full_product(back.mixed[0].t(), grad_decay_inner)
    del grad_kvrg, grad_decay_inner

    if needed & {*FIXED, "att.time_maa_w2"}:
        # A fixed share's gradient is a sum over tokens: a product with ones, in the same pass as that with the tanh.
        lanes = pad(kept.inner.view(layout.rows, len(FIXED), MIX_RANK), (0, SUM_ROWS), value=1.0)
        products = full_product(lanes.permute(1, 2, 0), shares)
        grads["att.time_maa_w2"] = products[:, :MIX_RANK]
        grads.update(zip(FIXED, products[:, MIX_RANK], strict=True))
    grad_before = inner_backward(shares, kept.inner, weights.mix_out, layout)
    del shares
    if "att.time_maa_w1" in needed:
        grads["att.time_maa_w1"] = full_product(back.mixed_x.t(), grad_before)
    grad_x, _, sums = norm_backward(
        (torch.mm(grad_before, weights.mix_in.t()),), (share,), norm, parameters["ln1.weight"],
        parameters["ln1.bias"], grad_total, layout, parts=(back.grad_own, back.grad_near),
    )  # fmt: skip
    grads["att.time_maa_x"], _, grads["ln1.weight"], grads["ln1.bias"] = sums
    return grad_x, grads


def _fixed(parameters: Parameters) -> Tensor:
    return torch.cat([parameters[name].view(1, -1) for name in FIXED])


def _wide(r: Tensor) -> Tensor:
    """The heads' outputs have the type of r, and a sum over many tokens can leave float16's range."""
    return r.float() if r.dtype == torch.float16 else r


def _by_head(layout: Layout, *tensors: Tensor) -> tuple[Tensor, ...]:
    shape = (layout.batch, layout.tokens, layout.heads, layout.head)
    return tuple(tensor.view(shape) for tensor in tensors)


def _bonus_and_decay(parameters: Parameters, layout: Layout) -> tuple[Tensor, Tensor]:
    """u and base of WKV6: the decay's own part stays float32, as it is an exponent of an exponent."""
    return parameters["att.time_faaaa"], parameters["att.time_decay"].view(layout.heads, layout.head)
