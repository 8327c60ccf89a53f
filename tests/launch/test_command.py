"""`rwkvclip launch` as a user types it: wrong usage first, then the machine, then exactly what --dry-run printed."""

import os
import shlex
import sys
from pathlib import Path

import pytest
from helpers import run_cli, write_packed
from shard_files import split_set
from typer.testing import CliRunner

from rwkvclip_cli import cli
from rwkvclip_cli.launch import gpus, torchrun

TRAIN = ["--output", "run", "--train-data", "pairs.rec"]
NO_GPU = {"CUDA_VISIBLE_DEVICES": ""}


def test_two_nodes_without_an_endpoint_show_what_to_type() -> None:
    done = run_cli("launch", "--gpus", "8", "--nodes", "2")
    assert (done.returncode, done.stdout) == (2, "")
    said, tried = done.stderr.splitlines()
    assert said == "rwkvclip: 2 nodes need a place to meet: --rdzv-endpoint HOST:PORT, an address of node 0"
    typed = shlex.split(tried.removeprefix("  try: ").removesuffix("   (the same on every node)"))
    assert typed[:7] == ["rwkvclip", "launch", "--gpus", "8", "--nodes", "2", "--rdzv-endpoint"]
    assert typed[7].endswith(":29500")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--cpus", "2", "--", "--train-data", "pairs.rec"], "--output is missing"),
        (["--", *TRAIN, "--lr", "fast"], "Invalid value for '--lr'"),
        (["--", *TRAIN, "--learning-rate", "1"], "No such option: --learning-rate"),
        (["--", *TRAIN, "leftover"], "leftover"),
        (["--nodes", "2", "--rdzv-endpoint", "127.0.0.1:29500", "--", *TRAIN], "each node would wait for itself"),
        (["--rdzv-endpoint", "node0", "--", *TRAIN], "--rdzv-endpoint is host:port of node 0; got 'node0'"),
        (["--gpus", "0", "--", *TRAIN], "--gpus must be at least 1; got 0"),
    ],
)
def test_wrong_usage_comes_before_the_missing_gpu(arguments: list[str], message: str) -> None:
    done = run_cli("launch", *arguments, env=NO_GPU)
    assert (done.returncode, done.stdout) == (2, "")
    assert message in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "no GPU is visible on this machine"),
        (["--gpus", "8"], f"8 GPUs asked, 0 visible on {os.uname().nodename} with CUDA_VISIBLE_DEVICES=''"),
        (["--nproc_per_node", "8"], "8 GPUs asked, 0 visible"),
    ],
)
def test_no_gpu_offers_cpus(arguments: list[str], message: str) -> None:
    done = run_cli("launch", *arguments, "--", *TRAIN, env=NO_GPU)
    assert (done.returncode, done.stdout) == (3, "")
    said, tried = done.stderr.splitlines()
    assert said.startswith(f"rwkvclip: {message}")
    assert tried == "  try: rwkvclip launch --cpus 2 -- --output run --train-data pairs.rec"


def test_dry_run_prints_one_line_a_node_whatever_this_machine_has() -> None:
    arguments = ["--gpus", "8", "--nnodes", "3", "--node-rank", "2", "--rdzv-endpoint", "node0.invalid:29500"]
    done = run_cli("launch", *arguments, "--dry-run", "--", *TRAIN, env={**NO_GPU, "NCCL_IB_HCA": "mlx5"})
    assert done.returncode == 0
    lines = [shlex.split(line) for line in done.stdout.splitlines()]
    assert [line[line.index("--node-rank") + 1] for line in lines] == ["0", "1", "2"]
    for line in lines:
        assert line[line.index(sys.executable) :][1:3] == ["-m", "torch.distributed.run"]
        assert line[line.index("rwkvclip_cli") + 1 :] == ["train", *TRAIN]
    assert "NCCL_IB_HCA=mlx5 is in force" in done.stderr


def test_dry_run_and_execution_are_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("pairs.rec").touch()
    started: list[list[str]] = []

    def execve(path: str, argv: tuple[str, ...], env: dict[str, str]) -> None:
        started.append([path, *argv[1:]])
        raise SystemExit(0)

    monkeypatch.setattr(torchrun.os, "execve", execve)
    printed = CliRunner().invoke(cli.app, ["launch", "--cpus", "2", "--dry-run", "--", *TRAIN]).stdout
    CliRunner().invoke(cli.app, ["launch", "--cpus", "2", "--exec", "--", *TRAIN])
    words = shlex.split(printed)
    assert started == [words[words.index(sys.executable) :]]


def test_settings_file_completes_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "rwkvclip.toml").write_text(
        '[launch]\nrdzv-endpoint = "192.0.2.77:29500"\nnode-rank = 1\n'
        '[train]\noutput = "run"\ntrain-data = "pairs.rec"\n'
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(gpus, "count_visible_gpus", lambda: 8)
    done = CliRunner().invoke(cli.app, ["launch", "--gpus", "8", "--nodes", "2", "--dry-run", "--", "--lr", "1e-4"])
    assert done.exit_code == 0
    settings = str(tmp_path / "rwkvclip.toml")
    for line in done.stdout.splitlines():
        words = shlex.split(line)
        assert words[words.index("rwkvclip_cli") + 1 :] == ["train", "--config", settings, "--lr", "1e-4"]
        assert words[words.index("--rdzv-endpoint") + 1] == "192.0.2.77:29500"


def test_a_real_run_tells_a_users_mistake_once(tmp_path: Path) -> None:
    data = tmp_path / "pairs.rec"
    data.write_bytes(b"no records here")
    done = run_cli("launch", "--cpus", "2", "--", "--output", tmp_path / "run", "--train-data", data)
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.count("rwkvclip: rank ") == 1
    assert "Traceback" not in done.stderr
    assert "pairs.rec" in done.stderr


def test_ranks_for_gpus_never_train_on_cpus(tmp_path: Path) -> None:
    # As on a machine whose GPUs are there, but whose torch is built without CUDA or too new for the driver.
    train = ["--output", tmp_path / "run", "--train-data", write_packed(tmp_path / "pairs.rec", 8, context_length=77)]
    done = run_cli("launch", "--gpus", "1", "--no-preflight", "--", *train, "--batch-size", "8", env=NO_GPU)
    assert done.returncode == 3, done.stderr
    assert "this rank was started for a GPU" in done.stderr
    assert not (tmp_path / "run").exists()


def test_gpus_that_are_not_there_come_before_missing_train_options(tmp_path: Path) -> None:
    asked = run_cli("launch", "--gpus", "8", cwd=tmp_path, env=NO_GPU)
    assert asked.returncode == 3
    assert "8 GPUs asked" in asked.stderr
    bare = run_cli("launch", cwd=tmp_path, env=NO_GPU)
    assert bare.returncode == 3
    assert bare.stderr.endswith("try: rwkvclip launch --cpus 2\n")


def test_a_missing_train_option_is_shown_in_the_whole_command(tmp_path: Path) -> None:
    done = run_cli("launch", "--cpus", "2", "--", "--output", "run", cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.endswith("try: rwkvclip launch --cpus 2 -- --output run --train-data PATH\n")


def test_a_dry_run_needs_no_train_options_and_no_gpus(tmp_path: Path) -> None:
    done = run_cli("launch", "--gpus", "8", "--dry-run", cwd=tmp_path, env=NO_GPU)
    assert done.returncode == 0
    assert "--nproc-per-node 8" in done.stdout
    assert "warning: --output is missing" in done.stderr


def test_data_that_is_not_there_is_missed_before_torch_starts(tmp_path: Path) -> None:
    done = run_cli("launch", "--cpus", "2", "--", *TRAIN, cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr == "rwkvclip: pairs.rec: no such file\n  try: rwkvclip pack SOURCE... pairs.rec\n"
    assert not (tmp_path / "run").exists()


def test_a_shard_that_is_not_there_is_missed_before_torch_starts(tmp_path: Path) -> None:
    split_set(write_packed(tmp_path / "a.rec", 5), 2, tmp_path / "pairs.rec")
    (tmp_path / "pairs-00001.rec").unlink()
    done = run_cli("launch", "--cpus", "2", "--", *TRAIN, cwd=tmp_path)
    assert done.returncode == 1
    assert done.stderr.startswith("rwkvclip: pairs-00001.rec: no such file, but pairs.manifest.json lists it\n  try: ")
    assert not (tmp_path / "run").exists()
