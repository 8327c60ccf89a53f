"""Checkpoints are whole or not there, and what is damaged is named."""

import json
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


def test_a_full_disk_is_one_clear_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint.torch, "save", full)
    with pytest.raises(RwkvClipError, match=r"could not be written: No space left.*earlier ones are whole"):
        checkpoint.save(checkpoint.checkpoint_path(tmp_path, 2), made(), keep=3)
    assert list((tmp_path / "checkpoints").iterdir()) == []


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
    with pytest.raises(RwkvClipError, match="not a plain tensor file"):
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
