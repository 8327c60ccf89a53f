"""Medians of repeated work, measured where the work is done: by events on a GPU, by the clock on a CPU.

>>> median_ms(lambda: a @ b, device, repeats=20)
"""

import itertools
import statistics
import time
from collections.abc import Callable

import torch

WARM_UP_CALLS = 3


def median_ms(work: Callable[[], object], device: torch.device, *, repeats: int, calls: int = 1) -> float:
    """Milliseconds of one call of `work`: the median of `repeats` timings, behind calls that are not counted.

    `calls`: calls a timing, which then shares them out. Several keep a GPU fed where one is shorter than its launch.
    """
    for _ in range(WARM_UP_CALLS):
        work()
    if device.type == "cuda":
        return _gpu_median_ms(work, repeats, calls)
    taken_ms = []
    for _ in range(repeats):
        started_s = time.perf_counter()
        for _ in range(calls):
            work()
        taken_ms.append((time.perf_counter() - started_s) * 1e3 / calls)
    return statistics.median(taken_ms)


def _gpu_median_ms(work: Callable[[], object], repeats: int, calls: int) -> float:
    """The host runs ahead all the while, as it does in training; it waits once, at the end."""
    events = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    events[0].record()
    for event in events[1:]:
        for _ in range(calls):
            work()
        event.record()
    events[-1].synchronize()
    taken_ms: list[float] = [one.elapsed_time(other) / calls for one, other in itertools.pairwise(events)]
    return statistics.median(taken_ms)
