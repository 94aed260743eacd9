"""bfloat16, which numpy lacks, as its bits: the upper half of a float32."""

from typing import Any

import numpy as np
from numpy.typing import NDArray


def widened(bits: NDArray[Any]) -> NDArray[np.float32]:
    """The numbers of bits (uint16) as float32, exactly."""
    wide = bits.astype(np.uint32)
    wide <<= 16
    return wide.view(np.float32)


def rounded(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """The bits (uint16) of the nearest bfloat16, of two as near the even one; too large a number becomes infinite."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    return ((bits + (0x7FFF + ((bits >> 16) & 1))) >> 16).astype(np.uint16).reshape(values.shape)
