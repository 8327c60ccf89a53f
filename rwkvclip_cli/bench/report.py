"""What was measured, for people and as JSON, and what it says about where the time goes.

>>> print(report.text())
"""

from dataclasses import asdict, dataclass
from typing import Any

from rwkvclip_cli.bench.parts import LoaderFigures, LossFigures, StepFigures, Wkv6Figures
from rwkvclip_cli.console import page


@dataclass(frozen=True)
class Report:
    """Every figure of one machine and one setting."""

    machine: str
    """The device in words."""
    model: str
    batch_size: int
    precision: str
    kernels: bool
    checkpointing: bool
    steps: int
    loader: LoaderFigures
    wkv6: list[Wkv6Figures]
    loss: LossFigures
    step: StepFigures

    @property
    def slowest(self) -> str:
        """Which of `loader` and `step` gives fewer images a second, each alone."""
        return "loader" if self.loader.images_per_s < self.step.images_per_s else "step"

    @property
    def shares(self) -> dict[str, float]:
        """Shares of the step's time, 0 to 1: WKV6 forward and backward over all layers, the loss, and all else.

        Parts are measured alone and the step as a whole, so the first two are estimates; a sum of parts beyond the
        whole leaves nothing for the rest.
        """
        passes = 2 if self.checkpointing else 1  # forward passes
        wkv6_ms = sum(
            row.layers * (passes * row.forward_ms + row.backward_ms)
            for row in self.wkv6
            if row.in_use and row.forward_ms is not None and row.backward_ms is not None
        )
        shares = {"wkv6": wkv6_ms / self.step.ms, "loss": self.loss.ms / self.step.ms}
        return {**shares, "rest": max(0.0, 1.0 - sum(shares.values()))}

    @property
    def sentence(self) -> str:
        """Which part is the bottleneck, and where the step's time goes."""
        loader, step = (f"{part.images_per_s:,.0f}" for part in (self.loader, self.step))
        wkv6, loss = (round(100 * self.shares[part]) for part in ("wkv6", "loss"))
        rest = max(0, 100 - wkv6 - loss)  # so that what people add up is a hundred
        if self.slowest == "loader":
            verdict = f"the loader, at {loader} images/s where the step could take {step}"
        else:
            verdict = f"the step, at {step} images/s where the loader could give {loader}"
        return f"bottleneck: {verdict}; of the step's time WKV6 takes {wkv6} %, the loss {loss} %, the rest {rest} %"

    def document(self) -> dict[str, Any]:
        """All of it, for JSON; times in milliseconds unless their name says otherwise."""
        return {**asdict(self), "bottleneck": {"part": self.slowest, "shares": self.shares, "sentence": self.sentence}}

    def text(self) -> str:
        """All of it, for people."""
        how = "fused kernels" if self.kernels else "plain operations"
        how += ", blocks recomputed" if self.checkpointing else ""
        step = self.step
        lines = [
            f"{self.model}, {step.parameters:,} parameters, {self.batch_size:,} pairs a step, {self.precision}, {how}",
            f"{self.machine}; medians of {self.steps}",
            "",
            f"{'':34}{'forward ms':>12}{'backward ms':>13}",
            *(_wkv6_line(row) for row in self.wkv6),
            "",
            f"loss     {self.loss.ms:,.2f} ms forward and backward, {_scores(self.loss)}",
            f"step     {step.ms:,.1f} ms, {step.images_per_s:,.0f} images/s, {step.peak_memory_gib:.2f} GiB at the peak"
            f"{_mfu(step)}; the first took {step.first_s:.1f} s",
            f"loader   {self.loader.images_per_s:,.0f} images/s, {self.loader.threads} threads, "
            f"{self.loader.record_bytes:,.0f} bytes a record, {_source(self.loader)}",
            "",
            self.sentence,
        ]
        return page(lines)


def _wkv6_line(row: Wkv6Figures) -> str:
    """`WKV6 image 512x49x8x80 triton *`, the times, and how many layers of the model have them."""
    shape = "x".join(map(str, row.shape))
    times = "".join(
        f"{'no memory' if ms is None else f'{ms:,.3f}':>{width}}"
        for ms, width in ((row.forward_ms, 12), (row.backward_ms, 13))
    )
    name = f"WKV6 {row.tower} {shape} {row.implementation}"
    return f"{name:34}{times}{f'   in use, {row.layers} layers' if row.in_use else ''}"


def _scores(loss: LossFigures) -> str:
    return "full matrix of scores" if loss.chunk_size is None else f"scores in chunks of {loss.chunk_size:,} rows"


def _mfu(step: StepFigures) -> str:
    return "" if step.mfu is None else f", MFU {100 * step.mfu:.1f} %"


def _source(loader: LoaderFigures) -> str:
    return "scenes drawn for this" if loader.data is None else f"of {loader.data}"
