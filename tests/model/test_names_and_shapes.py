"""Parameter names, order, shapes and types of the published sizes, and state dicts in all their spellings."""

import ast
from pathlib import Path

import pytest
import torch
from torch import Tensor

import rwkvclip_cli.model
from rwkvclip_cli.console import RwkvClipError
from rwkvclip_cli.model import RwkvClip, build_model, load_reference_state, preset
from rwkvclip_cli.model.names import plain_name

GOLDEN = Path(__file__).parent.parent / "golden"


def golden_keys(size: str) -> list[tuple[str, str, int]]:
    """(name, shape as text, count) of every published tensor, in its order."""
    lines = (GOLDEN / f"{size}_keys.txt").read_text().splitlines()
    rows = [line.split("\t") for line in lines if not line.startswith("#")]
    return [(name, shape, int(count)) for name, shape, _, count in rows]


@pytest.fixture
def tiny() -> RwkvClip:
    torch.manual_seed(0)
    return build_model(preset("tiny") | {"vocab_size": 100})


@pytest.mark.parametrize(("size", "total"), [("b32", 149_561_601), ("b16", 148_181_121)])
def test_published_sizes(size: str, total: int) -> None:
    with torch.device("meta"):
        model = build_model(preset(f"rwkv-clip-{size}"))
    found = [(name, str(tuple(tensor.shape)), tensor.numel()) for name, tensor in model.state_dict().items()]
    assert found == golden_keys(size)
    assert sum(count for _, _, count in found) == total
    assert [name for name, _ in model.named_parameters()] == [name for name, _, _ in found]
    # The published file keeps two parameters a text layer as bfloat16; masters are float32 throughout.
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}


def test_wrappers_leave_the_name() -> None:
    assert plain_name("module.logit_scale") == "logit_scale"
    assert plain_name("_orig_mod.module.module.text_model.ln_out.bias") == "text_model.ln_out.bias"
    assert plain_name("module.text_model.blocks.0._orig_mod.att.ln_x.bias") == "text_model.blocks.0.att.ln_x.bias"


@pytest.mark.parametrize("prefix", ["", "module.", "_orig_mod.", "module._orig_mod.", "_orig_mod.module.module."])
def test_any_prefix_loads(prefix: str, tiny: RwkvClip) -> None:
    values = {name: torch.randn_like(tensor) for name, tensor in tiny.state_dict().items()}
    load_reference_state(tiny, {prefix + name: value for name, value in values.items()})
    for name, tensor in tiny.state_dict().items():
        assert torch.equal(tensor, values[name])


def test_a_model_with_wrapped_blocks_loads_plain_names(tiny: RwkvClip) -> None:
    values = {name: torch.randn_like(tensor) for name, tensor in tiny.state_dict().items()}
    wrapped = torch.nn.Module()
    wrapped.module = tiny  # what DistributedDataParallel does to names
    load_reference_state(wrapped, values)
    assert torch.equal(tiny.logit_scale, values["logit_scale"])


def test_low_precision_values_go_into_float32_masters(tiny: RwkvClip) -> None:
    name = "text_model.blocks.0.att.time_decay"
    state = dict(tiny.state_dict())
    state[name] = torch.full_like(state[name], -1.2345).bfloat16()
    load_reference_state(tiny, state)
    master = tiny.get_parameter(name)
    assert master.dtype == torch.float32
    assert master[0, 0, 0].item() == -1.234375  # the nearest bfloat16


def changed(state: dict[str, Tensor], change: str) -> dict[str, Tensor]:
    state = {f"module.{name}": tensor.clone() + 1 for name, tensor in state.items()}
    if change == "missing":
        del state["module.logit_scale"]
    elif change == "unexpected":
        state["module.image_model.cls_token"] = torch.zeros(1, 1, 64)
    elif change == "shape":
        state["module.image_model.pos_embed"] = torch.zeros(1, 49, 64)
    elif change == "twice":
        state["_orig_mod.logit_scale"] = torch.zeros(())
    return state


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("missing", "missing logit_scale"),
        ("unexpected", "unexpected image_model.cls_token"),
        ("shape", r"another shape: image_model.pos_embed is \(1, 49, 64\), not \(1, 16, 64\)"),
        ("twice", "two names stand for logit_scale; the second is _orig_mod.logit_scale"),
    ],
)
def test_weights_that_do_not_fit_are_refused_whole(change: str, message: str, tiny: RwkvClip) -> None:
    before = {name: tensor.clone() for name, tensor in tiny.state_dict().items()}
    with pytest.raises(RwkvClipError, match=message):
        load_reference_state(tiny, changed(before, change))
    for name, tensor in tiny.state_dict().items():
        assert torch.equal(tensor, before[name])


def test_a_long_list_of_names_is_cut(tiny: RwkvClip) -> None:
    with pytest.raises(RwkvClipError, match=r"missing logit_scale, .* and \d+ more") as caught:
        load_reference_state(tiny, {})
    assert "--model" in caught.value.hint


def test_what_is_no_tensor_is_named(tiny: RwkvClip) -> None:
    with pytest.raises(RwkvClipError, match="epoch is not a tensor but a int"):
        load_reference_state(tiny, {"epoch": 3})


def test_the_model_knows_nothing_of_data_training_and_launching() -> None:
    for path in Path(rwkvclip_cli.model.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            ours = [name for name in names if name.startswith("rwkvclip_cli")]
            known = ("rwkvclip_cli.model", "rwkvclip_cli.console", "rwkvclip_cli.documents")
            assert all(name.startswith(known) for name in ours), path
