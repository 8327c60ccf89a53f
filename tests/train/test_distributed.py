"""DDP as it is set up: its settings, the BatchNorm count, and gradients of many ranks against one process."""

import os
import socket
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from helpers import TINY_MODEL, free_port
from torch import nn

from rwkvclip_cli.console import UnableError, UsageError
from rwkvclip_cli.model import build_model
from rwkvclip_cli.train.distributed import process_group, read_ranks, synchronize_batch_norms, warm_up, wrap
from rwkvclip_cli.train.loop import _drop_path_uniform
from rwkvclip_cli.train.losses import clip_loss

ROWS = 3


@pytest.fixture(autouse=True)
def _no_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("RWKVCLIP_DEVICE", "cpu")


def test_batch_norms_are_synchronized_and_counted() -> None:
    plain = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Sequential(nn.BatchNorm2d(4)), nn.LayerNorm(4))
    model, converted = synchronize_batch_norms(plain)
    assert converted == 2
    assert [type(module) for module in (model[1], model[2][0])] == [nn.SyncBatchNorm] * 2
    assert synchronize_batch_norms(build_model(TINY_MODEL))[1] == 0


def test_the_wrapper_has_the_published_settings() -> None:
    with process_group(timeout_s=60) as ranks:
        wrapped, converted = wrap(nn.Linear(4, 4), ranks)
        assert converted == 0
        assert wrapped.static_graph
        assert wrapped.find_unused_parameters
        assert wrapped.bucket_bytes_cap == 32 * 1024 * 1024
    assert not dist.is_initialized()


def test_warm_up_leaves_no_trace() -> None:
    with process_group(timeout_s=60) as ranks:
        wrapped, _ = wrap(nn.Linear(3, 1), ranks)
        before, weight = torch.get_rng_state(), wrapped.module.weight.clone()
        passes = []

        def forward() -> torch.Tensor:
            passes.append(1)
            return wrapped(torch.rand(2, 3)).sum()

        warm_up(wrapped, forward)
        assert len(passes) == 2
        assert torch.equal(torch.get_rng_state(), before)
        assert torch.equal(wrapped.module.weight, weight)
        assert all(parameter.grad is None for parameter in wrapped.parameters())


@pytest.mark.parametrize(
    ("environment", "error", "message"),
    [
        ({"RANK": "2", "WORLD_SIZE": "2"}, UsageError, "RANK=2 is not below WORLD_SIZE=2"),
        ({"RANK": "first"}, UsageError, "RANK='first' in the environment is not a whole number"),
        ({"LOCAL_WORLD_SIZE": "0"}, UsageError, "LOCAL_RANK=0 is not below LOCAL_WORLD_SIZE=0"),
        ({"RWKVCLIP_DEVICE": "cuda"}, UnableError, "started for a GPU, but torch .* finds none that it can use"),
    ],
)
def test_an_environment_that_cannot_be(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], error: type[Exception], message: str
) -> None:
    if environment.get("RWKVCLIP_DEVICE") == "cuda":
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(error, match=message):
        read_ranks()


def test_stochastic_depth_draws_by_place_in_the_global_batch() -> None:
    def draws(rank: int, world_size: int, step: int, seed: int = 0) -> torch.Tensor:
        batch_size = 12 // world_size
        run = SimpleNamespace(
            config=SimpleNamespace(seed=seed, batch_size=batch_size),
            ranks=SimpleNamespace(rank=rank, device=torch.device("cpu")),
            model_config={"drop_path_rate": 0.1, "image_depth": 2},
            global_batch=12,
        )
        return _drop_path_uniform(run, step)

    whole = draws(0, 1, step=5)
    assert whole.shape == (2, 2, 12)
    for world_size in (2, 3):
        parts = [draws(rank, world_size, step=5) for rank in range(world_size)]
        assert torch.equal(torch.cat(parts, dim=2), whole)
    assert not torch.equal(draws(0, 1, step=6), whole)
    assert not torch.equal(draws(0, 1, step=5, seed=1), whole)
    assert len(set(whole.flatten().tolist())) == whole.numel()


def pairs(world_size: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(world_size)
    count = world_size * ROWS
    images = torch.randn(count, 3, 16, 16, generator=generator, dtype=torch.float64)
    tokens = torch.randint(512, (count, 16), generator=generator)
    return images, tokens, torch.rand(2, 2, count, generator=generator)


def randomised() -> nn.Module:
    """A model in which every path carries something."""
    torch.manual_seed(0)
    model = build_model({**TINY_MODEL, "drop_path_rate": 0.5}).double()
    for parameter in model.parameters():
        if parameter.ndim:
            nn.init.normal_(parameter, std=0.2)
    return model


def gradient_rank(rank: int, world_size: int, port: int, folder: str) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RWKVCLIP_DEVICE="cpu")
    with process_group(timeout_s=60) as ranks:
        wrapped, _ = wrap(randomised(), ranks)
        images, tokens, uniform = pairs(world_size)
        own = slice(rank * ROWS, (rank + 1) * ROWS)

        def forward() -> torch.Tensor:
            return clip_loss(*wrapped(images[own], tokens[own], drop_path_uniform=uniform[:, :, own]))

        warm_up(wrapped, forward)
        forward().backward()
        if rank == 0:
            found = {name: parameter.grad for name, parameter in wrapped.module.named_parameters()}
            torch.save(found, Path(folder) / "gradients.pt")


@pytest.mark.parametrize(("port", "message"), [("x", "MASTER_PORT='x'"), ("99999", "MASTER_PORT=99999 is no port")])
def test_a_port_that_is_none(monkeypatch: pytest.MonkeyPatch, port: str, message: str) -> None:
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", port)
    with pytest.raises(UsageError, match=message), process_group(5):
        pass


def test_a_port_that_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        # A world of one with an address is rank 0, which listens there.
        monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
        monkeypatch.setenv("MASTER_PORT", str(taken.getsockname()[1]))
        with pytest.raises(UnableError, match=r"could not meet the others at 127\.0\.0\.1") as caught, process_group(5):
            pass
    assert "MASTER_PORT" in caught.value.hint


@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_under_ddp_have_every_gradient_of_one_process(world_size: int, tmp_path: Path) -> None:
    mp.spawn(gradient_rank, (world_size, free_port(), str(tmp_path)), nprocs=world_size)
    found = torch.load(tmp_path / "gradients.pt")
    model = randomised()
    images, tokens, uniform = pairs(world_size)
    clip_loss(*model(images, tokens, drop_path_uniform=uniform)).backward()
    expected = dict(model.named_parameters())
    assert found.keys() == expected.keys()
    for name, parameter in expected.items():
        assert parameter.grad.norm() > 0, name
        error = (found[name] - parameter.grad).norm() / parameter.grad.norm()
        assert error < 1e-10, (name, error)
