"""What compiles the GPU kernels of model and loss, and whether it is installed.

>>> triton_is_there()
True
"""

import functools
import importlib.util


@functools.cache
def triton_is_there() -> bool:
    """Whether Triton, which compiles the GPU kernels and comes with CUDA builds of torch, is installed."""
    return importlib.util.find_spec("triton") is not None
