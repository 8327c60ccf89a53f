"""A run as it stands on one rank: what it is made of, where it is, and how it is saved and taken up again.

>>> run = start(config, ranks, saved=None)
"""

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from rwkvclip_cli import __version__, console
from rwkvclip_cli.config import TrainConfig
from rwkvclip_cli.console import RwkvClipError, UsageError, write_hint
from rwkvclip_cli.data.loader import SHUFFLE_BUFFER, LoaderSpec, loader_threads, steps_per_epoch
from rwkvclip_cli.data.packed import PackedSet, open_packed
from rwkvclip_cli.model import RwkvClip, build_model, load_reference_state, preset, read_model_config
from rwkvclip_cli.train import checkpoint, optim
from rwkvclip_cli.train.checkpoint import Checkpoint
from rwkvclip_cli.train.compilation import compiles, records
from rwkvclip_cli.train.distributed import Ranks, synchronize_batch_norms, wrap
from rwkvclip_cli.train.metrics import METRICS_FILE
from rwkvclip_cli.train.precision import set_matmul_precision

HIGH_LEARNING_RATE = 1e-2
VOCAB_SIZE = 49_408  # of the tokenizer that pack uses


@dataclass(frozen=True)
class TrainResult:
    """How a run ended: `finished` is false where it was asked to stop, with everything saved."""

    step: int
    total_steps: int
    finished: bool
    checkpoint: Path | None


@dataclass
class Position:
    """Where a run stands: steps done in all and in the epoch under way, updates left out, seconds spent."""

    step: int = 0
    epoch: int = 0
    step_in_epoch: int = 0
    skipped: int = 0
    seconds: float = 0.0

    def advance(self, steps_per_epoch: int) -> None:
        """Count one step."""
        self.step += 1
        self.step_in_epoch += 1
        if self.step_in_epoch == steps_per_epoch:
            self.epoch, self.step_in_epoch = self.epoch + 1, 0


@dataclass(frozen=True)
class Run:
    """What lasts as long as the run: its options, data, model and optimizer on this rank."""

    config: TrainConfig
    ranks: Ranks
    packed: PackedSet
    spec: LoaderSpec
    model: RwkvClip
    wrapped: nn.Module
    """The model under DistributedDataParallel, or itself where the step of a single rank is recorded."""
    optimizer: torch.optim.AdamW
    scaler: torch.amp.GradScaler | None
    model_config: dict[str, Any]
    kernels: bool
    """Whether Triton's kernels may run."""
    recorded: bool
    """Whether a step's passes are recorded as a CUDA graph."""

    @property
    def image_tokens(self) -> int:
        """Positions of the image tower: patches, and the class token where there is one."""
        config = self.model_config
        side = -(-config["input_size"] // config["image_patch_size"])
        return int(side * side + bool(config["image_with_cls_token"]))

    @property
    def output(self) -> Path:
        """The run's folder."""
        return Path(self.config.output)

    @property
    def global_batch(self) -> int:
        """Pairs a step over all ranks."""
        return self.config.batch_size * self.ranks.world_size

    @property
    def steps_per_epoch(self) -> int:
        """Steps of every epoch, the same on every rank."""
        return steps_per_epoch(self.packed, self.spec)

    @property
    def total_steps(self) -> int:
        """Steps of the whole run."""
        return self.steps_per_epoch * self.config.epochs

    def learning_rate(self, step: int) -> float:
        """Learning rate of step `step`, from 0."""
        warmup_steps = round(self.config.warmup * self.total_steps)
        return optim.learning_rate(step, total_steps=self.total_steps, warmup_steps=warmup_steps, peak=self.config.lr)


def agree_on_checkpoint(config: TrainConfig) -> Path | None:
    """The checkpoint to resume from: rank 0 makes the run's folder and looks, all ranks take its word."""
    answer: list[Any] = [None, None]
    if dist.get_rank() == 0:
        try:
            answer[0] = _find_checkpoint(config)
        except RwkvClipError as error:
            answer[1] = error
    dist.broadcast_object_list(answer)
    if answer[1] is not None:
        raise answer[1]
    found: Path | None = answer[0]
    return found


def _find_checkpoint(config: TrainConfig) -> Path | None:
    output = Path(config.output)
    try:
        output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"--output {output}: {error.strerror}", write_hint(error, output.parent)) from error
    if config.resume == "auto":
        return checkpoint.newest(output)
    if config.resume == "none":
        _leave_behind([*checkpoint.list_checkpoints(output), *output.glob(METRICS_FILE)])
        return None
    found = checkpoint.resolve(config.resume)
    if not found.is_dir():
        raise UsageError(
            f"--resume {config.resume}: weights alone do not say where a run was", hint="--resume CHECKPOINT_FOLDER"
        )
    own = checkpoint.list_checkpoints(output)
    place = [path.resolve() for path in own]
    if found.resolve() in place:
        # Of two branches of one run, `auto` could not tell which to go on with.
        _leave_behind(own[place.index(found.resolve()) + 1 :])
    return found


def _leave_behind(paths: list[Path]) -> None:
    for path, renamed in zip(paths, checkpoint.set_aside(paths), strict=True):
        console.say(f"{path} is now {renamed.name}: this run does not go on from it")


def start(config: TrainConfig, ranks: Ranks, saved: Checkpoint | None) -> Run:
    """Build everything that the run needs on this rank, from scratch or from a checkpoint."""
    packed = open_packed(config.train_data)
    model_config = read_model_config(Path(config.model_config)) if config.model_config else preset(config.model)
    if config.drop_path_rate is not None:
        model_config["drop_path_rate"] = config.drop_path_rate
    kernels = compiles(config.compile, ranks.device)
    recorded = records(config.cuda_graph, kernels, ranks.world_size)
    spec = LoaderSpec(
        batch_size=config.batch_size,
        image_size=model_config["input_size"],
        rank=ranks.rank,
        world_size=ranks.world_size,
        device_id=ranks.local_rank if ranks.device.type == "cuda" else None,
        threads=loader_threads(config.workers, ranks.local_world_size),
        seed=config.seed,
        num_samples=config.train_num_samples,
        vocab_size=model_config["vocab_size"],
    )
    steps_per_epoch(packed, spec)
    check_fit(packed, model_config)
    if saved:
        _check_same_run(_identity(config, ranks, packed, model_config), saved.state, config.epochs)
    _advise(config, packed, spec)
    set_matmul_precision(config.precision)
    torch.manual_seed(config.seed)
    model = build_model(model_config | {"with_cp": config.grad_checkpointing or model_config["with_cp"]})
    model.use_kernels(kernels)
    if saved:
        load_reference_state(model, saved.model)
    model = model.to(ranks.device)
    wrapped: nn.Module
    if recorded:
        # Nothing is to be summed, and the wrapper's own work between the passes cannot be recorded.
        wrapped, converted = synchronize_batch_norms(model)
        model.use_text_stream(torch.cuda.Stream(ranks.device))
    else:
        wrapped, converted = wrap(model, ranks)
    optimizer = optim.build_optimizer(model, weight_decay=config.weight_decay, betas=(config.beta1, config.beta2))
    scaler = torch.amp.GradScaler(ranks.device.type) if config.precision == "fp16" else None
    parameters = sum(parameter.numel() for parameter in model.parameters())
    console.say(
        f"{parameters:,} parameters, {console.counted(ranks.world_size, 'rank')} x "
        f"{console.counted(config.batch_size, 'pair')} over {dist.get_backend()}, "
        f"{config.precision} on {device_name(ranks.device)}; {converted} BatchNorm layers synchronized"
    )
    return Run(config, ranks, packed, spec, model, wrapped, optimizer, scaler, model_config, kernels, recorded)


def device_name(device: torch.device) -> str:
    """The device in words."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"


def _advise(config: TrainConfig, packed: PackedSet, spec: LoaderSpec) -> None:
    if config.lr > HIGH_LEARNING_RATE:
        console.warn(f"--lr {config.lr} is high for AdamW; the published recipe uses 0.001")
    in_order = not packed.manifest.get("shuffled", False)
    if in_order and packed.count > SHUFFLE_BUFFER * spec.world_size:
        console.warn(
            f"{packed.rec} was packed in its sources' order, and the loader mixes {SHUFFLE_BUFFER:,} neighbours "
            "at a time only: neighbours that are alike will meet in one batch (pack --shuffle mixes the whole set)"
        )


def check_fit(packed: PackedSet, model_config: dict[str, Any]) -> None:
    """Refuse data that the model cannot read, before a rank fails in the middle of a batch."""
    if packed.context_length > model_config["ctx_len"]:
        raise UsageError(
            f"{packed.rec} holds captions of {packed.context_length} tokens; the model's ctx_len is "
            f"{model_config['ctx_len']}",
            hint=f"ctx_len {packed.context_length} in --model-config, or pack --context-length "
            f"{model_config['ctx_len']}",
        )
    if "tokenizer" in packed.manifest and model_config["vocab_size"] < VOCAB_SIZE:
        raise UsageError(
            f"{packed.rec} holds token ids up to {VOCAB_SIZE - 1}; the model's vocab_size is "
            f"{model_config['vocab_size']}",
            hint=f"vocab_size {VOCAB_SIZE} in --model-config",
        )
    if model_config["dropout"]:
        # Its draws would come from each rank's generator, and so depend on the number of ranks.
        raise UsageError(
            f"training with dropout {model_config['dropout']} is not supported; the published recipe has 0",
            hint="dropout 0 in --model-config",
        )


def _identity(config: TrainConfig, ranks: Ranks, packed: PackedSet, model_config: dict[str, Any]) -> dict[str, Any]:
    """What has to be equal for a resumed run to be the same run."""
    return {
        "world_size": ranks.world_size,
        "batch_size": config.batch_size,
        "seed": config.seed,
        "train_num_samples": config.train_num_samples,
        "precision": config.precision,
        "records": packed.count,
        "content_hash": packed.content_hash,
        # What the backward pass recomputes changes no result.
        "model_config": model_config | {"with_cp": False},
    }


def check_form(state: dict[str, Any]) -> None:
    """Raise ValueError, or what Python raises, for a state.json that says less than `save` writes."""
    names = ("world_size", "batch_size", "seed", "train_num_samples", "precision", "records", "content_hash")
    missing = [name for name in (*names, "model_config") if name not in state["identity"]]
    if missing or not isinstance(state["identity"]["model_config"], dict) or not isinstance(state["epochs"], int):
        raise ValueError(f"no {', '.join(missing) or 'model_config or epochs'} in its identity")


def _check_same_run(identity: dict[str, Any], state: dict[str, Any], epochs: int) -> None:
    for name, now in identity.items():
        before = state["identity"][name]
        if before == now:
            continue
        if isinstance(now, dict):
            name, before, now = _first_difference(name, before, now)
        raise UsageError(
            f"the checkpoint is of a run with {name.replace('_', '-')} {before}; this one has {now}",
            hint="the same options as before, or --output ANOTHER_FOLDER",
        )
    if state["epochs"] != epochs:
        console.warn(f"--epochs was {state['epochs']} and is {epochs}: the learning rate follows the new curve")


def _first_difference(name: str, before: dict[str, Any], now: dict[str, Any]) -> tuple[str, Any, Any]:
    key = next(key for key in now | before if before.get(key) != now.get(key))
    return f"{name} {key}", before.get(key), now.get(key)


def restore(run: Run, saved: Checkpoint | None) -> tuple[Position, bytes | None]:
    """Put optimizer, scaler and random state back; return where to go on, with the loader's place in its epoch."""
    if saved is None:
        return Position(), None
    run.optimizer.load_state_dict(saved.optimizer["adamw"])
    for parameter, moments in run.optimizer.state.items():
        # The fused update would read beyond what is there.
        if any(moments[name].shape != parameter.shape for name in ("exp_avg", "exp_avg_sq")):
            raise ValueError("the optimizer's moments have other shapes than the weights")
    if run.scaler:
        run.scaler.load_state_dict(saved.optimizer["scaler"])
    own = saved.ranks[run.ranks.rank]
    torch.set_rng_state(own["torch_rng"])
    if run.ranks.device.type == "cuda":
        torch.cuda.set_rng_state(own["cuda_rng"])
    position = Position(**saved.state["position"])
    if not 0 <= position.step_in_epoch <= position.step:
        raise ValueError(f"step {position.step_in_epoch} of an epoch, {position.step} in all")
    return position, own["loader"]


def save(run: Run, position: Position, loader_state: bytes | None) -> Path:
    """Gather every rank's place and random state to rank 0, which writes the checkpoint."""
    own: dict[str, Any] = {"loader": loader_state, "torch_rng": torch.get_rng_state()}
    if run.ranks.device.type == "cuda":
        own["cuda_rng"] = torch.cuda.get_rng_state()
    gathered: list[Any] | None = [None] * run.ranks.world_size if run.ranks.is_first else None
    dist.gather_object(own, gathered)
    path = checkpoint.checkpoint_path(run.output, position.step)
    if gathered is not None:
        state = {
            "position": dataclasses.asdict(position),
            "samples": position.step * run.global_batch,
            "total_steps": run.total_steps,
            "epochs": run.config.epochs,
            "identity": _identity(run.config, run.ranks, run.packed, run.model_config),
            "model_config": run.model_config,
            "options": dataclasses.asdict(run.config),
            "rwkvclip": __version__,
            "torch": torch.__version__,
        }
        moments = {"adamw": run.optimizer.state_dict(), "scaler": run.scaler.state_dict() if run.scaler else None}
        checkpoint.save(path, Checkpoint(run.model.state_dict(), moments, gathered, state), keep=run.config.keep)
    # The others wait, so that none runs into a timeout of the next collective while rank 0 writes.
    dist.barrier()
    return path
