"""Training exits: states and loss against transformers and plain loops, and the command from arguments to files."""

import json
import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from calibration_models import job as calibration_job
from calibration_models import reference_states, save_calibratable
from click.testing import CliRunner, Result

from wavekit.commands.train import train
from wavekit_calibration.calibrate import calibrate
from wavekit_calibration.errors import CalibrationFileError
from wavekit_calibration.model import Decoder, open_decoder
from wavekit_calibration.readout import Readout
from wavekit_calibration.simulation.trace import load_trace
from wavekit_calibration.training import exit_train
from wavekit_calibration.training.draft_data import AnsweredText, StateStore
from wavekit_calibration.training.exit_adapters import ExitAdapters
from wavekit_calibration.training.exit_train import ExitLearner, exit_rows, residual_sizes, summary
from wavekit_calibration.training.training_loop import LoopSettings, Standing, Trainer
from wavekit_engines.checkpoint import open_checkpoint
from wavekit_engines.errors import MisuseError, WavekitError
from wavekit_engines.exit_files import read_exits
from wavekit_engines.exit_spec import ExitSpec
from wavekit_engines.families import decoder_spec

TEXTS = [
    AnsweredText(0, (3, 4, 5), (6, 7, 8, 9, 10)),
    AnsweredText(1, (9,), (8, 8)),  # nothing to learn
    AnsweredText(2, (20, 21, 22, 23), (24, 25, 26, 27, 28, 29, 30)),
]
BOUNDARIES = (1, 4)
SOME_IDS = np.array([*range(5, 40), *range(60, 260)])
QUICK = ["--epochs", 2, "--batch-size", 2, "--evaluate-every", 4, "--max-new-tokens", 14]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("training") / "model"
    save_calibratable("gemma3-untied", folder)  # a soft cap of its own, norms with an offset
    return folder


@pytest.fixture(scope="module")
def decoder(model: Path) -> Decoder:
    return open_decoder(str(model), dtype="float32")[0]


@pytest.fixture(scope="module")
def store(decoder: Decoder, tmp_path_factory: pytest.TempPathFactory) -> StateStore:
    store = StateStore(tmp_path_factory.mktemp("states"), BOUNDARIES)
    store.fill(TEXTS, decoder, 2, lambda what, done, total: None)
    return store


def learner(decoder: Decoder, store: StateStore, ids: np.ndarray | None = None, rank: int = 8) -> ExitLearner:
    hidden, vocabulary = decoder.hidden_size, decoder.vocab_size
    size = vocabulary if ids is None else len(ids)
    spec = ExitSpec(BOUNDARIES, decoder.num_layers, hidden, vocabulary, size, 1e-6, rank)
    readout = Readout(decoder, None if ids is None else torch.from_numpy(ids), torch.device("cpu"))
    adapters = ExitAdapters(spec, residual_sizes(store, TEXTS, BOUNDARIES), seed=0)
    tokens = np.arange(vocabulary) if ids is None else ids
    return ExitLearner(adapters, readout, tokens, store, LoopSettings(), torch.device("cpu"))


def disturb(adapters: ExitAdapters) -> None:
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in adapters.parameters():
            parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))


def states_of(decoder: Decoder, text: AnsweredText) -> list[tuple[list[torch.Tensor], torch.Tensor]]:
    """For each position that exits learn from: the states at the exits' boundaries, and the model's own scores."""
    states = reference_states(decoder.model, list(text.tokens))
    with torch.no_grad():
        logits = decoder.model(torch.tensor([text.tokens])).logits[0]
    positions = range(len(text.prompt), len(text.tokens) - 2)
    return [([states[boundary][p] for boundary in BOUNDARIES], logits[p]) for p in positions]


def test_positions_line_up_with_what_they_predict(decoder: Decoder, store: StateStore) -> None:
    rows = exit_rows(store, TEXTS, BOUNDARIES)
    expected = [position for text in TEXTS for position in states_of(decoder, text)]
    assert len(expected) == 3 + 0 + 5
    for row, (states, logits) in enumerate(expected):
        torch.testing.assert_close(rows.states[row].float(), torch.stack(states), rtol=2e-3, atol=2e-3)
        assert int(rows.likeliest[row]) == int(logits.argmax())
    assert rows.written.tolist() == [7, 8, 9, 25, 26, 27, 28, 29]


@pytest.mark.parametrize("ids", [None, SOME_IDS], ids=["all tokens", "some tokens"])
@pytest.mark.parametrize("at_once", [1, 1 << 20])
def test_the_loss_is_the_divergence_position_by_position(
    decoder: Decoder, store: StateStore, ids: np.ndarray | None, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exit_train, "_SCORES_AT_ONCE", at_once)
    found = learner(decoder, store, ids)
    disturb(found.module)
    tokens = np.arange(decoder.vocab_size) if ids is None else ids
    weights = found.module.weight_arrays()
    terms = []
    for text in TEXTS:
        for states, logits in states_of(decoder, text):
            if int(logits.argmax()) not in tokens.tolist():
                continue
            target = logits[tokens].softmax(-1)
            for boundary, state in zip(BOUNDARIES, states, strict=True):
                normed = state / torch.sqrt((state * state).mean() + 1e-6) * weights[f"{boundary}.norm"]
                inner = weights[f"{boundary}.A"] @ normed
                adapted = state + weights[f"{boundary}.B"] @ (inner * torch.sigmoid(inner))
                with torch.no_grad():
                    own = decoder.logits(adapted[None])[0][tokens].log_softmax(-1)
                terms.append(sum(float(p * (p.log() - q)) for p, q in zip(target, own, strict=True)))
    assert 0 < len(terms) < 17
    assert found.backward(TEXTS) == pytest.approx(np.mean(terms), rel=5e-3)


def test_gradients_reach_the_adapters_only_and_do_not_depend_on_the_pieces(
    decoder: Decoder, store: StateStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, pieces = learner(decoder, store), learner(decoder, store)
    for one in (whole, pieces):
        disturb(one.module)
    decoder.model.zero_grad(set_to_none=True)
    whole.backward(TEXTS)
    monkeypatch.setattr(exit_train, "_SCORES_AT_ONCE", 3 * decoder.vocab_size)
    pieces.backward(TEXTS)
    assert all(parameter.grad is None for parameter in decoder.model.parameters())
    for one, other in zip(whole.module.parameters(), pieces.module.parameters(), strict=True):
        assert one.grad is not None
        assert float(one.grad.abs().max()) > 0
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-4, atol=1e-6)


def test_never_more_scores_are_made_than_fit(
    decoder: Decoder, store: StateStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exit_train, "_SCORES_AT_ONCE", 2 * decoder.vocab_size)
    seen: list[int] = []
    scores = Readout.scores
    monkeypatch.setattr(Readout, "scores", lambda self, x: seen.append(len(x)) or scores(self, x))
    learner(decoder, store).backward(TEXTS)
    assert max(seen) == 2
    assert sum(seen) == 8 * (1 + len(BOUNDARIES))


def test_untrained_adapters_are_the_logit_lens(decoder: Decoder, store: StateStore) -> None:
    rows = exit_rows(store, TEXTS, BOUNDARIES)
    adapted = learner(decoder, store).module
    for exit_ in range(len(BOUNDARIES)):
        states = rows.states[:, exit_].float()
        assert torch.equal(adapted(states, exit_), states)
    with_adapters, without = (
        learner(decoder, store, rank=rank).candidates(TEXTS, 3)[0] for rank in (8, 0)
    )  # fmt: skip
    np.testing.assert_array_equal(with_adapters, without)
    lens = [decoder.logits(rows.states[:, exit_].float()).topk(3).indices for exit_ in range(len(BOUNDARIES))]
    np.testing.assert_array_equal(without, torch.stack(lens, dim=1).numpy())


def test_candidates_stay_inside_the_exit_vocabulary(decoder: Decoder, store: StateStore) -> None:
    best, _ = learner(decoder, store, SOME_IDS).candidates(TEXTS, 4)
    assert np.isin(best, SOME_IDS).all()
    assert all(len(set(row)) == 4 for row in best.reshape(-1, 4).tolist())


def test_the_speed_up_counts_ticks_to_the_first_exit_that_agrees() -> None:
    agrees = np.array([[True, True], [False, True], [False, False], [True, False]])
    speed_up, agreement = summary(agrees)
    assert speed_up == pytest.approx(3 / np.mean([1, 2, 3, 1]))
    assert agreement == [0.5, 0.5]
    assert summary(np.zeros((5, 3), bool))[0] == 1


def test_training_a_little_brings_exits_nearer(decoder: Decoder, store: StateStore, tmp_path: Path) -> None:
    found = learner(decoder, store)
    settings = LoopSettings(epochs=30, batch_size=3, learning_rate=1e-2, evaluate_every=1000)
    trainer = Trainer(found, (TEXTS, TEXTS), settings, tmp_path / "none.pt")
    before = found.backward(TEXTS)
    found.module.zero_grad(set_to_none=True)
    trainer.run(None, lambda what, done, total: None, lambda look: None)
    assert trainer.state.looks[-1].loss < 0.8 * before
    assert found.look(Standing(0, 0, 0, math.nan), TEXTS).agreement == trainer.state.looks[-1].agreement


def run(*arguments: Any) -> Result:
    return CliRunner().invoke(train, ["exits", *map(str, arguments)], standalone_mode=False)


@pytest.fixture(scope="module")
def finished(model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Result]:
    out = tmp_path_factory.mktemp("runs") / "run"
    return out, run(model, "-o", out, "--exits", "2,4", *QUICK, "--exit-vocab", 200)


def test_the_command_leaves_exits_a_trace_a_record_and_a_figure(model: Path, finished: tuple[Path, Result]) -> None:
    out, result = finished
    assert result.exception is None, result.exception
    assert sorted(p.name for p in out.iterdir()) == ["exits", "texts.jsonl", "trace.npz", "training.json",
                                                     "training.png", "training.svg"]  # fmt: skip
    checkpoint = open_checkpoint(str(model))
    exits = read_exits(out / "exits", target=decoder_spec(checkpoint.config))
    assert (exits.spec.boundaries, exits.spec.rank, len(exits.token_ids)) == ((2, 4), 8, 200)
    assert exits.target_digest == checkpoint.digest()
    record = json.loads((out / "training.json").read_text())
    assert record["looks"][0]["agreement"] == record["agreement_before"]
    assert record["speed_up"] == max(look["speed_up"] for look in record["looks"])
    assert "boundary   4" in result.output
    assert "speed-up of 3 stages" in result.output
    assert f"next: wavekit simulate {out / 'trace.npz'} --depths 2,4,6" in result.output


def test_the_trace_says_what_the_record_counts(finished: tuple[Path, Result]) -> None:
    record, trace = json.loads((finished[0] / "training.json").read_text()), load_trace(finished[0] / "trace.npz")
    assert (trace.header.boundaries, trace.num_layers, trace.candidates.shape[2]) == ((2, 4), 6, 3)
    assert [trace.right(boundary).mean() for boundary in (2, 4)] == pytest.approx(record["agreement"])
    lines = [json.loads(line) for line in (finished[0] / "texts.jsonl").read_text().splitlines()[1:]]
    answers = [tuple(line["answer"][1:-1]) for line in lines]
    edges = [*trace.starts.tolist(), len(trace)]
    assert len(edges) - 1 <= record["texts_held_out"]
    for first, end in pairwise(edges):
        assert tuple(trace.final[first:end].tolist()) in answers


def test_an_interrupted_run_ends_with_the_same_exits(
    model: Path, finished: tuple[Path, Result], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts, step = finished[0] / "texts.jsonl", Trainer._step
    arguments = (model, "-o", tmp_path / "run", "--exits", "2,4", *QUICK, "--exit-vocab", 200, "--texts", texts)

    def fail_late(self: Any, *rest: Any) -> float:
        if self.state.step == 7:
            raise KeyboardInterrupt
        return step(self, *rest)

    monkeypatch.setattr(Trainer, "_step", fail_late)
    interrupted = run(*arguments).exception
    assert isinstance(interrupted, WavekitError)
    assert "what is done is kept" in str(interrupted)
    monkeypatch.setattr(Trainer, "_step", step)
    assert "--resume" in str(run(*arguments).exception)
    other = run(*arguments[:-2], "--texts", texts, "--rank", 3, "--resume")
    assert "had another rank" in str(other.exception)
    assert run(*arguments, "--resume").exception is None
    once, resumed = (read_exits(folder / "exits") for folder in (finished[0], tmp_path / "run"))
    for role, values in once.weights.items():
        np.testing.assert_allclose(resumed.weights[role], values, rtol=1e-3, atol=1e-5, err_msg=role)


def test_exits_without_adapters_need_no_training(model: Path, finished: tuple[Path, Result], tmp_path: Path) -> None:
    texts = finished[0] / "texts.jsonl"
    result = run(model, "-o", tmp_path / "run", "--exits", "3", "--no-adapter", "--texts", texts)
    assert result.exception is None, result.exception
    assert sorted(p.name for p in (tmp_path / "run").iterdir()) == ["exits", "trace.npz", "training.json"]
    exits = read_exits(tmp_path / "run" / "exits")
    assert (exits.spec.rank, exits.weights) == (0, {})
    record = json.loads((tmp_path / "run" / "training.json").read_text())
    assert (record["agreement"], record["steps"]) == (record["agreement_before"], 0)


def test_a_calibration_says_where_exits_go(
    model: Path, finished: tuple[Path, Result], tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("calibrated")
    planned = calibrate(calibration_job(model, folder / "cal")).exits(3)[:-1]
    texts = ["--texts", finished[0] / "texts.jsonl", "--no-adapter"]
    result = run(model, "-o", folder / "run", "--calibration", folder / "cal", "--stages", 3, *texts)
    assert result.exception is None, result.exception
    assert read_exits(folder / "run" / "exits").spec.boundaries == planned
    save_calibratable("llama-untied", folder / "other")
    refused = run(folder / "other", "-o", folder / "x", "--calibration", folder / "cal", *texts)
    assert isinstance(refused.exception, CalibrationFileError)
    assert "another model" in str(refused.exception)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "--calibration FOLDER, or --exits"),
        (("--exits", "1,x"), "got '1,x'"),
        (("--exits", "3,1"), "do not ascend"),
        (("--exits", "1,6"), "not all inside a model of 6 layers, 1 to 5"),
        (("--exits", "0,3"), "not all inside a model of 6 layers, 1 to 5"),
        (("--exits", "1", "--stages", "3"), "exclude each other"),
        (("--exits", "1", "--rank", "3", "--no-adapter"), "exclude each other"),
        (("--exits", "1", "--resume", "--restart"), "exclude each other"),
        (("--exits", "1", "--epochs", "0"), "--epochs"),
        (("--exits", "1", "--texts", "nowhere.jsonl"), "no texts at"),
        (("--calibration", "nowhere"), "no calibration at nowhere"),
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
    refused = run(model, "-o", tmp_path / "run", "--exits", "2").exception
    assert isinstance(refused, MisuseError)
    assert "cannot write to" in str(refused)


def test_exits_that_are_there_are_not_trained_again(model: Path, finished: tuple[Path, Result]) -> None:
    result = run(model, "-o", finished[0], "--exits", "2,4", *QUICK)
    assert isinstance(result.exception, MisuseError)
    assert "exists already" in str(result.exception)


def test_answers_of_two_tokens_teach_nothing(model: Path, finished: tuple[Path, Result], tmp_path: Path) -> None:
    lines = (finished[0] / "texts.jsonl").read_text().splitlines()
    short = [{**json.loads(line), "answer": [5, 6]} for line in lines[1:]]
    (tmp_path / "short.jsonl").write_text("\n".join([lines[0], *map(json.dumps, short)]) + "\n")
    result = run(model, "-o", tmp_path / "run", "--exits", "2", "--texts", tmp_path / "short.jsonl")
    assert "no answer has more than two" in str(result.exception)
