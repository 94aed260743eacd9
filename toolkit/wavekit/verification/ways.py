"""Every way in which a bundle can write a text: the modes of `Speculation` that it offers, each in several shapes.

Modes are read from `Mode` and asked of the bundle, so one that is added there is verified without a word here.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, get_args

from wavekit.decoding.decoder import Decoder
from wavekit.decoding.sampling import SamplingParams
from wavekit.decoding.speculation import Mode, Speculation
from wavekit_engines.errors import MisuseError

_NOT_A_WAY = ("auto", "off")
_DRAFT_SHAPES: dict[str, dict[str, Any]] = {
    "as much as pays": {},
    "chain": {"depth": 5, "top_k": 1, "tokens": 5, "adaptive": False},
    "tree": {"depth": 6, "tokens": 40, "adaptive": False},
}
_SHAPES: dict[str, dict[str, Any]] = {"as much as pays": {}, "always": {"adaptive": False}}

CHOICES = {"greedy": SamplingParams(), "sampled": SamplingParams(temperature=0.8, seed=1)}
"""How tokens are chosen. A plain temperature: only for that can a narrow draw be told from a wrong one."""


@dataclass(frozen=True)
class Way:
    """Who proposes, and how much."""

    name: str
    speculation: Speculation


def ways_of(decoder: Decoder) -> list[Way]:
    """The ways that a bundle offers besides plain decoding."""
    return [
        Way(f"{mode}, {shape}", Speculation(mode, **options))
        for mode in get_args(Mode)
        if mode not in _NOT_A_WAY and _offered(decoder.speculator, mode)
        for shape, options in (_DRAFT_SHAPES if "draft" in mode else _SHAPES).items()
    ]


def _offered(ask: Callable[[Speculation], object], mode: Mode) -> bool:
    try:
        ask(Speculation(mode, adaptive=False))
    except MisuseError:  # needs what this bundle does not have
        return False
    return True
