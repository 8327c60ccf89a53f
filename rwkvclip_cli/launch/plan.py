"""What to run: options and facts about this machine in, torchrun's command line for every node out.

>>> print(plan(LaunchConfig(cpus=2), ("train", "--output", "run"), machine).here.line)

Nothing here looks at the machine or starts anything; `preflight.survey` gathers the facts.
"""

import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from rwkvclip_cli.config import LaunchConfig
from rwkvclip_cli.console import UnableError, UsageError
from rwkvclip_cli.launch.network import DEFAULT_PORT, Endpoint, is_loopback, parse_endpoint

MODULE = "rwkvclip_cli"
# What a worker computes on, read by train/distributed.py under this name: "cpu" keeps it off the GPUs, and with "cuda"
# it refuses to do without one.
DEVICE_VARIABLE = "RWKVCLIP_DEVICE"
LOOPBACK = "127.0.0.1"

# PET_* variables that switch torchrun to another way of running the command, which no flag can undo.
DERAILING = ("PET_STANDALONE", "PET_NO_PYTHON", "PET_RUN_PATH")
# PET_* variables whose flag the plan always gives, so that they have no effect.
OVERRIDDEN = (
    "PET_NPROC_PER_NODE",
    "PET_NNODES",
    "PET_MAX_RESTARTS",
    "PET_RDZV_BACKEND",
    "PET_RDZV_ENDPOINT",
    "PET_RDZV_ID",
    "PET_MODULE",
    "PET_MASTER_ADDR",
    "PET_MASTER_PORT",
    "PET_NODE_RANK",
)


@dataclass(frozen=True)
class Machine:
    """The facts about this machine that a plan depends on.

    `endpoint_is_known`: its host has an address. `endpoint_is_here`: that is this machine. `address`: what packets
    to the endpoint carry.
    """

    python: str
    cores: int
    gpus: int
    address: str | None = None
    endpoint_is_known: bool = True
    endpoint_is_here: bool = True
    free_port: int = DEFAULT_PORT
    environ: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class NodeCommand:
    """What one node runs: the arguments, and what changes in its environment (None removes)."""

    argv: tuple[str, ...]
    env: Mapping[str, str | None]

    @property
    def line(self) -> str:
        """One line for a shell that does exactly this."""
        removed = [word for name, value in self.env.items() if value is None for word in ("-u", name)]
        added = [f"{name}={value}" for name, value in self.env.items() if value is not None]
        prefix = ["env", *removed, *added] if self.env else []
        return shlex.join([*prefix, *self.argv])

    def environment(self, base: Mapping[str, str]) -> dict[str, str]:
        """The whole environment of the command, from that of its parent."""
        merged = {**base, **self.env}
        return {name: value for name, value in merged.items() if value is not None}


@dataclass(frozen=True)
class LaunchPlan:
    """The commands that can be told from here: all nodes' in order (static), or this node's alone (c10d).

    `notes` are lines about the PET_* and NCCL_* variables in force.
    """

    nodes: tuple[NodeCommand, ...]
    here: NodeCommand
    notes: tuple[str, ...] = ()


def check_options(config: LaunchConfig, retyped: Callable[..., str], address: str | None) -> None:
    """Refuse options that contradict each other, with a UsageError; looks at the options alone.

    `retyped` gives the command line with some options changed; `address` is this machine's, as an example.
    """
    if config.node_rank is not None and config.node_rank >= config.nodes:
        raise UsageError(
            f"--node-rank counts from 0, so {config.nodes} nodes end at {config.nodes - 1}; got {config.node_rank}"
        )
    example = Endpoint(address or "ADDRESS_OF_NODE_0", DEFAULT_PORT)
    completed = f"{retyped(rdzv_endpoint=str(example))}   (the same on every node)"
    if config.nodes > 1 and config.rdzv_endpoint is None:
        raise UsageError(
            f"{config.nodes} nodes need a place to meet: --rdzv-endpoint HOST:PORT, an address of node 0", completed
        )
    if config.rdzv_endpoint is not None:
        endpoint = parse_endpoint(config.rdzv_endpoint)
        if config.nodes > 1 and (is_loopback(endpoint.host) or endpoint.host == "localhost"):
            raise UsageError(
                f"--rdzv-endpoint {endpoint}: every machine calls itself {endpoint.host}, so each node would wait "
                "for itself",
                completed,
            )
        if config.nodes > 1 and endpoint.port == 0:
            raise UsageError(
                f"--rdzv-endpoint {endpoint}: the other nodes cannot know which port 0 becomes",
                f"{retyped(rdzv_endpoint=str(Endpoint(endpoint.host, DEFAULT_PORT)))}   (the same on every node)",
            )
    if config.rdzv_backend == "static" and config.nodes > 1 and config.node_rank is None:
        raise UsageError("--rdzv-backend static needs --node-rank, another one on each node", retyped(node_rank=0))


def ranks_here(config: LaunchConfig, visible_gpus: int, without_gpu: str = "") -> int:
    """Ranks of each node: as asked, else one a visible GPU; UnableError, hinting `without_gpu`, where there is none."""
    ranks = config.cpus or config.gpus or visible_gpus
    if not ranks:
        raise UnableError("no GPU is visible on this machine", without_gpu)
    return ranks


def backend_of(config: LaunchConfig) -> str:
    """Static where the nodes are numbered, because c10d ignores the numbers; but its restarts hang."""
    if config.rdzv_backend is not None:
        return config.rdzv_backend
    return "static" if config.node_rank is not None and config.max_restarts == 0 and config.nodes > 1 else "c10d"


def hosts_endpoint(config: LaunchConfig, machine: Machine) -> bool:
    """Whether this node's torchrun is the one that listens at the endpoint."""
    return (config.node_rank or 0) == 0 if backend_of(config) == "static" else machine.endpoint_is_here


def plan(
    config: LaunchConfig,
    command: tuple[str, ...],
    machine: Machine,
    *,
    without_gpu: str = "",
    rdzv_conf: Mapping[str, str] | None = None,
    module: str = MODULE,
) -> LaunchPlan:
    """The torchrun command of each node that runs `python -m MODULE COMMAND` on every rank.

    `config` has passed `check_options`. `rdzv_conf` adds settings of torchrun's rendezvous.
    Raises UnableError, hinting `without_gpu`, where neither ranks are named nor a GPU is visible.
    """
    backend = backend_of(config)
    ranks = ranks_here(config, machine.gpus, without_gpu)
    conf = _pairs(machine.environ.get("PET_RDZV_CONF", "")) | dict(rdzv_conf or {})
    local_address: str | None
    if config.rdzv_endpoint is None:
        # Port 0 lets the kernel choose, so nothing can clash. Static tells the workers the port before it
        # is bound, so there it has to be a real one.
        endpoint = f"{LOOPBACK}:{machine.free_port if backend == 'static' else 0}"
        local_address = LOOPBACK
    else:
        endpoint = str(parse_endpoint(config.rdzv_endpoint))
        local_address = machine.address
        if backend == "c10d":
            # torchrun guesses the store's host by resolving its own name, which Debian maps to 127.0.1.1.
            conf.setdefault("is_host", "1" if machine.endpoint_is_here else "0")

    shared = ["--nproc-per-node", str(ranks), "--nnodes", str(config.nodes), "--max-restarts", str(config.max_restarts)]
    rendezvous = ["--rdzv-backend", backend, "--rdzv-endpoint", endpoint, "--rdzv-id", config.rdzv_id]
    if conf:
        rendezvous += ["--rdzv-conf", ",".join(f"{key}={value}" for key, value in conf.items())]
    worker = ["-m", module, *command]
    torchrun = [machine.python, "-m", "torch.distributed.run"]
    env = _environment(config, machine, ranks)

    if backend == "static":
        numbers = range(config.nodes)
        lines = [[*torchrun, *shared, "--node-rank", str(rank), *rendezvous, *worker] for rank in numbers]
        here = config.node_rank or 0
        # What this machine's PET_ variables call for is no business of the other nodes.
        nodes = tuple(
            NodeCommand(tuple(line), env if rank == here else _environment(config, machine, ranks, here=False))
            for rank, line in enumerate(lines)
        )
        return LaunchPlan(nodes, nodes[here], _notes(env, machine.environ))
    # c10d numbers the nodes by the addresses they publish, and tells the workers node 0's: not a host name.
    local = ["--local-addr", local_address] if local_address and "PET_LOCAL_ADDR" not in machine.environ else []
    node = NodeCommand((*torchrun, *shared, *rendezvous, *local, *worker), env)
    return LaunchPlan((node,), node, _notes(env, machine.environ))


def _pairs(text: str) -> dict[str, str]:
    """The settings in key=value,key=value text, which torchrun's --rdzv-conf takes."""
    return dict(pair.strip().split("=", 1) for pair in text.split(",") if "=" in pair)


def _environment(config: LaunchConfig, machine: Machine, ranks: int, *, here: bool = True) -> dict[str, str | None]:
    """What has to change in the environment of this node, or of another one."""
    env: dict[str, str | None] = {name: None for name in DERAILING if here and name in machine.environ}
    threads = machine.environ.get("OMP_NUM_THREADS")
    if threads is None:
        # On GPUs the CPU threads belong to the loader; one is also torchrun's choice, made with a long warning.
        env["OMP_NUM_THREADS"] = str(max(1, machine.cores // ranks)) if config.cpus else "1"
    elif not here:
        # Sums depend on the number of threads in their last bits: what is chosen here holds everywhere.
        env["OMP_NUM_THREADS"] = threads
    env[DEVICE_VARIABLE] = "cpu" if config.cpus else "cuda"
    if config.nccl_debug:
        env["NCCL_DEBUG"] = config.nccl_debug
    return env


def _notes(env: Mapping[str, str | None], environ: Mapping[str, str]) -> tuple[str, ...]:
    notes = []
    for name in sorted({*environ, *env}):
        if not name.startswith(("PET_", "NCCL_", "TORCH_NCCL_")):
            continue
        if name in env and env[name] is None:
            notes.append(f"{name}={environ[name]} is removed: it would change how torchrun runs the command")
        elif name in env:
            notes.append(f"{name}={env[name]} is set by launch")
        elif name in OVERRIDDEN:
            notes.append(f"{name}={environ[name]} has no effect: the command line says otherwise")
        else:
            notes.append(f"{name}={environ[name]} is in force")
    return tuple(notes)
