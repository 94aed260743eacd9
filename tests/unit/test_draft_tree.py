"""The tree of a draft against a brute-force model of EAGLE-2 that keeps every node's path whole."""

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from wavekit.decoding.draft_tree import DraftTree
from wavekit.decoding.draft_trust import DraftTrust
from wavekit.decoding.lattice import Lattice
from wavekit.decoding.sources import ANCHOR, Candidates

Path = tuple[int, ...]


def children(path: Path, width: int, salt: int) -> list[tuple[int, float]]:
    """What an imaginary head says after a path: tokens with probabilities, best first."""
    draw = np.random.default_rng([salt, *path])
    chances = -np.sort(-draw.dirichlet(np.full(width + 2, 0.7)))[:width]
    return list(zip(draw.permutation(20)[:width].tolist(), chances.tolist(), strict=True))


@dataclass
class Grown:
    nodes: dict[Path, float]
    expanded: set[Path]


def brute_force(depth: int, width: int, salt: int, factors: list[float]) -> Grown:
    """Each level: all children of the frontier; the next frontier: the best of those."""
    nodes: dict[Path, float] = {}
    frontier: list[tuple[Path, float]] = [((), 1.0)]
    expanded = set[Path]()
    for level in range(depth):
        found: list[tuple[Path, float]] = []
        for path, chance in frontier:
            expanded.add(path)
            for token, own in children(path, width, salt):
                found.append(((*path, token), chance * min(own * factors[level], 1.0)))
        nodes |= dict(found)
        frontier = sorted(found, key=lambda node: -node[1])[:width]
    return Grown(nodes, expanded)


def grown(depth: int, width: int, salt: int, factors: list[float]) -> DraftTree:
    tree, parents, paths = DraftTree(), [ANCHOR], {ANCHOR: ()}
    for level in range(depth):
        said = [children(paths[parent], width, salt) for parent in parents]
        tokens = np.array([[token for token, _ in row] for row in said])
        logprobs = np.log(np.array([[chance for _, chance in row] for row in said], np.float32))
        start = len(tree.scores)
        tree.add_level(parents, tokens, logprobs, factors[level])
        paths |= {
            start + index * width + child: (*paths[parent], int(tokens[index, child]))
            for index, parent in enumerate(parents)
            for child in range(width)
        }
        frontier = tree.frontier(width)
        assert [parents[group] for group in tree.siblings(frontier)] == [
            next(node for node, path in paths.items() if path == paths[child][:-1]) for child in frontier.tolist()
        ]
        assert tree.tokens_of(frontier).tolist() == [paths[node][-1] for node in frontier.tolist()]
        parents = frontier.tolist()
    return tree


def placed(tree: DraftTree, count: int, depth: int) -> dict[Path, float]:
    """The paths of the best nodes, by way of candidates and a lattice, and their chances."""
    candidates, lattice = Candidates(depth), Lattice(1, 0, 0)
    tree.add_to(candidates, count)
    order, chances = candidates.ranked()
    candidates.place(order, lattice)
    paths = {lattice.anchor: ()}
    for node in lattice.nodes[1:]:
        paths[node] = (*paths[node.parent], node.token)
    assert (np.diff(chances) <= 0).all()
    return dict(zip([paths[node] for node in lattice.nodes[1:]], chances.tolist(), strict=True))


shapes = {
    "depth": st.integers(1, 5),
    "width": st.integers(1, 5),
    "salt": st.integers(0, 10**6),
    "factors": st.lists(st.floats(0.2, 2), min_size=5, max_size=5),
}


@given(**shapes, count=st.integers(1, 80))
def test_the_best_nodes_of_all_levels_are_kept_with_their_ancestors(depth, width, salt, factors, count) -> None:
    expected = brute_force(depth, width, salt, factors).nodes
    best = sorted(expected.values(), reverse=True)[:count]
    found = placed(grown(depth, width, salt, factors), count, depth)
    assert all(path[:-1] in found or len(path) == 1 for path in found)
    np.testing.assert_allclose(sorted(found.values(), reverse=True), best, rtol=1e-5)
    for path, chance in found.items():
        assert chance == pytest.approx(expected[path], rel=1e-5)


@given(**shapes, data=st.data())
def test_what_came_true_is_told_depth_by_depth(depth, width, salt, factors, data) -> None:
    expected = brute_force(depth, width, salt, factors)
    told: list[tuple[int, float, bool, bool]] = []

    class Listener(DraftTrust):
        def observe(self, depth: int, predicted: float, right: bool, first: bool) -> None:
            told.append((depth, predicted, right, first))

    committed = data.draw(st.lists(st.integers(0, 21), min_size=1, max_size=depth + 1))
    if data.draw(st.booleans()):  # follow the tree for a while
        path: Path = ()
        for _ in range(data.draw(st.integers(1, depth))):
            if path in expected.expanded:
                path = (*path, data.draw(st.sampled_from(children(path, width, salt)))[0])
        committed = [*path, *committed]
    grown(depth, width, salt, factors).teach(Listener(depth), committed)
    path, checked = (), 0
    for level, token in enumerate(committed, 1):
        if path not in expected.expanded:
            break
        said = children(path, width, salt)
        path = (*path, token)
        right, first = any(token == known for known, _ in said), token == said[0][0]
        assert told[level - 1][2:] == (right, first)
        assert told[level - 1][:2] == (level, pytest.approx(sum(chance for _, chance in said), rel=1e-5))
        checked = level
        if not right:
            break
    assert len(told) == checked


def test_trust_follows_what_is_observed() -> None:
    trust = DraftTrust(2)
    assert trust.factor(1) == 1
    for _ in range(200):
        trust.observe(1, 0.8, right=False, first=False)
        trust.observe(2, 0.25, right=True, first=True)
    assert trust.factor(1) < 0.15
    assert trust.factor(2) == 2
    assert trust.first(1) < 0.05
    assert trust.first(2) > 0.95
    for _ in range(400):
        for right in (True, False):
            trust.observe(1, 0.5, right=right, first=right)
    assert trust.factor(1) == pytest.approx(1, abs=0.1)
    assert trust.first(1) == pytest.approx(0.5, abs=0.1)
