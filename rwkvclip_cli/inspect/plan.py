"""`rwkvclip inspect DATA.rec --plan --world-size W --batch-size B`: what a run over this set would do, before it runs.

>>> plan(packed, options)["steps_per_epoch"]
7
"""

from typing import Any

from rwkvclip_cli.config import InspectConfig
from rwkvclip_cli.console import counted, page
from rwkvclip_cli.data.loader import LoaderSpec, epoch_window, steps_per_epoch
from rwkvclip_cli.data.packed import PackedSet
from rwkvclip_cli.train.losses import suggested_chunk
from rwkvclip_cli.train.optim import learning_rate

CURVE_POINTS = 16
CURVE_WIDTH = 40
SHOWN_EPOCHS = 4
FLOAT_BYTES = 4


def plan(packed: PackedSet, options: InspectConfig) -> dict[str, Any]:
    """Steps, records left out by epoch, learning rates and the memory of the loss's scores on each rank.

    Raises UsageError where the records do not fill one global batch.
    """
    world_size, batch_size = options.world_size, options.batch_size
    # The image's size changes nothing here.
    spec = LoaderSpec(batch_size, 1, world_size=world_size, num_samples=options.train_num_samples)
    steps = steps_per_epoch(packed, spec)
    total_steps = steps * options.epochs
    global_batch = batch_size * world_size
    used = steps * global_batch
    warmup_steps = round(options.warmup * total_steps)

    def rate(step: int) -> float:
        return learning_rate(step, total_steps=total_steps, warmup_steps=warmup_steps, peak=options.lr)

    points = sorted({round(i * (total_steps - 1) / (CURVE_POINTS - 1)) for i in range(CURVE_POINTS)} | {warmup_steps})
    seen = divmod(options.epochs * used, packed.count)
    return {
        "records": packed.count,
        "world_size": world_size,
        "batch_size": batch_size,
        "global_batch": global_batch,
        "epochs": options.epochs,
        "steps_per_epoch": steps,
        "total_steps": total_steps,
        "samples": total_steps * global_batch,
        "left_out_per_epoch": packed.count - used,
        "left_out": [
            {"epoch": epoch, "ranges": _left_out(packed.count, epoch_window(packed.count, used, epoch))}
            for epoch in range(min(options.epochs, SHOWN_EPOCHS))
        ],
        # Windows follow each other around the file, so records differ by one time at most.
        "times_seen": {"min": seen[0], "max": seen[0] + bool(seen[1])},
        "warmup_steps": warmup_steps,
        "learning_rate": [{"step": step, "lr": rate(step)} for step in points if step < total_steps],
        "loss": _loss_memory(batch_size, global_batch),
    }


def _left_out(count: int, window: list[tuple[int, int]]) -> list[list[int]]:
    """The half-open ranges of ordinals that a window leaves out."""
    borders = [0, *(border for span in sorted(window) for border in span), count]
    return [[start, end] for start, end in zip(borders[::2], borders[1::2], strict=True) if start < end]


def _loss_memory(rows: int, columns: int) -> dict[str, Any]:
    """Bytes of float32 scores at the loss's peak on one rank: four full matrices, or two chunks (train.losses)."""
    chunk = suggested_chunk(rows, columns)
    full = 4 * FLOAT_BYTES * rows * columns
    return {
        "rows": rows,
        "columns": columns,
        "chunk_size": chunk,
        "scores_bytes": full if chunk is None else 2 * FLOAT_BYTES * min(chunk, rows) * columns,
        "full_matrix_bytes": full,
    }


def plan_text(found: dict[str, Any]) -> str:
    """The plan for people."""
    loss = found["loss"]
    lines = [
        f"{counted(found['records'], 'record')}, {counted(found['world_size'], 'rank')} x "
        f"{counted(found['batch_size'], 'pair')} "
        f"= {found['global_batch']:,} a step",
        f"steps: {found['steps_per_epoch']:,} an epoch, {found['total_steps']:,} in "
        f"{counted(found['epochs'], 'epoch')}, {counted(found['samples'], 'pair')}",
        f"left out: {counted(found['left_out_per_epoch'], 'record')} an epoch, others each time",
    ]
    if not found["left_out_per_epoch"]:
        lines[-1] = "left out: none"
    for epoch in found["left_out"] if found["left_out_per_epoch"] else []:
        ranges = ", ".join(f"{start:,} to {end - 1:,}" for start, end in epoch["ranges"])
        lines.append(f"  epoch {epoch['epoch']}: records {ranges}")
    times = found["times_seen"]
    often = f"{times['min']}" if times["min"] == times["max"] else f"{times['min']} or {times['max']}"
    lines.append(f"  after all epochs each record was seen {often} time{'' if often == '1' else 's'}")
    if loss["chunk_size"] is None:
        how = "all at once"
    else:
        how = f"in chunks of {loss['chunk_size']:,} rows; all at once {loss['full_matrix_bytes'] / 2**20:,.1f} MiB"
    lines.append(
        f"loss: scores {loss['rows']:,} x {loss['columns']:,} on each rank, "
        f"{loss['scores_bytes'] / 2**20:,.1f} MiB, {how}"
    )
    lines.append(f"learning rate: {counted(found['warmup_steps'], 'step')} of warm-up, then a cosine to zero")
    peak = max(point["lr"] for point in found["learning_rate"]) or 1.0
    width = len(f"{found['total_steps']:,}")
    for point in found["learning_rate"]:
        bar = "#" * round(CURVE_WIDTH * point["lr"] / peak)
        lines.append(f"  step {point['step']:>{width},}  {point['lr']:.3e}  {bar}".rstrip())
    return page(lines)
