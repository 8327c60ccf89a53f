"""The loss of many ranks is the loss of one: values and gradients, in float64."""

import math
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from helpers import free_port
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from rwkvclip_cli.console import UsageError
from rwkvclip_cli.train import losses
from rwkvclip_cli.train.losses import SCORES_BYTES, clip_loss, suggested_chunk

ROWS = 5
FORMS = [
    {"local_loss": True, "gather_with_grad": True},
    {"local_loss": True, "gather_with_grad": True, "chunk_size": 2},
    {"local_loss": True, "gather_with_grad": True, "chunk_size": 5},
    {"local_loss": False, "gather_with_grad": True},
    {"local_loss": False, "gather_with_grad": True, "chunk_size": 4},
    {"local_loss": False, "gather_with_grad": False},
    {"local_loss": False, "gather_with_grad": False, "chunk_size": 3},
]


def plain_loss(image: torch.Tensor, text: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    logits = scale * F.normalize(image, dim=-1) @ F.normalize(text, dim=-1).T
    labels = torch.arange(len(image))
    return (F.cross_entropy(logits, labels) + F.cross_entropy(logits.T, labels)) / 2


def pairs(world_size: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(world_size)
    image = torch.randn(world_size * ROWS, 8, generator=generator, dtype=torch.float64)
    text = torch.randn(world_size * ROWS, 8, generator=generator, dtype=torch.float64)
    return image, text, torch.tensor(2.0, dtype=torch.float64)


def weights() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A one-matrix tower for each side, and the logit scale's logarithm."""
    generator = torch.Generator().manual_seed(99)
    left = torch.randn(8, 6, generator=generator, dtype=torch.float64)
    right = torch.randn(8, 6, generator=generator, dtype=torch.float64)
    return left, right, torch.tensor(1.3, dtype=torch.float64)


def single_process(world_size: int) -> list[torch.Tensor]:
    image, text, _ = pairs(world_size)
    parameters = [parameter.requires_grad_() for parameter in weights()]
    loss = plain_loss(image @ parameters[0], text @ parameters[1], parameters[2].exp())
    loss.backward()
    return [loss.detach(), *(parameter.grad for parameter in parameters)]


def rank_main(rank: int, world_size: int, port: int, folder: str) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=world_size)
    image, text, _ = (x for x in pairs(world_size))
    own = slice(rank * ROWS, (rank + 1) * ROWS)
    results = []
    for form in FORMS:
        parameters = [parameter.requires_grad_() for parameter in weights()]
        loss = clip_loss(image[own] @ parameters[0], text[own] @ parameters[1], parameters[2].exp(), **form)
        loss.backward()
        averaged = [loss.detach().clone(), *(parameter.grad for parameter in parameters)]
        for value in averaged:
            dist.all_reduce(value)
            value /= world_size
        results.append(averaged)
    if rank == 0:
        torch.save(results, Path(folder) / "results.pt")
    dist.destroy_process_group()


@pytest.mark.parametrize("world_size", [2, 3])
def test_many_ranks_have_the_gradients_of_one(world_size: int, tmp_path: Path) -> None:
    mp.spawn(rank_main, (world_size, free_port(), str(tmp_path)), nprocs=world_size)
    expected = single_process(world_size)
    for form, found in zip(FORMS, torch.load(tmp_path / "results.pt"), strict=True):
        for name, want, have in zip(("loss", "image", "text", "logit_scale"), expected, found, strict=True):
            torch.testing.assert_close(have, want, rtol=1e-12, atol=1e-14, msg=f"{name} with {form}")


def test_by_hand() -> None:
    # Orthogonal pairs at scale ln 3: each row's scores are (ln 3, 0), so its probability is 3 / 4.
    one = clip_loss(torch.eye(2), torch.eye(2) * 7, torch.tensor(math.log(3.0)))
    assert one.item() == pytest.approx(math.log(4 / 3), rel=1e-6)


class Watch(TorchDispatchMode):
    """Counts the products of matrices, and remembers the largest memory behind any tensor, in bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.products = 0
        self.largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.products += func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm_)
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            self.largest = max(self.largest, result.untyped_storage().nbytes())
        return result


def loss_and_gradients(
    image: torch.Tensor, text: torch.Tensor, scale: torch.Tensor, chunk_size: int | None, upstream: float = 1.0
) -> list[torch.Tensor]:
    leaves = [x.clone().requires_grad_() for x in (image, text, scale)]
    loss = clip_loss(*leaves, chunk_size=chunk_size)
    loss.backward(torch.tensor(upstream, dtype=loss.dtype))
    return [loss.detach(), *(leaf.grad for leaf in leaves)]


@pytest.mark.parametrize("chunk_size", [1, 2, 5, 100])
def test_chunks_change_nothing(chunk_size: int) -> None:
    whole, chunked = (loss_and_gradients(*pairs(1), chunk) for chunk in (None, chunk_size))
    for want, have in zip(whole, chunked, strict=True):
        torch.testing.assert_close(have, want, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("scale", [100.0, 14.0, 1.0, -20.0])
def test_chunks_in_float32(scale: float) -> None:
    generator = torch.Generator().manual_seed(5)
    image = torch.randn(301, 64, generator=generator)
    text = image + 2 * torch.randn(301, 64, generator=generator)
    whole, chunked = (loss_and_gradients(image, text, torch.tensor(scale), chunk) for chunk in (None, 64))
    for want, have in zip(whole, chunked, strict=True):
        assert have.dtype == torch.float32
        assert (have - want).norm() <= 1e-5 * want.norm()


def test_chunks_in_float32_when_all_is_learnt() -> None:
    # Every softmax is one at its pair but for 1e-4 or less, and float32 keeps three or four digits of that.
    generator = torch.Generator().manual_seed(5)
    image = torch.randn(301, 64, generator=generator)
    text = image + torch.randn(301, 64, generator=generator) / 4
    scale = torch.tensor(14.0)
    exact = loss_and_gradients(image.double(), text.double(), scale.double(), None)
    whole, chunked = (loss_and_gradients(image, text, scale, chunk) for chunk in (None, 64))
    for truth, want, have in zip(exact, whole, chunked, strict=True):
        assert (have - truth).norm() <= max(1e-6 * truth.norm(), 1.5 * (want - truth).norm())


def test_chunks_never_hold_all_scores() -> None:
    generator = torch.Generator().manual_seed(6)
    image, text = torch.randn(2, 256, 4, generator=generator).unbind()
    image.requires_grad_()
    text.requires_grad_()
    scale = torch.tensor(3.0, requires_grad=True)
    with Watch() as whole:
        clip_loss(image, text, scale).backward()
    with Watch() as both:
        clip_loss(image, text, scale, chunk_size=8).backward()
    with Watch() as one:
        losses._chunked_sum(losses._one_direction, image, text, scale, 0, 8).backward()
    assert (whole.products, whole.largest) == (6, 256 * 256 * 4)
    assert (both.products, both.largest) == (4 * 32, 8 * 256 * 4)
    assert (one.products, one.largest) == (3 * 32, 8 * 256 * 4)


def test_chunks_without_gradients_compute_none() -> None:
    image, text, scale = pairs(1)
    with torch.no_grad(), Watch() as watch:
        loss = clip_loss(image.requires_grad_(), text.requires_grad_(), scale.requires_grad_(), chunk_size=2)
    assert not loss.requires_grad
    assert watch.products == 3
    assert loss.item() == pytest.approx(plain_loss(image, text, scale).item(), rel=1e-12)
    assert not clip_loss(image.detach(), text.detach(), scale.detach(), chunk_size=2).requires_grad


@pytest.mark.parametrize("form", [losses._one_direction, losses._both_directions])
@pytest.mark.parametrize("trained", [(0,), (1,), (2,), (0, 2)], ids=str)
def test_chunks_spare_what_is_frozen(form: Any, trained: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(7)
    leaves = [*torch.randn(2, 5, 3, generator=generator, dtype=torch.float64).unbind(), pairs(1)[2]]
    for place in trained:
        leaves[place].requires_grad_()
    chosen = [leaves[place] for place in trained]
    found = torch.autograd.grad(losses._chunked_sum(form, *leaves, 0, 2), chosen)
    scores = leaves[2] * leaves[0] @ leaves[1].T
    labels = torch.arange(5)
    loss = F.cross_entropy(scores, labels, reduction="sum")
    if form is losses._both_directions:
        loss = loss + F.cross_entropy(scores.T, labels, reduction="sum")
    for have, want in zip(found, torch.autograd.grad(loss, chosen), strict=True):
        torch.testing.assert_close(have, want, rtol=1e-12, atol=1e-14)


def test_chunks_multiply_by_the_gradient_from_above() -> None:
    image, text, scale = pairs(1)
    plain, scaled = (loss_and_gradients(image, text, scale, 2, upstream) for upstream in (1.0, 65536.0))
    for once, larger in zip(plain[1:], scaled[1:], strict=True):
        assert torch.equal(once * 65536, larger)
    image.requires_grad_()
    loss = clip_loss(image, text, scale, chunk_size=2)
    loss.backward(retain_graph=True)
    loss.backward()
    assert torch.equal(image.grad, 2 * plain[1])


@pytest.mark.parametrize("chunk_size", [None, 2])
@pytest.mark.parametrize(
    ("place", "value"), [(0, math.nan), (0, math.inf), (1, math.nan), (2, math.nan), (2, math.inf)]
)
def test_what_is_not_finite_reaches_every_gradient(place: int, value: float, chunk_size: int | None) -> None:
    inputs = pairs(1)
    inputs[place].view(-1)[0] = value
    loss, *gradients = loss_and_gradients(*inputs, chunk_size)
    assert not loss.isfinite()
    assert not any(gradient.sum().isfinite() for gradient in gradients)
    _, *gradients = loss_and_gradients(*pairs(1), chunk_size, upstream=math.nan)
    assert all(gradient.isnan().all() for gradient in gradients)


def test_a_second_derivative_is_refused() -> None:
    image, text, scale = pairs(1)
    image.requires_grad_()
    with pytest.raises(UsageError, match="no second derivative"):
        torch.autograd.grad(clip_loss(image, text, scale, chunk_size=2), image, create_graph=True)


def test_suggested_chunk() -> None:
    assert suggested_chunk(512, 512) is None
    assert suggested_chunk(8192, 8192) is None  # four matrices of 256 MiB
    assert suggested_chunk(8193, 8192) == 16384
    assert suggested_chunk(8192, 65_536) == 2048
    assert suggested_chunk(65_536, 65_536) == 2048
    assert suggested_chunk(10_000_000, 10_000_000) == 13
    assert suggested_chunk(1, 1 << 40) == 1
    for columns in (20_000, 100_000, 1_000_000):
        chunk = suggested_chunk(columns, columns)
        assert chunk is not None
        assert chunk % 128 == 0
        assert SCORES_BYTES / 2 < 2 * chunk * columns * 4 <= SCORES_BYTES


@pytest.mark.gpu
def test_memory_of_65536_pairs() -> None:
    image, text = torch.randn(2, 65_536, 640, device="cuda").unbind()
    leaves = [image.requires_grad_(), text.requires_grad_(), torch.tensor(14.0, device="cuda", requires_grad=True)]
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    clip_loss(*leaves, chunk_size=suggested_chunk(65_536, 65_536)).backward()
    gradients = sum(leaf.grad.nbytes for leaf in leaves)
    assert torch.cuda.max_memory_allocated() - before - gradients <= 2 << 30


def test_sixteen_bit_inputs_are_scored_in_float32() -> None:
    generator = torch.Generator().manual_seed(3)
    image, text = torch.randn(2, 32, 16, generator=generator).bfloat16().unbind()
    with torch.autocast("cpu", torch.bfloat16):
        loss = clip_loss(image, text, torch.tensor(100.0))
    assert loss.dtype == torch.float32
    exact = plain_loss(image.double(), text.double(), torch.tensor(100.0, dtype=torch.float64))
    assert loss.item() == pytest.approx(exact.item(), rel=1e-5)


def test_the_form_with_a_wrong_direction_is_refused() -> None:
    with pytest.raises(UsageError, match="wrong direction"):
        clip_loss(torch.eye(2), torch.eye(2), torch.tensor(1.0), local_loss=True, gather_with_grad=False)
    with pytest.raises(UsageError, match="at least 1; got 0"):
        clip_loss(torch.eye(2), torch.eye(2), torch.tensor(1.0), chunk_size=0)
