"""Write safetensors files by hand, so that tests can also write damaged ones."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

BF16 = "BF16"
_NAMES = {"float32": "F32", "float16": "F16", "float64": "F64", "uint16": BF16, "int64": "I64"}


def entries(tensors: Mapping[str, np.ndarray]) -> dict[str, dict[str, Any]]:
    """The header for `tensors`, laid out one after the other; uint16 arrays are taken as bfloat16."""
    header, position = {}, 0
    for name, tensor in tensors.items():
        end = position + tensor.nbytes
        header[name] = {
            "dtype": _NAMES[str(tensor.dtype)],
            "shape": list(tensor.shape),
            "data_offsets": [position, end],
        }
        position = end
    return header


def write(path: Path, tensors: Mapping[str, np.ndarray], header: dict[str, Any] | bytes | None = None) -> None:
    """Write `tensors` under their true header, or under the one given."""
    header = entries(tensors) if header is None else header
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    data = b"".join(np.ascontiguousarray(tensor).tobytes() for tensor in tensors.values())
    path.write_bytes(len(raw).to_bytes(8, "little") + raw + data)
