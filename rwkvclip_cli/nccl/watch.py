"""Name the rank that does not answer: every rank notes its phase and gives signs of life in the store of all.

>>> with Watch(rank=0, world_size=8, store=store.clone(), timeout_s=60) as watch:
...     watch.phase("all_reduce of 8 B")
"""

import contextlib
import json
import os
import socket
import threading
import time
from collections.abc import Callable
from typing import Any, Self

from rwkvclip_cli.console import EXIT_FAILED, RwkvClipError, show_error
from rwkvclip_cli.launch.exit_record import has_launcher, record_exit

POLL_S = 0.2
BEAT_S = 1.0  # between signs of life
SILENCE_S = 2.5  # without one a rank is not alive
OTHERS_WAIT_S = 3.0  # rank 0 speaks first; the others only if it is the silent one
HINT = "look at that rank's machine, and run again with NCCL_DEBUG=INFO to see what it waits for"


def _leave(message: str, hint: str) -> None:
    """End this process, whose main thread hangs in a collective: no exception could reach it."""
    record_exit(EXIT_FAILED, message, hint=hint)
    if not has_launcher():
        show_error(RwkvClipError(message, hint))
    os._exit(EXIT_FAILED)


class Watch:
    """This rank's phases, and the thread that ends the process once `timeout_s` pass without progress in one.

    `store` is a connection of its own to the ranks' key-value store: the main thread's may be blocked.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        store: Any,
        timeout_s: float,
        leave: Callable[[str, str], None] = _leave,
    ) -> None:
        self.rank, self.world_size, self.store, self.timeout_s, self.leave = rank, world_size, store, timeout_s, leave
        self._count = self._steps = 0
        self._born_s = self._moved_s = time.monotonic()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._look, name="watch", daemon=True)

    def __enter__(self) -> Self:
        self.phase("start")
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def phase(self, name: str) -> None:
        """Note for all ranks that this one now begins `name`; every rank goes through the same phases."""
        self._count += 1
        note = {"count": self._count, "name": name, "host": socket.gethostname()}
        self.store.set(f"phase/{self.rank}", json.dumps(note))
        self.progress()

    def progress(self) -> None:
        """Note, for this rank alone, that its phase has come one step further: the patience begins anew."""
        self._steps += 1
        self._moved_s = time.monotonic()

    def _look(self) -> None:
        patience_s = self.timeout_s + (OTHERS_WAIT_S if self.rank else 0.0)
        beat = 0
        # The store ends with the rank or the torchrun that holds it: then there is nobody left to watch.
        with contextlib.suppress(RuntimeError):
            while not self._ended.wait(POLL_S):
                if beat * BEAT_S <= time.monotonic() - self._born_s:
                    beat += 1
                    self.store.set(f"beat/{self.rank}", str(beat))
                if time.monotonic() - self._moved_s > patience_s and self._stands_still():
                    return

    def _stands_still(self) -> bool:
        """Look who is alive; unless this rank has moved on meanwhile, leave."""
        steps, before = self._steps, self._read("beat")
        if self._ended.wait(SILENCE_S) or self._steps != steps:
            return False
        after = self._read("beat")
        alive = [rank == self.rank or before[rank] != after[rank] for rank in range(self.world_size)]
        notes = [None if text is None else json.loads(text) for text in self._read("phase")]
        self.leave(standstill(notes, alive, self.timeout_s), HINT)
        return True

    def _read(self, kind: str) -> list[bytes | None]:
        keys = [f"{kind}/{rank}" for rank in range(self.world_size)]
        return [self.store.get(key) if self.store.check([key]) else None for key in keys]


def standstill(notes: list[dict[str, Any] | None], alive: list[bool], timeout_s: float) -> str:
    """Say which ranks hold the others up: those without a sign of life, else those behind in their phases.

    `notes` are each rank's last phase, None where it never spoke.
    """
    front = max((note["count"] for note in notes if note), default=0)
    waiting = next((note["name"] for note in notes if note and note["count"] == front), "start")
    missing = [rank for rank, note in enumerate(notes) if note is None or not alive[rank]]
    behind = [rank for rank, note in enumerate(notes) if note is not None and note["count"] < front]
    if not missing and not behind:
        return f"no rank got through {waiting} within {timeout_s:g} s: all are alive, but their data does not pass"
    named = [f"rank {rank} {_last_seen(notes[rank], alive[rank])}" for rank in missing or behind]
    return f"no answer within {timeout_s:g} s from {'; '.join(named)}; the others wait in {waiting}"


def _last_seen(note: dict[str, Any] | None, alive: bool) -> str:
    if note is None:
        return "(never started)"
    return f"on {note['host']} ({'alive' if alive else 'no sign of life'}, last seen in {note['name']})"
