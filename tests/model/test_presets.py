"""Model arguments: named sizes, files, and errors that name what is wrong."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from rwkvclip_cli.config import MODELS
from rwkvclip_cli.console import UsageError
from rwkvclip_cli.model import build_model, preset, read_model_config
from rwkvclip_cli.model.presets import PRESETS

GOLDEN = Path(__file__).parent.parent / "golden"


def test_tiny_is_the_recorded_model_with_clips_vocabulary() -> None:
    config = torch.load(GOLDEN / "tiny.pt", weights_only=True)["config"]
    assert preset("tiny") == config | {"vocab_size": 49408}


def test_the_published_recipes() -> None:
    b32 = preset("rwkv-clip-b32")
    assert (b32["input_size"], b32["image_patch_size"], b32["image_depth"], b32["image_num_heads"]) == (224, 32, 12, 8)
    assert (b32["n_layer"], b32["head_size"], b32["ctx_len"], b32["drop_path_rate"]) == (6, 64, 77, 0.3)
    assert preset("rwkv-clip-b16") == b32 | {"image_patch_size": 16}


def test_the_command_line_offers_exactly_the_sizes_there_are() -> None:
    assert tuple(PRESETS) == MODELS


def test_a_preset_is_the_callers_own() -> None:
    preset("tiny")["n_embd"] = 1
    assert preset("tiny")["n_embd"] == 64


def test_an_unknown_size_names_the_nearest() -> None:
    with pytest.raises(UsageError, match="'rwkv-clip-b23'; there are rwkv-clip-b32, ") as caught:
        preset("rwkv-clip-b23")
    assert caught.value.hint == "--model rwkv-clip-b32"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"image_dept": 3}, "'image_dept' is unknown; the nearest is 'image_depth'"),
        ({"nlayer": 3}, "'nlayer' is unknown; the nearest is 'n_layer'"),
        ({"image_depth": 1}, "'image_depth' must be at least 2; got 1"),
        ({"n_layer": 1}, "'n_layer' must be at least 2; got 1"),
        ({"n_embd": "64"}, "'n_embd' must be a whole number; got '64'"),
        ({"n_embd": True}, "'n_embd' must be a whole number; got True"),
        ({"with_cp": 1}, "'with_cp' must be true or false; got 1"),
        ({"drop_path_rate": 1.0}, "'drop_path_rate' must be at least 0 and below 1; got 1.0"),
        ({"dropout": float("nan")}, "'dropout' must be at least 0 and below 1; got nan"),
        ({"precision": "int8"}, "'precision' must be one of bf16, fp16, fp32, tf32; got 'int8'"),
        ({"n_embd": 128, "dim_att": 128}, r"'n_embd' must equal image_embed_dims \(64\).*; got 128"),
        ({"dim_att": 32}, r"'dim_att' must be 0 or equal n_embd \(64\); got 32"),
        ({"image_num_heads": 5}, r"'image_num_heads' must divide image_embed_dims \(64\); got 5"),
        ({"image_num_heads": 32}, "'image_num_heads' must leave heads a multiple of 4 channels wide.*; got 32"),
        ({"head_size": 48}, r"'head_size' must divide n_embd \(64\); got 48"),
        ({"head_size": 1}, "'head_size' must be even; got 1"),
        ({"text_num_head": 3}, r"'text_num_head' must divide n_embd \(64\); got 3"),
        ({"image_output_cls_token": True}, "'image_output_cls_token' needs 'image_with_cls_token'"),
        ({"tiny_att_dim": 64}, "'tiny_att_dim' is not part of RWKV-CLIP and must be 0; got 64"),
        ({"vocab_size": 0}, "'vocab_size' must be at least 1; got 0"),
    ],
)
def test_arguments_that_make_no_model(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        build_model(preset("tiny") | changes)


def test_a_misspelled_argument_points_to_the_missing_one() -> None:
    config = preset("tiny")
    config["embed_dims"] = config.pop("image_embed_dims")
    with pytest.raises(UsageError, match="'embed_dims' is unknown; the nearest is 'image_embed_dims'"):
        build_model(config)


def test_a_missing_argument_is_named() -> None:
    config = preset("tiny")
    del config["head_size"]
    with pytest.raises(UsageError, match=r"'head_size' is missing \(27 of 28 given\)"):
        build_model(config)


def test_zeros_stand_for_rules() -> None:
    config = preset("tiny") | {"vocab_size": 50, "dim_att": 0, "dim_ffn": 0, "text_num_head": 8}
    text = build_model(config).text_model
    assert text.blocks[0].ffn.key.weight.shape == (224, 64)  # 3.5 x 64
    assert text.blocks[0].att.time_faaaa.shape == (8, 8)
    odd = build_model(config | {"n_embd": 40, "image_embed_dims": 40, "text_num_head": 10}).text_model
    assert odd.blocks[0].ffn.key.weight.shape == (128, 40)  # 3.5 x 40 = 140, down to a multiple of 32


def test_files_of_arguments(tmp_path: Path) -> None:
    config = preset("tiny")
    as_json, as_toml = tmp_path / "model.json", tmp_path / "model.toml"
    as_json.write_text(json.dumps(config))
    as_toml.write_text("".join(f"{name} = {json.dumps(value)}\n" for name, value in config.items()))
    assert read_model_config(as_json) == config
    assert read_model_config(str(as_toml)) == config


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("m.json", "{", "m.json: not valid TOML or JSON"),
        ("m.toml", "n_embd 64", "m.toml: not valid TOML or JSON"),
        ("m.json", "[1]", "m.json: must hold a table of model arguments; got list"),
        ("m.json", '{"n_embed": 64}', "m.json: model argument 'n_embed' is unknown; the nearest is 'n_embd'"),
        ("m.json", "{}", "m.json: model argument 'input_size' is missing"),
    ],
)
def test_files_that_hold_no_model(name: str, content: str, message: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(UsageError, match=message):
        read_model_config(tmp_path / name)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"none.json: No such file"):
        read_model_config(tmp_path / "none.json")
