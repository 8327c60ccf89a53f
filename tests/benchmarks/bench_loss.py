"""Time and memory of the contrastive loss in chunks beside the full matrix, forward and backward, in the same run.

    $ python tests/benchmarks/bench_loss.py --pairs 65536 32768 --chunks 1024 2048 4096 8192

One process holds all pairs in float32. Times are the medians of several rounds that take the forms by turns. Memory, on
a GPU alone, is the peak above the inputs and their gradients. `error` is the largest relative distance of the loss or
of a gradient from the full matrix's. A form that does not fit is left out of that size.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from rwkvclip_cli.train.losses import clip_loss, suggested_chunk

GIB = 1 << 30
Loss = Callable[[Tensor, Tensor, Tensor], Tensor]


def transposed(image: Tensor, text: Tensor, scale: Tensor) -> Tensor:
    """The full matrix as most write it for one process: scored once, read along both dimensions."""
    scores = scale * F.normalize(image, dim=-1) @ F.normalize(text, dim=-1).T
    labels = torch.arange(image.shape[0], device=image.device)
    return (F.cross_entropy(scores, labels) + F.cross_entropy(scores.T, labels)) / 2


def forms(pairs: int, chunks: list[int]) -> dict[str, Loss]:
    """Every form by its name; the full matrix first."""
    named: dict[str, Loss] = {"full": clip_loss, "full, one product": transposed}
    for chunk in sorted({*chunks, suggested_chunk(pairs, pairs) or pairs}):
        if chunk <= pairs:
            mark = " *" if chunk == suggested_chunk(pairs, pairs) else ""
            named[f"chunk {chunk}{mark}"] = lambda *inputs, chunk=chunk: clip_loss(*inputs, chunk_size=chunk)
    return named


def measure(loss: Loss, leaves: list[Tensor]) -> tuple[float, float, list[Tensor]]:
    """Milliseconds of one forward and backward, GiB above inputs and gradients, and the loss with its gradients."""
    cuda = leaves[0].is_cuda
    if cuda:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        held_bytes = torch.cuda.memory_allocated() + sum(leaf.nbytes for leaf in leaves)
    started_s = time.perf_counter()
    value = loss(*leaves)
    gradients = torch.autograd.grad(value, leaves)
    if cuda:
        torch.cuda.synchronize()
    took_ms = (time.perf_counter() - started_s) * 1e3
    above = (torch.cuda.max_memory_allocated() - held_bytes) / GIB if cuda else float("nan")
    return took_ms, above, [value.detach(), *gradients]


def distance(found: list[Tensor], expected: list[Tensor]) -> float:
    """The largest relative distance between two tensors of the same place."""
    return max(float((have - want).norm() / want.norm()) for have, want in zip(found, expected, strict=True))


def compare(pairs: int, arguments: argparse.Namespace) -> None:
    """Measure every form by turns and print a row for each."""
    draw = torch.Generator(arguments.device).manual_seed(0)
    image = torch.randn(pairs, arguments.width, device=arguments.device, generator=draw)
    # A pair is about 0.16 alike, as early in a training: once all is learnt, no form has digits left to compare.
    text = image / 6 + torch.randn(pairs, arguments.width, device=arguments.device, generator=draw)
    leaves = [x.requires_grad_() for x in (image, text, torch.tensor(arguments.scale, device=arguments.device))]
    times: dict[str, list[float]] = {}
    memory: dict[str, float] = {}
    errors: dict[str, float] = {}
    expected: list[Tensor] | None = None
    remaining = forms(pairs, arguments.chunks)
    for turn in range(arguments.repeats + 1):  # the first warms up, and finds what fits
        for name, loss in list(remaining.items()):
            try:
                took_ms, above, found = measure(loss, leaves)
            except torch.OutOfMemoryError:
                del remaining[name]
                torch.cuda.empty_cache()
                continue
            if turn == 0:
                expected = found if expected is None else expected
                errors[name] = distance(found, expected)
            else:
                times.setdefault(name, []).append(took_ms)
                memory[name] = above
            del found
    medians = {name: statistics.median(taken) for name, taken in times.items()}
    print(f"{pairs:,} pairs x {arguments.width}, {arguments.device}, median of {arguments.repeats}; * suggested_chunk")
    print(f"{'':20}{'ms':>10}{'to full':>10}{'to one product':>16}{'GiB above':>11}{'error':>10}")
    for name, took_ms in medians.items():
        ratios = (took_ms / medians.get(form, float("nan")) for form in ("full", "full, one product"))
        print("{:20}{:10.1f}{:9.2f}x{:15.2f}x".format(name, took_ms, *ratios), end="")
        print(f"{memory[name]:11.2f}{errors[name]:10.1e}", flush=True)


def main() -> None:
    cuda = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description="Time the chunked contrastive loss beside the full matrix.")
    parser.add_argument("--pairs", type=int, nargs="+", default=[65_536, 32_768] if cuda else [4096, 2048])
    parser.add_argument("--chunks", type=int, nargs="+", default=[1024, 2048, 4096, 8192] if cuda else [256, 512, 1024])
    parser.add_argument("--width", type=int, default=640)
    parser.add_argument("--scale", type=float, default=50.0)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if cuda else "cpu")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    for pairs in arguments.pairs:
        compare(pairs, arguments)


if __name__ == "__main__":
    main()
