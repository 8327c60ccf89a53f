"""The options of every command, each once: name, default, unit, bounds. Standard library only.

The command line and `rwkvclip.toml` both derive from these dataclasses.

>>> TrainConfig(output="run", train_data="pairs.rec", batch_size=64).lr
0.001
"""

import dataclasses
import difflib
import errno
import math
import os
import reprlib
import shlex
import types
import typing
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import MISSING, dataclass
from pathlib import Path
from typing import Any

from rwkvclip_cli.console import UsageError
from rwkvclip_cli.documents import parse_toml
from rwkvclip_cli.limits import MAX_PIXELS

CONFIG_FILE = "rwkvclip.toml"
MAX_NAME_BYTES = 255  # NAME_MAX of Linux and of nearly every file system
SHOWN_LETTERS = 100  # of a path that is too long to be one
PRECISIONS = ("bf16", "fp16", "fp32", "tf32")
MODELS = ("rwkv-clip-b32", "rwkv-clip-b16", "tiny")
SOURCE_FORMATS = ("auto", "folder", "imagefolder", "table", "parquet", "webdataset")
DATA_NAMES = "OUT.rec (of shards too), one shard's .rec, or a quoted pattern such as 'out-*.rec'"
COMPILE_HELP = (
    "Run each block as fused kernels, which Triton compiles at first use and keeps on disk; without, as plain PyTorch "
    "operations (default: on GPUs, which alone can)."
)
CUDA_GRAPH_HELP = (
    "Record a step's forward and backward pass as a CUDA graph, both towers side by side, and have each step replay it "
    "(default: with --compile on one GPU, which alone can)."
)
CHECKPOINTING_HELP = "Recompute each block in the backward pass: less memory, more time, the same gradients."


class MissingOptionError(UsageError):
    """A required option came neither from the command line nor from the settings file."""


def option(
    default: Any = MISSING,
    help: str = "",
    *,
    minimum: float | None = None,
    maximum: float | None = None,
    choices: tuple[str, ...] = (),
    aliases: tuple[str, ...] = (),
    argument: bool = False,
    required: bool = False,
    excludes: tuple[str, ...] = (),
    path: bool = False,
) -> Any:
    """One option of a command: a dataclass field that carries its help, bounds and other spellings.

    `argument=True` makes it positional on the command line; `aliases` are hidden spellings; a `required` text option
    may come from the settings file but has to come from somewhere. `excludes` names fields that cannot stand beside
    this one, `field=value` those that cannot with this value; it works both ways. `path=True`: the text is a path.
    """
    metadata = {
        "help": help,
        "minimum": minimum,
        "maximum": maximum,
        "choices": choices,
        "aliases": aliases,
        "argument": argument,
        "required": required,
        "excludes": excludes,
        "path": path,
    }
    return dataclasses.field(default=default, metadata=metadata)


class Options:
    """What every command's options share: bounds and rivals are checked when they are made."""

    def __post_init__(self) -> None:
        given = {}
        for field in option_fields(type(self)):
            value = getattr(self, field.name)
            check_value(field, value)
            if value != field.default:
                given[field.name] = f"--{option_name(field)}" + ("" if value is True else f" {value}")
        check_rivals(type(self), given)


def option_fields(config: type) -> Iterator[dataclasses.Field[Any]]:
    """Yield the fields of an options dataclass, in order."""
    yield from dataclasses.fields(config)


def option_name(field: dataclasses.Field[Any]) -> str:
    """How the field is spelled on the command line and in `rwkvclip.toml`: words joined by dashes."""
    return field.name.replace("_", "-")


def retype(name: str, config: Options, rest: Sequence[str] = (), **changes: object) -> str:
    """The command line that gives these options with `changes`: what is no default, then `rest` after `--`."""
    changed = dataclasses.replace(config, **changes)  # type: ignore[type-var]
    arguments: list[str] = []
    options: list[str] = []
    for each in option_fields(type(config)):
        value = getattr(changed, each.name)
        if value != each.default:
            (arguments if each.metadata["argument"] else options).extend(_spelled(each, value))
    if any(argument.startswith("-") for argument in arguments):  # it would be taken for an option
        return shlex.join(["rwkvclip", name, *options, "--", *arguments, *rest])
    return shlex.join(["rwkvclip", name, *arguments, *options, *(("--", *rest) if rest else ())])


def _spelled(field: dataclasses.Field[Any], value: object) -> list[str]:
    name = option_name(field)
    if isinstance(value, bool):
        return [f"--{name}" if value else f"--no-{name}"]
    values = list(map(str, value)) if isinstance(value, tuple) else [str(value)]
    return values if field.metadata["argument"] else [word for each in values for word in (f"--{name}", each)]


def check_value(field: dataclasses.Field[Any], value: Any) -> None:
    """Refuse a value outside the field's bounds or choices with a UsageError that names all three."""
    meta = field.metadata
    if value is None:
        return
    shown = option_name(field) if meta["argument"] else f"--{option_name(field)}"
    if meta["required"] and not value:
        raise MissingOptionError(f"{shown} is missing: {meta['help']}", hint=f"{shown} PATH")
    for each in () if not meta["path"] else value if isinstance(value, tuple) else (value,):
        check_path(shown, each)
    if meta["choices"] and value not in meta["choices"]:
        near = difflib.get_close_matches(str(value), meta["choices"], 1)
        hint = f"{shown} {near[0]}" if near else ""
        raise UsageError(f"{shown} is one of {', '.join(meta['choices'])}; got {value!r}", hint)
    low, high = meta["minimum"], meta["maximum"]
    if low is None and high is None:
        return
    if isinstance(value, float) and not math.isfinite(value):
        raise UsageError(f"{shown} must be a finite number; got {value}")
    if low is not None and value < low:
        raise UsageError(f"{shown} must be at least {low}; got {value}")
    if high is not None and value > high:
        raise UsageError(f"{shown} must be at most {high}; got {value}")


def check_path(shown: str, value: str | os.PathLike[str]) -> None:
    """Refuse, with a UsageError, what no file can be called or the user may not look for; it need not be there."""
    path = os.fspath(value)
    if not path:
        raise UsageError(f"{shown} is empty", f"{shown} PATH")
    what = path if len(path) <= SHOWN_LETTERS else f"{path[: SHOWN_LETTERS // 2]}...{path[-SHOWN_LETTERS // 2 :]}"
    if "\0" in path:
        raise UsageError(f"{shown} {what}: a path holds no NUL")
    longest = max((len(os.fsencode(name)) for name in path.split(os.sep)), default=0)
    if longest > MAX_NAME_BYTES:
        raise UsageError(f"{shown} {what}: a name of {longest:,} bytes; names have at most {MAX_NAME_BYTES}")
    try:
        os.lstat(path)
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            size = len(os.fsencode(path))
            raise UsageError(f"{shown} {what}: {error.strerror} ({size:,} bytes)", "a shorter path") from None
        if error.errno == errno.EACCES:
            raise UsageError(f"{shown} {what}: {error.strerror}", f"ls -ld {os.path.dirname(path) or '.'}") from None


def check_rivals(options: type, given: Mapping[str, str]) -> None:
    """Refuse, with a UsageError, two given options of which one excludes the other; `given` is {field: as shown}."""
    for name, rival, value in _rivals(options):
        if value is None and name in given and rival in given:
            raise UsageError(f"{given[name]} and {given[rival]} exclude each other")


def overruled(options: type, values: Mapping[str, Any], typed: Set[str], filed: Set[str]) -> set[str]:
    """The fields that the settings file gives (`filed`) and a field of the command line (`typed`) excludes."""
    found = set()
    for name, rival, value in _rivals(options):
        if value is None or values[rival] == value:
            found |= {mine for mine, other in ((name, rival), (rival, name)) if mine in filed and other in typed}
    return found


def _rivals(options: type) -> Iterator[tuple[str, str, str | None]]:
    """(field, one that it excludes, the value that this holds for or None for any)."""
    for field in option_fields(options):
        for rival in field.metadata["excludes"]:
            name, _, value = rival.partition("=")
            yield field.name, name, value or None


@dataclass(frozen=True)
class PackConfig(Options):
    """`rwkvclip pack SOURCE... OUT.rec`."""

    sources: tuple[str, ...] = option(
        (),
        "Folders, tables or WebDataset tars, packed in this order. Beside an image cat.jpg lies cat.txt (a caption a "
        "line), cat.json (a list of captions, or the first of captions, caption, text, title there is) or both, of "
        "which the .txt counts first.",
        argument=True,
        path=True,
    )
    out: str = option("", "The .rec file to write; .idx, manifest and reports go beside it.", argument=True, path=True)
    format: str = option("auto", "What the sources are; auto goes by folder and suffix.", choices=SOURCE_FORMATS)
    image_key: str | None = option(None, "Table column of the image (default: the first of image, jpg, ... there is).")
    caption_key: tuple[str, ...] = option(
        (), "Table column of a caption, as text or as token ids; repeat for several, in slot order."
    )
    tokens: str | None = option(
        None,
        ".npy file of token ids, a row a sample; they fill the first slots, --caption-key columns the next.",
        path=True,
    )
    captions: int = option(3, "Caption slots of a record.", minimum=1, maximum=64)
    context_length: int = option(77, "Token ids a caption slot.", minimum=3, maximum=4096)
    proof: str = option(
        "decode",
        "What shows that a record will train: DALI decodes it, its markers are walked, or nothing.",
        choices=("decode", "structure", "none"),
    )
    quality: int = option(95, "JPEG quality where an image has to be re-encoded.", minimum=1, maximum=100)
    max_side: int | None = option(None, "Resize images whose longer side exceeds this many pixels.", minimum=1)
    max_pixels: int = option(MAX_PIXELS, "Reject images of more pixels than this, before decoding.", minimum=1)
    dedupe: bool = option(
        False,
        "Reject every image that an earlier record has: equal bytes, or equal width, height and decoded pixels in any "
        "format (each image is decoded once more for that, whatever --proof; 20 bytes of memory a record).",
    )
    shuffle: bool = option(
        False, "Put the records of all sources in an order drawn over the whole set (twice the disk space for a while)."
    )
    seed: int = option(0, "Seed of --shuffle.", minimum=0, maximum=2**31 - 1)
    shard_size: int | None = option(
        None, "Records a file: OUT-00000.rec, OUT-00001.rec and on, in place of one OUT.rec.", minimum=1
    )
    workers: int | None = option(None, "Worker processes (default: one a core).", minimum=1, maximum=1024)
    writer: str = option("native", "Writer of the records; mxnet needs that package.", choices=("native", "mxnet"))
    overwrite: bool = option(False, "Replace an existing OUT.rec, and throw an unfinished pack of it away.")
    resume: bool = option(False, "Continue an interrupted pack of the same sources and options.")
    json: bool = option(False, "Print one JSON document.")


@dataclass(frozen=True)
class TrainConfig(Options):
    """`rwkvclip train`, the worker that torchrun starts once a rank."""

    output: str = option("", "Folder for checkpoints, metrics and curves.", required=True, path=True)
    train_data: str = option("", f"The packed data to train on, {DATA_NAMES}.", required=True, path=True)
    train_num_samples: int | None = option(None, "Distinct records an epoch (default: all).", minimum=1)
    batch_size: int = option(256, "Pairs a step on each rank.", minimum=1)
    epochs: int = option(32, "Passes over the data.", minimum=1)
    lr: float = option(1e-3, "Peak learning rate.", minimum=0.0)
    precision: str = option("bf16", "Arithmetic of the matrix products.", choices=PRECISIONS)
    model: str = option("rwkv-clip-b32", "Model size.", choices=MODELS)
    model_config: str | None = option(
        None, "JSON or TOML file of model arguments, in place of --model.", excludes=("model",), path=True
    )
    warmup: float = option(0.1, "Share of all steps with a rising learning rate.", minimum=0.0, maximum=1.0)
    weight_decay: float = option(0.2, "AdamW weight decay of matrices.", minimum=0.0, aliases=("wd",))
    beta1: float = option(0.9, "AdamW beta1.", minimum=0.0, maximum=0.9999999)
    beta2: float = option(0.98, "AdamW beta2.", minimum=0.0, maximum=0.9999999)
    grad_clip: float = option(
        1.0, "Largest gradient norm; 0 leaves it alone.", minimum=0.0, aliases=("grad-clip-norm",)
    )
    drop_path_rate: float | None = option(
        None, "Stochastic depth of the image tower (default: the model's).", minimum=0.0, maximum=0.99
    )
    workers: int | None = option(
        None, "Loader threads a rank (default: this rank's share of the cores).", minimum=1, maximum=1024
    )
    compile: bool | None = option(None, COMPILE_HELP)
    cuda_graph: bool | None = option(None, CUDA_GRAPH_HELP)
    grad_checkpointing: bool = option(False, CHECKPOINTING_HELP)
    log_every: int = option(10, "Steps between log lines; the loss is read from the device only then.", minimum=1)
    max_skipped: int = option(
        100, "Stop with an error once this many steps in a row had no finite gradients and were left out.", minimum=1
    )
    save_every_steps: int | None = option(None, "Steps between checkpoints (default: once an epoch).", minimum=1)
    keep: int = option(3, "Newest checkpoints to keep.", minimum=1)
    resume: str = option(
        "auto", "auto continues from the newest checkpoint, none starts anew, or a checkpoint folder.", path=True
    )
    seed: int = option(0, "Seed of weights, order, augmentation and captions.", minimum=0, maximum=2**31 - 1)
    deterministic: bool = option(False, "Use deterministic GPU algorithms alone, for runs equal bit for bit.")
    timeout: float = option(600.0, "Seconds that a rank waits for the others.", minimum=1.0)


@dataclass(frozen=True)
class LaunchConfig(Options):
    """`rwkvclip launch [-- TRAIN OPTIONS]`."""

    gpus: int | None = option(
        None,
        "GPUs a node (default: all of them).",
        minimum=1,
        aliases=("nproc-per-node", "nproc"),
        excludes=("cpus",),
    )
    cpus: int | None = option(None, "CPU ranks a node over gloo, in place of GPUs.", minimum=1)
    nodes: int = option(1, "Machines that take part.", minimum=1, aliases=("nnodes",))
    node_rank: int | None = option(None, "This machine's number, from 0 (static rendezvous).", minimum=0)
    rdzv_endpoint: str | None = option(None, "host:port of node 0, the same on every node.")
    rdzv_id: str = option("rwkvclip", "Name of the job, the same on every node.")
    rdzv_backend: str | None = option(
        None, "Rendezvous (default: static with --node-rank, else c10d).", choices=("c10d", "static")
    )
    max_restarts: int = option(0, "Times that torchrun restarts failed workers.", minimum=0)
    nccl_debug: str | None = option(
        None, "NCCL's own log level.", choices=("VERSION", "WARN", "INFO", "ABORT", "TRACE")
    )
    dry_run: bool = option(False, "Print the command of each node and stop.")
    exec: bool = option(False, "Replace this process by torchrun; its exit codes then apply.")
    preflight: bool = option(True, "Check GPUs, port and endpoint before torch starts.")
    stop_grace: float = option(300.0, "Seconds that workers get to save and stop.", minimum=0.0)


@dataclass(frozen=True)
class NcclCheckConfig(Options):
    """`rwkvclip nccl-check`."""

    backend: str = option("nccl", "Transport to check.", choices=("nccl", "gloo"))
    gpus: int | None = option(
        None,
        "GPUs a node (default: all).",
        minimum=1,
        aliases=("nproc-per-node", "nproc"),
        excludes=("cpus", "backend=gloo"),
    )
    cpus: int | None = option(None, "CPU ranks a node, with --backend gloo.", minimum=1, excludes=("backend=nccl",))
    nodes: int = option(1, "Machines that take part.", minimum=1, aliases=("nnodes",))
    node_rank: int | None = option(None, "This machine's number, from 0.", minimum=0)
    rdzv_endpoint: str | None = option(None, "host:port of node 0, the same on every node.")
    rdzv_id: str = option("rwkvclip", "Name of the job, the same on every node.")
    rdzv_backend: str | None = option(
        None, "Rendezvous (default: static with --node-rank, else c10d).", choices=("c10d", "static")
    )
    op: str = option("all_reduce", "Collective.", choices=("all_reduce", "all_gather", "reduce_scatter", "broadcast"))
    min_size: str = option("8", "Smallest message, such as 8, 64K or 1M bytes.", aliases=("minbytes",))
    max_size: str | None = option(None, "Largest message (default: 1G, over gloo 4M).", aliases=("maxbytes",))
    iterations: int = option(20, "Timed repetitions a size.", minimum=1, aliases=("iters",))
    min_busbw: float | None = option(None, "Fail below this bus bandwidth, GB/s, at the largest size.", minimum=0.0)
    timeout: float = option(60.0, "Seconds after which a silent rank is named.", minimum=1.0)
    json: bool = option(False, "Print one JSON document.")


@dataclass(frozen=True)
class EvalConfig(Options):
    """`rwkvclip eval CHECKPOINT --data heldout.rec`."""

    checkpoint: str = option("", "Checkpoint folder, run folder, .safetensors or .pt.", argument=True, path=True)
    data: str = option("", f"The packed data to evaluate on, {DATA_NAMES}.", required=True, path=True)
    model: str | None = option(None, "Model size, where the checkpoint does not say.", choices=MODELS)
    model_config: str | None = option(
        None, "JSON or TOML file of model arguments, in place of --model.", excludes=("model",), path=True
    )
    batch_size: int = option(256, "Pairs embedded at once.", minimum=1)
    caption_slot: int = option(0, "Caption slot to retrieve with.", minimum=0)
    precision: str | None = option(None, "Arithmetic (default: bf16 on a GPU, fp32 on a CPU).", choices=PRECISIONS)
    workers: int | None = option(None, "Loader threads (default: the cores).", minimum=1, maximum=1024)
    chunk_size: int = option(1024, "Rows of the score matrix held at once.", minimum=1)
    json: bool = option(False, "Print one JSON document.")


@dataclass(frozen=True)
class BenchConfig(Options):
    """`rwkvclip bench`."""

    model: str | None = option(None, "Model size (default: rwkv-clip-b32 on a GPU, tiny on a CPU).", choices=MODELS)
    model_config: str | None = option(
        None, "JSON or TOML file of model arguments, in place of --model.", excludes=("model",), path=True
    )
    batch_size: int | None = option(None, "Pairs a step (default: 256 on a GPU, 32 on a CPU).", minimum=1)
    precision: str | None = option(None, "Arithmetic (default: bf16 on a GPU, fp32 on a CPU).", choices=PRECISIONS)
    data: str | None = option(None, "The packed .rec to load from (default: scenes that it draws itself).", path=True)
    steps: int = option(20, "Timed repetitions of everything; the medians are printed.", minimum=1)
    workers: int | None = option(None, "Loader threads (default: the cores).", minimum=1, maximum=1024)
    compile: bool | None = option(None, COMPILE_HELP)
    cuda_graph: bool | None = option(None, CUDA_GRAPH_HELP)
    grad_checkpointing: bool = option(False, CHECKPOINTING_HELP)
    json: bool = option(False, "Print one JSON document.")


@dataclass(frozen=True)
class InspectConfig(Options):
    """`rwkvclip inspect DATA.rec`."""

    data: str = option("", f"The packed data, {DATA_NAMES}.", argument=True, path=True)
    records: str | None = option(
        None,
        "Show these records, such as 0:5, 7 or -3: (with --export: write these alone).",
        excludes=("verify", "rebuild_index", "salvage", "plan"),
    )
    verify: bool = option(
        False,
        "Check index, framing, labels and every image; exit code 1 where anything is wrong.",
        excludes=("export", "rebuild_index", "salvage", "plan"),
    )
    export: str | None = option(
        None,
        "Write images and captions into this new folder.",
        excludes=("rebuild_index", "salvage", "plan"),
        path=True,
    )
    rebuild_index: bool = option(
        False, "Write the .idx of every .rec of the set anew from its records.", excludes=("salvage", "plan")
    )
    salvage: str | None = option(
        None, "Write every record that is sound, of all shards, into this one new .rec.", excludes=("plan",), path=True
    )
    plan: bool = option(False, "Say what a run would do: steps, left out records, learning rates, loss memory.")
    world_size: int = option(1, "Ranks of the planned run.", minimum=1)
    batch_size: int = option(256, "Pairs a step on each rank of the planned run.", minimum=1)
    epochs: int = option(32, "Passes over the data of the planned run.", minimum=1)
    lr: float = option(1e-3, "Peak learning rate of the planned run.", minimum=0.0)
    warmup: float = option(0.1, "Share of all steps with a rising learning rate.", minimum=0.0, maximum=1.0)
    train_num_samples: int | None = option(None, "Distinct records an epoch of the planned run.", minimum=1)
    proof: str = option(
        "decode",
        "What shows that an image will train: DALI decodes it, its markers are walked, or nothing.",
        choices=("decode", "structure", "none"),
    )
    workers: int | None = option(None, "Worker processes of --verify and --salvage.", minimum=1, maximum=1024)
    json: bool = option(False, "Print one JSON document.")


@dataclass(frozen=True)
class DemoConfig(Options):
    """`rwkvclip demo [FOLDER]`."""

    folder: str | None = option(
        None, "New or empty folder that keeps everything (default: nothing stays).", argument=True, path=True
    )


SECTIONS: dict[str, type] = {
    "pack": PackConfig,
    "train": TrainConfig,
    "launch": LaunchConfig,
    "nccl-check": NcclCheckConfig,
    "eval": EvalConfig,
    "bench": BenchConfig,
    "inspect": InspectConfig,
    "demo": DemoConfig,
}


def find_config(path: str | None) -> Path | None:
    """The settings file in force: `path` if given (it must exist), else ./rwkvclip.toml if there."""
    if path is not None:
        check_path("--config", path)
        if not Path(path).is_file():
            raise UsageError(f"--config {path}: no such file")
        return Path(path)
    here = Path(CONFIG_FILE)
    return here if here.is_file() else None


def read_config(path: Path) -> dict[str, dict[str, Any]]:
    """Read a settings file into {section: {field name: value}}, every key and type checked.

    Raises UsageError for a syntax error, an unknown section or key (naming the nearest) or a wrong type.
    """
    try:
        document = parse_toml(path.read_text(encoding="utf-8-sig"))
    except ValueError as error:
        raise UsageError(f"{path}: not valid TOML: {error}") from error
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from error
    settings: dict[str, dict[str, Any]] = {}
    for section, values in document.items():
        if section not in SECTIONS:
            raise UsageError(_unknown(path, "section", f"[{section}]", section, list(SECTIONS)))
        if not isinstance(values, Mapping):
            raise UsageError(f"{path}: [{section}] must be a table of options; got {reprlib.repr(values)}")
        settings[section] = _read_section(path, section, values)
    return settings


def _read_section(path: Path, section: str, values: Mapping[str, Any]) -> dict[str, Any]:
    fields = {option_name(field): field for field in option_fields(SECTIONS[section])}
    spellings = {alias: name for name, field in fields.items() for alias in field.metadata["aliases"]}
    hints = typing.get_type_hints(SECTIONS[section])
    read: dict[str, Any] = {}
    for key, value in values.items():
        name = key.replace("_", "-")
        name = spellings.get(name, name)
        if name not in fields:
            raise UsageError(_unknown(path, f"key in [{section}]", key, name, list(fields)))
        field = fields[name]
        if field.name in read:
            raise UsageError(f"{path}: [{section}] gives {name} twice, under two spellings")
        try:
            read[field.name] = _coerce(value, hints[field.name])
        except TypeError as error:
            raise UsageError(f"{path}: [{section}] {key} must be {error}; got {reprlib.repr(value)}") from None
        try:
            check_value(field, read[field.name])
        except UsageError as error:
            raise UsageError(f"{path}: [{section}] {error.message}", error.hint) from None
    try:
        check_rivals(SECTIONS[section], {name: name.replace("_", "-") for name in read})
    except UsageError as error:
        raise UsageError(f"{path}: [{section}] {error.message}") from None
    return read


def _unknown(path: Path, what: str, shown: str, name: str, known: list[str]) -> str:
    near = difflib.get_close_matches(name, known, 1, cutoff=0.5)
    meant = f"; did you mean {near[0]}?" if near else f"; there are {', '.join(known)}"
    return f"{path}: unknown {what}: {shown}{meant}"


def _coerce(value: Any, hint: Any) -> Any:
    """A TOML value as the field's type; TypeError says in words what the type is."""
    arms = [arm for arm in typing.get_args(hint) if arm is not types.NoneType]
    if isinstance(hint, types.UnionType):
        hint = arms[0]
    if typing.get_origin(hint) is tuple:
        items = [value] if isinstance(value, str) else value
        if not isinstance(items, list) or not all(isinstance(item, str) for item in items):
            raise TypeError("a list of strings")
        return tuple(items)
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, hint) or (hint is int and isinstance(value, bool)):
        raise TypeError({int: "a whole number", float: "a number", bool: "true or false", str: "a string"}[hint])
    return value
