"""Processes that pack samples, in order and with bounded memory, and outlive what a decoder does to them.

>>> with Pool(2, WorkerOptions()) as pool:
...     for outcome in pool.run(read_folder("./imgs", SourceOptions())):
...         print(outcome)
"""

import socket
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from selectors import EVENT_READ, BaseSelector, DefaultSelector
from types import TracebackType
from typing import Any, BinaryIO, Self

from rwkvclip_cli import console
from rwkvclip_cli.console import RwkvClipError
from rwkvclip_cli.data.packing.channel import Channel, open_in_memory
from rwkvclip_cli.data.packing.nursery import CANNOT_FORK, Nursery
from rwkvclip_cli.data.packing.samples import Ignored, Item, Reject, Sample
from rwkvclip_cli.data.packing.user_limits import NO_THREADS, make_room_for_files, no_more_processes
from rwkvclip_cli.data.packing.worker import Packed, WorkerOptions

Outcome = Packed | Reject | Ignored

FILES_OF_WORKER = 2  # open here: a socket and what is shared in memory; a third for a moment at its start
BATCH_SAMPLES = 32
BATCH_BYTES = 2**24
BATCH_ITEMS = 1024
MAX_FAILED_STARTS = 5  # in a whole pack: one that the system killed for its memory is no reason to stop


@dataclass
class _Batch:
    """Items read together, and what became of each."""

    outcomes: list[Outcome | None]
    missing: int


@dataclass
class _Task:
    """Samples of one batch that go to a worker together."""

    batch: _Batch
    positions: list[int]
    samples: list[Sample]
    is_retry: bool = False


@dataclass
class _Worker:
    """A process of a nursery, what joins it with this one, and the task that it has."""

    nursery: Nursery
    ticket: int
    channel: Channel
    shared: BinaryIO
    task: _Task | None = None
    is_ready: bool = False


@dataclass
class Pool:
    """Up to `count` worker processes, started when there is work for them."""

    count: int
    options: WorkerOptions
    _workers: list[_Worker] = field(default_factory=list)
    _nurseries: list[Nursery] = field(default_factory=list)
    _speakers: BaseSelector = field(default_factory=DefaultSelector)
    _failed_starts: int = 0

    def run(self, items: Iterable[Item]) -> Iterator[Outcome]:
        """Yield what becomes of each item, in the items' order; once, for the processes end with the items.

        A worker that dies (a decoder's fault, no memory left) is replaced and its samples are tried one at a time;
        one at which a worker dies again is a reject. So is one at which rwkvclip itself fails; its traceback is shown.
        Raises RwkvClipError where no worker can be started.
        """
        batches = _batches(items)
        window: deque[_Batch] = deque()
        waiting: deque[_Task] = deque()
        exhausted = False
        while True:
            while not exhausted and len(window) < 2 * self.count + 2:
                entry = next(batches, None)
                if entry is None:
                    exhausted = True
                    break
                batch, task = entry
                window.append(batch)
                if task.samples:
                    waiting.append(task)
                # Workers start, and get their first work, before more is read.
                self._assign(waiting)
            self._assign(waiting)
            while window and window[0].missing == 0:
                yield from (outcome for outcome in window.popleft().outcomes if outcome is not None)
            if exhausted and not window:
                self._dismiss()  # they end while the caller waits for its disk
                return
            if window:
                self._collect(waiting)

    def _assign(self, waiting: deque[_Task]) -> None:
        """Give tasks to idle workers, and start workers for those that remain.

        Only a worker that said it is ready gets a task: sending to one that still loads its libraries would block.
        """
        for worker in list(self._workers):
            if waiting and worker.is_ready and worker.task is None:
                # One that says something now was killed while it had nothing to do: no sample's fault.
                if worker.channel.has_word():
                    self._bury(worker, waiting)
                    continue
                worker.task = waiting.popleft()
                try:
                    worker.channel.send(worker.task.samples)
                except (BrokenPipeError, ConnectionResetError):
                    self._bury(worker, waiting)
        starting = sum(not worker.is_ready for worker in self._workers)
        for _ in range(min(len(waiting) - starting, self.count - len(self._workers))):
            self._start()

    def _collect(self, waiting: deque[_Task]) -> None:
        """Wait for some worker's word and take it in."""
        for key, _ in self._speakers.select():
            worker: _Worker = key.data
            try:
                word, content = worker.channel.receive()
            except (EOFError, ConnectionResetError):
                self._bury(worker, waiting)
                continue
            if word == "ready":
                worker.is_ready = True
                continue
            task, worker.task = worker.task, None
            assert task is not None
            if word == "bug":
                self._retry(task, waiting, content)
            else:
                _settle(task, content)

    def _bury(self, worker: _Worker, waiting: deque[_Task]) -> None:
        """Let go of a dead worker; its samples are tried again one by one, or the only one is given up."""
        self._workers.remove(worker)
        self._let_go(worker)
        code = worker.nursery.wait(worker.ticket)
        if not worker.is_ready:
            if code == CANNOT_FORK or any(words in worker.nursery.log for words in NO_THREADS):
                raise no_more_processes(self.count, sum(each.is_ready for each in self._workers))
            self._failed_starts += 1
            if self._failed_starts == MAX_FAILED_STARTS:
                said = f"{MAX_FAILED_STARTS} packing processes did not start (last exit code {code})"
                raise RwkvClipError(
                    said,
                    hint="pack with fewer --workers, if memory is short",
                    details=worker.nursery.log.splitlines(),
                )
            return
        task = worker.task
        if task is None:
            return
        if task.is_retry:
            how = f"signal {-code}" if code < 0 else f"exit code {code}"
            source = task.samples[0].source
            _settle(task, [Reject(source, "decoder-crash", f"{source}: the process that decoded it died ({how})")])
            return
        _split(task, waiting)

    def _retry(self, task: _Task, waiting: deque[_Task], traceback: str) -> None:
        """Try the samples at which rwkvclip failed one by one, and give up the one at which it fails again."""
        if not task.is_retry:
            _split(task, waiting)
            return
        source = task.samples[0].source
        console.say(f"rwkvclip failed at {source}:", *traceback.splitlines())
        fault = traceback.strip().splitlines()[-1]
        _settle(task, [Reject(source, "internal-error", f"{source}: {fault}")])

    def _start(self) -> None:
        nursery = self._living_nursery()
        here, there = socket.socketpair()
        shared = open_in_memory("rwkvclip-pictures")
        ticket = nursery.fork(there.fileno(), shared.fileno())
        worker = _Worker(nursery, ticket, Channel(here, shared.fileno()), shared)
        worker.channel.send(self.options)
        there.close()
        self._workers.append(worker)
        self._speakers.register(here, EVENT_READ, worker)

    def _living_nursery(self) -> Nursery:
        """The latest nursery, or one in its place; those before it stay while they have workers, which outlive them."""
        if not self._nurseries or self._nurseries[-1].has_ended:
            with_workers = {worker.nursery for worker in self._workers}
            for nursery in set(self._nurseries) - with_workers:
                nursery.close()
                self._nurseries.remove(nursery)
            try:
                self._nurseries.append(Nursery(self.options.images.proof))
            except BlockingIOError:
                raise no_more_processes(self.count, len(self._workers)) from None
        return self._nurseries[-1]

    def _dismiss(self) -> None:
        for worker in self._workers:
            self._let_go(worker)
        self._workers.clear()
        for nursery in self._nurseries:
            nursery.dismiss()

    def _let_go(self, worker: _Worker) -> None:
        self._speakers.unregister(worker.channel.connection)
        worker.channel.connection.close()
        worker.shared.close()

    def __enter__(self) -> Self:
        """Have a nursery load what workers need while this process looks at its sources. UnableError for no room."""
        make_room_for_files(FILES_OF_WORKER * self.count, self.count)
        self._living_nursery()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._dismiss()
        self._speakers.close()
        for nursery in self._nurseries:
            nursery.close(kill=kind is not None)
        self._nurseries.clear()


def _split(task: _Task, waiting: deque[_Task]) -> None:
    for position, sample in zip(task.positions, task.samples, strict=True):
        waiting.appendleft(_Task(task.batch, [position], [sample], is_retry=True))


def _settle(task: _Task, outcomes: list[Any]) -> None:
    for position, outcome in zip(task.positions, outcomes, strict=True):
        task.batch.outcomes[position] = outcome
        task.batch.missing -= 1


def _batches(items: Iterable[Item]) -> Iterator[tuple[_Batch, _Task]]:
    """Cut the stream into batches of few samples and few bytes, rejects and ignored files among them."""
    outcomes: list[Outcome | None] = []
    positions: list[int] = []
    samples: list[Sample] = []
    size_bytes = 0
    for item in items:
        if isinstance(item, Sample):
            positions.append(len(outcomes))
            samples.append(item)
            outcomes.append(None)
            size_bytes += len(item.image) if isinstance(item.image, bytes) else 0
        else:
            outcomes.append(item)
        if len(samples) == BATCH_SAMPLES or size_bytes >= BATCH_BYTES or len(outcomes) == BATCH_ITEMS:
            batch = _Batch(outcomes, len(samples))
            yield batch, _Task(batch, positions, samples)
            outcomes, positions, samples, size_bytes = [], [], [], 0
    if outcomes:
        batch = _Batch(outcomes, len(samples))
        yield batch, _Task(batch, positions, samples)
