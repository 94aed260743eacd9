"""The tree that a draft head grows below the anchor, level by level (EAGLE-2, arXiv 2406.16858).

Nodes are numbered as they are found, parents before children; the children of one node are consecutive, best first.
Scores are logarithms of chances from the anchor down, so they fall along a path, and the best nodes always include the
ancestors of each. Pure numpy: no engine, no lattice.
"""

from collections.abc import Sequence

import numpy as np

from wavekit.decoding.draft_trust import DraftTrust
from wavekit.decoding.sources import ANCHOR, Candidates
from wavekit_engines.engine import Array


class DraftTree:
    """Nodes with a token, a parent and a score each, and which of them have children."""

    def __init__(self) -> None:
        self._tokens: list[Array] = []
        self._parents: list[Array] = []
        self._scores: list[Array] = []
        self._first_child: dict[int, int] = {}
        self._predicted: dict[int, float] = {}
        self._width = 0
        self._level_start = 0
        self._size = 0
        self.scores: Array = np.zeros(0)
        """Of all nodes, float64 [nodes]."""

    def add_level(self, parents: Sequence[int], tokens: Array, logprobs: Array, factor: float) -> None:
        """Add k children of each parent.

        Args:
            parents: f nodes of the last level; the anchor for the first.
            tokens: of the children, int64 [f, k].
            logprobs: their log-probabilities after the parent, float32 [f, k], falling.
            factor: what makes their probabilities chances, see `DraftTrust.factor`.
        """
        above = np.array([0.0 if parent == ANCHOR else self.scores[parent] for parent in parents])
        step = np.minimum(logprobs.astype(np.float64) + np.log(factor), 0.0)
        self._width = tokens.shape[1]
        self._level_start = self._size
        for index, parent in enumerate(parents):
            self._first_child[parent] = self._size + index * self._width
        self._predicted |= zip(parents, np.exp(logprobs).sum(axis=1).tolist(), strict=True)
        self._tokens.append(tokens.ravel().copy())
        self._parents.append(np.repeat(np.asarray(parents), self._width))
        self._scores.append((above[:, None] + step).ravel())
        self._size += tokens.size
        self.scores = np.concatenate(self._scores)

    def frontier(self, width: int) -> Array:
        """The best nodes of the last level, at most ``width``, best first."""
        last = self._scores[-1]
        best: Array = np.argsort(-last, kind="stable")[:width] + self._level_start
        return best

    def siblings(self, nodes: Array) -> Array:
        """For nodes of the last level, which of that level's parents, in their order, is theirs."""
        groups: Array = (nodes - self._level_start) // self._width
        return groups

    def tokens_of(self, nodes: Array) -> Array:
        """The tokens of nodes of the last level."""
        tokens: Array = self._tokens[-1][nodes - self._level_start]
        return tokens

    def ranked(self, count: int) -> Array:
        """The scores of the ``count`` best nodes, falling."""
        scores: Array = -np.sort(-self.scores)[:count]
        return scores

    def add_to(self, candidates: Candidates, count: int) -> None:
        """Add the ``count`` best nodes to the candidates."""
        best = np.argsort(-self.scores, kind="stable")[:count]
        tokens, parents = np.concatenate(self._tokens)[best], np.concatenate(self._parents)[best]
        numbers = {ANCHOR: ANCHOR}
        for node, token, parent, chance in zip(
            best.tolist(), tokens.tolist(), parents.tolist(), np.exp(self.scores[best]).tolist(), strict=True
        ):
            numbers[node] = candidates.add(numbers[parent], token, chance)

    def teach(self, trust: DraftTrust, committed: Sequence[int]) -> None:
        """Tell what came true along the path of the tokens that were committed after the anchor."""
        tokens = np.concatenate(self._tokens)
        node = ANCHOR
        for depth, token in enumerate(committed, 1):
            start = self._first_child.get(node)
            if start is None:
                return
            hits = np.flatnonzero(tokens[start : start + self._width] == token)
            trust.observe(depth, self._predicted[node], len(hits) > 0, token == tokens[start])
            if not len(hits):
                return
            node = start + int(hits[0])
