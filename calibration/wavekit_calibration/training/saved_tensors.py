"""Files of tensors that training can go on from."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from wavekit_engines.atomic import new_file
from wavekit_engines.errors import WavekitError

_KEPT = "what is done is kept: give the same command with --resume to go on"


def write_tensors(file: Path, content: Mapping[str, Any]) -> None:
    """Write a file that appears whole or not at all.

    Raises:
        WavekitError: the disk is full, or the file cannot be written.
    """
    try:
        with new_file(file) as stream:
            torch.save(dict(content), stream)
    except WavekitError as error:
        raise WavekitError(f"{error}; {_KEPT}") from None
    except RuntimeError as error:  # torch's own way to say that a disk is full
        raise WavekitError(
            f"cannot write {file} ({str(error).splitlines()[0]}): its disk may be full; {_KEPT}"
        ) from None
