"""Exact replay of depth-explored decoding (DEX) from a trace: when each token is committed, and which exit made it so.

The decoder: K stages that end at depths d_0 < ... < d_{K-1} = N. In one tick every live node runs its next stage.
After stage e < K - 1 a node's exit e proposes a child, which runs stage 0 from the next tick on. When the anchor, the
first node whose successor is undecided, leaves stage K - 1, the token it gives there is committed; the child that
carries that token becomes the anchor with whatever stages it has run, or a fresh node does if nobody proposed it.
Node i here is the one at which record i of the trace is read: it carries ``final[i - 1]`` and leaves the last stage
with ``final[i]``.

- Without DECS, an exit proposes its best token; a token proposed before is the same node. With DECS, it proposes the
  best of the tokens nobody proposed below this node yet, or nothing where the trace has no more ranks.
- A node's successor, if exit j was the first to propose it, starts j + 1 ticks after the node; K ticks where no exit
  did. So a text takes K ticks plus the sum of j + 1 over its nodes but the last: the speed-up over the same K stages
  run in turn is K / E[j + 1].
- The first token of a sequence comes with the prompt's prefill; after it the lattice holds one fresh node, and no ticks
  were spent. Children of the last node cannot be committed and are not made.
- A draft (the hybrid) is asked at the start of a tick for each new anchor and proposes a chain of tokens below it, all
  of which run stage 0 in that tick, each in the place of an existing child where one carries its token. Several tokens
  are committed in one tick where the successors have left the last stage too; only the last of them is drafted for.

The ticks are exact whatever wrong branches do, since those never become anchors. Knows traces, no time and no engines;
which nodes live beside the committed ones is counted in `dex_nodes`.
"""

from collections import defaultdict
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from wavekit_calibration.errors import TooFewTokensError
from wavekit_calibration.simulation.trace import ExitTrace
from wavekit_engines.errors import MisuseError

NOTHING = -1


@dataclass(frozen=True)
class DexStages:
    """The stages of a decoder, and which of their ends propose."""

    depths: tuple[int, ...]
    """d_0 < ... < d_{K-1} = N: boundaries where stages end."""
    decs: bool = False
    exits: tuple[int, ...] | None = None
    """Numbers of the stages whose ends propose; None for all but the last. One alone is single-exit pipelining."""

    @property
    def count(self) -> int:
        """K."""
        return len(self.depths)

    @property
    def proposing(self) -> tuple[int, ...]:
        """The numbers of the stages whose ends propose."""
        return tuple(range(self.count - 1)) if self.exits is None else self.exits

    def check(self, num_layers: int) -> None:
        """Refuse stages that a model of so many layers cannot have.

        Raises:
            MisuseError: the depths do not rise from above 0 to the last boundary.
        """
        depths = list(self.depths)
        if not depths or depths != sorted(set(depths)) or depths[0] < 1 or depths[-1] != num_layers:
            shown = ",".join(map(str, depths))
            raise MisuseError(f"the depths {shown} must rise from 1 or more to the model's last boundary, {num_layers}")


@dataclass(frozen=True)
class Drafted:
    """What a draft did to a replay."""

    wrong: NDArray[np.bool_]
    """[M, K - 1]: whether each exit made a child of the node that is not its successor."""
    chains: NDArray[np.int64]
    """[C, 3]: nodes of drafts that went wrong: the index below M of the committed node they hang under, the record at
    which they are read, and the tick in which they run stage 0."""
    asked: NDArray[np.int64]
    """Ticks before which the draft was asked."""


@dataclass(frozen=True)
class Replay:
    """When the nodes of the committed text ran. M nodes: all records but the first of each sequence."""

    stages: DexStages
    records: NDArray[np.int64]
    """[M]: the record of each node."""
    starts: NDArray[np.int64]
    """[M]: the tick, from 0, in which each node runs stage 0; it runs the last one K - 1 ticks later."""
    origins: NDArray[np.int64]
    """[M]: which exit proposed the node's successor; K - 1 where none did, K where the draft did."""
    ticks: int
    """In all."""
    added: NDArray[np.int32]
    """[n, K - 1]: see `proposals`."""
    drafted: Drafted | None
    """None without a draft."""

    @property
    def tokens(self) -> int:
        """Tokens committed by the ticks, M."""
        return len(self.records)

    @property
    def ticks_per_token(self) -> float:
        """E[j + 1] without drafts."""
        return self.ticks / self.tokens

    @property
    def speedup(self) -> float:
        """Over the same stages run in turn: K / ticks a token. Of ticks, which is not time."""
        return self.stages.count / self.ticks_per_token

    @property
    def commits(self) -> NDArray[np.int64]:
        """[K + 1]: nodes by where they came from: exit 0 .. K - 2, nobody (K - 1), a draft (K).

        The first node of a sequence came from nobody; it is counted where the last node has no successor.
        """
        return np.bincount(self.origins, minlength=self.stages.count + 1)


def proposals(trace: ExitTrace, stages: DexStages) -> NDArray[np.int32]:
    """[n, K - 1]: the token that each exit adds below a node read at each record; `NOTHING` where it adds none.

    Raises:
        TraceError: an exit's depth is not in the trace.
    """
    added = np.full((len(trace), stages.count - 1), NOTHING, dtype=np.int32)
    for exit_ in stages.proposing:
        ranks = trace.at(stages.depths[exit_])[:, : exit_ + 1 if stages.decs else 1]
        free = ranks != NOTHING
        for shallower in range(exit_):
            free &= ranks != added[:, shallower, None]
        best = np.take_along_axis(ranks, np.argmax(free, axis=1)[:, None], axis=1)[:, 0]
        added[:, exit_] = np.where(free.any(axis=1), best, NOTHING)
    added[trace.is_last] = NOTHING
    return added


def replay(trace: ExitTrace, stages: DexStages, draft: NDArray[np.int32] | None = None) -> Replay:
    """Replay a trace; with ``draft`` [n, L] (see `ExitTrace.draft`) as a hybrid.

    Raises:
        MisuseError: the depths do not suit the trace's model.
        TraceError: an exit's depth is not in the trace.
        TooFewTokensError: no sequence has a second token.
    """
    stages.check(trace.num_layers)
    if trace.decoded_tokens == 0:
        raise TooFewTokensError("the trace has no sequence of two tokens or more; there is nothing to decode")
    if draft is not None and draft.shape[1] > 0:
        return _Hybrid(trace, stages, draft).run()
    records = np.flatnonzero(~trace.is_first)
    added, origins = proposals(trace, stages), np.full(len(records), stages.count - 1)
    for exit_ in reversed(stages.proposing):
        origins[added[records, exit_] == trace.final[records]] = exit_
    ends = np.cumsum(origins + 1)
    return Replay(stages, records, ends - origins - 1, origins, int(ends[-1]), added, None)


class _Hybrid:
    """The replay with a draft, node by node: which tokens are below a node depends on who came first."""

    def __init__(self, trace: ExitTrace, stages: DexStages, draft: NDArray[np.int32]) -> None:
        self._trace, self._stages = trace, stages
        self._draft, self._final = draft.tolist(), trace.final.tolist()
        self._ranks = {e: trace.at(stages.depths[e]).tolist() for e in stages.proposing}
        self._starts: list[int] = []
        self._origins: list[int] = []
        self._wrong = np.zeros((trace.decoded_tokens, stages.count - 1), dtype=bool)
        self._chains: list[tuple[int, int, int]] = []
        self._asked: list[int] = []

    def run(self) -> Replay:
        clock = 0
        edges = [*self._trace.starts.tolist(), len(self._trace)]
        for first, end in pairwise(edges):
            clock = self._sequence(first + 1, end, clock)
        chains = np.array(self._chains, dtype=np.int64).reshape(-1, 3)
        return Replay(
            stages=self._stages,
            records=np.flatnonzero(~self._trace.is_first),
            starts=np.array(self._starts, dtype=np.int64),
            origins=np.array(self._origins, dtype=np.int64),
            ticks=clock,
            added=proposals(self._trace, self._stages),
            drafted=Drafted(self._wrong, chains, np.array(self._asked, dtype=np.int64)),
        )

    def _sequence(self, first: int, end: int, clock: int) -> int:
        """Replay nodes ``first`` to ``end`` - 1, the first from tick ``clock`` on; return the tick after the last."""
        stages = self._stages.count
        drafted: dict[int, list[tuple[int, int]]] = defaultdict(list)  # node -> (tick, token) proposed below it
        tails: set[tuple[int, tuple[int, ...]]] = set()
        start, asked_at = clock, clock
        for node in range(first, end):
            index = len(self._starts)
            if node == first or start > self._starts[-1]:
                self._asked.append(asked_at)
                self._ask(node, asked_at, end, index, drafted, tails)
            children = self._children(node, start, index, drafted.pop(node, [])) if node + 1 < end else {}
            self._starts.append(start)
            by, tick = children.get(self._final[node], (stages - 1, start + stages))
            self._origins.append(by)
            asked_at, start = start + stages, tick
        return asked_at

    def _ask(
        self,
        anchor: int,
        tick: int,
        end: int,
        index: int,
        drafted: dict[int, list[tuple[int, int]]],
        tails: set[tuple[int, tuple[int, ...]]],
    ) -> None:
        """Take in the chain drafted for ``anchor``: up to its first wrong token as proposals, the rest as chains."""
        parent, wrong = anchor, list[int]()
        for node, token in zip(range(anchor, end - 1), self._draft[anchor], strict=False):
            if token == NOTHING:
                break
            if not wrong:
                parent = node
                drafted[node].append((tick, token))
            if wrong or token != self._final[node]:
                wrong.append(token)
            tail = (parent, tuple(wrong))
            if len(wrong) > 1 and tail not in tails:
                tails.add(tail)
                self._chains.append((index + parent - anchor, node + 1, tick))

    def _children(
        self, node: int, start: int, index: int, drafted: list[tuple[int, int]]
    ) -> dict[int, tuple[int, int]]:
        """Who made each child of a node, by token: the exit or the draft (K), and the tick it starts in."""
        stages = self._stages.count
        children: dict[int, tuple[int, int]] = {}

        def draft_before(tick: int) -> None:
            while drafted and drafted[0][0] < tick:
                at, token = drafted.pop(0)
                if token not in children:
                    children[token] = (stages, at)
                    if token != self._final[node]:
                        self._chains.append((index, node + 1, at))

        for exit_ in self._stages.proposing:
            tick = start + exit_ + 1
            draft_before(tick)
            ranks = self._ranks[exit_][node][: None if self._stages.decs else 1]
            token = next((t for t in ranks if t != NOTHING and t not in children), NOTHING)
            if token != NOTHING:
                children[token] = (exit_, tick)
                self._wrong[index, exit_] = token != self._final[node]
        draft_before(start + stages)
        return children
