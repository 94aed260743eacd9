"""Which nodes run in each tick of a replay: rows by stage, nodes alive, nodes explored for nothing.

A trace knows what exits say on the committed text only. Beside it, a node is taken to propose what the record at its
position proposes: as many children, equal or different among themselves as there. This assumption touches no ticks; it
decides how many rows a pass has, so what passes cost. Nothing is proposed below nodes that have no successor in their
sequence. Tokens of a draft below its own first wrong token count as different from what exits propose there.

A node that has run a stages then has the same subtree wherever it hangs: itself at stage a and, for each exit e < a
that adds a child, the subtree of age a - 1 - e read one record on. Summing that recursion over all records at once
gives every row of every tick without a single node being made: without a draft, those of a tick are the subtree of
its anchor. If all proposals differ, that is 2^(K-1) rows in the tick in which the anchor runs its last stage, and
2^K - 1 nodes alive after it: the most there can be without a draft.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from wavekit_calibration.simulation.replay import NOTHING, Drafted, Replay


@dataclass(frozen=True)
class NodeCounts:
    """The nodes of a replay, tick by tick."""

    rows: NDArray[np.int64]
    """[K, ticks]: nodes that run each stage."""
    live: NDArray[np.int64]
    """[ticks]: nodes alive after each tick, with those just proposed, before what was decided against is dropped."""
    tokens: int

    @property
    def peak_live(self) -> int:
        """The most nodes alive after a tick."""
        return int(self.live.max())

    @property
    def explored(self) -> int:
        """Nodes that ran at least one stage."""
        return int(self.rows[0].sum())

    @property
    def wasted(self) -> int:
        """Explored nodes that were not committed."""
        return self.explored - self.tokens


def count_nodes(replay: Replay) -> NodeCounts:
    """Count the nodes of a replay."""
    subtrees = _subtrees(replay)
    if replay.drafted is not None:
        return _count_drafted(replay, replay.drafted, subtrees)
    # A node is the anchor from its parent's commit to its own: as long as its successor waits, its parent's origin + 1.
    stages = replay.stages.count
    anchored = np.diff(replay.starts, prepend=replay.starts[0])
    anchored[np.diff(replay.records, prepend=-1) > 1] = stages  # the first of a sequence
    anchor = np.repeat(np.arange(replay.tokens), anchored)
    age, at = np.arange(replay.ticks) - replay.starts[anchor], replay.records[anchor]
    rows, live = np.empty((stages, replay.ticks), dtype=np.int64), np.empty(replay.ticks, dtype=np.int64)
    for a in range(stages):
        here = np.flatnonzero(age == a)
        rows[:, here] = subtrees[a][:stages, at[here]]
        live[here] = subtrees[a + 1][:, at[here]].sum(axis=0)
    return NodeCounts(rows, live, replay.tokens)


def _count_drafted(replay: Replay, drafted: Drafted, subtrees: list[NDArray[np.int64]]) -> NodeCounts:
    """Add up the committed nodes and every subtree that hangs under them."""
    stages, starts = replay.stages.count, replay.starts
    rows, live = np.zeros((stages, replay.ticks), dtype=np.int64), np.zeros(replay.ticks, dtype=np.int64)
    totals = [subtree.sum(axis=0) for subtree in subtrees]

    def grow(at: NDArray[np.int64], born: NDArray[np.int64], age: int) -> None:
        """Count subtrees, read at records ``at``, that run their stage ``age`` in tick ``born + age``."""
        for stage in range(age + 1):
            np.add.at(rows[stage], born + age, subtrees[age][stage, at])
        np.add.at(live, born + age, totals[age + 1][at])

    for age in range(stages):
        np.add.at(rows[age], starts + age, 1)
        np.add.at(live, starts + age, 1)
    proposed = replay.origins < stages - 1
    np.add.at(live, (starts + replay.origins)[proposed], 1)
    for exit_ in replay.stages.proposing:
        made = drafted.wrong[:, exit_]
        at, born = replay.records[made] + 1, starts[made] + exit_ + 1
        np.add.at(live, born - 1, 1)
        for age in range(stages - 1 - exit_):
            grow(at, born, age)
    parents, at, born = drafted.chains.T
    last = starts[parents] + stages - 1
    for age in range(stages):
        alive = born + age <= last
        grow(at[alive], born[alive], age)
    return NodeCounts(rows, live, replay.tokens)


def _subtrees(replay: Replay) -> list[NDArray[np.int64]]:
    """For ages 0 .. K, [K + 1, n + 1]: the nodes by stages run, in the subtree of a node of that age at each record."""
    stages = replay.stages.count
    adds = np.ascontiguousarray((replay.added != NOTHING).T.astype(np.int64))
    subtrees: list[NDArray[np.int64]] = []
    for age in range(stages + 1):
        subtree = np.zeros((stages + 1, adds.shape[1] + 1), dtype=np.int64)
        subtree[age] = 1
        for exit_ in range(min(age, stages - 1)):
            subtree[:age, :-1] += adds[exit_] * subtrees[age - 1 - exit_][:age, 1:]
        subtrees.append(subtree)
    return subtrees
