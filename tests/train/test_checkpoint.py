"""Checkpoints are whole or not there, and what is damaged is named."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from rwkvclip_cli.console import RwkvClipError, UsageError
from rwkvclip_cli.train import checkpoint
from rwkvclip_cli.train.checkpoint import Checkpoint


def made(value: float = 1.0) -> Checkpoint:
    return Checkpoint(
        model={"weight": torch.full((2,), value), "scalar": torch.tensor(value)},
        optimizer={"adamw": {"state": {0: {"step": torch.tensor(3.0)}}}, "scaler": None},
        ranks=[{"loader": b"\x00\xff", "torch_rng": torch.get_rng_state()}],
        state={"position": {"step": 3}},
    )


def test_what_is_saved_is_what_is_read(tmp_path: Path) -> None:
    path = checkpoint.checkpoint_path(tmp_path, 3)
    checkpoint.save(path, made(0.1), keep=1)
    back = checkpoint.load(path)
    assert torch.equal(back.model["weight"], torch.full((2,), 0.1))
    assert back.model["scalar"].shape == ()
    assert back.ranks[0]["loader"] == b"\x00\xff"
    assert back.optimizer["adamw"]["state"][0]["step"] == 3.0
    assert back.state["position"] == {"step": 3}
    assert [file.name for file in (tmp_path / "checkpoints").iterdir()] == ["step-00000003"]


def test_only_the_newest_are_kept_and_found(tmp_path: Path) -> None:
    for step in (9, 10, 100, 99_999_999, 100_000_000):
        checkpoint.save(checkpoint.checkpoint_path(tmp_path, step), made(), keep=3)
    names = [path.name for path in checkpoint.list_checkpoints(tmp_path)]
    assert names == ["step-00000100", "step-99999999", "step-100000000"]
    assert checkpoint.newest(tmp_path) == tmp_path / "checkpoints" / "step-100000000"


@pytest.mark.parametrize("keep", [1, 2, 5, 9])
def test_as_many_are_kept_as_asked(tmp_path: Path, keep: int) -> None:
    for step in range(1, 7):
        checkpoint.save(checkpoint.checkpoint_path(tmp_path, step), made(), keep=keep)
        assert len(checkpoint.list_checkpoints(tmp_path)) == min(step, keep)


def test_a_checkpoint_in_the_making_is_no_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint.save(checkpoint.checkpoint_path(tmp_path, 1), made(), keep=3)

    class Crash(BaseException):
        pass

    def die(*_: object) -> None:
        raise Crash

    monkeypatch.setattr(checkpoint.torch, "save", die)
    with pytest.raises(Crash):
        checkpoint.save(checkpoint.checkpoint_path(tmp_path, 2), made(), keep=3)
    assert checkpoint.newest(tmp_path) == checkpoint.checkpoint_path(tmp_path, 1)
    monkeypatch.undo()
    checkpoint.save(checkpoint.checkpoint_path(tmp_path, 2), made(2.0), keep=3)
    assert checkpoint.load(checkpoint.checkpoint_path(tmp_path, 2)).model["scalar"] == 2.0


def test_the_checkpoint_just_written_is_never_the_one_to_go(tmp_path: Path) -> None:
    for step in (100, 200, 300, 150, 160):
        checkpoint.save(checkpoint.checkpoint_path(tmp_path, step), made(), keep=2)
    assert [path.name for path in checkpoint.list_checkpoints(tmp_path)] == ["step-00000160", "step-00000300"]


def test_what_a_killed_run_left_is_swept(tmp_path: Path) -> None:
    for name in (".step-00000001.partial", ".step-00000002.old"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    checkpoint.save(checkpoint.checkpoint_path(tmp_path, 3), made(), keep=2)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000003"]


def test_the_same_step_is_replaced_whole(tmp_path: Path) -> None:
    path = checkpoint.checkpoint_path(tmp_path, 3)
    checkpoint.save(path, made(1.0), keep=2)
    checkpoint.save(path, made(2.0), keep=2)
    assert checkpoint.load(path).model["scalar"] == 2.0
    assert [file.name for file in path.parent.iterdir()] == [path.name]


FILLS_UP = """
import resource, sys
from pathlib import Path
import torch
from rwkvclip_cli.train import checkpoint
from rwkvclip_cli.train.checkpoint import Checkpoint

big = {"weight": torch.zeros(int(sys.argv[2]))}
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
path = checkpoint.checkpoint_path(Path(sys.argv[1]), 2)
checkpoint.save(path, Checkpoint(big, {"moments": torch.zeros(int(sys.argv[3]))}, [], {}), keep=3)
"""


@pytest.mark.parametrize(("weights", "moments"), [(100_000, 1), (1, 100_000)], ids=["safetensors", "torch"])
def test_a_full_disk_is_one_clear_error(tmp_path: Path, weights: int, moments: int) -> None:
    """Files that may not grow past 100,000 bytes stand for the disk: each writer fails in its own way."""
    checkpoint.save(checkpoint.checkpoint_path(tmp_path, 1), made(), keep=3)
    command = [sys.executable, "-c", FILLS_UP, str(tmp_path), str(weights), str(moments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=100)
    assert "RwkvClipError: " in done.stderr.splitlines()[-1]
    assert "step-00000002: the checkpoint could not be written: " in done.stderr.splitlines()[-1]
    assert done.stderr.splitlines()[-1].endswith("earlier ones are whole")
    assert [file.name for file in (tmp_path / "checkpoints").iterdir()] == ["step-00000001"]


def test_what_is_set_aside_is_kept_under_another_name(tmp_path: Path) -> None:
    for _ in range(2):
        checkpoint.save(checkpoint.checkpoint_path(tmp_path, 1), made(), keep=3)
        checkpoint.set_aside(checkpoint.list_checkpoints(tmp_path))
    names = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert names == ["step-00000001.abandoned-1", "step-00000001.abandoned-2"]
    assert checkpoint.newest(tmp_path) is None


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.pt", "ranks.pt", "state.json"])
@pytest.mark.parametrize("damage", ["cut", "gone"])
def test_a_damaged_file_is_named(tmp_path: Path, name: str, damage: str) -> None:
    path = checkpoint.checkpoint_path(tmp_path, 3)
    checkpoint.save(path, made(), keep=1)
    file = path / name
    if damage == "gone":
        file.unlink()
    else:
        file.write_bytes(file.read_bytes()[:-9])
    with pytest.raises(RwkvClipError, match=name):
        checkpoint.load(path)


def test_a_format_of_the_future_is_refused(tmp_path: Path) -> None:
    path = checkpoint.checkpoint_path(tmp_path, 3)
    checkpoint.save(path, made(), keep=1)
    (path / "state.json").write_text(json.dumps({"format_version": 2}))
    with pytest.raises(RwkvClipError, match="format version 2; this rwkvclip reads 1"):
        checkpoint.load(path)


def test_a_file_that_would_run_code_is_refused(tmp_path: Path) -> None:
    torch.save({"weight": Path("/")}, tmp_path / "model.pt")
    with pytest.raises(RwkvClipError, match="more than plain tensors"):
        checkpoint.read_weights(tmp_path / "model.pt")
    torch.save([1, 2], tmp_path / "list.pt")
    with pytest.raises(RwkvClipError, match="holds no state dict"):
        checkpoint.read_weights(tmp_path / "list.pt")


def test_what_a_user_may_call_a_checkpoint(tmp_path: Path) -> None:
    path = checkpoint.checkpoint_path(tmp_path, 3)
    checkpoint.save(path, made(), keep=1)
    for given in (tmp_path, tmp_path / "checkpoints", path):
        assert checkpoint.resolve(str(given)) == path
    assert checkpoint.resolve(str(path / "model.safetensors")) == path / "model.safetensors"
    with pytest.raises(UsageError, match="no checkpoint there"):
        checkpoint.resolve(str(tmp_path / "nowhere"))
