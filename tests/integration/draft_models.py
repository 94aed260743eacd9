"""Draft heads with random weights, for the tiny models of `tiny_models` and any other."""

from typing import Any

import numpy as np

from wavekit_engines.checkpoint import Checkpoint
from wavekit_engines.decoder_spec import DecoderSpec
from wavekit_engines.draft_spec import Draft, DraftSpec
from wavekit_engines.families import decoder_spec
from wavekit_engines.rope import scaled_rope

ROPE = {"rope_type": "default", "rope_theta": 10000.0}


def draft_of(checkpoint: Checkpoint, seed: int = 0, own_embedding: bool = False, **options: Any) -> Draft:
    """A random draft for an opened checkpoint; options as for `random_spec`."""
    return random_draft(random_spec(decoder_spec(checkpoint.config), **options), seed, own_embedding)


def random_spec(target: DecoderSpec, **changes: Any) -> DraftSpec:
    """A head of the target's shape on three boundaries, with a quarter of the vocabulary."""
    layers = target.num_layers
    fields = {
        "boundaries": tuple(sorted({1, layers // 2, layers - 1})),
        "target_layers": layers,
        "hidden_size": target.hidden_size,
        "intermediate_size": target.intermediate_size,
        "num_heads": target.num_heads,
        "num_kv_heads": target.num_kv_heads,
        "head_dim": target.head_dim,
        "vocab_size": target.vocab_size,
        "draft_vocab_size": target.vocab_size // 4,
        "max_positions": target.max_positions,
        "norm_eps": target.norm_eps,
        "rope": scaled_rope(ROPE, changes.get("head_dim", target.head_dim), target.max_positions),
        "embedding_scale": target.embedding_scale,
    }
    return DraftSpec(**{**fields, **changes})


def random_draft(spec: DraftSpec, seed: int = 0, own_embedding: bool = False) -> Draft:
    """A draft whose every weight is random: matrices that keep activations of order one, norms around 1, biases
    around 0, and a draft vocabulary drawn from the whole of the target's.
    """
    generator = np.random.default_rng(seed)

    def values(role: str, shape: tuple[int, ...]) -> np.ndarray:
        noise = generator.standard_normal(shape).astype(np.float32)
        if len(shape) == 2:
            return noise / np.float32(shape[1] ** 0.5)
        return noise / 4 + np.float32(not role.endswith("bias"))

    ids = np.sort(generator.choice(spec.vocab_size, spec.draft_vocab_size, replace=False)).astype(np.int64)
    table = generator.standard_normal((spec.vocab_size, spec.hidden_size)).astype(np.float32) if own_embedding else None
    return Draft(
        spec,
        {role: values(role, shape) for role, shape in spec.weight_shapes().items()},
        ids - np.arange(spec.draft_vocab_size),
        embedding=table,
        origin=f"random weights, seed {seed}",
        rope_parameters=ROPE,
    )
