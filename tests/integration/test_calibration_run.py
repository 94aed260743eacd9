"""Calibrations of tiny models from end to end: files, determinism, interruption, resumption, misuse."""

import dataclasses
import errno
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from calibration_models import change_weights, job, prompts, reference_states, save_calibratable
from transformers import AutoModelForCausalLM, AutoTokenizer

from wavekit_calibration.calibrate import calibrate
from wavekit_calibration.errors import (
    CalibrationPausedError,
    NonFiniteStatesError,
    PromptError,
    TooFewTokensError,
)
from wavekit_calibration.model import Decoder, encode_prompt
from wavekit_calibration.prompts import Message, Prompt, PromptFile
from wavekit_calibration.result import Calibration, load_calibration
from wavekit_calibration.sample import sample_positions
from wavekit_calibration.settings import SelectSettings
from wavekit_calibration.state import Unfinished
from wavekit_calibration.writer import Writer, transformers_writer
from wavekit_engines.errors import MisuseError, WavekitError


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny") / "tiny-model"
    save_calibratable("gemma3-untied", folder)
    return folder


@pytest.fixture(scope="module")
def whole(model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Calibration, Path]:
    out = tmp_path_factory.mktemp("whole")
    return calibrate(job(model, out)), out


def findings(calibration: Calibration) -> dict[str, Any]:
    """Everything but what made it and when."""
    found = dataclasses.asdict(calibration)
    del found["made_by"]
    return found


def stopping_after(writes: int, error: type[BaseException]) -> Callable[[Decoder], Writer]:
    """A writer that fails in the middle of a batch: after ``writes`` complete ones."""

    def make(decoder: Decoder) -> Writer:
        inner = transformers_writer(decoder)
        done = 0

        def write(batch: list[list[int]], most: int) -> list[list[int]]:
            nonlocal done
            done += 1
            if done > writes:
                raise error
            return inner(batch, most)

        return write

    return make


def test_everything_is_written_and_read_back(whole: tuple[Calibration, Path]) -> None:
    calibration, out = whole
    assert sorted(p.name for p in out.iterdir()) == ["calibration.json", "figures", "matrices.npz", "report.html"]
    assert load_calibration(out) == calibration
    names = ("activation_wave", "cka", "readiness", "sets")
    assert sorted(p.name for p in (out / "figures").iterdir()) == [f"{n}.{k}" for n in names for k in ("png", "svg")]
    assert calibration.model.num_layers == 6
    assert len(calibration.boundaries) == 2
    assert calibration.measured.tokens_sampled == 80
    assert calibration.measured.tokens_kept == 40
    assert calibration.readiness.tokens == 40
    assert calibration.exits(3)[-1] == 6
    with np.load(out / "matrices.npz") as matrices:
        assert matrices["cka"].shape == matrices["frobenius"].shape == (7, 7)
        assert matrices["bootstrap"].shape == (10, len(calibration.selection.sets))
        assert np.quantile(matrices["token_entropy"], 0.5) == calibration.measured.entropy_threshold


def test_the_report_stands_alone_and_shows_what_was_found(whole: tuple[Calibration, Path]) -> None:
    calibration, out = whole
    page = (out / "report.html").read_text("utf-8")
    assert page.count("data:image/png;base64,") == 4
    assert not re.search(r'(src|href)="(?!data:)', page)
    assert "http" not in re.sub(r"base64,[^\"]*", "", page)
    assert 'name="viewport"' in page
    assert ", ".join(map(str, calibration.boundaries)) in page
    assert str(out) not in page
    assert calibration.selection.verdict.split(":")[0] in page.replace("&#x27;", "'")


def test_two_runs_find_the_same(model: Path, whole: tuple[Calibration, Path], tmp_path: Path) -> None:
    assert findings(calibrate(job(model, tmp_path))) == findings(whole[0])


def test_the_choice_rests_on_the_models_own_states(model: Path, whole: tuple[Calibration, Path]) -> None:
    """The entropy of a boundary, computed again from transformers' hidden states of the recorded settings."""
    calibration, _ = whole
    source = prompts()
    lm, tokenizer = AutoModelForCausalLM.from_pretrained(model), AutoTokenizer.from_pretrained(model)
    rows, entropies = [], []
    spans, states = [], []
    for prompt in source.prompts:
        ids = tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt.messages[0].content}], add_generation_prompt=True, return_dict=False
        )
        full = lm.generate(torch.tensor([ids]), max_new_tokens=10, do_sample=False)[0].tolist()
        spans.append((len(ids) - 1, len(full) - 1))
        with torch.inference_mode():
            log_p = torch.log_softmax(lm(torch.tensor([full])).logits[0].double(), dim=-1)
        states.append((torch.stack(reference_states(lm, full)), -(log_p.exp() * log_p).sum(-1)))
    sample = sample_positions(spans, 80, seed=0)
    for sequence, position in zip(sample.sequence, sample.position, strict=True):
        rows.append(states[sequence][0][:, position].numpy())
        entropies.append(float(states[sequence][1][position]))
    kept = np.array(entropies) >= np.quantile(entropies, 0.5)
    for k, found in enumerate(calibration.depths.entropy):
        z = np.stack(rows)[kept, k].astype(np.float64)
        z -= z.mean(axis=0)
        z /= np.linalg.norm(z, axis=1, keepdims=True)
        p = np.linalg.svd(z, compute_uv=False) ** 2 / len(z)
        p = p[p > 1e-12]
        assert found == pytest.approx(-(p * np.log(p)).sum(), abs=1e-3)


@pytest.mark.parametrize("phase", ["writing answers", "measuring hidden states", "scoring sets"])
def test_ctrl_c_can_be_resumed_to_the_same_result(
    phase: str, model: Path, whole: tuple[Calibration, Path], tmp_path: Path
) -> None:
    def interrupt(what: str, done: int, total: int) -> None:
        if what == phase and done >= 2:
            raise KeyboardInterrupt

    with pytest.raises(CalibrationPausedError, match="--resume") as paused:
        calibrate(job(model, tmp_path), interrupt)
    assert paused.value.exit_code == 1
    assert not (tmp_path / "calibration.json").exists()
    assert findings(calibrate(job(model, tmp_path, unfinished="resume"))) == findings(whole[0])


def test_a_batch_cut_short_is_written_again(model: Path, whole: tuple[Calibration, Path], tmp_path: Path) -> None:
    with pytest.raises(CalibrationPausedError):
        calibrate(job(model, tmp_path), make_writer=stopping_after(2, KeyboardInterrupt))
    answers = tmp_path / "state" / "answers.jsonl"
    assert len(answers.read_text().splitlines()) == 6
    answers.write_bytes(answers.read_bytes()[:-7])  # as a crash leaves it: the last line is torn
    assert findings(calibrate(job(model, tmp_path, unfinished="resume"))) == findings(whole[0])


_KILLED_RUN = """
import os, signal, sys
sys.path.insert(0, {tests!r})
from pathlib import Path
import wavekit_calibration.measure as measure
from calibration_models import job
from wavekit_calibration.calibrate import calibrate

calls = 0
check_finite = measure.check_finite
def die_in_the_second_batch(boundary, states):
    global calls
    calls += 1
    if calls == 11:
        os.kill(os.getpid(), signal.SIGKILL)
    check_finite(boundary, states)
measure.check_finite = die_in_the_second_batch
calibrate(job(Path({model!r}), Path({out!r})))
"""


def test_a_kill_in_the_middle_of_a_batch_can_be_resumed_to_the_same_result(
    model: Path, whole: tuple[Calibration, Path], tmp_path: Path
) -> None:
    script = _KILLED_RUN.format(tests=str(Path(__file__).parent), model=str(model), out=str(tmp_path))
    died = subprocess.run([sys.executable, "-c", script], capture_output=True, check=False, env=os.environ)
    assert died.returncode == -signal.SIGKILL, died.stderr.decode()
    assert json.loads((tmp_path / "state" / "measured.json").read_text()) == {"batches": 1}
    rows = np.load(tmp_path / "state" / "rows.npy", mmap_mode="r")
    assert 0 < np.count_nonzero(rows[:, 0].any(axis=1)) < 80
    assert findings(calibrate(job(model, tmp_path, unfinished="resume"))) == findings(whole[0])


def test_time_can_be_limited(model: Path, tmp_path: Path) -> None:
    with pytest.raises(CalibrationPausedError, match="stopped after 0 minutes while writing answers") as paused:
        calibrate(job(model, tmp_path, max_minutes=0.0))
    assert paused.value.exit_code == 1


def test_an_unfinished_run_is_neither_lost_nor_mixed(model: Path, tmp_path: Path) -> None:
    with pytest.raises(CalibrationPausedError):
        calibrate(job(model, tmp_path, max_minutes=0.0))
    with pytest.raises(MisuseError, match="--resume to go on with it or --restart"):
        calibrate(job(model, tmp_path))
    with pytest.raises(MisuseError, match="had another max_new_tokens, seed; give the same again"):
        calibrate(job(model, tmp_path, unfinished="resume", seed=1, max_new_tokens=9))
    with pytest.raises(MisuseError, match="had another prompts"):
        calibrate(job(model, tmp_path, unfinished="resume", prompts=prompts(9)))
    # what is chosen from the measurement may differ
    assert len(calibrate(job(model, tmp_path, unfinished="resume", size=3)).boundaries) == 3
    assert not (tmp_path / "state").exists()


@pytest.mark.parametrize("unfinished", ["resume", "restart"])
def test_a_run_that_still_goes_on_in_another_process_is_let_alone(
    unfinished: Unfinished, model: Path, whole: tuple[Calibration, Path], tmp_path: Path
) -> None:
    def try_again(what: str, done: int, total: int) -> None:
        if what == "writing answers" and done == 2:
            with pytest.raises(MisuseError, match="another process is changing"):
                calibrate(job(model, tmp_path, unfinished=unfinished))

    assert findings(calibrate(job(model, tmp_path), try_again)) == findings(whole[0])


def test_a_disk_without_room_for_the_states_is_told_before_they_are_measured(
    model: Path, whole: tuple[Calibration, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*arguments: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(WavekitError, match="has no room for") as refused:
        calibrate(job(model, tmp_path))
    monkeypatch.undo()
    assert refused.value.exit_code == 1
    assert sorted(file.name for file in (tmp_path / "state").iterdir()) == ["answers.jsonl", "key.json"]
    assert findings(calibrate(job(model, tmp_path, unfinished="resume"))) == findings(whole[0])


def test_a_writer_that_is_handed_in_is_used(model: Path, tmp_path: Path) -> None:
    asked: list[tuple[list[list[int]], int]] = []

    def make(decoder: Decoder) -> Writer:
        def write(batch: list[list[int]], most: int) -> list[list[int]]:
            asked.append((batch, most))
            return [[40 + (len(p) + i) % 30 for i in range(most)] for p in batch]

        return write

    calibration = calibrate(job(model, tmp_path), make_writer=make)
    assert sum(len(batch) for batch, _ in asked) == 10
    assert {most for _, most in asked} == {10}
    assert calibration.measured.positions_eligible == 100


def test_given_answers_and_all_positions(model: Path, tmp_path: Path) -> None:
    def refuse(decoder: Decoder) -> Writer:
        def write(batch: list[list[int]], most: int) -> list[list[int]]:
            raise AssertionError("nothing is to be written")

        return write

    found = calibrate(job(model, tmp_path, answers="given", max_new_tokens=20), make_writer=refuse)
    assert found.measured.prompts_used == 5
    assert found.measured.positions_eligible == 5 * 20
    every = calibrate(job(model, tmp_path, answers="given", max_new_tokens=20, positions="all"), make_writer=refuse)
    assert every.measured.positions_eligible == every.measured.tokens_read - 2 * 5  # the first and the last of each


def test_prompts_are_drawn_and_long_ones_left_out(model: Path, tmp_path: Path) -> None:
    lengths = sorted(len(f"<user>{p.messages[0].content}>") for p in prompts().prompts)
    found = calibrate(job(model, tmp_path, max_prompt_tokens=lengths[6], max_prompts=5)).measured
    assert found.prompts_used == 5
    assert 0 < found.prompts_too_long + found.prompts_not_drawn == 5


@pytest.mark.parametrize(
    ("changes", "error", "line"),
    [
        ({"size": 6}, MisuseError, r"cannot choose 6 boundaries from 5 candidates \(1..5\); ask for 1 to 5"),
        ({"candidates": (0, 7)}, MisuseError, "candidates 0-7 are no span of the model's boundaries 0-6"),
        ({"user_sets": ((2, 9),)}, MisuseError, "the set 2,9 leaves the model's boundaries 0-6"),
        (
            {"select": SelectSettings(layer_costs=(1.0,) * 5, head_cost=1.0)},
            MisuseError,
            "has 6 layers and the layer costs name 5",
        ),
        ({"max_prompt_tokens": 3}, PromptError, "tiny: all 10 prompts are longer than 3 tokens"),
        ({"sample_tokens": 3}, TooFewTokensError, "only 3 tokens were measured and the statistics need 4"),
        (
            {"prompts": PromptFile("bare", (Prompt((Message("user", "x"),)),)), "answers": "given"},
            PromptError,
            "bare holds no answers",
        ),
    ],
)
def test_misuse_is_one_clear_line(
    changes: dict[str, Any], error: type[Exception], line: str, model: Path, tmp_path: Path
) -> None:
    with pytest.raises(error, match=line):
        calibrate(job(model, tmp_path, **changes))


def test_a_model_with_nan_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    save_calibratable("llama-untied", tmp_path / "model")
    change_weights(tmp_path / "model", lambda t: t["model.norm.weight"].fill_(float("nan")))
    with pytest.raises(NonFiniteStatesError, match="logits are not finite"):
        calibrate(job(tmp_path / "model", tmp_path / "out"))
    assert not (tmp_path / "out").exists()


def test_templates_without_a_system_turn_get_it_in_the_first_user_message(tmp_path: Path) -> None:
    template = (
        "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system') }}{% endif %}"
        "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}"
    )
    save_calibratable("llama-tied", tmp_path, template)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    prompt = Prompt((Message("system", "Be brief."), Message("user", "Hi")))
    assert tokenizer.decode(encode_prompt(tokenizer, prompt)) == "<user>Be brief.\n\nHi"
    tokenizer.chat_template = None
    assert tokenizer.decode(encode_prompt(tokenizer, prompt)) == "Be brief.\n\nHi"
