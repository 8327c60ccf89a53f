"""Launches hear each other's last word, over real datagrams, and nobody else's."""

import json
import select
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from rwkvclip_cli.launch import peers as peers_module
from rwkvclip_cli.launch.network import Endpoint
from rwkvclip_cli.launch.peers import LONGEST_TEXT, Cause, Peers, peers_at

JOB = "run7"
CAUSE = Cause(137, "rank 1 on node1 was ended by SIGKILL", "look in `dmesg`")
PATIENCE_S = 20.0


@pytest.fixture(autouse=True)
def little_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers_module, "TELL_S", 0.1)  # here those who are told listen only later


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as opened:
        yield opened


def free_datagram_port() -> int:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def opened(stack: ExitStack, port: int, *, hosting: bool = False, job: str = JOB) -> Peers:
    made = stack.enter_context(peers_at(Endpoint("127.0.0.1", port), job=job, hosting=hosting))
    assert made is not None
    return made


def settle(*all_peers: Peers) -> None:
    """Let everybody greet and receive until nothing is on its way."""
    for each in all_peers:
        each.greet()
    while ready := select.select(all_peers, [], [], 0.1)[0]:
        for each in ready:
            each.receive()


def test_a_nodes_cause_reaches_all_others(stack: ExitStack) -> None:
    port = free_datagram_port()
    host, one, two = opened(stack, port, hosting=True), opened(stack, port), opened(stack, port)
    settle(host, one, two)
    assert len(host.known) == 2
    one.tell(CAUSE)
    settle(host, one, two)
    assert (host.cause, two.cause, one.cause) == (CAUSE, CAUSE, None)


def test_the_hosts_cause_reaches_all_others(stack: ExitStack) -> None:
    port = free_datagram_port()
    host, one, two = opened(stack, port, hosting=True), opened(stack, port), opened(stack, port)
    settle(host, one, two)
    host.tell(CAUSE)
    assert (one.wait(PATIENCE_S), two.wait(PATIENCE_S)) == (CAUSE, CAUSE)


def test_the_first_cause_stays(stack: ExitStack) -> None:
    port = free_datagram_port()
    host, one, two = opened(stack, port, hosting=True), opened(stack, port), opened(stack, port)
    settle(host, one, two)
    one.tell(CAUSE)
    settle(host)
    two.tell(Cause(1, "rank 2 on node2: Connection reset by peer"))
    settle(host)
    assert host.cause == CAUSE


def test_telling_ends_when_all_have_confirmed_it(stack: ExitStack, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers_module, "TELL_S", 1e9)
    port = free_datagram_port()
    host, one = opened(stack, port, hosting=True), opened(stack, port)
    settle(host, one)
    monkeypatch.setattr(one, "_wait_for_data", lambda _: settle(host, one))
    one.tell(CAUSE)
    assert host.cause == CAUSE


def test_a_launch_that_starts_first_is_answered_later(stack: ExitStack, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers_module, "GREET_EVERY_S", 0.0)
    port = free_datagram_port()
    one = opened(stack, port)
    settle(one)  # nobody listens
    assert not one.known
    host = opened(stack, port, hosting=True)
    settle(one, host)
    assert one.known
    assert one.token == host.token


def test_nothing_is_waited_for_where_nobody_was_met(stack: ExitStack) -> None:
    one = opened(stack, free_datagram_port())
    started_s = time.monotonic()
    one.tell(CAUSE)
    assert one.wait(1e9) is None
    assert time.monotonic() - started_s < PATIENCE_S


@pytest.mark.parametrize(
    "message",
    [
        b"\xff not JSON",
        b"[]",
        b"null",
        b"{}",
        {"job": "another", "kind": "cause", "token": None, "exit_code": 1, "message": "", "hint": ""},
        {"job": JOB, "kind": "cause", "token": "of an earlier job", "exit_code": 1, "message": "", "hint": ""},
        {"job": JOB, "kind": "cause", "token": None},
    ],
    ids=str,
)
def test_other_datagrams_are_ignored(stack: ExitStack, message: bytes | dict[str, object]) -> None:
    port = free_datagram_port()
    host, one = opened(stack, port, hosting=True), opened(stack, port)
    settle(host, one)
    if isinstance(message, dict):
        message = json.dumps({**message, "token": message.get("token") or one.token}).encode()
    one.connection.send(message)
    settle(host, one)
    assert host.cause is None


def test_a_stranger_with_the_right_token_is_ignored(stack: ExitStack) -> None:
    port = free_datagram_port()
    host, one, stranger = opened(stack, port, hosting=True), opened(stack, port), opened(stack, port)
    settle(host, one)
    stranger.token = one.token
    stranger.known.add(None)
    stranger.tell(CAUSE)
    settle(host)
    assert host.cause is None


def test_jobs_of_other_names_do_not_meet(stack: ExitStack) -> None:
    port = free_datagram_port()
    host, other = opened(stack, port, hosting=True), opened(stack, port, job="run8")
    settle(host, other)
    assert not host.known
    assert not other.known


def test_long_messages_are_cut_to_what_a_datagram_holds(stack: ExitStack) -> None:
    port = free_datagram_port()
    host, one = opened(stack, port, hosting=True), opened(stack, port)
    settle(host, one)
    one.tell(Cause(1, "ä" * 100_000, "ö" * 100_000))
    settle(host)
    assert host.cause == Cause(1, "ä" * LONGEST_TEXT, "ö" * LONGEST_TEXT)


def test_a_port_that_is_taken_means_no_peers() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as other:
        other.bind(("", 0))
        endpoint = Endpoint("127.0.0.1", other.getsockname()[1])
        with peers_at(endpoint, job=JOB, hosting=True) as nobody:
            assert nobody is None


def test_an_unknown_host_means_no_peers() -> None:
    with peers_at(Endpoint("no-such-host.invalid", 29500), job=JOB, hosting=False) as nobody:
        assert nobody is None
