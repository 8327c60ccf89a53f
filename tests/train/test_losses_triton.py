"""The kernels of the chunked loss are its plain operations: interpreted here, and compiled where there is a GPU."""

import math

import pytest
import torch

pytest.importorskip("triton", reason="the kernels are Triton's")

from rwkvclip_cli.train import losses, losses_triton
from rwkvclip_cli.train.losses import clip_loss

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
Statistics = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def empty_statistics(rows: int, columns: int) -> Statistics:
    """Maximum and norm of rows, filled with NaN to show what nobody writes, then of columns, as they start."""
    of_rows = torch.full((2, rows), math.nan, device=DEVICE)
    return *of_rows, torch.full((columns,), -math.inf, device=DEVICE), torch.zeros(columns, device=DEVICE)


def of_chunk(statistics: Statistics, part: slice) -> Statistics:
    row_max, row_norm, column_max, column_norm = statistics
    return row_max[part], row_norm[part], column_max, column_norm


# Odd sizes; more columns than one program takes along a row (4096), and than one piece of the gradient (1024).
@pytest.mark.parametrize(("rows", "columns", "chunk"), [(1, 1, 1), (65, 65, 64), (70, 70, 33), (5, 4099, 3)])
@pytest.mark.parametrize("scale", [100.0, 1.0])
def test_kernels_are_the_plain_passes(rows: int, columns: int, chunk: int, scale: float) -> None:
    generator = torch.Generator().manual_seed(columns)
    scores = scale * (2 * torch.rand(rows, columns, generator=generator) - 1)
    scores.diagonal().add_(scale / 2)
    scores = scores.to(DEVICE)
    plain, kernels = empty_statistics(rows, columns), empty_statistics(rows, columns)
    parts = [slice(first, min(first + chunk, rows)) for first in range(0, rows, chunk)]
    for part in parts:
        losses._plain_normalisers(scores[part].clone(), *of_chunk(plain, part))
        losses_triton.add_normalisers(scores[part].clone(), *of_chunk(kernels, part))
    for want, have in zip(plain, kernels, strict=True):
        torch.testing.assert_close(have, want, rtol=2e-6, atol=0)
    for part in parts:
        want = losses._plain_gradient(scores[part].clone(), *of_chunk(plain, part), part.start)
        have = losses_triton.scores_to_gradient(scores[part].clone(), *of_chunk(plain, part), part.start)
        torch.testing.assert_close(have, want, rtol=2e-5, atol=1e-7)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_kernels_pass_on_what_is_not_finite(value: float) -> None:
    scores = torch.zeros(3, 5, device=DEVICE)
    scores[1, 2] = value
    statistics = empty_statistics(3, 5)
    losses_triton.add_normalisers(scores, *of_chunk(statistics, slice(0, 3)))
    _, row_norm, _, column_norm = statistics
    assert row_norm[:3].isnan().tolist() == [False, True, False]
    assert column_norm.isnan().tolist() == [False, False, True, False, False]
    gradient = losses_triton.scores_to_gradient(scores, *of_chunk(statistics, slice(0, 3)), 0)
    assert gradient[1].isnan().all()
    assert gradient[:, 2].isnan().all()


@pytest.mark.parametrize("chunk_size", [7, 40])
def test_the_loss_with_kernels_is_the_loss_without(chunk_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = losses_triton.add_normalisers, losses_triton.scores_to_gradient
    monkeypatch.setattr(losses, "_passes", lambda rows, allowed: kernels)
    generator = torch.Generator().manual_seed(8)
    image = torch.randn(40, 16, generator=generator)
    text = image + 2 * torch.randn(40, 16, generator=generator)
    outcomes = []
    for chunk in (None, chunk_size):
        leaves = [x.to(DEVICE, copy=True).requires_grad_() for x in (image, text, torch.tensor(20.0))]
        loss = clip_loss(*leaves, chunk_size=chunk)
        outcomes.append([loss.detach(), *torch.autograd.grad(loss, leaves)])
    for want, have in zip(*outcomes, strict=True):
        assert (have - want).norm() <= 1e-5 * want.norm()


@pytest.mark.gpu
def test_kernels_are_taken_on_a_gpu_for_float32_alone() -> None:
    assert losses._passes(torch.empty(1, device="cuda"))[0] is losses_triton.add_normalisers
    assert losses._passes(torch.empty(1, device="cuda"), False)[0] is losses._plain_normalisers
    assert losses._passes(torch.empty(1, device="cuda", dtype=torch.float64))[0] is losses._plain_normalisers
    assert losses._passes(torch.empty(1))[0] is losses._plain_normalisers
