"""The tensors of a folder, from safetensors or a pickle, and safetensors written.

It knows neither names nor formats of draft heads.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from wavekit_engines.checkpoint import open_shards
from wavekit_engines.draft_formats.stored_tensor import StoredTensor
from wavekit_engines.draft_formats.torch_file import read_torch_file
from wavekit_engines.errors import UnsupportedModelError

_PICKLED = "pytorch_model.bin"


def read_tensors(folder: Path) -> dict[str, StoredTensor]:
    """All tensors of a folder: ``model.safetensors``, its shards, or else ``pytorch_model.bin``.

    Raises:
        CheckpointError: files are missing or damaged, or a pickle asks for code to be run.
        UnsupportedModelError: the files are in a form or a number format that is not read.
    """
    has_safetensors = any(folder.glob("model*.safetensors*"))
    if not has_safetensors and (folder / _PICKLED).is_file():
        return read_torch_file(folder / _PICKLED)
    if not has_safetensors and any(folder.glob("*.bin*")):
        raise UnsupportedModelError(
            f"{folder} has its weights in pickled files other than {_PICKLED}: save them again as model.safetensors"
        )
    _, home = open_shards(folder)
    return {name: StoredTensor(*file.stored(name)) for name, file in home.items()}


def write_safetensors(path: Path, tensors: Mapping[str, StoredTensor]) -> None:
    """Write one safetensors file (https://github.com/huggingface/safetensors), tensors in the order given.

    Raises:
        OSError: the file cannot be written.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    position = 0
    for name, tensor in tensors.items():
        end = position + tensor.values.nbytes
        header[name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": [position, end]}
        position = end
    raw = json.dumps(header, separators=(",", ":")).encode()
    raw += b" " * (-len(raw) % 8)  # so that the data is aligned
    with path.open("wb") as file:
        file.write(len(raw).to_bytes(8, "little") + raw)
        for tensor in tensors.values():
            file.write(np.ascontiguousarray(tensor.values).data)
