"""The draft engine computes what a plain torch module does, for every option, precision and kind of pass.

Tolerances, of the largest number compared: 1e-4 in float32, where only the order of sums differs. Reduced precision is
compared with the weights it stores: 1 % in fp16, whose activations are rounded to 11 bits; 10 % with int8 and int4,
whose products round their activations to int8, and 1e-4 again once that rounding is taken out of the graph.
"""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from draft_engine import DraftEngine, Scored
from draft_models import draft_of
from draft_reference import TorchHead
from engines import without_rounded_activations
from tiny_models import save_tiny

from wavekit_engines.bundle import open_bundle
from wavekit_engines.checkpoint import Checkpoint, open_checkpoint
from wavekit_engines.decoder_spec import RopeSpec
from wavekit_engines.draft_spec import Draft
from wavekit_engines.export import ExportOptions, export_bundle
from wavekit_engines.families import decoder_spec
from wavekit_engines.quantization import bits_of, dequantize_rows, quantize_rows
from wavekit_engines.weights import DecoderWeights

FLOAT32, FLOAT16, INT8_ACTIVATIONS = 1e-4, 0.01, 0.1
MODELS = ("llama-untied", "llama-three-heads", "gemma3-tied", "granite-biases")
"""Plain; rows that no block divides; scaled embeddings."""
OPTIONS: dict[str, dict[str, Any]] = {
    "as EAGLE-3": {},
    "one norm over all taps": {"fc_norm": "joint"},
    "a norm for each tap": {"fc_norm": "each"},
    "the residual normed": {"norm_before_residual": True},
    "the output normed": {"norm_output": True},
    "everything normed": {"norm_output": True, "norm_before_residual": True, "fc_norm": "each"},
    "biases of q, k and v": {"qkv_bias": True},
    "the bias of o": {"output_bias": True},
    "biases of the MLP": {"mlp_bias": True},
    "every bias": {"qkv_bias": True, "output_bias": True, "mlp_bias": True},
    "one tap": {"boundaries": (4,)},
    "one tap, normed": {"boundaries": (2,), "fc_norm": "each"},
    "every tap": {"boundaries": (0, 1, 2, 3, 4), "fc_norm": "joint"},
    "heads of their own": {"num_heads": 6, "num_kv_heads": 3, "head_dim": 32, "intermediate_size": 80},
    "4 rotary features": {"rope": RopeSpec((1.0, 0.1), factor=1.25)},
    "rotary features scaled": {"rope": RopeSpec(tuple(0.5**power for power in range(8)), factor=0.75)},
    "a tanh gelu": {"activation": "gelu_tanh"},
    "a gelu": {"activation": "gelu"},
    "a scaled embedding": {"embedding_scale": 3.5},
    "its own embedding": {"own_embedding": True},
    "its own embedding, scaled": {"own_embedding": True, "embedding_scale": 0.3},
    "a vocabulary smaller than 10": {"draft_vocab_size": 7},
    "the whole vocabulary": {"draft_vocab_size": 320},
}

QUANTIZED = [
    *((precision, target, 32, False) for precision in ("fp32", "int8", "int4") for target in ("fp32", "int8", "int4")),
    *(
        ("int8", "int4", 16, False),
        ("int4", "fp32", 128, False),
        ("int4", "int4", 16, True),
        ("int8", "fp32", 128, True),
    ),
][1:]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Checkpoint]:
    folder = tmp_path_factory.mktemp("targets")
    for number, name in enumerate(MODELS):
        save_tiny(name, folder / name, seed=number)
    return {name: open_checkpoint(folder / name) for name in MODELS}


def bundle_with(draft: Draft, checkpoint: Checkpoint, path: Path, **options: Any) -> Path:
    export_bundle(
        checkpoint, path, ExportOptions(draft=draft, **{"draft_precision": options.get("precision", "fp32"), **options})
    )
    return path


def embedding_of(checkpoint: Checkpoint) -> np.ndarray:
    return DecoderWeights(checkpoint, decoder_spec(checkpoint.config))["embedding"].read()


class Both:
    """Engine and reference on the same rows; `step` compares them. Rows are never forgotten by the reference."""

    def __init__(self, bundle: Path, head: TorchHead, tolerance: float) -> None:
        self.engine, self.head, self.tolerance = DraftEngine(bundle), head, tolerance
        self.generator = np.random.default_rng(1)
        self.states = np.zeros((0, head.spec.hidden_size), np.float32)
        self.tokens: list[int] = []
        self.positions: list[int] = []
        self.seen = np.zeros((0, 0), bool)

    def step(self, taps: int, fed: np.ndarray, positions: Sequence[int], parents: dict[int, list[int]] | None = None):
        """A pass of ``taps`` random rows and the states ``fed``; returns what the engine feeds back.

        ``parents`` names the rows seen by each new one besides itself; None: all that came before.
        """
        spec, start, count = self.head.spec, len(self.tokens), taps + len(fed)
        states = self.generator.standard_normal((taps, len(spec.boundaries) * spec.hidden_size)).astype(np.float32)
        self.states = np.concatenate([self.states, self.head.fused(states), fed.astype(np.float32)])
        new = self.generator.integers(0, spec.vocab_size, count).tolist()
        self.tokens += new
        self.positions += positions
        seen = np.tri(start + count, dtype=bool)[start:]
        for row, visible in (parents or {}).items():
            seen[row - start] = np.isin(np.arange(start + count), [*visible, row])
        self.seen = np.block([[self.seen, np.zeros((start, count), bool)], [seen]])
        head_rows = self.generator.permutation(count)[: max(1, count - 1)].tolist()
        found = self.engine.run(states, fed, new, positions, head_rows, seen if parents else None)
        fed_back, logprobs = self.head.run(self.states, self.tokens, self.positions, self.seen)
        self._assert_near(found.fed_back, fed_back[start:])
        self._assert_best(found, logprobs[[start + row for row in head_rows]])
        return found.fed_back

    def _assert_near(self, found: np.ndarray, expected: np.ndarray) -> None:
        assert np.abs(found - expected).max() < self.tolerance * np.abs(expected).max()

    def _assert_best(self, found: Scored, logprobs: np.ndarray) -> None:
        best = -np.sort(-logprobs)[:, : self.engine.top_k]
        self._assert_near(found.logprobs, best)
        assert (np.diff(found.logprobs) <= 0).all()
        index = {token: draft_id for draft_id, token in enumerate(self.head.target_ids)}
        for row, tokens in enumerate(found.tokens.tolist()):
            assert len(set(tokens)) == len(tokens)
            self._assert_near(found.logprobs[row], logprobs[row, [index[token] for token in tokens]])


def assert_computes(bundle: Path, head: TorchHead, tolerance: float) -> None:
    """A prompt, a chain, a tree of two levels, the next taps after it, taps and fed-back rows together."""
    both = Both(bundle, head, tolerance)
    none = np.zeros((0, head.spec.hidden_size), np.float32)
    chain = both.step(9, none, list(range(9)))[-1:]
    for position in (9, 10):
        chain = both.step(0, chain, [position])
    prompt = list(range(9))
    tree = {11: prompt, 12: prompt, 13: prompt}
    level = both.step(0, np.repeat(chain, 3, axis=0), [9, 9, 9], tree)
    both.step(0, level[[0, 0, 2, 1]], [10] * 4, {14: [*prompt, 11], 15: [*prompt, 11], 16: [*prompt, 13], 17: [12]})
    both.step(1, none, [9], {18: prompt})
    both.step(2, level[:2], [9, 10, 11, 12], {row: [*prompt, *range(18, row)] for row in range(19, 23)})


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_every_option(options: dict[str, Any], checkpoints: dict[str, Checkpoint], tmp_path: Path) -> None:
    checkpoint = checkpoints["llama-untied"]
    draft = draft_of(checkpoint, **options)
    bundle = bundle_with(draft, checkpoint, tmp_path / "bundle")
    assert_computes(bundle, TorchHead(draft, embedding_of(checkpoint)), FLOAT32)


@pytest.mark.parametrize("name", MODELS)
def test_every_kind_of_target(name: str, checkpoints: dict[str, Checkpoint], tmp_path: Path) -> None:
    draft = draft_of(checkpoints[name], fc_norm="each")
    bundle = bundle_with(draft, checkpoints[name], tmp_path / "bundle", split=(2,))
    assert_computes(bundle, TorchHead(draft, embedding_of(checkpoints[name])), FLOAT32)


def stored(rows: np.ndarray, precision: str, block_size: int) -> np.ndarray:
    bits = bits_of(precision)
    if bits is not None:
        return dequantize_rows(quantize_rows(rows, bits, block_size), bits, rows.shape[1])
    return rows.astype("float16" if precision == "fp16" else "float32").astype("float32")


def as_stored(draft: Draft, precision: str, head_precision: str, block_size: int) -> Draft:
    def of(role: str, weight: np.ndarray) -> np.ndarray:
        if weight.ndim == 2:
            return stored(weight, head_precision if role in ("fc", "head") else precision, block_size)
        return stored(weight, "fp16" if precision == "fp16" else "fp32", block_size)

    own = draft.embedding if draft.embedding is None else stored(draft.embedding, head_precision, block_size)
    return dataclasses.replace(draft, weights={r: of(r, w) for r, w in draft.weights.items()}, embedding=own)


@pytest.mark.parametrize(("precision", "target", "block_size", "own_embedding"), QUANTIZED)
@pytest.mark.parametrize("name", ["llama-untied", "llama-three-heads"])
def test_quantized(
    name: str,
    precision: str,
    target: str,
    block_size: int,
    own_embedding: bool,
    checkpoints: dict[str, Checkpoint],
    tmp_path: Path,
) -> None:
    checkpoint = checkpoints[name]
    draft = draft_of(checkpoint, own_embedding=own_embedding, qkv_bias=True)
    bundle = bundle_with(
        draft, checkpoint, tmp_path / "bundle", precision=target, draft_precision=precision, block_size=block_size
    )
    table = stored(embedding_of(checkpoint), "int8" if target == "int4" else target, block_size)
    head_precision = "int8" if precision == "int4" else precision
    head = TorchHead(as_stored(draft, precision, head_precision, block_size), table)
    assert_computes(bundle, head, INT8_ACTIVATIONS if precision != "fp32" else FLOAT32)
    if precision != "fp32":
        without_rounded_activations(bundle)
        assert_computes(bundle, head, FLOAT32)


@pytest.mark.parametrize("name", ["llama-untied", "gemma3-tied", "llama-three-heads"])
def test_half_precision(name: str, checkpoints: dict[str, Checkpoint], tmp_path: Path) -> None:
    draft = draft_of(checkpoints[name], fc_norm="joint", own_embedding=name == "llama-untied")
    bundle = bundle_with(draft, checkpoints[name], tmp_path / "bundle", precision="fp16")
    head = TorchHead(as_stored(draft, "fp16", "fp16", 32), stored(embedding_of(checkpoints[name]), "fp16", 32))
    assert_computes(bundle, head, FLOAT16)


@pytest.mark.parametrize(("asked", "vocabulary", "given"), [(10, 80, 10), (4, 80, 4), (100, 80, 80), (10, 7, 7)])
def test_as_many_tokens_as_asked_for_or_the_whole_vocabulary(
    asked: int, vocabulary: int, given: int, checkpoints: dict[str, Checkpoint], tmp_path: Path
) -> None:
    checkpoint = checkpoints["llama-untied"]
    draft = draft_of(checkpoint, draft_vocab_size=vocabulary)
    bundle = bundle_with(draft, checkpoint, tmp_path / "bundle", draft_top_k=asked)
    engine = DraftEngine(bundle)
    scored = engine.run(np.ones((1, 192), np.float32), np.zeros((0, 64)), [5], [0], [0])
    assert (engine.top_k, scored.tokens.shape) == (given, (1, given))
    if given == vocabulary:
        assert set(scored.tokens[0]) == set(np.arange(vocabulary) + draft.d2t)
        assert np.exp(scored.logprobs.astype(float)).sum() == pytest.approx(1)


@pytest.mark.parametrize("precision", ["fp32", "fp16", "int4"])
def test_the_graph_has_the_inputs_and_outputs_that_the_decoder_binds(
    precision: str, checkpoints: dict[str, Checkpoint], tmp_path: Path
) -> None:
    checkpoint = checkpoints["llama-untied"]
    bundle = bundle_with(draft_of(checkpoint), checkpoint, tmp_path / "bundle", precision=precision)
    draft = open_bundle(bundle).manifest.draft
    assert draft is not None
    number = "float16" if precision == "fp16" else "float32"
    cache = (number, (1, 2, "C", 16))
    assert {tensor.name: (tensor.dtype, tensor.shape) for tensor in draft.graph.inputs} == {
        "taps": (number, (1, "P", 192)),
        "hidden": (number, (1, "Q", 64)),
        "token_ids": ("int64", (1, "S")),
        "positions": ("int64", (1, "S")),
        "last_rows": ("int32", (1,)),
        "total_rows": ("int32", (1,)),
        "mask": (number, ("M", 1, "S", "T")),
        "rope_draft_cos": (number, ("R", 8)),
        "rope_draft_sin": (number, ("R", 8)),
        "key_draft": cache,
        "value_draft": cache,
        "head_rows": ("int64", ("n",)),
    }
    assert {tensor.name: (tensor.dtype, tensor.shape) for tensor in draft.graph.outputs} == {
        "fed_back": (number, (1, "S", 64)),
        "top_tokens": ("int64", ("n", 10)),
        "top_logprobs": ("float32", ("n", 10)),
        "key_draft_out": cache,
        "value_draft_out": cache,
    }
