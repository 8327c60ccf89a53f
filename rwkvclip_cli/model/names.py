"""Checkpoint names: state dicts of the published trainer and our own, loaded whole or not at all.

>>> load_reference_state(model, torch.load("RWKV_CLIP_model_31.pt", weights_only=True))
"""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from rwkvclip_cli.console import RwkvClipError

WRAPPER_PREFIXES = ("module.", "_orig_mod.")
"""What DistributedDataParallel and torch.compile put before, or into, a parameter's name."""
NAMES_SHOWN = 4


def plain_name(name: str) -> str:
    """The parameter's name without the wrappers' parts, wherever and however often they stand in it.

    >>> plain_name("module._orig_mod.text_model.blocks.0._orig_mod.ln1.bias")
    'text_model.blocks.0.ln1.bias'
    """
    wrappers = {prefix.removesuffix(".") for prefix in WRAPPER_PREFIXES}
    return ".".join(part for part in name.split(".") if part not in wrappers)


@torch.no_grad()
def load_reference_state(model: nn.Module, state_dict: Mapping[str, Tensor]) -> None:
    """Copy a state dict into the model's parameters, of whatever type: the model keeps its own float32.

    Names may carry wrappers' prefixes, on either side. All of the model's tensors must be there, with the model's
    shapes, and nothing else; otherwise RwkvClipError names them and the model is left as it was.
    """
    given: dict[str, Tensor] = {}
    for name, tensor in state_dict.items():
        if not isinstance(tensor, Tensor):
            raise RwkvClipError(f"state dict: {name} is not a tensor but a {type(tensor).__name__}")
        if plain_name(name) in given:
            raise RwkvClipError(f"state dict: two names stand for {plain_name(name)}; the second is {name}")
        given[plain_name(name)] = tensor
    wanted = {plain_name(name): tensor for name, tensor in model.state_dict().items()}
    faults = [f"missing {_listed(names)}" for names in [[n for n in wanted if n not in given]] if names]
    faults += [f"unexpected {_listed(names)}" for names in [[n for n in given if n not in wanted]] if names]
    wrong = [name for name in wanted if name in given and given[name].shape != wanted[name].shape]
    shapes = [f"{name} is {tuple(given[name].shape)}, not {tuple(wanted[name].shape)}" for name in wrong]
    faults += [f"of another shape: {_listed(shapes)}" for shapes in [shapes] if shapes]
    if faults:
        raise RwkvClipError(
            f"the weights do not fit the model: {'; '.join(faults)}",
            hint="name the model that they were trained as, with --model or --model-config",
        )
    for name, tensor in wanted.items():
        tensor.copy_(given[name])


def _listed(names: list[str]) -> str:
    shown = ", ".join(names[:NAMES_SHOWN])
    return shown if len(names) <= NAMES_SHOWN else f"{shown} and {len(names) - NAMES_SHOWN} more"
