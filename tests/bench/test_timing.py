"""Medians of what is timed, warm-up left out."""

import time

import pytest
import torch

from rwkvclip_cli.bench.timing import WARM_UP_CALLS, median_ms


def test_the_median_of_the_calls_behind_the_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    # Seconds that successive calls take; the clock moves in them alone. Binary fractions, so that sums are exact.
    takes = iter([64.0] * WARM_UP_CALLS + [0.5, 0.25, 0.25, 8.0, 0.75, 0.25])
    now = 0.0

    def work() -> None:
        nonlocal now
        now += next(takes)

    monkeypatch.setattr(time, "perf_counter", lambda: now)
    # Three timings of two calls each: (0.5 + 0.25) / 2, (0.25 + 8) / 2 and (0.75 + 0.25) / 2 seconds.
    assert median_ms(work, torch.device("cpu"), repeats=3, calls=2) == 500.0
    assert next(takes, None) is None


@pytest.mark.gpu
def test_a_gpus_time_is_the_devices_not_the_hosts() -> None:
    device = torch.device("cuda")
    a = torch.randn(4096, 4096, device=device)
    one, four = (median_ms(lambda n=n: [a @ a for _ in range(n)], device, repeats=5) for n in (1, 4))
    assert 2 < four / one < 6
