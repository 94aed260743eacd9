"""Proposals from the text itself, against a search through the whole text, and learning what they are worth."""

import random

from hypothesis import given
from hypothesis import strategies as st

from wavekit.decoding.lattice import Lattice
from wavekit.decoding.lookup import MATCHES, LookupSource
from wavekit.decoding.sources import Candidates


def proposed(source: LookupSource, text: list[int], depth: int = 63) -> list[list[int]]:
    """The proposed paths from the anchor to each leaf, the likeliest first."""
    candidates, lattice = Candidates(depth), Lattice(1, text[-1], len(text) - 1)
    silence = source.propose(candidates, text)
    order, _ = candidates.ranked()
    candidates.place(order, lattice)
    leaves = [node for node in lattice.nodes if not node.children and node is not lattice.anchor]
    assert (silence == "no match") == (not leaves)
    paths = [[leaf, *leaf.above(lattice.anchor)] for leaf in leaves]
    return [[node.token for node in path[-2::-1]] for path in paths]


def searched(text: list[int], length: int, most: int) -> list[int] | None:
    """What followed the latest earlier occurrence of the last ``length`` tokens, going round where it ends."""
    for start in range(len(text) - length - 1, -1, -1):
        if text[start : start + length] == text[-length:]:
            followed = text[start + length :]
            return [followed[step % len(followed)] for step in range(most)]
    return None


@given(text=st.lists(st.integers(0, 3), min_size=1, max_size=80), cut=st.integers(0, 80), most=st.integers(1, 20))
def test_what_followed_the_latest_longest_match_is_proposed(text, cut, most) -> None:
    source = LookupSource(most)
    source.follow(text[: max(cut % len(text), 1)])  # however the text has grown before
    source.propose(Candidates(63), text[: max(cut % len(text), 1)])
    expected = [chain for length in MATCHES if (chain := searched(text, length, most)) is not None]
    found = proposed(source, text)
    assert all(any(path == chain[: len(path)] for chain in expected) for path in found)
    assert all(any(path == chain for path in found) for chain in expected)


def test_a_repetition_is_continued_beyond_the_end_of_the_text() -> None:
    assert proposed(LookupSource(8), [9, 1, 2, 3, 1, 2, 3, 1, 2]) == [[3, 1, 2, 3, 1, 2, 3, 1]]


def test_nothing_is_proposed_where_nothing_repeats() -> None:
    assert proposed(LookupSource(8), list(range(50))) == []
    assert proposed(LookupSource(8), [1]) == []


def test_no_more_is_proposed_than_there_is_room_for() -> None:
    assert proposed(LookupSource(20), [1, 2, 3, 4, 5, 6, 1, 2], depth=3) == [[3, 4, 5]]


def chance(source: LookupSource, text: list[int]) -> float:
    candidates = Candidates(8)
    source.propose(candidates, text)
    return float(candidates.ranked()[1][0])


def test_proposals_that_come_true_gain_weight_and_others_lose_it() -> None:
    draw = random.Random(0)
    for always in (True, False):
        text, source, chances = [draw.randrange(1000, 9999) for _ in range(30)], LookupSource(8), []
        for _ in range(40):
            at = 3 * draw.randrange(10)
            text += text[at : at + 2]
            follows = text[at + 2] if always else draw.randrange(1000)
            chances.append(chance(source, text))
            source.learn([follows])
            text.append(follows)
        assert (chances[-1] > 0.85) if always else (chances[-1] < 0.2)
