"""How far a draft's probabilities can be relied on in one text, learned while it is written.

A draft says how likely each of its tokens is; whether that comes true depends on the text, the sampling and how deep in
a tree the token is. For every depth, two things are observed wherever the target's choice is known: how often one of
the proposed tokens was right, against the probability they had together, and how often the likeliest was.
"""

_MEMORY = 0.97  # weight of what was observed before, at every new observation
_PRIOR = 3.0  # observations that the assumptions before the first one are worth
_FIRST = 0.5  # assumed share of likeliest tokens that are right
_LEAST, _MOST = 0.1, 2.0


class DraftTrust:
    """Observed against predicted, by depth below the anchor, from 1 on."""

    def __init__(self, depth: int) -> None:
        self._predicted = [_PRIOR / 2] * depth
        self._right = [_PRIOR / 2] * depth
        self._seen = [_PRIOR] * depth
        self._first = [_PRIOR * _FIRST] * depth

    def factor(self, depth: int) -> float:
        """What to multiply a probability at ``depth`` by to make it a chance."""
        return min(max(self._right[depth - 1] / self._predicted[depth - 1], _LEAST), _MOST)

    def first(self, depth: int) -> float:
        """The chance that the likeliest token at ``depth`` is right, where everything above it is."""
        return self._first[depth - 1] / self._seen[depth - 1]

    def observe(self, depth: int, predicted: float, right: bool, first: bool) -> None:
        """Take in one set of siblings whose parent came true.

        Args:
            depth: theirs.
            predicted: the probability they had together.
            right: whether one of them came true.
            first: whether the likeliest of them did.
        """
        at = depth - 1
        self._predicted[at] = _MEMORY * self._predicted[at] + predicted
        self._right[at] = _MEMORY * self._right[at] + right
        self._seen[at] = _MEMORY * self._seen[at] + 1
        self._first[at] = _MEMORY * self._first[at] + first
