"""The training loop: take a batch, step, log, save, stop. Each rank of a run calls `train` once.

>>> train(TrainConfig(output="run", train_data="pairs.rec", model="tiny", batch_size=64, epochs=4))
"""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import closing, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rwkvclip_cli import console
from rwkvclip_cli.config import TrainConfig
from rwkvclip_cli.console import RwkvClipError
from rwkvclip_cli.data.loader import Batch, EpochLoaders, TrainLoader
from rwkvclip_cli.train import checkpoint, optim
from rwkvclip_cli.train.compilation import CompiledKernels, counting
from rwkvclip_cli.train.distributed import StopVote, process_group, warm_up
from rwkvclip_cli.train.losses import LOSSES, suggested_chunk
from rwkvclip_cli.train.metrics import Metrics, Stopwatch, flops_per_pair, peak_flops, peak_memory_gib
from rwkvclip_cli.train.precision import autocast
from rwkvclip_cli.train.recorded import RecordedPass
from rwkvclip_cli.train.run import Position, Run, TrainResult, agree_on_checkpoint, check_form, restore, save, start

Pass = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""From images, tokens and draws of stochastic depth to the loss; it leaves gradients in the parameters."""


def train(config: TrainConfig) -> TrainResult:
    """Train RWKV-CLIP as one rank of as many as the environment says (RANK, LOCAL_RANK, WORLD_SIZE).

    Every rank returns the same result. Raises RwkvClipError for what a user can mend: options that contradict the
    data, a checkpoint of another run, a full disk.
    """
    began_s = time.monotonic()
    if config.deterministic:
        # cuBLAS reads this when it first starts and is not reproducible without it.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    with process_group(config.timeout) as ranks:
        found = agree_on_checkpoint(config)
        saved = None
        if found:
            with checkpoint.reading(found):
                saved = checkpoint.load(found)
                check_form(saved.state)
        run = start(config, ranks, saved)
        with checkpoint.reading(found) if found else nullcontext():
            position, loader_state = restore(run, saved)
        if position.step >= run.total_steps:
            console.say(f"{run.output}: finished already, {position.step:,} of {run.total_steps:,} steps are done")
            return TrainResult(position.step, run.total_steps, True, found)
        if found:
            console.say(f"resuming from {found}, behind step {position.step:,} of {run.total_steps:,}")
        with counting(ranks.device, began_s) as kernels:
            forward_backward = _forward_backward(run)
            kernels.all_are_there()
            return _loop(run, position, loader_state, kernels, forward_backward)


def _loop(
    run: Run, position: Position, loader_state: bytes | None, kernels: CompiledKernels, forward_backward: Pass
) -> TrainResult:
    config = run.config
    metrics = Metrics(run.output, first_step=position.step + 1) if run.ranks.is_first else None
    stopwatch = Stopwatch(position.seconds)
    skipped_total = torch.tensor(float(position.skipped), device=run.ranks.device)
    skipped_in_a_row = torch.zeros((), device=run.ranks.device)
    flops = flops_per_pair(run.model, image_tokens=run.image_tokens, text_tokens=run.packed.context_length)
    saved: Path | None = None
    stopping = False
    with (
        closing(metrics) if metrics else nullcontext(),
        StopVote(run.ranks, config.timeout).listening() as vote,
        console.progress(run.total_steps, "training", "steps", done=position.step) as bar,
    ):
        for loader, batch in _batches(run, position, loader_state, stopwatch):
            loss, grad_norm, skipped = _step(run, forward_backward, batch, position.step)
            skipped_total += skipped
            skipped_in_a_row = (skipped_in_a_row + 1) * skipped
            if kernels.started_in_s is None:
                kernels.first_step_is_done(run.ranks.device)
            stopwatch.count_step()
            position.advance(run.steps_per_epoch)
            finished = position.step == run.total_steps
            note = ""
            if position.step % config.log_every == 0 or finished:
                _check_skipped(run, position, skipped_in_a_row)
                values = _read_metrics(run, position, loss, grad_norm, skipped_total, stopwatch, flops)
                note = f"loss {values['loss']:.4f}  {values['images_per_s']:,.0f} images/s"
                if metrics:
                    metrics.write(values)
            bar.advance(1, note)
            stopping = vote.agreed() and not finished
            if stopping or _save_is_due(config, position):
                position.skipped, position.seconds = int(skipped_total.item()), stopwatch.total_s()
                saved = save(run, position, loader.state() if position.step_in_epoch else None)
            if stopping:
                console.say(f"stopped on request behind step {position.step:,}; everything is in {saved}")
                break
        vote.finish()
    return TrainResult(position.step, run.total_steps, not stopping, saved)


def _check_skipped(run: Run, position: Position, in_a_row: Tensor) -> None:
    """Stop a run that learns nothing any more; called where the host waits for the device anyway."""
    count = int(in_a_row.item())
    if count >= run.config.max_skipped:
        raise RwkvClipError(
            f"the last {count} steps up to {position.step:,} had no finite gradients and were left out",
            hint="a lower --lr, or --resume an earlier checkpoint; --max-skipped sets the limit",
        )


def _batches(
    run: Run, position: Position, loader_state: bytes | None, stopwatch: Stopwatch
) -> Iterator[tuple[TrainLoader, Batch]]:
    """The batches from `position` to the end of the run, each with the loader of its epoch."""
    with closing(EpochLoaders(run.packed, run.spec, epochs=run.config.epochs)) as loaders:
        for epoch in range(position.epoch, run.config.epochs):
            done = position.step_in_epoch
            with stopwatch.waiting():
                loader = loaders.open(epoch, loader_state)
            loader_state = None
            with closing(loader):
                batches = loader.batches(done)
                for step in range(done, len(loader)):
                    loaders.open_ahead(epoch, len(loader) - step)
                    with stopwatch.waiting():
                        batch = next(batches)
                    yield loader, batch


def _step(run: Run, forward_backward: Pass, batch: Batch, step: int) -> tuple[Tensor, Tensor, Tensor]:
    """One update. Returns this rank's loss, the gradient norm and whether the update was skipped, all (), on device."""
    optim.set_learning_rate(run.optimizer, run.learning_rate(step))
    loss = forward_backward(batch.images, batch.tokens, _drop_path_uniform(run, step))
    grad_norm, skipped = optim.guarded_step(run.optimizer, run.scaler, run.config.grad_clip, run.model.logit_scale)
    return loss, grad_norm, skipped


def _forward_backward(run: Run) -> Pass:
    """What leaves the gradients of a batch in the parameters and returns its loss, warmed up."""

    def passes(images: Tensor, tokens: Tensor, drop_path_uniform: Tensor | None) -> Tensor:
        loss = _loss(run, images, tokens, drop_path_uniform)
        (run.scaler.scale(loss) if run.scaler else loss).backward()
        return loss.detach()

    def passes_anew(images: Tensor, tokens: Tensor, drop_path_uniform: Tensor | None) -> Tensor:
        run.optimizer.zero_grad(set_to_none=True)
        return passes(images, tokens, drop_path_uniform)

    warm_up(run.wrapped, lambda: _loss(run, *_made_up_batch(run)))
    if not run.recorded:
        return passes_anew
    if run.scaler:
        # Makes the scale, which lies on the device and which the recording only reads.
        run.scaler.scale(torch.zeros((), device=run.ranks.device))
    return RecordedPass(passes, *_made_up_batch(run))


def _loss(run: Run, images: Tensor, tokens: Tensor, drop_path_uniform: Tensor | None) -> Tensor:
    with autocast(run.config.precision, run.ranks.device):
        image, text, logit_scale = run.wrapped(images, tokens, drop_path_uniform=drop_path_uniform)
    chunk = suggested_chunk(len(image), run.global_batch)
    return LOSSES["clip"](image, text, logit_scale, chunk_size=chunk, kernels=run.kernels)


def _drop_path_uniform(run: Run, step: int) -> Tensor | None:
    """Uniforms (layers, 2, B) that decide stochastic depth, from (seed, step, position in the global batch, layer).

    Every rank draws for the whole batch and takes its part, so the number of ranks changes no draw.
    """
    if not run.model_config["drop_path_rate"]:
        return None
    generator = torch.Generator().manual_seed(run.config.seed * 0x9E3779B1 + step)
    uniform = torch.rand(run.model_config["image_depth"], 2, run.global_batch, generator=generator)
    first = run.ranks.rank * run.config.batch_size
    own = uniform[:, :, first : first + run.config.batch_size].contiguous()
    if run.ranks.device.type == "cuda":
        own = own.pin_memory()  # from memory of any other kind a copy waits until the device has done what it was given
    return own.to(run.ranks.device, non_blocking=True)


def _made_up_batch(run: Run) -> tuple[Tensor, Tensor, Tensor | None]:
    """Images, tokens and draws of the run's own sizes."""
    generator = torch.Generator().manual_seed(0)
    size, pairs = run.spec.image_size, run.config.batch_size
    images = torch.randn(pairs, 3, size, size, generator=generator)
    tokens = torch.randint(run.model_config["vocab_size"], (pairs, run.packed.context_length), generator=generator)
    device = run.ranks.device
    return images.to(device), tokens.to(device), _drop_path_uniform(run, 0)


def _save_is_due(config: TrainConfig, position: Position) -> bool:
    """Every so many steps where asked, else at the end of each epoch; always at the end of the run."""
    if position.epoch == config.epochs:
        return True
    if config.save_every_steps is None:
        return position.step_in_epoch == 0
    return position.step % config.save_every_steps == 0


def _read_metrics(
    run: Run,
    position: Position,
    loss: Tensor,
    grad_norm: Tensor,
    skipped: Tensor,
    stopwatch: Stopwatch,
    flops: float,
) -> dict[str, Any]:
    """The log line of a step. The one place where the host waits for the device, every --log-every steps."""
    mean_loss = loss.clone()
    dist.all_reduce(mean_loss)
    mean_loss /= run.ranks.world_size
    logit_scale: Tensor = run.model.logit_scale.detach().exp()
    numbers = torch.stack([mean_loss.float(), grad_norm.float(), logit_scale.float(), skipped]).tolist()
    steps_per_s, waiting = stopwatch.lap()
    images_per_s = steps_per_s * run.global_batch
    per_gpu = images_per_s / run.ranks.world_size
    peak = peak_flops(run.ranks.device)
    return {
        "step": position.step,
        "samples": position.step * run.global_batch,
        "loss": numbers[0],
        "lr": run.learning_rate(position.step - 1),
        "grad_norm": numbers[1],
        "logit_scale": numbers[2],
        "images_per_s": images_per_s,
        "images_per_s_per_gpu": per_gpu,
        "data_wait_fraction": waiting,
        "mfu": per_gpu * flops / peak if peak else None,
        "peak_memory_gib": peak_memory_gib(run.ranks.device),
        "skipped": int(numbers[3]),
        "seconds": stopwatch.total_s(),
    }
