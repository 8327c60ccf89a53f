"""Who holds the others up, from what every rank last said."""

import json
import time
from typing import Any

import pytest

from rwkvclip_cli.nccl import watch as watch_module
from rwkvclip_cli.nccl.watch import Watch, standstill


def note(count: int, name: str, host: str = "node0") -> dict[str, Any]:
    return {"count": count, "name": name, "host": host}


@pytest.mark.parametrize(
    ("notes", "alive", "message"),
    [
        (
            [note(3, "all_reduce of 16 B"), note(2, "connecting", "node1")],
            [True, True],
            "no answer within 60 s from rank 1 on node1 (alive, last seen in connecting); "
            "the others wait in all_reduce of 16 B",
        ),
        (
            [note(3, "all_reduce of 16 B"), note(3, "all_reduce of 16 B", "node1"), note(2, "connecting", "node2")],
            [True, False, True],
            "no answer within 60 s from rank 1 on node1 (no sign of life, last seen in all_reduce of 16 B); "
            "the others wait in all_reduce of 16 B",
        ),
        (
            [note(2, "waiting for the ranks"), None, note(1, "start", "node2")],
            [True, False, False],
            "no answer within 60 s from rank 1 (never started); rank 2 on node2 (no sign of life, last seen in start); "
            "the others wait in waiting for the ranks",
        ),
        (
            [note(3, "all_reduce of 16 B"), note(3, "all_reduce of 16 B")],
            [True, True],
            "no rank got through all_reduce of 16 B within 60 s: all are alive, but their data does not pass",
        ),
    ],
)
def test_standstill(notes: list[dict[str, Any] | None], alive: list[bool], message: str) -> None:
    assert standstill(notes, alive, 60) == message


class Store(dict[str, str]):
    """The parts of a key-value store that a watch needs."""

    def set(self, key: str, value: str) -> None:
        self[key] = value

    def check(self, keys: list[str]) -> bool:
        return all(key in self for key in keys)


def watched(store: Store, heard: list[str], timeout_s: float) -> Watch:
    return Watch(0, 2, store, timeout_s, leave=lambda message, hint: heard.append(message))


def test_a_phase_that_outlasts_the_timeout_ends_the_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch_module, "SILENCE_S", 0.1)
    store: Store = Store({"phase/1": json.dumps(note(1, "start", "node1"))})
    heard: list[str] = []
    with watched(store, heard, 0.1) as watch:
        watch.phase("connecting")
        end_s = time.monotonic() + 30
        while not heard and time.monotonic() < end_s:
            time.sleep(0.01)
    assert heard == [
        "no answer within 0.1 s from rank 1 on node1 (no sign of life, last seen in start); "
        "the others wait in connecting"
    ]
    assert store["beat/0"] == "1"


def test_progress_keeps_the_rank_alive() -> None:
    heard: list[str] = []
    with watched(Store(), heard, 1000) as watch:
        for step in range(5):
            watch.phase(f"step {step}")
    assert heard == []


def test_steps_within_a_phase_keep_the_rank_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch_module, "SILENCE_S", 0.5)
    heard: list[str] = []
    with watched(Store(), heard, 0.5) as watch:
        watch.phase("all_reduce of 8 B")
        for _ in range(60):  # three times as long as a phase without steps would last
            time.sleep(0.05)
            watch.progress()
    assert heard == []
