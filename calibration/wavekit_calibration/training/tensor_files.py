"""Files of tensors that appear whole or not at all."""

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from wavekit_engines.errors import WavekitError


def write_tensors(file: Path, content: Mapping[str, Any]) -> None:
    """Write under a temporary name and rename.

    Raises:
        WavekitError: the disk is full, or the file cannot be written.
    """
    temporary = file.with_name(file.name + ".tmp")
    try:
        torch.save(dict(content), temporary)
        temporary.replace(file)
    except (OSError, RuntimeError) as error:  # torch says so of a full disk, and does not say that it is full
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise WavekitError(
            f"cannot write {file} ({str(error).splitlines()[0]}): its disk may be full; what is done is kept: make "
            "room, and give the same command with --resume to go on"
        ) from None
