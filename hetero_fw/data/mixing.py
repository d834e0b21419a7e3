"""A 64-bit mixing function: numbers that are neighbours become numbers that look unrelated.

The finaliser of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014). It is written out here because
the draws of numpy's and torch's generators may change with their versions, and the data that a
step uses must not.
"""

from __future__ import annotations

from enum import IntEnum

import numpy as np
import numpy.typing as npt

UInt64Array = npt.NDArray[np.uint64]

MASK_64 = 2**64 - 1
GOLDEN_GAMMA = 0x9E3779B97F4A7C15
_FACTOR_1 = 0xBF58476D1CE4E5B9
_FACTOR_2 = 0x94D049BB133111EB

_NP_FACTOR_1 = np.uint64(_FACTOR_1)
_NP_FACTOR_2 = np.uint64(_FACTOR_2)
_NP_30, _NP_27, _NP_31 = np.uint64(30), np.uint64(27), np.uint64(31)


class SeedUse(IntEnum):
    """What a derived seed is for: keeps the uses of the run's one seed apart."""

    SHUFFLE = 1
    TRAIN_SAMPLE = 2
    VAL_SAMPLE = 3
    TRAIN_COLLATE = 4
    VAL_COLLATE = 5


def mix(value: int) -> int:
    """Map a 64-bit number to another one; a bijection."""
    value = (value ^ (value >> 30)) * _FACTOR_1 & MASK_64
    value = (value ^ (value >> 27)) * _FACTOR_2 & MASK_64
    return value ^ (value >> 31)


def mix_array(values: UInt64Array) -> UInt64Array:
    """`mix` for every element."""
    values = (values ^ (values >> _NP_30)) * _NP_FACTOR_1
    values = (values ^ (values >> _NP_27)) * _NP_FACTOR_2
    return values ^ (values >> _NP_31)


def derive_seed(seed: int, *path: int) -> int:
    """A 64-bit seed for one use, named by numbers: equal arguments give equal seeds."""
    derived = mix(seed + GOLDEN_GAMMA & MASK_64)
    for number in path:
        # The product keeps the order of the numbers from cancelling out.
        derived = mix(derived * GOLDEN_GAMMA + mix(number & MASK_64) & MASK_64)
    return derived
