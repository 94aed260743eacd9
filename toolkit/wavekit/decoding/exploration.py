"""What exploring the stages of a model came to: ticks, commits by depth, nodes, and where the stages' time went."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from wavekit.decoding.lattice import NOBODY, SPECULATED


@dataclass
class ExplorationCounts:
    """What is counted while a text is written, the prefill left out; times in seconds.

    ``commits`` counts committed tokens by the origin of their node (see `lattice`), ``stage_seconds`` is the time that
    each stage was at work, with its exit or the head, ``tick_seconds`` the time in which any was.
    """

    explored: int = 0
    peak_nodes: int = 0
    commits: dict[int, int] = field(default_factory=dict)
    stage_seconds: list[float] = field(default_factory=list)
    tick_seconds: float = 0.0

    def count_commit(self, origin: int) -> None:
        """One more token was committed, and who proposed its node."""
        self.commits[origin] = self.commits.get(origin, 0) + 1

    def count_tick(self, seconds: Sequence[tuple[int, float]], together: float) -> None:
        """The stages that a tick ran, each with its time, and the time from the first start to the last end."""
        for stage, spent in seconds:
            self.stage_seconds[stage] += spent
        self.tick_seconds += together


@dataclass(frozen=True)
class ExplorationStats:
    """How the stages were used in one generation; the prefill, which gives the first token, is left out.

    Attributes:
        ticks: of all stages at once.
        ticks_per_token: as many as there are stages in plain decoding.
        commits: tokens by who proposed them first: "exit at B" for each stage end B, "speculation" for proposals ahead
            of a tick, "nobody" for those that the last stage had to give.
        explored: nodes that ran at least one stage.
        wasted: those of them that were not committed.
        peak_nodes: the most nodes alive after a tick.
        stage_seconds: for each stage, the time it was at work, its exit or the head included.
        idle_seconds: for each stage, the time of the ticks in which it was not.
    """

    ticks: int
    ticks_per_token: float
    commits: dict[str, int]
    explored: int
    wasted: int
    peak_nodes: int
    stage_seconds: tuple[float, ...]
    idle_seconds: tuple[float, ...]


def exploration_stats(counts: ExplorationCounts, stage_ends: Sequence[int], ticks: int) -> ExplorationStats:
    """Sum up ``counts`` of a decoder whose stages end at these boundaries."""
    tokens = sum(counts.commits.values())
    names = {NOBODY: "nobody", SPECULATED: "speculation"} | {j: f"exit at {end}" for j, end in enumerate(stage_ends)}
    return ExplorationStats(
        ticks=ticks,
        ticks_per_token=ticks / tokens if tokens else 0.0,
        commits={names[origin]: count for origin, count in sorted(counts.commits.items(), reverse=True)},
        explored=counts.explored,
        wasted=counts.explored - tokens,
        peak_nodes=counts.peak_nodes,
        stage_seconds=tuple(counts.stage_seconds),
        idle_seconds=tuple(counts.tick_seconds - spent for spent in counts.stage_seconds),
    )
