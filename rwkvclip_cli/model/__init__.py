"""The RWKV-CLIP model, compatible with the published checkpoints.

>>> model = build_model(preset("rwkv-clip-b32"))
>>> image_embedding, text_embedding, logit_scale = model(images, tokens)
"""

from collections.abc import Mapping
from typing import Any

from rwkvclip_cli.model.names import load_reference_state
from rwkvclip_cli.model.presets import ModelArguments, preset, read_model_config
from rwkvclip_cli.model.towers import RwkvClip

__all__ = ["RwkvClip", "build_model", "load_reference_state", "preset", "read_model_config"]


def build_model(config: Mapping[str, Any]) -> RwkvClip:
    """A freshly initialised model from the published trainer's argument names, all of them (see `preset`).

    Its parameters are float32, on torch's default device, drawn from torch's generator. Raises UsageError for
    unknown, missing or impossible arguments.
    """
    return RwkvClip(ModelArguments.read(config))
