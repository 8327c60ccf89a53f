"""AdamW as CLIP trains with it: which parameters decay, the learning rate of a step, one guarded update.

>>> learning_rate(0, total_steps=100, warmup_steps=10, peak=1e-3)
0.0001
"""

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

LOGIT_SCALE_MAX = math.log(100)  # Radford et al. 2021, section 2.5: logits are not scaled by more than 100
NO_DECAY_NAMES = ("time_", "spatial_mix_", "pos_embed", "cls", "logit_scale")


def learning_rate(step: int, *, total_steps: int, warmup_steps: int, peak: float) -> float:
    """Learning rate of step `step` (from 0): a line up to `peak` at the end of warm-up, then a cosine to zero.

    A pure function of the step, so that a resumed run cannot drift; steps past the end have rate 0.
    """
    if step >= total_steps:
        return 0.0
    if step < warmup_steps:
        return peak * (step + 1) / warmup_steps
    progress = (step - warmup_steps) / (total_steps - warmup_steps)
    return peak * 0.5 * (1 + math.cos(math.pi * progress))


def decays(name: str, parameter: Tensor) -> bool:
    """Whether weight decay applies: to matrices, not to norms, biases, mixes, decays, positions or the logit scale."""
    parts = name.split(".")
    return parameter.ndim >= 2 and not any(part.startswith(NO_DECAY_NAMES) for part in parts)


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """The trainable parameters in two groups, with and without decay; each in the model's own order."""
    named = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    return [
        {"params": [p for name, p in named if decays(name, p)], "weight_decay": weight_decay},
        {"params": [p for name, p in named if not decays(name, p)], "weight_decay": 0.0},
    ]


def build_optimizer(model: nn.Module, *, weight_decay: float, betas: tuple[float, float]) -> torch.optim.AdamW:
    """AdamW, fused: one kernel a group, and an update that can be skipped without asking the host."""
    groups = [group for group in parameter_groups(model, weight_decay) if group["params"]]
    return torch.optim.AdamW(groups, lr=0.0, betas=betas, fused=True)


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Give every group the learning rate of this step."""
    for group in optimizer.param_groups:
        group["lr"] = rate


def optimizer_parameters(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    """Every parameter that the optimizer updates."""
    for group in optimizer.param_groups:
        yield from group["params"]


def guarded_step(
    optimizer: torch.optim.AdamW, scaler: "torch.amp.GradScaler | None", grad_clip: float, logit_scale: nn.Parameter
) -> tuple[Tensor, Tensor]:
    """Clip, update unless a gradient is not finite, clamp the logit scale; no host read on the way.

    Gradients are already summed over ranks, so every rank sees the same norm and all skip together.

    Returns:
        grad_norm: (), float32, before clipping.
        skipped: (), float32, 1 where the update was left out.
    """
    if scaler is not None:
        scaler.unscale_(optimizer)
    parameters = list(optimizer_parameters(optimizer))
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    grad_norm = nn.utils.get_total_norm(gradients)
    skipped = (~torch.isfinite(grad_norm)).to(torch.float32)
    if grad_clip > 0:
        nn.utils.clip_grads_with_norm_(parameters, grad_clip, grad_norm)
    if scaler is not None:
        scaler.step(optimizer)
        scaler.update()
    else:
        # The protocol by which GradScaler asks fused optimizers to skip; without a scaler it is ours to use.
        optimizer.grad_scale = None  # type: ignore[attr-defined]
        optimizer.found_inf = skipped  # type: ignore[attr-defined]
        optimizer.step()
    with torch.no_grad():
        logit_scale.clamp_(0, LOGIT_SCALE_MAX)
    return grad_norm, skipped
