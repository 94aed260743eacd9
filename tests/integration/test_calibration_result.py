"""calibration.json is checked when it is read, and says for which model it is."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from calibration_models import change_weights, job, save_calibratable

from wavekit_calibration.calibrate import calibrate
from wavekit_calibration.errors import CalibrationFileError
from wavekit_calibration.result import JSON_NAME, load_calibration
from wavekit_engines.checkpoint import open_checkpoint


@pytest.fixture(scope="module")
def calibrated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("calibrated")
    save_calibratable("llama-untied", folder / "model")
    calibrate(job(folder / "model", folder / "out"))
    return folder


def test_it_is_for_the_model_that_was_measured_and_no_other(calibrated: Path, tmp_path: Path) -> None:
    calibration = load_calibration(calibrated / "out")
    calibration.check_model(open_checkpoint(calibrated / "model").digest())
    save_calibratable("llama-untied", tmp_path)
    change_weights(tmp_path, lambda t: t["model.norm.weight"].add_(1e-3))
    with pytest.raises(CalibrationFileError, match=r"made for another model \(model, .* run wavekit calibrate on this"):
        calibration.check_model(open_checkpoint(tmp_path).digest())


def test_exits_are_there_for_the_planned_numbers_of_stages(calibrated: Path) -> None:
    calibration = load_calibration(calibrated / "out" / JSON_NAME)
    for stages in (2, 3, 4):
        exits = calibration.exits(stages)
        assert len(exits) == stages
        assert exits[-1] == 4
    with pytest.raises(CalibrationFileError, match="has exits for 2, 3, 4 stages, not for 5"):
        calibration.exits(5)


def _set(path: str, value: Any) -> Callable[[Any], None]:
    def change(data: Any) -> None:
        *parents, last = path.split(".")
        for key in parents:
            data = data[int(key)] if isinstance(data, list) else data[key]
        if value is None:
            del data[last]
        else:
            data[last] = value

    return change


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (_set("schema_version", 2), "has schema 2 and this wavekit reads 1; update wavekit"),
        (_set("schema_version", 0), "calibrate again"),
        (_set("model.num_layers", "4"), r"is damaged: .*model\.num_layers"),
        (_set("model.checkpoint_digest", None), "checkpoint_digest"),
        (_set("selection.boundaries", [2, 1]), r"selection.boundaries: \[2, 1\] are no boundaries"),
        (_set("selection.boundaries", [2, 5]), "a model with 4 layers"),
        (_set("selection.boundaries", []), "are no boundaries"),
        (_set("depths.entropy", [1.0]), "depths.entropy has 1 values for the 5 boundaries of 4 layers"),
        (_set("readiness.plans.0.exits", [2, 3]), "do not end at boundary 4"),
        (_set("select.alpha", -1.0), "alpha must be a positive number"),
    ],
)
def test_a_damaged_file_is_refused_with_the_field(
    change: Callable[[Any], None], line: str, calibrated: Path, tmp_path: Path
) -> None:
    data = json.loads((calibrated / "out" / JSON_NAME).read_text("utf-8"))
    change(data)
    (tmp_path / JSON_NAME).write_text(json.dumps(data))
    with pytest.raises(CalibrationFileError, match=line):
        load_calibration(tmp_path)


def test_a_missing_or_cut_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CalibrationFileError, match=r"no calibration at .* make one with wavekit calibrate"):
        load_calibration(tmp_path)
    (tmp_path / JSON_NAME).write_text('{"schema_version": 1, "mod')
    with pytest.raises(CalibrationFileError, match="is damaged"):
        load_calibration(tmp_path)


def test_reading_needs_no_torch(calibrated: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from wavekit_calibration.result import load_calibration; "
        f"load_calibration(Path({str(calibrated / 'out')!r})); "
        "assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
