"""The calibrate command: from arguments to files, and what it prints."""

import json
from pathlib import Path

import pytest
from calibration_models import save_calibratable
from click.testing import CliRunner, Result

from wavekit.commands.calibrate import calibrate
from wavekit_calibration.result import load_calibration
from wavekit_engines.errors import MisuseError

QUICK = ["--sample-tokens", "60", "--readiness-tokens", "20", "--max-new-tokens", "8", "--draws", "5", "-m", "2"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny") / "tiny model"
    save_calibratable("gemma3-untied", folder)
    return folder


def run(*arguments: object) -> Result:
    return CliRunner().invoke(calibrate, [str(a) for a in arguments], standalone_mode=False)


def test_it_needs_no_prompts_and_says_what_comes_next(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "cal"
    result = run(model, "-o", out, *QUICK, "--set", "1,5", "--threads", 1, "--max-prompts", 12)
    assert result.exception is None, result.exception
    calibration = load_calibration(out)
    assert f"boundaries {', '.join(map(str, calibration.boundaries))} of 0-6" in result.output
    assert calibration.selection.verdict in result.output
    assert f"next: wavekit export '{model}' --calibration {out} -o bundle" in result.output
    assert "yours 1" in {name for row in calibration.selection.sets for name in row.names}
    assert calibration.measured.prompts_used == 12
    assert calibration.measured.prompts_not_drawn == 36


def test_options_reach_the_calibration(model: Path, tmp_path: Path) -> None:
    costs = tmp_path / "costs.json"
    costs.write_text(json.dumps({"layers": [1, 2, 3, 4, 5, 6], "head": 0.5}))
    prompts = tmp_path / "p.txt"
    prompts.write_text("".join(f"Count to {i}.\n" for i in range(8)))
    result = run(
        *(model, "-o", tmp_path / "cal", "--prompts", prompts, *QUICK, "--method", "elsi-c", "--alpha", 2, "--beam", 3),
        *("--candidates", "0-6", "--min-entropy", 0.5, "--positions", "all", "--layer-costs", costs, "--seed", 3),
        *("--exhaustive", "--max-stages", 3),
    )
    assert result.exception is None, result.exception
    found = load_calibration(tmp_path / "cal")
    select, measure = found.select, found.measure
    assert (select.method, select.alpha, select.beam, select.candidates) == ("elsi-c", 2.0, 3, (0, 6))
    assert (select.filter.quantile, select.filter.nats, select.exhaustive) == (None, 0.5, True)
    assert (measure.positions, measure.seed, measure.max_new_tokens) == ("all", 3, 8)
    assert found.readiness.layer_costs == (1, 2, 3, 4, 5, 6)
    assert [len(p.exits) for p in found.readiness.plans] == [2, 3]
    assert found.selection.check is not None
    assert found.selection.check.alpha == 2.0


def test_broken_lines_are_told_and_the_rest_is_used(model: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "p.jsonl"
    prompts.write_text("".join(f'{{"prompt": "Count to {i}."}}\n' for i in range(8)) + '{"prompt": \n')
    result = run(model, "-o", tmp_path / "cal", "--prompts", prompts, *QUICK)
    assert result.exception is None, result.exception
    assert "p.jsonl, line 9 left out: not JSON" in result.stderr
    found = load_calibration(tmp_path / "cal")
    assert found.measured.prompts_used == 8
    assert [line.line for line in found.measured.left_out] == [9]
    assert found.measured.lines_left_out == 1
    assert "line 9: not JSON" in (tmp_path / "cal" / "report.html").read_text("utf-8")


def test_of_many_broken_lines_the_first_and_the_last_are_told(model: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "p.jsonl"
    prompts.write_text("{\n" * 30 + '{"prompt": "Hello"}\n')
    result = run(model, "-o", tmp_path / "cal", "--prompts", prompts, *QUICK, "--max-minutes", 0)
    told = [line for line in result.stderr.splitlines() if "left out" in line]
    assert [line.split(" left out")[0] for line in told[:5]] == [f"p.jsonl, line {n}" for n in (1, 2, 3, 4, 30)]
    assert told[5] == "p.jsonl: 25 more lines left out"


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--resume", "--restart"], "exclude each other"),
        (["--quantile", "0.5", "--min-entropy", "1"], "not by both"),
        (["--candidates", "3"], "a span such as 1-29"),
        (["--set", "1,b"], "numbers with commas"),
        (["--prompts", "missing.jsonl"], "no prompt file missing.jsonl"),
        (["--layer-costs", "missing.json"], "missing.json cannot be read"),
        (["--sample-tokens", "0"], "--sample-tokens must be at least 1"),
        (["-m", "9"], "cannot choose 9 boundaries from 5 candidates"),
        (["--device", "nonsense"], "device nonsense cannot be used here"),
    ],
)
def test_misuse_is_one_clear_line(arguments: list[str], line: str, model: Path, tmp_path: Path) -> None:
    result = run(model, "-o", tmp_path / "cal", *arguments)
    assert isinstance(result.exception, MisuseError)
    assert line in str(result.exception)
    assert "\n" not in str(result.exception)
    assert not (tmp_path / "cal").exists()


def test_a_missing_model_and_an_output_that_is_a_file(model: Path, tmp_path: Path) -> None:
    result = run(tmp_path / "nothing", "-o", tmp_path / "cal")
    assert isinstance(result.exception, MisuseError)
    (tmp_path / "file").touch()
    result = run(model, "-o", tmp_path / "file")
    assert isinstance(result.exception, MisuseError)
    assert "cannot write to" in str(result.exception)
