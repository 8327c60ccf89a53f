"""The model against the published one: outputs, activations, loss and gradients of randomised parameters."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from rwkvclip_cli.model import RwkvClip, blocks, build_model, load_reference_state, shift
from rwkvclip_cli.model.wkv6 import wkv6

GOLDEN = Path(__file__).parent.parent / "golden"
OUTPUT_TOLERANCE = 1e-5  # of the largest value; golden/mutants.txt shows what wrong conventions give
GRADIENT_TOLERANCE = 1e-4  # relative L2


@pytest.fixture(scope="module", params=["tiny", "cls"])
def golden(request: pytest.FixtureRequest) -> dict[str, Any]:
    return torch.load(GOLDEN / f"{request.param}.pt", weights_only=True)


def reference_model(golden: dict[str, Any], dtype: torch.dtype = torch.float32) -> RwkvClip:
    model = build_model(golden["config"])
    load_reference_state(model, golden["state_dict"])
    return model.to(dtype)


def off(value: Tensor, reference: Tensor) -> float:
    """The largest deviation over the largest value."""
    assert value.shape == reference.shape
    return ((value - reference).abs().max() / reference.abs().max()).item()


def relative_l2(value: Tensor, reference: Tensor) -> float:
    assert value.shape == reference.shape
    return ((value - reference).norm() / reference.norm().clamp_min(1e-30)).item()


def one_process_loss(image: Tensor, text: Tensor, scale: Tensor) -> Tensor:
    logits = scale * functional.normalize(image, dim=-1) @ functional.normalize(text, dim=-1).T
    target = torch.arange(len(logits))
    return (functional.cross_entropy(logits, target) + functional.cross_entropy(logits.T, target)) / 2


def backward(model: RwkvClip, golden: dict[str, Any], dtype: torch.dtype = torch.float32) -> Tensor:
    loss = one_process_loss(*model(golden["inputs"]["image"].to(dtype), golden["inputs"]["text"]))
    loss.backward()
    return loss.detach()


def gradients(model: RwkvClip) -> dict[str, Tensor]:
    found = {name: parameter.grad for name, parameter in model.named_parameters()}
    assert all(gradient is not None for gradient in found.values())
    return found


def test_embeddings(golden: dict[str, Any]) -> None:
    inputs, outputs = golden["inputs"], golden["outputs"]
    image, text, scale = reference_model(golden)(inputs["image"], inputs["text"])
    assert off(image, outputs["image_embedding"]) < OUTPUT_TOLERANCE
    assert off(text, outputs["text_embedding"]) < OUTPUT_TOLERANCE
    assert off(scale, outputs["logit_scale"]) < OUTPUT_TOLERANCE
    assert scale.shape == ()


def test_other_image_sizes_and_shorter_texts(golden: dict[str, Any]) -> None:
    # 70 x 90 pixels are no whole number of patches of 16: padding below and to the right, resampled positions.
    model = reference_model(golden)
    image = model.encode_image(golden["inputs"]["image_resized"])
    text = model.encode_text(golden["inputs"]["text_short_ids"])
    assert off(image, golden["outputs"]["image_resized_embedding"]) < OUTPUT_TOLERANCE
    assert off(text, golden["outputs"]["text_short_embedding"]) < OUTPUT_TOLERANCE


def test_float64_agrees_far_beyond_float32(golden: dict[str, Any]) -> None:
    model = reference_model(golden, torch.float64)
    inputs, outputs = golden["inputs"], golden["outputs_f64"]
    image, text, scale = model(inputs["image"].double(), inputs["text"])
    assert off(image, outputs["image_embedding"]) < 1e-12
    assert off(text, outputs["text_embedding"]) < 1e-12
    assert off(one_process_loss(image, text, scale), outputs["loss"]) < 1e-12


def test_activations_after_every_block(golden: dict[str, Any]) -> None:
    model = reference_model(golden)
    seen: dict[str, Tensor] = {}

    def keep(name: str) -> Callable[..., None]:
        def hook(_module: object, _inputs: object, output: Any) -> None:
            seen[name] = output[0] if isinstance(output, tuple) else output

        return hook

    for name, module in model.named_modules():
        module.register_forward_hook(keep(name.replace("image_model.", "image.").replace("text_model.", "text.")))
    model(golden["inputs"]["image"], golden["inputs"]["text"])
    # The final norms run as functions, which hooks do not see.
    seen["image.ln1"] = blocks.layer_norm(seen["image.layers.1"], model.image_model.ln1)
    seen["text.ln_out"] = blocks.layer_norm(seen["text.blocks.1"], model.text_model.ln_out)
    assert len(golden["intermediates"]) == 9
    for name in golden["intermediates"]:
        assert off(seen[name], golden["intermediates"][name]) < OUTPUT_TOLERANCE, name


def test_loss_and_gradients(golden: dict[str, Any]) -> None:
    model = reference_model(golden)
    assert abs(backward(model, golden) - golden["outputs"]["loss"]) < 1e-5
    found = gradients(model)
    assert len(golden["grads"]) >= 35
    for name, reference in golden["grads"].items():
        assert relative_l2(found[name], reference) < GRADIENT_TOLERANCE, name
    rows = golden["grad_emb"]["rows"]
    assert relative_l2(found["text_model.emb.weight"][rows], golden["grad_emb"]["grad"]) < GRADIENT_TOLERANCE


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, GRADIENT_TOLERANCE), (torch.float64, 1e-9)])
def test_every_gradient_by_norm_sum_and_projection(
    golden: dict[str, Any], dtype: torch.dtype, tolerance: float
) -> None:
    model = reference_model(golden, dtype)
    backward(model, golden, dtype)
    found = gradients(model)
    assert list(found) == list(golden["grad_summary"])
    assert golden["grad_summary_columns"][3:6] == ["l2_f64", "sum_f64", "dot_f64"]
    for name, row in golden["grad_summary"].items():
        gradient = found[name].double().flatten()
        wave = torch.cos(torch.arange(1, len(gradient) + 1, dtype=torch.float64))
        norm = row[3]
        # An error of relative L2 norm e moves a sum with weights x by at most e |x| times the norm.
        assert abs(gradient.norm().item() - norm) <= tolerance * norm, name
        assert abs(gradient.sum().item() - row[4]) <= tolerance * norm * math.sqrt(len(gradient)), name
        assert abs((gradient @ wave).item() - row[5]) <= tolerance * norm * wave.norm().item(), name


def test_parameters_beyond_the_class_tokens_reach_have_no_gradient(golden: dict[str, Any]) -> None:
    model = reference_model(golden)
    backward(model, golden)
    zero = [name for name, gradient in gradients(model).items() if not gradient.any()]
    assert zero == golden["zero_grad_parameters"]


# Conventions broken on purpose, each with how far golden/mutants.txt saw the tiny model's image and text embeddings
# move: what makes the tolerances above mean something.
Breaker = Callable[[RwkvClip, pytest.MonkeyPatch], None]


def text_norm_like_image(model: RwkvClip, patch: pytest.MonkeyPatch) -> None:
    for block in model.text_model.blocks:
        block.att.ln_x.eps = 1e-5


def image_norm_like_text(model: RwkvClip, patch: pytest.MonkeyPatch) -> None:
    for layer in model.image_model.layers:
        layer.att.ln_x.eps = 64e-5


def shifts_over_all_channels(model: RwkvClip, patch: pytest.MonkeyPatch) -> None:
    model.image_model.heads = model.text_model.heads = 1


def text_shift_reversed(model: RwkvClip, patch: pytest.MonkeyPatch) -> None:
    right = shift.shift_text
    patch.setattr(shift, "shift_text", lambda x, heads: right(x.flip(1), heads).flip(1))


def bonus_twice(model: RwkvClip, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(blocks, "wkv6", lambda r, k, v, w, u, **_: wkv6(r, k, v, w, 2 * u))


def no_bonus(model: RwkvClip, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(blocks, "wkv6", lambda r, k, v, w, u, **_: wkv6(r, k, v, w, 0 * u))


def no_positions(model: RwkvClip, patch: pytest.MonkeyPatch) -> None:
    model.image_model.pos_embed.data.zero_()


def image_mix_like_text(model: RwkvClip, patch: pytest.MonkeyPatch) -> None:
    for layer in model.image_model.layers:
        for mix in (layer.ffn.spatial_mix_k, layer.ffn.spatial_mix_r):
            mix.data = 1 - mix.data


MUTANTS: list[tuple[Breaker, str, float, float]] = [
    (image_norm_like_text, "image ln_x eps 64e-5 (as text)", 5.0e-3, 0.0),
    (text_norm_like_image, "text ln_x eps 1e-5 (as image)", 0.0, 2.1e-3),
    (shifts_over_all_channels, "shift over C, not per head", 3.7e-1, 5.0e-2),
    (text_shift_reversed, "text shift reversed", 0.0, 6.1e-2),
    (bonus_twice, "wkv: u counted in both directions", 3.1e-2, 1.4e-2),
    (no_bonus, "wkv: no u", 3.5e-2, 1.3e-2),
    (no_positions, "pos_embed omitted", 2.0e-1, 0.0),
    (image_mix_like_text, "image spatial_mix as time_maa", 2.2e-1, 0.0),
]


@pytest.fixture
def tiny() -> dict[str, Any]:
    return torch.load(GOLDEN / "tiny.pt", weights_only=True)


@pytest.mark.parametrize(("breaker", "name", "image_moves", "text_moves"), MUTANTS, ids=[row[1] for row in MUTANTS])
def test_broken_conventions_show(
    breaker: Breaker,
    name: str,
    image_moves: float,
    text_moves: float,
    tiny: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert name in (GOLDEN / "mutants.txt").read_text()
    model = reference_model(tiny)
    breaker(model, monkeypatch)
    image, text, _ = model(tiny["inputs"]["image"], tiny["inputs"]["text"])
    # The table has two digits.
    assert off(image, tiny["outputs"]["image_embedding"]) == pytest.approx(image_moves, rel=0.03, abs=1e-5)
    assert off(text, tiny["outputs"]["text_embedding"]) == pytest.approx(text_moves, rel=0.03, abs=1e-5)
