"""The main job from end to end on data that the package draws itself: pack, nccl-check, launch, eval.

    $ rwkvclip demo

Each step is the real command, shown as typed and run in a process of its own. Training sees drawn scenes with captions;
the evaluation asks for scenes that no training image showed.
"""

import functools
import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rwkvclip_cli import console
from rwkvclip_cli.console import RwkvClipError, UsageError
from rwkvclip_cli.demo.scenes import write_scenes
from rwkvclip_cli.launch.gpus import count_visible_gpus
from rwkvclip_cli.launch.lifeline import tie_to

STDERR = 2  # the descriptor
# A broken step trains to chance and still ends well; a working one leaves this far behind.
LEAST_TIMES_CHANCE = 20.0


@dataclass(frozen=True)
class Recipe:
    """What the demo trains on and for how long. `global_batch` is shared out among the ranks."""

    train_scenes: int = 6144
    held_out_scenes: int = 512
    global_batch: int = 128
    epochs: int = 5
    lr: float = 5e-3
    cpu_ranks: int = 2
    seed: int = 0


CONTEXT_LENGTH = 24  # tokens; the longest caption of a scene just fits
# The published models' arguments at a size that two cores train in about a minute.
MODEL: dict[str, Any] = {
    "input_size": 64,
    "image_depth": 3,
    "image_embed_dims": 64,
    "image_patch_size": 16,
    "image_hidden_rate": 3,
    "image_num_heads": 2,
    "image_output_cls_token": False,
    "image_with_cls_token": False,
    "drop_path_rate": 0.0,
    "ctx_len": CONTEXT_LENGTH,
    "vocab_size": 49408,
    "n_layer": 2,
    "n_embd": 64,
    "dim_att": 64,
    "dim_ffn": 0,
    "head_size": 32,
    "text_num_head": 0,
    "head_size_divisor": 8,
    "dropout": 0.0,
    "text_initialization": True,
    "precision": "fp32",
    "with_cp": False,
    "data_type": "utf-8",
    "workers": 0,
    "pos_emb": 0,
    "head_qk": 0,
    "tiny_att_dim": 0,
    "tiny_att_layer": -999,
}


def run_demo(folder: Path, keep: bool, recipe: Recipe | None = None) -> dict[str, Any]:
    """Draw scenes, pack them, check the ranks' collectives, train and evaluate, all in `folder`; print the recall.

    Args:
        folder: where everything goes; new or empty.
        keep: leave it there, otherwise it is removed at the end, however that comes.
        recipe: sizes other than the demo's own.

    Returns:
        The document of `eval --json`.

    Raises:
        UsageError: the folder holds something.
        RwkvClipError: a command failed (with its exit code), or recall@1 stayed below 20 times chance.
    """
    recipe = recipe or Recipe()
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UsageError(
            f"{folder} is there already and not an empty folder; the demo needs one of its own",
            hint=f"rwkvclip demo {shlex.quote(str(folder) + '-2')}",
        )
    started_s = time.monotonic()
    try:
        with console.writing(folder, folder.parent):
            folder.mkdir(parents=True, exist_ok=True)
            _prepare(folder, recipe)
        console.say("", f"$ cd {shlex.quote(str(folder))}")
        for arguments in commands(recipe, count_visible_gpus()):
            output = _run(arguments, folder, keep)
        found: dict[str, Any] = json.loads(output)
    finally:
        if not keep:
            shutil.rmtree(folder, ignore_errors=True)
    console.result(summary(found))
    console.say(f"demo: {time.monotonic() - started_s:.0f} s" + (f", everything is in {folder}" if keep else ""))
    _judge(found)
    return found


def commands(recipe: Recipe, gpus: int) -> list[list[str]]:
    """The arguments of the demo's commands, in order, for a machine with `gpus` GPUs; run in the demo's folder."""
    ranks = gpus or recipe.cpu_ranks
    where = ["--gpus", str(gpus)] if gpus else ["--cpus", str(ranks)]
    train = {
        "output": "run",
        "train-data": "train.rec",
        "model-config": "model.json",
        "batch-size": max(recipe.global_batch // ranks, 1),
        "epochs": recipe.epochs,
        "lr": recipe.lr,
        "precision": "bf16" if gpus else "fp32",
        "seed": recipe.seed,
    }
    context = ["--context-length", str(CONTEXT_LENGTH)]
    return [
        ["pack", "scenes/train", "train.rec", *context],
        ["pack", "scenes/held-out", "held-out.rec", *context],
        ["nccl-check", *([] if gpus else ["--backend", "gloo"]), *where],
        ["launch", *where, "--", *(word for name, value in train.items() for word in (f"--{name}", str(value)))],
        ["eval", "run", "--data", "held-out.rec", "--json"],
    ]


def summary(found: dict[str, Any]) -> str:
    """What `eval` prints, from its JSON document, and how far that is from guessing."""
    from rwkvclip_cli.train.evaluate import Retrieval, table  # torch, which only the steps' own processes needed so far

    times = " and ".join(f"{value:.0f}" for value in times_chance(found).values())
    return (
        f"{table(Retrieval.read(found))}\n"
        f"recall@1 is {times} times chance, which is 1 in {found['count']:,}; no scene of these pairs was in training"
    )


def times_chance(found: dict[str, Any]) -> dict[str, float]:
    """Recall@1 by direction, in multiples of what guessing gets: one in all."""
    return {direction: found[direction]["recall@1"] * found["count"] for direction in found["chance"]}


def _prepare(folder: Path, recipe: Recipe) -> None:
    """Write the scenes of both parts and the model's arguments."""
    for name, count, held_out in (
        ("train", recipe.train_scenes, False),
        ("held-out", recipe.held_out_scenes, True),
    ):
        console.say(f"drawing {count:,} scenes, each with three captions, into {folder / 'scenes' / name}")
        write_scenes(folder / "scenes" / name, count, seed=recipe.seed, held_out=held_out)
    (folder / "model.json").write_text(json.dumps(MODEL, indent=2) + "\n", encoding="utf-8")


def _run(arguments: list[str], folder: Path, keep: bool) -> str:
    """Run one command in `folder`, its words on stderr; with --json return what it prints instead.

    In the folder no settings file of the user's changes what the command means.
    """
    line = shlex.join(["rwkvclip", *arguments])
    console.say("", f"$ {line}")
    is_data = "--json" in arguments
    # By descriptor, not sys.stderr: the command's progress bar then sees the terminal.
    done = subprocess.run(
        [sys.executable, "-m", "rwkvclip_cli", *arguments],
        cwd=folder,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE if is_data else STDERR,
        text=True,
        preexec_fn=functools.partial(tie_to, os.getpid()),
    )
    if done.returncode:
        code = done.returncode if done.returncode > 0 else console.EXIT_SIGNAL - done.returncode
        again = f"cd {shlex.quote(str(folder))} && {line}" if keep else "rwkvclip demo FOLDER   (keeps what it made)"
        raise RwkvClipError(f"the demo's {arguments[0]} ended with exit code {code}", again, exit_code=code)
    return done.stdout or ""


def _judge(found: dict[str, Any]) -> None:
    for direction, times in times_chance(found).items():
        if times < LEAST_TIMES_CHANCE:
            raise RwkvClipError(
                f"the demo's model learnt too little: recall@1 {direction.replace('_', ' ')} is {times:.1f} times "
                f"chance, where it should be {LEAST_TIMES_CHANCE:.0f} at least",
                hint="rwkvclip demo FOLDER   (keeps the run; FOLDER/run/metrics.jsonl shows the loss of each step)",
            )
