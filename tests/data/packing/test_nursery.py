"""The process that forks workers: alone, killed, and with workers that end in every way."""

import os
import signal
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from pack_files import family, photo

from rwkvclip_cli.data.packing.channel import Channel, open_in_memory
from rwkvclip_cli.data.packing.nursery import Nursery
from rwkvclip_cli.data.packing.pool import Pool
from rwkvclip_cli.data.packing.prove import ImageOptions
from rwkvclip_cli.data.packing.samples import Sample
from rwkvclip_cli.data.packing.worker import Packed, WorkerOptions


@pytest.fixture
def nursery() -> Iterator[Nursery]:
    made = Nursery("decode")
    yield made
    made.close(kill=True)


def born(nursery: Nursery) -> tuple[int, Channel]:
    """A worker's ticket and what joins it with the test, once it is ready."""
    here, there = socket.socketpair()
    shared = open_in_memory("test")
    channel = Channel(here, shared.fileno())
    channel.shared = shared  # type: ignore[attr-defined] - keeps it open
    with there:
        ticket = nursery.fork(there.fileno(), shared.fileno())
        channel.send(WorkerOptions())
    assert channel.receive() == ("ready", None)
    return ticket, channel


def test_one_process_has_several_workers_and_a_thread_before_it_forks(nursery):
    workers = [born(nursery) for _ in range(3)]
    assert os.listdir(f"/proc/{nursery.pid}/task") == [str(nursery.pid)], "forking copies no other threads"
    assert "libdali" in Path(f"/proc/{nursery.pid}/maps").read_text()
    for number, (_, channel) in enumerate(workers):
        channel.send([Sample("s", photo(number), ("a caption",))])
        word, (record,) = channel.receive()
        assert (word, record.jpeg, record.kept) == ("done", photo(number), "kept")


def test_a_worker_ends_when_its_socket_does_and_its_exit_code_is_known(nursery):
    (first, to_first), (second, to_second) = born(nursery), born(nursery)
    assert len(family(nursery.pid)) == 3
    to_first.connection.close()
    assert nursery.wait(first) == 0
    (_, left) = family(nursery.pid)
    os.kill(left, signal.SIGKILL)
    assert nursery.wait(second) == -signal.SIGKILL
    to_second.connection.close()
    assert not nursery.has_ended


def test_a_killed_nursery_gives_its_own_code_and_its_workers_go_on(nursery):
    ticket, channel = born(nursery)
    os.kill(nursery.pid, signal.SIGKILL)
    assert nursery.wait(ticket) == -signal.SIGKILL
    assert nursery.has_ended
    channel.send([Sample("s", photo(), ("a caption",))])
    assert channel.receive()[0] == "done"
    here, there = socket.socketpair()
    nursery.fork(there.fileno(), 0)
    there.close()
    with here, pytest.raises(EOFError):
        Channel(here, 0).receive()


def test_nothing_is_left_when_it_is_closed():
    nursery = Nursery("none")
    _, channel = born(nursery)
    members = family(nursery.pid)
    channel.connection.close()
    nursery.close()
    assert not any(Path(f"/proc/{pid}").exists() for pid in members)


def test_a_worker_that_does_not_end_is_ended(monkeypatch):
    nursery = Nursery("none")
    monkeypatch.setattr("rwkvclip_cli.data.packing.nursery.END_WAIT_S", 0.1)
    _, channel = born(nursery)
    *_, worker = family(nursery.pid)
    os.kill(worker, signal.SIGSTOP)
    channel.connection.close()
    nursery.close()
    deadline_s = time.monotonic() + 30
    while Path(f"/proc/{worker}").exists():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


def test_the_pool_goes_on_with_another_nursery(monkeypatch):
    monkeypatch.setattr("rwkvclip_cli.data.packing.pool.BATCH_SAMPLES", 1)
    before = set(family(os.getpid()))
    killed = 0

    def killing() -> Iterator[Sample]:
        nonlocal killed
        for number in range(12):
            if number == 8:
                started = [pid for pid in family(os.getpid()) if pid not in before]
                killed = len(started)
                for pid in started:
                    os.kill(pid, signal.SIGKILL)
            yield Sample(f"s{number}", photo(number), ("a caption",))

    with Pool(1, WorkerOptions(images=ImageOptions(proof="none"))) as workers:
        outcomes = list(workers.run(killing()))
    assert killed == 2
    assert [outcome.source for outcome in outcomes if isinstance(outcome, Packed)] == [f"s{n}" for n in range(12)]


def test_a_worker_that_outlives_its_nursery_may_end_after_the_next_one_has_begun(monkeypatch):
    monkeypatch.setattr("rwkvclip_cli.data.packing.pool.BATCH_SAMPLES", 1)
    before = set(family(os.getpid()))

    def started(count: int) -> list[int]:
        deadline_s = time.monotonic() + 30
        while len(found := [pid for pid in family(os.getpid()) if pid not in before]) < count:
            assert time.monotonic() < deadline_s
            time.sleep(0.01)
        return found

    def killing() -> Iterator[Sample]:
        for number in range(36):
            if number == 12:
                first, worker, last = started(3)
                for pid in (first, worker):
                    os.kill(pid, signal.SIGKILL)
            if number == 24:
                assert first not in started(1)
                os.kill(last, signal.SIGKILL)
            yield Sample(f"s{number}", photo(number), ("a caption",))

    with Pool(2, WorkerOptions(images=ImageOptions(proof="none"))) as workers:
        outcomes = list(workers.run(killing()))
    assert [outcome.source for outcome in outcomes if isinstance(outcome, Packed)] == [f"s{n}" for n in range(36)]
    assert not [pid for pid in family(os.getpid()) if pid not in before]


def test_a_path_object_among_the_places_to_import_from_is_no_hindrance(monkeypatch, tmp_path):
    monkeypatch.setattr("sys.path", [*sys.path, tmp_path])
    nursery = Nursery("none")
    _, channel = born(nursery)
    channel.connection.close()
    nursery.close()
