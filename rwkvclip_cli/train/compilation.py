"""The GPU kernels of a run: whether Triton may compile them and a step be recorded, and a word where one comes late.

>>> with counting(device, time.monotonic()) as kernels:
...     warm_up(wrapped, forward_backward)
...     kernels.all_are_there()
"""

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from rwkvclip_cli import console
from rwkvclip_cli.console import UnableError
from rwkvclip_cli.model.wkv6 import triton_is_there


def compiles(asked: bool | None, device: torch.device) -> bool:
    """Whether blocks run as compiled kernels: as `--compile` or `--no-compile` asks, else wherever they can.

    Raises UnableError where they are asked for and cannot: on a CPU, or without Triton.
    """
    missing = "" if device.type == "cuda" else "this rank runs on a CPU"
    if not missing and not triton_is_there():
        missing = "the Python package triton, which compiles them, is not installed"
    if asked and missing:
        raise UnableError(f"--compile: the fused kernels need an NVIDIA GPU and Triton; {missing}", hint="--no-compile")
    return asked is not False and not missing


def records(asked: bool | None, kernels: bool, world_size: int) -> bool:
    """Whether a step's passes are recorded as a CUDA graph: as `--cuda-graph` asks, else wherever they can.

    Raises UnableError where it is asked for and cannot be: without compiled kernels, or with several ranks, whose
    gradients DistributedDataParallel sums while the host launches the rest.
    """
    missing = "" if kernels else "this run has no compiled kernels, which it records"
    if not missing and world_size > 1:
        missing = f"this run has {world_size} ranks, and it records steps of a single one"
    if asked and missing:
        raise UnableError(f"--cuda-graph: {missing}", hint="--no-cuda-graph")
    return asked is not False and not missing


class CompiledKernels:
    """What Triton has compiled, or read from its cache on disk, since this was made.

    `began_s`: when the run began, by `time.monotonic`.
    """

    def __init__(self, began_s: float) -> None:
        self.compiled: Counter[str] = Counter()
        """Compilations by the kernel's name; a kernel has one for each type, head size and so on that it meets."""
        self.read: Counter[str] = Counter()
        """The same for those that an earlier run had left on disk."""
        self.started_in_s: float | None = None
        """Seconds from the run's beginning to the end of its first step, which is None until then."""
        self._began_s = began_s
        self._warm_up_began_s = time.monotonic()
        self._warm_up_s = 0.0
        self._warned: set[str] | None = None

    def count(self, name: str, from_disk: bool) -> None:
        """Count one kernel; once all are there, warn of it, each name once."""
        (self.read if from_disk else self.compiled)[name] += 1
        if self._warned is not None and name not in self._warned:
            self._warned.add(name)
            done = "read from disk" if from_disk else "compiled"
            console.warn(f"the kernel {name} was {done} after the warm-up: its inputs are unlike all before")

    def all_are_there(self) -> None:
        """The warm-up is over: whatever is compiled from here on is a surprise."""
        self._warm_up_s = time.monotonic() - self._warm_up_began_s
        self._warned = set()

    def first_step_is_done(self, device: torch.device) -> None:
        """Wait for the first step and, on a GPU, say once what the start took."""
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        self.started_in_s = time.monotonic() - self._began_s
        if device.type == "cuda":
            console.say(self.summary())

    def summary(self) -> str:
        """One line: the kernels, and the seconds of the warm-up and until the first step was done."""
        kernels = f"{self.compiled.total()} kernels compiled, {self.read.total()} read from disk"
        return f"{kernels}; warm-up {self._warm_up_s:.1f} s, first step done after {self.started_in_s or 0.0:.1f} s"


@contextmanager
def counting(device: torch.device, began_s: float) -> Iterator[CompiledKernels]:
    """Count inside the block. Triton is neither loaded nor listened to where the device is no GPU."""
    kernels = CompiledKernels(began_s)
    if device.type != "cuda" or not triton_is_there():
        yield kernels
        return
    import triton

    before = triton.knobs.compilation.listener

    def listen(*, src: Any, cache_hit: bool, **details: Any) -> None:
        kernels.count(src.name, cache_hit)
        if before is not None:
            before(src=src, cache_hit=cache_hit, **details)

    triton.knobs.compilation.listener = listen
    try:
        yield kernels
    finally:
        triton.knobs.compilation.listener = before
