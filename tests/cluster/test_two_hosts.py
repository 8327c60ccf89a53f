"""Launches that span two hosts, with real torchrun, gloo and processes; each test has a pair of hosts of its own."""

import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers import write_model_config, write_packed
from hosts import PATIENCE_S, Command, Host, two_hosts

pytestmark = pytest.mark.cluster

PORT = 29500  # each pair of hosts has all its ports for itself
NUMBERED = f"10.77.0.1:{PORT}"
NAMED = f"alpha:{PORT}"  # on alpha this is 127.0.1.1
# 50 records in global batches of 8: 6 steps an epoch.
STEPS_PER_EPOCH = 6
Pair = tuple[Host, Host]


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Pair]:
    with two_hosts(tmp_path) as pair:
        yield pair


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    write_packed(folder / "pairs.rec", 50)
    write_model_config(folder / "model.json")
    return folder


@pytest.fixture(scope="module")
def one_host(data: Path, tmp_path_factory: pytest.TempPathFactory) -> list[tuple[int, float]]:
    """The losses of the same training by two ranks of one host."""
    folder = tmp_path_factory.mktemp("one")
    with two_hosts(folder) as (alpha, _):
        code, _, err = alpha.start("launch", "--cpus", "2", "--", *train(data, folder / "run")).end()
    assert code == 0, err
    return losses(folder / "run")


def train(data: Path, output: Path, epochs: int = 2) -> list[str | Path]:
    return [
        "--output", output, "--train-data", data / "pairs.rec", "--model-config", data / "model.json", "--batch-size",
        "4", "--epochs", str(epochs), "--precision", "fp32", "--log-every", "1", "--workers", "1",
    ]  # fmt: skip


def static(node_rank: int) -> list[str]:
    return ["--cpus", "1", "--nodes", "2", "--node-rank", str(node_rank), "--rdzv-endpoint", NUMBERED]


C10D = ["--cpus", "1", "--nodes", "2", "--rdzv-endpoint", NAMED]


def launch_both(hosts: Pair, training: list[str | Path]) -> tuple[Command, Command]:
    first, second = (host.start("launch", *static(rank), "--", *training) for rank, host in enumerate(hosts))
    return first, second


def losses(output: Path) -> list[tuple[int, float]]:
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    return [(line["step"], line["loss"]) for line in lines]


def wait_for_steps(output: Path, count: int, commands: tuple[Command, Command]) -> None:
    end_s = time.monotonic() + PATIENCE_S
    log = output / "metrics.jsonl"
    while not log.exists() or log.read_bytes().count(b"\n") < count:
        assert time.monotonic() < end_s, "\n".join(map(str, commands))
        time.sleep(0.05)


def assert_trained(commands: tuple[Command, Command], output: Path, expected: list[tuple[int, float]]) -> None:
    """Both ended well, rank 0 alone spoke and wrote, and the losses are those of one host, bit for bit."""
    (code, out, err), (other_code, other_out, other_err) = (command.end() for command in commands)
    assert (code, other_code) == (0, 0), err + other_err
    assert (out, other_out, other_err) == ("", "", "")
    assert "2 ranks x 4 pairs over gloo" in err
    assert list(output.parent.rglob("metrics.jsonl")) == [output / "metrics.jsonl"]
    assert losses(output) == expected
    assert [step for step, _ in expected] == list(range(1, 2 * STEPS_PER_EPOCH + 1))
    assert_empty(commands)


def assert_empty(commands: tuple[Command, ...]) -> None:
    """Nothing of a job is left on its hosts."""
    for command in commands:
        assert command.host.processes() == {}


def test_numbered_nodes_train_as_one_host_does(
    hosts: Pair, data: Path, tmp_path: Path, one_host: list[tuple[int, float]]
) -> None:
    commands = launch_both(hosts, train(data, tmp_path / "run"))
    assert_trained(commands, tmp_path / "run", one_host)


def test_nodes_without_numbers_whose_names_are_loopback_addresses(
    hosts: Pair, data: Path, tmp_path: Path, one_host: list[tuple[int, float]]
) -> None:
    arguments = ["launch", *C10D, "--", *train(data, tmp_path / "run")]
    first, second = (host.start(*arguments) for host in hosts)
    assert_trained((first, second), tmp_path / "run", one_host)


def test_the_line_of_a_dry_run_typed_by_hand_joins_a_launch(
    hosts: Pair, data: Path, tmp_path: Path, one_host: list[tuple[int, float]]
) -> None:
    alpha, beta = hosts
    training = train(data, tmp_path / "run")
    code, out, err = alpha.start("launch", *static(0), "--dry-run", "--", *training).end()
    assert code == 0, err
    _, line = out.splitlines()
    typed = beta.start_program("sh", "-c", line)
    launched = alpha.start("launch", *static(0), "--", *training)
    assert_trained((launched, typed), tmp_path / "run", one_host)


def test_both_nodes_name_the_rank_that_was_killed(hosts: Pair, data: Path, tmp_path: Path) -> None:
    commands = launch_both(hosts, train(data, tmp_path / "run", epochs=10_000))
    wait_for_steps(tmp_path / "run", 2, commands)
    (rank,) = [pid for pid, line in hosts[1].processes().items() if "distributed.run" not in line and " train " in line]
    os.kill(rank, signal.SIGKILL)
    for command in commands:
        code, _, err = command.end()
        assert code == 128 + signal.SIGKILL
        assert "rwkvclip: rank 1 on beta was ended by SIGKILL\n" in err
        assert "Traceback" not in err
    assert_empty(commands)


def test_a_stop_on_one_node_saves_and_stops_all_and_the_run_goes_on_later(
    hosts: Pair, data: Path, tmp_path: Path
) -> None:
    epochs = 6
    training = train(data, tmp_path / "run", epochs)
    commands = launch_both(hosts, training)
    wait_for_steps(tmp_path / "run", 2, commands)
    os.kill(commands[0].pid, signal.SIGTERM)
    for command in commands:
        code, _, err = command.end()
        assert code == 75
        assert "stopped on request" in err
        assert err.endswith("the same command continues\n")
    done = len(losses(tmp_path / "run"))
    assert 2 <= done < epochs * STEPS_PER_EPOCH
    assert_empty(commands)
    commands = launch_both(hosts, training)
    (code, _, err), (other_code, _, _) = (command.end() for command in commands)
    assert (code, other_code) == (0, 0)
    assert f"behind step {done} of {epochs * STEPS_PER_EPOCH}" in err
    assert [step for step, _ in losses(tmp_path / "run")] == list(range(1, epochs * STEPS_PER_EPOCH + 1))


def test_nccl_check_lists_the_ranks_of_both_hosts(hosts: Pair) -> None:
    arguments = ["nccl-check", "--backend", "gloo", *C10D, "--max-size", "64K", "--json"]
    first, second = (host.start(*arguments) for host in hosts)
    (code, out, err), (other_code, other_out, other_err) = first.end(), second.end()
    assert (code, other_code) == (0, 0), err + other_err
    assert (other_out, other_err) == ("", "")
    document = json.loads(out)
    assert document["ok"]
    assert [(info["rank"], info["host"]) for info in document["ranks"]] == [(0, "alpha"), (1, "beta")]


@pytest.mark.parametrize(
    ("options", "timeout"),
    [([*static(0)], "timeout=3"), (C10D, "join_timeout=3,last_call_timeout=1")],
    ids=["static", "c10d"],
)
def test_a_node_that_never_comes_is_told_when_torchrun_gives_up(
    hosts: Pair, data: Path, tmp_path: Path, options: list[str], timeout: str
) -> None:
    alpha, _ = hosts
    waiting = alpha.start("launch", *options, "--", *train(data, tmp_path / "run"), env={"PET_RDZV_CONF": timeout})
    code, _, err = waiting.end()
    assert code == 1
    endpoint = NUMBERED if options is not C10D else NAMED
    said, cause, hint = err.splitlines()
    assert said.startswith(f"rwkvclip: torchrun failed before 2 nodes at {endpoint} had met: ")
    assert cause.startswith("  cause: not every node joined in time")
    assert hint.startswith("  try: run the same command on each of the --nodes machines")
    assert_empty((waiting,))


def test_another_program_at_the_endpoint_is_told_on_both_nodes(hosts: Pair, data: Path, tmp_path: Path) -> None:
    alpha, _ = hosts
    server = alpha.start_program(sys.executable, "-u", "-m", "http.server", str(PORT))
    server.wait_for("Serving HTTP")
    (code, _, err), (other_code, _, other_err) = (
        command.end() for command in launch_both(hosts, train(data, tmp_path / "run"))
    )
    assert (code, other_code) == (3, 3)
    assert f"port {PORT} of --rdzv-endpoint {NUMBERED} is taken by process " in err
    assert "-m http.server" in err
    assert f"--rdzv-endpoint {NUMBERED}: a program listens there that is no rendezvous of torch's" in other_err


def test_nothing_of_the_hosts_is_left(tmp_path: Path) -> None:
    with two_hosts(tmp_path) as (alpha, beta):
        sleeper = beta.start_program("sleep", "1000")
        inits = [alpha.init, beta.init, sleeper.pid]
        links = os.listdir("/sys/class/net")
    assert not [pid for pid in inits if Path(f"/proc/{pid}").exists()]
    assert "cable0" not in links
