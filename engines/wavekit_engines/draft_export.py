"""What an export has to know of a draft head beside its graph: whether it fits the target, its size, its identity."""

import hashlib
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from wavekit_engines.decoder_spec import DecoderSpec
from wavekit_engines.draft_formats import check_target
from wavekit_engines.draft_spec import Draft
from wavekit_engines.errors import CheckpointError
from wavekit_engines.graphs.draft_graph import DraftForms


def check_draft(draft: Draft, target: DecoderSpec) -> None:
    """Refuse a draft that was made for another kind of model, or that contradicts itself.

    A draft made for other weights of the same shape is not refused: people draft for a fine-tuned model with the head
    of its base, and what is written stays the target's own.

    Raises:
        MisuseError: hidden size, vocabulary, number of layers or a boundary do not fit the target.
        CheckpointError: weights or token ids do not fit the draft's own description.
    """
    check_target(draft, target)
    spec, name = draft.spec, draft.origin or "the draft head"
    for role, shape in spec.weight_shapes().items():
        if role not in draft.weights or draft.weights[role].shape != shape:
            raise CheckpointError(f"{name} has no weight {role} of shape {list(shape)}: read or train it again")
    ids = np.arange(draft.d2t.size) + draft.d2t
    in_range = ids.size == spec.draft_vocab_size and ids.min() >= 0 and ids.max() < spec.vocab_size
    if not in_range or not (np.diff(ids) > 0).all():
        raise CheckpointError(f"{name} maps its tokens to ids that do not ascend within the vocabulary: train it again")


def draft_parameters(draft: Draft) -> int:
    """Weights of the head, its own token table included."""
    embedding = draft.embedding.size if draft.embedding is not None else 0
    return sum(math.prod(shape) for shape in draft.spec.weight_shapes().values()) + embedding


def draft_bytes(draft: Draft, forms: DraftForms) -> int:
    """What the head takes in a bundle, about."""
    shapes = draft.spec.weight_shapes()
    wide = math.prod(shapes["fc"]) + math.prod(shapes["head"])
    wide += draft.embedding.size if draft.embedding is not None else 0
    bits = wide * forms.head.stored_bits + (draft_parameters(draft) - wide) * forms.layer.stored_bits
    return int(bits / 8) + 8 * draft.d2t.size


def draft_digest(draft: Draft) -> str:
    """SHA-256 of the weights and the token map, in hexadecimal."""
    arrays: dict[str, npt.NDArray[Any]] = {**draft.weights, "d2t": draft.d2t}
    if draft.embedding is not None:
        arrays["embedding"] = draft.embedding
    return digest_of(arrays)


def digest_of(arrays: Mapping[str, npt.NDArray[Any]]) -> str:
    """SHA-256 of arrays with their names and shapes, in hexadecimal."""
    digest = hashlib.sha256()
    for name in sorted(arrays):
        digest.update(f"{name}{arrays[name].shape}".encode())
        digest.update(np.ascontiguousarray(arrays[name]).data)
    return digest.hexdigest()
