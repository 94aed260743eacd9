"""What proposes how a text goes on, and the tree its proposals form.

A `Source` adds candidates below the anchor, each with the chance it gives the target to get there. Several sources may
add to the same tree; what is worth running is chosen from all of them together. Wrong proposals cost time and never
change the text. Nothing here knows engines or logits.
"""

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from wavekit.decoding.lattice import Lattice, Node
from wavekit.decoding.speculation import Silence
from wavekit_engines.engine import Array

ANCHOR = -1
"""The anchor as the parent of a candidate."""


class Candidates:
    """A tree of tokens below the anchor, at most ``depth`` of them in a row.

    Candidates are numbered from 0 in the order they are added, parents before children; the anchor is `ANCHOR`.
    """

    def __init__(self, depth: int) -> None:
        self.depth = depth
        self._known: dict[tuple[int, int], int] = {}
        self._parents: list[int] = []
        self._tokens: list[int] = []
        self._depths: list[int] = []
        self._chances: list[float] = []

    def __len__(self) -> int:
        return len(self._tokens)

    def add(self, parent: int, token: int, chance: float) -> int:
        """A candidate below another or below the anchor; one that is there already keeps the better chance.

        ``chance`` is that of the whole way from the anchor, so it is at most the parent's.
        """
        number = self._known.get((parent, token))
        if number is None:
            number = self._known[parent, token] = len(self._tokens)
            self._parents.append(parent)
            self._tokens.append(token)
            self._depths.append(1 if parent == ANCHOR else self._depths[parent] + 1)
            self._chances.append(chance)
        elif chance > self._chances[number]:
            self._chances[number] = chance
        return number

    def ranked(self, chain: bool = False) -> tuple[list[int], Array]:
        """Candidates, the likeliest first, and their chances, float64, falling.

        Chances fall along a path and parents come first among equals, so the first few always form a tree. With
        ``chain`` only those of one path are ranked: the likeliest child of the anchor, the likeliest child of that, ...
        """
        chances = np.array(self._chances)
        order = np.argsort(-chances, kind="stable").tolist()
        if chain:
            path, end = list[int](), ANCHOR
            for number in order:
                if self._parents[number] == end:
                    path.append(number)
                    end = number
            order = path
        return order, chances[order]

    def chain(self) -> list[int]:
        """The tokens of the likeliest path."""
        return [self._tokens[number] for number in self.ranked(chain=True)[0]]

    def place(self, numbers: Sequence[int], lattice: Lattice) -> tuple[int, set[Node]]:
        """Propose candidates, parents first, to the lattice; returns the depth of the deepest, and their nodes."""
        nodes: dict[int, Node] = {ANCHOR: lattice.anchor}
        for number in numbers:
            nodes[number] = lattice.propose(nodes[self._parents[number]], self._tokens[number])
        del nodes[ANCHOR]
        return max((self._depths[number] for number in numbers), default=0), {*nodes.values()}


class Source(Protocol):
    """Proposes how one text goes on.

    `propose` is asked once for every anchor, before the tick that follows its commit; the anchor may have run some
    stages already. Where nothing more can be proposed below an anchor, `skip` is called in its place. `learn` is told
    what was committed before either is called again.
    """

    def follow(self, text: Sequence[int]) -> None:
        """Take in that the target has run another part of the prompt ``text``; called after each."""
        ...

    def propose(self, candidates: Candidates, text: Sequence[int]) -> Silence | None:
        """Add candidates that may follow ``text``, whose last token is the anchor; or say why there are none."""
        ...

    def skip(self, text: Sequence[int]) -> None:
        """Take in that nothing will be proposed after ``text``, whose last token is the anchor."""
        ...

    def learn(self, committed: Sequence[int]) -> None:
        """Take in the tokens that were committed after the anchor of the last `propose` or `skip`."""
        ...
