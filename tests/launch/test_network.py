"""Endpoints, addresses and the owner of a port."""

import os
import socket
import threading
from pathlib import Path

import pytest
from helpers import free_port

from rwkvclip_cli.console import UsageError
from rwkvclip_cli.launch import network
from rwkvclip_cli.launch.network import Endpoint, PortOwner, parse_endpoint


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("10.0.0.1:29500", Endpoint("10.0.0.1", 29500)),
        ("node-0.cluster_a:1", Endpoint("node-0.cluster_a", 1)),
        (" node0:65535 ", Endpoint("node0", 65535)),
        ("[fd00::2]:29500", Endpoint("fd00::2", 29500)),
        ("127.0.0.1:0", Endpoint("127.0.0.1", 0)),
    ],
)
def test_endpoint(text: str, expected: Endpoint) -> None:
    assert parse_endpoint(text) == expected
    assert parse_endpoint(str(expected)) == expected


@pytest.mark.parametrize(
    "text", ["", "node0", "node0:", ":29500", "node0:port", "node0:65536", "fd00::2:29500", "a b:1", "tcp://node0:1"]
)
def test_bad_endpoint_is_wrong_usage(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_endpoint(text)
    assert caught.value.message == f"--rdzv-endpoint is host:port of node 0; got {text!r}"


def test_bad_endpoint_shows_a_good_one() -> None:
    with pytest.raises(UsageError) as caught:
        parse_endpoint("node0")
    assert caught.value.hint == "--rdzv-endpoint node0:29500"


@pytest.mark.parametrize(
    ("address", "expected"),
    [("127.0.0.1", True), ("127.0.1.1", True), ("::1", True), ("0.0.0.0", True), ("10.0.0.1", False), ("node0", False)],
)
def test_is_loopback(address: str, expected: bool) -> None:
    assert network.is_loopback(address) is expected


def test_own_addresses_hold_the_loopback_interface() -> None:
    assert network.own_addresses()["127.0.0.1"] == "lo"


def test_source_address_of_loopback_is_loopback() -> None:
    assert network.source_address("127.0.0.1") == "127.0.0.1"
    assert network.source_address("not an address") is None


def test_resolve_keeps_numbers_and_reports_unknown_names() -> None:
    assert network.resolve("127.0.0.1") == ["127.0.0.1"]
    assert network.resolve("no-such-host.invalid") == []


def test_port_owner_is_the_listening_process() -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        port = server.getsockname()[1]
        assert network.port_owner(port) is None  # bound, but nobody listens
        server.listen()
        owner = network.port_owner(port)
    assert owner is not None
    assert owner.pid == os.getpid()
    assert str(owner).startswith(f"process {os.getpid()} (")


def test_port_owner_of_another_user_has_no_process(tmp_path: Path) -> None:
    (tmp_path / "net").mkdir()
    (tmp_path / "net" / "tcp").write_text(
        "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n"
        "   0: 00000000:733C 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 4242 1\n"
        "   1: 0100007F:733D 0100007F:733C 01 00000000:00000000 00:00000000 00000000     0        0 4243 1\n"
    )
    (tmp_path / "17").mkdir()  # a process whose descriptors may not be read
    assert network.port_owner(29500, tmp_path) == PortOwner(None, "")
    assert str(network.port_owner(29500, tmp_path)) == "a process of another user"
    assert network.port_owner(29501, tmp_path) is None  # connected, not listening


OWN = {"127.0.0.1": "lo", "10.0.0.2": "eth0", "192.168.7.2": "ib0", "::1": "lo"}


@pytest.mark.parametrize(
    ("environ", "named", "interface"),
    [
        ({"MASTER_ADDR": "192.168.7.1"}, ["127.0.1.1"], "ib0"),  # what Debian's /etc/hosts says of the own name
        ({"MASTER_ADDR": "192.168.7.1"}, [], "ib0"),
        ({"MASTER_ADDR": "192.168.7.1"}, ["10.0.0.99"], "ib0"),  # an address that this machine had once
        ({"MASTER_ADDR": "192.168.7.2"}, ["127.0.1.1"], "ib0"),  # this is node 0
        ({"MASTER_ADDR": "192.168.7.1"}, ["10.0.0.2"], None),
        ({"MASTER_ADDR": "192.168.7.1", "GLOO_SOCKET_IFNAME": "eth1"}, ["127.0.1.1"], "eth1"),
        ({"MASTER_ADDR": "127.0.0.1"}, ["127.0.1.1"], None),
        ({"MASTER_ADDR": "localhost"}, ["127.0.1.1"], None),
        ({}, ["127.0.1.1"], None),
    ],
)
def test_gloo_gets_an_interface_where_the_host_name_leads_nowhere(
    monkeypatch: pytest.MonkeyPatch, environ: dict[str, str], named: list[str], interface: str | None
) -> None:
    monkeypatch.setattr(network, "own_addresses", lambda: OWN)
    monkeypatch.setattr(network, "source_address", lambda target: "192.168.7.2")
    monkeypatch.setattr(network, "resolve", lambda host: named if host == socket.gethostname() else [host])
    network.steer_gloo(environ)
    assert environ.get("GLOO_SOCKET_IFNAME") == interface


@pytest.mark.parametrize(
    ("answer", "foreign"),
    [(b"SSH-2.0-OpenSSH_9.2\r\n", True), (None, True), (b"", False)],
    ids=["speaks", "silent", "closes"],
)
def test_another_program_at_the_endpoint(monkeypatch: pytest.MonkeyPatch, answer: bytes | None, foreign: bool) -> None:
    monkeypatch.setattr(network, "ANSWER_TIMEOUT_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            connection, _ = server.accept()
            with connection:
                if answer is None:
                    connection.recv(100)
                    connection.recv(100)  # until the other side gives up
                else:
                    connection.sendall(answer)

        serving = threading.Thread(target=serve)
        serving.start()
        assert network.is_foreign(Endpoint("127.0.0.1", server.getsockname()[1])) is foreign
        serving.join()


def test_nobody_at_the_endpoint_is_not_another_program() -> None:
    assert not network.is_foreign(Endpoint("127.0.0.1", free_port()))


def test_torchs_own_rendezvous_is_known_by_its_answer() -> None:
    from torch.distributed import TCPStore

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    assert not network.is_foreign(Endpoint("127.0.0.1", store.port))
    store.set("still", "there")
    assert store.get("still") == b"there"
