"""The folder that holds early exits.

``config.json`` has the fields of `ExitSpec` and where the weights come from; ``model.safetensors`` has
``{boundary}.norm`` [H], ``{boundary}.A`` [rank, H], ``{boundary}.B`` [H, rank] and, where the exit vocabulary is not
the target's, ``d2t`` int64.
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
from wavekit_engines.draft_formats.stored_tensor import StoredTensor, from_float32, stored_type, to_float32
from wavekit_engines.draft_formats.tensor_files import read_tensors, write_safetensors
from wavekit_engines.draft_spec import StoredType
from wavekit_engines.errors import CheckpointError, MisuseError
from wavekit_engines.exit_spec import Exits, ExitSpec

KIND: Literal["wavekit exits"] = "wavekit exits"
SCHEMA_VERSION = 1
D2T = "d2t"
_CONFIG, _WEIGHTS = "config.json", "model.safetensors"


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
    if (folder / "exits" / _CONFIG).is_file():
        raise MisuseError(f"{folder} is the folder of a training run: its exits are in {folder / 'exits'}")
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
