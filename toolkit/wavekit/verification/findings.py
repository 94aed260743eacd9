"""What a verification found, as data: the JSON that ``wavekit verify --json`` writes, and what the page shows.

A `Check` passed, failed, or was skipped because what it needs was not given. A failed one says in one line what is
wrong and, as far as it could be told, why.
"""

from dataclasses import dataclass, field
from typing import Literal

import msgspec

Verdict = Literal["pass", "FAIL", "skipped"]
Group = Literal["decoding", "engines", "sampling", "text", "checkpoint", "draft"]

SCHEMA_VERSION = 1


@dataclass(frozen=True)
class Check:
    """One thing that was checked, and what came of it in one line."""

    group: Group
    name: str
    verdict: Verdict
    says: str


@dataclass(frozen=True)
class Divergence:
    """The first token in which a text is not the one it should be.

    ``margin`` says how narrow the choice was: for greedy choice the reference's logit of its own token minus that of
    the other; for a drawn one the distance, in probability, of the random number from the edge of the token's share.
    None: nobody can tell. It is explained, by rounding, only where the margin is within ``tolerance``.
    """

    way: str
    choice: str
    prompt: str
    position: int
    expected: int
    found: int
    expected_text: str
    found_text: str
    margin: float | None
    tolerance: float
    explained: bool


@dataclass(frozen=True)
class BoundaryDrift:
    """How far the engines are from the checkpoint at one boundary, as root mean squares relative to the checkpoint's.

    ``drift`` is what all layers up to here add up to; ``attention`` and ``mlp`` are what the layer right before the
    boundary does differently when both are given the same state (None at boundary 0). All are medians over tokens;
    ``worst`` is the largest drift of a token.
    """

    boundary: int
    drift: float
    worst: float
    attention: float | None = None
    mlp: float | None = None


@dataclass(frozen=True)
class Drift:
    """The engines beside the checkpoint on the same tokens.

    ``logits`` is the largest difference of a logit over the largest logit; ``top1`` the share of positions where both
    prefer the same token.
    """

    tokens: int
    boundaries: tuple[BoundaryDrift, ...]
    logits: float
    top1: float


@dataclass(frozen=True)
class DraftFigures:
    """How the draft head drafts on fixed texts, in torch and in the engines; tau counts the bonus token."""

    texts: int
    tokens: int
    tau_torch: float
    tau_engines: float
    acceptance_torch: tuple[float, ...]
    acceptance_engines: tuple[float, ...]


@dataclass(frozen=True)
class Subject:
    """What was verified."""

    bundle: str
    model: str
    family: str
    layers: int
    stages: int
    precision: str
    head_precision: str
    draft_boundaries: tuple[int, ...]
    checkpoint: str | None
    draft: str | None


@dataclass(frozen=True)
class PromptFacts:
    """A prompt that texts were written after."""

    name: str
    tokens: int
    begins: str


@dataclass
class Findings:
    """Everything that one verification found."""

    subject: Subject
    prompts: tuple[PromptFacts, ...]
    new_tokens: int
    command: str
    created: str
    versions: dict[str, str]
    checks: list[Check] = field(default_factory=list)
    divergences: list[Divergence] = field(default_factory=list)
    drift: Drift | None = None
    draft: DraftFigures | None = None
    seconds: float = 0.0
    schema_version: int = SCHEMA_VERSION

    @property
    def failed(self) -> list[Check]:
        """The checks that failed."""
        return [check for check in self.checks if check.verdict == "FAIL"]

    @property
    def verdict(self) -> str:
        """The outcome in one sentence."""
        done = [check for check in self.checks if check.verdict != "skipped"]
        if self.failed:
            return f"{len(self.failed)} of {len(done)} checks failed: {self.failed[0].name}: {self.failed[0].says}"
        explained = len(self.divergences)
        ties = f"; {explained} texts part where rounding decides" if explained else ""
        return f"All {len(done)} checks passed{ties}."

    def encode(self) -> bytes:
        """Indented JSON."""
        found = {"verdict": "FAIL" if self.failed else "pass", **msgspec.to_builtins(self)}
        return msgspec.json.format(msgspec.json.encode(found), indent=1) + b"\n"
