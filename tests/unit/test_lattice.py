"""The lattice against a brute-force model that keeps every text whole and knows nothing of rows or sharing."""

from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wavekit.decoding.lattice import Lattice, Node

TOKENS = 4


def target(text: tuple[int, ...], salt: int) -> int:
    """The token that the imaginary target writes after a text."""
    return hash((salt, text)) % TOKENS


@dataclass
class FakeCache:
    """One stage's cache: each row remembers the text it was made for."""

    rows: list[tuple[int, ...]] = field(default_factory=list)

    def keep(self, start: int, rows: list[int]) -> None:
        self.rows = self.rows[:start] + [self.rows[row] for row in rows]


def text_of(node: Node, committed: tuple[int, ...]) -> tuple[int, ...]:
    """The whole text up to a node: the committed tokens end with the anchor's."""
    path: list[int] = []
    while node.parent is not None:
        path.append(node.token)
        node = node.parent
    return (*committed[: node.position], node.token, *path[::-1])


class Explorer:
    """Drives a lattice the way a decoder does, over fake caches, checking what each node can see."""

    def __init__(self, stages: int, prompt: tuple[int, ...], salt: int) -> None:
        self.text, self.salt = prompt, salt
        last = len(prompt) - 1
        self.caches = [FakeCache([prompt[: row + 1] for row in range(last + 1)]) for _ in range(stages)]
        self.lattice = Lattice(stages, prompt[-1], last, [last] * stages)
        self.commit([self.lattice.anchor])

    def run(self, stage: int) -> list[Node]:
        nodes = self.lattice.waiting(stage)
        committed = len(self.text) - 1
        for node in nodes:
            cache = self.caches[stage].rows
            mine = text_of(node, self.text)
            visible = [*range(committed), *self.lattice.visible_rows(node, stage)]
            assert [cache[row] for row in visible] == [mine[: length + 1] for length in range(len(mine) - 1)]
            node.rows.append(len(cache))
            cache.append(mine)
        return nodes

    def commit(self, finished: list[Node]) -> int:
        count = 0
        while self.lattice.anchor in finished:
            token = target(self.text, self.salt)
            self.text += (token,)
            self.lattice.commit(token)
            count += 1
        if count:
            start, kept = self.lattice.collapse()
            for cache, rows in zip(self.caches, kept, strict=True):
                cache.keep(start, rows)
        return count


@given(
    stages=st.integers(1, 6),
    prompt=st.lists(st.integers(0, TOKENS - 1), min_size=1, max_size=5),
    salt=st.integers(0, 1000),
    data=st.data(),
)
def test_any_proposals_leave_the_text_that_plain_decoding_writes(stages, prompt, salt, data) -> None:
    explorer = Explorer(stages, tuple(prompt), salt)
    for _ in range(data.draw(st.integers(1, 20))):
        live = explorer.lattice.nodes
        for _ in range(data.draw(st.integers(0, 3))):  # drafts: below any node that has not run yet, or has just
            parent = live[data.draw(st.integers(0, len(live) - 1))]
            explorer.lattice.propose(parent, data.draw(st.integers(0, TOKENS - 1)))
        # A node proposed below one that is further on still runs every stage after its parent did.
        passes = [explorer.lattice.waiting(stage) for stage in range(stages)]
        for stage in reversed(range(stages)):
            if passes[stage]:
                assert explorer.run(stage) == passes[stage]
        explorer.commit(passes[-1])
        anchor = explorer.lattice.anchor
        for stage, cache in enumerate(explorer.caches):
            texts = [explorer.text[: row + 1] for row in range(anchor.position)]
            assert cache.rows[: anchor.position] == texts
            assert len(cache.rows) == anchor.position + sum(node.depth > stage for node in explorer.lattice.nodes)
    plain = tuple(prompt)
    while len(plain) < len(explorer.text):
        plain += (target(plain, salt),)
    assert explorer.text == plain


@pytest.mark.parametrize("stages", range(1, 7))
def test_plain_decoding_commits_one_token_every_k_ticks(stages: int) -> None:
    explorer = Explorer(stages, (1, 2), salt=3)
    commits = []
    for _ in range(3 * stages):
        finished: list[Node] = []
        for stage in reversed(range(stages)):
            if explorer.lattice.waiting(stage):
                finished = explorer.run(stage)
        commits.append(explorer.commit(finished if explorer.lattice.anchor.depth == stages else []))
    assert commits == ([0] * (stages - 1) + [1]) * 3


def test_a_perfect_chain_is_committed_in_one_pass() -> None:
    explorer = Explorer(1, (0,), salt=7)
    node, text = explorer.lattice.anchor, explorer.text
    for _ in range(5):
        text += (target(text, 7),)
        node = explorer.lattice.propose(node, text[-1])
    assert explorer.commit(explorer.run(0)) == 6
    assert explorer.text[: len(text)] == text


def test_nothing_is_known_after_an_anchor_that_has_not_finished() -> None:
    lattice = Lattice(2, 5, 0, [0])
    with pytest.raises(ValueError, match="1 of 2 stages"):
        lattice.commit(1)


def test_a_child_is_proposed_once() -> None:
    lattice = Lattice(1, 5, 0)
    assert lattice.propose(lattice.anchor, 3) is lattice.propose(lattice.anchor, 3)
    assert len(lattice.nodes) == 2
