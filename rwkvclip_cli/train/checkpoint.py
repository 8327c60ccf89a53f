"""Checkpoints that are whole or not there: written aside, flushed, renamed; read back bit for bit.

    OUTPUT/checkpoints/step-00000200/
      model.safetensors   weights under the reference's parameter names
      optimizer.pt        AdamW's moments and the fp16 scaler
      ranks.pt            every rank's place in the data and its random state
      state.json          step, epoch, samples, sizes and versions, for people and for `resume`

>>> newest(Path("run"))
PosixPath('run/checkpoints/step-00000200')
"""

import json
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from rwkvclip_cli.console import RwkvClipError, UsageError, write_hint
from rwkvclip_cli.documents import parse_json

FORMAT_VERSION = 1
FOLDER = "checkpoints"
MAKING, GOING = ".partial", ".old"  # suffixes of hidden folders that are not whole
NAME = re.compile(r"step-(\d{8,})")
MODEL_FILE, OPTIMIZER_FILE, RANKS_FILE, STATE_FILE = "model.safetensors", "optimizer.pt", "ranks.pt", "state.json"


@dataclass(frozen=True)
class Checkpoint:
    """What a checkpoint holds. `ranks[r]` is what rank r needs to go on, `state` is state.json."""

    model: dict[str, Tensor]
    optimizer: dict[str, Any]
    ranks: list[dict[str, Any]]
    state: dict[str, Any]


def checkpoint_path(output: Path, step: int) -> Path:
    """Where the checkpoint behind `step` steps lies."""
    return output / FOLDER / f"step-{step:08d}"


def list_checkpoints(output: Path) -> list[Path]:
    """The whole checkpoints of a run folder, oldest first. Those in the making have other names."""
    folder = output / FOLDER
    if not folder.is_dir():
        return []
    # A folder without its state is none of ours: what we write is there as a whole.
    named = [(match, path) for path in folder.iterdir() if (match := NAME.fullmatch(path.name))]
    found = [(int(match[1]), path) for match, path in named if (path / STATE_FILE).exists()]
    return [path for _, path in sorted(found)]


def newest(output: Path) -> Path | None:
    """The newest whole checkpoint of a run folder, or None."""
    found = list_checkpoints(output)
    return found[-1] if found else None


def save(path: Path, checkpoint: Checkpoint, *, keep: int) -> None:
    """Write a checkpoint and remove all but this one and the newest others, `keep` in all. One process calls this.

    A reader, and a machine that loses power at any moment, sees the folder whole or not at all.
    """
    folder = path.parent
    aside = folder / f".{path.name}{MAKING}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for stale in folder.iterdir():
            if stale.name.startswith(".") and stale.name.endswith((MAKING, GOING)):
                shutil.rmtree(stale)  # what an earlier run was killed over
        aside.mkdir()
        tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in checkpoint.model.items()}
        save_file(tensors, aside / MODEL_FILE, metadata={"format": "pt"})
        torch.save(checkpoint.optimizer, aside / OPTIMIZER_FILE)
        torch.save(checkpoint.ranks, aside / RANKS_FILE)
        document = {"format_version": FORMAT_VERSION, **checkpoint.state}
        (aside / STATE_FILE).write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
        for file in aside.iterdir():
            _flush(file)
        _flush(aside)
        if path.exists():
            _remove(path)
        aside.rename(path)
        _flush(folder)
    except (OSError, RuntimeError, SafetensorError) as error:
        # torch and safetensors report a full disk each in a class of its own.
        shutil.rmtree(aside, ignore_errors=True)
        raise RwkvClipError(
            f"{path}: the checkpoint could not be written: {str(error).splitlines()[0]}; earlier ones are whole",
            hint=write_hint(error, folder),
        ) from error
    others = [other for other in list_checkpoints(folder.parent) if other != path]
    for old in others[: max(len(others) - keep + 1, 0)]:
        _remove(old)


def set_aside(paths: list[Path]) -> list[Path]:
    """Rename files or folders that a new start leaves behind to NAME.abandoned-N; nobody resumes from them."""
    renamed = []
    for path in paths:
        number = 1
        while (target := path.with_name(f"{path.name}.abandoned-{number}")).exists():
            number += 1
        path.rename(target)
        renamed.append(target)
    return renamed


def _remove(path: Path) -> None:
    """Remove a checkpoint, renamed first, so that no reader finds the folder half empty."""
    going = path.with_name(f".{path.name}{GOING}")
    path.rename(going)
    shutil.rmtree(going, ignore_errors=True)


def load(path: Path) -> Checkpoint:
    """Read a checkpoint folder onto the CPU; nothing in it can run code.

    Raises RwkvClipError naming the file that is missing or damaged, or a format that this version does not know.
    """
    with reading(path):
        state = read_state(path)
        return Checkpoint(
            model=read_weights(path / MODEL_FILE),
            optimizer=_read_pickle(path / OPTIMIZER_FILE),
            ranks=_read_pickle(path / RANKS_FILE),
            state=state,
        )


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Around whatever takes a checkpoint apart: what is not there, or of another kind, is damage, told with a way out.

    Raises RwkvClipError; an earlier checkpoint of the same run is its hint.
    """
    try:
        yield
    except UsageError:
        raise
    except RwkvClipError as error:
        raise RwkvClipError(error.message, _earlier(path) or error.hint) from error
    except (LookupError, TypeError, AttributeError, ValueError, RuntimeError) as error:
        what = f"{type(error).__name__}: {error}".splitlines()[0]
        raise RwkvClipError(f"{path}: damaged, or no checkpoint of rwkvclip ({what})", _earlier(path)) from error


def _earlier(path: Path) -> str:
    """How to resume from the checkpoint before this one, or nothing."""
    before = [other for other in list_checkpoints(path.parent.parent) if other.name < path.name]
    return f"--resume {before[-1]}" if before else ""


def read_state(path: Path) -> dict[str, Any]:
    """Read state.json of a checkpoint folder."""
    file = path / STATE_FILE
    try:
        state = parse_json(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise RwkvClipError(f"{file}: {error.strerror}", hint=f"ls {path}") from error
    except ValueError as error:
        raise RwkvClipError(f"{file}: damaged: {error}") from error
    if not isinstance(state, dict):
        raise RwkvClipError(f"{file}: damaged: a {type(state).__name__} where a table has to be")
    if state.get("format_version") != FORMAT_VERSION:
        raise RwkvClipError(
            f"{file}: format version {state.get('format_version')!r}; this rwkvclip reads {FORMAT_VERSION}"
        )
    result: dict[str, Any] = state
    return result


def read_weights(file: Path) -> dict[str, Tensor]:
    """Read the weights of a .safetensors file, or of a .pt file that holds a state dict alone."""
    if not file.is_file():
        raise RwkvClipError(f"{file}: no such file", hint=f"ls {file.parent}")
    if file.suffix == ".safetensors":
        try:
            return load_file(file)
        except (SafetensorError, OSError) as error:
            raise RwkvClipError(f"{file}: damaged: {error}") from error
    weights = _read_pickle(file)
    if isinstance(weights, dict) and isinstance(weights.get("state_dict"), dict):
        weights = weights["state_dict"]
    if not isinstance(weights, dict) or not all(isinstance(value, Tensor) for value in weights.values()):
        raise RwkvClipError(f"{file}: holds no state dict (a mapping of names to tensors)")
    return weights


def resolve(path: str) -> Path:
    """A user's CHECKPOINT as a checkpoint folder or weights file: a run folder stands for its newest checkpoint."""
    given = Path(path)
    if given.is_file():
        return given
    if (given / MODEL_FILE).is_file():
        return given
    found = newest(given) or newest(given.parent if given.name == FOLDER else given)
    if found is None:
        raise UsageError(f"{path}: no checkpoint there (neither a checkpoint folder, a run folder nor a weights file)")
    return found


def _read_pickle(file: Path) -> Any:
    if not file.is_file():
        raise RwkvClipError(f"{file}: no such file", hint=f"ls {file.parent}")
    try:
        return torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # torch.load raises a dozen classes for damaged files
        # Its own words advise to load what may run code.
        raise RwkvClipError(f"{file}: damaged, or more than plain tensors, which rwkvclip does not load") from error


def _flush(path: Path) -> None:
    """Force a file or folder to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
