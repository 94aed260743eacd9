"""Exits on disk: what is written is read back, and whatever does not fit together is named."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from wavekit_engines.draft_formats.stored_tensor import StoredTensor
from wavekit_engines.draft_formats.tensor_files import read_tensors, write_safetensors
from wavekit_engines.errors import CheckpointError, MisuseError, WavekitError
from wavekit_engines.exit_files import read_exits, write_exits
from wavekit_engines.exit_spec import Exits, ExitSpec

SPEC = ExitSpec(
    boundaries=(2, 5), target_layers=7, hidden_size=6, vocab_size=20, exit_vocab_size=4, norm_eps=1e-5, rank=3
)
D2T = np.array([1, 1, 6, 14])  # ids 1, 2, 8, 17


def exits(**changes: Any) -> Exits:
    spec = replace(SPEC, **changes)
    rng = np.random.default_rng(0)
    weights = {role: rng.normal(size=shape).astype(np.float32) for role, shape in spec.weight_shapes().items()}
    d2t = D2T if spec.exit_vocab_size < spec.vocab_size else np.zeros(spec.vocab_size, np.int64)
    return Exits(spec, weights, d2t, origin="a test", target_digest="abc")


@pytest.mark.parametrize("changes", [{}, {"exit_vocab_size": 20}, {"rank": 0}, {"rank": 0, "exit_vocab_size": 20}])
def test_what_is_written_is_read_back(tmp_path: Path, changes: dict[str, int]) -> None:
    made = exits(**changes)
    write_exits(tmp_path / "exits", made)
    found = read_exits(tmp_path / "exits")
    assert (found.spec, found.origin, found.target_digest) == (made.spec, made.origin, made.target_digest)
    assert found.weights.keys() == made.weights.keys()
    for role, values in made.weights.items():
        np.testing.assert_array_equal(found.weights[role], values)
    assert found.token_ids.tolist() == ([1, 2, 8, 17] if made.spec.exit_vocab_size == 4 else list(range(20)))


def test_weights_may_be_stored_in_half_precision(tmp_path: Path) -> None:
    write_exits(tmp_path / "exits", replace(exits(), dtype="float16"))
    found = read_exits(tmp_path / "exits")
    assert found.dtype == "float16"
    np.testing.assert_allclose(found.weights["5.B"], exits().weights["5.B"], rtol=1e-3)


def change_config(**changes: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        for name, value in changes.items():
            (config if name in config else config["spec"])[name] = value
        (folder / "config.json").write_text(json.dumps(config))

    return change


def change_tensors(change: Callable[[dict[str, StoredTensor]], Any]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        tensors = read_tensors(folder)
        change(tensors)
        write_safetensors(folder / "model.safetensors", tensors)

    return apply


def ids(*offsets: int) -> Callable[[dict[str, StoredTensor]], Any]:
    return lambda tensors: tensors.update(d2t=StoredTensor("I64", np.array(offsets, np.int64)))


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (lambda folder: (folder / "config.json").unlink(), "holds no exits: it has no config.json"),
        (lambda folder: (folder / "config.json").write_text("{"), "damaged"),
        (change_config(kind="llama"), "holds no exits, but something else"),
        (change_config(schema_version=2), "has schema 2 and this wavekit reads 1"),
        (change_config(boundaries=[5, 2]), r"\[5, 2\] do not ascend"),
        (change_config(boundaries=[]), "do not ascend"),
        (change_config(boundaries=[2, 7]), "not all inside a model of 7 layers, 1 to 6"),
        (change_config(boundaries=[0, 2]), "not all inside a model of 7 layers"),
        (change_config(boundaries=[2, 4]), "4.A is missing"),
        (change_config(rank=4), r"2\.A has the shape \[3, 6\], but config.json makes it \[4, 6\]"),
        (change_config(rank=0), "2.A is no part of exits"),
        (change_config(rank=-1), "rank is -1"),
        (change_config(hidden_size="x"), "hidden_size"),
        (change_config(vocab_size=3), "exits score 4 tokens, more than the 3"),
        (change_config(vocab_size=17), "ascending ids from 0 to 16"),
        (change_config(exit_vocab_size=20), "there is a d2t, but exits score all 20"),
        (change_config(exit_vocab_size=5), r"d2t is I64 \[4\]; it must be I64 \[5\]"),
        (change_tensors(lambda tensors: tensors.pop("d2t")), "d2t is missing"),
        (change_tensors(lambda tensors: tensors.pop("5.B")), "5.B is missing"),
        (change_tensors(ids(1, 0, 6, 14)), "ascending ids"),
        (change_tensors(ids(-1, 1, 6, 14)), "ascending ids"),
        (lambda folder: (folder / "model.safetensors").unlink(), "has no weights"),
    ],
)
def test_what_does_not_fit_together_is_named(tmp_path: Path, change: Callable[[Path], None], line: str) -> None:
    write_exits(tmp_path / "exits", exits())
    change(tmp_path / "exits")
    with pytest.raises((CheckpointError, MisuseError), match=line) as caught:
        read_exits(tmp_path / "exits")
    assert "\n" not in str(caught.value)


def test_weights_must_be_finite(tmp_path: Path) -> None:
    write_exits(tmp_path / "exits", exits())
    change_tensors(lambda tensors: tensors["2.A"].values.fill(np.nan))(tmp_path / "exits")
    with pytest.raises(CheckpointError, match=r"2\.A holds numbers that are not finite"):
        read_exits(tmp_path / "exits")
    too_large = exits()
    too_large.weights["2.B"][0, 0] = 1e6
    with pytest.raises(WavekitError, match=r"2\.B has numbers that float16 cannot hold"):
        write_exits(tmp_path / "half", replace(too_large, dtype="float16"))
    assert not (tmp_path / "half").exists()


def test_exits_that_no_model_can_have_are_not_written(tmp_path: Path) -> None:
    with pytest.raises(MisuseError, match="not all inside a model of 7 layers"):
        write_exits(tmp_path / "exits", exits(boundaries=(3, 7)))
    write_exits(tmp_path / "exits", exits())
    with pytest.raises(MisuseError, match="exists already"):
        write_exits(tmp_path / "exits", exits())
