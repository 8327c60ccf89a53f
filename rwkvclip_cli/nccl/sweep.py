"""What every rank does: say who it is, run a collective over a sweep of sizes, check and time it.

>>> report = run(NcclCheckConfig(backend="gloo"), sizes=[8, 1024])

Ranks agree on what comes next through the key-value store, so that a broken collective cannot keep its own
verdict from arriving.
"""

import contextlib
import itertools
import json
import os
import socket
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from rwkvclip_cli import console
from rwkvclip_cli.config import NcclCheckConfig
from rwkvclip_cli.console import UnableError, UsageError
from rwkvclip_cli.launch.gpus import driver_version
from rwkvclip_cli.launch.network import DEFAULT_PORT, steer_gloo
from rwkvclip_cli.launch.plan import LOOPBACK
from rwkvclip_cli.nccl.collectives import COLLECTIVES, Collective, Place, Wrong
from rwkvclip_cli.nccl.report import ELEMENT_BYTES, RankInfo, Report, Row, readable
from rwkvclip_cli.nccl.watch import Watch

INSTALL_HINT = "install the same torch on every node: pip install torch==VERSION"
SAME_HINT = "the same options of rwkvclip nccl-check on every node, --node-rank apart"
WRONG_HINT = "NCCL_P2P_DISABLE=1 rwkvclip nccl-check, which tells a faulty link between GPUs from other causes"
SLOW_HINT = "NCCL_DEBUG=INFO rwkvclip nccl-check, which shows the transports that NCCL chose"
WARM_UPS = 2
LEAVE_S = 10.0
IN_FLIGHT = 32  # operations queued on a GPU at most: all those of a usual size, whose timing the host leaves alone
BEYOND_WATCH_S = 30.0  # torch's own timeouts come after the watch has named the silent rank


def run(options: NcclCheckConfig, sizes: list[int], collectives: Mapping[str, Collective] = COLLECTIVES) -> Report:
    """Be one rank of the check, as RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT say.

    Returns the report on rank 0; on the others one without rows, with the same failure. A rank that does not
    answer within `options.timeout` seconds, to one operation, ends the process with a message that names it.
    """
    os.environ.setdefault("MASTER_ADDR", LOOPBACK)
    os.environ.setdefault("MASTER_PORT", str(DEFAULT_PORT))
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if options.min_busbw is not None and world_size == 1:
        raise UsageError("--min-busbw needs two ranks or more: one rank has no bus to measure")
    place = Place(rank, world_size, _device(options.backend))
    patience = timedelta(seconds=options.timeout + BEYOND_WATCH_S)
    opened, _, _ = next(rendezvous("env://", timeout=patience))
    store = PrefixStore("nccl-check", opened)
    with Watch(rank, world_size, _second_connection(patience), options.timeout) as watch:
        ranks, tasks = _introduce(options, sizes, place, store, watch)
        failure, hint = _agree(place, store, "start", *(different_tasks(tasks) or different_versions(ranks)))
        if failure:
            report = Report(options.op, options.backend, ranks, (), failure, hint)
        else:
            watch.phase("connecting")
            steer_gloo(os.environ)
            dist.init_process_group(
                options.backend,
                store=PrefixStore("group", store),
                rank=rank,
                world_size=world_size,
                # NCCL counts from when an operation was queued, so those before it count too.
                timeout=IN_FLIGHT * patience,
                device_id=place.device if place.device.type == "cuda" else None,
            )
            try:
                report = _sweep(options, sizes, collectives[options.op], place, store, watch, ranks)
            finally:
                dist.destroy_process_group()
        _leave_last(place, store)
        return report


def _leave_last(place: Place, store: Store) -> None:
    """Keep rank 0, whose process may hold the store, until the others have read its last verdict."""
    if place.rank:
        store.set(f"left/{place.rank}", "")
        return
    others = [f"left/{rank}" for rank in range(1, place.world_size)]
    with contextlib.suppress(RuntimeError):  # a rank that died meanwhile is torchrun's to report
        store.wait(others, timedelta(seconds=LEAVE_S))


def _second_connection(timeout: timedelta) -> Store:
    """The same store through a connection that no blocked call of the main thread holds."""
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    client = dist.TCPStore(  # type: ignore[attr-defined]
        address, port, is_master=False, timeout=timeout, wait_for_workers=False
    )
    return PrefixStore("nccl-check", client)


def _device(backend: str) -> torch.device:
    if backend == "gloo":
        return torch.device("cpu")
    local_rank = int(os.environ["LOCAL_RANK"])
    if local_rank >= torch.cuda.device_count():
        raise UnableError(f"local rank {local_rank} has no GPU: {torch.cuda.device_count()} visible to torch")
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank)


def _introduce(
    options: NcclCheckConfig, sizes: list[int], place: Place, store: Store, watch: Watch
) -> tuple[tuple[RankInfo, ...], list[str]]:
    """Publish who this rank is and what it was told to do; rank 0 gets to know all, the others themselves."""
    on_gpu = place.device.type == "cuda"
    me = RankInfo(
        rank=place.rank,
        host=socket.gethostname(),
        device=torch.cuda.get_device_name(place.device) if on_gpu else "CPU",
        driver=driver_version() if on_gpu else None,
        torch=torch.__version__,
        cuda=torch.version.cuda,
        nccl=".".join(map(str, torch.cuda.nccl.version())) if on_gpu else None,
    )
    task = f"{options.op} over {options.backend}, {sizes[0]} to {sizes[-1]} B, {options.iterations} times"
    store.set(f"rank/{place.rank}", json.dumps([asdict(me), task]))
    watch.phase("waiting for the ranks")
    if place.rank != 0:
        return (me,), [task]
    told = [json.loads(store.get(f"rank/{rank}")) for rank in range(place.world_size)]
    return tuple(RankInfo(**each) for each, _ in told), [each for _, each in told]


def different_tasks(tasks: list[str]) -> tuple[str, str] | None:
    """(what is wrong, what to do) where the nodes' command lines ask for different things; else None."""
    rank = next((rank for rank, task in enumerate(tasks) if task != tasks[0]), None)
    if rank is None:
        return None
    return f"the ranks were told different things: rank 0 {tasks[0]}; rank {rank} {tasks[rank]}", SAME_HINT


def different_versions(ranks: tuple[RankInfo, ...]) -> tuple[str, str]:
    """(what is wrong, what to do) where ranks run different versions of torch or NCCL; else empty texts."""
    for name in ("torch", "nccl"):
        holders: dict[str, list[RankInfo]] = {}
        for info in ranks:
            holders.setdefault(str(getattr(info, name)), []).append(info)
        if len(holders) > 1:
            parts = [f"{version} on rank {infos[0].rank} ({infos[0].host})" for version, infos in holders.items()]
            return f"the ranks run different versions of {name}: {', '.join(parts)}", INSTALL_HINT
    return "", ""


def _agree(place: Place, store: Store, step: str, failure: str, hint: str = "") -> tuple[str, str]:
    """Let all ranks know what rank 0 makes of a step: its (failure, hint) on every rank."""
    if place.rank == 0:
        store.set(f"verdict/{step}", json.dumps([failure, hint]))
    failure, hint = json.loads(store.get(f"verdict/{step}"))
    return failure, hint


def _sweep(
    options: NcclCheckConfig,
    sizes: list[int],
    collective: Collective,
    place: Place,
    store: Store,
    watch: Watch,
    ranks: tuple[RankInfo, ...],
) -> Report:
    rows: list[Row] = []
    failure = hint = ""
    counts = dict.fromkeys(_count(size, place.world_size) for size in sizes)
    with console.progress(len(counts), options.op, "sizes") as bar:
        for count in counts:
            size = count * ELEMENT_BYTES
            watch.phase(f"{options.op} of {readable(size)}")
            result = _measure(collective, place, count, options.iterations, watch.progress)
            row, failure, hint = _compare(options, collective, place, store, size, result)
            if failure:
                break
            if row is not None:
                rows.append(row)
            bar.advance(note=readable(size))
    if not failure:
        failure, hint = _agree(place, store, "bandwidth", *_too_slow(options, rows))
    return Report(options.op, options.backend, ranks, tuple(rows), failure, hint)


def _count(size_bytes: int, world_size: int) -> int:
    """Elements of a message of about `size_bytes` that divide evenly among the ranks, at least one each."""
    return max(1, size_bytes // ELEMENT_BYTES // world_size) * world_size


def _measure(
    collective: Collective, place: Place, count: int, iterations: int, progress: Callable[[], None]
) -> dict[str, object]:
    """Check the collective before and after timing it: {"seconds": [...], "wrong": [index, got, expected] or None}.

    `progress` is called after each operation, so that a slow network is told from one that stands still.
    """
    wrong = _try(collective, place, count, progress)
    source, output = collective.start(place, count)
    # Repeated in place, sums would grow without bound; zeros stay zeros.
    source.zero_()
    output.zero_()
    _time(collective, place, source, output, WARM_UPS, progress)
    seconds = _time(collective, place, source, output, iterations, progress)
    del source, output
    # A rank with a wrong element takes part again, or the others would wait for it.
    wrong_later = _try(collective, place, count, progress)
    wrong = wrong or wrong_later
    return {"seconds": seconds, "wrong": None if wrong is None else [wrong.index, wrong.got, wrong.expected]}


def _try(collective: Collective, place: Place, count: int, progress: Callable[[], None]) -> Wrong | None:
    source, output = collective.start(place, count)
    progress()
    collective.run(source, output)
    progress()
    wrong = collective.check(place, count, output)
    progress()
    return wrong


def _time(
    collective: Collective,
    place: Place,
    source: torch.Tensor,
    output: torch.Tensor,
    iterations: int,
    progress: Callable[[], None],
) -> list[float]:
    """Seconds of each call, on the GPU's own clock where there is one."""
    if place.device.type != "cuda":
        dist.barrier()
        times = [time.perf_counter()]
        for _ in range(iterations):
            collective.run(source, output)
            times.append(time.perf_counter())
            progress()
        return [after - before for before, after in itertools.pairwise(times)]
    dist.barrier(device_ids=[place.device.index])
    events = [torch.cuda.Event(enable_timing=True) for _ in range(iterations + 1)]
    events[0].record()
    for queued, event in enumerate(events[1:], 1):
        collective.run(source, output)
        event.record()
        # The host follows from behind: while it waits for an operation, the GPU has later ones queued.
        if queued >= IN_FLIGHT:
            events[queued + 1 - IN_FLIGHT].synchronize()
            progress()
    for event in events[-IN_FLIGHT:]:
        event.synchronize()
        progress()
    return [before.elapsed_time(after) / 1e3 for before, after in itertools.pairwise(events)]


def _compare(
    options: NcclCheckConfig,
    collective: Collective,
    place: Place,
    store: Store,
    size_bytes: int,
    result: dict[str, object],
) -> tuple[Row | None, str, str]:
    """Bring all ranks' results to rank 0: (the row there, None elsewhere; failure and hint everywhere)."""
    step = f"{options.op}/{size_bytes}"
    store.set(f"result/{step}/{place.rank}", json.dumps(result))
    row, failure = None, ""
    if place.rank == 0:
        results = [json.loads(store.get(f"result/{step}/{rank}")) for rank in range(place.world_size)]
        failure = _wrong_elements(options.op, size_bytes, results)
        row = make_row(size_bytes, [each["seconds"] for each in results], collective, place.world_size)
    hint = WRONG_HINT if failure and options.backend == "nccl" else ""
    return row, *_agree(place, store, step, failure, hint)


def _wrong_elements(op: str, size_bytes: int, results: list[dict[str, list[float]]]) -> str:
    wrong = [(rank, *each["wrong"]) for rank, each in enumerate(results) if each["wrong"]]
    if not wrong:
        return ""
    rank, index, got, expected = wrong[0]
    others = f", as on {len(wrong) - 1} other ranks" if len(wrong) > 1 else ""
    where = f"{op} of {readable(size_bytes)}: rank {rank}, element {index:.0f}"
    return f"wrong result in {where}: got {got:g}, expected {expected:g}{others}"


def make_row(size_bytes: int, seconds: list[list[float]], collective: Collective, world_size: int) -> Row:
    """The row of one size from every rank's times: the slowest rank's mean and median.

    algbw = S / t, busbw = algbw times the operation's factor (nccl-tests, doc/PERFORMANCE.md).
    """
    mean_s = max(statistics.fmean(times) for times in seconds)
    median_s = max(statistics.median(times) for times in seconds)
    algbw = busbw = None
    if world_size > 1:
        algbw = size_bytes / mean_s / 1e9
        busbw = algbw * collective.bus_factor(world_size)
    return Row(size_bytes, mean_s * 1e6, median_s * 1e6, algbw, busbw)


def _too_slow(options: NcclCheckConfig, rows: list[Row]) -> tuple[str, str]:
    if options.min_busbw is None or not rows or rows[-1].busbw is None or rows[-1].busbw >= options.min_busbw:
        return "", ""
    last = rows[-1]
    return (
        f"bus bandwidth of {options.op} at {readable(last.size_bytes)} is {last.busbw:.2f} GB/s, "
        f"below --min-busbw {options.min_busbw:g}",
        SLOW_HINT if options.backend == "nccl" else "",
    )
