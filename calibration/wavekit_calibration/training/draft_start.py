"""The untrained draft: its vocabulary from what the target writes, its weights from the target's own.

A head that starts from noise spends most of its training finding out what the target already knows. So the scores start
as the target's head rows, the layer as the target's last one, and the fused state as the deepest tap. What the target
has no counterpart for, the attention's view of the embedding, starts as small noise.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from wavekit_calibration.training.draft_data import AnsweredText
from wavekit_engines.checkpoint import Checkpoint
from wavekit_engines.decoder_spec import DecoderSpec
from wavekit_engines.draft_formats import normalized_rope
from wavekit_engines.draft_spec import Draft, DraftSpec
from wavekit_engines.errors import MisuseError
from wavekit_engines.families import full_rope
from wavekit_engines.rope import scaled_rope
from wavekit_engines.weights import DecoderWeights

_NOISE = 0.02


def choose_vocabulary(texts: Sequence[AnsweredText], vocab_size: int, size: int) -> NDArray[np.int64]:
    """The ``size`` target tokens that occur most often in the answers, as ``d2t``: offsets int64 [size], ids ascending.

    Of equally frequent ones the lower id comes first; where fewer occur, the lowest unused ids fill up.

    Raises:
        MisuseError: a size that the target's vocabulary does not have.
    """
    if not 1 <= size <= vocab_size:
        raise MisuseError(f"a vocabulary of {size} tokens: the target has {vocab_size} tokens")
    counts = np.bincount(np.concatenate([np.asarray(text.answer) for text in texts]), minlength=vocab_size)
    chosen = np.sort(np.argsort(-counts, kind="stable")[:size])
    offsets: NDArray[np.int64] = chosen - np.arange(size)
    return offsets


def coverage(texts: Sequence[AnsweredText], d2t: NDArray[np.int64]) -> float:
    """Share of the answers' tokens that the draft vocabulary holds: no draft can be right more often."""
    known = d2t + np.arange(len(d2t))
    return float(np.isin(np.concatenate([np.asarray(text.answer) for text in texts]), known).mean())


def untrained_draft(
    checkpoint: Checkpoint, spec: DecoderSpec, boundaries: tuple[int, ...], d2t: NDArray[np.int64], seed: int
) -> Draft:
    """A head for ``boundaries`` of a target, started from the target's weights."""
    parameters = _rope_parameters(checkpoint)
    draft_spec = DraftSpec(
        boundaries=boundaries,
        target_layers=spec.num_layers,
        hidden_size=spec.hidden_size,
        intermediate_size=spec.intermediate_size,
        num_heads=spec.num_heads,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        vocab_size=spec.vocab_size,
        draft_vocab_size=len(d2t),
        max_positions=spec.max_positions,
        norm_eps=spec.norm_eps,
        rope=scaled_rope(parameters, spec.head_dim, spec.max_positions),
        activation=spec.activation,
        embedding_scale=spec.embedding_scale,
    )
    weights = _layer_weights(DecoderWeights(checkpoint, spec), spec, np.random.default_rng([seed, 0xD4AF7]))
    head = DecoderWeights(checkpoint, spec)["head"]
    tokens = d2t + np.arange(len(d2t))
    rows = np.concatenate([head.read(int(token), int(token) + 1) for token in tokens])
    weights["head"] = rows * np.float32(spec.logit_scale)
    weights["fc"] = np.zeros((spec.hidden_size, len(boundaries) * spec.hidden_size), np.float32)
    weights["fc"][:, -spec.hidden_size :] = np.eye(spec.hidden_size, dtype=np.float32)
    return Draft(
        spec=draft_spec,
        weights={name: np.ascontiguousarray(weights[name], np.float32) for name in draft_spec.weight_shapes()},
        d2t=d2t,
        origin=f"wavekit, untrained, for {checkpoint.name}",
        target_digest=checkpoint.digest(),
        rope_parameters=parameters,
    )


def _layer_weights(
    target: DecoderWeights, spec: DecoderSpec, rng: np.random.Generator
) -> dict[str, NDArray[np.float32]]:
    """The last layer's weights, widened for the embedding; what the head cannot hold is folded in or left out."""
    last, hidden, ones = spec.num_layers - 1, spec.hidden_size, np.ones(spec.hidden_size, np.float32)

    def layer(role: str) -> NDArray[np.float32]:
        return target.layer(last, role).read()

    def norm(role: str) -> NDArray[np.float32]:
        return ones if spec.norm_placement == "post" else layer(role)

    query, key, value = np.split(layer("qkv"), [spec.query_size, spec.query_size + spec.kv_size])
    query = query * np.float32(spec.attention_scale * spec.head_dim**0.5)
    gate, up = np.split(layer("gate_up"), 2)
    # A norm behind attention or MLP has no place in the head: its parts then start from nothing.
    update = np.float32(spec.residual_scale if spec.norm_placement == "pre" else 0.0)

    def widened(matrix: NDArray[np.float32]) -> NDArray[np.float32]:
        noise = rng.normal(0.0, _NOISE, (len(matrix), hidden))
        return np.concatenate([noise.astype(np.float32), matrix], axis=1)

    return {
        "embedding_norm": ones,
        "hidden_norm": norm("attention_norm_in"),
        "q": widened(query),
        "k": widened(key),
        "v": widened(value),
        "o": layer("output") * update,
        "mlp_norm": norm("mlp_norm_in"),
        "gate": gate,
        "up": up,
        "down": layer("down") * update,
        "norm": target["final_norm"].read(),
    }


def _rope_parameters(checkpoint: Checkpoint) -> dict[str, Any]:
    """The target's rotary parameters for its full attention; longrope's two tables become the plain one."""
    given = full_rope(checkpoint.config)
    if given["rope_type"] == "longrope":
        given = {"rope_theta": given["rope_theta"]}
    return normalized_rope({**given, "partial_rotary_factor": None})
