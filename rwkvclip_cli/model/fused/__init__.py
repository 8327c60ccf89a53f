"""A whole block in few kernels: Triton for all that lies between the matrix products. Importing it needs Triton.

    >>> y = fused_block(block, x_btc, Shift(heads=8, grid=(7, 7)), torch.bfloat16)

`layout` holds the sizes that all kernels share; `norms`, `mixes` and `gates` each hold some kernels with the functions
that launch them; `attention` and `channels` put a branch together from kernels and products; `block` is the way in.
"""

from rwkvclip_cli.model.fused.block import fused_block, supported

__all__ = ["fused_block", "supported"]
