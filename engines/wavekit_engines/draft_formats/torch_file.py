"""Tensors from a file that ``torch.save`` wrote, without torch and without running anything the file says.

The file is a zip archive: a pickle describes tensors, and each storage is one uncompressed entry of raw bytes. A pickle
is a program, so only the five or so names that a dictionary of tensors needs are looked up, as ``weights_only`` of
``torch.load`` does; any other is refused by name. It knows no model.
"""

import io
import math
import pickle
import zipfile
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from wavekit_engines.draft_formats.stored_tensor import StoredTensor
from wavekit_engines.errors import CheckpointError, UnsupportedModelError, WavekitError

_PICKLE_LIMIT = 16_000_000
_STORAGES = {
    **{"FloatStorage": ("F32", "<f4"), "HalfStorage": ("F16", "<f2"), "BFloat16Storage": ("BF16", "<u2")},
    **{"DoubleStorage": ("F64", "<f8"), "LongStorage": ("I64", "<i8"), "IntStorage": ("I32", "<i4")},
    **{"BoolStorage": ("BOOL", "|u1"), "ByteStorage": ("U8", "|u1")},
}


def read_torch_file(path: Path) -> dict[str, StoredTensor]:
    """The tensors of a state dictionary, by name.

    Raises:
        CheckpointError: the file is damaged, or asks for code to be run.
        UnsupportedModelError: it is in the format of PyTorch before 1.6, or holds something other than tensors.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            content = _StateReader(path, archive).load()
    except zipfile.BadZipFile:
        raise UnsupportedModelError(
            f"{path} is no zip archive: it is damaged, or older than PyTorch 1.6; load it with torch.load and save it "
            "again as safetensors"
        ) from None
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror or error}") from error
    except WavekitError:
        raise
    except (ValueError, RuntimeError) as error:  # an archive whose entries have broken names, versions or flags
        raise _damaged(path, error) from error
    if not isinstance(content, Mapping):
        raise UnsupportedModelError(f"{path} holds a {type(content).__name__}, not a dictionary of tensors")
    for name, tensor in content.items():
        if not isinstance(name, str) or not isinstance(tensor, StoredTensor):
            raise UnsupportedModelError(
                f"{path} holds {name!r}, which is no tensor: save the head's state_dict alone, as safetensors"
            )
    return dict(content)


def _damaged(path: Path, error: Exception) -> CheckpointError:
    return CheckpointError(f"{path} is damaged ({error}): download it again")


class _StateReader(pickle.Unpickler):
    """An unpickler that can make dictionaries and tensors and nothing else."""

    def __init__(self, path: Path, archive: zipfile.ZipFile) -> None:
        self._path = path
        self._entries = {info.filename: info for info in archive.infolist()}
        self._archive = archive
        pickles = [name for name in self._entries if name.endswith("/data.pkl")]
        if len(pickles) != 1:
            raise CheckpointError(f"{path} was not written by torch.save: it has no data.pkl")
        self._folder = pickles[0].removesuffix("data.pkl")
        if self._entries.get(f"{self._folder}byteorder") and self._entry("byteorder") != b"little":
            raise UnsupportedModelError(f"{path} was written on a big-endian machine: save it again on another")
        super().__init__(io.BytesIO(self._entry("data.pkl", _PICKLE_LIMIT)))

    def load(self) -> Any:
        try:
            return super().load()
        except CheckpointError:
            raise
        except Exception as error:  # whatever a broken or hostile pickle makes the machine stumble over
            raise _damaged(self._path, error) from error

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("collections", "OrderedDict"):
            return OrderedDict
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return _Rebuild()
        if module == "torch" and name in _STORAGES:
            return name
        raise self._refusal(f"{module}.{name}")

    def persistent_load(self, reference: Any) -> "_Storage":
        match reference:
            case ("storage", str(kind), str(key), _, int(count)) if kind in _STORAGES and count >= 0:
                dtype, layout = _STORAGES[kind]
                data = self._entry(f"data/{key}", count * np.dtype(layout).itemsize)
                values = np.frombuffer(data, layout)
                if values.size != count:
                    raise ValueError(f"storage {key} has {values.size} numbers instead of {count}")
                return _Storage(dtype, values)
        raise self._refusal(f"a storage described by {reference!r:.80}")

    def _entry(self, name: str, limit: int = 16) -> bytes:
        info = self._entries.get(self._folder + name)
        if info is None:
            raise CheckpointError(f"{self._path} is damaged: its {name} is missing; download it again")
        if info.compress_type != zipfile.ZIP_STORED or info.file_size > limit:
            raise CheckpointError(f"{self._path} was not written by torch.save: {name} is compressed or too large")
        return self._archive.read(info)

    def _refusal(self, what: str) -> CheckpointError:
        return CheckpointError(
            f"{self._path} asks for {what}, which a file of tensors has no use for: do not load it anywhere; ask its "
            "author for safetensors"
        )


class _Storage:
    """The numbers of one entry; no attribute of it can be set by a pickle."""

    __slots__ = ("dtype", "values")

    def __init__(self, dtype: str, values: NDArray[Any]) -> None:
        self.dtype, self.values = dtype, values


class _Rebuild:
    """Stands for ``torch._utils._rebuild_tensor_v2``: a view into a storage becomes a tensor."""

    __slots__ = ()

    def __call__(
        self, storage: _Storage, offset: int, shape: tuple[int, ...], strides: tuple[int, ...], *unused: Any
    ) -> StoredTensor:
        numbers = (offset, *shape, *strides)
        if not isinstance(storage, _Storage) or len(shape) != len(strides):
            raise ValueError("a tensor without a storage")
        if not all(isinstance(number, int) and number >= 0 for number in numbers):
            raise ValueError(f"a tensor at offset {offset} of shape {shape} and strides {strides}")
        size, count = storage.values.size, math.prod(list(shape))
        last = offset + sum((length - 1) * stride for length, stride in zip(shape, strides, strict=True))
        if count > size or (count and last >= size):
            raise ValueError(f"a tensor of shape {shape} beyond the end of its storage of {size} numbers")
        if not count:
            return StoredTensor(storage.dtype, np.empty(shape, storage.values.dtype))
        steps = tuple(stride * storage.values.itemsize for stride in strides)
        view = np.lib.stride_tricks.as_strided(storage.values[offset:], shape, steps, writeable=False)
        return StoredTensor(storage.dtype, np.ascontiguousarray(view).reshape(shape))
