"""Matrix products of a block: parameters cast once a pass, gradients of parameters in float32.

>>> key_weight, value_weight = cast((key.weight, value.weight), torch.bfloat16)
"""

from collections.abc import Sequence

import torch
from torch import Tensor


def cast(tensors: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """Copies in `dtype`, in one launch."""
    copies = [torch.empty_like(tensor, dtype=dtype, memory_format=torch.contiguous_format) for tensor in tensors]
    return cast_into(copies, tensors)


def cast_into(targets: list[Tensor], tensors: Sequence[Tensor]) -> list[Tensor]:
    """Copy each tensor into its target, of whatever types, in one launch."""
    torch._foreach_copy_(targets, list(tensors))
    return targets


def full_product(a: Tensor, b: Tensor) -> Tensor:
    """a @ b in float32, for two matrices or two batches of them; 16-bit operands are not rounded again."""
    if a.is_cuda and a.dtype != torch.float32:
        return torch.bmm(a, b, out_dtype=torch.float32) if a.ndim == 3 else torch.mm(a, b, out_dtype=torch.float32)
    return a.float() @ b.float()
