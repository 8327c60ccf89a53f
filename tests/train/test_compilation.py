"""Kernels are compiled only where they can be, counted where they are, and spoken of when late."""

import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from helpers import plain_environment

from rwkvclip_cli.console import UnableError
from rwkvclip_cli.train import compilation
from rwkvclip_cli.train.compilation import CompiledKernels, compiles

CPU, GPU = torch.device("cpu"), torch.device("cuda")


@pytest.mark.parametrize(
    ("asked", "device", "triton", "expected"),
    [
        (None, GPU, True, True),
        (True, GPU, True, True),
        (False, GPU, True, False),
        (None, GPU, False, False),
        (None, CPU, True, False),
        (False, CPU, False, False),
    ],
)
def test_kernels_run_where_they_can_unless_told_not_to(
    asked: bool | None, device: torch.device, triton: bool, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compilation, "triton_is_there", lambda: triton)
    assert compiles(asked, device) is expected


@pytest.mark.parametrize(("device", "reason"), [(CPU, "this rank runs on a CPU"), (GPU, "triton, .* not installed")])
def test_asking_for_what_is_not_there_is_an_error(
    device: torch.device, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compilation, "triton_is_there", lambda: False)
    with pytest.raises(UnableError, match=reason) as caught:
        compiles(True, device)
    assert caught.value.hint == "--no-compile"


def test_late_kernels_are_named_once_each(capsys: pytest.CaptureFixture[str]) -> None:
    kernels = CompiledKernels(time.monotonic())
    kernels.count("mixes", from_disk=False)
    kernels.count("mixes", from_disk=False)
    kernels.count("gates", from_disk=True)
    kernels.all_are_there()
    assert capsys.readouterr().err == ""
    for _ in range(2):
        kernels.count("mixes", from_disk=False)
    kernels.count("norms", from_disk=True)
    assert capsys.readouterr().err.splitlines() == [
        "warning: the kernel mixes was compiled after the warm-up: its inputs are unlike all before",
        "warning: the kernel norms was read from disk after the warm-up: its inputs are unlike all before",
    ]
    assert (kernels.compiled, kernels.read) == ({"mixes": 4}, {"gates": 1, "norms": 1})


def test_one_line_says_what_the_start_took(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = iter([12.0, 42.5, 43.75])  # made, warmed up, first step; the run began at 10
    monkeypatch.setattr(time, "monotonic", lambda: next(seconds))
    kernels = CompiledKernels(10.0)
    kernels.count("mixes", from_disk=False)
    kernels.all_are_there()
    kernels.first_step_is_done(CPU)
    assert kernels.started_in_s == 33.75
    assert kernels.summary() == "1 kernels compiled, 0 read from disk; warm-up 30.5 s, first step done after 33.8 s"


def test_a_cpu_neither_loads_triton_nor_hears_of_it(capsys: pytest.CaptureFixture[str]) -> None:
    code = (
        "import sys, time, torch\nfrom rwkvclip_cli.train.compilation import counting\n"
        "with counting(torch.device('cpu'), time.monotonic()) as kernels:\n"
        "    kernels.all_are_there()\n    kernels.first_step_is_done(torch.device('cpu'))\n"
        "print('triton' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env=plain_environment(None), capture_output=True, text=True, check=True
    )
    assert (done.stdout, done.stderr) == ("False\n", "")


KERNEL = """
import time

import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from rwkvclip_cli.train.compilation import counting


@triton.jit
def doubled(x, N: tl.constexpr):
    at = x + tl.arange(0, N)
    tl.store(at, 2 * tl.load(at))


def build(n):
    source = ASTSource(fn=doubled, signature={"x": "*fp32", "N": "constexpr"}, constexprs={(1,): n})
    triton.compile(source, target=GPUTarget("cuda", 90, 32))


heard = []
triton.knobs.compilation.listener = lambda **details: heard.append(details["cache_hit"])
with counting(torch.device("cuda"), time.monotonic()) as kernels:
    for n in (16, 32, 16):
        build(n)
    kernels.all_are_there()
    build(64)
build(128)
print(dict(kernels.compiled), dict(kernels.read), heard)
"""


def test_tritons_compilations_and_cache_hits_are_counted(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    (tmp_path / "kernel.py").write_text(KERNEL)
    # The compiler itself, which builds for a GPU that need not be there.
    environment = plain_environment({"TRITON_CACHE_DIR": str(tmp_path / "cache"), "TRITON_INTERPRET": "0"})
    done = subprocess.run(
        [sys.executable, "kernel.py"], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    # Another listener hears as much as before, and after the block ours hears nothing.
    assert done.stdout == "{'doubled': 3} {'doubled': 1} [False, False, True, False, False]\n"
    assert "warning: the kernel doubled was compiled after the warm-up" in done.stderr
