"""Training a draft: states and loss against transformers and plain loops, and the command from arguments to files."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from calibration_models import reference_states, save_calibratable
from click.testing import CliRunner, Result
from hypothesis import given, settings
from hypothesis import strategies as st

from wavekit.commands.train import train
from wavekit_calibration.model import open_decoder
from wavekit_calibration.training.draft_data import AnsweredText, StateStore, epoch_batches, make_batch
from wavekit_calibration.training.draft_head import DraftHead
from wavekit_calibration.training.draft_loss import Acceptance, Teacher, batch_loss
from wavekit_calibration.training.draft_start import choose_vocabulary, untrained_draft
from wavekit_calibration.training.draft_texts import split_held_out
from wavekit_engines.atomic import held
from wavekit_engines.checkpoint import open_checkpoint
from wavekit_engines.draft_formats import read_draft
from wavekit_engines.errors import MisuseError, WavekitError
from wavekit_engines.families import decoder_spec

TEXTS = [
    AnsweredText(0, (3, 4, 5), (6, 7, 8, 9, 10)),
    AnsweredText(1, (9,), (8, 8, 7)),
    AnsweredText(2, (20, 21, 22, 23), (24, 25, 26, 27, 28, 29, 30)),
]
QUICK = [
    *("--epochs", 3, "--batch-size", 2, "--evaluate-every", 4, "--draft-vocab", 60, "--max-new-tokens", 14),
    *("--learning-rate", 5e-4),  # runs that are compared must not run apart by rounding
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("training") / "model"
    save_calibratable("gemma3-untied", folder)  # scaled embeddings, a soft cap of its own, four norms a layer
    return folder


@pytest.fixture(scope="module")
def store(model: Path, tmp_path_factory: pytest.TempPathFactory) -> StateStore:
    decoder, _ = open_decoder(str(model), dtype="float32")
    store = StateStore(tmp_path_factory.mktemp("states"), (1, 4))
    store.fill(TEXTS, decoder, 2, lambda what, done, total: None)
    return store


def test_states_are_the_model_s_own(model: Path, store: StateStore) -> None:
    decoder, _ = open_decoder(str(model), dtype="float32")
    for number, text in enumerate(TEXTS):
        states = reference_states(decoder.model, list(text.tokens))
        expected = torch.cat([states[1], states[4]], dim=-1)[:-2]
        taps, final, likeliest = store.load(number, (1, 4))
        torch.testing.assert_close(taps.float(), expected, rtol=2e-3, atol=2e-3)
        torch.testing.assert_close(store.load(number, (4,))[0].float(), states[4][:-2], rtol=2e-3, atol=2e-3)
        assert len(final) == text.trained_rows
        with torch.no_grad():
            logits = decoder.model(torch.tensor([text.tokens])).logits[0]
        assert likeliest.tolist() == logits.argmax(-1)[len(text.prompt) : -1].tolist()


def test_only_missing_states_are_captured(model: Path, store: StateStore) -> None:
    decoder, _ = open_decoder(str(model), dtype="float32")
    steps: list[int] = []
    StateStore(store._folder, (1, 4)).fill(TEXTS, decoder, 2, lambda what, done, total: steps.append(total))
    assert not steps
    before = store.load(1, (1, 4))[0]
    (store._folder / "1.pt").unlink()
    store.fill(TEXTS, decoder, 2, lambda what, done, total: steps.append(total))
    assert steps == [1]
    torch.testing.assert_close(store.load(1, (1, 4))[0].float(), before.float(), rtol=1e-3, atol=1e-3)


def test_states_too_large_for_float16_are_kept_in_bfloat16(tmp_path: Path) -> None:
    store = StateStore(tmp_path, (1,))
    taps = torch.full((6, 1, 4), 1e6)
    store.save(0, taps, torch.ones(4, 4), torch.zeros(4, dtype=torch.long))
    torch.testing.assert_close(store.load(0, (1,))[0].float(), taps.flatten(1), rtol=1e-2, atol=0)


def test_the_loss_is_the_soft_cross_entropy_position_by_position(model: Path, store: StateStore) -> None:
    checkpoint, steps = open_checkpoint(str(model)), 3
    decoder, _ = open_decoder(str(model), dtype="float32")
    spec = decoder_spec(checkpoint.config)
    d2t = choose_vocabulary(TEXTS, spec.vocab_size, 40)
    tokens = torch.from_numpy(d2t + np.arange(40))
    start = untrained_draft(checkpoint, spec, (1, 4), d2t, seed=0)
    head = DraftHead(start.spec, 64)
    head.load(start)
    teacher = Teacher(decoder, tokens, spec.embedding_scale, torch.device("cpu"))
    found = batch_loss(head, teacher, make_batch(store, TEXTS, (1, 4), steps), steps)

    terms: list[list[float]] = [[] for _ in range(steps)]
    for text in TEXTS:
        alone = make_batch(store, [text], (1, 4), steps)
        states = list(head.steps(alone.taps.float(), teacher.embed(alone.next_ids), alone.rows, steps))
        with torch.no_grad():
            logits = decoder.model(torch.tensor([text.tokens])).logits[0]
        for step in range(steps):
            for row in range(text.trained_rows - step):
                target = logits[len(text.prompt) + row + step]
                if int(target.argmax()) not in tokens.tolist():
                    continue
                probabilities = target[tokens].softmax(-1)
                scores = head.scores(states[step])[0, row].log_softmax(-1)
                terms[step].append(-(probabilities * scores).sum().item())
    expected = sum(0.8**step * np.mean(values) for step, values in enumerate(terms))
    assert found.item() == pytest.approx(expected, rel=2e-3)


def test_an_untrained_head_scores_as_the_target_does_on_its_deepest_state(model: Path) -> None:
    """Its head rows are the target's, in target ids."""
    checkpoint = open_checkpoint(str(model))
    spec = decoder_spec(checkpoint.config)
    d2t = choose_vocabulary(TEXTS, spec.vocab_size, 30)
    draft = untrained_draft(checkpoint, spec, (2, 5), d2t, seed=0)
    decoder, _ = open_decoder(str(model), dtype="float32")
    rows = decoder.model.get_output_embeddings().weight.detach().numpy()
    np.testing.assert_allclose(draft.weights["head"], rows[d2t + np.arange(30)], rtol=1e-6)
    taps = np.arange(2 * spec.hidden_size, dtype=np.float32)
    np.testing.assert_array_equal(draft.weights["fc"] @ taps, taps[spec.hidden_size :])


@pytest.mark.parametrize(
    "scaling", [{"type": "linear", "factor": 4.0}, {"rope_type": "yarn", "factor": 2.0, "type": "yarn"}]
)
def test_a_head_turns_as_its_target_does_whatever_its_configuration_calls_that(
    scaling: dict[str, Any], model: Path, tmp_path: Path
) -> None:
    shutil.copytree(model, tmp_path / "older")
    config = json.loads((model / "config.json").read_text())
    config = {**config, "rope_parameters": None, "rope_scaling": scaling, "rope_theta": 500.0}
    (tmp_path / "older" / "config.json").write_text(json.dumps(config))
    checkpoint = open_checkpoint(str(tmp_path / "older"))
    spec = decoder_spec(checkpoint.config)
    draft = untrained_draft(checkpoint, spec, (2, 5), choose_vocabulary(TEXTS, spec.vocab_size, 30), seed=0)
    assert draft.spec.rope == spec.ropes["full_attention"]


def test_the_draft_vocabulary_is_what_occurs_most() -> None:
    d2t = choose_vocabulary(TEXTS, 100, 4)
    assert (d2t + np.arange(4)).tolist() == [6, 7, 8, 9]  # 8 three times, 7 twice, then the lowest of the others
    with pytest.raises(MisuseError, match="the target has 100 tokens"):
        choose_vocabulary(TEXTS, 100, 101)


def test_only_greedy_texts_are_held_out() -> None:
    texts = [AnsweredText(number, (1,), (2, 3), greedy=number % 2 == 0) for number in range(40)]
    train, held_out = split_held_out(texts, 0.1, seed=3)
    assert sorted(text.number for text in train + held_out) == list(range(40))
    assert len(held_out) == 4
    assert all(text.greedy for text in held_out)
    with pytest.raises(MisuseError, match="too few"):
        split_held_out(texts[:8], 0.1, seed=3)


def test_an_epoch_has_every_text_once() -> None:
    texts = [AnsweredText(n, (1,) * (1 + n % 7), (2, 3)) for n in range(47)]
    batches = list(epoch_batches(texts, 4, np.random.default_rng(0)))
    assert sorted(text.number for batch in batches for text in batch) == list(range(47))


@settings(max_examples=200, deadline=None)
@given(st.lists(st.lists(st.booleans(), min_size=3, max_size=3), min_size=1, max_size=12))
def test_walking_counts_passes_as_a_decoder_would(rows: list[list[bool]]) -> None:
    found = Acceptance(3)
    found.walk(torch.tensor(rows))
    position, passes = 0, 0
    while position < len(rows):  # every pass: the run of right tokens inside the text, and the target's own
        right = 0
        while right < 3 and position + right < len(rows) and rows[position][right]:
            right += 1
        position, passes = position + right + 1, passes + 1
    assert (found.tokens, found.passes) == (len(rows), passes)
    assert found.tried[0] == passes


def run(*arguments: Any) -> Result:
    return CliRunner().invoke(train, ["draft", *map(str, arguments)], standalone_mode=False)


@pytest.fixture(scope="module")
def finished(model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Result]:
    out = tmp_path_factory.mktemp("runs") / "run"
    return out, run(model, "-o", out, "--taps", "1,3,5", *QUICK)


def test_the_command_leaves_a_head_a_record_and_a_figure(model: Path, finished: tuple[Path, Result]) -> None:
    out, result = finished
    assert result.exception is None, result.exception
    assert sorted(p.name for p in out.iterdir()) == ["draft", "texts.jsonl", "training.json", "training.png",
                                                     "training.svg"]  # fmt: skip
    record = json.loads((out / "training.json").read_text())
    assert record["tau"] >= 1
    assert record["boundaries"] == [1, 3, 5]
    assert len(record["looks"]) >= 2
    assert "held-out tau" in result.output
    checkpoint = open_checkpoint(str(model))
    draft = read_draft(out / "draft", target=decoder_spec(checkpoint.config))
    assert draft.spec.boundaries == (1, 3, 5)
    assert len(draft.d2t) == 60
    assert draft.dtype == "float16"


def test_training_lowers_the_loss(finished: tuple[Path, Result]) -> None:
    looks = json.loads((finished[0] / "training.json").read_text())["looks"]
    losses = [look["loss"] for look in looks if look["loss"] is not None]
    assert losses[-1] < losses[0]


def test_texts_serve_another_run_of_the_same_model_only(
    model: Path, finished: tuple[Path, Result], tmp_path: Path
) -> None:
    texts = finished[0] / "texts.jsonl"
    again = run(model, "-o", tmp_path / "again", "--taps", "2", *QUICK, "--texts", texts, "--format", "specforge")
    assert again.exception is None, again.exception
    save_calibratable("llama-untied", tmp_path / "other")
    refused = run(tmp_path / "other", "-o", tmp_path / "x", "--taps", "1,3", *QUICK, "--texts", texts)
    assert isinstance(refused.exception, MisuseError)
    assert "another model" in str(refused.exception)


def test_an_interrupted_run_ends_with_the_same_head(
    model: Path, finished: tuple[Path, Result], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from wavekit_calibration.training.training_loop import Trainer

    texts, step = finished[0] / "texts.jsonl", Trainer._step
    arguments = (model, "-o", tmp_path / "run", "--taps", "1,3,5", *QUICK, "--texts", texts)

    def fail_late(self: Trainer, *rest: Any) -> float:
        if self.state.step == 7:
            raise KeyboardInterrupt
        return step(self, *rest)

    monkeypatch.setattr(Trainer, "_step", fail_late)
    interrupted = run(*arguments).exception
    assert isinstance(interrupted, WavekitError)
    assert "what is done is kept" in str(interrupted)
    monkeypatch.setattr(Trainer, "_step", step)
    refused = run(*arguments)
    assert isinstance(refused.exception, MisuseError)
    assert "--resume" in str(refused.exception)
    assert run(*arguments, "--resume").exception is None
    once, resumed = (read_draft(folder / "draft") for folder in (finished[0], tmp_path / "run"))
    for role, values in once.weights.items():
        np.testing.assert_allclose(resumed.weights[role], values, rtol=1e-3, atol=1e-5, err_msg=role)


def test_a_run_that_still_goes_on_in_another_process_is_let_alone(model: Path, tmp_path: Path) -> None:
    (tmp_path / "state").mkdir()
    with held(tmp_path):
        refused = run(model, "-o", tmp_path, "--taps", "1,3,5", *QUICK, "--restart").exception
    assert isinstance(refused, MisuseError)
    assert "another process is changing" in str(refused)
    assert os.listdir(tmp_path) == ["state"]


def test_states_that_a_full_disk_does_not_take_are_one_line_and_no_file(tmp_path: Path) -> None:
    store = StateStore(tmp_path, (1,))
    (tmp_path / "0.pt.tmp").symlink_to("/dev/full")
    with pytest.raises(WavekitError, match=r"disk.* full.*--resume") as refused:
        store.save(0, torch.zeros(4, 1, 8), torch.zeros(3, 8), torch.zeros(3, dtype=torch.long))
    assert "\n" not in str(refused.value)
    assert os.listdir(tmp_path) == []


def test_two_processes_share_the_steps(model: Path, finished: tuple[Path, Result], tmp_path: Path) -> None:
    """Two with one text each take the steps that one process takes with two."""
    quick = [str(part) for part in QUICK]
    quick[quick.index("--batch-size") + 1] = "1"
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", "-m", "wavekit"]
    texts = ["--texts", str(finished[0] / "texts.jsonl"), "--taps", "1,3,5", *quick]
    done = subprocess.run(
        [sys.executable, *launch, "train", "draft", str(model), "-o", str(tmp_path / "run"), *texts],
        capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("held-out tau") == 1
    once, shared = (read_draft(folder / "draft") for folder in (finished[0], tmp_path / "run"))
    record = json.loads((tmp_path / "run" / "training.json").read_text())
    assert record["steps"] == json.loads((finished[0] / "training.json").read_text())["steps"]
    for role, values in once.weights.items():
        np.testing.assert_allclose(shared.weights[role], values, rtol=0.1, atol=0.02, err_msg=role)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "--calibration FOLDER, or --taps"),
        (("--taps", "1,x"), "got '1,x'"),
        (("--taps", "3,1"), "ascending"),
        (("--taps", "1,99"), "the model has 0 to 6"),
        (("--taps", "1", "--epochs", "0"), "--epochs"),
        (("--taps", "1", "--texts", "nowhere.jsonl"), "no texts at"),
        (("--taps", "1", "--resume", "--restart"), "exclude each other"),
        (("--taps", "1", "--device", "cuda:7"), "cuda:7"),
    ],
)
def test_misuse_is_named_before_anything_is_trained(
    model: Path, tmp_path: Path, arguments: tuple[str, ...], message: str
) -> None:
    result = run(model, "-o", tmp_path / "run", *arguments)
    assert isinstance(result.exception, WavekitError)
    assert message in str(result.exception)
    assert not (tmp_path / "run").exists()  # or the corrected command would be asked to --resume


def test_a_file_is_no_place_for_a_run(model: Path, tmp_path: Path) -> None:
    (tmp_path / "run").touch()
    refused = run(model, "-o", tmp_path / "run", "--taps", "2").exception
    assert isinstance(refused, MisuseError)
    assert "cannot write to" in str(refused)
