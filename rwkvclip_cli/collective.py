"""The collectives on whole tensors, under the names that the installed torch knows them by.

>>> gather_into(everything, mine)

torch 2.13 renamed both and warns of the earlier names; torch before it knows the earlier names alone.
"""

import torch.distributed as dist
from torch import Tensor


def gather_into(output: Tensor, part: Tensor, group: dist.ProcessGroup | None = None) -> None:
    """Write every rank's `part` (B, ...) into `output` (W x B, ...), in the order of ranks."""
    getattr(dist, "all_gather_single", dist.all_gather_into_tensor)(output, part, group=group)


def reduce_scatter_into(output: Tensor, whole: Tensor, group: dist.ProcessGroup | None = None) -> None:
    """Write into `output` (B, ...) this rank's part of the sum over ranks of `whole` (W x B, ...)."""
    getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)(output, whole, group=group)
