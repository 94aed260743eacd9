"""Whether a head goes with a target, and the rule of those who do not say where they tap."""

import dataclasses
import itertools
from collections.abc import Sequence

import numpy as np

from wavekit_engines.decoder_spec import DecoderSpec
from wavekit_engines.draft_formats.stored_tensor import from_float32
from wavekit_engines.draft_spec import Draft
from wavekit_engines.errors import MisuseError
from wavekit_engines.weights import WeightRows

_ROWS = 1024
GIVE_BOUNDARIES = "give them with `wavekit convert-draft --boundaries`"


def check_target(draft: Draft, target: DecoderSpec) -> None:
    """Refuse a head that cannot be this model's.

    Raises:
        MisuseError: hidden size, vocabulary, number of layers or a boundary do not fit.
    """
    spec = draft.spec
    for what, found, expected in (
        ("hidden size", spec.hidden_size, target.hidden_size),
        ("vocabulary", spec.vocab_size, target.vocab_size),
        ("number of layers", spec.target_layers, target.num_layers),
    ):
        if found is not None and found != expected:
            raise MisuseError(
                f"the head is for a model with a {what} of {found}, but this model's is {expected}: take the model it "
                "was trained for, or make a head with `wavekit train draft`"
            )
    check_boundaries(spec.boundaries, target.num_layers)


def check_boundaries(boundaries: Sequence[int], layers: int | None) -> None:
    """Refuse taps that do not ascend, or that lie outside a model with `layers` layers (None: not known).

    Raises:
        MisuseError: saying so.
    """
    if not boundaries or boundaries[0] < 0 or any(low >= high for low, high in itertools.pairwise(boundaries)):
        raise MisuseError(
            f"boundaries {list(boundaries)} do not ascend from 0, and fc takes the taps from shallow to deep: "
            f"{GIVE_BOUNDARIES}"
        )
    if layers is not None and boundaries[-1] > layers:
        raise MisuseError(
            f"the head taps boundaries {list(boundaries)}, but a model of {layers} layers has none beyond {layers}: if "
            f"its layer ids were boundary numbers already, {GIVE_BOUNDARIES}; otherwise take its own model"
        )


def eagle_rule(layers: int) -> tuple[int, ...] | None:
    """Boundaries 2, N // 2 and N - 3 of a model with N layers; None where that does not ascend."""
    rule = (2, layers // 2, layers - 3)
    return rule if rule[0] < rule[1] < rule[2] else None


def drop_copied_embedding(draft: Draft, embedding: WeightRows) -> Draft:
    """The same head without its own token table where that is a copy of the target's, as speculators saves it.

    Args:
        draft: a head.
        embedding: the target's table, ``DecoderWeights["embedding"]``; read in pieces.
    """
    table = draft.embedding
    if table is None or table.shape != embedding.shape:
        return draft
    kind = draft.dtypes.get("embedding", draft.dtype)
    for start in range(0, table.shape[0], _ROWS):
        own = from_float32(table[start : start + _ROWS], kind, "embedding")
        if not np.array_equal(own.values, from_float32(embedding.read(start, start + _ROWS), kind, "embedding").values):
            return draft
    dtypes = {role: kind for role, kind in draft.dtypes.items() if role != "embedding"}
    return dataclasses.replace(draft, embedding=None, dtypes=dtypes)
