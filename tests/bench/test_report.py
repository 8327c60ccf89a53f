"""What the figures say: shares, bottleneck and lines, by hand."""

import json
from dataclasses import replace

import pytest

from rwkvclip_cli.bench.parts import LoaderFigures, LossFigures, StepFigures, Wkv6Figures
from rwkvclip_cli.bench.report import Report

IMAGE, TEXT = (512, 49, 8, 80), (512, 77, 10, 64)
REPORT = Report(
    machine="NVIDIA H200",
    model="rwkv-clip-b32",
    batch_size=512,
    precision="bf16",
    kernels=True,
    checkpointing=False,
    steps=20,
    loader=LoaderFigures(images_per_s=20_000.0, threads=16, record_bytes=31_000.4, data="out.rec"),
    wkv6=[
        Wkv6Figures("image", IMAGE, 12, "triton", True, 0.1, 0.25),
        Wkv6Figures("image", IMAGE, 12, "loop", False, None, None),
        Wkv6Figures("text", TEXT, 6, "triton", True, 0.2, 0.4),
        Wkv6Figures("text", TEXT, 6, "loop", False, 50.0, 100.0),
    ],
    loss=LossFigures(ms=0.8, chunk_size=None),
    step=StepFigures(
        ms=80.0, images_per_s=6_400.0, peak_memory_gib=17.5, mfu=0.261, first_s=41.2, parameters=149_651_841
    ),
)


def test_shares_count_each_layer_of_what_is_in_use() -> None:
    # 12 * (0.1 + 0.25) + 6 * (0.2 + 0.4) = 7.8 of 80 ms
    assert REPORT.shares == pytest.approx({"wkv6": 0.0975, "loss": 0.01, "rest": 0.8925})


def test_recomputed_blocks_run_forward_twice() -> None:
    # 12 * 0.1 + 6 * 0.2 = 2.4 ms more
    assert replace(REPORT, checkpointing=True).shares["wkv6"] == pytest.approx(10.2 / 80)


def test_parts_beyond_the_whole_leave_no_rest() -> None:
    assert replace(REPORT, loss=LossFigures(ms=100.0, chunk_size=128)).shares["rest"] == 0.0


def test_the_slower_of_loader_and_step_is_named() -> None:
    assert REPORT.slowest == "step"
    assert REPORT.sentence == (
        "bottleneck: the step, at 6,400 images/s where the loader could give 20,000; of the step's time WKV6 takes "
        "10 %, the loss 1 %, the rest 89 %"
    )
    starved = replace(REPORT, loader=replace(REPORT.loader, images_per_s=900.0))
    assert starved.slowest == "loader"
    assert starved.sentence.startswith("bottleneck: the loader, at 900 images/s where the step could take 6,400; of")


def test_percentages_add_up_to_a_hundred() -> None:
    # 32.6, 0.7 and 66.7 would round to 101.
    odd = replace(REPORT, wkv6=[replace(REPORT.wkv6[0], layers=1, forward_ms=16.08, backward_ms=10.0)])
    odd = replace(odd, loss=LossFigures(ms=0.56, chunk_size=None))
    assert odd.shares == pytest.approx({"wkv6": 0.326, "loss": 0.007, "rest": 0.667})
    assert odd.sentence.endswith("WKV6 takes 33 %, the loss 1 %, the rest 66 %")


def test_text() -> None:
    assert REPORT.text().splitlines() == [
        "rwkv-clip-b32, 149,651,841 parameters, 512 pairs a step, bf16, fused kernels",
        "NVIDIA H200; medians of 20",
        "",
        "                                    forward ms  backward ms",
        "WKV6 image 512x49x8x80 triton            0.100        0.250   in use, 12 layers",
        "WKV6 image 512x49x8x80 loop          no memory    no memory",
        "WKV6 text 512x77x10x64 triton            0.200        0.400   in use, 6 layers",
        "WKV6 text 512x77x10x64 loop             50.000      100.000",
        "",
        "loss     0.80 ms forward and backward, full matrix of scores",
        "step     80.0 ms, 6,400 images/s, 17.50 GiB at the peak, MFU 26.1 %; the first took 41.2 s",
        "loader   20,000 images/s, 16 threads, 31,000 bytes a record, of out.rec",
        "",
        REPORT.sentence,
    ]


def test_document_is_json_with_every_figure() -> None:
    read = json.loads(json.dumps(REPORT.document()))
    assert read["step"]["images_per_s"] == 6_400.0
    assert read["wkv6"][1]["forward_ms"] is None
    assert read["bottleneck"] == {"part": "step", "shares": REPORT.shares, "sentence": REPORT.sentence}
