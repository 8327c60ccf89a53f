"""`rwkvclip nccl-check` as a user meets it: wrong options, no GPU, tables, one JSON document."""

import json
import os
import subprocess

import pytest
from helpers import free_port, run_cli

from rwkvclip_cli import nccl_check
from rwkvclip_cli.config import NcclCheckConfig
from rwkvclip_cli.console import UsageError
from rwkvclip_cli.nccl import sweep
from rwkvclip_cli.nccl.collectives import COLLECTIVES
from rwkvclip_cli.nccl.report import RankInfo, Report, Row, readable
from rwkvclip_cli.nccl.sweep import make_row
from rwkvclip_cli.nccl_check import parse_size, show, sweep_sizes, table


@pytest.mark.parametrize(
    ("text", "size"),
    [("8", 8), ("64K", 65536), ("1m", 1 << 20), ("2G", 2 << 30), ("4MiB", 4 << 20), (" 16 KB ", 16384), ("100B", 100)],
)
def test_sizes_as_nccl_tests_writes_them(text: str, size: int) -> None:
    assert parse_size(text, "--max-size") == size


@pytest.mark.parametrize("text", ["", "many", "1.5M", "-8", "8T", "1e6"])
def test_other_sizes_are_wrong_usage(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_size(text, "--max-size")
    assert caught.value.message == f"--max-size is a number of bytes such as 8, 64K, 1M or 1G; got {text!r}"


def test_less_than_an_element_is_wrong_usage() -> None:
    with pytest.raises(UsageError, match="--min-size must be at least 4 bytes"):
        parse_size("2", "--min-size")


def test_the_sweep_doubles_and_ends_with_the_largest() -> None:
    assert sweep_sizes(NcclCheckConfig(min_size="8", max_size="64")) == [8, 16, 32, 64]
    assert sweep_sizes(NcclCheckConfig(min_size="100", max_size="500")) == [100, 200, 400, 500]
    assert sweep_sizes(NcclCheckConfig(min_size="1K", max_size="1K")) == [1024]
    assert sweep_sizes(NcclCheckConfig())[-1] == 1 << 30
    assert sweep_sizes(NcclCheckConfig(backend="gloo"))[-1] == 4 << 20
    with pytest.raises(UsageError, match="--min-size 16 is above --max-size 8"):
        sweep_sizes(NcclCheckConfig(min_size="16", max_size="8"))


@pytest.mark.parametrize(
    ("size", "text"), [(8, "8 B"), (1000, "1000 B"), (1024, "1 KiB"), (3 << 20, "3 MiB"), (1 << 30, "1 GiB")]
)
def test_readable(size: int, text: str) -> None:
    assert readable(size) == text


def test_plain_table_has_no_colours_and_lines_up() -> None:
    assert table(("size", "busbw"), [["8 B", "0.10"], ["64 KiB", "-"]]) == (
        "  size  busbw\n   8 B   0.10\n64 KiB      -"
    )


def test_report_as_text(capsys: pytest.CaptureFixture[str]) -> None:
    infos = (
        RankInfo(0, "node0", "NVIDIA H200", "570.1", "2.11.0", "12.8", "2.27.5"),
        RankInfo(1, "node0", "CPU", None, "2.11.0", None, None),
    )
    show(Report("all_gather", "nccl", infos, (Row(1 << 20, 12.34, 11.0, 85.0, 42.5),)))
    assert capsys.readouterr().out == (
        "rank   host       device  driver   torch  CUDA    NCCL\n"
        "   0  node0  NVIDIA H200   570.1  2.11.0  12.8  2.27.5\n"
        "   1  node0          CPU       -  2.11.0     -       -\n"
        "\n"
        "all_gather over nccl, 2 ranks, every element checked\n"
        " size  time µs  median µs  algbw GB/s  busbw GB/s\n"
        "1 MiB     12.3       11.0      85.000      42.500\n"
    )


def test_one_rank_has_no_bandwidth(capsys: pytest.CaptureFixture[str]) -> None:
    info = RankInfo(0, "node0", "NVIDIA H200", "570.1", "2.11.0", "12.8", "2.27.5")
    row = make_row(1 << 30, [[47e-6, 49e-6, 45e-6]], COLLECTIVES["all_reduce"], world_size=1)
    assert (row.algbw, row.busbw) == (None, None)
    show(Report("all_reduce", "nccl", (info,), (row,)))
    assert capsys.readouterr().out.splitlines()[-4:] == [
        "all_reduce over nccl, 1 rank, every element checked",
        " size  time µs  median µs  algbw GB/s  busbw GB/s",
        "1 GiB     47.0       47.0           -           -",
        "one rank moves no data: there is no bandwidth to measure",
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--cpus", "2"], "--cpus 2 needs --backend gloo: NCCL runs on GPUs alone"),
        (["--backend", "gloo", "--gpus", "2"], "--backend gloo is checked on CPU ranks, not on --gpus"),
        (["--max-size", "huge"], "--max-size is a number of bytes"),
        (["--nodes", "2"], "2 nodes need a place to meet"),
        (["--op", "all_redcue"], "--op is one of all_reduce, all_gather, reduce_scatter, broadcast; got 'all_redcue'"),
    ],
)
def test_wrong_options(arguments: list[str], message: str) -> None:
    done = run_cli("nccl-check", *arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert message in done.stderr


def test_without_a_gpu() -> None:
    done = run_cli("nccl-check", env={"CUDA_VISIBLE_DEVICES": ""})
    assert (done.returncode, done.stdout) == (3, "")
    assert done.stderr == (
        "rwkvclip: no GPU is visible on this machine\n  try: rwkvclip nccl-check --backend gloo --cpus 2\n"
    )


@pytest.fixture(scope="module")
def checked(tmp_path_factory: pytest.TempPathFactory) -> subprocess.CompletedProcess[str]:
    """One real check: torchrun, two gloo ranks, options from a settings file and from the command line."""
    folder = tmp_path_factory.mktemp("checked")
    (folder / "own.toml").write_text('[nccl-check]\nbackend = "gloo"\niterations = 3\nmax-size = "64"\n')
    (folder / "rwkvclip.toml").write_text('[nccl-check]\nmax-size = "1M"\nop = "broadcast"\n')
    arguments = ["--config", "own.toml", "--cpus", "2", "--max-size", "4K", "--min-busbw", "1e6", "--json"]
    return run_cli("nccl-check", *arguments, cwd=folder)


def test_json_is_one_document_even_when_the_check_fails(checked: subprocess.CompletedProcess[str]) -> None:
    document = json.loads(checked.stdout)
    assert (document["ok"], document["op"], document["backend"]) == (False, "all_reduce", "gloo")
    assert [row["size_bytes"] for row in document["rows"]] == [8 << step for step in range(10)]
    assert [info["rank"] for info in document["ranks"]] == [0, 1]


def test_a_failed_check_exits_1_and_says_so_once(checked: subprocess.CompletedProcess[str]) -> None:
    assert checked.returncode == 1
    assert checked.stderr.count("bus bandwidth of all_reduce at 4 KiB is") == 1
    assert checked.stderr.splitlines()[-1].startswith(f"rwkvclip: rank 0 on {os.uname().nodename}: bus bandwidth")
    assert "Traceback" not in checked.stderr


def test_a_rank_without_a_meeting_point_takes_the_usual_one(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "")  # put back at the end
        monkeypatch.delenv(name)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    met: list[tuple[str, str]] = []

    def rendezvous(url: str, **_: object) -> None:
        met.append((os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]))
        raise StopIteration

    monkeypatch.setattr(sweep, "rendezvous", rendezvous)
    with pytest.raises(StopIteration):
        sweep.run(NcclCheckConfig(backend="gloo"), [8])
    assert met == [("127.0.0.1", "29500")]


def test_one_rank_alone_passes_without_an_address_or_a_bandwidth() -> None:
    rank = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_PORT": str(free_port())}
    done = run_cli("nccl-check", "--backend", "gloo", "--max-size", "16", "--json", env=rank)
    assert done.returncode == 0, done.stderr
    assert [(row["algbw"], row["busbw"]) for row in json.loads(done.stdout)["rows"]] == [(None, None)] * 2


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (
            NcclCheckConfig(backend="gloo", cpus=2, nodes=2, node_rank=1, rdzv_endpoint="a:1", op="broadcast"),
            "--backend gloo --op broadcast --min-size 8 --iterations 20 --timeout 60.0",
        ),
        (
            NcclCheckConfig(gpus=8, max_size="1M", min_busbw=3.5, json=True),
            "--backend nccl --op all_reduce --min-size 8 --max-size 1M --iterations 20 --min-busbw 3.5 --timeout 60.0 "
            "--json",
        ),
    ],
)
def test_ranks_are_told_all_but_how_to_start(options: NcclCheckConfig, expected: str) -> None:
    assert nccl_check._rank_arguments(options, None) == expected.split()


@pytest.mark.gpu
def test_nccl_on_every_gpu() -> None:
    done = run_cli("nccl-check", "--max-size", "1M", "--json")
    document = json.loads(done.stdout)
    assert (done.returncode, document["ok"], document["backend"]) == (0, True, "nccl")
    assert document["ranks"][0]["driver"]
    assert document["ranks"][0]["nccl"]


@pytest.mark.gpu
@pytest.mark.parametrize("op", ["all_gather", "reduce_scatter", "broadcast"])
def test_nccl_other_operations(op: str) -> None:
    done = run_cli("nccl-check", "--op", op, "--max-size", "64K", "--json")
    assert (done.returncode, json.loads(done.stdout)["ok"]) == (0, True)


def test_ranks_are_told_apart_from_a_cluster_that_sets_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    # Kubernetes' training operator sets RANK and WORLD_SIZE for the node; torchrun alone sets LOCAL_RANK.
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    monkeypatch.setattr(nccl_check, "_be_a_rank", lambda *_: pytest.fail("took itself for a rank"))
    monkeypatch.setattr(nccl_check, "_start_ranks", lambda *_: 0)
    assert nccl_check.nccl_check(NcclCheckConfig()) == 0
