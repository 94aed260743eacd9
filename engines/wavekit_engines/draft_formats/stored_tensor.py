"""A tensor as checkpoints store it, turned into float32 and back.

Nothing is lost on the way through float32 and back: bfloat16 is its upper half, float16 fits into it. Knows no files.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from wavekit_engines import bfloat16
from wavekit_engines.draft_spec import StoredType
from wavekit_engines.errors import CheckpointError, UnsupportedModelError, WavekitError

_FLOATS: dict[str, StoredType] = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_NAMES = {stored: name for name, stored in _FLOATS.items()}


@dataclass(frozen=True)
class StoredTensor:
    """One tensor in its stored type, by the name safetensors has for it; BF16 is uint16, BOOL is uint8."""

    dtype: str
    values: NDArray[Any]

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the tensor."""
        return self.values.shape


def stored_type(tensor: StoredTensor, name: str) -> StoredType:
    """The number format of a weight.

    Raises:
        UnsupportedModelError: it is none of float32, float16 and bfloat16.
    """
    if tensor.dtype not in _FLOATS:
        raise UnsupportedModelError(
            f"{name} is stored as {tensor.dtype}; give a head stored as float32, float16 or bfloat16, not quantized"
        )
    return _FLOATS[tensor.dtype]


def to_float32(tensor: StoredTensor, name: str) -> NDArray[np.float32]:
    """The numbers of a weight as float32, exactly.

    Raises:
        UnsupportedModelError: as `stored_type`.
        CheckpointError: some are not finite.
    """
    kind = stored_type(tensor, name)
    values = bfloat16.widened(tensor.values) if kind == "bfloat16" else np.asarray(tensor.values, np.float32)
    if not np.isfinite(values).all():
        raise CheckpointError(
            f"{name} holds numbers that are not finite: its training diverged, or the file is damaged"
        )
    return values


def from_float32(values: NDArray[np.float32], kind: StoredType, name: str) -> StoredTensor:
    """The same numbers stored as `kind`, rounded to nearest even where they need it.

    Raises:
        WavekitError: a number is too large for `kind`, or not finite.
    """
    with np.errstate(over="ignore"):
        if kind == "bfloat16":
            stored = bfloat16.rounded(values)
            finite = np.isfinite(values).all() and np.isfinite(bfloat16.widened(stored)).all()
        else:
            stored = np.ascontiguousarray(values, np.float16 if kind == "float16" else np.float32)
            finite = np.isfinite(stored).all()
    if not finite:
        raise WavekitError(f"{name} has numbers that {kind} cannot hold: store the head as float32")
    return StoredTensor(_NAMES[kind], stored)
