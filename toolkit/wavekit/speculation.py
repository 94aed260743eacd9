"""What a caller says about speculative decoding, and what it is told about how that went."""

from dataclasses import dataclass, field
from typing import Literal, get_args

from wavekit.lattice import LATTICE_ROWS
from wavekit_engines.errors import MisuseError

Mode = Literal["auto", "draft", "lookup", "draft+lookup", "off"]

Silence = Literal["no match", "does not pay", "beyond the draft's context", "end of text"]
"""Why nothing was proposed."""

MOST_TOKENS = LATTICE_ROWS - 1
"""Proposed tokens that fit into one pass of the target, beside the token that is certain."""

_MOST_DEPTH = 32
_DRAFT_DEPTH = 8


@dataclass(frozen=True)
class Speculation:
    """How much may be proposed, and by whom. None of it changes a text, only how fast it is written.

    Attributes:
        mode: "draft" proposes with the bundle's draft head, "lookup" with what followed the last time the text read
            alike, "draft+lookup" with both; "auto" is "draft" where the bundle has a head, and "off" where not.
        depth: the most tokens in a row; None: 8 for a draft, as many as ``tokens`` for a lookup.
        top_k: children a token of the draft's tree gets, and tokens of a level that get any; None: what the bundle's
            head scores. 1 makes the tree a chain. Bundles of a precision below fp32 only ever run chains, since
            there a token beside others would come out rounded otherwise than in plain decoding.
        tokens: the most tokens proposed for one pass, 1 to 63.
        adaptive: propose only as much as pays, by what passes cost on this machine and by what came true so far;
            False proposes as much as the other fields allow, for measurements of acceptance.

    Raises MisuseError for a value out of range, naming the field and its range.
    """

    mode: Mode = "auto"
    depth: int | None = None
    top_k: int | None = None
    tokens: int = 60
    adaptive: bool = True

    def __post_init__(self) -> None:
        if self.mode not in get_args(Mode):
            raise MisuseError(f"speculate must be one of {', '.join(get_args(Mode))}, not {self.mode!r}")
        for name, most in (("depth", _MOST_DEPTH), ("top_k", MOST_TOKENS), ("tokens", MOST_TOKENS)):
            value = getattr(self, name)
            if value is None and name != "tokens":
                continue
            if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
                raise MisuseError(f"{name} of a speculation must be an integer from 1 to {most}, not {value!r}")

    def resolved(self, has_draft: bool) -> Mode:
        """The mode for a bundle with or without a draft head.

        Raises:
            MisuseError: the mode needs a head and there is none.
        """
        if self.mode == "auto":
            return "draft" if has_draft else "off"
        if "draft" in self.mode and not has_draft:
            raise MisuseError(
                f"speculate={self.mode!r} needs a draft head and this bundle has none: export it with --draft, "
                "or use 'lookup', which needs none"
            )
        return self.mode

    @property
    def draft_depth(self) -> int:
        """The most levels of a draft's tree."""
        return min(self.depth or _DRAFT_DEPTH, self.tokens)

    @property
    def lookup_depth(self) -> int:
        """The most tokens of a lookup's chain."""
        return min(self.depth or self.tokens, self.tokens)


@dataclass
class SpeculationCounts:
    """What a speculator counts while a text is written, the prefill left out.

    ``proposed_at[i]`` counts the passes that ran a proposal i + 1 tokens behind the certain one, ``accepted_at[i]``
    those of them in which it was committed.
    """

    proposed: int = 0
    proposed_at: list[int] = field(default_factory=list)
    accepted_at: list[int] = field(default_factory=list)
    silent: dict[Silence, int] = field(default_factory=dict)


@dataclass(frozen=True)
class SpeculationStats:
    """How speculation went in one generation.

    Attributes:
        mode: who proposed, "off" for nobody.
        passes: passes of the target that committed something; the prefill, which gives the first token, is not one.
        tau: tokens a pass, the one the target adds itself included; 1.0 without speculation.
        proposed: tokens proposed and run by the target.
        accepted: those of them that were committed.
        acceptance: for the 1st, 2nd, ... token behind the certain one: of the passes that ran a proposal there, the
            share in which it was committed.
        silent: passes without proposals, by reason.
        draft_seconds: inside runs of the draft head, after the prefill.
        target_seconds: inside runs of the target, after the prefill.
        host_seconds: everything else between the first token and the last.
    """

    mode: Mode
    passes: int
    tau: float
    proposed: int
    accepted: int
    acceptance: tuple[float, ...]
    silent: dict[Silence, int]
    draft_seconds: float
    target_seconds: float
    host_seconds: float
