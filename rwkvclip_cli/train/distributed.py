"""Who this process is among the ranks, their process group, and the model wrapped for them.

>>> with process_group(timeout_s=600) as ranks: ...
"""

import os
import signal
import types
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel

from rwkvclip_cli.console import UnableError, UsageError
from rwkvclip_cli.cores import usable_cores
from rwkvclip_cli.launch.network import steer_gloo
from rwkvclip_cli.launch.plan import DEVICE_VARIABLE

BUCKET_CAP_MB = 32
WARMUP_PASSES = 2
STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


@dataclass(frozen=True)
class Ranks:
    """This process among the others, as torchrun or a spawned function described it in the environment."""

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    device: torch.device

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, which alone speaks and writes."""
        return self.rank == 0


def read_ranks() -> Ranks:
    """Read RANK, LOCAL_RANK, WORLD_SIZE and LOCAL_WORLD_SIZE; without them, a world of one.

    Raises UsageError for values that contradict each other, UnableError for a local rank without a GPU.
    """
    world_size = _environment_int("WORLD_SIZE", 1)
    rank = _environment_int("RANK", 0)
    local_rank = _environment_int("LOCAL_RANK", rank if world_size > 1 else 0)
    local_world_size = _environment_int("LOCAL_WORLD_SIZE", world_size)
    if not 0 <= rank < world_size:
        raise UsageError(f"RANK={rank} is not below WORLD_SIZE={world_size}")
    if not 0 <= local_rank < local_world_size:
        raise UsageError(f"LOCAL_RANK={local_rank} is not below LOCAL_WORLD_SIZE={local_world_size}")
    wanted = os.environ.get(DEVICE_VARIABLE)
    if wanted == "cuda" and not torch.cuda.is_available():
        build = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "a build without CUDA"
        raise UnableError(
            f"this rank was started for a GPU, but torch {torch.__version__} ({build}) finds none that it can use",
            hint="nvidia-smi, to see the driver; then install a torch build that it can run",
        )
    if wanted == "cpu" or not torch.cuda.is_available():
        return Ranks(rank, local_rank, world_size, local_world_size, torch.device("cpu"))
    if local_rank >= torch.cuda.device_count():
        raise UnableError(
            f"LOCAL_RANK={local_rank} has no GPU: this machine shows {torch.cuda.device_count()}",
            hint=f"rwkvclip launch --gpus {torch.cuda.device_count()}",
        )
    return Ranks(rank, local_rank, world_size, local_world_size, torch.device("cuda", local_rank))


def _environment_int(name: str, default: int) -> int:
    value = os.environ.get(name, "")
    if not value:
        return default
    try:
        return int(value)
    except ValueError:
        raise UsageError(f"{name}={value!r} in the environment is not a whole number") from None


@contextmanager
def process_group(timeout_s: float) -> Iterator[Ranks]:
    """Join the ranks over NCCL (GPUs) or gloo (CPUs); leave the group at the end whatever happened."""
    ranks = read_ranks()
    on_gpu = ranks.device.type == "cuda"
    if on_gpu:
        torch.cuda.set_device(ranks.device)
    elif ranks.world_size > 1 and "OMP_NUM_THREADS" not in os.environ:
        # Each rank would start a thread a core, and the ranks' threads spin against each other: six times slower.
        torch.set_num_threads(max(1, usable_cores() // ranks.local_world_size))
    if ranks.world_size > 1:
        # What tells a rank, of which the first alone speaks, from a node that a cluster has numbered.
        os.environ.setdefault("LOCAL_RANK", str(ranks.local_rank))
    settings: dict[str, Any] = {
        "backend": "nccl" if on_gpu else "gloo",
        "rank": ranks.rank,
        "world_size": ranks.world_size,
        "timeout": timedelta(seconds=timeout_s),
        "device_id": ranks.device if on_gpu else None,
    }
    if ranks.world_size == 1 and "MASTER_ADDR" not in os.environ:
        # A world of one needs no port, so two such runs on one machine cannot collide on it.
        settings["store"] = dist.HashStore()  # type: ignore[attr-defined]
    else:
        os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
        os.environ.setdefault("MASTER_PORT", "29500")
        if not 1 <= _environment_int("MASTER_PORT", 0) <= 65_535:
            raise UsageError(f"MASTER_PORT={os.environ['MASTER_PORT']} is no port (1 to 65535)")
    steer_gloo(os.environ)
    try:
        dist.init_process_group(**settings)
    except dist.DistNetworkError as error:
        endpoint = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        reason = str(error).splitlines()[0]
        raise UnableError(
            f"rank {ranks.rank} could not meet the others at {endpoint}: {reason}",
            hint="another MASTER_PORT, where that one is taken" if "in use" in reason else "rwkvclip nccl-check",
        ) from error
    try:
        yield ranks
    finally:
        dist.destroy_process_group()


def synchronize_batch_norms(model: nn.Module) -> tuple[nn.Module, int]:
    """The model with every BatchNorm layer made a synchronized one, and how many there were."""
    converted = sum(isinstance(module, _BatchNorm) for module in model.modules())
    return nn.SyncBatchNorm.convert_sync_batchnorm(model), converted


def wrap(model: nn.Module, ranks: Ranks) -> tuple[DistributedDataParallel, int]:
    """The model under DistributedDataParallel, and how many BatchNorm layers became synchronized ones."""
    model, converted = synchronize_batch_norms(model)
    with warnings.catch_warnings():
        # torch says at every start that static_graph finds unused parameters by itself. Both are asked for on purpose:
        # whoever turns static_graph off keeps the other.
        warnings.filterwarnings("ignore", message="You passed find_unused_parameters=true")
        wrapped = DistributedDataParallel(
            model,
            device_ids=[ranks.local_rank] if ranks.device.type == "cuda" else None,
            bucket_cap_mb=BUCKET_CAP_MB,
            find_unused_parameters=True,
            static_graph=True,
            # Gradients lie in the buckets that are summed: a launch and a copy less for each parameter at every step.
            gradient_as_bucket_view=True,
        )
    return wrapped, converted


def warm_up(wrapped: nn.Module, forward_backward: Callable[[], Tensor]) -> None:
    """Run two synchronized forward and backward passes, then drop their gradients and undo their use of randomness.

    static_graph records the graph in its first pass and lays the gradient buckets anew after it, so the sums of the
    first reductions are ordered otherwise than all later ones. A fresh and a resumed run both start behind this.
    """
    cpu_state = torch.get_rng_state()
    cuda_state = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None
    for _ in range(WARMUP_PASSES):
        forward_backward().backward()
        wrapped.zero_grad(set_to_none=True)
    torch.set_rng_state(cpu_state)
    if cuda_state is not None:
        torch.cuda.set_rng_state(cuda_state)


class StopVote:
    """SIGTERM or SIGUSR1 to any rank stops all of them at the same step.

    Each step starts a maximum over all ranks' flags and reads the one that the step before started, so the hosts agree
    without the device waiting. Signal handlers can be set in a process's main thread alone; elsewhere nothing is heard.
    """

    def __init__(self, ranks: Ranks, timeout_s: float) -> None:
        timeout = timedelta(seconds=timeout_s)
        self._group = dist.new_group(backend="gloo", timeout=timeout) if ranks.device.type == "cuda" else None
        self._asked = torch.zeros(1)
        self._vote: Tensor | None = None
        self._work: Any = None

    @contextmanager
    def listening(self) -> Iterator["StopVote"]:
        """Catch the stop signals inside the block and give their handlers back after it."""

        def ask(number: int, frame: types.FrameType | None) -> None:
            self._asked.fill_(1)

        before: dict[signal.Signals, Any] = {}
        try:
            for number in STOP_SIGNALS:
                before[number] = signal.signal(number, ask)
        except ValueError:
            before.clear()  # not the main thread
        try:
            yield self
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def agreed(self) -> bool:
        """Whether all ranks stop now: true on all or on none. Call it once a step, on every rank."""
        stop = self.finish()
        self._vote = self._asked.clone()
        self._work = dist.all_reduce(self._vote, op=dist.ReduceOp.MAX, group=self._group, async_op=True)
        return stop

    def finish(self) -> bool:
        """Wait for the vote in flight, if any, and return its outcome."""
        if self._work is None or self._vote is None:
            return False
        self._work.wait()
        self._work = None
        return bool(self._vote.item())
