"""Early exits: what their residual adapters compute, and the folder that holds them.

The exit at boundary k reads the residual stream h there and leaves it as it is; on its own path it scores ::

    h' = h + B silu(A norm(h))          RMS norm with a weight of its own; no adapter where rank is 0
    scores = head(final norm(h'))       the target's own final norm and head, its soft cap and scale

over an exit vocabulary: row i of the head is that of target token ``i + d2t[i]``, ids ascending. An adapter whose B is
zero is the logit lens.

A folder holds ``config.json``, the fields of `ExitSpec` and where the weights come from, and ``model.safetensors``,
with ``{boundary}.norm`` [H], ``{boundary}.A`` [rank, H], ``{boundary}.B`` [H, rank] and, where the exit vocabulary is
not the target's, ``d2t`` int64. Boundaries are numbered as in `decoder_spec`; only those inside the model, 1 to N - 1,
have exits.
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import msgspec
import numpy as np
import numpy.typing as npt

from wavekit_engines.atomic import atomic_directory
from wavekit_engines.decoder_spec import DecoderSpec
from wavekit_engines.draft_formats.tensors import (
    StoredTensor,
    from_float32,
    read_tensors,
    stored_type,
    to_float32,
    write_safetensors,
)
from wavekit_engines.draft_spec import StoredType
from wavekit_engines.errors import CheckpointError, MisuseError

KIND: Literal["wavekit exits"] = "wavekit exits"
SCHEMA_VERSION = 1
D2T = "d2t"
_CONFIG, _WEIGHTS = "config.json", "model.safetensors"


@dataclass(frozen=True)
class ExitSpec:
    """The shape of all exits of a model; H is its hidden size."""

    boundaries: tuple[int, ...]
    """Ascending."""
    target_layers: int
    """N of the target; boundaries lie in 1..N - 1."""
    hidden_size: int
    vocab_size: int
    """Of the target."""
    exit_vocab_size: int
    norm_eps: float
    rank: int
    """Of every adapter; 0 for exits without."""

    def weight_shapes(self) -> dict[str, tuple[int, ...]]:
        """Every weight by role, with its shape; matrices are [out, in]. ``d2t`` is not among them."""
        if not self.rank:
            return {}
        parts = {"norm": (self.hidden_size,), "A": (self.rank, self.hidden_size), "B": (self.hidden_size, self.rank)}
        return {f"{boundary}.{part}": shape for boundary in self.boundaries for part, shape in parts.items()}

    def problem(self) -> str | None:
        """What makes no sense about it, None if nothing does."""
        sizes = {"hidden_size": self.hidden_size, "exit_vocab_size": self.exit_vocab_size, "norm_eps": self.norm_eps}
        for name, size in sizes.items():
            if not size > 0:
                return f"{name} is {size}"
        if self.rank < 0:
            return f"rank is {self.rank}"
        if self.exit_vocab_size > self.vocab_size:
            return f"exits score {self.exit_vocab_size} tokens, more than the {self.vocab_size} of their model"
        return boundary_problem(self.boundaries, self.target_layers)


@dataclass(frozen=True)
class Exits:
    """Exits of a model: description, weights by role (float32 in memory) and exit vocabulary.

    ``d2t`` int64 [exit_vocab_size] holds offsets, zeros for the target's whole vocabulary. ``dtype`` is what the
    weights are stored in. ``origin`` says in words what made them; ``target_digest`` is the target's
    `Checkpoint.digest`.
    """

    spec: ExitSpec
    weights: dict[str, npt.NDArray[np.float32]]
    d2t: npt.NDArray[np.int64]
    dtype: StoredType = "float32"
    origin: str = ""
    target_digest: str | None = None

    @property
    def token_ids(self) -> npt.NDArray[np.int64]:
        """int64 [exit_vocab_size]: the target's ids of the exit vocabulary, ascending."""
        ids: npt.NDArray[np.int64] = self.d2t + np.arange(len(self.d2t))
        return ids

    def check_target(self, target: DecoderSpec) -> None:
        """Refuse exits of a model of another shape.

        Raises:
            MisuseError: hidden size, vocabulary or number of layers differ.
        """
        for what, found, expected in (
            ("hidden size", self.spec.hidden_size, target.hidden_size),
            ("vocabulary", self.spec.vocab_size, target.vocab_size),
            ("number of layers", self.spec.target_layers, target.num_layers),
        ):
            if found != expected:
                raise MisuseError(
                    f"the exits are for a model with a {what} of {found}, but this model's is {expected}: take the "
                    "model they were trained for, or make others with `wavekit train exits`"
                )


def boundary_problem(boundaries: tuple[int, ...], layers: int) -> str | None:
    """Why a model of so many layers cannot have exits at these boundaries, None if it can."""
    if not boundaries or list(boundaries) != sorted(set(boundaries)):
        return f"exits at boundaries {list(boundaries)} do not ascend, each once"
    if not 0 < boundaries[0] <= boundaries[-1] < layers:
        return (
            f"exits at boundaries {list(boundaries)} are not all inside a model of {layers} layers, 1 to {layers - 1}"
        )
    return None


@dataclass(frozen=True)
class _Config:
    """config.json."""

    spec: ExitSpec
    origin: str
    target_digest: str | None
    kind: Literal["wavekit exits"] = KIND
    schema_version: int = SCHEMA_VERSION


@dataclass(frozen=True)
class _Header:
    kind: str = ""
    schema_version: int = 0


def write_exits(path: str | Path, exits: Exits, *, replace: bool = False) -> None:
    """Write a folder, which appears whole or not at all.

    Raises:
        MisuseError: ``path`` exists and ``replace`` is False, or the spec makes no sense.
        WavekitError: a number does not fit the stored type, or the disk fails.
    """
    if problem := exits.spec.problem():
        raise MisuseError(f"these exits cannot be written: {problem}")
    shapes = exits.spec.weight_shapes()
    tensors = {role: from_float32(exits.weights[role].reshape(shapes[role]), exits.dtype, role) for role in shapes}
    if exits.spec.exit_vocab_size < exits.spec.vocab_size:
        tensors[D2T] = StoredTensor("I64", np.asarray(exits.d2t, np.int64))
    config = json.dumps(asdict(_Config(exits.spec, exits.origin, exits.target_digest)), indent=1) + "\n"
    total = sum(tensor.values.nbytes for tensor in tensors.values())
    with atomic_directory(Path(path).expanduser(), replace=replace, needed_bytes=total) as folder:
        write_safetensors(folder / _WEIGHTS, tensors)
        (folder / _CONFIG).write_text(config, encoding="utf-8")


def read_exits(path: str | Path, *, target: DecoderSpec | None = None) -> Exits:
    """Read a folder, and check that everything in it fits together, and the target if that is given.

    Raises:
        MisuseError: there is no such folder, or it holds no exits, or another model's.
        CheckpointError: files are damaged, or say things that contradict each other.
        UnsupportedModelError: weights are quantized.
    """
    folder = Path(path).expanduser()
    config = _read_config(folder)
    tensors = read_tensors(folder)
    d2t = _read_vocabulary(folder, config.spec, tensors.pop(D2T, None))
    weights, dtype = _read_weights(folder, config.spec, tensors)
    exits = Exits(config.spec, weights, d2t, dtype, config.origin, config.target_digest)
    if target is not None:
        exits.check_target(target)
    return exits


def _read_config(folder: Path) -> _Config:
    file = folder / _CONFIG
    if not file.is_file():
        raise MisuseError(f"{folder} holds no exits: it has no {_CONFIG}; make them with `wavekit train exits`")
    content = file.read_bytes()
    try:
        header = msgspec.json.decode(content, type=_Header)
        if header.kind != KIND:
            raise MisuseError(f"{folder} holds no exits, but something else; make them with `wavekit train exits`")
        if header.schema_version != SCHEMA_VERSION:
            raise CheckpointError(
                f"{file} has schema {header.schema_version} and this wavekit reads {SCHEMA_VERSION}: update wavekit"
            )
        config = msgspec.json.decode(content, type=_Config)
    except msgspec.MsgspecError as error:
        raise CheckpointError(f"{file} is damaged: {error}; take the folder from its training run again") from None
    if problem := config.spec.problem():
        raise CheckpointError(f"{file} is damaged: {problem}; take the folder from its training run again")
    return config


def _read_weights(
    folder: Path, spec: ExitSpec, tensors: dict[str, StoredTensor]
) -> tuple[dict[str, npt.NDArray[np.float32]], StoredType]:
    shapes = spec.weight_shapes()
    for verdict, names in (("is missing", {*shapes} - {*tensors}), ("is no part of exits", {*tensors} - {*shapes})):
        if names:
            raise CheckpointError(f"{folder}: {min(names)} {verdict}; take the folder from its training run again")
    for role, shape in shapes.items():
        if tensors[role].shape != shape:
            raise CheckpointError(
                f"{folder}: {role} has the shape {list(tensors[role].shape)}, but {_CONFIG} makes it {list(shape)}; "
                "take both from the same training run"
            )
    kinds: set[StoredType] = {stored_type(tensor, role) for role, tensor in tensors.items()}
    if len(kinds) > 1:
        raise CheckpointError(f"{folder}: weights are stored in several formats, {', '.join(sorted(kinds))}")
    weights = {role: to_float32(tensors[role], role) for role in shapes}
    return weights, kinds.pop() if kinds else "float32"


def _read_vocabulary(folder: Path, spec: ExitSpec, stored: StoredTensor | None) -> npt.NDArray[np.int64]:
    size = spec.exit_vocab_size
    if size == spec.vocab_size:
        if stored is not None:
            raise CheckpointError(f"{folder}: there is a d2t, but exits score all {size} tokens; take it away")
        return np.zeros(size, np.int64)
    if stored is None:
        raise CheckpointError(f"{folder}: d2t is missing: nobody can tell which {size} tokens are scored")
    if stored.dtype != "I64" or stored.shape != (size,):
        raise CheckpointError(f"{folder}: d2t is {stored.dtype} {list(stored.shape)}; it must be I64 [{size}]")
    ids = stored.values + np.arange(size)
    if ids[0] < 0 or ids[-1] >= spec.vocab_size or not (np.diff(ids) > 0).all():
        raise CheckpointError(
            f"{folder}: d2t does not lead to ascending ids from 0 to {spec.vocab_size - 1}; take the training run's"
        )
    return stored.values.astype(np.int64)
