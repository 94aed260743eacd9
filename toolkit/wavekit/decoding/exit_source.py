"""Exits that propose: after every stage's pass, how each node's text may go on (DEX, expand).

A node that has left stage j goes on to the next stage, and the exit there proposes one child, which starts at the first
stage in the next tick; so one node may get a child from every exit. With DECS a deeper exit passes over tokens that are
proposed below the node already and takes its next best, since the same guess twice explores nothing. Limits only keep
proposals out: what is committed is the target's choice, whatever was explored.
"""

import math
from collections.abc import Mapping, Sequence

from wavekit.decoding.exit_worker import ExitScores, ExitWorker
from wavekit.decoding.lattice import Lattice, Node


class ExitSource:
    """Lets the exits of some stages propose for one text."""

    def __init__(
        self,
        workers: Mapping[int, ExitWorker],
        *,
        decs: bool = True,
        least_probability: float = 0.0,
        most_nodes: int,
        chain: bool = False,
        selected: int | None = None,
    ) -> None:
        """Propose with the exits of ``workers``, by number of their stage.

        Args:
            workers: exits; other stages' ends propose nothing.
            decs: take the next best token where the best is proposed already; otherwise nothing is added then.
            least_probability: tokens less likely than this, by their exit, are not proposed.
            most_nodes: propose nothing that would make more nodes live than so many.
            chain: no node gets a second child.
            selected: single-exit selection: the stages behind this one wait until nothing waits up to it, so that its
                exit drafts a chain as long as ``most_nodes`` allows, which they then check in one pass.
        """
        self.workers = workers
        self.most_nodes = most_nodes
        self.selected = selected
        self._decs = decs
        self._least_logprob = math.log(least_probability) if least_probability > 0 else -math.inf
        self._chain = chain

    def expand(
        self, lattice: Lattice, stage: int, nodes: Sequence[Node], scores: ExitScores, ends: frozenset[int], last: int
    ) -> None:
        """Propose children of nodes that have just left ``stage``.

        Args:
            lattice: where they live.
            stage: the number of the stage.
            nodes: its rows, in order.
            scores: what its exit says after each.
            ends: tokens after which a text ends; nothing follows them.
            last: the last position at which a node may be of use.
        """
        for row, node in enumerate(nodes):
            if len(lattice.nodes) >= self.most_nodes:
                return
            if node.position >= last or node.token in ends or (self._chain and node.children):
                continue
            for token, logprob in zip(scores.tokens[row].tolist(), scores.logprobs[row].tolist(), strict=True):
                if logprob < self._least_logprob:
                    break
                if node.child(token) is None:
                    lattice.propose(node, token, stage)
                    break
                if not self._decs:
                    break
