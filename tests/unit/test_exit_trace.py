"""Trace files: what is written is read, and what is damaged is refused by name."""

import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from dex_lattice import random_trace

from wavekit_calibration.errors import TraceError
from wavekit_calibration.readiness import measure_readiness
from wavekit_calibration.simulation.replay import DexStages, replay
from wavekit_calibration.simulation.trace import ExitTrace, TraceHeader, load_trace, trace_of_agreement


def content_of(trace: ExitTrace) -> dict[str, Any]:
    header = {"num_layers": 5, "boundaries": [1, 2, 3, 4], "kind": "wavekit exit trace", "schema_version": 1}
    return {"header": header, "candidates": trace.candidates, "final": trace.final, "starts": trace.starts}


def write(file: Path, content: dict[str, Any]) -> Path:
    arrays = {name: value for name, value in content.items() if name != "header"}
    if "header" in content:
        arrays["header"] = np.frombuffer(json.dumps(content["header"]).encode(), dtype=np.uint8)
    with file.open("wb") as stream:
        np.savez(stream, **arrays)
    return file


@pytest.mark.parametrize("with_draft", [False, True])
def test_what_is_saved_is_loaded(with_draft: bool, tmp_path: Path) -> None:
    trace = random_trace(0, [5, 1, 7], 4, 3, 9, silence=0.2)
    header = TraceHeader(9, (1, 3, 4, 8), model="m", checkpoint_digest="d", origin="a test")
    draft = np.arange(26, dtype=np.int32).reshape(13, 2) if with_draft else None
    trace = replace(trace, header=header, draft=draft)
    trace.save(tmp_path / "trace.npz")
    found = load_trace(tmp_path / "trace.npz")
    assert found.header == header
    for name in ("candidates", "final", "starts", "draft"):
        np.testing.assert_array_equal(getattr(found, name), getattr(trace, name))
    assert [file.name for file in tmp_path.iterdir()] == ["trace.npz"]


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ({"header": {"schema_version": 2}}, "has schema 2 and this wavekit reads 1"),
        ({"header": {"kind": "something"}}, "its kind is 'something'"),
        ({"header": {"num_layers": "five"}}, "num_layers"),
        ({"header": {"num_layers": 4}}, r"\[1, 2, 3, 4\] are no boundaries inside a model of 4 layers"),
        ({"header": {"boundaries": [1, 2, 2, 4]}}, "are no boundaries"),
        ({"header": {"boundaries": [1, 2, 3]}}, "for 6 tokens and 3 boundaries"),
        ({"final": np.zeros(5, np.int32)}, "for 5 tokens"),
        ({"final": np.full(6, -1, np.int32)}, "a final token is negative"),
        ({"final": np.zeros(6, np.int64)}, "final is int64"),
        ({"candidates": np.zeros((6, 4), np.int32)}, "candidates is int32"),
        ({"candidates": np.zeros((6, 4, 0), np.int32)}, "for 6 tokens"),
        ({"starts": np.array([0, 6])}, "do not start at rising records"),
        ({"starts": np.array([1, 3])}, "do not start at rising records"),
        ({"starts": np.array([], np.int64)}, "do not start at rising records"),
        ({"starts": np.zeros(1, np.float32)}, "starts is float32"),
        ({"draft": np.zeros((5, 2), np.int32)}, "drafts for 5 of 6 tokens"),
        ({"final": None}, "it lacks final"),
        ({"header": None}, "it has no header"),
    ],
)
def test_what_does_not_fit_together_is_refused(change: dict[str, Any], part: str, tmp_path: Path) -> None:
    content = content_of(random_trace(0, [4, 2], 4, 2, 9))
    assert len(load_trace(write(tmp_path / "trace.npz", content))) == 6
    for name, value in change.items():
        content[name] = {**content[name], **value} if isinstance(value, dict) else value
    content = {name: value for name, value in content.items() if value is not None}
    with pytest.raises(TraceError, match=part):
        load_trace(write(tmp_path / "trace.npz", content))


def test_files_that_are_no_traces(tmp_path: Path) -> None:
    whole = io.BytesIO()
    np.savez(whole, final=np.zeros(1000))
    array = io.BytesIO()
    np.save(array, np.zeros(3))
    pickled = io.BytesIO()
    np.savez(pickled, header=np.array([{}], dtype=object))
    for content, part in (
        (b"", "no exit trace"),
        (b"text", "no exit trace"),
        (whole.getvalue()[:-50], "no exit trace"),
        (array.getvalue(), "single array"),
        (pickled.getvalue(), "no exit trace"),
    ):
        (tmp_path / "file").write_bytes(content)
        with pytest.raises(TraceError, match=part):
            load_trace(tmp_path / "file")
    with pytest.raises(TraceError, match="does not exist"):
        load_trace(tmp_path / "missing")
    with pytest.raises(TraceError, match=r"holds neither trace\.npz nor matrices\.npz"):
        load_trace(tmp_path)


def test_a_calibrations_matrices_that_are_damaged_inside(tmp_path: Path) -> None:
    np.savez_compressed(tmp_path / "matrices.npz", agrees=np.random.default_rng(0).random((50, 9)) < 0.4)
    data = bytearray((tmp_path / "matrices.npz").read_bytes())
    data[70:90] = bytes(20)  # no beginning of compressed data
    (tmp_path / "matrices.npz").write_bytes(data)
    with pytest.raises(TraceError, match="damaged"):
        load_trace(tmp_path)


def test_a_calibrations_folder_is_a_trace(tmp_path: Path) -> None:
    agrees = np.random.default_rng(0).random((50, 9)) < 0.4
    np.savez(tmp_path / "matrices.npz", agrees=agrees)
    trace = load_trace(tmp_path)
    assert (trace.num_layers, trace.header.boundaries) == (8, (1, 2, 3, 4, 5, 6, 7))
    np.testing.assert_array_equal(trace.earliest_depths(), np.maximum(measure_readiness(agrees).ead, 1))
    first = [next((k for k in (2, 5) if row[k]), 8) for row in agrees[1:-1]]
    ticks = sum({2: 1, 5: 2, 8: 3}[depth] for depth in first) + 3
    assert replay(trace, DexStages((2, 5, 8))).ticks == ticks
    assert replay(trace_of_agreement(agrees), DexStages((2, 5, 8), decs=True)).ticks == ticks


def test_a_folder_without_agreement_is_refused(tmp_path: Path) -> None:
    np.savez(tmp_path / "matrices.npz", ead=np.zeros(3))
    with pytest.raises(TraceError, match="no agreement by depth"):
        load_trace(tmp_path)
