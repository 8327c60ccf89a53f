"""A block's second branch, the mix over channels, forward and backward, from its norm to its gated output.

    >>> out, kept = forward(x, change, (None, None), parameters, eps, layout, torch.bfloat16)

Legend: B batch, T tokens, L = B T rows, C channels, F hidden channels.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from rwkvclip_cli.model.blocks import Kind
from rwkvclip_cli.model.fused.attention import Eps, Parameters
from rwkvclip_cli.model.fused.gates import gated_sum, gated_sum_backward, squared_relu_, squared_relu_backward_
from rwkvclip_cli.model.fused.hidden import squared_relu_product
from rwkvclip_cli.model.fused.layout import Layout
from rwkvclip_cli.model.fused.mixes import mix
from rwkvclip_cli.model.fused.norms import Normed, add_norm, norm_backward
from rwkvclip_cli.model.fused.products import cast, full_product

Keep = tuple[Tensor | None, Tensor | None]
SHARES: dict[Kind, tuple[str, str]] = {
    "image": ("ffn.spatial_mix_k", "ffn.spatial_mix_r"),
    "text": ("ffn.time_maa_k", "ffn.time_maa_r"),
}
MATRICES = ("ffn.key.weight", "ffn.value.weight", "ffn.receptance.weight")


class Kept(NamedTuple):
    """What the backward pass needs."""

    total: Tensor
    """(L, C) float32: the stream that the branch reads."""
    normed: Tensor
    """(L, C): the stream's norm."""
    mean: Tensor
    rstd: Tensor
    squared: Tensor
    """(L, F): the hidden channels' squared ReLU, which also tells the ReLU itself."""
    openness: Tensor
    """(L, C): the gate's logits."""
    value: Tensor
    """(L, C): what the gate lets through."""


class Weights(NamedTuple):
    """The branch's matrices in the compute type."""

    key: Tensor
    value: Tensor
    receptance: Tensor


def names(kind: Kind) -> tuple[str, ...]:
    """The branch's parameters."""
    return ("ln2.weight", "ln2.bias", *SHARES[kind], *MATRICES)


def forward(
    x: Tensor,
    change: Tensor,
    keep: Keep,
    parameters: Parameters,
    kind: Kind,
    eps: Eps,
    layout: Layout,
    dtype: torch.dtype,
) -> tuple[Tensor, Kept, Weights]:
    """The first branch's change added to x (L, C) float32, and this branch's to the sum; float32."""
    weights = Weights(*cast([parameters[name] for name in MATRICES], dtype))
    key, value, receptance = weights
    norm = add_norm(x, parameters["ln2.weight"], parameters["ln2.bias"], eps.ln2, dtype, layout, change, keep[0])
    x_k, x_r = mix(_shares(parameters, kind), norm.normed, layout, inverse=kind == "image")
    squared = squared_relu_product(x_k, key) if dtype.itemsize == 2 else squared_relu_(torch.mm(x_k, key.t()))
    del x_k
    openness = torch.mm(x_r, receptance.t())
    del x_r
    through = torch.mm(squared, value.t())
    out = gated_sum(norm.total, openness, through, keep[1], layout)
    return out, Kept(*norm, squared, openness, through), weights


def backward(
    grad: Tensor,
    kept: Kept,
    weights: Weights,
    keep: Keep,
    parameters: Parameters,
    needed: frozenset[str],
    kind: Kind,
    layout: Layout,
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """From the gradient (L, C) float32 of the result to that of the sum (float32) and of the first branch's change.

    Last come the gradients of the parameters among `needed` (others may be there too).
    """
    dtype = kept.value.dtype
    key, value, receptance = weights
    grads: dict[str, Tensor] = {}
    grad_openness, grad_value = gated_sum_backward(grad, kept.openness, kept.value, keep[1], layout)
    if "ffn.value.weight" in needed:
        grads["ffn.value.weight"] = full_product(grad_value.t(), kept.squared)
    grad_hidden = squared_relu_backward_(torch.mm(grad_value, value), kept.squared)
    del grad_value
    grad_mixes = torch.mm(grad_hidden, key), torch.mm(grad_openness, receptance)
    shares = _shares(parameters, kind)
    norm = Normed(kept.total, kept.normed, kept.mean, kept.rstd)
    if needed & {"ffn.key.weight", "ffn.receptance.weight"}:
        x_k, x_r = mix(shares, kept.normed, layout, inverse=kind == "image")
        grads["ffn.key.weight"] = full_product(grad_hidden.t(), x_k)
        grads["ffn.receptance.weight"] = full_product(grad_openness.t(), x_r)
        del x_k, x_r
    del grad_hidden, grad_openness
    grad_total, grad_change, sums = norm_backward(
        grad_mixes, shares, norm, parameters["ln2.weight"], parameters["ln2.bias"], grad, layout,
        inverse=kind == "image", change_dtype=dtype, keep=keep[0],
    )  # fmt: skip
    assert grad_change is not None
    grads.update(zip((*SHARES[kind], "ln2.weight", "ln2.bias"), sums, strict=True))
    return grad_total, grad_change, grads


def _shares(parameters: Parameters, kind: Kind) -> tuple[Tensor, Tensor]:
    first, second = SHARES[kind]
    return parameters[first], parameters[second]
