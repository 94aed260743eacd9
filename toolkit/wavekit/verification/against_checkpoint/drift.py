"""How far the engines are from the checkpoint: at every boundary, and in what each half of a layer adds by itself.

Drift adds up from layer to layer. To tell where it comes from, the checkpoint's layers are run once more, each given
the state that the engines gave theirs: then a half of a layer answers for its own arithmetic and weights alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np

from wavekit.verification.against_checkpoint.reference import Reference, States
from wavekit.verification.against_checkpoint.trace import Traced, TracedEngines
from wavekit.verification.findings import BoundaryDrift
from wavekit_engines.engine import Array

_FLOOR = 1e-2
"""What a half adds counts as at least this share of the stream, below which the stream's own rounding shows."""


@dataclass(frozen=True)
class DriftRows:
    """Relative differences by layer and token, of one text or of several."""

    boundaries: Array
    """[layers + 1, T]: over the checkpoint's state."""
    attention: Array
    """[layers, T]: over what the half adds, both sides given the same state."""
    mlp: Array
    """The same."""

    @classmethod
    def of_all(cls, texts: Sequence["DriftRows"]) -> "DriftRows":
        """Of several texts, one after the other."""
        return cls(*(np.concatenate([getattr(text, f.name) for text in texts], axis=1) for f in fields(cls)))


@dataclass(frozen=True)
class TextDrift:
    """One text: states on both sides, and how they differ."""

    ids: tuple[int, ...]
    engines: Traced
    checkpoint: States
    rows: DriftRows


def measure(engines: TracedEngines, reference: Reference, text: Sequence[int]) -> TextDrift:
    """Run a text on both sides."""
    ours, theirs = engines.run(text), reference.states(text)
    layers = len(ours.states.entering)
    alone = reference.states(text, given=ours.states.entering)
    boundaries = [
        relative_rows(ours.states.boundary(k), theirs.boundary(k), theirs.boundary(k)) for k in range(layers + 1)
    ]
    added = alone.middle - alone.entering
    attention = relative_rows(ours.states.middle, alone.middle, _at_least(added, alone.entering))
    added = alone.leaving - alone.middle
    ours_added = ours.states.leaving - ours.states.middle
    mlp = relative_rows(ours_added, added, _at_least(added, alone.middle))
    return TextDrift(tuple(text), ours, theirs, DriftRows(np.stack(boundaries), attention, mlp))


def by_boundary(rows: DriftRows) -> tuple[BoundaryDrift, ...]:
    """Medians over the tokens."""
    return tuple(
        BoundaryDrift(
            boundary=k,
            drift=float(np.median(drift)),
            worst=float(drift.max()),
            attention=float(np.median(rows.attention[k - 1])) if k else None,
            mlp=float(np.median(rows.mlp[k - 1])) if k else None,
        )
        for k, drift in enumerate(rows.boundaries)
    )


def relative_rows(found: Array, expected: Array, scale: Array) -> Array:
    """Norm of the difference over that of ``scale``, by row: [..., T] of [..., T, H]."""
    difference = np.linalg.norm(found - expected, axis=-1)
    rows: Array = difference / np.maximum(np.linalg.norm(scale, axis=-1), np.finfo(np.float32).tiny)
    return np.where(np.isfinite(rows), rows, np.inf)


def _at_least(added: Array, stream: Array) -> Array:
    """What was added, scaled up where it is a tiny part of the stream."""
    size, floor = np.linalg.norm(added, axis=-1), _FLOOR * np.linalg.norm(stream, axis=-1)
    factor: Array = np.where(size > 0, np.maximum(size, floor) / np.maximum(size, 1e-30), 1.0)[..., None]
    scaled: Array = np.where(size[..., None] > 0, added * factor, stream * _FLOOR)
    return scaled
