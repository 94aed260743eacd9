"""Everything about a calibration that a user may choose, with the defaults and their reasons."""

from dataclasses import dataclass, field
from typing import Literal

from wavekit_calibration.sets import BoundarySet
from wavekit_calibration.token_filter import FilterRule
from wavekit_engines.errors import MisuseError


@dataclass(frozen=True)
class MeasureSettings:
    """What is measured; a run can only be resumed with the same."""

    answers: Literal["self", "given"] = "self"
    """``self``: the model answers; ``given``: the answers in the prompt file."""
    positions: Literal["answer", "all"] = "answer"
    """``answer``: positions that predict a token of the answer, where a draft works; ``all``: the prompt's as well."""
    skip_first: int = 1
    """Positions left out at the beginning of each sequence: the first carries a massive activation."""
    sample_tokens: int = 1536
    """Positions sampled before the filter; what that means for memory is in `statistics`."""
    readiness_tokens: int = 512
    """Sampled positions on which the logit lens is read at every boundary; that costs N heads a token."""
    max_new_tokens: int = 40
    max_prompts: int = 256
    max_prompt_tokens: int = 512
    """Longer prompts are left out and counted."""
    batch_size: int = 16
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Of the model; ``auto``: the checkpoint's own."""
    seed: int = 0

    def __post_init__(self) -> None:
        """Refuse numbers below what makes sense."""
        _at_least(self, 1, "sample_tokens", "readiness_tokens", "max_new_tokens", "max_prompts", "max_prompt_tokens")
        _at_least(self, 1, "batch_size")
        _at_least(self, 0, "skip_first", "seed")


@dataclass(frozen=True)
class SelectSettings:
    """How boundaries are chosen from what was measured."""

    filter: FilterRule = field(default_factory=FilterRule)
    """Which of the sampled tokens count."""
    size: int = 3
    """m: boundaries to tap."""
    method: Literal["elsi", "elsi-c"] = "elsi"
    alpha: float = 1.0
    beam: int = 8
    candidates: tuple[int, int] | None = None
    """First and last boundary that may be chosen; None: 1 and N-1."""
    user_sets: tuple[BoundarySet, ...] = ()
    exhaustive: bool = False
    """Score every set of ``size``, however many."""
    draws: int = 100
    """Bootstrap draws."""
    max_stages: int = 8
    layer_costs: tuple[float, ...] | None = None
    """Measured cost of each layer, in any unit; None: 1 each."""
    head_cost: float | None = None
    """Cost of final norm and head in the same unit; None: the head's parameters relative to a layer's."""

    def __post_init__(self) -> None:
        """Refuse numbers below what makes sense."""
        _at_least(self, 1, "size", "beam")
        _at_least(self, 2, "draws", "max_stages")
        if not self.alpha > 0:
            raise MisuseError(f"alpha must be a positive number, got {self.alpha}")
        if (self.layer_costs is None) != (self.head_cost is None):
            raise MisuseError("measured costs are needed for the layers and the head, in the same unit")


def _at_least(settings: object, least: int, *names: str) -> None:
    for name in names:
        value = getattr(settings, name)
        if value < least:
            raise MisuseError(f"--{name.replace('_', '-')} must be at least {least}, got {value}")
