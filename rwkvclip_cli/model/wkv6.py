"""WKV6, the attention of RWKV-6 in both directions: the table of its implementations and the plainest of them.

    >>> y = wkv6(r, k, v, w, u)

Legend: B batch, T tokens, H heads, N channels of a head.
Source: Peng et al., "Eagle and Finch" (arXiv 2404.05892), run from both ends of the sequence.
"""

import functools
import importlib.util
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from rwkvclip_cli.model.wkv6_matrix import wkv6_matrix


def wkv6(r: Tensor, k: Tensor, v: Tensor, w: Tensor, u: Tensor, *, kernels: bool = True) -> Tensor:
    """Let every token receive from all others, less the further they are, with the fastest implementation here.

    With decays d = exp(-exp(w)), token t receives the vectors v_s of all tokens s, weighted by the sum over channels of
    r_t k_s times the product of d over the tokens strictly between s and t; its own v_t counts with r_t u k_t.

    Args:
        r, k, v: receptance, key and value, (B, T, H, N), T >= 1, of any floating type.
        w: raw decay, (B, T, H, N); may be of a wider type than r.
        u: bonus of a token for itself, (H, N).
        kernels: whether implementations that a GPU has to compile may be chosen.

    Returns:
        (B, T, H, N) in the type of r. Sums are float32, or float64 for float64 inputs, inside autocast too.

    Raises:
        ValueError: shapes that do not belong together.
    """
    if not (r.ndim == 4 and r.shape[1] >= 1 and r.shape == k.shape == v.shape == w.shape and u.shape == r.shape[2:]):
        shapes = ", ".join(f"{name} {tuple(x.shape)}" for name, x in zip("rkvwu", (r, k, v, w, u), strict=True))
        raise ValueError(f"wkv6 takes r, k, v, w of one shape (B, T, H, N), T >= 1, and u (H, N); got {shapes}")
    chosen = implementations(r, kernels)[0]
    with torch.autocast(r.device.type, enabled=False):
        return chosen.function(r, k, v, w, u)


def wkv6_loop(r: Tensor, k: Tensor, v: Tensor, w: Tensor, u: Tensor) -> Tensor:
    """WKV6 by its definition: one N x N state a head, carried from token to token, once in each direction."""
    sums = torch.promote_types(r.dtype, torch.float32)
    bonus = u.to(sums).unsqueeze(-1)
    decay = torch.exp(-torch.exp(w.to(sums))).unsqueeze(-1).unbind(1)
    receptance = r.to(sums).unsqueeze(-2).unbind(1)
    message = [
        key.unsqueeze(-1) * value.unsqueeze(-2)
        for key, value in zip(k.to(sums).unbind(1), v.to(sums).unbind(1), strict=True)
    ]
    # The product with the decay changes nothing, but gives w its gradient of zero where T = 1.
    before = after = torch.zeros_like(message[0]) * decay[0]
    y = []
    for t in range(len(message)):
        y.append(receptance[t] @ (before + bonus * message[t]))
        before = decay[t] * before + message[t]
    for t in reversed(range(len(message))):
        y[t] = y[t] + receptance[t] @ after
        after = decay[t] * after + message[t]
    return torch.stack(y, dim=1).squeeze(-2).to(r.dtype)


class Implementation(NamedTuple):
    """One way to compute WKV6, with the signature of `wkv6`."""

    name: str
    function: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
    takes: Callable[[Tensor], bool]
    """Whether it runs on such an r: its device, type and sizes."""
    is_kernel: bool = False
    """Whether it is compiled at first use, rather than made of PyTorch's operations."""


@functools.cache
def triton_is_there() -> bool:
    """Whether Triton, which compiles the GPU kernels and comes with CUDA builds of torch, is installed."""
    return importlib.util.find_spec("triton") is not None


def _kernels(r: Tensor, k: Tensor, v: Tensor, w: Tensor, u: Tensor) -> Tensor:
    from rwkvclip_cli.model.wkv6_triton import wkv6_triton

    return wkv6_triton(r, k, v, w, u)


def _kernels_take(r: Tensor) -> bool:
    types = (torch.float32, torch.bfloat16, torch.float16)
    on_gpu = r.is_cuda and r.dtype in types and triton_is_there() and not torch.compiler.is_compiling()
    return on_gpu and r.shape[-1] % 16 == 0


IMPLEMENTATIONS = (
    Implementation("triton", _kernels, takes=_kernels_take, is_kernel=True),
    Implementation("matrix", wkv6_matrix, takes=lambda r: True),
    Implementation("loop", wkv6_loop, takes=lambda r: True),
)
"""Fastest first; a kernel is one more row at the top, and the tests run over all rows."""


def implementations(r: Tensor, kernels: bool = True) -> list[Implementation]:
    """All that run on such an r, fastest first; `kernels=False` leaves those out that have to be compiled."""
    return [row for row in IMPLEMENTATIONS if (kernels or not row.is_kernel) and row.takes(r)]
