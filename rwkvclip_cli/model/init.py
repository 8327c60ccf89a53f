"""The first values of the towers' parameters, as published; the schedules over channels are in `blocks`.

>>> init_text_tower(tower, rwkv_style=True, precision="bf16")
"""

import math

import torch
from torch import Tensor, nn

IMAGE_LOW_RANK = 1e-4
TEXT_LOW_RANK = 1e-2
TEXT_EMBEDDING = 1e-4
LOW_RANK = ("time_maa_w1", "time_maa_w2", "time_decay_w1", "time_decay_w2")
# Gains of the orthogonal matrices by the end of their name; a matrix with more rows than columns gets another
# sqrt(rows / columns), and 0 stands for zeros: a fresh block then changes nothing.
TEXT_GAINS = {
    "att.receptance.weight": 1.0,
    "att.key.weight": 0.1,
    "att.value.weight": 1.0,
    "att.gate.weight": 0.1,
    "att.output.weight": 0.0,
    "ffn.key.weight": 0.5,
    "ffn.receptance.weight": 0.0,
    "ffn.value.weight": 0.0,
}
ROUNDED_TO = {"bf16": torch.bfloat16, "fp16": torch.float16}


@torch.no_grad()
def init_image_tower(tower: nn.Module) -> None:
    """Small low-rank matrices; everything else keeps PyTorch's defaults or the schedules."""
    for name, parameter in tower.named_parameters():
        if name.endswith(LOW_RANK):
            nn.init.uniform_(parameter, -IMAGE_LOW_RANK, IMAGE_LOW_RANK)


@torch.no_grad()
def init_text_tower(tower: nn.Module, rwkv_style: bool, precision: str) -> None:
    """RWKV's initialisation, or PyTorch's defaults beside the low-rank matrices and schedules.

    The published trainer makes these values in its training type, so under bf16 they lie on bfloat16's grid (decay
    and bonus always do); the parameters themselves stay float32.
    """
    layers = len(tower.blocks)  # type: ignore[arg-type]
    for name, parameter in tower.named_parameters():
        if name == "emb.weight":
            if rwkv_style:
                nn.init.uniform_(parameter, -TEXT_EMBEDDING, TEXT_EMBEDDING)
            else:
                nn.init.normal_(parameter)
        elif name.endswith(("time_maa_w2", "time_decay_w2")):
            nn.init.uniform_(parameter, -TEXT_LOW_RANK, TEXT_LOW_RANK)
        elif rwkv_style and name.endswith("ln_x.weight"):
            nn.init.constant_(parameter, ((1 + int(name.split(".")[1])) / layers) ** 0.7)
        elif rwkv_style:
            gain = next((gain for end, gain in TEXT_GAINS.items() if name.endswith(end)), None)
            if gain is not None:
                _orthogonal(parameter, gain)
        if name.endswith(("time_decay", "time_faaaa")):
            parameter.copy_(parameter.to(torch.bfloat16))
        elif rwkv_style and precision in ROUNDED_TO:
            parameter.copy_(parameter.to(ROUNDED_TO[precision]))


def _orthogonal(matrix: Tensor, gain: float) -> None:
    if gain == 0:
        nn.init.zeros_(matrix)
        return
    rows, columns = matrix.shape
    nn.init.orthogonal_(matrix, gain=gain * math.sqrt(max(1.0, rows / columns)))
