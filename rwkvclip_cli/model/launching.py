"""Launches of Triton kernels that do not keep the host from running ahead of the GPU.

    >>> launch(scale_kernel, (blocks,), x, out, x.numel(), FACTOR=2, num_warps=4)

Triton looks at every argument, option and global at every launch, which costs more time than many a kernel takes: of
the hundreds of launches in a training step it is the host's largest part. Here a kernel's compiled form is found by
what it was compiled for.
"""

from typing import Any

import triton
from torch import Tensor

ALIGNMENT = 16
"""Bytes; kernels are compiled anew for tensors that begin elsewhere."""

_compiled: dict[tuple[object, ...], tuple[Any, tuple[object, ...]]] = {}


def ceil_div(count: int, size: int) -> int:
    """How many blocks of a size hold so many; Triton's own `cdiv` takes longer than some launches."""
    return -(-count // size)


def launch(kernel: Any, grid: tuple[int, ...], *arguments: object, **options: Any) -> None:
    """Run `kernel[grid](*arguments, **options)`, for a kernel whose `options` hold all its constants, by name.

    A compiled form is found by the numbers' values, so numbers should not vary from launch to launch, nor an argument
    be 1 at one and 1.0 at another. All tensors lie on the current device, on which Triton launches.
    """
    if triton.knobs.runtime.interpret:
        kernel[grid](*arguments, **options)
        return
    key = (
        id(kernel),
        *options,
        *options.values(),
        *[
            (each.dtype, each.data_ptr() % ALIGNMENT == 0, each.device) if isinstance(each, Tensor) else each
            for each in arguments
        ],
    )
    found = _compiled.get(key)
    if found is None:
        constants = tuple(options[name] for name in kernel.arg_names[len(arguments) :])
        _compiled[key] = kernel[grid](*arguments, **options), constants
        return
    compiled, constants = found
    compiled[(*grid, 1, 1)](*arguments, *constants)
