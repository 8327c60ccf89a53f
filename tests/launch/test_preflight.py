"""What would fail later is said before torch starts."""

import dataclasses
import os
import socket

import pytest

from rwkvclip_cli.config import LaunchConfig
from rwkvclip_cli.console import UnableError, UsageError
from rwkvclip_cli.launch import network, preflight
from rwkvclip_cli.launch.network import Endpoint
from rwkvclip_cli.launch.plan import Machine

MACHINE = Machine(python="python", cores=2, gpus=4, address="10.0.0.1")
WITHOUT_GPU = "rwkvclip launch --cpus 2"


def check(config: LaunchConfig, machine: Machine = MACHINE) -> None:
    preflight.check(config, machine, WITHOUT_GPU)


def test_more_gpus_than_visible() -> None:
    with pytest.raises(UnableError) as caught:
        check(LaunchConfig(gpus=8))
    assert caught.value.message == f"8 GPUs asked, 4 visible on {socket.gethostname()}"
    assert (caught.value.hint, caught.value.exit_code) == ("--gpus 4", 3)


def test_hidden_gpus_name_the_variable_that_hides_them() -> None:
    machine = dataclasses.replace(MACHINE, gpus=0, environ={"CUDA_VISIBLE_DEVICES": ""})
    with pytest.raises(UnableError) as caught:
        check(LaunchConfig(gpus=1), machine)
    assert caught.value.message == f"1 GPUs asked, 0 visible on {socket.gethostname()} with CUDA_VISIBLE_DEVICES=''"
    assert caught.value.hint == WITHOUT_GPU


def test_no_gpu_at_all() -> None:
    with pytest.raises(UnableError, match="2 GPUs asked, none on this machine"):
        check(LaunchConfig(gpus=2), dataclasses.replace(MACHINE, gpus=0))


def test_enough_gpus_pass() -> None:
    check(LaunchConfig(gpus=4))
    check(LaunchConfig(cpus=64))


def listening() -> socket.socket:
    server = socket.socket()
    server.bind(("127.0.0.1", 0))
    server.listen()
    return server


@pytest.mark.parametrize(
    "options", [{}, {"nodes": 2}, {"nodes": 2, "node_rank": 0}, {"rdzv_backend": "static"}], ids=str
)
def test_a_taken_port_names_its_owner(options: dict[str, int]) -> None:
    with listening() as server:
        port = server.getsockname()[1]
        with pytest.raises(UnableError) as caught:
            check(LaunchConfig(rdzv_endpoint=f"10.0.0.1:{port}", **options))  # type: ignore[arg-type]
    assert caught.value.message.startswith(
        f"port {port} of --rdzv-endpoint 10.0.0.1:{port} is taken by process {os.getpid()} ("
    )
    assert caught.value.hint.startswith("--rdzv-endpoint 10.0.0.1:")


def test_the_port_of_another_machine_is_not_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network, "is_foreign", lambda endpoint: False)
    with listening() as server:
        endpoint = f"10.0.0.9:{server.getsockname()[1]}"
        elsewhere = dataclasses.replace(MACHINE, endpoint_is_here=False)
        check(LaunchConfig(nodes=2, rdzv_endpoint=endpoint), elsewhere)
        check(LaunchConfig(nodes=2, node_rank=1, rdzv_endpoint=endpoint), elsewhere)


def test_another_program_at_the_endpoint_of_another_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Endpoint] = []
    monkeypatch.setattr(network, "is_foreign", lambda endpoint: asked.append(endpoint) or True)
    with pytest.raises(UnableError) as caught:
        check(LaunchConfig(nodes=2, node_rank=1, rdzv_endpoint="10.0.0.9:29500"))
    assert asked == [Endpoint("10.0.0.9", 29500)]
    assert caught.value.message == (
        "--rdzv-endpoint 10.0.0.9:29500: a program listens there that is no rendezvous of torch's"
    )


@pytest.mark.parametrize(("options", "what"), [({}, "the only node"), ({"nodes": 2, "node_rank": 0}, "node 0")])
def test_an_endpoint_on_another_machine(options: dict[str, int], what: str) -> None:
    config = LaunchConfig(rdzv_endpoint="10.0.0.9:29500", **options)  # type: ignore[arg-type]
    with pytest.raises(UsageError) as caught:
        check(config, dataclasses.replace(MACHINE, endpoint_is_here=False))
    assert caught.value.message == f"--rdzv-endpoint 10.0.0.9:29500 is not an address of this machine, which is {what}"
    assert caught.value.hint == "--rdzv-endpoint 10.0.0.1:29500"


def test_an_interface_pattern_for_gloo_is_warned_of(capsys: pytest.CaptureFixture[str]) -> None:
    check(LaunchConfig(cpus=2), dataclasses.replace(MACHINE, environ={"GLOO_SOCKET_IFNAME": "^lo"}))
    assert "GLOO_SOCKET_IFNAME=^lo: gloo takes names of interfaces" in capsys.readouterr().err


def test_c10d_ignores_numbers_and_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    config = LaunchConfig(nodes=2, node_rank=0, rdzv_backend="c10d", rdzv_endpoint=f"10.0.0.1:{network.free_port()}")
    check(config)
    assert "--node-rank 0 has no effect" in capsys.readouterr().err


OWN = {"127.0.0.1": "lo", "10.0.0.1": "eth0", "::1": "lo"}


@pytest.mark.parametrize(
    ("resolved", "expected"),
    [
        (["10.0.0.1"], ("10.0.0.1", True)),
        (["127.0.1.1"], ("10.0.0.1", True)),  # what Debian's /etc/hosts says of the own name
        (["127.0.0.1", "10.0.0.1"], ("10.0.0.1", True)),
        (["10.0.0.9"], ("10.0.0.1", False)),
    ],
)
def test_survey_knows_the_side_of_the_endpoint(
    monkeypatch: pytest.MonkeyPatch, resolved: list[str], expected: tuple[str, bool]
) -> None:
    monkeypatch.setattr(network, "own_addresses", lambda: OWN)
    monkeypatch.setattr(network, "main_address", lambda: "10.0.0.1")
    monkeypatch.setattr(network, "source_address", lambda target: "10.0.0.1")
    monkeypatch.setattr(network, "resolve", lambda host: resolved)
    machine = preflight.survey(LaunchConfig(cpus=1, nodes=2, rdzv_endpoint="node0:29500"))
    assert (machine.address, machine.endpoint_is_here) == expected


def test_unknown_host_is_wrong_usage() -> None:
    config = LaunchConfig(cpus=1, nodes=2, rdzv_endpoint="no-such-host.invalid:29500")
    machine = preflight.survey(config)
    assert not machine.endpoint_is_here
    with pytest.raises(UsageError) as caught:
        check(config, machine)
    assert caught.value.message == (
        "--rdzv-endpoint no-such-host.invalid:29500: this machine knows no address of 'no-such-host.invalid'"
    )
