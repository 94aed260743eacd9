"""A brute-force model of depth-explored decoding: every node an object, every tick walked through, no arithmetic.

Written from the rules alone. Nodes beside the committed text behave as the record at their position says.
"""

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from wavekit_calibration.simulation.trace import ExitTrace, TraceHeader

FALLBACK, DRAFT = -1, -2


@dataclass(eq=False)
class Node:
    position: int
    """The record that is read here."""
    token: Any
    parent: "Node | None"
    by: int
    age: int = 0
    children: "list[Node]" = field(default_factory=list)
    off_path: bool = False


@dataclass
class Walk:
    """What happened, in the end."""

    text: list[int]
    ticks: int = 0
    commit_ticks: list[int] = field(default_factory=list)
    origins: list[int] = field(default_factory=list)
    rows: list[list[int]] = field(default_factory=list)
    live: list[int] = field(default_factory=list)
    explored: int = 0
    asked: list[int] = field(default_factory=list)


def subtree(node: Node) -> list[Node]:
    return [node, *(below for child in node.children for below in subtree(child))]


class BruteForce:
    def __init__(self, trace: ExitTrace, depths: tuple[int, ...], decs: bool, exits: set[int], draft: Any) -> None:
        self.trace, self.depths, self.decs, self.exits, self.draft = trace, depths, decs, exits, draft
        self.stages = len(depths)

    def walk(self, first: int, end: int) -> Walk:
        """Decode one sequence, whose prompt has been prefilled: its first token is there."""
        self.end = end
        walk = Walk(text=[int(self.trace.final[first])])
        if first + 1 == end:
            return walk
        anchor = Node(first + 1, walk.text[0], None, FALLBACK)
        asked = None
        while len(walk.text) < end - first:
            if anchor is not asked and self.draft is not None:
                asked = anchor
                walk.asked.append(walk.ticks)
                self.propose_chain(anchor)
            running = subtree(anchor)
            walk.rows.append([sum(node.age == stage for node in running) for stage in range(self.stages)])
            walk.explored += walk.rows[-1][0]
            for node in running:
                assert node.age < self.stages
                node.age += 1
                if node.age < self.stages and node.age - 1 in self.exits:
                    self.propose_exit(node, node.age - 1)
            walk.live.append(len(subtree(anchor)))
            while anchor.age == self.stages and len(walk.text) < end - first:
                token = int(self.trace.final[anchor.position])
                walk.text.append(token)
                walk.commit_ticks.append(walk.ticks)
                carrying = [child for child in anchor.children if child.token == token]
                assert len(carrying) <= 1
                anchor = carrying[0] if carrying else Node(anchor.position + 1, token, anchor, FALLBACK)
                walk.origins.append(anchor.by)
            walk.ticks += 1
        return walk

    def propose_exit(self, node: Node, exit_: int) -> None:
        ranks = self.trace.candidates[node.position, self.trace.header.boundaries.index(self.depths[exit_])]
        taken = [child.token for child in node.children]
        for token in ranks[: None if self.decs else 1].tolist():
            if token >= 0 and token not in taken:
                self.add(node, token, exit_)
                return

    def propose_chain(self, anchor: Node) -> None:
        node = anchor
        for token in self.draft[anchor.position].tolist():
            if token == -1:
                return
            key = ("drafted", token) if node.off_path else token
            found = [child for child in node.children if child.token == key]
            added = found[0] if found else self.add(node, key, DRAFT)
            if added is None:
                return
            node = added

    def add(self, parent: Node, token: Any, by: int) -> Node | None:
        if parent.position + 1 == self.end:
            return None
        node = Node(parent.position + 1, token, parent, by)
        node.off_path = parent.off_path or token != self.trace.final[parent.position]
        parent.children.append(node)
        return node


def brute_force(
    trace: ExitTrace, depths: tuple[int, ...], decs: bool = False, exits: set[int] | None = None, draft: Any = None
) -> list[Walk]:
    """Walk through every sequence of a trace."""
    model = BruteForce(trace, depths, decs, set(range(len(depths) - 1)) if exits is None else exits, draft)
    edges = [*trace.starts.tolist(), len(trace)]
    return [model.walk(edges[i], edges[i + 1]) for i in range(len(edges) - 1)]


def random_trace(
    seed: int,
    lengths: list[int],
    boundaries: int,
    ranks: int,
    vocabulary: int,
    silence: float = 0.0,
    right: float = 0.5,
) -> ExitTrace:
    """A trace in which exits are right now and then and collide often; ``silence`` is how often a rank is missing."""
    rng = np.random.default_rng(seed)
    n = sum(lengths)
    final = rng.integers(0, vocabulary, n).astype(np.int32)
    orders = np.argsort(rng.random((n, boundaries, vocabulary)), axis=-1).astype(np.int32)
    hit = rng.random((n, boundaries)) < right
    place = (orders == final[:, None, None]).argmax(-1)
    t, b = np.nonzero(hit)
    orders[t, b, place[t, b]] = orders[t, b, 0]
    orders[t, b, 0] = final[t]
    candidates = orders[:, :, :ranks].copy()
    quiet = rng.random((n, boundaries)) < silence
    candidates[quiet] = -1
    starts = np.cumsum([0, *lengths[:-1]]).astype(np.int64)
    header = TraceHeader(boundaries + 1, tuple(range(1, boundaries + 1)))
    return ExitTrace(header, candidates, final, starts)
