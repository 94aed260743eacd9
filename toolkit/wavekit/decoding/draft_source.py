"""Drafting with an EAGLE-3 head: a dynamic tree of what the target is likely to write (see `draft_spec`).

Before a tick the head is fed the pairs of the tokens committed since (the target's states of token t, token t + 1),
all in one pass; what it says after the last pair are the first candidates. Every further level is one pass of the head
over the best nodes of the level before, on states that it fed back itself. With a budget a level is grown only while it
pays, only from nodes that would be run themselves, and nothing is drafted where that pays less than plain decoding;
without one, trees have the size that the limits say.
"""

from collections.abc import Sequence

import numpy as np

from wavekit.decoding.budget import Budget
from wavekit.decoding.draft_tree import DraftTree
from wavekit.decoding.draft_trust import DraftTrust
from wavekit.decoding.draft_worker import DraftWorker, Scores
from wavekit.decoding.pass_costs import PassCosts
from wavekit.decoding.sources import ANCHOR, Candidates
from wavekit.decoding.speculation import Silence
from wavekit.decoding.tap_rows import TapRows
from wavekit_engines.engine import Array

PATIENCE = 24
"""Anchors without a draft after which one is tried again, to see whether drafting has come to pay."""

MOST_PENDING = 128
"""Pairs that may wait to be fed while nothing is drafted."""


class DraftSource:
    """Proposes trees for one text."""

    def __init__(
        self,
        worker: DraftWorker,
        taps: Sequence[TapRows],
        depth: int,
        top_k: int,
        tokens: int,
        budget: Budget | None = None,
    ) -> None:
        """Draft at most ``depth`` tokens in a row, ``top_k`` after each, ``tokens`` in all.

        Args:
            worker: the head; reset together with the target's workers.
            taps: the tapped rows of the stages, in order.
            depth: levels of a tree.
            top_k: children of a node, and nodes of a level that get children; at most what the head scores.
            tokens: nodes of a tree.
            budget: what trees are weighed by; None to draft as much as the limits allow, always.
        """
        self._worker = worker
        self._taps = taps
        self._depth, self._top_k, self._tokens = depth, top_k, tokens
        self._budget = budget
        self._trust = DraftTrust(depth)
        self._tree: DraftTree | None = None
        self._passed_over = 0

    def follow(self, text: Sequence[int]) -> None:
        """See `sources.Source`: feed the pairs whose states and next token are both there."""
        rows = self._taps[0].stop
        self._feed(text, min(rows, len(text) - 1))

    def propose(self, candidates: Candidates, text: Sequence[int]) -> Silence | None:
        """See `sources.Source`."""
        anchor = len(text) - 1
        depth = min(self._depth, candidates.depth, self._worker.limit - anchor + 1)
        if depth < 1:
            self.skip(text)
            return "beyond the draft's context"
        if not self._pays(candidates, depth, anchor):
            self._passed_over += 1
            self.skip(text)
            return "does not pay"
        self._passed_over = 0
        pending = anchor - self._worker.fed
        scores = self._feed(text, anchor)
        assert scores is not None  # a new anchor completes at least one pair
        self._tree = self._grow(scores, depth, pending)
        self._tree.add_to(candidates, self._tokens)
        return None

    def skip(self, text: Sequence[int]) -> None:
        """See `sources.Source`: the rows that wait to be read must not grow without end."""
        anchor = len(text) - 1
        if anchor > self._worker.limit:
            self._drop(anchor)
        elif anchor - self._worker.fed >= MOST_PENDING:
            self._feed(text, anchor)

    def learn(self, committed: Sequence[int]) -> None:
        """See `sources.Source`."""
        if self._tree is not None:
            self._tree.teach(self._trust, committed)
            self._tree = None

    def _feed(self, text: Sequence[int], stop: int) -> Scores | None:
        """Feed the pairs below ``stop`` that are not yet; what the head says after the last of them."""
        worker, scores = self._worker, None
        while worker.fed < stop:
            start, end = worker.fed, min(stop, worker.fed + worker.max_fed)
            scores = worker.feed([taps.read(start, end) for taps in self._taps], text[start + 1 : end + 1])
        self._drop(stop)
        return scores

    def _drop(self, stop: int) -> None:
        for taps in self._taps:
            taps.drop(stop)

    def _pays(self, candidates: Candidates, depth: int, anchor: int) -> bool:
        """Whether a draft of usual quality brings more tokens a second than what is proposed already."""
        if self._budget is None or self._passed_over >= PATIENCE:
            return True
        budget, costs = self._budget, _costs(self._budget)
        _, there = candidates.ranked()
        _, without = budget.best(there)
        usual = np.cumprod([self._trust.first(level) for level in range(1, depth + 1)])
        usual[: len(there)] = 1 - (1 - usual[: len(there)]) * (1 - there[:depth])  # as if they erred apart
        spent = costs.of(max(anchor - self._worker.fed, 1)) + costs.of(1) * np.arange(depth)
        return budget.chain(usual, spent) > without

    def _grow(self, scores: Scores, depth: int, pending: int) -> DraftTree:
        worker, tree = self._worker, DraftTree()
        tree.add_level([ANCHOR], *self._best_of(scores), self._trust.factor(1))
        states, rows = scores.states, np.zeros((1, 0), np.int64)  # of the parents of the last level
        spent = _costs(self._budget).of(max(pending, 1)) if self._budget is not None else 0.0
        for level in range(2, depth + 1):
            nodes = tree.frontier(self._top_k)
            if self._budget is not None:
                nodes = self._worthwhile(tree, nodes, level, spent, self._budget)
                spent += _costs(self._budget).of(max(len(nodes), 1))
            if not len(nodes) or worker.room < len(nodes):
                break
            parents = tree.siblings(nodes)
            own = np.arange(worker.next_row, worker.next_row + len(nodes))
            scores = worker.step(states[parents], tree.tokens_of(nodes), level - 1, rows[parents])
            rows = np.concatenate([rows[parents], own[:, None]], axis=1)
            states = scores.states.copy()
            tree.add_level(nodes.tolist(), *self._best_of(scores), self._trust.factor(level))
        return tree

    def _best_of(self, scores: Scores) -> tuple[Array, Array]:
        return scores.tokens[:, : self._top_k], scores.logprobs[:, : self._top_k]

    def _worthwhile(self, tree: DraftTree, nodes: Array, level: int, spent: float, budget: Budget) -> Array:
        """Those of the nodes that would be run themselves; none where children of them do not pay another step."""
        scores = tree.ranked(self._tokens)
        chances = np.exp(scores)
        count, rate = budget.best(chances, spent)
        if not count:
            return nodes[:0]
        nodes = nodes[tree.scores[nodes] >= scores[count - 1]]
        children = np.exp(tree.scores[nodes]) * self._trust.first(level)
        step = _costs(budget).of(max(len(nodes), 1))
        longer = -np.sort(-np.concatenate([chances, children]))[: self._tokens]
        return nodes if budget.best(longer, spent + step)[1] > rate else nodes[:0]


def _costs(budget: Budget) -> PassCosts:
    assert budget.draft is not None
    return budget.draft
