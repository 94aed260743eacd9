"""Reading weight files with plain ``seek`` and ``read``, and identifying them by samples.

Never a memory map: its pages count as resident memory, and an export promises to stay near the size of one tensor.
"""

import hashlib
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from wavekit_engines.errors import CheckpointError

_SAMPLES, _SAMPLE_BYTES = 16, 4096


def read_bytes(path: Path, position: int, count: int) -> NDArray[np.uint8]:
    """`count` bytes of a file from `position` on.

    Raises:
        CheckpointError: the file cannot be read, or ends before.
    """
    data = np.empty(count, np.uint8)
    view = data.data
    try:
        with path.open("rb", buffering=0) as file:
            file.seek(position)
            while view.nbytes:
                got = file.readinto(view)
                if not got:
                    raise CheckpointError(f"{path} is shorter than when it was opened")
                view = view[got:]
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror or error}") from error
    return data


def digest_file(digest: "hashlib._Hash", path: Path, size: int, data_start: int, name: str) -> None:
    """Add to `digest` what identifies a weight file.

    That is ``name`` (where files of one checkpoint are told apart by it), its size, everything before `data_start`, and
    16 evenly spaced samples of 4 KiB from there on.
    """
    digest.update(f"{name}:{size}:".encode())
    digest.update(read_bytes(path, 0, data_start).data)
    sample = min(_SAMPLE_BYTES, size - data_start)
    for number in range(_SAMPLES):
        position = data_start + (size - data_start - sample) * number // (_SAMPLES - 1)
        digest.update(read_bytes(path, position, sample).data)
