"""Processes that pack samples, in order and with bounded memory, and outlive what a decoder does to them.

>>> with Pool(2, WorkerOptions()) as pool:
...     for outcome in pool.run(read_folder("./imgs", SourceOptions())):
...         print(outcome)
"""

import os
import subprocess
import sys
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from multiprocessing import Pipe
from multiprocessing.connection import wait
from types import TracebackType
from typing import Any, BinaryIO, Self

from rwkvclip_cli import console
from rwkvclip_cli.console import RwkvClipError
from rwkvclip_cli.data.packing.channel import Channel, open_in_memory
from rwkvclip_cli.data.packing.samples import Ignored, Item, Reject, Sample
from rwkvclip_cli.data.packing.worker import Packed, WorkerOptions

Outcome = Packed | Reject | Ignored

BATCH_SAMPLES = 32
BATCH_BYTES = 2**24
BATCH_ITEMS = 1024
END_WAIT_S = 5.0
MAX_FAILED_STARTS = 5  # in a whole pack: one that the system killed for its memory is no reason to stop

# A worker runs on one core: what its libraries would start besides only gets in the way of the others.
ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")

# A plain child rather than multiprocessing's: that one would run the caller's script again (spawn) or copy DALI's
# threads (fork).
START = (
    "import sys; sys.path[:] = {path!r};"
    " from rwkvclip_cli.data.packing.worker import main; main({descriptor}, {shared})"
)


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
    """A child process, what joins it with this one, and the task that it has."""

    process: "subprocess.Popen[bytes]"
    channel: Channel
    shared: BinaryIO
    log: BinaryIO
    task: _Task | None = None
    is_ready: bool = False


@dataclass
class Pool:
    """Up to `count` worker processes, started when there is work for them."""

    count: int
    options: WorkerOptions
    _workers: list[_Worker] = field(default_factory=list)
    _failed_starts: int = 0

    def run(self, items: Iterable[Item]) -> Iterator[Outcome]:
        """Yield what becomes of each item, in the items' order.

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
                return
            if window:
                self._collect(waiting)

    def _assign(self, waiting: deque[_Task]) -> None:
        """Give tasks to idle workers, and start workers for those that remain.

        Only a worker that said it is ready gets a task: sending to one that still loads its libraries would block.
        """
        for worker in list(self._workers):
            if waiting and worker.is_ready and worker.task is None:
                if worker.process.poll() is not None:  # killed while it had nothing to do: no sample's fault
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
        speakers = {worker.channel.connection: worker for worker in self._workers if worker.task or not worker.is_ready}
        for connection in wait(list(speakers)):
            worker = speakers[connection]  # type: ignore[index]
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
        code = worker.process.wait()
        if not worker.is_ready:
            worker.log.seek(0)
            said = worker.log.read().decode("utf-8", "replace").strip()
            _close(worker)
            self._failed_starts += 1
            if self._failed_starts == MAX_FAILED_STARTS:
                raise RwkvClipError(
                    f"{MAX_FAILED_STARTS} packing processes did not start (last exit code {code})\n{said}".rstrip(),
                    hint="pack with fewer --workers, if memory is short",
                )
            return
        _close(worker)
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
        console.say(f"rwkvclip failed at {source}:\n{traceback}")
        fault = traceback.strip().splitlines()[-1]
        _settle(task, [Reject(source, "internal-error", f"{source}: {fault}")])

    def _start(self) -> _Worker:
        here, there = Pipe()
        log, shared = open_in_memory("rwkvclip-worker"), open_in_memory("rwkvclip-pictures")
        path = [entry or os.getcwd() for entry in sys.path]
        start = START.format(path=path, descriptor=there.fileno(), shared=shared.fileno())
        process = subprocess.Popen(
            [sys.executable, "-c", start],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=os.environ | ONE_THREAD,
            pass_fds=[there.fileno(), shared.fileno()],
            process_group=0,  # Ctrl-C is for the packing process, which then lets its workers end
        )
        there.close()
        worker = _Worker(process, Channel(here, shared.fileno()), shared, log)
        worker.channel.send(self.options)
        self._workers.append(worker)
        return worker

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for worker in self._workers:
            worker.channel.connection.close()
            if kind is not None:
                worker.process.kill()
        for worker in self._workers:
            try:
                worker.process.wait(END_WAIT_S)
            except subprocess.TimeoutExpired:
                worker.process.kill()
                worker.process.wait()
            _close(worker)
        self._workers.clear()


def _close(worker: _Worker) -> None:
    worker.channel.connection.close()
    worker.shared.close()
    worker.log.close()


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
