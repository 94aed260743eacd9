"""How large a tree pays: the most expected tokens per second, from chances and measured costs.

With candidates of chances c1 >= c2 >= ... in the tree, a pass commits 1 + c1 + ... + cn tokens on average (the target's
own token, and every candidate that comes true) and takes the seconds of n + 1 rows, after what was spent on proposing.
"""

import numpy as np

from wavekit.decoding.pass_costs import PassCosts
from wavekit_engines.engine import Array


class Budget:
    """The costs that trees of one text are weighed by."""

    def __init__(self, target: PassCosts, draft: PassCosts | None = None, least_rows: int = 1) -> None:
        """``least_rows``: a shorter pass of the target costs as much as one of so many rows."""
        self.draft = draft
        self._seconds = np.maximum(target.seconds, target.of(least_rows))

    def best(self, chances: Array, spent: float = 0.0) -> tuple[int, float]:
        """How many of the likeliest candidates to run, and the tokens a second expected of that.

        Args:
            chances: of the candidates, falling.
            spent: seconds that went into proposing them.
        """
        chances = chances[: len(self._seconds) - 1]
        expected = np.concatenate(([1.0], chances)).cumsum()
        rates = expected / (self._seconds[: len(expected)] + spent)
        count = int(rates.argmax())
        return count, float(rates[count])

    def chain(self, chances: Array, spent: Array) -> float:
        """The tokens a second expected of a chain cut at the best length.

        Args:
            chances: of its tokens, [n].
            spent: seconds that proposing the first 1, 2, ... n of them takes.
        """
        return float(((1 + chances.cumsum()) / (self._seconds[1 : len(chances) + 1] + spent)).max())
