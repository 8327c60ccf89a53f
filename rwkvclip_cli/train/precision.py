"""What --precision means for matrix products; weights, norms and sums are float32 whatever it says.

>>> with autocast("bf16", device):
...     image, text, logit_scale = model(images, tokens)
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}


def autocast(precision: str, device: torch.device) -> AbstractContextManager[Any]:
    """Where `precision` is a 16-bit one, matrix products in it; weights, norms and sums stay float32."""
    if precision in AUTOCAST:
        return torch.autocast(device.type, AUTOCAST[precision])
    return nullcontext()


def set_matmul_precision(precision: str) -> None:
    """Let float32 products round to tf32 for that precision alone; the loss of 16-bit runs stays float32."""
    torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
    torch.backends.cudnn.allow_tf32 = precision == "tf32"
