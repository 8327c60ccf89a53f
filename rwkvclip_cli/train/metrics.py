"""What a run writes about itself: OUTPUT/metrics.jsonl, TensorBoard, and the line that people watch.

{"step": 200, "samples": 102400, "loss": 3.41, "lr": 0.0005, "grad_norm": 0.8, "images_per_s": 4711.0, ...}
"""

import contextlib
import json
import os
import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from rwkvclip_cli.console import writing
from rwkvclip_cli.documents import parse_json

METRICS_FILE = "metrics.jsonl"
# Dense bf16 matrix rate of one GPU, FLOP/s, from the makers' data sheets; the first name that the device's contains.
PEAK_FLOPS = {
    "B200": 2250e12,
    "H200": 989e12,
    "H100": 989e12,
    "A100": 312e12,
    "L40S": 362e12,
    "4090": 165e12,
}


class Metrics:
    """Rank 0's record of a run. A resumed run drops the lines behind its first step, so each step has one line."""

    def __init__(self, output: Path, *, first_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.path = output / METRICS_FILE
        with writing(self.path, output):
            _drop_lines_from(self.path, first_step)
            self._file = self.path.open("a", encoding="utf-8")
            self._board = SummaryWriter(str(output / "tensorboard"), purge_step=first_step)

    def write(self, values: dict[str, Any]) -> None:
        """Append one step's line and show the same numbers to TensorBoard. RwkvClipError where the disk refuses."""
        with writing(self.path, self.path.parent):
            self._file.write(json.dumps(values) + "\n")
            self._file.flush()
        for name, value in values.items():
            if isinstance(value, int | float) and name != "step":
                self._board.add_scalar(name, value, values["step"])

    def close(self) -> None:
        """Close both records. What the disk did not take has been told when it was written."""
        with contextlib.suppress(OSError):
            self._file.close()
        self._board.close()


def _drop_lines_from(path: Path, first_step: int) -> None:
    """Keep the lines of earlier steps alone; a line cut short by a crash goes too."""
    if not path.is_file():
        return
    kept = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            step = parse_json(line)["step"]
        except (ValueError, KeyError, TypeError):
            continue
        if isinstance(step, int) and step < first_step:
            kept.append(line + "\n")
    aside = path.with_name(path.name + ".partial")
    aside.write_text("".join(kept), encoding="utf-8")
    os.replace(aside, path)


def flops_per_pair(model: nn.Module, *, image_tokens: int, text_tokens: int) -> float:
    """Floating-point operations of a forward and backward pass of one pair: 6 a token for each weight of a product.

    The embedding is a look-up; the WKV scan, elementwise work and the loss are left out, as is usual.
    """
    per_tower = {"image_model": image_tokens, "text_model": text_tokens}
    total = 0.0
    for name, parameter in model.named_parameters():
        tower = name.split(".")[0]
        is_product = parameter.ndim == 4 or (name.endswith((".weight", "_w1", "_w2")) and parameter.ndim in (2, 3))
        if is_product and not name.endswith("emb.weight"):
            total += 6.0 * parameter.numel() * per_tower[tower]
    return total


def peak_flops(device: torch.device) -> float | None:
    """The device's dense bf16 rate in FLOP/s, or None where no data sheet figure is known."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((rate for part, rate in PEAK_FLOPS.items() if part in name), None)


def peak_memory_gib(device: torch.device) -> float:
    """Most memory held at once: allocated on the GPU, or resident in this process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20  # Linux counts KiB


class Stopwatch:
    """Seconds of the run, of the steps since the last reading, and of those the part spent waiting for data."""

    def __init__(self, earlier_s: float) -> None:
        self._started_s = time.monotonic() - earlier_s
        self._lap_started_s = time.monotonic()
        self._waited_s = 0.0
        self._lap_steps = 0

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Count the block as waiting."""
        before_s = time.monotonic()
        yield
        self._waited_s += time.monotonic() - before_s

    def total_s(self) -> float:
        """Seconds since the run began, those before a resume included."""
        return time.monotonic() - self._started_s

    def count_step(self) -> None:
        """Count one step of the lap."""
        self._lap_steps += 1

    def lap(self) -> tuple[float, float]:
        """Steps a second since the last lap, and the share of its time spent waiting; begins the next lap."""
        now_s = time.monotonic()
        lap_s = max(now_s - self._lap_started_s, 1e-9)
        rate, share = self._lap_steps / lap_s, self._waited_s / lap_s
        self._lap_started_s, self._waited_s, self._lap_steps = now_s, 0.0, 0
        return rate, share
