"""Whole training steps (forward, loss, backward, clip, optimizer) on one GPU, beside a compiled open_clip ViT.

    python tests/benchmarks/bench_step.py [b32] [b16] [--peer] [--eager] [--plain] [--profile]

Inputs lie on the GPU, bf16, medians of 20 steps. `--peer` adds open_clip's ViT of the same size, compiled (it has to be
installed), `--only-peer` runs nothing else, `--eager` adds our own step without a CUDA graph, `--plain` the one without
kernels too, and `--profile` shows which kernels take the most time.
"""

import argparse
import itertools
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

from rwkvclip_cli.model import build_model, preset
from rwkvclip_cli.train import optim
from rwkvclip_cli.train.losses import clip_loss
from rwkvclip_cli.train.recorded import RecordedPass

SIZES = {"b32": ("rwkv-clip-b32", "ViT-B-32", 512), "b16": ("rwkv-clip-b16", "ViT-B-16", 256)}
WARM_UP, STEPS = 5, 20


def own_step(name: str, batch: int, kernels: bool, recorded: bool) -> Callable[[], Tensor]:
    model = build_model(preset(name)).cuda()
    model.image_model.kernels = model.text_model.kernels = kernels
    optimizer = optim.build_optimizer(model, weight_decay=0.2, betas=(0.9, 0.98))
    optim.set_learning_rate(optimizer, 1e-4)
    images = torch.randn(batch, 3, 224, 224, device="cuda")
    tokens = torch.randint(49408, (batch, 77), device="cuda")
    draws = torch.rand(12, 2, batch, device="cuda")

    def forward_backward(images: Tensor, tokens: Tensor, draws: Tensor) -> Tensor:
        with torch.autocast("cuda", torch.bfloat16):
            image, text, scale = model(images, tokens, drop_path_uniform=draws)
        loss = clip_loss(image, text, scale)
        loss.backward()
        return loss.detach()

    logit_scale = model.logit_scale
    graph: RecordedPass | None = None
    if recorded:
        model.use_text_stream(torch.cuda.Stream())

    def step() -> Tensor:
        nonlocal graph
        if graph is None:
            first = logit_scale.grad is None
            optimizer.zero_grad(set_to_none=True)
            if recorded and not first:  # the first step compiles whatever there is to compile
                graph = RecordedPass(forward_backward, images.clone(), tokens.clone(), draws.clone())
        loss = graph(images, tokens, draws) if graph else forward_backward(images, tokens, draws)
        optim.guarded_step(optimizer, None, 1.0, logit_scale)
        return loss

    return step


def peer_step(name: str, batch: int) -> Callable[[], Tensor]:
    import open_clip

    model = open_clip.create_model(name).cuda()
    compiled = torch.compile(model)
    criterion = open_clip.ClipLoss()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.98), weight_decay=0.2, fused=True)
    images = torch.randn(batch, 3, 224, 224, device="cuda")
    tokens = torch.randint(49408, (batch, 77), device="cuda")

    def step() -> Tensor:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cuda", torch.bfloat16):
            image, text, scale = compiled(images, tokens)
            loss: Tensor = criterion(image, text, scale)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.detach()

    return step


def measure(title: str, batch: int, step: Callable[[], Tensor], profile: bool) -> float:
    start = time.perf_counter()
    step()
    torch.cuda.synchronize()
    first = time.perf_counter() - start
    torch.cuda.reset_peak_memory_stats()  # before the second step, which records
    for _ in range(WARM_UP):
        step()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(STEPS + 1)]
    events[0].record()
    start = time.perf_counter()
    for event in events[1:]:
        loss = step()
        event.record()
    host = (time.perf_counter() - start) / STEPS * 1000
    torch.cuda.synchronize()
    ms = statistics.median(a.elapsed_time(b) for a, b in itertools.pairwise(events))
    memory = torch.cuda.max_memory_allocated() / 2**30
    print(
        f"{title:30s} batch {batch} {ms:7.1f} ms {batch / ms * 1000:7.0f} images/s {memory:5.1f} GiB"
        f"  host {host:.0f} ms  first step {first:.1f} s  loss {loss.item():.3f}",
        flush=True,
    )
    if profile:
        show_kernels(step)
    return batch / ms * 1000


def show_kernels(step: Callable[[], Tensor]) -> None:
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as recording

    with recording(activities=[ProfilerActivity.CUDA]) as trace:
        for _ in range(3):
            step()
        torch.cuda.synchronize()
    rows = sorted(trace.key_averages(), key=lambda row: -row.self_device_time_total)
    for row in rows[:45]:
        print(f"  {row.self_device_time_total / 3000:8.3f} ms {row.count // 3:5d}x  {row.key[:90]}")
    total = sum(row.self_device_time_total for row in rows) / 3000
    print(f"  {total:8.3f} ms in all, {sum(row.count for row in rows) // 3} launches", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("sizes", nargs="*", default=list(SIZES))
    for option in ("--peer", "--only-peer", "--eager", "--plain", "--profile"):
        parser.add_argument(option, action="store_true")
    given = parser.parse_args()
    if not torch.cuda.is_available():
        print("bench_step needs an NVIDIA GPU")
        return
    for size in given.sizes:
        own, peer, batch = SIZES[size]
        if given.only_peer:
            measure(f"open_clip {peer}, compiled", batch, peer_step(peer, batch), given.profile)
            continue
        speed = measure(own, batch, own_step(own, batch, kernels=True, recorded=True), given.profile)
        if given.eager:
            measure(f"{own}, no CUDA graph", batch, own_step(own, batch, kernels=True, recorded=False), False)
        if given.plain:
            measure(f"{own}, no kernels", batch, own_step(own, batch, kernels=False, recorded=False), given.profile)
        if given.peer:
            other = measure(f"open_clip {peer}, compiled", batch, peer_step(peer, batch), given.profile)
            print(f"{own} / {peer}: {speed / other:.2f}x")


if __name__ == "__main__":
    main()
