"""A checkpoint as wavekit sees it: a configuration, tensors that are read row by row, and tokenizer files.

`open_checkpoint` takes a Hugging Face folder (safetensors, one file or sharded), a GGUF file, or a repository id of the
Hugging Face hub. Whatever can be found damaged without reading the weights is found when it is opened. A checkpoint
knows nothing of model families: what its tensors mean is for `families` and `weights`.
"""

import hashlib
import json
import re
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from wavekit_engines.errors import CheckpointError, MisuseError, UnsupportedModelError
from wavekit_engines.safetensors_file import SafetensorsFile

_INDEX, _SINGLE = "model.safetensors.index.json", "model.safetensors"
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "special_tokens_map.json",
    "generation_config.json",
)
_REPO_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


class Checkpoint(Protocol):
    """What every kind of checkpoint offers."""

    @property
    def name(self) -> str:
        """A short name for people: the folder's, the file's or the repository's."""

    @property
    def config(self) -> dict[str, Any]:
        """The model's configuration in the spelling of ``config.json``."""

    @property
    def generation_config(self) -> dict[str, Any]:
        """Defaults of text generation; empty where the checkpoint has none."""

    def names(self) -> list[str]:
        """Names of all tensors, in the spelling of Hugging Face."""

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor; KeyError for a name that is not there."""

    def rows(self, name: str, start: int, stop: int) -> NDArray[np.float32]:
        """Rows `start` to `stop` of the first axis as float32, C-contiguous; no other row is read from the disk."""

    def tokenizer_files(self) -> dict[str, bytes]:
        """Contents of those of `TOKENIZER_FILES` that the checkpoint has."""

    def digest(self) -> str:
        """Identifies weights and configuration, in hexadecimal.

        A SHA-256 over the configuration and, for every weight file, its name (a GGUF file may have any), size, header
        and evenly spaced samples: cheap for files of any size, certain to notice another model or another shape, and
        very likely to notice changed weights. It is no protection against someone who wants to deceive it.
        """


def open_checkpoint(path_or_repo_id: str | Path) -> Checkpoint:
    """Open a checkpoint folder, a GGUF file, or a repository of the Hugging Face hub.

    A path that exists is taken as a path. What does not exist and looks like ``organization/name`` is downloaded from
    the hub, or found in its cache.

    Raises:
        MisuseError: nothing is there, or it is no checkpoint.
        CheckpointError: files are damaged, missing, or contradict each other; the message names the file.
        UnsupportedModelError: the checkpoint has a form that wavekit does not read; the message says what to do.
    """
    path = Path(path_or_repo_id).expanduser()
    if path.is_file() and path.suffix == ".gguf":
        return _open_gguf(path)
    if path.is_file():
        raise MisuseError(f"{path} is neither a checkpoint folder nor a .gguf file")
    if path.is_dir():
        return _open_folder(path, path.resolve().name)
    repo_id = str(path_or_repo_id)
    if not _REPO_ID.fullmatch(repo_id):
        raise MisuseError(f"{path} does not exist; give a checkpoint folder, a .gguf file or a repository id")
    return _open_folder(_download(repo_id), repo_id)


def _open_gguf(path: Path) -> Checkpoint:
    from wavekit_engines.gguf_checkpoint import GgufCheckpoint

    return GgufCheckpoint(path)


def _open_folder(folder: Path, name: str) -> Checkpoint:
    if (folder / "adapter_config.json").exists():
        raise UnsupportedModelError(
            f"{folder} holds an adapter (adapter_config.json), not a whole model: merge it into its base model first, "
            "with merge_and_unload() of peft"
        )
    if not (folder / "config.json").exists():
        gguf_files = sorted(folder.glob("*.gguf"))
        if len(gguf_files) == 1:
            return _open_gguf(gguf_files[0])
        if gguf_files:
            raise MisuseError(f"{folder} holds {len(gguf_files)} GGUF files: name one, such as {gguf_files[0]}")
        if (folder / "manifest.json").exists():
            raise MisuseError(f"{folder} is a bundle, not a checkpoint: give the model that it was made from")
        raise MisuseError(f"{folder} is no checkpoint: it has no config.json")
    return SafetensorsCheckpoint(folder, name)


class SafetensorsCheckpoint:
    """A folder with ``config.json`` and ``model.safetensors``, or shards that an index lists."""

    def __init__(self, folder: Path, name: str) -> None:
        """Read the configuration and check the header of every weight file."""
        self.name = name
        self._folder = folder
        self.config = read_json(folder / "config.json")
        generation = folder / "generation_config.json"
        self.generation_config = read_json(generation) if generation.exists() else {}
        self._files, self._home = open_shards(folder)

    def names(self) -> list[str]:
        """Names of all tensors."""
        return list(self._home)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor."""
        return self._home[name].shape(name)

    def rows(self, name: str, start: int, stop: int) -> NDArray[np.float32]:
        """Rows `start` to `stop` of the first axis."""
        return self._home[name].rows(name, start, stop)

    def tokenizer_files(self) -> dict[str, bytes]:
        """Contents of the tokenizer files that are there."""
        paths = (self._folder / name for name in TOKENIZER_FILES)
        return {path.name: path.read_bytes() for path in paths if path.exists()}

    def digest(self) -> str:
        """See `Checkpoint.digest`."""
        digest = hashlib.sha256((self._folder / "config.json").read_bytes())
        for file in self._files:
            file.update_digest(digest)
        return digest.hexdigest()


def open_shards(folder: Path) -> tuple[list[SafetensorsFile], dict[str, SafetensorsFile]]:
    """The weight files of a folder, and which of them holds which tensor.

    As in transformers, ``model.safetensors`` counts before an index: one that was saved over shards leaves theirs.

    Raises:
        CheckpointError: a file is damaged or missing, or the index and the files contradict each other.
        UnsupportedModelError: there are only pickled weights.
    """
    index = folder / _INDEX
    if (folder / _SINGLE).exists():
        file = SafetensorsFile(folder / _SINGLE)
        return [file], dict.fromkeys(file.names(), file)
    if not index.exists():
        raise _no_weights(folder)
    listed = read_json(index).get("weight_map")
    if not isinstance(listed, dict) or not all(isinstance(shard, str) for shard in listed.values()):
        raise CheckpointError(f"{index} has no weight_map: download it again")
    files = {}
    for shard in sorted(set(listed.values())):
        if Path(shard).name != shard:
            raise CheckpointError(f"{index} names a file outside its folder: {shard}")
        if not (folder / shard).exists():
            raise CheckpointError(f"{folder / shard} is missing, though {_INDEX} names it: download it")
        files[shard] = SafetensorsFile(folder / shard)
    stored = {name: file for file in files.values() for name in file.names()}
    for name, shard in listed.items():
        if stored.get(name) is not files[shard]:
            raise CheckpointError(f"{folder / shard} lacks {name}, which {_INDEX} says it has")
    return list(files.values()), stored


def _no_weights(folder: Path) -> Exception:
    if any(folder.glob("*.bin")) or any(folder.glob("*.pth")) or any(folder.glob("*.pt")):
        return UnsupportedModelError(
            f"{folder} has its weights only as pickled PyTorch files; convert them once with "
            "transformers: AutoModelForCausalLM.from_pretrained(folder).save_pretrained(new_folder)"
        )
    return CheckpointError(f"{folder} has no weights: neither {_SINGLE} nor {_INDEX}")


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file.

    Raises:
        CheckpointError: it cannot be read, or is no JSON object.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} should hold a JSON object")
    return content


def _download(repo_id: str) -> Path:
    try:
        from huggingface_hub import snapshot_download
    except ImportError as error:
        raise MisuseError(
            f"{repo_id} is no path here; to fetch it from the Hugging Face hub: pip install huggingface_hub"
        ) from error
    patterns = ["config.json", _INDEX, "*.safetensors", *TOKENIZER_FILES]
    try:
        # Mistral's repositories hold all weights a second time, in a layout of their own.
        return Path(snapshot_download(repo_id, allow_patterns=patterns, ignore_patterns=["consolidated*"]))
    except Exception as error:
        # The hub's client raises errors of its own, of its HTTP library, and of the cache; all mean the same here.
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise MisuseError(
            f"{repo_id} is no path here and cannot be fetched from the Hugging Face hub: {reason}"
        ) from error
