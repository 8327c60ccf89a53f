"""The parts of a training run, each measured alone: the step, WKV6, the loss and the loader.

>>> measure_step(setup).ms

Legend: B pairs a step, T tokens, H heads, N channels of a head, C channels of an embedding, S image side.
"""

import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from rwkvclip_cli.bench.timing import median_ms
from rwkvclip_cli.console import UnableError
from rwkvclip_cli.data.loader import LoaderSpec, TrainLoader
from rwkvclip_cli.data.packed import PackedSet
from rwkvclip_cli.model import RwkvClip, build_model
from rwkvclip_cli.model.presets import ModelArguments
from rwkvclip_cli.model.wkv6 import Implementation, implementations
from rwkvclip_cli.train import optim
from rwkvclip_cli.train.losses import LOSSES, suggested_chunk
from rwkvclip_cli.train.metrics import flops_per_pair, peak_flops, peak_memory_gib
from rwkvclip_cli.train.precision import AUTOCAST, autocast
from rwkvclip_cli.train.recorded import RecordedPass

LEARNING_RATE = 1e-4
DECAYS = (-6.0, -1.0)  # raw w, as the models start with
CALLS_A_TIMING = 5  # of WKV6 and the loss on a GPU, which take less than a millisecond
LOADER_WARM_UP = 2  # batches


@dataclass(frozen=True)
class Setup:
    """What is measured: the model, its batch and how it is computed. `text_tokens`: T of a caption."""

    model_config: dict[str, Any]
    batch_size: int
    text_tokens: int
    precision: str
    kernels: bool
    recorded: bool
    checkpointing: bool
    device: torch.device
    steps: int

    @property
    def arguments(self) -> ModelArguments:
        """The model's arguments, checked."""
        return ModelArguments.read(self.model_config)

    @property
    def compute_dtype(self) -> torch.dtype:
        """What matrix products read."""
        return AUTOCAST.get(self.precision, torch.float32)

    @property
    def calls(self) -> int:
        """Calls a timing of what is short."""
        return CALLS_A_TIMING if self.device.type == "cuda" else 1


@dataclass(frozen=True)
class StepFigures:
    """A whole step. `ms` is a median; `mfu` None where the device's peak is not known; `first_s` compiles kernels."""

    ms: float
    images_per_s: float
    peak_memory_gib: float
    mfu: float | None
    first_s: float
    parameters: int


@dataclass(frozen=True)
class Wkv6Figures:
    """One implementation at the shape (B, T, H, N) of a tower of `layers` layers; None where memory did not suffice."""

    tower: str
    shape: tuple[int, int, int, int]
    layers: int
    implementation: str
    in_use: bool
    forward_ms: float | None
    backward_ms: float | None


@dataclass(frozen=True)
class LossFigures:
    """Loss and its gradients from embeddings (B, C). `chunk_size` None: over the full matrix of scores."""

    ms: float
    chunk_size: int | None


@dataclass(frozen=True)
class LoaderFigures:
    """DALI alone. `record_bytes`: of an average record; `data` None: scenes drawn for the purpose."""

    images_per_s: float
    threads: int
    record_bytes: float
    data: str | None


def measure_step(setup: Setup) -> StepFigures:
    """Time forward, loss, backward, clipping and optimizer on inputs that lie on the device already.

    Raises UnableError where the device's memory does not hold a step.
    """
    torch.manual_seed(0)
    model = build_model(setup.model_config | {"with_cp": setup.checkpointing}).to(setup.device)
    model.use_kernels(setup.kernels)
    step = _training_step(setup, model)
    try:
        started_s = time.perf_counter()
        step()
        _wait(setup.device)
        first_s = time.perf_counter() - started_s
        if setup.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(setup.device)
        ms = median_ms(step, setup.device, repeats=setup.steps)
    except torch.OutOfMemoryError as error:
        raise UnableError(
            f"a step of {setup.batch_size:,} pairs does not fit into the memory of this GPU",
            hint=f"--batch-size {max(setup.batch_size // 2, 1)}, or --grad-checkpointing",
        ) from error
    images_per_s = setup.batch_size / ms * 1e3
    image_tokens = _shapes(setup)["image"][0][1]
    peak = peak_flops(setup.device)
    flops = flops_per_pair(model, image_tokens=image_tokens, text_tokens=setup.text_tokens)
    return StepFigures(
        ms=ms,
        images_per_s=images_per_s,
        peak_memory_gib=peak_memory_gib(setup.device),
        mfu=images_per_s * flops / peak if peak else None,
        first_s=first_s,
        parameters=sum(parameter.numel() for parameter in model.parameters()),
    )


def _training_step(setup: Setup, model: RwkvClip) -> Callable[[], None]:
    """One update of the model, as the trainer makes it on one rank."""
    config = setup.model_config
    optimizer = optim.build_optimizer(model, weight_decay=0.2, betas=(0.9, 0.98))
    optim.set_learning_rate(optimizer, LEARNING_RATE)
    scaler = torch.amp.GradScaler(setup.device.type) if setup.precision == "fp16" else None
    side = config["input_size"]
    images = torch.randn(setup.batch_size, 3, side, side, device=setup.device)
    tokens = torch.randint(config["vocab_size"], (setup.batch_size, setup.text_tokens), device=setup.device)
    draws = torch.rand(config["image_depth"], 2, setup.batch_size, device=setup.device)
    chunk = suggested_chunk(setup.batch_size, setup.batch_size)
    logit_scale: nn.Parameter = model.logit_scale

    def forward_backward(images: Tensor, tokens: Tensor, draws: Tensor) -> Tensor:
        with autocast(setup.precision, setup.device):
            image, text, scale = model(images, tokens, drop_path_uniform=draws)
        loss = LOSSES["clip"](image, text, scale, chunk_size=chunk, kernels=setup.kernels)
        (scaler.scale(loss) if scaler else loss).backward()
        return loss.detach()

    recorded: RecordedPass | None = None
    if setup.recorded:
        model.use_text_stream(torch.cuda.Stream(setup.device))

    def step() -> None:
        nonlocal recorded
        if recorded is None:
            first = logit_scale.grad is None
            optimizer.zero_grad(set_to_none=True)
            if setup.recorded and not first:  # the first step compiles whatever there is to compile
                recorded = RecordedPass(forward_backward, images.clone(), tokens.clone(), draws.clone())
        if recorded:
            recorded(images, tokens, draws)
        else:
            forward_backward(images, tokens, draws)
        optim.guarded_step(optimizer, scaler, 1.0, logit_scale)

    return step


def measure_wkv6(setup: Setup) -> list[Wkv6Figures]:
    """Time every implementation that runs here, at both towers' shapes; the first of a tower is the one in use."""
    found = []
    for tower, (shape, layers) in _shapes(setup).items():
        leaves, grad_y = _wkv6_inputs(setup, shape)
        rows = implementations(leaves[0])
        in_use = implementations(leaves[0], setup.kernels)[0]
        for row in sorted(rows, key=lambda row: row is not in_use):
            forward_ms, backward_ms = _wkv6_ms(setup, row, leaves, grad_y)
            found.append(Wkv6Figures(tower, shape, layers, row.name, row is in_use, forward_ms, backward_ms))
    return found


def _shapes(setup: Setup) -> dict[str, tuple[tuple[int, int, int, int], int]]:
    """For each tower (B, T, H, N) and its number of layers."""
    arguments = setup.arguments
    side = -(-arguments.input_size // arguments.image_patch_size)
    patches = side * side + int(arguments.image_with_cls_token)
    heads, text_heads = arguments.image_num_heads, arguments.n_embd // arguments.head_size
    image = (setup.batch_size, patches, heads, arguments.image_embed_dims // heads)
    text = (setup.batch_size, setup.text_tokens, text_heads, arguments.head_size)
    return {"image": (image, arguments.image_depth), "text": (text, arguments.n_layer)}


def _wkv6_inputs(setup: Setup, shape: tuple[int, int, int, int]) -> tuple[list[Tensor], Tensor]:
    """r, k, v, w, u that need gradients, and a gradient for the result."""
    draw = torch.Generator(setup.device).manual_seed(0)
    options: dict[str, Any] = {"device": setup.device, "dtype": setup.compute_dtype}
    r, k, v, grad_y = (torch.randn(shape, generator=draw, **options) for _ in range(4))
    w = torch.empty(shape, **options).uniform_(*DECAYS, generator=draw)
    u = torch.randn(shape[2:], generator=draw, device=setup.device)
    return [x.requires_grad_() for x in (r, k, v, w, u)], grad_y


def _wkv6_ms(
    setup: Setup, row: Implementation, leaves: list[Tensor], grad_y: Tensor
) -> tuple[float, float] | tuple[None, None]:
    """Milliseconds forward and backward, or None twice where memory does not suffice."""
    try:
        forward_ms = median_ms(lambda: row.function(*leaves), setup.device, repeats=setup.steps, calls=setup.calls)
        y = row.function(*leaves)
        backward_ms = median_ms(
            lambda: torch.autograd.grad(y, leaves, grad_y, retain_graph=True),
            setup.device,
            repeats=setup.steps,
            calls=setup.calls,
        )
    except torch.OutOfMemoryError:
        return None, None
    return forward_ms, backward_ms


def measure_loss(setup: Setup) -> LossFigures:
    """Time the loss of one rank with the gradients of both embeddings and the scale."""
    draw = torch.Generator(setup.device).manual_seed(0)
    shape = (setup.batch_size, setup.arguments.n_embd)
    image, text = (torch.randn(shape, device=setup.device, generator=draw) for _ in range(2))
    leaves = [x.requires_grad_() for x in (image, text, torch.tensor(14.0, device=setup.device))]
    chunk = suggested_chunk(setup.batch_size, setup.batch_size)

    def loss_and_gradients() -> None:
        torch.autograd.grad(LOSSES["clip"](*leaves, chunk_size=chunk, kernels=setup.kernels), leaves)

    ms = median_ms(loss_and_gradients, setup.device, repeats=setup.steps, calls=setup.calls)
    return LossFigures(ms, chunk)


def measure_loader(packed: PackedSet, spec: LoaderSpec, steps: int, data: str | None) -> LoaderFigures:
    """Take `steps` batches as fast as DALI makes them, behind two that are not counted; `data`: the user's name for it.

    The set has to hold that many batches.
    """
    device = torch.device("cpu") if spec.device_id is None else torch.device("cuda", spec.device_id)
    with closing(TrainLoader(packed, spec, epoch=0)) as loader:
        batches = loader.batches()
        for _ in range(LOADER_WARM_UP):
            next(batches)
        _wait(device)
        started_s = time.perf_counter()
        for _ in range(steps):
            next(batches)
        _wait(device)
        taken_s = time.perf_counter() - started_s
    record_bytes = packed.size_bytes / packed.count
    return LoaderFigures(steps * spec.batch_size / taken_s, spec.threads, record_bytes, data)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
