"""The contrastive loss of CLIP, exact for any number of ranks.

>>> loss = clip_loss(image_embedding, text_embedding, logit_scale)

B is the batch of one rank, W the number of ranks, C the width. Averaged over ranks, as DistributedDataParallel does,
the gradients of every form here are those of one process that holds all W x B pairs.
"""

import functools
import importlib.util
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from rwkvclip_cli.collective import gather_into, reduce_scatter_into
from rwkvclip_cli.console import UsageError

# What scores may take on top of the embeddings before they are better chunked: little beside a tower's activations.
SCORES_BYTES = 1 << 30


def clip_loss(
    image: Tensor,
    text: Tensor,
    logit_scale: Tensor,
    *,
    local_loss: bool = True,
    gather_with_grad: bool = True,
    chunk_size: int | None = None,
    kernels: bool = True,
    group: dist.ProcessGroup | None = None,
) -> Tensor:
    """Symmetric cross-entropy of matching pairs (Radford et al. 2021, figure 3).

    Args:
        image, text: (B, C), any float dtype, not normalised; row i of one belongs to row i of the other. Every rank
            of the group passes the same B. They are normalised in float32, or in float64 if they are float64.
        logit_scale: (), the factor on cosine similarities, already exponentiated.
        local_loss: each rank scores its own B rows against all W x B, in place of the full matrix on every rank.
        gather_with_grad: gradients flow through the gathered rows of other ranks.
        chunk_size: hold the scores of at most this many rows at once, so that memory grows with W x B and not with
            its square; None holds the full matrix. The chunked loss computes its gradients in the forward pass, while
            each chunk is there; it has no second derivative.
        kernels: let Triton kernels treat the chunks where they run, on NVIDIA GPUs.
        group: process group; None is the default group, or one process where none is initialised.

    Returns:
        (), float32 or float64. The mean over ranks is the loss of the whole batch.

    Raises:
        UsageError: local_loss without gather_with_grad, whose gradient points the wrong way; a chunk_size below 1; a
            backward pass with create_graph=True through a chunked loss.
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
        if chunk_size is None:
            total = _full_sum(image, all_text, scale, labels) + _full_sum(text, all_image, scale, labels)
        elif image.shape == all_image.shape:
            both = functools.partial(_both_directions, kernels=kernels)
            total = _chunked_sum(both, image, text, scale, first, chunk_size)
        else:
            total = _chunked_sum(_one_direction, image, all_text, scale, first, chunk_size)
            total = total + _chunked_sum(_one_direction, text, all_image, scale, first, chunk_size)
        return total / (2 * image.shape[0])


def suggested_chunk(rows: int, columns: int) -> int | None:
    """The `chunk_size` for a rank that scores `rows` embeddings against `columns`; None where all scores are few.

    >>> suggested_chunk(512, 4096), suggested_chunk(65_536, 65_536)
    (None, 2048)

    Either way the float32 scores take at most `SCORES_BYTES` at their peak. rows is B, or W x B without local_loss;
    columns is W x B.
    """
    row_bytes = 4 * columns
    # The backward pass of the full matrix holds four: both directions' softmax and one direction's gradient, twice.
    if 4 * rows * row_bytes <= SCORES_BYTES:
        return None
    chunk = SCORES_BYTES // (2 * row_bytes)
    # Whole tiles of 128 rows leave no part of a matrix unit idle.
    return max(1, chunk - chunk % 128 if chunk > 128 else chunk)


LOSSES: dict[str, Callable[..., Tensor]] = {"clip": clip_loss}


def _world(group: dist.ProcessGroup | None) -> tuple[int, int]:
    if not (dist.is_available() and dist.is_initialized()):
        return 1, 0
    return dist.get_world_size(group), dist.get_rank(group)


def _normalize(x: Tensor) -> Tensor:
    return F.normalize(x.to(torch.promote_types(x.dtype, torch.float32)), dim=-1)


def _full_sum(rows: Tensor, columns: Tensor, scale: Tensor, labels: Tensor) -> Tensor:
    """Sum over rows of -log softmax(scale * rows @ columns.T)[label]; rows (R, C), columns (K, C), labels (R,)."""
    # The scale multiplies the (R, C) rows, not the (R, K) scores: the same product with fewer elementwise passes.
    return F.cross_entropy((rows * scale) @ columns.T, labels, reduction="sum")


# The chunked forms. Up to the one factor that comes from above, the gradient of a cross-entropy is known as soon as
# its scores are: (softmax - 1 at the pair) times the other side. So each chunk of scores leaves its loss and its
# gradients behind in the forward pass and is overwritten by the next; the backward pass multiplies. In products of
# (R, C) x (C, K) size, for both directions, forward and backward:
#   full matrix                          2 + 4 = 6
#   checkpointed chunks                  2 + 2 + 4 = 8
#   _one_direction, once each way        3 + 3 = 6: a row's scores are whole within its chunk
#   _both_directions                     1 + 3 = 4: the two directions score the same pairs. The first pass learns the
#                                        normalisers of rows and columns, the second scores again and uses both
# A rank that scores its own rows alone holds different pairs in its two directions, so it takes the third.

_Wanted = tuple[bool, bool, bool]  # whether rows, columns and scale need a gradient
_Gradients = tuple[Tensor | None, Tensor | None, Tensor | None]
_Form = Callable[[Tensor, Tensor, Tensor, int, int, _Wanted], tuple[Tensor, _Gradients]]


def _chunked_sum(form: _Form, rows: Tensor, columns: Tensor, scale: Tensor, first: int, chunk_size: int) -> Tensor:
    """The sum that `form` makes of rows (R, C) and columns (K, C), where row r belongs to column first + r."""
    chunk_size = min(chunk_size, max(1, rows.shape[0]))
    if not torch.is_grad_enabled():  # inside the function, this could no longer be asked
        return form(rows, columns, scale, first, chunk_size, (False, False, False))[0]
    total: Tensor = _GradientsInForward.apply(form, rows, columns, scale, first, chunk_size)  # type: ignore[no-untyped-call]
    return total


class _GradientsInForward(torch.autograd.Function):
    """A sum whose gradients come with it; backward multiplies them by the gradient from above, in their own dtype."""

    @staticmethod
    def forward(
        ctx: Any, form: _Form, rows: Tensor, columns: Tensor, scale: Tensor, first: int, chunk_size: int
    ) -> Tensor:
        total, gradients = form(rows, columns, scale, first, chunk_size, ctx.needs_input_grad[1:4])
        ctx.save_for_backward(*gradients)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, Tensor | None, Tensor | None, Tensor | None, None, None]:
        # So it is under create_graph=True, where once_differentiable would let the saved gradients pass as constants.
        if torch.is_grad_enabled():
            raise UsageError("the chunked loss has no second derivative", hint="clip_loss(..., chunk_size=None)")
        rows, columns, scale = (None if saved is None else saved * grads[0] for saved in ctx.saved_tensors)
        return None, rows, columns, scale, None, None


def _one_direction(
    rows: Tensor, columns: Tensor, scale: Tensor, first: int, chunk_size: int, wanted: _Wanted
) -> tuple[Tensor, _Gradients]:
    """`_full_sum` and its gradients, with one (chunk_size, K) buffer."""
    buffer = rows.new_empty((chunk_size, columns.shape[0]))
    losses = rows.new_empty(rows.shape[0])
    gradients = _Accumulators(rows, columns, scale, wanted)
    for start in range(0, rows.shape[0], chunk_size):
        part = slice(start, min(start + chunk_size, rows.shape[0]))
        scaled = rows[part] * scale
        scores = torch.mm(scaled, columns.T, out=buffer[: scaled.shape[0]])
        pair = scores[:, first + part.start : first + part.stop].diagonal()
        scores.sub_(scores.amax(dim=1, keepdim=True))
        losses[part] = -pair
        norm = scores.exp_().sum(dim=1)
        losses[part] += norm.log()
        if any(wanted):
            # One is subtracted before any product: a learnt pair's softmax is nearly one, and what is left of it is
            # the gradient. Dividing the (R, C) sides by the norm spares a pass over the (R, K) scores.
            pair.sub_(norm)
            gradients.add(part, scores, scaled, norm[:, None])
    return losses.sum(), gradients.finish()


def _both_directions(
    rows: Tensor, columns: Tensor, scale: Tensor, first: int, chunk_size: int, wanted: _Wanted, *, kernels: bool = True
) -> tuple[Tensor, _Gradients]:
    """The sum of `_full_sum` both ways and its gradients; R = K, first = 0; (chunk_size, K) buffers: one, or two
    without kernels.
    """
    count = rows.shape[0]
    buffer = rows.new_empty((chunk_size, count))
    pair, row_max, row_norm = rows.new_empty((3, count))
    column_max, column_norm = rows.new_full((count,), -torch.inf), rows.new_zeros(count)
    add_normalisers, scores_to_gradient = _passes(rows, kernels)
    parts = [slice(start, min(start + chunk_size, count)) for start in range(0, count, chunk_size)]
    for part in parts:
        scores = torch.mm(rows[part] * scale, columns.T, out=buffer[: part.stop - part.start])
        pair[part] = scores[:, part].diagonal()
        add_normalisers(scores, row_max[part], row_norm[part], column_max, column_norm)
    # Maximum and norm stay apart: added up as a log-sum-exp near 100, they would round to 4e-6 of every softmax.
    total = ((row_max - pair) + row_norm.log() + (column_max - pair) + column_norm.log()).sum()
    gradients = _Accumulators(rows, columns, scale, wanted)
    for part in parts if any(wanted) else ():
        scaled = rows[part] * scale
        scores = torch.mm(scaled, columns.T, out=buffer[: part.stop - part.start])
        scores = scores_to_gradient(scores, row_max[part], row_norm[part], column_max, column_norm, part.start)
        gradients.add(part, scores, scaled, None)
    return total, gradients.finish()


def _passes(rows: Tensor, kernels: bool = True) -> tuple[Callable[..., None], Callable[..., Tensor]]:
    """What to do to a chunk of scores in the two passes: in kernels where they run, else in plain operations."""
    if kernels and rows.is_cuda and rows.dtype == torch.float32 and importlib.util.find_spec("triton"):
        from rwkvclip_cli.train import losses_triton

        return losses_triton.add_normalisers, losses_triton.scores_to_gradient
    return _plain_normalisers, _plain_gradient


def _plain_normalisers(
    scores: Tensor, row_max: Tensor, row_norm: Tensor, column_max: Tensor, column_norm: Tensor
) -> None:
    """`losses_triton.add_normalisers` in plain operations, with a second (r, K) buffer."""
    row_max.copy_(scores.amax(dim=1))
    row_norm.copy_((scores - row_max[:, None]).exp_().sum(dim=1))
    larger = torch.maximum(column_max, scores.amax(dim=0))
    column_norm.mul_((column_max - larger).exp_()).add_(scores.sub_(larger).exp_().sum(dim=0))
    column_max.copy_(larger)


def _plain_gradient(
    scores: Tensor, row_max: Tensor, row_norm: Tensor, column_max: Tensor, column_norm: Tensor, first: int
) -> Tensor:
    """`losses_triton.scores_to_gradient` in plain operations, with a second (r, K) buffer."""
    pairs = slice(first, first + scores.shape[0])
    of_column = (scores - column_max).exp_().div_(column_norm)
    of_column[:, pairs].diagonal().sub_(1)
    scores.sub_(row_max[:, None]).exp_()
    scores[:, pairs].diagonal().sub_(row_norm)
    return of_column.addcdiv_(scores, row_norm[:, None])


class _Accumulators:
    """The gradients of scores = scale * rows @ columns.T, gathered from chunks of the gradient of the scores."""

    def __init__(self, rows: Tensor, columns: Tensor, scale: Tensor, wanted: _Wanted) -> None:
        self._rows, self._columns, self._scale = rows, columns, scale
        self._wanted = wanted
        self._grad_rows = torch.empty_like(rows) if wanted[0] or wanted[2] else None
        self._grad_columns = torch.zeros_like(columns) if wanted[1] else None
        self._grad_scale = torch.zeros_like(scale)

    def add(self, part: slice, grad: Tensor, scaled: Tensor, norm: Tensor | None) -> None:
        """Add rows `part`: grad (r, K), to be divided by norm (r, 1); scaled (r, C) are the rows times the scale."""
        if self._grad_rows is not None:
            own = torch.mm(grad, self._columns, out=self._grad_rows[part])
            if norm is not None:
                own.div_(norm)
            self._grad_scale.add_((own * self._rows[part]).sum())
        if self._grad_columns is not None:
            self._grad_columns.addmm_(grad.T, scaled if norm is None else scaled / norm)

    def finish(self) -> _Gradients:
        """The gradients of rows, columns and scale, None where none is wanted."""
        rows, columns, scale = self._wanted
        grad_rows = self._grad_rows.mul_(self._scale) if rows and self._grad_rows is not None else None
        return grad_rows, self._grad_columns if columns else None, self._grad_scale if scale else None


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
