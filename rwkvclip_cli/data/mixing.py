"""Draws that are functions of their place: numbers that look random and depend on their inputs alone.

>>> mixed(np.arange(3), seed=0)
"""

from typing import Any

import numpy as np


def mixed(
    ordinals: np.ndarray[Any, np.dtype[np.int64]], *, seed: int, epoch: int = 0
) -> np.ndarray[Any, np.dtype[np.uint64]]:
    """64 bits for each ordinal (N,), from (seed, epoch, ordinal) alone.

    The finaliser of SplitMix64 (Steele et al. 2014) mixes the three.
    """
    with np.errstate(over="ignore"):
        bits = ordinals.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        bits += np.uint64(epoch) * np.uint64(0xD1B54A32D192ED03) + np.uint64(seed) * np.uint64(0x8CB92BA72F3D8DD7)
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
            bits = (bits ^ (bits >> np.uint64(shift))) * np.uint64(factor)
        bits ^= bits >> np.uint64(31)
    return bits
