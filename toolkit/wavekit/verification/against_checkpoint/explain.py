"""From where the engines begin to differ to what is wrong with them, in one line."""

from collections.abc import Sequence

import numpy as np

from wavekit.verification.against_checkpoint.drift import TextDrift, relative_rows
from wavekit.verification.against_checkpoint.half_layers import HalfLayer, HalfName, assumptions
from wavekit_engines.engine import Array
from wavekit_engines.weights import DecoderWeights

_EXPLAINED = 0.1
"""An assumption explains a difference that it leaves less than this share of."""


def explain_half(weights: DecoderWeights, layer: int, name: HalfName, text: TextDrift, exact: bool) -> str:
    """What is wrong with a half of a layer that computes something else than the checkpoint's.

    Args:
        weights: the checkpoint's.
        layer: the layer's number.
        name: which half.
        text: a text in which it shows.
        exact: weights are not rounded, so an assumption has to fit closely.
    """
    ours = text.engines.states
    before, after = (ours.entering, ours.middle) if name == "attention" else (ours.middle, ours.leaving)
    x, found = before[layer], after[layer]
    roles = {role: weights.layer(layer, role).read() for role in weights.layer_roles()}
    half = HalfLayer(name, weights.spec, weights.spec.layers[layer], roles)
    said = closest_assumption(half, x, found, _EXPLAINED if exact else 0.6)
    return said or _by_position(text.rows.attention[layer] if name == "attention" else text.rows.mlp[layer])


def closest_assumption(half: HalfLayer, before: Array, after: Array, share: float) -> str | None:
    """The assumption under which a half gives what the engines gave; None where none leaves less than ``share`` of it.

    Args:
        half: as it should be.
        before: the stream [T, H] that the engines gave it.
        after: the stream [T, H] that they left behind it.
        share: of the difference that may be left.
    """
    unexplained = _distance(half.run(before), after, before)
    tried = ((_distance(other.run(before), after, before), said) for said, other in assumptions(half))
    best = min(tried, default=(np.inf, ""))
    return best[1] if best[0] < share * unexplained else None


def _distance(expected: Array, found: Array, x: Array) -> float:
    with np.errstate(all="ignore"):
        rows = relative_rows(found, expected, found - x)
    return float(np.sqrt(np.mean(np.minimum(rows, 1e6) ** 2)))


def _by_position(rows: Array) -> str:
    """What the pattern over tokens says where no assumption fits."""
    largest = rows.max()
    if len(rows) > 8 and rows[0] < 1e-2 * largest:
        first = int(np.flatnonzero(rows > 0.05 * largest)[0])
        if first > 4:
            return f"tokens before {first} are right, those after see others than they should: mask or window"
        return "the first token, which sees only itself, is right: rotary embedding, scale or mask of the attention"
    return "every token is off: weights, norms or biases"


def nearest_boundary(states: Array, checkpoint: Sequence[Array]) -> tuple[int, float]:
    """The checkpoint's boundary that states [T, H] are closest to, and their median relative difference."""
    differences = [float(np.median(relative_rows(states, other, other))) for other in checkpoint]
    best = int(np.argmin(differences))
    return best, differences[best]
