"""Files of ``torch.save`` read without torch: nothing that a pickle asks for is run, and damage is one line."""

import collections
import io
import pickle
import zipfile

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from wavekit_engines.draft_formats.torch_file import read_torch_file
from wavekit_engines.errors import CheckpointError, UnsupportedModelError, WavekitError

VALUES = np.arange(24, dtype=np.float32)


class Global:
    """Pickles as a reference to any name, whether it exists here or not."""

    def __init__(self, module, name):
        self.module, self.name = module, name


class Storage:
    """Pickles as the persistent id of a storage."""

    def __init__(self, kind="FloatStorage", key="0", count=24):
        self.reference = ("storage", Global("torch", kind), key, "cpu", count)


class Call:
    """Pickles as a call."""

    def __init__(self, function, *arguments):
        self.function, self.arguments = function, arguments


class _Pickler(pickle._Pickler):  # the one in Python, whose way of saving can be changed
    def persistent_id(self, value):
        return value.reference if isinstance(value, Storage) else None

    def save(self, value, save_persistent_id=True):
        if isinstance(value, Global):
            self.write(pickle.GLOBAL + f"{value.module}\n{value.name}\n".encode())
        elif isinstance(value, Call):
            self.save(value.function)
            self.save(value.arguments)
            self.write(pickle.REDUCE)
        else:
            super().save(value, save_persistent_id)


def tensor(shape=(24,), strides=(1,), offset=0, **storage):
    rebuild = Global("torch._utils", "_rebuild_tensor_v2")
    return Call(rebuild, Storage(**storage), offset, shape, strides, False, collections.OrderedDict())


def write(path, content, compression=zipfile.ZIP_STORED, **entries):
    file = io.BytesIO()
    _Pickler(file, 2).dump(content)
    with zipfile.ZipFile(path, "w", compression) as archive:
        archive.writestr("archive/data.pkl", file.getvalue())
        archive.writestr("archive/data/0", VALUES.tobytes())
        for name, value in entries.items():
            archive.writestr(f"archive/{name}", value)
    return path


def test_a_dictionary_of_tensors(tmp_path):
    found = read_torch_file(write(tmp_path / "a.bin", {"a": tensor(), "b": tensor((4,), (1,), 20)}, byteorder="little"))
    np.testing.assert_array_equal(found["a"].values, VALUES)
    np.testing.assert_array_equal(found["b"].values, VALUES[20:])
    assert found["a"].dtype == "F32"


def test_a_transposed_view(tmp_path):
    found = read_torch_file(write(tmp_path / "a.bin", {"a": tensor((4, 6), (1, 4))}))
    np.testing.assert_array_equal(found["a"].values, VALUES.reshape(6, 4).T)


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("os", "system"),
        ("builtins", "eval"),
        ("torch", "load"),
        ("collections", "OrderedDict.fromkeys"),
        ("torch", "x"),
    ],
)
def test_code_is_not_run_but_named(module, name, tmp_path):
    path = write(tmp_path / "a.bin", {"a": Call(Global(module, name), f"touch {tmp_path / 'run'}")})
    with pytest.raises(CheckpointError, match=f"asks for {module}.{name}, which .* do not load it") as caught:
        read_torch_file(path)
    assert str(path) in str(caught.value)
    assert not (tmp_path / "run").exists()


def test_what_may_be_named_cannot_be_changed(tmp_path):
    file = io.BytesIO()
    file.write(pickle.PROTO + b"\x02" + pickle.GLOBAL + b"torch._utils\n_rebuild_tensor_v2\n")
    file.write(pickle.NONE + pickle.EMPTY_DICT + b"X\x08\x00\x00\x00__call__" + pickle.NONE + pickle.SETITEM)
    file.write(pickle.TUPLE2 + pickle.BUILD + pickle.STOP)
    with zipfile.ZipFile(tmp_path / "a.bin", "w") as archive:
        archive.writestr("archive/data.pkl", file.getvalue())
    with pytest.raises(CheckpointError, match="is damaged"):
        read_torch_file(tmp_path / "a.bin")
    assert read_torch_file(write(tmp_path / "b.bin", {"a": tensor()}))["a"].shape == (24,)


@pytest.mark.parametrize(
    "content",
    [
        {"a": tensor((25,), (1,))},
        {"a": tensor((24,), (1,), 1)},
        {"a": tensor((5, 5), (5, 1))},
        {"a": tensor((10**9, 10**9), (0, 0))},
        {"a": tensor((2, 2), (-1, 1))},
        {"a": tensor((2,), (1, 1))},
        {"a": tensor(count=25)},
        {"a": tensor(key="1")},
        {"a": tensor(key="../data.pkl")},
        {"a": tensor(kind="HalfStorage")},
    ],
)
def test_tensors_that_do_not_fit_their_storage(content, tmp_path):
    with pytest.raises(CheckpointError):
        read_torch_file(write(tmp_path / "a.bin", content))


@pytest.mark.parametrize("content", [{"a": 1}, {1: tensor()}, {"a": {"b": tensor()}}, [tensor()]])
def test_files_that_hold_more_than_tensors(content, tmp_path):
    with pytest.raises(UnsupportedModelError):
        read_torch_file(write(tmp_path / "a.bin", content))


def test_files_of_another_make(tmp_path):
    path = tmp_path / "a.bin"
    path.write_bytes(pickle.dumps({"a": 1}))
    with pytest.raises(UnsupportedModelError, match=r"older than PyTorch 1\.6"):
        read_torch_file(path)
    with pytest.raises(UnsupportedModelError, match="big-endian"):
        read_torch_file(write(path, {"a": tensor()}, byteorder="big"))
    with pytest.raises(CheckpointError, match="compressed"):
        read_torch_file(write(path, {"a": tensor()}, compression=zipfile.ZIP_DEFLATED))
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("other", b"")
    with pytest.raises(CheckpointError, match=r"no data\.pkl"):
        read_torch_file(path)
    with pytest.raises(CheckpointError, match="cannot read"):
        read_torch_file(tmp_path / "missing.bin")


@pytest.mark.parametrize(
    "changes",
    [{6: 0xFF}, {8: 0x01}, {9: 0x08, 46: 0xC0}],
    ids=["for a later version", "encrypted", "named in what is no UTF-8"],
)
def test_an_archive_whose_list_of_entries_is_damaged(changes, tmp_path):
    path = write(tmp_path / "a.bin", {"a": tensor()})
    data = bytearray(path.read_bytes())
    entry = data.index(b"PK\x01\x02")
    for place, byte in changes.items():
        data[entry + place] = byte
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match="is damaged"):
        read_torch_file(path)


@given(position=st.floats(0, 1, exclude_max=True), byte=st.integers(0, 255), cut=st.booleans())
def test_damage_anywhere_is_an_error_of_ours_or_none(position, byte, cut, tmp_path_factory):
    path = tmp_path_factory.getbasetemp() / "damaged.bin"
    data = bytearray(write(path, {"a": tensor((4, 6), (6, 1))}).read_bytes())
    index = int(position * len(data))
    data[index] = byte
    path.write_bytes(data[:index] if cut else data)
    try:
        found = read_torch_file(path)
    except WavekitError:
        return
    assert all(stored.values.size <= 24 for stored in found.values())
