"""`rwkvclip bench`: one process on one device measures every part of a training run.

>>> print(bench(BenchConfig(model="tiny")).text())
"""

import dataclasses
import itertools
import json
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from rwkvclip_cli import console
from rwkvclip_cli.bench.parts import (
    LOADER_WARM_UP,
    LoaderFigures,
    Setup,
    measure_loader,
    measure_loss,
    measure_step,
    measure_wkv6,
)
from rwkvclip_cli.bench.report import Report
from rwkvclip_cli.config import BenchConfig, PackConfig
from rwkvclip_cli.console import UsageError
from rwkvclip_cli.data.loader import LoaderSpec, loader_threads
from rwkvclip_cli.data.packed import PackedSet, open_packed
from rwkvclip_cli.data.packing.pack import pack
from rwkvclip_cli.data.recordio import Record, RecordReader, RecordWriter, pack_record
from rwkvclip_cli.demo.scenes import write_scenes
from rwkvclip_cli.model import preset, read_model_config
from rwkvclip_cli.train.compilation import compiles, records
from rwkvclip_cli.train.distributed import read_ranks
from rwkvclip_cli.train.precision import set_matmul_precision
from rwkvclip_cli.train.run import check_fit, device_name

SCENES = 256
LEAST_LOADER_BATCHES = 8  # that a set has to hold before fewer than asked will do


def bench(options: BenchConfig) -> Report:
    """Measure step, WKV6, loss and loader on this process's GPU, or on the CPU where there is none.

    Raises UsageError for options or data that do not fit each other, UnableError for what this machine cannot do.
    """
    device = _device()
    kernels = compiles(options.compile, device)
    name, model_config = _model(options, device)
    given = open_packed(options.data) if options.data else None
    if given:
        check_fit(given, model_config)
    setup = Setup(
        model_config=model_config,
        batch_size=options.batch_size or (256 if device.type == "cuda" else 32),
        text_tokens=given.context_length if given else model_config["ctx_len"],
        precision=options.precision or ("bf16" if device.type == "cuda" else "fp32"),
        kernels=kernels,
        recorded=records(options.cuda_graph, kernels, world_size=1),
        checkpointing=options.grad_checkpointing or model_config["with_cp"],
        device=device,
        steps=options.steps,
    )
    set_matmul_precision(setup.precision)
    with tempfile.TemporaryDirectory(prefix="rwkvclip-bench-") as folder:
        packed = given or _draw(Path(folder), setup.text_tokens)
        with console.progress(4, "measuring", "parts") as bar:
            # The step first: on a CPU the peak is the process's, and should be the step's alone.
            step = measure_step(setup)
            bar.advance(1)
            wkv6 = measure_wkv6(setup)
            bar.advance(1)
            loss = measure_loss(setup)
            bar.advance(1)
            if device.type == "cuda":
                torch.cuda.empty_cache()  # DALI takes its memory from the device, not from what torch keeps back
            loader = _loader(options, setup, packed, Path(folder))
            bar.advance(1)
    return Report(
        machine=f"{device_name(device)}, torch {torch.__version__}, {torch.get_num_threads()} threads",
        model=name,
        batch_size=setup.batch_size,
        precision=setup.precision,
        kernels=kernels,
        checkpointing=setup.checkpointing,
        steps=setup.steps,
        loader=loader,
        wkv6=wkv6,
        loss=loss,
        step=step,
    )


def _device() -> torch.device:
    """The one device of this one process."""
    ranks = read_ranks()
    if ranks.world_size > 1:
        raise UsageError(
            f"bench measures one process on one device; it was started as one of {ranks.world_size}",
            hint="rwkvclip bench   (nccl-check measures what the ranks do together)",
        )
    if ranks.device.type == "cuda":
        torch.cuda.set_device(ranks.device)
    return ranks.device


def _model(options: BenchConfig, device: torch.device) -> tuple[str, dict[str, Any]]:
    """The model's name and arguments: as asked, or the size that suits the device."""
    if options.model_config:
        return Path(options.model_config).name, read_model_config(options.model_config)
    name = options.model or ("rwkv-clip-b32" if device.type == "cuda" else "tiny")
    return name, preset(name)


def _draw(folder: Path, context_length: int) -> PackedSet:
    """A few hundred scenes, drawn and packed in `folder`."""
    console.say(f"no --data FILE.rec: the loader reads {SCENES} scenes drawn for it, which are easier than photographs")
    write_scenes(folder / "scenes", SCENES, seed=0, held_out=False)
    out = str(folder / "scenes.rec")
    # Scenes are drawn whole, so that the proof in DALI would only cost time.
    pack(PackConfig(sources=(str(folder / "scenes"),), out=out, context_length=context_length, proof="none", workers=1))
    return open_packed(out)


def _loader(options: BenchConfig, setup: Setup, packed: PackedSet, folder: Path) -> LoaderFigures:
    """The loader's figures, on the data set or on copies of a small one."""
    spec = LoaderSpec(
        batch_size=setup.batch_size,
        image_size=setup.model_config["input_size"],
        device_id=setup.device.index if setup.device.type == "cuda" else None,
        threads=loader_threads(options.workers, 1),
    )
    steps = min(options.steps, packed.count // setup.batch_size - LOADER_WARM_UP)
    if steps < min(options.steps, LEAST_LOADER_BATCHES):
        steps = options.steps
        packed = repeat(packed, (LOADER_WARM_UP + steps) * setup.batch_size, folder / "repeated.rec")
    return measure_loader(packed, spec, steps, options.data)


def repeat(packed: PackedSet, count: int, rec: Path) -> PackedSet:
    """Write the records of a small set over and over into `rec` until there are `count`, and open that."""
    with RecordWriter(rec, sync=False) as writer:
        for ordinal, record in zip(range(count), _over_and_over(packed.recs), strict=False):
            writer.write(pack_record(dataclasses.replace(record, id=ordinal)))
    manifest = {"count": count, "captions": packed.captions, "context_length": packed.context_length}
    rec.with_suffix(".manifest.json").write_text(json.dumps(manifest), encoding="utf-8")
    return open_packed(rec)


def _over_and_over(recs: Sequence[Path]) -> Iterator[Record]:
    """Yield the records of all files in order, for ever."""
    for rec in itertools.cycle(recs):
        with RecordReader(rec) as reader:
            for ordinal in range(len(reader)):
                yield reader.record(ordinal)
