"""What a caller says about speculative decoding, and what it is told about how that went."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

from wavekit.decoding.lattice import LATTICE_ROWS
from wavekit_engines.errors import MisuseError

Mode = Literal[
    "auto", "draft", "lookup", "exits", "draft+lookup", "draft+exits", "lookup+exits", "draft+lookup+exits", "off"
]

Silence = Literal[
    "no match", "does not pay", "beyond the draft's context", "end of text", "no room", "proposed already"
]
"""Why nothing was proposed."""

MOST_TOKENS = LATTICE_ROWS - 1
"""Proposed tokens that fit into one pass of the target, beside the token that is certain."""

MOST_NODES = 256
"""Nodes that may be alive at once: all that eight stages with exits can make."""

_MOST_DEPTH = 32
_DRAFT_DEPTH = 8


@dataclass(frozen=True)
class Speculation:
    """How much may be proposed, and by whom. None of it changes a text, only how fast it is written.

    One exception: a bundle below fp32 with neither head nor exits decodes plainly in passes of one row, which round
    otherwise than the passes of two or more that a lookup needs.

    Attributes:
        mode: "draft" proposes with the bundle's draft head, "lookup" with what followed the last time the text read
            alike, "exits" with the exits at the ends of stages, while the stages run at once (DEX); a plus joins them.
            "auto" is "draft+lookup" where the bundle has a head, and "off" where not.
        depth: the most tokens in a row; None: 8 for a draft, as many as ``tokens`` for a lookup.
        top_k: children a token of the draft's tree gets, and tokens of a level that get any; None: what the bundle's
            head scores. 1 makes the tree a chain. Bundles of a precision below fp32 only ever run chains, since
            there a token beside others would come out rounded otherwise than in plain decoding.
        tokens: the most tokens proposed for one pass, 1 to 63.
        exits: boundaries of the exits that propose; None: all that the bundle has. One alone is single-exit pipelining.
        decs: a deeper exit passes over what is proposed already and takes its next best.
        least_probability: exits propose nothing that they think less likely than this.
        nodes: the most nodes alive at once, 2 to 256; K stages with exits alone reach at most 2^K - 1.
        selection: for a single exit: it drafts ``nodes`` - 1 tokens before the stages behind it check them all.
        adaptive: propose only as much as pays, by what passes cost on this machine and by what came true so far;
            False proposes as much as the other fields allow, for measurements of acceptance.

    Raises MisuseError for a value out of range, naming the field and its range.
    """

    mode: Mode = "auto"
    depth: int | None = None
    top_k: int | None = None
    tokens: int = 60
    exits: Sequence[int] | None = None
    decs: bool = True
    least_probability: float = 0.0
    nodes: int = LATTICE_ROWS
    selection: bool = False
    adaptive: bool = True

    def __post_init__(self) -> None:
        if self.mode not in get_args(Mode):
            raise MisuseError(f"speculate must be one of {', '.join(get_args(Mode))}, not {self.mode!r}")
        for name, least, most in (
            ("depth", 1, _MOST_DEPTH),
            ("top_k", 1, MOST_TOKENS),
            ("tokens", 1, MOST_TOKENS),
            ("nodes", 2, MOST_NODES),
        ):
            value = getattr(self, name)
            if value is None and name in ("depth", "top_k"):
                continue
            if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
                raise MisuseError(f"{name} of a speculation must be an integer from {least} to {most}, not {value!r}")
        if not 0 <= self.least_probability < 1:
            raise MisuseError(
                f"least_probability of a speculation must be at least 0 and below 1, not {self.least_probability!r}"
            )
        if self.selection and (self.mode != "exits" or self.exits is None or len(self.exits) != 1):
            raise MisuseError("selection drafts with a single exit: give mode 'exits' and one boundary as exits")

    def resolved(self, has_draft: bool, exits: Sequence[int] = ()) -> Mode:
        """The mode for a bundle with or without a draft head, and with exits at these boundaries.

        Raises:
            MisuseError: the mode needs a head or exits that are not there.
        """
        if self.mode == "auto":
            return "draft+lookup" if has_draft else "off"
        if "exits" in self.mode:
            self._check_exits(exits)
        if "draft" in self.mode and not has_draft:
            raise MisuseError(
                f"speculate={self.mode!r} needs a draft head and this bundle has none: export it with --draft, "
                "or use 'lookup', which needs none"
            )
        return self.mode

    def _check_exits(self, there: Sequence[int]) -> None:
        if not there:
            raise MisuseError(
                f"speculate={self.mode!r} needs exits and this bundle has none: `wavekit add-exits` adds them to one "
                "with several stages, `wavekit export --exits` makes one with both"
            )
        if missing := [boundary for boundary in self.exits or () if boundary not in there]:
            raise MisuseError(f"this bundle has no exit at boundary {missing[0]}, only at {', '.join(map(str, there))}")

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
