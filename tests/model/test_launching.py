"""Launches by the compiled form: what they compute, whatever the arguments turn to."""

import pytest
import torch

triton = pytest.importorskip("triton", reason="launches are those of Triton kernels")
import triton.language as tl  # noqa: E402

from rwkvclip_cli.model import launching  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@triton.jit
def add_kernel(x, extra, out, count, SIZE: tl.constexpr, FACTOR: tl.constexpr):
    """out = FACTOR * x + extra, where `extra` is there."""
    at = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    value = FACTOR * tl.load(x + at, mask=at < count, other=0.0)
    if extra is not None:
        value += tl.load(extra + at, mask=at < count, other=0.0)
    tl.store(out + at, value, mask=at < count)


def check(x: torch.Tensor, extra: torch.Tensor | None, factor: int, warps: int = 1) -> None:
    out = torch.full_like(x, torch.nan)
    launching.launch(
        add_kernel, (triton.cdiv(len(x), 16),), x, extra, out, len(x), SIZE=16, FACTOR=factor, num_warps=warps
    )
    assert torch.equal(out, factor * x + (0 if extra is None else extra))


def test_every_kind_of_arguments_in_turn() -> None:
    whole = torch.arange(101.0, device=DEVICE)
    for _ in range(3):
        check(whole[:64], None, 2)
        check(whole[1:65], None, 2)  # begins at no multiple of 16 bytes
        check(whole[:37], None, 2)
        check(whole[:1], None, 2)
        check(whole[:64], whole[3:67], 2)
        check(whole[:64], whole[4:68], 3)
        check(whole[:64].half(), whole[4:68].half(), 3)
        check(whole[:64], whole[4:68], 3, warps=2)


@pytest.mark.gpu
def test_a_kind_of_arguments_is_looked_up_once(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.arange(128.0, device=DEVICE)
    check(x, None, 5)
    monkeypatch.setattr(type(add_kernel), "run", None)
    check(x, None, 5)
    check(torch.arange(1.0, 129.0, device=DEVICE), None, 5)
    with pytest.raises(TypeError):
        check(x, None, 6)
