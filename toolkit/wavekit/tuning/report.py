"""What a tuning tried and found, as it is shown and kept in JSON. docs/bench.md explains every field."""

from dataclasses import dataclass

import msgspec

from wavekit.benchmarking.quiet import is_disturbed
from wavekit.benchmarking.spread import Spread
from wavekit.machine import Machine
from wavekit.profiles import Setting
from wavekit.tuning.candidates import described
from wavekit.tuning.costs import CostCurves
from wavekit.tuning.search import Outcome, Phase, Trial

SCHEMA_VERSION = 1


@dataclass(frozen=True)
class TrialReport:
    """One setting in one phase.

    ``speed`` is over plain decoding after the same prompts, ``total`` the same for the time of all texts together;
    ``tau`` counts the token that the target adds itself; ``disturbed`` counts turns that others disturbed.
    """

    phase: Phase
    name: str
    setting: Setting
    outcome: Outcome
    texts: int
    speed: Spread | None
    total: float
    tau: float | None
    acceptance: tuple[float, ...]
    disturbed: int


@dataclass(frozen=True)
class TuneReport:
    """Everything."""

    bundle: str
    machine: Machine
    command: str
    created: str
    new_tokens: int
    prompts: int
    seconds: float
    costs: CostCurves
    plain: Setting
    plain_tokens_per_second: float | None
    chosen: Setting
    speed: float
    trials: tuple[TrialReport, ...]
    schema_version: int = SCHEMA_VERSION

    def encode(self) -> bytes:
        """Everything as indented JSON."""
        return msgspec.json.format(msgspec.json.encode(self), indent=1) + b"\n"


def reported(trial: Trial) -> TrialReport:
    """A trial without its texts."""
    groups = trial.groups
    return TrialReport(
        trial.phase,
        described(trial.setting),
        trial.setting,
        trial.outcome,
        len(trial.pairs),
        trial.spread,
        trial.total,
        sum(groups) / len(groups) if groups else None,
        tuple(sum(size > count for size in groups) / len(groups) for count in range(1, max(groups, default=1))),
        sum(any(is_disturbed(one.others) for one in pair) for pair in trial.pairs),
    )
