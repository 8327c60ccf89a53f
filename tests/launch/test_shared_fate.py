"""A launch and that of another node: one's cause is the other's exit code. The other node is a thread here."""

import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from rwkvclip_cli.launch import peers as peers_module
from rwkvclip_cli.launch import supervise as supervise_module
from rwkvclip_cli.launch.network import Endpoint
from rwkvclip_cli.launch.peers import Cause, Peers, peers_at
from rwkvclip_cli.launch.plan import NodeCommand
from rwkvclip_cli.launch.supervise import supervise

HERE = socket.gethostname()
STUB = str(Path(__file__).parent / "stub_agent.py")
KILLED = Cause(128 + signal.SIGKILL, "rank 3 on node1 was ended by SIGKILL", "look in `dmesg`")
PATIENCE_S = 60.0


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # where the launcher's folder appears
    monkeypatch.setattr(peers_module, "GREET_EVERY_S", 0.02)


def free_datagram_port() -> int:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def agent(mode: str) -> NodeCommand:
    return NodeCommand((sys.executable, STUB, mode), {})


def wait_until(what: Callable[[], object]) -> None:
    end_s = time.monotonic() + PATIENCE_S
    while not what():
        assert time.monotonic() < end_s
        time.sleep(0.02)


@contextmanager
def another_node(says: Callable[[Peers], None]) -> Iterator[Peers]:
    """This node's peers, among them one that has been met and then does what `says` does."""
    port = free_datagram_port()
    endpoint = Endpoint("127.0.0.1", port)
    failures: list[BaseException] = []

    def be_another_node() -> None:
        def met() -> bool:
            other.greet()
            other.receive()
            return bool(other.known)

        try:
            with peers_at(endpoint, job="run7", hosting=False) as other:
                assert other is not None
                wait_until(met)
                says(other)
        except BaseException as failure:
            failures.append(failure)

    with peers_at(endpoint, job="run7", hosting=True) as peers:
        assert peers is not None
        node = threading.Thread(target=be_another_node)
        node.start()
        try:
            yield peers
        finally:
            node.join()
    assert not failures, failures


def ranks_have_begun(folder: Path) -> bool:
    return any(folder.glob("rwkvclip-*/attempt-0"))


def test_what_another_node_caused_is_told_in_its_words(capfd: pytest.CaptureFixture[str]) -> None:
    with another_node(lambda other: other.tell(KILLED)) as peers:
        code = supervise(agent("lost"), stop_grace_s=60, peers=peers)
    assert code == 128 + signal.SIGKILL
    assert capfd.readouterr().err == f"rwkvclip: {KILLED.message}\n  try: {KILLED.hint}\n"


def test_a_cause_on_this_node_is_told_to_the_other(capfd: pytest.CaptureFixture[str]) -> None:
    heard: list[Cause | None] = []
    with another_node(lambda other: heard.append(other.wait(PATIENCE_S))) as peers:
        code = supervise(agent("code"), stop_grace_s=60, peers=peers)
    message = f"rank 1 on {HERE} failed with exit code 7"
    assert code == 7
    assert heard == [Cause(7, message)]
    assert capfd.readouterr().err == f"rwkvclip: {message}\n"


def test_a_cause_on_this_node_is_not_hidden_by_another(capfd: pytest.CaptureFixture[str]) -> None:
    with another_node(lambda other: other.tell(KILLED)) as peers:
        code = supervise(agent("bug"), stop_grace_s=60, peers=peers)
    assert code == 1
    assert f"rwkvclip: rank 1 on {HERE}: ValueError: a bug in the loss\n" in capfd.readouterr().err


def test_ranks_that_do_not_notice_are_ended(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(supervise_module, "FATE_GRACE_S", 0.2)

    def fail(other: Peers) -> None:
        wait_until(lambda: ranks_have_begun(tmp_path))
        other.tell(KILLED)

    with another_node(fail) as peers:
        code = supervise(agent("sleep"), stop_grace_s=60, peers=peers)
    assert code == 128 + signal.SIGKILL
    assert capfd.readouterr().err == f"rwkvclip: {KILLED.message}\n  try: {KILLED.hint}\n"


def test_a_stop_is_nobodys_fault() -> None:
    stopped = threading.Event()
    heard: list[Cause | None] = []

    def listen(other: Peers) -> None:
        stopped.wait(PATIENCE_S)
        other.receive()
        heard.append(other.cause)

    with another_node(listen) as peers:
        assert supervise(agent("saved"), stop_grace_s=60, peers=peers) == 75
        stopped.set()
    assert heard == [None]


def test_before_any_rank_has_started_nothing_is_shared() -> None:
    told: list[Cause] = []
    with another_node(lambda other: None) as peers:
        wait_until(lambda: peers.receive() or peers.known)
        peers.tell = told.append  # type: ignore[method-assign]
        failing = NodeCommand((sys.executable, "-c", "raise RuntimeError('torchrun does not start')"), {})
        assert supervise(failing, stop_grace_s=60, peers=peers) == 1
    assert told == []


def test_alone_a_rank_that_lost_its_peer_tells_what_it_saw(capfd: pytest.CaptureFixture[str]) -> None:
    with peers_at(Endpoint("127.0.0.1", free_datagram_port()), job="run7", hosting=True) as peers:
        code = supervise(agent("lost"), stop_grace_s=60, peers=peers)
    err = capfd.readouterr().err
    assert code == 1
    assert f"rank 1 on {HERE}: RuntimeError: Read error [10.0.0.2]:4021: Connection reset by peer\n" in err
    assert "cause: another rank ended first" in err
