"""The draft vocabulary: ``d2t`` and ``t2d`` of a checkpoint, checked against its head and each other.

``d2t`` int64 [D] holds offsets: draft id i is target id ``i + d2t[i]``. ``t2d`` bool [V] marks the same target ids. A
head whose rows go with another map drafts nonsense that no server notices, so whatever contradicts is refused.
"""

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from wavekit_engines.draft_formats.layouts import D2T, T2D
from wavekit_engines.draft_formats.stored_tensor import StoredTensor
from wavekit_engines.errors import CheckpointError

_RETAKE = "take both from the training run that made the head"


def read_vocabulary(tensors: Mapping[str, StoredTensor], draft_size: int, size: int) -> NDArray[np.int64]:
    """``d2t`` of a checkpoint, int64 [draft_size]; zeros where head and target have the same vocabulary.

    Args:
        tensors: the checkpoint's; only ``d2t`` and ``t2d`` are looked at.
        draft_size: rows of the head.
        size: the target's vocabulary.

    Raises:
        CheckpointError: a map is missing, has the wrong shape or type, is not ascending, leaves the target's
            vocabulary, or contradicts the other.
    """
    if draft_size > size:
        raise CheckpointError(
            f"the head scores {draft_size} tokens, more than the {size} of its target: mend config.json"
        )
    if D2T in tensors:
        d2t = _offsets(tensors[D2T], draft_size)
    elif draft_size == size:
        d2t = np.zeros(size, np.int64)
    else:
        raise CheckpointError(
            f"d2t is missing: nobody can tell which of {size} target tokens its {draft_size} scores belong to; "
            "save the map of its training run (target id minus draft id) with it"
        )
    ids = np.arange(draft_size) + d2t
    marked = _marked(tensors[T2D], size) if T2D in tensors else None
    if marked is not None and not np.array_equal(ids, marked) and np.array_equal(d2t, marked):
        raise CheckpointError("d2t holds target ids, but it must hold offsets: subtract the row number")
    if ids.min() < 0 or ids.max() >= size:
        raise CheckpointError(
            f"d2t leads to target ids {ids.min()} to {ids.max()}, outside 0 to {size - 1}; it must hold "
            "offsets (target id minus draft id), and go with this target"
        )
    if not (np.diff(ids) > 0).all():
        raise CheckpointError(
            f"the target ids of d2t do not ascend, so it is not the map that training made: {_RETAKE}"
        )
    if marked is not None and not np.array_equal(ids, marked):
        odd = np.setxor1d(ids, marked)[0]
        raise CheckpointError(
            f"d2t and t2d name different target tokens (the first is {odd}), so one of them was made anew: {_RETAKE}"
        )
    return d2t


def marks(d2t: NDArray[np.int64], size: int) -> StoredTensor:
    """``t2d`` for a ``d2t``: uint8 [size], BOOL."""
    values = np.zeros(size, np.uint8)
    values[np.arange(d2t.size) + d2t] = 1
    return StoredTensor("BOOL", values)


def _offsets(tensor: StoredTensor, draft_size: int) -> NDArray[np.int64]:
    if tensor.dtype not in ("I64", "I32"):
        raise CheckpointError(f"d2t is stored as {tensor.dtype}; it must be integers")
    if tensor.shape != (draft_size,):
        raise CheckpointError(
            f"d2t has the shape {list(tensor.shape)}, but the head has {draft_size} rows, so they do not belong "
            f"together: {_RETAKE}"
        )
    return tensor.values.astype(np.int64)


def _marked(tensor: StoredTensor, size: int) -> NDArray[np.int64]:
    if tensor.dtype not in ("BOOL", "U8") or tensor.shape != (size,):
        raise CheckpointError(
            f"t2d is {tensor.dtype} {list(tensor.shape)}; it must be BOOL [{size}], one for each target token"
        )
    return np.flatnonzero(tensor.values)
