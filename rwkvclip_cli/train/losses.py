"""The contrastive loss of CLIP, exact for any number of ranks.

>>> loss = clip_loss(image_embedding, text_embedding, logit_scale)

B is the batch of one rank, W the number of ranks, C the width. Averaged over ranks, as DistributedDataParallel does,
the gradients of every form here are those of one process that holds all W x B pairs.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from rwkvclip_cli.collective import gather_into, reduce_scatter_into
from rwkvclip_cli.console import UsageError


def clip_loss(
    image: Tensor,
    text: Tensor,
    logit_scale: Tensor,
    *,
    local_loss: bool = True,
    gather_with_grad: bool = True,
    chunk_size: int | None = None,
    group: dist.ProcessGroup | None = None,
) -> Tensor:
    """Symmetric cross-entropy of matching pairs (Radford et al. 2021, figure 3).

    Args:
        image, text: (B, C), any float dtype, not normalised; row i of one belongs to row i of the other. Every rank
            of the group passes the same B. They are normalised in float32, or in float64 if they are float64.
        logit_scale: (), the factor on cosine similarities, already exponentiated.
        local_loss: each rank scores its own B rows against all W x B, in place of the full matrix on every rank.
        gather_with_grad: gradients flow through the gathered rows of other ranks.
        chunk_size: score at most this many rows at once and recompute them in the backward pass, so that the full
            matrix is never held; None scores all rows at once.
        group: process group; None is the default group, or one process where none is initialised.

    Returns:
        (), float32 or float64. The mean over ranks is the loss of the whole batch.

    Raises:
        UsageError: local_loss without gather_with_grad, whose gradient points the wrong way; a chunk_size below 1.
    """
    if local_loss and not gather_with_grad:
        raise UsageError(
            "local_loss=True needs gather_with_grad=True: without it the gradient has the wrong direction",
            hint="clip_loss(..., local_loss=False, gather_with_grad=False)",
        )
    if chunk_size is not None and chunk_size < 1:
        raise UsageError(f"chunk_size must be at least 1; got {chunk_size}")
    world_size, rank = _world(group)
    # Autocast would turn the logits' product back to 16 bits; at a scale of 100 that costs two digits of the loss.
    with torch.autocast(image.device.type, enabled=False):
        image, text = _normalize(image), _normalize(text)
        all_image, all_text = image, text
        if world_size > 1:
            pairs = torch.cat([image, text], dim=1)  # (B, 2C): one collective for both towers
            gathered: Tensor = _gather(pairs, rank, group) if gather_with_grad else _gather_own(pairs, rank, group)
            all_image, all_text = gathered.split(image.shape[1], dim=1)
        first = 0
        if world_size > 1:
            first = rank * image.shape[0] if local_loss else 0
            if not local_loss:
                image, text = all_image, all_text
        labels = torch.arange(first, first + image.shape[0], device=image.device)
        scale = logit_scale.to(image.dtype)
        forth = _cross_entropy_sum(image, all_text, scale, labels, chunk_size)
        back = _cross_entropy_sum(text, all_image, scale, labels, chunk_size)
        return (forth + back) / (2 * image.shape[0])


LOSSES: dict[str, Callable[..., Tensor]] = {"clip": clip_loss}


def _world(group: dist.ProcessGroup | None) -> tuple[int, int]:
    if not (dist.is_available() and dist.is_initialized()):
        return 1, 0
    return dist.get_world_size(group), dist.get_rank(group)


def _normalize(x: Tensor) -> Tensor:
    return F.normalize(x.to(torch.promote_types(x.dtype, torch.float32)), dim=-1)


def _cross_entropy_sum(rows: Tensor, columns: Tensor, scale: Tensor, labels: Tensor, chunk_size: int | None) -> Tensor:
    """Sum over rows of -log softmax(scale * rows @ columns.T)[label]; rows (R, C), columns (K, C), labels (R,)."""
    if chunk_size is None or chunk_size >= rows.shape[0]:
        return _scores_loss(rows, columns, scale, labels)
    total = rows.new_zeros(())
    for row_chunk, label_chunk in zip(rows.split(chunk_size), labels.split(chunk_size), strict=True):
        total = total + checkpoint(
            _scores_loss, row_chunk, columns, scale, label_chunk, use_reentrant=False, preserve_rng_state=False
        )
    return total


def _scores_loss(rows: Tensor, columns: Tensor, scale: Tensor, labels: Tensor) -> Tensor:
    # The scale multiplies the (R, C) rows, not the (R, K) scores: the same product with fewer elementwise passes.
    return F.cross_entropy((rows * scale) @ columns.T, labels, reduction="sum")


def _all_gather(x: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    gathered = x.new_empty((dist.get_world_size(group) * x.shape[0], *x.shape[1:]))
    gather_into(gathered, x.contiguous(), group)
    return gathered


class _Gather(torch.autograd.Function):
    """All ranks' rows; backward adds up every rank's gradient for this rank's rows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rank: int, group: dist.ProcessGroup | None) -> Tensor:
        ctx.rank, ctx.group, ctx.rows = rank, group, x.shape[0]
        return _all_gather(x, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        grad = grads[0].contiguous()
        if grad.is_cuda:
            own = grad.new_empty((ctx.rows, *grad.shape[1:]))
            reduce_scatter_into(own, grad, ctx.group)
        else:
            # gloo's reduce_scatter is this all_reduce inside; asked for directly, it runs on every torch in range.
            grad = grad.clone()
            dist.all_reduce(grad, group=ctx.group)
            own = grad[ctx.rank * ctx.rows : (ctx.rank + 1) * ctx.rows]
        return own, None, None


def _gather(x: Tensor, rank: int, group: dist.ProcessGroup | None) -> Tensor:
    gathered: Tensor = _Gather.apply(x, rank, group)  # type: ignore[no-untyped-call]
    return gathered


class _ScaleGradient(torch.autograd.Function):
    """The identity whose gradient is multiplied by a factor."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0] * ctx.factor, None


def _gather_own(x: Tensor, rank: int, group: dist.ProcessGroup | None) -> Tensor:
    """All ranks' rows, with a gradient for this rank's alone.

    Every rank computes the whole loss, so its own rows' gradient is complete, and averaging over ranks would divide
    it by W: it is multiplied by W first. The published trainer leaves that out and trains its towers at lr / W.
    """
    world_size = dist.get_world_size(group)
    others = list(_all_gather(x.detach(), group).chunk(world_size))
    scaled: Tensor = _ScaleGradient.apply(x, float(world_size))  # type: ignore[no-untyped-call]
    others[rank] = scaled
    return torch.cat(others)
