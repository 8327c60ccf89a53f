"""The loss of many ranks is the loss of one: values and gradients, in float64."""

import math
import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from helpers import free_port
from torch.nn import functional as F

from rwkvclip_cli.console import UsageError
from rwkvclip_cli.train.losses import clip_loss

ROWS = 5
FORMS = [
    {"local_loss": True, "gather_with_grad": True},
    {"local_loss": True, "gather_with_grad": True, "chunk_size": 2},
    {"local_loss": False, "gather_with_grad": True},
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


@pytest.mark.parametrize("chunk_size", [1, 2, 5, 100])
def test_chunks_change_nothing(chunk_size: int) -> None:
    image, text, scale = pairs(1)
    outcomes = []
    for chunk in (None, chunk_size):
        leaves = [x.clone().requires_grad_() for x in (image, text, scale)]
        loss = clip_loss(*leaves, chunk_size=chunk)
        loss.backward()
        outcomes.append([loss.detach(), *(leaf.grad for leaf in leaves)])
    for whole, chunked in zip(*outcomes, strict=True):
        torch.testing.assert_close(chunked, whole, rtol=1e-12, atol=1e-14)


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
