"""How fast each WKV6 implementation is beside the plain loop, measured in turns in one process.

    $ python tests/benchmarks/bench_wkv6.py --batch 8 --tokens 77 --heads 10 --channels 64 --threads 2

The loop's figure and the others' come from the same run, the least of several repeats each, so that a busy machine
disturbs both alike.
"""

import argparse
import time
from collections.abc import Callable

import torch
from torch import Tensor

from rwkvclip_cli.model.wkv6 import IMPLEMENTATIONS


def inputs(arguments: argparse.Namespace) -> tuple[list[Tensor], Tensor]:
    """r, k, v, w, u as the model feeds them, and a gradient for the result."""
    shape = (arguments.batch, arguments.tokens, arguments.heads, arguments.channels)
    draw = torch.Generator().manual_seed(0)
    r, k, v, grad_y = (torch.randn(shape, generator=draw) for _ in range(4))
    w = torch.empty(shape).uniform_(-6, -1, generator=draw)
    u = torch.randn(shape[2:], generator=draw)
    moved = [x.to(arguments.device) for x in (r, k, v, w, u, grad_y)]
    return [x.requires_grad_() for x in moved[:-1]], moved[-1]


def milliseconds(work: Callable[[], object], device: str) -> float:
    """The wall time of one call, the device's queue included."""
    started_s = time.perf_counter()
    work()
    if device == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - started_s) * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description="Time every WKV6 implementation beside the loop.")
    for name, default in (("batch", 8), ("tokens", 77), ("heads", 10), ("channels", 64), ("repeats", 10)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    leaves, grad_y = inputs(arguments)
    forward: dict[str, float] = {}
    both: dict[str, float] = {}
    for repeat in range(arguments.repeats + 1):
        for row in IMPLEMENTATIONS:
            if not row.takes(leaves[0]):
                continue
            with torch.no_grad():
                alone = milliseconds(lambda row=row: row.function(*leaves), arguments.device)
            full = milliseconds(
                lambda row=row: torch.autograd.grad(row.function(*leaves), leaves, grad_y), arguments.device
            )
            if repeat:  # the first round warms up
                forward[row.name] = min(alone, forward.get(row.name, alone))
                both[row.name] = min(full, both.get(row.name, full))
    shape = "x".join(str(size) for size in leaves[0].shape)
    print(f"B x T x H x N {shape}, {arguments.device}, {arguments.threads} threads, least of {arguments.repeats}, ms")
    print(f"{'':10}{'forward':>10}{'to loop':>10}{'forward + backward':>20}{'to loop':>10}")
    for name in forward:
        ratios = forward["loop"] / forward[name], both["loop"] / both[name]
        print(f"{name:10}{forward[name]:10.2f}{ratios[0]:9.1f}x{both[name]:20.2f}{ratios[1]:9.1f}x")


if __name__ == "__main__":
    main()
