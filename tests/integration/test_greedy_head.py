"""The head for greedy choice names the token that an argmax over the full head's logits finds, or none."""

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from engines import decoded, exported, opened
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import VOCABULARY, save_tiny
from vocabulary_tables import hidden_rows, tables

import wavekit
from wavekit.decoding.head_worker import HeadWorker
from wavekit_engines.bundle import GraphInfo, TensorInfo, open_bundle
from wavekit_engines.decoder_spec import DecoderSpec, LayerSpec, RopeSpec
from wavekit_engines.engine import Binding
from wavekit_engines.errors import WavekitError
from wavekit_engines.graphs import screened_head
from wavekit_engines.graphs.graph_writer import WeightFile
from wavekit_engines.graphs.linear import WeightFormat
from wavekit_engines.graphs.screened_head import UNCERTAIN, can_screen, write_screen, write_screened_head
from wavekit_engines.graphs.stage_graph import write_head_graph, write_vocabulary
from wavekit_engines.ort_engine import OrtEngine

PLAIN = WeightFormat("fp32")


@dataclass
class Weight:
    """A weight in memory."""

    array: np.ndarray

    @property
    def shape(self) -> tuple[int, ...]:
        return self.array.shape

    def read(self, start: int = 0, stop: int | None = None) -> np.ndarray:
        return self.array[start:stop]


def spec_of(table: np.ndarray, **changes: object) -> DecoderSpec:
    count, width = table.shape
    layers, ropes = (LayerSpec("full", None),), {"full": RopeSpec((1.0,))}
    spec = DecoderSpec("llama", width, 16, 1, 1, 2, count, 64, 1e-5, layers, ropes, 0.5, tied_head=True)
    return dataclasses.replace(spec, **changes)


def described(name: str, output: str) -> GraphInfo:
    hidden, out = (TensorInfo(tensor, "", ()) for tensor in ("hidden", output))
    return GraphInfo(f"graphs/{name}.onnx", (hidden,), (out,), 0, 0)


class Heads:
    """The full head and the one for greedy choice over the same table."""

    def __init__(self, folder: Path, table: np.ndarray, **changes: object) -> None:
        self.spec = spec_of(table, **changes)
        weights = {
            "embedding": Weight(table),
            "head": Weight(table),
            "final_norm": Weight(np.ones(table.shape[1], "f")),
        }
        (folder / "graphs").mkdir(parents=True, exist_ok=True)
        with WeightFile(folder / "graphs" / "v.weights") as file, WeightFile(folder / "graphs" / "g.weights") as own:
            write_vocabulary(file, self.spec, weights, PLAIN)  # type: ignore[arg-type]
            write_head_graph(folder / "graphs" / "head.onnx", self.spec, file, PLAIN)
            self.within_float32 = write_screen(own, self.spec, weights)  # type: ignore[arg-type]
            write_screened_head(folder / "graphs" / "greedy.onnx", self.spec, own, file)
        self.full = OrtEngine(folder, described("head", "logits"), 1)
        self.greedy = OrtEngine(folder, described("greedy", "tokens"), 1)

    def logits(self, hidden: np.ndarray) -> np.ndarray:
        return self.full.session.run(None, {"hidden": hidden})[0]

    def tokens(self, hidden: np.ndarray) -> np.ndarray:
        return self.greedy.session.run(None, {"hidden": hidden})[0]

    def worker(self) -> HeadWorker:
        return HeadWorker(self.full, self.spec, "float32", 16, self.greedy)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    return tmp_path_factory.mktemp("heads")


@given(tables(), st.data())
@settings(max_examples=60, deadline=None)
def test_a_token_that_is_named_is_the_argmax_whatever_the_weights(
    folder: Path, table: np.ndarray, data: st.DataObject
) -> None:
    heads = Heads(folder, table)
    hidden = data.draw(hidden_rows(table))
    if not heads.within_float32:
        return
    tokens, logits = heads.tokens(hidden), heads.logits(hidden)
    normed = hidden / np.sqrt(np.square(hidden, dtype=np.float64).mean(1, keepdims=True) + heads.spec.norm_eps)
    exact = normed @ table.T.astype(np.float64)
    named = tokens != UNCERTAIN
    assert (tokens[named] == logits[named].argmax(1)).all()
    assert (tokens[named] == exact[named].argmax(1)).all()
    one_by_one = [heads.tokens(row[None])[0] for row in hidden]
    assert all(token in (one, UNCERTAIN) or one == UNCERTAIN for token, one in zip(tokens, one_by_one, strict=True))


@pytest.mark.parametrize(("candidates", "apart"), [(8, 1e-7), (8, 1e-6), (8, 1e-3), (2, 1e-3), (2, 0.1)])
def test_crowds_that_eight_bits_or_float32_cannot_tell_apart_mislead_nobody(
    apart: float, candidates: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(screened_head, "CANDIDATES", candidates)
    rng = np.random.default_rng(0)
    centres = rng.standard_normal((100, 96))
    table = (centres[rng.integers(0, 100, 1000)] + apart * rng.standard_normal((1000, 96))).astype(np.float32)
    hidden = (centres[rng.integers(0, 100, 500)] + 0.2 * rng.standard_normal((500, 96))).astype(np.float32)
    heads = Heads(tmp_path, table)
    tokens, best = heads.tokens(hidden), heads.logits(hidden).argmax(1)
    named = tokens != UNCERTAIN
    assert (tokens[named] == best[named]).all()


@pytest.mark.parametrize("seed", range(3))
def test_nearly_every_row_of_an_ordinary_table_is_named(seed: int, tmp_path: Path) -> None:
    rng = np.random.default_rng(seed)
    table = (rng.standard_normal((4000, 96)) + 2 * rng.standard_normal(96)).astype(np.float32)
    hidden = rng.standard_normal((300, 96)).astype(np.float32)
    heads = Heads(tmp_path, table)
    tokens = heads.tokens(hidden)
    assert (tokens != UNCERTAIN).mean() > 0.97
    assert (tokens[tokens != UNCERTAIN] == heads.logits(hidden).argmax(1)[tokens != UNCERTAIN]).all()


@pytest.mark.parametrize("name", ["llama-untied", "gemma3-tied"])
def test_texts_are_those_of_the_logits(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(screened_head, "LEAST_WEIGHTS", 0)
    save_tiny(name, tmp_path / "model")
    with_head = wavekit.load(exported(tmp_path / "model", tmp_path / "bundle", split=(2,)), threads=1)
    assert with_head.manifest.greedy_head is not None
    for prompt in ([5, 6, 7], [300, 2, 300, 2]):
        from_logits = decoded(opened(tmp_path / "bundle"), prompt, 60)
        for speculate in ("off", "lookup"):
            text = with_head.generate(prompt, max_new_tokens=60, stop_token_ids=(), speculate=speculate)
            assert list(text.token_ids) == from_logits


def test_of_equal_tokens_the_lowest_is_taken_from_the_logits(tmp_path: Path) -> None:
    table = np.random.default_rng(0).standard_normal((200, 32)).astype(np.float32)
    table[150] = table[20] = 9 * table[70]
    heads = Heads(tmp_path, table)
    hidden = table[[20, 33]]
    assert heads.tokens(hidden).tolist() == [UNCERTAIN, heads.logits(hidden)[1].argmax()]
    assert heads.worker().best(hidden)[0] == 20


def test_rows_that_only_the_logits_tell_get_their_logits(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    table = rng.standard_normal((200, 32)).astype(np.float32)
    table[100:] = table[:100] + 1e-7 * rng.standard_normal((100, 32)).astype(np.float32)
    heads = Heads(tmp_path, table)
    for count in (1, 2, 3, 4, 5, 16):
        hidden = rng.standard_normal((count, 32)).astype(np.float32)
        assert heads.worker().best(hidden).tolist() == heads.logits(hidden).argmax(1).tolist()


def test_a_worker_answers_alternating_numbers_of_rows(tmp_path: Path) -> None:
    rng = np.random.default_rng(2)
    heads = Heads(tmp_path, rng.standard_normal((300, 48)).astype(np.float32))
    worker = heads.worker()
    for count in (1, 3, 1, 8, 2, 1):
        hidden = rng.standard_normal((count, 48)).astype(np.float32)
        assert worker.best(hidden).tolist() == heads.logits(hidden).argmax(1).tolist()
        assert worker.run(hidden) == pytest.approx(heads.logits(hidden), abs=1e-4)
    assert worker.engine_seconds > 0


class CountingEngine:
    """Counts the runs of an engine."""

    def __init__(self, engine: OrtEngine) -> None:
        self.engine, self.runs = engine, 0

    def bind(self) -> Binding:
        binding = self.engine.bind()
        run = binding.run

        def counted() -> None:
            self.runs += 1
            run()

        binding.run = counted  # type: ignore[method-assign]
        return binding

    def close(self) -> None:
        self.engine.close()


def test_a_table_whose_rows_are_too_alike_is_soon_left_to_the_full_head(tmp_path: Path) -> None:
    heads = Heads(tmp_path, np.tile(np.random.default_rng(3).standard_normal(32).astype(np.float32), (200, 1)))
    counting = CountingEngine(heads.greedy)
    worker = HeadWorker(heads.full, heads.spec, "float32", 16, counting)
    hidden = np.random.default_rng(4).standard_normal((200, 1, 32)).astype(np.float32)
    assert [int(worker.best(row)[0]) for row in hidden] == [0] * 200
    assert 0 < counting.runs < 100


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_states_that_are_not_numbers_are_an_error_as_for_the_full_head(value: float, tmp_path: Path) -> None:
    heads = Heads(tmp_path, np.random.default_rng(5).standard_normal((200, 32)).astype(np.float32))
    hidden = np.random.default_rng(6).standard_normal((2, 32)).astype(np.float32)
    hidden[1, 3] = value
    assert heads.tokens(hidden)[0] == heads.logits(hidden)[0].argmax()
    assert heads.tokens(hidden)[1] == UNCERTAIN
    with pytest.raises(WavekitError, match="logits are"):
        heads.worker().best(hidden)


def test_what_float32_cannot_bound_is_not_screened(tmp_path: Path) -> None:
    table = np.random.default_rng(7).standard_normal((200, 32)).astype(np.float32)
    assert Heads(tmp_path / "within", table).within_float32
    assert not Heads(tmp_path / "beyond", table * np.float32(1e35)).within_float32


@pytest.mark.parametrize(
    ("changes", "form"),
    [
        ({"logit_softcap": 30.0}, PLAIN),
        ({"logit_scale": -1.0}, PLAIN),
        ({}, WeightFormat("fp16")),
        ({}, WeightFormat("int8")),
        ({"vocab_size": 1000}, PLAIN),
    ],
)
def test_heads_that_have_no_screened_version(changes: dict[str, object], form: WeightFormat) -> None:
    spec = dataclasses.replace(spec_of(np.zeros((33, 64), np.float32)), vocab_size=100_000)
    assert can_screen(spec, PLAIN)
    assert not can_screen(dataclasses.replace(spec, **changes), form)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["llama-untied", "llama-tied", "granite-tied", "gemma3-tied", "qwen3-untied"])
def test_bundles_of_models_bring_it(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(screened_head, "LEAST_WEIGHTS", 0)
    save_tiny(name, tmp_path / "model")
    bundle = open_bundle(exported(tmp_path / "model", tmp_path / "bundle"))
    assert bundle.manifest.greedy_head is not None
    decoder = opened(bundle.path)
    ids = np.random.default_rng(0).integers(0, VOCABULARY, 100).tolist()
    with decoder.workers.lent(len(ids)) as workers:
        workers.reset(False)
        hidden = np.concatenate([rows.copy() for rows in workers.prefill(ids)])
    logits = decoder.logits(ids)
    greedy = OrtEngine(bundle.path, bundle.manifest.greedy_head, 1)
    tokens = greedy.session.run(None, {"hidden": hidden})[0]
    named = tokens != UNCERTAIN
    assert named.mean() > 0.9
    assert (tokens[named] == logits[named].argmax(1)).all()
