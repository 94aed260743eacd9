"""GGUF containers: what is read from them, and how damage and strangers are told apart."""

import os
import struct

import gguf
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from wavekit_engines.checkpoint import open_checkpoint
from wavekit_engines.errors import CheckpointError, UnsupportedModelError
from wavekit_engines.gguf_file import GgufFile

MATRIX = np.arange(12 * 64, dtype=np.float32).reshape(12, 64) / 100
VECTOR = np.arange(7, dtype=np.float32)


def write(path, architecture="llama", tensors=None, alignment=None, **metadata):
    """A GGUF file with these tensors (name: array, or array and block format) and this metadata."""
    writer = gguf.GGUFWriter(path, architecture)
    if alignment:
        writer.add_custom_alignment(alignment)
    for key, value in metadata.items():
        add = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string, bool: writer.add_bool}
        add.get(type(value), writer.add_array)(key, value)
    for name, tensor in (tensors or {"matrix.weight": MATRIX, "vector.bias": VECTOR}).items():
        values, kind = tensor if isinstance(tensor, tuple) else (tensor, gguf.GGMLQuantizationType.F32)
        writer.add_tensor(name, gguf.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_metadata_of_every_kind(tmp_path):
    path = write(
        tmp_path / "x.gguf",
        **{"a.int": 3, "a.float": 0.5, "a.text": "Grüße", "a.flag": True, "a.list": ["x", "", "y"], "a.ids": [1, -2]},
    )
    metadata = GgufFile(path).metadata
    assert metadata["general.architecture"] == "llama"
    assert (metadata["a.int"], metadata["a.float"], metadata["a.text"]) == (3, 0.5, "Grüße")
    assert metadata["a.flag"] is True
    assert metadata["a.list"] == ["x", "", "y"]
    assert metadata["a.ids"].tolist() == [1, -2]


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q5_1"])
def test_rows_are_dequantized_as_the_gguf_package_does(kind, tmp_path):
    kind = gguf.GGMLQuantizationType[kind]
    file = GgufFile(write(tmp_path / "x.gguf", tensors={"matrix.weight": (MATRIX, kind), "vector.bias": VECTOR}))
    expected = gguf.dequantize(gguf.quantize(MATRIX, kind), kind)
    assert file.shape("matrix.weight") == (12, 64)
    np.testing.assert_array_equal(file.rows("matrix.weight", 0, 12), expected)
    np.testing.assert_array_equal(file.rows("matrix.weight", 5, 9), expected[5:9])
    np.testing.assert_array_equal(file.rows("vector.bias", 2, 6), VECTOR[2:6])


def test_an_alignment_of_its_own(tmp_path):
    file = GgufFile(write(tmp_path / "x.gguf", alignment=256))
    np.testing.assert_array_equal(file.rows("matrix.weight", 3, 4), MATRIX[3:4])


@given(keep=st.integers(0, 1_000_000))
def test_a_truncated_file_is_found_when_opened(tmp_path_factory, keep):
    path = write(tmp_path_factory.mktemp("truncated") / "x.gguf", **{"a.list": ["x", "y"], "a.ids": [1, 2]})
    # The file ends with padding, which nobody misses.
    os.truncate(path, keep % (path.stat().st_size - 32))
    with pytest.raises(CheckpointError, match=r"x\.gguf"):
        GgufFile(path)


@given(position=st.integers(0, 300), value=st.integers(0, 255))
def test_a_changed_byte_in_the_header_is_an_error_of_the_file_or_changes_its_content(tmp_path_factory, position, value):
    """Whatever a damaged header says, it is read or refused: no other error, no allocation beyond the file."""
    path = write(tmp_path_factory.mktemp("changed") / "x.gguf", **{"a.list": ["x", "y"], "a.ids": [1, 2]})
    content = bytearray(path.read_bytes())
    content[position] = value
    path.write_bytes(content)
    try:
        file = GgufFile(path)
    except (CheckpointError, UnsupportedModelError):
        return
    for name in file.names():
        assert file.rows(name, 0, 1).dtype == np.float32


def test_another_file_is_not_taken_for_one(tmp_path):
    (tmp_path / "x.gguf").write_bytes(b"PK\x03\x04" + bytes(100))
    with pytest.raises(CheckpointError, match="is no GGUF file"):
        open_checkpoint(tmp_path / "x.gguf")


@pytest.mark.parametrize("version", [1, 4, 0x03000000])
def test_another_version_or_byte_order_is_refused(tmp_path, version):
    path = write(tmp_path / "x.gguf")
    content = bytearray(path.read_bytes())
    content[4:8] = struct.pack("<I", version)
    path.write_bytes(content)
    with pytest.raises(UnsupportedModelError, match="readable versions: 2, 3"):
        GgufFile(path)


def test_an_unknown_architecture_is_refused_with_the_known_ones(tmp_path):
    path = write(tmp_path / "x.gguf", architecture="mamba")
    with pytest.raises(UnsupportedModelError, match="'mamba' is not supported; supported: llama, qwen2"):
        open_checkpoint(path)


def test_one_part_of_a_split_model_is_refused(tmp_path):
    path = write(tmp_path / "x.gguf", **{"split.count": 3})
    with pytest.raises(UnsupportedModelError, match="llama-gguf-split --merge"):
        open_checkpoint(path)


def test_a_block_format_that_cannot_be_dequantized_is_refused_when_opened(tmp_path):
    path = write(tmp_path / "x.gguf", tensors={"vector.bias": VECTOR})
    content = path.read_bytes()
    info = content.index(b"vector.bias") + len("vector.bias") + 4 + 8
    path.write_bytes(content[:info] + struct.pack("<I", 28) + content[info + 4 :])  # float64
    with pytest.raises(UnsupportedModelError, match=r"vector\.bias in .* has the block format 28"):
        GgufFile(path)


def test_the_digest_depends_on_the_file_s_content(tmp_path):
    settings = {
        **{"llama.block_count": 1, "llama.embedding_length": 64, "llama.feed_forward_length": 8},
        **{"llama.attention.head_count": 1, "llama.context_length": 16},
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
    }
    digests = set()
    for change in (0, 1):
        tensors = {"token_embd.weight": MATRIX + change}
        path = write(tmp_path / "x.gguf", tensors=tensors, **settings)
        digests |= {open_checkpoint(path).digest(), open_checkpoint(path).digest()}
        renamed = path.rename(tmp_path / "y.gguf")  # what was measured or trained with it still belongs to it
        digests.add(open_checkpoint(renamed).digest())
    assert len(digests) == 2
