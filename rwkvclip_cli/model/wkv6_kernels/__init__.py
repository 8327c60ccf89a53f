"""The device code of `wkv6_triton`.

`parts` multiplies, `borders` makes factors of decays, `forward` and `backward` are the two kernels.
"""
