"""A decoder's weights by role, whatever the checkpoint calls them and however it splits them.

`DecoderWeights` lays a `DecoderSpec` over a checkpoint: it checks on construction that every tensor the spec needs is
there in the right shape, and that none is left over that would change what the model computes. Rows are then read when
they are asked for, a few at a time if wanted, so that memory stays near one piece of one tensor.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from wavekit_engines import tensor_names
from wavekit_engines.checkpoint import Checkpoint
from wavekit_engines.decoder_spec import DecoderSpec
from wavekit_engines.errors import CheckpointError, UnsupportedModelError
from wavekit_engines.families import FAMILIES

FloatArray = NDArray[np.float32]

_COMPARED_ROWS = 1024
_NORM_ROLES = frozenset(
    {"attention_norm_in", "attention_norm_out", "mlp_norm_in", "mlp_norm_out", "q_norm", "k_norm", "final_norm"}
)


@dataclass(frozen=True)
class WeightRows:
    """One weight: the rows of one tensor, or of several one below the other."""

    checkpoint: Checkpoint
    names: tuple[str, ...]
    shape: tuple[int, ...]
    offset: float = 0.0
    """Added to every value (the norm offset of Gemma)."""

    def read(self, start: int = 0, stop: int | None = None) -> FloatArray:
        """Rows `start` to `stop` (to the end by default), float32, C-contiguous, ``[stop - start, *shape[1:]]``."""
        stop = self.shape[0] if stop is None else min(stop, self.shape[0])
        if len(self.names) == 1:
            values = self.checkpoint.rows(self.names[0], start, stop)
        else:
            values = np.empty((stop - start, *self.shape[1:]), np.float32)
            first = 0
            for name in self.names:
                rows = self.checkpoint.shape(name)[0]
                begin, end = max(start - first, 0), min(stop - first, rows)
                if begin < end:
                    values[first + begin - start : first + end - start] = self.checkpoint.rows(name, begin, end)
                first += rows
        if self.offset:
            values += np.float32(self.offset)
        return values


class DecoderWeights:
    """The weights of one decoder.

    ``weights[role]`` for ``embedding`` [V, H], ``head`` [V, H] (the embedding where they are tied) and ``final_norm``
    [H]; ``weights.layer(i, role)`` for

    - ``qkv`` [Q + 2 KV, H] in the order q, k, v; ``output`` [H, Q]; ``gate_up`` [2 I, H]; ``down`` [H, I], each with
      ``_bias`` appended for its bias where the spec has one;
    - ``attention_norm_in``, ``attention_norm_out``, ``mlp_norm_in``, ``mlp_norm_out`` [H], those that the norm
      placement has;
    - ``q_norm``, ``k_norm``: [D] per head, or [Q] and [KV] over all of them.

    Norm weights come with the norm offset already added. A role that the spec does not have is a KeyError.
    """

    def __init__(self, checkpoint: Checkpoint, spec: DecoderSpec) -> None:
        """Check every tensor of `checkpoint` against `spec`.

        Raises:
            CheckpointError: tensors are missing or have another shape.
            UnsupportedModelError: tensors are left over that the spec does not account for.
        """
        self.spec = spec
        self._checkpoint = checkpoint
        self._stored = set(checkpoint.names())
        self._problems: list[str] = []
        self._used: set[str] = set()
        prefix = self._prefix()
        self._layers = [self._layer(f"{prefix}layers.{number}.") for number in range(spec.num_layers)]
        self._globals = self._global_roles(prefix)
        if self._problems:
            raise CheckpointError(f"{checkpoint.name} does not fit its configuration: {_some(self._problems)}")
        self._refuse_leftovers()

    def __getitem__(self, role: str) -> WeightRows:
        return self._globals[role]

    def layer(self, number: int, role: str) -> WeightRows:
        """The weight with this role in layer `number`, counted from 0."""
        return self._layers[number][role]

    def layer_roles(self) -> list[str]:
        """The roles that every layer has."""
        return list(self._layers[0])

    def _prefix(self) -> str:
        for prefix in tensor_names.MODEL_PREFIXES:
            if prefix + tensor_names.FINAL_NORM in self._stored:
                return prefix
        return tensor_names.MODEL_PREFIXES[0]

    def _layer(self, prefix: str) -> dict[str, WeightRows]:
        names = tensor_names.layer_tensors(self.spec, FAMILIES[self.spec.family].fused_tensors)
        shapes = tensor_names.layer_shapes(self.spec)
        return {
            role: self._rows(role, [prefix + part for part in parts], shapes[role]) for role, parts in names.items()
        }

    def _global_roles(self, prefix: str) -> dict[str, WeightRows]:
        spec = self.spec
        embedding = prefix + tensor_names.EMBEDDING
        heads = [name for name in (p + tensor_names.HEAD for p in tensor_names.HEAD_PREFIXES) if name in self._stored]
        head = heads[0] if heads else tensor_names.HEAD
        if spec.tied_head:
            # Either tensor may be the one that was saved.
            shared = head if heads and embedding not in self._stored else embedding
            if heads and embedding in self._stored:
                self._used.add(head)
                self._check_tied(embedding, head)
            embedding = head = shared
        table = ((spec.vocab_size, spec.hidden_size),)
        return {
            "embedding": self._rows("embedding", [embedding], table),
            "head": self._rows("head", [head], table),
            "final_norm": self._rows("final_norm", [prefix + tensor_names.FINAL_NORM], ((spec.hidden_size,),)),
        }

    def _check_tied(self, embedding: str, head: str) -> None:
        """Two stored tensors are tied only if they are equal, as in transformers: else the configuration is wrong."""
        shape = self._checkpoint.shape(embedding)
        equal = shape == self._checkpoint.shape(head) and all(
            np.array_equal(
                self._checkpoint.rows(embedding, start, min(start + _COMPARED_ROWS, shape[0])),
                self._checkpoint.rows(head, start, min(start + _COMPARED_ROWS, shape[0])),
            )
            for start in range(0, shape[0], _COMPARED_ROWS)
        )
        if not equal:
            self._problems.append(f"{head} differs from {embedding}, though tie_word_embeddings is true")

    def _rows(self, role: str, names: list[str], shapes: tuple[tuple[int, ...], ...]) -> WeightRows:
        total = (sum(shape[0] for shape in shapes), *shapes[0][1:])
        expected = shapes if len(names) == len(shapes) else (total,)
        for name, shape in zip(names, expected, strict=True):
            self._used.add(name)
            if name not in self._stored:
                self._problems.append(f"{name} is missing")
            elif self._checkpoint.shape(name) != shape:
                self._problems.append(f"{name} is {list(self._checkpoint.shape(name))}, not {list(shape)}")
        offset = self.spec.norm_offset if role in _NORM_ROLES else 0.0
        return WeightRows(self._checkpoint, tuple(names), total, offset)

    def _refuse_leftovers(self) -> None:
        left = sorted(
            name
            for name in self._stored - self._used
            if not name.startswith(tensor_names.IGNORED_PREFIXES) and not name.endswith(tensor_names.IGNORED_SUFFIXES)
        )
        if left:
            raise UnsupportedModelError(
                f"{self._checkpoint.name} has tensors that its configuration does not account for: {_some(left)}"
            )


def _some(items: Iterable[str]) -> str:
    listed = list(items)
    rest = f", and {len(listed) - 3} more" if len(listed) > 3 else ""
    return ", ".join(listed[:3]) + rest
