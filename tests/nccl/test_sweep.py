"""Two real gloo ranks: right results pass, a wrong element, a mismatch and a silent rank are named."""

import json
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from helpers import free_port, plain_environment

from rwkvclip_cli.nccl.report import RankInfo

SCENARIOS = 10
HERE = socket.gethostname()


@dataclass(frozen=True)
class Ranks:
    """What both ranks left: their reports by scenario, exit code and stderr of rank 0."""

    reports: list[dict[str, dict[str, Any]]]
    exit_code: int
    stderr: str


@pytest.fixture(scope="module")
def ranks() -> Ranks:
    ports = [str(free_port()) for _ in range(SCENARIOS)]
    processes = [
        subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("stub_rank.py")), *ports],
            env=plain_environment(
                {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
            ),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        out, err = processes[0].communicate(timeout=200)
    finally:
        for process in processes:
            process.kill()
    outs = [out, processes[1].communicate()[0]]
    assert outs[1].splitlines()[-1] == "stopped", err
    reports = [dict(json.loads(line) for line in text.splitlines() if line.startswith("[")) for text in outs]
    return Ranks(reports, processes[0].returncode, err)


@pytest.mark.parametrize(
    ("op", "sizes", "factor"),
    [
        ("all_reduce", [8, 1000], 1.0),  # at least one element a rank, so 4 and 12 bytes become 8
        ("all_gather", [8, 1000], 0.5),
        ("reduce_scatter", [8, 1000], 0.5),
        ("broadcast", [8, 1000], 1.0),
    ],
)
def test_right_results_pass(ranks: Ranks, op: str, sizes: list[int], factor: float) -> None:
    report = ranks.reports[0][op]
    assert (report["ok"], report["failure"], report["op"], report["backend"]) == (True, "", op, "gloo")
    assert [row["size_bytes"] for row in report["rows"]] == sizes
    for row in report["rows"]:
        assert row["algbw"] == pytest.approx(row["size_bytes"] / row["time_us"] / 1e3)
        assert row["busbw"] == pytest.approx(row["algbw"] * factor)
        assert row["median_us"] > 0


def test_rank_0_knows_all_ranks(ranks: Ranks) -> None:
    infos = [RankInfo(**info) for info in ranks.reports[0]["all_reduce"]["ranks"]]
    assert [(info.rank, info.host, info.device, info.driver, info.nccl) for info in infos] == [
        (0, HERE, "CPU", None, None),
        (1, HERE, "CPU", None, None),
    ]
    assert infos[0].torch == infos[1].torch != ""


def test_a_wrong_element_is_named_on_every_rank(ranks: Ranks) -> None:
    # Weights 1 and 2 sum to 3; element 65 carries 66.
    expected = "wrong result in all_reduce of 512 B: rank 1, element 65: got 199, expected 198"
    for reports in ranks.reports:
        assert (reports["damaged"]["ok"], reports["damaged"]["failure"]) == (False, expected)
    assert [row["size_bytes"] for row in ranks.reports[0]["damaged"]["rows"]] == [8, 256]


def test_too_little_bandwidth_fails_after_the_sweep(ranks: Ranks) -> None:
    report = ranks.reports[0]["slow"]
    assert report["failure"].startswith("bus bandwidth of all_reduce at 256 B is ")
    assert report["failure"].endswith(" GB/s, below --min-busbw 1e+06")
    assert len(report["rows"]) == 2


def test_different_orders_fail_at_once(ranks: Ranks) -> None:
    assert ranks.reports[1]["task"]["failure"] == (
        "the ranks were told different things: rank 0 all_reduce over gloo, 8 to 8 B, 2 times; "
        "rank 1 all_reduce over gloo, 8 to 8 B, 3 times"
    )
    assert ranks.reports[0]["task"]["rows"] == []


def test_different_versions_fail_at_once(ranks: Ranks) -> None:
    import torch

    assert ranks.reports[0]["versions"]["failure"] == (
        f"the ranks run different versions of torch: {torch.__version__} on rank 0 ({HERE}), 2.9.0 on rank 1 ({HERE})"
    )
    assert ranks.reports[0]["versions"]["rows"] == []


def test_a_slow_network_is_not_a_dead_one(ranks: Ranks) -> None:
    report = ranks.reports[0]["mud"]
    assert (report["ok"], len(report["rows"])) == (True, 1)
    assert report["rows"][0]["median_us"] > 0.3e6


def test_a_silent_rank_is_named_in_time(ranks: Ranks) -> None:
    assert ranks.exit_code == 1
    assert "stopped" not in ranks.reports[0]
    assert ranks.stderr.splitlines()[-2] == (
        f"rwkvclip: no answer within 1 s from rank 1 on {HERE} (no sign of life, last seen in all_reduce of 8 B); "
        "the others wait in all_reduce of 8 B"
    )


# Each operation keeps the GPU for about a third of a second, twenty of them for longer than --timeout.
SLOW_ON_GPU = """
import dataclasses, json, torch
from rwkvclip_cli.config import NcclCheckConfig
from rwkvclip_cli.nccl import watch
from rwkvclip_cli.nccl.collectives import COLLECTIVES
from rwkvclip_cli.nccl.sweep import run
watch.SILENCE_S = 1.0
check = lambda place, count, output: torch.cuda.synchronize()
slow = dataclasses.replace(COLLECTIVES["all_reduce"], run=lambda *_: torch.cuda._sleep(600_000_000), check=check)
print(json.dumps(run(NcclCheckConfig(timeout=1.0), [8], {"all_reduce": slow}).document()))
"""


@pytest.mark.gpu
def test_a_slow_operation_on_the_gpu_is_not_a_dead_one() -> None:
    rank = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_PORT": str(free_port())}
    done = subprocess.run(
        [sys.executable, "-c", SLOW_ON_GPU],
        env=plain_environment(rank),
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    (row,) = json.loads(done.stdout)["rows"]
    assert row["median_us"] > 0.2e6
