"""`rwkvclip bench` on a CPU: real figures of every part, on its own data and on the user's, and what it refuses."""

import json
from pathlib import Path

import pytest
from helpers import run_cli, write_model_config, write_packed
from shard_files import split_set

from rwkvclip_cli.bench import bench
from rwkvclip_cli.bench.run import repeat
from rwkvclip_cli.config import BenchConfig
from rwkvclip_cli.console import UnableError, UsageError
from rwkvclip_cli.data.packed import open_packed
from rwkvclip_cli.data.recordio import RecordReader

ON_CPU = {"RWKVCLIP_DEVICE": "cpu"}


def test_every_part_of_tiny_is_measured_on_drawn_scenes() -> None:
    done = run_cli("bench", "--model", "tiny", "--batch-size", "8", "--steps", "2", "--json", env=ON_CPU)
    assert done.returncode == 0, done.stderr
    assert "256 scenes drawn for it" in done.stderr
    found = json.loads(done.stdout)
    assert (found["model"], found["batch_size"], found["precision"]) == ("tiny", 8, "fp32")
    assert found["kernels"] is False
    rows = [(row["tower"], tuple(row["shape"]), row["implementation"], row["in_use"]) for row in found["wkv6"]]
    assert rows == [
        ("image", (8, 16, 2, 32), "matrix", True),
        ("image", (8, 16, 2, 32), "loop", False),
        ("text", (8, 77, 2, 32), "matrix", True),
        ("text", (8, 77, 2, 32), "loop", False),
    ]
    assert all(row["forward_ms"] > 0 and row["backward_ms"] > 0 for row in found["wkv6"])
    step = found["step"]
    assert step["images_per_s"] == pytest.approx(8 / step["ms"] * 1e3)
    assert step["mfu"] is None
    assert step["peak_memory_gib"] > 0.05
    assert found["loss"]["ms"] > 0
    assert found["loader"]["images_per_s"] > 0
    # 28 bytes before the labels of 3 captions of 77 tokens; a scene is a JPEG of some kilobytes.
    assert 28 + 4 * 3 * 77 < found["loader"]["record_bytes"] < 10_000
    part = found["bottleneck"]["part"]
    assert found[part]["images_per_s"] == min(found[name]["images_per_s"] for name in ("loader", "step"))


def test_the_users_data_and_model_are_taken(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(*next(iter(ON_CPU.items())))
    data, model = write_packed(tmp_path / "own.rec", 8), write_model_config(tmp_path / "model.json")
    options = BenchConfig(
        data=str(data), model_config=str(model), batch_size=2, steps=2, precision="bf16", grad_checkpointing=True
    )
    found = bench(options)
    assert (found.loader.data, found.model, found.checkpointing) == (str(data), "model.json", True)
    assert found.loader.record_bytes == data.stat().st_size / 8
    assert found.wkv6[-1].shape == (2, 16, 2, 16)
    assert "blocks recomputed" in found.text()
    assert "drawn" not in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model.json", "own.idx", "own.manifest.json", "own.rec"]


@pytest.mark.parametrize("shard_size", [2, 3])
def test_a_small_set_is_read_over_and_over(tmp_path: Path, shard_size: int) -> None:
    whole = write_packed(tmp_path / "own.rec", 3)
    packed = open_packed(split_set(whole, shard_size, tmp_path / "shards.rec"))
    longer = repeat(packed, 7, tmp_path / "longer.rec")
    assert (longer.count, longer.captions, longer.context_length) == (7, 3, 16)
    with RecordReader(whole) as before, RecordReader(longer.rec) as after:
        for ordinal in range(7):
            one, other = before.record(ordinal % 3), after.record(ordinal)
            assert (other.id, other.image, list(other.labels)) == (ordinal, one.image, list(one.labels))


def test_compiling_on_a_cpu_is_more_than_this_machine_can(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(*next(iter(ON_CPU.items())))
    with pytest.raises(UnableError, match="need an NVIDIA GPU and Triton; this rank runs on a CPU") as caught:
        bench(BenchConfig(compile=True))
    assert (caught.value.exit_code, caught.value.hint) == (3, "--no-compile")


def test_one_of_several_ranks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (*ON_CPU.items(), ("WORLD_SIZE", "2"), ("RANK", "1"), ("LOCAL_RANK", "1")):
        monkeypatch.setenv(name, value)
    with pytest.raises(UsageError, match="it was started as one of 2"):
        bench(BenchConfig())


def test_data_that_the_model_cannot_read_is_refused(tmp_path: Path) -> None:
    data, model = write_packed(tmp_path / "own.rec", 6, context_length=20), write_model_config(tmp_path / "model.json")
    done = run_cli("bench", "--data", data, "--model-config", model, env=ON_CPU)
    assert done.returncode == 2
    assert "own.rec holds captions of 20 tokens; the model's ctx_len is 16" in done.stderr
    missing = run_cli("bench", "--data", tmp_path / "none.rec", env=ON_CPU)
    assert missing.returncode == 2
    assert "none.rec: no such file" in missing.stderr


@pytest.mark.gpu
@pytest.mark.parametrize("compile", [True, False])
def test_a_gpu_is_measured_with_and_without_kernels(compile: bool) -> None:
    found = bench(BenchConfig(model="tiny", batch_size=8, steps=3, compile=compile))
    in_use = {row.implementation for row in found.wkv6 if row.in_use}
    assert in_use == ({"triton"} if compile else {"matrix"})
    assert found.kernels is compile
    assert found.loader.images_per_s > 0
