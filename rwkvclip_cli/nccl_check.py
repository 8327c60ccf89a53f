"""`rwkvclip nccl-check`: start a rank on every GPU, and report whether they compute right and how fast.

    $ rwkvclip nccl-check --op all_gather --max-size 256M

This module decides and prints; what the ranks do is in `nccl.sweep`, which needs torch.
"""

import dataclasses
import functools
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from rwkvclip_cli import console
from rwkvclip_cli.config import LaunchConfig, NcclCheckConfig, option_fields, option_name, retype
from rwkvclip_cli.console import RwkvClipError, UsageError
from rwkvclip_cli.nccl.report import ELEMENT_BYTES, Report, Row, readable

GROWTH = 2  # from one size to the next
UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}  # as nccl-tests reads them
DEFAULT_MAX_SIZE = {"nccl": "1G", "gloo": "4M"}
GLOO_RANKS = 2
STOP_GRACE_S = 5.0  # there is nothing to save
WITHOUT_GPU = f"rwkvclip nccl-check --backend gloo --cpus {GLOO_RANKS}"


def nccl_check(options: NcclCheckConfig, settings: Path | None = None) -> int:
    """Run as one rank where torchrun started this process, else start the ranks; returns the exit code.

    `settings` is the settings file in force, which the ranks read too. Raises UsageError for wrong options,
    UnableError without a GPU, and in a rank RwkvClipError for what is wrong with the machines.
    """
    sizes = sweep_sizes(options)
    if {"RANK", "LOCAL_RANK", "WORLD_SIZE"} <= os.environ.keys():
        return _be_a_rank(options, sizes)
    return _start_ranks(options, settings)


def parse_size(text: str, name: str) -> int:
    """Bytes of 8, 64K, 1M or 2G (powers of 1024; B and iB may follow); UsageError names the option."""
    match = re.fullmatch(r"(\d+)\s*([KMG]?)(?:i?B)?", text.strip(), re.IGNORECASE)
    if match is None:
        raise UsageError(f"{name} is a number of bytes such as 8, 64K, 1M or 1G; got {text!r}")
    size = int(match.group(1)) * UNITS[match.group(2).upper()]
    if size < ELEMENT_BYTES:
        raise UsageError(f"{name} must be at least {ELEMENT_BYTES} bytes, one float32; got {text}")
    return size


def sweep_sizes(options: NcclCheckConfig) -> list[int]:
    """The message sizes in bytes: doubling from --min-size, with --max-size last."""
    low = parse_size(options.min_size, "--min-size")
    high = parse_size(options.max_size or DEFAULT_MAX_SIZE[options.backend], "--max-size")
    if low > high:
        raise UsageError(f"--min-size {low} is above --max-size {high} bytes", f"--max-size {options.min_size}")
    sizes = []
    while low < high:
        sizes.append(low)
        low *= GROWTH
    return [*sizes, high]


def _start_ranks(options: NcclCheckConfig, settings: Path | None) -> int:
    from rwkvclip_cli.launch.plan import backend_of
    from rwkvclip_cli.launch.torchrun import check_usage, start

    if options.cpus is not None and options.backend != "gloo":
        raise UsageError(f"--cpus {options.cpus} needs --backend gloo: NCCL runs on GPUs alone", WITHOUT_GPU)
    if options.gpus is not None and options.backend == "gloo":
        raise UsageError("--backend gloo is checked on CPU ranks, not on --gpus", WITHOUT_GPU)
    shared = {name: getattr(options, name) for name in _names(LaunchConfig) if name in _names(NcclCheckConfig)}
    launch = LaunchConfig(**shared, stop_grace=STOP_GRACE_S)
    if options.backend == "gloo" and options.cpus is None:
        launch = dataclasses.replace(launch, cpus=GLOO_RANKS)
    check_usage(launch, functools.partial(retype, "nccl-check", options, ()))
    # A node that is missing is a rank that does not answer.
    waiting = ("timeout",) if backend_of(launch) == "static" else ("join_timeout", "read_timeout")
    conf = dict.fromkeys(waiting, str(int(options.timeout))) if options.nodes > 1 else {}
    return start(launch, ("nccl-check", *_rank_arguments(options, settings)), without_gpu=WITHOUT_GPU, rdzv_conf=conf)


def _names(options: type) -> list[str]:
    return [field.name for field in option_fields(options)]


def _rank_arguments(options: NcclCheckConfig, settings: Path | None) -> list[str]:
    """What a rank has to be told: all that does not say, as launch's options do, how to start it."""
    arguments = ["--config", str(settings)] if settings else []
    for field in option_fields(NcclCheckConfig):
        if field.name in _names(LaunchConfig):
            continue
        value, dashed = getattr(options, field.name), f"--{option_name(field)}"
        if value is True:
            arguments.append(dashed)
        elif value is not None and value is not False:
            arguments += [dashed, str(value)]
    return arguments


def _be_a_rank(options: NcclCheckConfig, sizes: list[int]) -> int:
    from rwkvclip_cli.nccl import sweep

    report = sweep.run(options, sizes)
    if options.json:
        console.result_json(report.document())
    else:
        show(report)
    if not report.failure:
        return console.EXIT_DONE
    if os.environ["LOCAL_RANK"] == "0":  # a node says it once
        raise RwkvClipError(report.failure, report.hint)
    return console.EXIT_FAILED


def show(report: Report) -> None:
    """Print the ranks and the sweep as tables."""
    names: tuple[str, ...] = ("rank", "host", "device", "driver", "torch", "CUDA", "NCCL")
    console.result(table(names, [[_or_dash(value) for value in dataclasses.astuple(info)] for info in report.ranks]))
    if report.rows:
        names = ("size", "time µs", "median µs", "algbw GB/s", "busbw GB/s")
        ranks = "1 rank" if len(report.ranks) == 1 else f"{len(report.ranks)} ranks"
        console.result(f"\n{report.op} over {report.backend}, {ranks}, every element checked")
        console.result(table(names, [_cells(row) for row in report.rows]))
        if len(report.ranks) == 1:
            console.result("one rank moves no data: there is no bandwidth to measure")


def _cells(row: Row) -> list[str]:
    bandwidths = ["-" if value is None else f"{value:.3f}" for value in (row.algbw, row.busbw)]
    return [readable(row.size_bytes), f"{row.time_us:.1f}", f"{row.median_us:.1f}", *bandwidths]


def _or_dash(value: object) -> str:
    return "-" if value is None else str(value)


def table(names: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns under their names: ruled on a terminal, else plain text of any width."""
    if not sys.stdout.isatty():
        lines = [list(names), *rows]
        widths = [max(len(line[column]) for line in lines) for column in range(len(names))]
        return "\n".join(
            "  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in lines
        )
    from rich import box
    from rich.console import Console
    from rich.table import Table

    ruled = Table(box=box.SIMPLE)
    for name in names:
        ruled.add_column(name, justify="right")
    for row in rows:
        ruled.add_row(*row)
    terminal = Console()
    with terminal.capture() as captured:
        terminal.print(ruled)
    return captured.get().rstrip("\n")
