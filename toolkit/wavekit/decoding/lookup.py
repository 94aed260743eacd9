"""Proposals that need no training: what followed the last time the text read like this.

`LookupSource` finds the most recent earlier place where the last few tokens occurred, for several lengths of the match,
longest first, and proposes what followed there. It shines where a text repeats its prompt (summaries, edits, code) or
itself, and proposes nothing elsewhere. The chance of a proposal follows from how often proposals after a match of that
length came true in this text. It knows token ids only.
"""

from collections.abc import Sequence

from wavekit.decoding.sources import ANCHOR, Candidates
from wavekit.decoding.speculation import Silence

MATCHES = (8, 4, 3, 2)
"""Lengths of the matches that are looked for, longest first."""

_MEMORY = 0.97  # weight of what was observed before, at every new observation
_PRIOR = {8: (9.0, 10.0), 4: (5.0, 8.0), 3: (2.0, 5.0), 2: (1.0, 4.0)}  # came true, of so many, before any was observed


class LookupSource:
    """Continues one text from its own past."""

    def __init__(self, most: int) -> None:
        """Propose at most ``most`` tokens in a row."""
        self._most = most
        self._followers: dict[tuple[int, ...], int] = {}  # match -> where the token after its latest occurrence is
        self._indexed = 1
        self._rates = {length: _Rate(*_PRIOR[length]) for length in MATCHES}
        self._chains: list[tuple[int, Sequence[int]]] = []

    def follow(self, text: Sequence[int]) -> None:
        """See `sources.Source`."""
        self._index(text)

    def propose(self, candidates: Candidates, text: Sequence[int]) -> Silence | None:
        """See `sources.Source`; ``text`` must continue the text of the call before."""
        self._index(text)
        self._chains = []
        found = set[int]()
        most = min(self._most, candidates.depth)
        for length in MATCHES:
            at = self._followers.get(tuple(text[-length:])) if len(text) >= length else None
            if at is not None and at not in found:
                found.add(at)
                period = len(text) - at  # a chain that reaches the end of the text goes on as it began
                chain = [text[at + step % period] for step in range(most)]
                self._chains.append((length, chain))
                parent, chance, rate = ANCHOR, 1.0, self._rates[length].value
                for token in chain:
                    chance *= rate
                    parent = candidates.add(parent, token, chance)
        return None if self._chains else "no match"

    def skip(self, text: Sequence[int]) -> None:
        """See `sources.Source`: the next call of `propose` takes in all of the text."""

    def learn(self, committed: Sequence[int]) -> None:
        """See `sources.Source`."""
        for length, chain in self._chains:
            for proposed, true in zip(chain, committed, strict=False):
                self._rates[length].observe(proposed == true)
                if proposed != true:  # what lies behind the first wrong token says nothing
                    break
        self._chains = []

    def _index(self, text: Sequence[int]) -> None:
        """Take in every match that has a token after it."""
        for end in range(self._indexed, len(text)):
            for length in MATCHES:
                if length <= end:
                    self._followers[tuple(text[end - length : end])] = end
        self._indexed = len(text)


class _Rate:
    """How often something came true, newer observations weighing more."""

    def __init__(self, true: float, seen: float) -> None:
        self._true, self._seen = true, seen

    @property
    def value(self) -> float:
        return self._true / self._seen

    def observe(self, true: bool) -> None:
        self._true = _MEMORY * self._true + true
        self._seen = _MEMORY * self._seen + 1
