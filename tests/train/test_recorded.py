"""A step recorded as a CUDA graph does what the same step launched kernel by kernel does."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from rwkvclip_cli.console import UnableError
from rwkvclip_cli.model import RwkvClip, build_model, preset
from rwkvclip_cli.train.compilation import records
from rwkvclip_cli.train.losses import clip_loss
from rwkvclip_cli.train.recorded import RecordedPass

Pass = Callable[[Tensor, Tensor, Tensor], Tensor]


@pytest.mark.parametrize(
    ("asked", "kernels", "world_size", "expected"),
    [(None, True, 1, True), (True, True, 1, True), (False, True, 1, False), (None, False, 1, False),
     (None, True, 2, False), (False, False, 2, False)],
)  # fmt: skip
def test_steps_are_recorded_where_they_can_unless_told_not_to(
    asked: bool | None, kernels: bool, world_size: int, expected: bool
) -> None:
    assert records(asked, kernels, world_size) is expected


@pytest.mark.parametrize(("kernels", "world_size", "reason"), [(False, 1, "no compiled kernels"), (True, 4, "4 ranks")])
def test_asking_for_what_cannot_be_recorded_is_an_error(kernels: bool, world_size: int, reason: str) -> None:
    with pytest.raises(UnableError, match=reason) as caught:
        records(True, kernels, world_size)
    assert caught.value.hint == "--no-cuda-graph"


def passes(model: RwkvClip, precision: torch.dtype) -> Pass:
    def forward_backward(images: Tensor, tokens: Tensor, draws: Tensor) -> Tensor:
        with torch.autocast("cuda", precision):
            loss = clip_loss(*model(images, tokens, drop_path_uniform=draws))
        loss.backward()
        return loss.detach()

    return forward_backward


def batch(seed: int) -> tuple[Tensor, Tensor, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    config = preset("tiny")
    side = config["input_size"]
    images = torch.randn(16, 3, side, side, generator=draw)
    tokens = torch.randint(config["vocab_size"], (16, config["ctx_len"]), generator=draw)
    return images.cuda(), tokens.cuda(), torch.rand(config["image_depth"], 2, 16, generator=draw).cuda()


def gradients(model: RwkvClip) -> dict[str, Tensor]:
    return {name: x.grad.clone() for name, x in model.named_parameters() if x.grad is not None}


@pytest.mark.gpu
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("precision", [torch.bfloat16, torch.float16])
def test_recorded_gradients_are_the_same_bits(precision: torch.dtype, checkpointing: bool) -> None:
    model = build_model(preset("tiny") | {"drop_path_rate": 0.2, "with_cp": checkpointing}).cuda()
    plain = passes(model, precision)
    expected = []
    for seed in (1, 2, 1):
        model.zero_grad(set_to_none=True)
        expected.append((plain(*batch(seed)), gradients(model)))
    model.zero_grad(set_to_none=True)
    model.use_text_stream(torch.cuda.Stream())
    recorded = RecordedPass(plain, *batch(3))
    for seed, (loss, of_names) in zip((1, 2, 1), expected, strict=True):
        assert torch.equal(recorded(*batch(seed)), loss)
        found = gradients(model)
        assert found.keys() == of_names.keys()
        assert all(torch.equal(found[name], value) for name, value in of_names.items())


@pytest.mark.gpu
def test_a_batch_of_another_size_is_refused() -> None:
    model = build_model(preset("tiny")).cuda()
    plain = passes(model, torch.bfloat16)
    plain(*batch(1))
    model.zero_grad(set_to_none=True)
    recorded = RecordedPass(plain, *batch(1))
    images, tokens, draws = batch(1)
    with pytest.raises(ValueError, match=r"recorded with an input of shape \(16, "):
        recorded(images[:1], tokens, draws)
