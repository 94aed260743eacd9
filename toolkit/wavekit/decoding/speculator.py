"""Everything that proposes for one text: its sources, what bounds their tree, and the count of what came true."""

from collections.abc import Callable, Sequence
from typing import TypeAlias

from wavekit.decoding.budget import Budget
from wavekit.decoding.exit_source import ExitSource
from wavekit.decoding.lattice import LATTICE_ROWS, Lattice, Node
from wavekit.decoding.sequence_workers import SequenceWorkers
from wavekit.decoding.sources import Candidates, Source
from wavekit.decoding.speculation import MOST_TOKENS, Silence, SpeculationCounts


class Speculator:
    """Lets sources propose below every new anchor, and runs what pays; ``exits`` propose after every stage's pass."""

    def __init__(
        self,
        sources: Sequence[Source],
        budget: Budget | None = None,
        most: int = MOST_TOKENS,
        chain: bool = False,
        exits: ExitSource | None = None,
    ) -> None:
        """Run at most ``most`` proposals a pass, only one path of them for ``chain``.

        Those are run that ``budget`` finds worth it, or all for None.
        """
        self.counts = SpeculationCounts()
        self.sources = sources
        self.exits = exits
        self._most_nodes = exits.most_nodes if exits is not None else LATTICE_ROWS
        self._budget = budget
        self._most = most
        self._chain = chain
        self._deepest = 0
        self._placed: set[Node] = set()

    def follow(self, text: Sequence[int]) -> None:
        """Another part of the prompt has run."""
        for source in self.sources:
            source.follow(text)

    def propose(self, lattice: Lattice, text: Sequence[int], depth: int) -> None:
        """Put proposals below the anchor, at most ``depth`` in a row; once for every anchor, before it is decided."""
        self._deepest, self._placed = 0, set()
        if not self.sources:
            return
        room = min(self._most, self._most_nodes - len(lattice.nodes))
        silence: Silence | None = "end of text" if depth < 1 else "no room" if room < 1 else None
        if silence is None and self._chain and lattice.anchor.children:
            silence = "proposed already"
        if silence is not None:
            for source in self.sources:
                source.skip(text)
            self._count_silence(silence)
            return
        candidates = Candidates(min(depth, room))
        reasons = [source.propose(candidates, text) for source in self.sources]
        order, chances = candidates.ranked(self._chain)
        count = min(len(order), room)
        if count and self._budget is not None:
            count = self._budget.best(chances[:count])[0]
        if not count:
            spoken = [reason for reason in reasons if reason is not None]
            self._count_silence(spoken[-1] if spoken and not len(candidates) else "does not pay")
            return
        before = len(lattice.nodes)
        self._deepest, self._placed = candidates.place(order[:count], lattice)
        self.counts.proposed += len(lattice.nodes) - before
        _count(self.counts.proposed_at, self._deepest)

    def learn(self, committed: Sequence[int], nodes: Sequence[Node]) -> None:
        """After an anchor, these tokens were committed, and these nodes carry them."""
        accepted = [node in self._placed for node in nodes]
        _count(self.counts.accepted_at, [*accepted, False].index(False))
        for source in self.sources:
            source.learn(committed)

    def _count_silence(self, reason: Silence) -> None:
        self.counts.silent[reason] = self.counts.silent.get(reason, 0) + 1


SpeculatorMaker: TypeAlias = Callable[[SequenceWorkers], Speculator]
"""Makes the speculator of one generation, for the workers that it was lent."""


def _count(passes: list[int], depth: int) -> None:
    """One more pass at every position up to ``depth``."""
    passes.extend([0] * (depth - len(passes)))
    for position in range(depth):
        passes[position] += 1
