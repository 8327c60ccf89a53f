"""The model's arguments: named sizes, files of arguments, and what makes arguments impossible.

>>> preset("rwkv-clip-b32")["image_embed_dims"]
640
"""

import difflib
import math
import typing
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from rwkvclip_cli.console import UsageError
from rwkvclip_cli.documents import parse_json, parse_toml

FLOAT_MODES = ("bf16", "fp16", "fp32", "tf32")
# The text tower's channel mix is 3.5 times as wide as the stream, rounded down to whole groups of 32.
TEXT_HIDDEN_RATE = 3.5
TEXT_HIDDEN_STEP = 32


@dataclass(frozen=True)
class ModelArguments:
    """The arguments of an RWKV-CLIP model, under the names of the published model_config files.

    Make it with `ModelArguments.read`, which checks names, types and combinations.
    """

    input_size: int
    """Side of a training image in pixels; it sets the number of position embeddings."""
    image_depth: int
    image_embed_dims: int
    image_patch_size: int
    image_hidden_rate: int
    image_num_heads: int
    image_output_cls_token: bool
    """Take the class token, not the mean over patches, as the image embedding."""
    image_with_cls_token: bool
    drop_path_rate: float
    """Stochastic depth of the image tower's last layer; the first layer's is 0, those between lie on a line."""
    ctx_len: int
    """The most tokens a text may have."""
    vocab_size: int
    n_layer: int
    n_embd: int
    dim_att: int
    """Width of the text tower's attention; 0 means n_embd, and no other value works."""
    dim_ffn: int
    """Width of the text tower's channel mix; 0 means 3.5 n_embd, rounded down to a multiple of 32."""
    head_size: int
    text_num_head: int
    """Text heads; 0 leaves the choice to head_size, otherwise head_size is n_embd // text_num_head."""
    head_size_divisor: int
    dropout: float
    """Dropout of the text tower."""
    text_initialization: bool
    """Initialise the text tower as RWKV does (orthogonal, small, zero), not with PyTorch's defaults."""
    precision: str
    """Where the text tower's first values come from: with bf16 and fp16 they are rounded to that type."""
    with_cp: bool
    """Recompute each block in the backward pass instead of keeping its activations."""
    data_type: str
    workers: int
    pos_emb: int
    head_qk: int
    tiny_att_dim: int
    tiny_att_layer: int

    @classmethod
    def read(cls, config: Mapping[str, Any]) -> "ModelArguments":
        """Check a mapping of arguments and fill in what 0 stands for.

        Raises UsageError for an unknown name (with the nearest known one), a missing one, a wrong type, or values
        that make no model.
        """
        hints = typing.get_type_hints(cls)
        known = [field.name for field in fields(cls)]
        unknown = [str(name) for name in config if name not in hints]
        missing = [name for name in known if name not in config]
        if unknown:
            near = difflib.get_close_matches(unknown[0], missing or known, 1, cutoff=0.4)
            near = near or difflib.get_close_matches(unknown[0], known, 1, cutoff=0.0)
            raise UsageError(f"model argument {unknown[0]!r} is unknown; the nearest is {near[0]!r}")
        if missing:
            raise UsageError(
                f"model argument {missing[0]!r} is missing ({len(config)} of {len(known)} given)",
                hint="start from one of the named sizes, rwkvclip_cli.model.preset('tiny')",
            )
        values = {name: _typed(name, config[name], hints[name]) for name in known}
        if values["dim_att"] <= 0:
            values["dim_att"] = values["n_embd"]
        if values["dim_ffn"] <= 0:
            values["dim_ffn"] = int(TEXT_HIDDEN_RATE * values["n_embd"] // TEXT_HIDDEN_STEP * TEXT_HIDDEN_STEP)
        if values["text_num_head"] > 0:
            _require_divisible("n_embd", values["n_embd"], "text_num_head", values["text_num_head"])
            values["head_size"] = values["n_embd"] // values["text_num_head"]
        arguments = cls(**values)
        arguments._check()
        return arguments

    def _check(self) -> None:
        positive: tuple[str, ...] = (
            "input_size",
            "image_embed_dims",
            "image_patch_size",
            "image_hidden_rate",
            "image_num_heads",
        )
        positive += ("ctx_len", "vocab_size", "n_embd", "dim_ffn", "head_size", "head_size_divisor")
        for name in positive:
            _require(getattr(self, name) >= 1, name, "must be at least 1", getattr(self, name))
        for name in ("image_depth", "n_layer"):
            # The initial schedules divide by depth - 1.
            _require(getattr(self, name) >= 2, name, "must be at least 2", getattr(self, name))
        for name in ("drop_path_rate", "dropout"):
            rate = getattr(self, name)
            _require(math.isfinite(rate) and 0 <= rate < 1, name, "must be at least 0 and below 1", rate)
        for name in ("pos_emb", "head_qk", "tiny_att_dim"):
            _require(getattr(self, name) <= 0, name, "is not part of RWKV-CLIP and must be 0", getattr(self, name))
        for name in ("workers", "text_num_head"):
            _require(getattr(self, name) >= 0, name, "must be at least 0", getattr(self, name))
        _require(self.precision in FLOAT_MODES, "precision", f"must be one of {', '.join(FLOAT_MODES)}", self.precision)
        same = f"must equal image_embed_dims ({self.image_embed_dims}), because the embeddings are compared"
        _require(self.n_embd == self.image_embed_dims, "n_embd", same, self.n_embd)
        _require(self.dim_att == self.n_embd, "dim_att", f"must be 0 or equal n_embd ({self.n_embd})", self.dim_att)
        _require_divisible("image_embed_dims", self.image_embed_dims, "image_num_heads", self.image_num_heads)
        _require_divisible("n_embd", self.n_embd, "head_size", self.head_size)
        # Four quarters of an image head's channels look four ways, two halves of a text head's two ways.
        channels = self.image_embed_dims // self.image_num_heads
        quarters = f"must leave heads a multiple of 4 channels wide; {self.image_embed_dims} channels make {channels}"
        _require(channels % 4 == 0, "image_num_heads", quarters, self.image_num_heads)
        _require(self.head_size % 2 == 0, "head_size", "must be even", self.head_size)
        if self.image_output_cls_token and not self.image_with_cls_token:
            raise UsageError("model argument 'image_output_cls_token' needs 'image_with_cls_token'; got false")


def _typed(name: str, value: Any, kind: type) -> Any:
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        words = {int: "a whole number", float: "a number", bool: "true or false", str: "a string"}[kind]
        raise UsageError(f"model argument {name!r} must be {words}; got {value!r}")
    return value


def _require(holds: bool, name: str, rule: str, value: Any) -> None:
    if not holds:
        raise UsageError(f"model argument {name!r} {rule}; got {value!r}")


def _require_divisible(whole_name: str, whole: int, part_name: str, part: int) -> None:
    _require(part >= 1 and whole % part == 0, part_name, f"must divide {whole_name} ({whole})", part)


# Gu et al., "RWKV-CLIP: A Robust Vision-Language Representation Learner" (arXiv 2406.06973): the YFCC15M recipe.
_B32: dict[str, Any] = {
    "input_size": 224,
    "image_depth": 12,
    "image_embed_dims": 640,
    "image_patch_size": 32,
    "image_hidden_rate": 5,
    "image_num_heads": 8,
    "image_output_cls_token": False,
    "image_with_cls_token": False,
    "drop_path_rate": 0.3,
    "ctx_len": 77,
    "vocab_size": 49408,
    "n_layer": 6,
    "n_embd": 640,
    "dim_att": 640,
    "dim_ffn": 2240,
    "head_size": 64,
    "text_num_head": 0,
    "head_size_divisor": 8,
    "dropout": 0.0,
    "text_initialization": True,
    "precision": "bf16",
    "with_cp": False,
    "data_type": "utf-8",
    "workers": 10,
    "pos_emb": 0,
    "head_qk": 0,
    "tiny_att_dim": 0,
    "tiny_att_layer": -999,
}
_TINY: dict[str, Any] = _B32 | {
    "input_size": 64,
    "image_depth": 2,
    "image_embed_dims": 64,
    "image_patch_size": 16,
    "image_hidden_rate": 4,
    "image_num_heads": 2,
    "drop_path_rate": 0.0,
    "n_layer": 2,
    "n_embd": 64,
    "dim_att": 64,
    "dim_ffn": 224,
    "head_size": 32,
    "precision": "fp32",
    "workers": 0,
}
PRESETS: dict[str, dict[str, Any]] = {
    "rwkv-clip-b32": _B32,
    "rwkv-clip-b16": _B32 | {"image_patch_size": 16},
    "tiny": _TINY,
}


def preset(name: str) -> dict[str, Any]:
    """The arguments of a named model size, a fresh dict that the caller may change.

    Raises UsageError naming the nearest size where there is none of that name.
    """
    if name not in PRESETS:
        near = difflib.get_close_matches(name, PRESETS, 1, cutoff=0.0)
        raise UsageError(f"no model size is named {name!r}; there are {', '.join(PRESETS)}", hint=f"--model {near[0]}")
    return dict(PRESETS[name])


def read_model_config(path: str | Path) -> dict[str, Any]:
    """Read a JSON or TOML file of model arguments, checked and with every 0 that stands for a rule filled in.

    The suffix .toml means TOML, any other JSON. Raises UsageError for an unreadable file, a syntax error, or
    arguments that `ModelArguments.read` refuses, each with the path.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8-sig")
        config = parse_toml(text) if path.suffix.lower() == ".toml" else parse_json(text)
    except OSError as error:
        raise UsageError(f"model config {path}: {error.strerror}") from error
    except (UnicodeDecodeError, ValueError) as error:  # both parsers' errors are ValueErrors
        raise UsageError(f"model config {path}: not valid TOML or JSON (.toml is TOML, else JSON): {error}") from error
    if not isinstance(config, Mapping):
        raise UsageError(f"model config {path}: must hold a table of model arguments; got {type(config).__name__}")
    try:
        return asdict(ModelArguments.read(config))
    except UsageError as error:
        raise UsageError(f"model config {path}: {error.message}", error.hint) from error
