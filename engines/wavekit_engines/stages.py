"""Cutting N layers into stages, and giving each tapped boundary to the stage that puts it out.

Pure arithmetic on boundary numbers (see `decoder_spec`); it knows nothing of weights or graphs.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from wavekit_engines.errors import MisuseError


@dataclass(frozen=True)
class StageRange:
    """Layers ``first`` to ``last - 1``: from boundary ``first`` (token ids, where that is 0) to boundary ``last``."""

    first: int
    last: int
    taps: tuple[int, ...] = ()

    @property
    def outputs(self) -> tuple[int, ...]:
        """The boundaries put out, ascending: the taps of this stage and its last boundary."""
        return tuple(sorted({*self.taps, self.last}))


def even_split(num_layers: int, stages: int) -> tuple[int, ...]:
    """The inner boundaries that cut the layers into stages of equal length, the earlier ones longer where need be.

    Raises:
        MisuseError: fewer than one stage, or more stages than layers.
    """
    if not 1 <= stages <= num_layers:
        raise MisuseError(f"--stages {stages}: a model of {num_layers} layers can have 1 to {num_layers} stages")
    return tuple(-(-num_layers * index // stages) for index in range(1, stages))


def plan_stages(num_layers: int, split: Sequence[int], taps: Sequence[int]) -> tuple[StageRange, ...]:
    """The stages between consecutive boundaries of ``split``, with every tap in the stage that ends at or after it.

    A tap at a stage's last boundary costs nothing. Boundary 0, the embedding's output, belongs to the first stage.

    Raises:
        MisuseError: a boundary that is not inside the model, out of order, or given twice.
    """
    for boundary in split:
        if not 0 < boundary < num_layers:
            raise MisuseError(f"--split {boundary}: inner boundaries of {num_layers} layers are 1 to {num_layers - 1}")
    if list(split) != sorted(set(split)):
        raise MisuseError(f"--split {_listed(split)}: boundaries must ascend, each once")
    for boundary in taps:
        if not 0 <= boundary <= num_layers:
            raise MisuseError(f"--taps {boundary}: boundaries of {num_layers} layers are 0 to {num_layers}")
    if len(set(taps)) != len(taps):
        raise MisuseError(f"--taps {_listed(taps)}: each boundary once")
    edges = [0, *split, num_layers]
    return tuple(
        StageRange(first, last, tuple(sorted(k for k in taps if first < k <= last or k == first == 0)))
        for first, last in pairwise(edges)
    )


def _listed(boundaries: Sequence[int]) -> str:
    return ",".join(map(str, boundaries))
