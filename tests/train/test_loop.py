"""Whole runs on CPU ranks: they learn, they resume bit for bit, they stop when asked."""

import json
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing as mp
from helpers import free_port, plain_environment, run_cli, run_ranks, write_model_config, write_packed
from safetensors.torch import load_file
from shard_files import split_set

from rwkvclip_cli.console import RwkvClipError, UsageError
from rwkvclip_cli.train import TrainConfig, checkpoint, loop, train
from rwkvclip_cli.train.precision import autocast, set_matmul_precision

# 50 records, 2 epochs of 6 global batches of 8 (3 ranks: 5 of 9); step 8 lies inside the second epoch.
STEPS = 12
BATCH_SIZES = {1: 8, 2: 4, 3: 3, 4: 2}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("runs")
    write_packed(made / "pairs.rec", 50)
    write_model_config(made / "model.json")
    return made


def options(folder: Path, output: str, world_size: int, *more: str) -> list[str]:
    return [
        "train", "--output", str(folder / output), "--train-data", str(folder / "pairs.rec"),
        "--model-config", str(folder / "model.json"), "--batch-size", str(BATCH_SIZES[world_size]), "--epochs", "2",
        "--precision", "fp32", "--log-every", "1", "--save-every-steps", "4", "--keep", "9", "--workers", "1", *more,
    ]  # fmt: skip


def config(folder: Path, output: str, **changes: Any) -> TrainConfig:
    made = TrainConfig(
        output=str(folder / output), train_data=str(folder / "pairs.rec"), model_config=str(folder / "model.json"),
        batch_size=8, epochs=2, precision="fp32", log_every=1, save_every_steps=4, keep=9, workers=1,
    )  # fmt: skip
    return replace(made, **changes)


def lines(output: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]


def exact_part(output: Path) -> list[tuple[Any, ...]]:
    """What has to be equal bit for bit of two runs' metrics."""
    names = ("step", "samples", "loss", "lr", "grad_norm", "logit_scale", "skipped")
    return [tuple(line[name] for name in names) for line in lines(output)]


def same_weights(one: Path, two: Path) -> bool:
    ends = [checkpoint.newest(path) for path in (one, two)]
    assert ends[0].name == ends[1].name
    left, right = (load_file(end / "model.safetensors") for end in ends)
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def run(world_size: int, arguments: list[str]) -> subprocess.CompletedProcess[str]:
    return run_cli(*arguments) if world_size == 1 else run_ranks(world_size, arguments)


@pytest.mark.parametrize(
    # Three ranks sum in an order that shows whether the buckets are the same; two cannot.
    "world_size",
    [1, 2, 3, pytest.param(4, marks=pytest.mark.slow)],
)
def test_a_run_resumed_inside_an_epoch_equals_the_undisturbed_one(folder: Path, world_size: int) -> None:
    steps = 2 * (50 // (world_size * BATCH_SIZES[world_size]))
    whole, parts = folder / f"whole{world_size}", folder / f"parts{world_size}"
    done = run(world_size, options(folder, whole.name, world_size))
    assert done.returncode == 0, done.stderr
    kept = [path.name for path in checkpoint.list_checkpoints(whole)]
    assert kept == ["step-00000004", "step-00000008", f"step-{steps:08d}"]
    # The run as a crash behind step 8 leaves it: later lines may be in the log, later checkpoints are not.
    shutil.copytree(whole, parts)
    shutil.rmtree(checkpoint.checkpoint_path(parts, steps))
    with (parts / "metrics.jsonl").open("a") as log:
        log.write('{"step": 13, "lo')
    again = run(world_size, options(folder, parts.name, world_size))
    assert again.returncode == 0, again.stderr
    assert f"step-00000008, behind step 8 of {steps}" in again.stderr
    assert exact_part(parts) == exact_part(whole)
    assert [line["step"] for line in lines(parts)] == list(range(1, steps + 1))
    assert same_weights(whole, parts)
    losses = [line["loss"] for line in lines(whole)]
    assert len(set(losses)) == steps


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_run_on_shards_equals_the_one_on_a_single_file_and_resumes_inside_an_epoch(
    folder: Path, world_size: int
) -> None:
    """Shards of 7 records and windows of 48 of 50: batches, ranks and windows end in the middle of shards."""
    out = folder / f"shards{world_size}.rec"
    split_set(folder / "pairs.rec", 7, out)
    whole, parts = folder / f"unsharded{world_size}", folder / f"sharded{world_size}"
    arguments = [options(folder, output.name, world_size) for output in (whole, parts)]
    arguments[1] = [str(out) if argument == str(folder / "pairs.rec") else argument for argument in arguments[1]]
    for each in arguments:
        done = run(world_size, each)
        assert done.returncode == 0, done.stderr
    assert exact_part(parts) == exact_part(whole)
    assert same_weights(whole, parts)
    again = folder / f"again{world_size}"
    shutil.copytree(parts, again)
    shutil.rmtree(checkpoint.checkpoint_path(again, STEPS))
    done = run(world_size, [str(again) if argument == str(parts) else argument for argument in arguments[1]])
    assert done.returncode == 0, done.stderr
    assert f"step-00000008, behind step 8 of {STEPS}" in done.stderr
    assert exact_part(again) == exact_part(whole)
    assert same_weights(whole, again)


def test_a_finished_run_is_left_alone(folder: Path) -> None:
    first = train(config(folder, "finished", epochs=1))
    before = (folder / "finished" / "metrics.jsonl").read_bytes()
    again = train(config(folder, "finished", epochs=1))
    assert (first.step, again.step, again.finished) == (6, 6, True)
    assert (folder / "finished" / "metrics.jsonl").read_bytes() == before


@pytest.mark.parametrize(
    ("file", "damage", "words"),
    [
        ("state.json", lambda state: [], "damaged: a list where a table"),
        ("state.json", lambda state: {**state, "identity": {}}, "damaged, .*no world_size"),
        ("state.json", lambda state: {name: state[name] for name in state if name != "epochs"}, "KeyError: 'epochs'"),
        ("state.json", lambda state: {**state, "position": {"step": -4}}, "damaged.* step 0 of an epoch, -4 in all"),
        ("state.json", lambda state: {**state, "position": {"stop": 4}}, "unexpected keyword argument 'stop'"),
        ("ranks.pt", lambda ranks: [], "IndexError"),
        ("ranks.pt", lambda ranks: [{"loader": None}], "KeyError: 'torch_rng'"),
        ("optimizer.pt", lambda saved: {"adamw": {}}, "KeyError"),
        ("optimizer.pt", lambda saved: other_shapes(saved), "moments have other shapes"),
    ],
)
def test_a_checkpoint_of_another_form_is_damage_with_a_way_out(
    folder: Path, tmp_path: Path, file: str, damage: Callable[[Any], Any], words: str
) -> None:
    if not (folder / "form").exists():
        train(config(folder, "form", epochs=1))
    shutil.copytree(folder / "form", tmp_path / "form")
    broken = checkpoint.newest(tmp_path / "form") / file
    if file == "state.json":
        broken.write_text(json.dumps(damage(json.loads(broken.read_text()))))
    else:
        torch.save(damage(torch.load(broken)), broken)
    with pytest.raises(RwkvClipError, match=words) as caught:
        train(replace(config(folder, "form", epochs=1), output=str(tmp_path / "form")))
    assert str(broken.parent) in caught.value.message
    assert caught.value.hint == f"--resume {checkpoint.checkpoint_path(tmp_path / 'form', 4)}"
    # What is no checkpoint at all is not taken for the newest.
    shutil.rmtree(broken.parent)
    broken.parent.mkdir()
    assert train(replace(config(folder, "form", epochs=1), output=str(tmp_path / "form"))).step == 6


def other_shapes(saved: dict[str, Any]) -> dict[str, Any]:
    saved["adamw"]["state"][0]["exp_avg"] = torch.zeros(3)
    return saved


def test_a_run_that_learns_nothing_any_more_stops(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loss, calls = loop._loss, []

    def broken(*arguments: Any) -> torch.Tensor:
        calls.append(None)
        # Two warm-up passes, then steps 1 to 12: 2 and 4 to 6 have no finite loss.
        return loss(*arguments) * (torch.nan if len(calls) - 2 in (2, 4, 5, 6) else 1)

    monkeypatch.setattr(loop, "_loss", broken)
    with pytest.raises(RwkvClipError, match="the last 3 steps up to 6 had no finite gradients") as caught:
        train(config(folder, "broken", max_skipped=3))
    assert "--max-skipped" in caught.value.hint
    assert [line["skipped"] for line in lines(folder / "broken")] == [0, 1, 1, 2, 3]


@pytest.mark.parametrize("precision", ["bf16", "fp16", "fp32", "tf32"])
def test_each_precision_learns_with_float32_weights(folder: Path, precision: str) -> None:
    output = f"precision-{precision}"
    done = train(config(folder, output, precision=precision, epochs=8, lr=3e-3, save_every_steps=None))
    assert done.finished
    losses = [line["loss"] for line in lines(folder / output)]
    assert sum(losses[-6:]) / 6 < sum(losses[:6]) / 6 - 0.1
    saved = checkpoint.load(checkpoint.newest(folder / output))
    assert {tensor.dtype for tensor in saved.model.values()} == {torch.float32}
    assert (saved.optimizer["scaler"] is not None) == (precision == "fp16")


@pytest.mark.parametrize(
    ("precision", "product", "allowed"),
    [
        ("bf16", torch.bfloat16, "highest"),
        ("fp16", torch.float16, "highest"),
        ("fp32", torch.float32, "highest"),
        ("tf32", torch.float32, "high"),
    ],
)
def test_each_precision_does_what_it_says(precision: str, product: torch.dtype, allowed: str) -> None:
    set_matmul_precision(precision)
    with autocast(precision, torch.device("cpu")):
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == product
    assert torch.get_float32_matmul_precision() == allowed
    assert torch.backends.cudnn.allow_tf32 == (precision == "tf32")
    set_matmul_precision("fp32")


def test_the_log_says_what_people_look_for(folder: Path) -> None:
    train(config(folder, "log", epochs=1, log_every=4))
    found = lines(folder / "log")
    assert [line["step"] for line in found] == [4, 6]
    assert list(found[0]) == [
        "step", "samples", "loss", "lr", "grad_norm", "logit_scale", "images_per_s", "images_per_s_per_gpu",
        "data_wait_fraction", "mfu", "peak_memory_gib", "skipped", "seconds",
    ]  # fmt: skip
    assert found[0]["samples"] == 32
    assert found[0]["mfu"] is None
    assert found[0]["images_per_s"] == found[0]["images_per_s_per_gpu"] > 0
    assert 0 <= found[0]["data_wait_fraction"] <= 1
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = EventAccumulator(str(folder / "log" / "tensorboard"))
    board.Reload()
    assert [event.value for event in board.Scalars("loss")] == pytest.approx([line["loss"] for line in found])


def test_another_seed_is_another_run(folder: Path) -> None:
    for seed in (1, 2):
        train(config(folder, f"seed{seed}", epochs=1, seed=seed))
    assert exact_part(folder / "seed1") != exact_part(folder / "seed2")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seed": 1}, "of a run with seed 0; this one has 1"),
        ({"batch_size": 4}, "of a run with batch-size 8; this one has 4"),
        ({"drop_path_rate": 0.5}, "of a run with model-config drop-path-rate 0.1; this one has 0.5"),
        ({"resume": "/nowhere"}, "/nowhere: no checkpoint there"),
    ],
)
def test_a_checkpoint_of_another_run_is_refused(folder: Path, changes: dict[str, Any], message: str) -> None:
    train(config(folder, "other", epochs=1))
    with pytest.raises(UsageError, match=message):
        train(config(folder, "other", epochs=1, **changes))


def test_mistakes_end_in_one_line(folder: Path) -> None:
    missing = run_cli("train", "--train-data", folder / "pairs.rec")
    assert missing.returncode == 2
    assert missing.stderr == (
        "rwkvclip: --output is missing: Folder for checkpoints, metrics and curves.\n  try: --output PATH\n"
    )
    absent = run_cli("train", "--output", folder / "absent", "--train-data", folder / "nothing.rec")
    assert absent.returncode == 2
    assert absent.stderr.endswith(f"try: rwkvclip pack SOURCE... {folder / 'nothing.rec'}\n")
    assert "Traceback" not in absent.stderr


def test_a_new_start_leaves_the_earlier_run_under_another_name(folder: Path) -> None:
    train(config(folder, "anew", epochs=1))
    first = exact_part(folder / "anew")
    train(config(folder, "anew", epochs=1, resume="none", seed=5))
    assert exact_part(folder / "anew") != first
    train(config(folder, "anew", epochs=1, resume="none"))
    assert exact_part(folder / "anew") == first
    kept = sorted(path.name for path in (folder / "anew").iterdir())
    assert kept == [
        "checkpoints", "metrics.jsonl", "metrics.jsonl.abandoned-1", "metrics.jsonl.abandoned-2", "tensorboard",
    ]  # fmt: skip


def test_going_back_to_an_earlier_checkpoint_leaves_the_later_ones_behind(folder: Path) -> None:
    train(config(folder, "back", save_every_steps=2))
    before = exact_part(folder / "back")
    early = checkpoint.checkpoint_path(folder / "back", 4)
    done = train(config(folder, "back", save_every_steps=2, keep=1, resume=str(early)))
    assert done.checkpoint == checkpoint.newest(folder / "back")
    assert exact_part(folder / "back") == before
    names = sorted(path.name for path in early.parent.iterdir())
    assert names == [f"step-{step:08d}.abandoned-1" for step in (6, 8, 10)] + [
        "step-00000012", "step-00000012.abandoned-1",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ctx_len": 8}, "captions of 16 tokens; the model's ctx_len is 8"),
        ({"dropout": 0.1}, "training with dropout 0.1 is not supported"),
    ],
)
def test_a_model_that_does_not_fit_the_data_is_refused(folder: Path, changes: dict[str, Any], message: str) -> None:
    unfit = write_model_config(folder / "unfit.json", **changes)
    with pytest.raises(UsageError, match=message):
        train(config(folder, "unfit", model_config=str(unfit)))


def test_a_vocabulary_smaller_than_the_tokenizers_is_refused(folder: Path) -> None:
    rec = write_packed(folder / "tokenized.rec", 20)
    manifest = json.loads(rec.with_suffix(".manifest.json").read_text())
    rec.with_suffix(".manifest.json").write_text(json.dumps({**manifest, "tokenizer": {"name": "openai-clip-bpe"}}))
    with pytest.raises(UsageError, match="token ids up to 49407; the model's vocab_size is 512"):
        train(config(folder, "vocabulary", train_data=str(rec)))


LONG = ("--epochs", "25", "--save-every-steps", "1000")


@pytest.fixture(scope="module")
def undisturbed(folder: Path) -> Path:
    """A run of two ranks and 150 steps, more than pass before a signal arrives."""
    done = run_ranks(2, options(folder, "undisturbed", 2, *LONG))
    assert done.returncode == 0, done.stderr
    return folder / "undisturbed"


def wait_for_steps(output: Path, process: subprocess.Popen[str]) -> None:
    log = output / "metrics.jsonl"
    deadline = time.monotonic() + 120
    while not (log.is_file() and log.read_text().count("\n") >= 2):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.02)


def stopped_at(output: Path) -> int:
    return int(checkpoint.read_state(checkpoint.newest(output))["position"]["step"])


def test_a_stop_signal_to_one_rank_saves_on_all_and_the_run_goes_on(folder: Path, undisturbed: Path) -> None:
    """SIGTERM reaches rank 1 alone; both ranks save the same step and leave with 75; resumed, the run ends as ever."""
    port = free_port()
    arguments = options(folder, "stopped", 2, *LONG)
    ranks = []
    for rank in range(2):
        place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "MASTER_PORT": str(port)}
        environment = plain_environment({**place, "MASTER_ADDR": "127.0.0.1", "RWKVCLIP_DEVICE": "cpu"})
        command = [sys.executable, "-m", "rwkvclip_cli", *arguments]
        ranks.append(subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True))
    wait_for_steps(folder / "stopped", ranks[0])
    ranks[1].send_signal(signal.SIGTERM)
    output = [rank.communicate(timeout=120) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [75, 75], output
    assert "stopped on request behind step" in output[0][1]
    assert stopped_at(folder / "stopped") == lines(folder / "stopped")[-1]["step"] < 150
    assert run_ranks(2, arguments).returncode == 0
    assert exact_part(folder / "stopped") == exact_part(undisturbed)
    assert same_weights(folder / "stopped", undisturbed)


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGUSR1, marks=pytest.mark.slow)])
def test_launch_passes_a_stop_on_and_ends_with_75(folder: Path, number: signal.Signals) -> None:
    output = folder / f"launched-{number.name}"
    command = [sys.executable, "-m", "rwkvclip_cli", "launch", "--cpus", "2", "--"]
    command += options(folder, output.name, 2, *LONG)[1:]
    process = subprocess.Popen(command, env=plain_environment(None), stderr=subprocess.PIPE, text=True)
    wait_for_steps(output, process)
    process.send_signal(number)
    _, said = process.communicate(timeout=120)
    assert process.returncode == 75, said
    assert said.count("stopped on request behind step") == 1
    assert stopped_at(output) == lines(output)[-1]["step"] < 150


def spawned(rank: int, world_size: int, port: int, folder: str) -> None:
    import os

    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size), MASTER_PORT=str(port))
    os.environ.update(MASTER_ADDR="127.0.0.1", RWKVCLIP_DEVICE="cpu")
    train(config(Path(folder), "spawned", batch_size=4, epochs=1))


def test_spawned_ranks_train_like_torchruns(folder: Path) -> None:
    mp.spawn(spawned, (2, free_port(), str(folder)), nprocs=2)
    reference = folder / "torchrun"
    done = run_ranks(2, options(folder, "torchrun", 2, "--epochs", "1"))
    assert done.returncode == 0, done.stderr
    assert exact_part(folder / "spawned") == exact_part(reference)


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["bf16", "fp16", "fp32", "tf32"])
def test_each_precision_learns_on_a_gpu(folder: Path, precision: str) -> None:
    output = f"gpu-{precision}"
    done = train(config(folder, output, precision=precision, epochs=8, lr=3e-3, save_every_steps=None))
    assert done.finished
    losses = [line["loss"] for line in lines(folder / output)]
    assert sum(losses[-6:]) / 6 < sum(losses[:6]) / 6 - 0.1


@pytest.mark.gpu
def test_a_deterministic_gpu_run_resumes_bit_for_bit(folder: Path) -> None:
    whole, parts = folder / "gpu-whole", folder / "gpu-parts"
    arguments = [*options(folder, whole.name, 1), "--deterministic", "--precision", "bf16"]
    done = run_cli(*arguments)
    assert done.returncode == 0, done.stderr
    shutil.copytree(whole, parts)
    shutil.rmtree(checkpoint.checkpoint_path(parts, STEPS))
    again = run_cli(*[*options(folder, parts.name, 1), "--deterministic", "--precision", "bf16"])
    assert again.returncode == 0, again.stderr
    assert exact_part(parts) == exact_part(whole)
    assert same_weights(whole, parts)
    launched = folder / "gpu-launched"
    done = run_cli(*options(folder, launched.name, 1), "--deterministic", "--precision", "bf16", "--no-cuda-graph")
    assert done.returncode == 0, done.stderr
    assert exact_part(launched) == exact_part(whole)
    assert same_weights(whole, launched)


def test_recomputed_blocks_are_the_same_run(folder: Path) -> None:
    train(config(folder, "kept", precision="bf16"))
    shutil.copytree(folder / "kept", folder / "recomputed")
    shutil.rmtree(checkpoint.checkpoint_path(folder / "recomputed", STEPS))
    # It goes on behind step 8, where blocks were kept.
    done = train(config(folder, "recomputed", precision="bf16", grad_checkpointing=True))
    assert done.step == STEPS
    assert exact_part(folder / "recomputed") == exact_part(folder / "kept")
    assert same_weights(folder / "kept", folder / "recomputed")


def test_blocks_are_recomputed_where_asked(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from rwkvclip_cli.model import towers

    calls = []
    inner = towers.checkpoint
    monkeypatch.setattr(towers, "checkpoint", lambda *given, **named: calls.append(1) or inner(*given, **named))
    train(config(folder, "counted-kept", epochs=1))
    assert not calls
    train(config(folder, "counted-recomputed", epochs=1, grad_checkpointing=True))
    assert len(calls) == (2 + 6) * (2 + 2)  # warm-up passes and steps, layers of both towers


def test_a_cpu_rank_cannot_compile_and_says_nothing_of_kernels(folder: Path) -> None:
    done = run_cli(*options(folder, "compiled", 1, "--compile"), env={"RWKVCLIP_DEVICE": "cpu"})
    assert done.returncode == 3
    assert "--compile: the fused kernels need an NVIDIA GPU" in done.stderr
    assert "try: --no-compile" in done.stderr
    done = run_cli(*options(folder, "compiled", 1, "--no-compile", "--epochs", "1"), env={"RWKVCLIP_DEVICE": "cpu"})
    assert done.returncode == 0
    assert "kernels" not in done.stderr


def test_the_loss_is_chunked_where_all_scores_are_many(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from rwkvclip_cli.train import loop, losses

    chunks: list[Any] = []
    inner = losses.LOSSES["clip"]

    def watched(*inputs: Any, chunk_size: int | None, kernels: bool) -> Any:
        chunks.append((chunk_size, kernels))
        return inner(*inputs, chunk_size=chunk_size, kernels=kernels)

    monkeypatch.setitem(losses.LOSSES, "clip", watched)
    train(config(folder, "whole-scores", epochs=1))
    assert set(chunks) == {(None, False)}
    chunks.clear()
    sizes: list[tuple[int, int]] = []
    monkeypatch.setattr(loop, "suggested_chunk", lambda rows, columns: sizes.append((rows, columns)) or 3)
    train(config(folder, "chunked-scores", epochs=1))
    assert set(chunks) == {(3, False)}
    assert set(sizes) == {(8, 8)}
    one, other = ([line["loss"] for line in lines(folder / name)] for name in ("whole-scores", "chunked-scores"))
    assert one == pytest.approx(other, rel=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("switch", ["--compile", "--no-compile"])
def test_a_gpu_run_says_what_it_compiled(folder: Path, tmp_path: Path, switch: str) -> None:
    for attempt in ("first", "second"):
        arguments = options(folder, f"gpu{switch}-{attempt}", 1, switch, "--precision", "bf16")
        done = run_cli(*arguments, env={"TRITON_CACHE_DIR": str(tmp_path)})
        assert done.returncode == 0, done.stderr
        (line,) = (line for line in done.stderr.splitlines() if "kernels compiled" in line)
        counts = re.match(
            r"(\d+) kernels compiled, (\d+) read from disk; warm-up [\d.]+ s, first step done after", line
        )
        assert counts
        compiled, read = map(int, counts.groups())
        if switch == "--no-compile":
            assert (compiled, read) == (0, 0)
        else:
            assert compiled > 0 if attempt == "first" else (compiled == 0 and read > 0)
        assert "after the warm-up" not in done.stderr
