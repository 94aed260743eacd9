"""A GGUF file as a `checkpoint.Checkpoint`: the tensors, configuration and tokenizer that were converted into it.

Undone are the conversions of llama.cpp: names, the order of q and k rows, norm weights with the offset added, and
quantization. What cannot be undone is the precision that quantization took.
"""

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from wavekit_engines.errors import CheckpointError
from wavekit_engines.gguf_file import GgufFile
from wavekit_engines.gguf_models import architecture_of, config_of, hf_names
from wavekit_engines.gguf_tokenizer import special_token_ids, tokenizer_files

FloatArray = NDArray[np.float32]

_PERMUTED = ("q_proj.weight", "k_proj.weight", "q_proj.bias", "k_proj.bias")


class GgufCheckpoint:
    """One GGUF file, with the tensor names of Hugging Face."""

    def __init__(self, path: Path) -> None:
        """Read the metadata and check that every tensor lies inside the file.

        Raises:
            MisuseError: the ``gguf`` package is missing, or a setting the model needs is.
            CheckpointError: the file is truncated or damaged.
            UnsupportedModelError: its architecture, a setting or a block format is not understood.
        """
        self.name = path.stem
        self._file = GgufFile(path)
        self._architecture = architecture_of(self._file)
        self._names = hf_names(self._file, self._architecture)
        self.config: dict[str, Any] = config_of(self._file, self._architecture)
        if self._architecture.permuted:
            self._check_heads()
        self.generation_config: dict[str, Any] = special_token_ids(self._file.metadata)

    def names(self) -> list[str]:
        """Names of all tensors."""
        return list(self._names)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor."""
        return self._file.shape(self._names[name])

    def rows(self, name: str, start: int, stop: int) -> FloatArray:
        """Rows `start` to `stop` of the first axis."""
        stored = self._names[name]
        if self._architecture.norms_plus_one and name.endswith("norm.weight"):
            return self._file.rows(stored, start, stop) - np.float32(1)
        if self._architecture.permuted and name.endswith(_PERMUTED):
            return self._rows_in_order(stored, start, stop)
        return self._file.rows(stored, start, stop)

    def tokenizer_files(self) -> dict[str, bytes]:
        """Tokenizer files made from the metadata.

        Raises:
            UnsupportedModelError: the file's kind of tokenizer is not understood.
        """
        files = tokenizer_files(self._file.metadata, self._architecture.model_type)
        files["generation_config.json"] = json.dumps(self.generation_config, indent=2).encode()
        return files

    def digest(self) -> str:
        """See `checkpoint.Checkpoint.digest`; the configuration is part of the file."""
        digest = hashlib.sha256()
        self._file.update_digest(digest)
        return digest.hexdigest()

    def _check_heads(self) -> None:
        head_dim = self.config["head_dim"]
        for name, stored in self._names.items():
            if name.endswith(_PERMUTED) and self._file.shape(stored)[0] % head_dim:
                raise CheckpointError(f"{stored} in {self._file.path} does not consist of heads of {head_dim} rows")

    def _rows_in_order(self, stored: str, start: int, stop: int) -> FloatArray:
        """Rows whose order inside each head is undone: stored are pairs (i, i + head_dim / 2), interleaved."""
        head_dim = self.config["head_dim"]
        first, last = start // head_dim, -(-stop // head_dim)
        heads = self._file.rows(stored, first * head_dim, last * head_dim)
        pairs = heads.reshape(last - first, head_dim // 2, 2, *heads.shape[1:])
        ordered = pairs.swapaxes(1, 2).reshape(heads.shape)
        return np.ascontiguousarray(ordered[start - first * head_dim : stop - first * head_dim])
