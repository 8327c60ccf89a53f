"""WKV6 as one T x T matrix of scores a head: the fast form without a kernel, on CPUs and any other device.

    >>> y = wkv6_matrix(r, k, v, w, u)

Legend: B batch, T tokens, H heads, N channels of a head, G = B * H; L left and R right tokens of a seam, P its pairs.

The score of tokens s < t is the sum over channels of r_t k_s exp(lw_{s+1} + ... + lw_{t-1}), with lw = -exp(w) <= 0.
Cut the sum of exponents at a border between s and t, and the score is a product of two vectors: r_t times the decay
from the border to t, and k_s times the decay from s to the border; exchange r and k for the score of t's message to s.
So all pairs with a common border make one small matrix product. The borders are those of a binary tree: the two halves
of every block of 2, 4, 8, ... tokens meet at one, and every pair of tokens is parted by exactly one of them. All
exponents are sums of non-positive numbers, so nothing overflows whatever the decays, and no sum cancels.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

# exp(-22026) is 0 in float64 too; an infinite exponent would make NaNs of the zeros that it multiplies.
LARGEST_EXPONENT = 22026.0
# Below some 400 multiplications a product, torch.bmm leaves the fast library for a loop that is ten times slower;
# products with one or two terms always are.
FEW_TERMS = 2


def wkv6_matrix(r: Tensor, k: Tensor, v: Tensor, w: Tensor, u: Tensor) -> Tensor:
    """WKV6 through score matrices; arguments, result and types as `wkv6.wkv6` describes them.

    Memory is (B, H, T, T) for the scores and a few times (B, T, H, N). Gradients are exact; second ones there are none.
    """
    if torch.compiler.is_compiling():
        compiled: Tensor = _compiled_forward(r, k, v, w, u)[0]
        return compiled
    y: Tensor = _Matrix.apply(r, k, v, w, u)  # type: ignore[no-untyped-call]
    return y


def _forward(r: Tensor, k: Tensor, v: Tensor, w: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    """The result (B, T, H, N) and the scores (G, T, T) that the gradients need."""
    rk = _by_head(r, k)
    scores = _scores(rk, _log_decay(w).exp_())
    scores.diagonal(dim1=1, dim2=2).copy_((rk[0] * _bonus(u, r)).mul_(rk[1]).sum(-1))
    return _by_token(torch.bmm(scores, _by_head(v)[0]), r), scores


def _backward(
    r: Tensor, k: Tensor, v: Tensor, w: Tensor, u: Tensor, scores: Tensor, grad_y: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The gradients of r, k, v, w and u, in their shapes and types."""
    # An autocast region round the backward pass must not lower these sums.
    with torch.autocast(r.device.type, enabled=False):
        v_gtn, grad_gtn = _by_head(v, grad_y)
        grad_v = torch.bmm(scores.transpose(1, 2), grad_gtn)
        grad_scores = torch.bmm(grad_gtn, v_gtn.transpose(1, 2))
        log_decay = _log_decay(w)
        grad_r, grad_k, grad_lw, grad_u = _scores_backward(_by_head(r, k), log_decay, _bonus(u, r), grad_scores)
        grad_w = grad_lw.mul_(log_decay)
        return (
            _by_token(grad_r, r),
            _by_token(grad_k, k),
            _by_token(grad_v, v),
            _by_token(grad_w, w),
            grad_u.view(r.shape[0], *u.shape).sum(0).to(u.dtype),
        )


class _Matrix(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, r: Tensor, k: Tensor, v: Tensor, w: Tensor, u: Tensor) -> Tensor:
        y, scores = _forward(r, k, v, w, u)
        ctx.save_for_backward(r, k, v, w, u, scores)
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor, ...]:
        r, k, v, w, u, scores = ctx.saved_tensors
        return _backward(r, k, v, w, u, scores, grad_y)


# torch.compile would unroll the tree into thousands of operations; to it, the whole is one. Plain calls keep away from
# these operators, whose first use loads the compiler.
@torch.library.custom_op("rwkvclip::wkv6_matrix", mutates_args=())
def _compiled_forward(r: Tensor, k: Tensor, v: Tensor, w: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    return _forward(r, k, v, w, u)


@torch.library.custom_op("rwkvclip::wkv6_matrix_backward", mutates_args=())
def _compiled_backward(
    r: Tensor, k: Tensor, v: Tensor, w: Tensor, u: Tensor, scores: Tensor, grad_y: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    return _backward(r, k, v, w, u, scores, grad_y)


@_compiled_forward.register_fake
def _(r: Tensor, k: Tensor, v: Tensor, w: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    batch, length, heads, _ = r.shape
    return r.new_empty(r.shape), r.new_empty((batch * heads, length, length), dtype=_sum_dtype(r))


@_compiled_backward.register_fake
def _(
    r: Tensor, k: Tensor, v: Tensor, w: Tensor, u: Tensor, scores: Tensor, grad_y: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    return r.new_empty(r.shape), k.new_empty(k.shape), v.new_empty(v.shape), w.new_empty(w.shape), u.new_empty(u.shape)


def _keep(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs, output[1])


def _differentiate(ctx: Any, grad_y: Tensor, _: Tensor | None) -> tuple[Tensor, ...]:
    gradients: tuple[Tensor, ...] = _compiled_backward(*ctx.saved_tensors, grad_y)
    return gradients


_compiled_forward.register_autograd(_differentiate, setup_context=_keep)


def _scores(rk: Tensor, decay: Tensor) -> Tensor:
    """The score of every ordered pair of different tokens: (2, G, T, N), (G, T, N) -> (G, T, T), diagonal unset.

    `rk` is r and k. Left tokens' r meets right tokens' k, and the other way round.
    """
    scores = decay.new_empty(decay.shape[0], decay.shape[1], decay.shape[1])
    for seam, to_border, from_border in _decays(decay):
        rk_left, kr_right = _factors(rk, seam, to_border, from_border)
        if seam.left == 1:
            products = (rk_left * kr_right).sum(-1, keepdim=True)
        else:
            products = _matmul(rk_left, kr_right.transpose(-1, -2))
        for corner, product in zip(_corners(scores, seam), products.unbind(0), strict=True):
            corner.copy_(product)
    return scores


def _scores_backward(
    rk: Tensor, log_decay: Tensor, bonus: Tensor, grad_scores: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of r, k and the logarithm of the decay, (G, T, N) each, and of the bonus, (G, N)."""
    r, k = rk.unbind(0)
    grad_diagonal = grad_scores.diagonal(dim1=1, dim2=2).unsqueeze(-1)
    grad_bonus = (grad_diagonal * r).mul_(k).sum(1)
    grad_own = grad_diagonal * bonus
    grad_rk = torch.empty_like(rk)
    torch.mul(grad_own, k, out=grad_rk[0])
    torch.mul(grad_own, r, out=grad_rk[1])
    grad_lw = torch.zeros_like(log_decay)
    for seam, to_border, from_border in _decays(log_decay.exp()):
        rk_left, kr_right = _factors(rk, seam, to_border, from_border)
        grad_products = torch.stack(_corners(grad_scores, seam))
        grad_left = _matmul(grad_products, kr_right)
        grad_right = _matmul(grad_products.transpose(-1, -2), rk_left)
        _left(grad_rk, seam).addcmul_(grad_left, to_border)
        for grad, part in zip(_right(grad_rk, seam).unbind(0), (grad_right[1], grad_right[0]), strict=True):
            grad.addcmul_(part, from_border)
        # A token's decay counts for the tokens of its own side that are further from the border than itself.
        if seam.left > 1:
            further = torch.ones((seam.left, seam.left), dtype=r.dtype, device=r.device).tril_(-1)
            _left(grad_lw, seam).add_(_matmul(further, _dot(grad_left, rk_left)))
        if seam.right > 1:
            further = torch.ones((seam.right, seam.right), dtype=r.dtype, device=r.device).triu_(1)
            _right(grad_lw, seam).add_(_matmul(further, _dot(grad_right, kr_right)))
    return grad_rk[0], grad_rk[1], grad_lw, grad_bonus


class Seam(NamedTuple):
    """`pairs` pairs of neighbouring blocks in a row: `left` tokens, a border, `right` tokens."""

    left: int
    right: int
    start: int
    """First token of the first pair."""
    pairs: int


def seams(length: int) -> list[Seam]:
    """All borders of the binary tree over `length` tokens, small blocks first; the last pair may lack some at its end.

    >>> seams(3)
    [Seam(left=1, right=1, start=0, pairs=1), Seam(left=2, right=1, start=0, pairs=1)]
    """
    found = []
    half = 1
    while half < length:
        pairs, rest = divmod(length, 2 * half)
        if pairs:
            found.append(Seam(half, half, 0, pairs))
        if rest > half:
            found.append(Seam(half, rest - half, pairs * 2 * half, 1))
        half *= 2
    return found


def _decays(decay: Tensor) -> Iterator[tuple[Seam, Tensor, Tensor]]:
    """For each seam the decays strictly between the border and its left, then right tokens: (G, P, L, N), (G, P, R, N).

    They are views of two tables that grow with the blocks; use them before the next step.
    """
    to_end = torch.ones_like(decay)  # from a token, itself excluded, to the end of its block
    from_start = torch.ones_like(decay)  # from the start of its block to a token, itself excluded
    for seam in seams(decay.shape[1]):
        end_left, end_right, start_right = _left(to_end, seam), _right(to_end, seam), _right(from_start, seam)
        yield seam, end_left, start_right
        if seam.left + seam.right < decay.shape[1]:
            whole_left = end_left[:, :, :1] * _left(decay, seam)[:, :, :1]
            whole_right = end_right[:, :, :1] * _right(decay, seam)[:, :, :1]
            start_right.mul_(whole_left)
            end_left.mul_(whole_right)


def _left(x: Tensor, seam: Seam) -> Tensor:
    """A view of the tokens left of a seam's borders: (..., T, N) -> (..., P, L, N)."""
    return _rows(x, seam.start, seam.left, seam)


def _right(x: Tensor, seam: Seam) -> Tensor:
    """A view of the tokens right of a seam's borders: (..., T, N) -> (..., P, R, N)."""
    return _rows(x, seam.start + seam.left, seam.right, seam)


def _rows(x: Tensor, first: int, count: int, seam: Seam) -> Tensor:
    # One step where narrow and unflatten take four: at small sizes the views cost more than the arithmetic.
    *outer, token, channel = x.stride()
    size = (*x.shape[:-2], seam.pairs, count, x.shape[-1])
    stride = (*outer, token * (seam.left + seam.right), token, channel)
    return x.as_strided(size, stride, x.storage_offset() + first * token)


def _corners(scores: Tensor, seam: Seam) -> tuple[Tensor, Tensor]:
    """Views of a seam's scores, (G, P, L, R) each: of what left tokens receive, then of what right ones receive."""
    matrix, row, column = scores.stride()
    size = (scores.shape[0], seam.pairs, seam.left, seam.right)
    pair = (seam.left + seam.right) * (row + column)
    first = scores.storage_offset() + seam.start * (row + column)
    return (
        scores.as_strided(size, (matrix, pair, row, column), first + seam.left * column),
        scores.as_strided(size, (matrix, pair, column, row), first + seam.left * row),
    )


def _factors(rk: Tensor, seam: Seam, to_border: Tensor, from_border: Tensor) -> tuple[Tensor, Tensor]:
    """What a seam's scores are products of: r and k of left tokens, k and r of right ones, decayed to the border."""
    left, right = _left(rk, seam), _right(rk, seam)
    kr_right = right.new_empty(right.shape)
    torch.mul(right[1], from_border, out=kr_right[0])
    torch.mul(right[0], from_border, out=kr_right[1])
    # Two single tokens lie at the border, and nothing between.
    return left if seam.left == 1 else left * to_border, kr_right


def _dot(a: Tensor, b: Tensor) -> Tensor:
    """The sum of a * b over the first axis, which has length 2, without a tensor of products."""
    return (a[0] * b[0]).addcmul_(a[1], b[1])


def _matmul(a: Tensor, b: Tensor) -> Tensor:
    """The matrix product a @ b, term by term where they are few."""
    terms = a.shape[-1]
    if terms > FEW_TERMS:
        outer = b.shape[:-2]
        left = a.expand(b[..., 0, 0].numel(), *a.shape) if a.ndim == 2 else a.flatten(0, -3)
        return torch.bmm(left, b.flatten(0, -3)).view(*outer, a.shape[-2], b.shape[-1])
    total = a[..., :1] * b[..., :1, :]
    for term in range(1, terms):
        total.addcmul_(a[..., term : term + 1], b[..., term : term + 1, :])
    return total


def _by_head(*tensors: Tensor) -> Tensor:
    """(B, T, H, N) each -> one (count, G, T, N) tensor in the type of the sums."""
    batch, length, heads, channels = tensors[0].shape
    out = tensors[0].new_empty((len(tensors), batch, heads, length, channels), dtype=_sum_dtype(tensors[0]))
    for target, tensor in zip(out, tensors, strict=True):
        target.copy_(tensor.transpose(1, 2))
    return out.view(len(tensors), batch * heads, length, channels)


def _by_token(x: Tensor, like: Tensor) -> Tensor:
    """(G, T, N) -> (B, T, H, N), contiguous, in the shape and type of `like`."""
    batch, length, heads, channels = like.shape
    out = like.new_empty(like.shape)
    return out.copy_(x.view(batch, heads, length, channels).transpose(1, 2))


def _log_decay(w: Tensor) -> Tensor:
    """-exp(w), never infinite: (B, T, H, N) -> (G, T, N)."""
    return _by_head(w)[0].exp_().clamp_(max=LARGEST_EXPONENT).neg_()


def _bonus(u: Tensor, like: Tensor) -> Tensor:
    """(H, N) -> (G, 1, N) in the type of the sums."""
    return u.to(_sum_dtype(like)).repeat(like.shape[0], 1).unsqueeze(1)


def _sum_dtype(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)
