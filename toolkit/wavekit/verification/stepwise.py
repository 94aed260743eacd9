"""The engines against themselves: the same text run in several ways must leave the same cache and give the same logits.

One pass over a text is the reference. Against it: one token at a time; two branches of a tree, each against its tokens
alone; what follows after the other branch was dropped; the text moved to other positions.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from wavekit.decoding.decoder import Decoder
from wavekit.decoding.sequence_workers import switches_to_long
from wavekit.verification.findings import Check
from wavekit.verification.passes import Passes, passes, relative
from wavekit.verification.tolerances import tolerance_of
from wavekit_engines.engine import Array

STEPS, MOVED_BY = 12, 64
_BRANCH, _CHUNK, _GREEDY_ROWS = 3, 512, 32
_MOST_OFF = 0.5
"""A cache row that is off by so much of the layer's largest is another row, whatever the precision."""


def check_passes(decoder: Decoder, texts: Sequence[Sequence[int]]) -> list[Check]:
    """Compare ways to run each of the texts, all but the last `STEPS` tokens of which are run as a prompt."""
    allowed = tolerance_of(decoder.manifest.engine).passes
    found = [_Comparison(decoder, text, allowed) for text in texts if len(text) > STEPS + 1]
    steps = [comparison.one_at_a_time() for comparison in found]
    checks = [
        _joined("one token at a time", steps, allowed, "the logits and cache rows of one pass over the same text"),
        _joined("branches of a tree", [c.branches() for c in found], allowed, "the logits of their tokens alone"),
        _joined("after a tree", [c.after_a_tree() for c in found], allowed, "the logits of the kept branch alone"),
    ]
    moved = [one for c in found for one in c.moved()]
    if moved:
        checks.append(_joined("at other positions", moved, allowed, "the same logits: attention knows distances only"))
    return checks


def check_greedy_head(decoder: Decoder, text: Sequence[int]) -> Check:
    """The head for greedy choice, row by row, against the best of the logits; skipped where there is none."""
    if decoder.manifest.greedy_head is None:
        return Check("engines", "greedy head", "skipped", "the bundle has none")
    with passes(decoder, len(text)) as one:
        states = one.prompt(text, min(len(text), _GREEDY_ROWS))
        best, expected = one.best(states), one.logits(states).argmax(axis=1)
    wrong = np.flatnonzero(best != expected)
    if wrong.size:
        says = (
            f"it gives another token than the logits do in {wrong.size} of {len(best)} rows, the first "
            f"{best[wrong[0]]} instead of {expected[wrong[0]]}: its copy of the head is not the head's"
        )
        return Check("engines", "greedy head", "FAIL", says)
    return Check("engines", "greedy head", "pass", f"the best token of the logits in {len(best)} rows")


@dataclass(frozen=True)
class _Outcome:
    """One comparison: the difference over the largest logit, and what is wrong if it is too large."""

    difference: float
    fault: str | None


def _joined(name: str, outcomes: Sequence[_Outcome], allowed: float, what: str) -> Check:
    faults = [outcome.fault for outcome in outcomes if outcome.fault is not None]
    if faults:
        return Check("engines", name, "FAIL", faults[0])
    if not outcomes:
        return Check("engines", name, "skipped", f"no prompt and text together have {STEPS + 2} tokens")
    worst = max(outcome.difference for outcome in outcomes)
    return Check("engines", name, "pass", f"{what}, to {worst:.1g} of the largest ({allowed:g} is rounding)")


class _Comparison:
    """One text, and what one pass over it gives."""

    def __init__(self, decoder: Decoder, text: Sequence[int], allowed: float) -> None:
        self._decoder, self._text, self._allowed = decoder, list(text), allowed
        self._prefix = len(text) - STEPS
        with passes(decoder, len(text)) as one:
            self._expected = one.logits(one.prompt(self._text, STEPS))
            self._cache = one.cache(self._prefix, len(text))

    def one_at_a_time(self) -> _Outcome:
        """The last tokens run singly, against one pass."""
        with passes(self._decoder, len(self._text)) as one:
            one.prompt(self._text[: self._prefix])
            rows = np.concatenate([one.logits(one.run([token])) for token in self._text[self._prefix :]])
            cache = one.cache(self._prefix, len(self._text))
        difference = relative(rows, self._expected)
        stale = self._stale_row(cache)
        fault = None
        if stale is not None:
            fault = f"stale cache row: {stale}"
        elif difference > self._allowed:
            fault = (
                f"logits differ by {difference:.2g} of the largest though every cache row agrees: attention reads "
                "other rows for one token than for a prompt (mask, or count of rows in use)"
            )
        return self._outcome(rows, self._expected, fault)

    def _stale_row(self, cache: Array) -> str | None:
        """The first layer, and there the first row, that single tokens leave otherwise than one pass does."""
        scale = np.abs(self._cache).max(axis=(1, 2, 3, 4))
        off = np.abs(cache - self._cache).max(axis=(2, 4)) / np.maximum(scale, 1e-30)[:, None, None]
        # A layer hands differences on to the next, where they may be larger.
        allowed = min(10 * self._allowed, _MOST_OFF)
        layers = np.flatnonzero(off.max(axis=(1, 2)) > allowed)
        if not layers.size:
            return None
        layer = int(layers[0])
        keys, values = (rows.max() > allowed for rows in off[layer])
        what = "keys and values" if keys and values else "keys" if keys else "values"
        row = int(np.flatnonzero(off[layer].max(axis=0) > allowed)[0])
        return (
            f"run one token at a time, layer {layer} leaves other {what} in row {self._prefix + row} than one pass "
            f"over the same text (off by {off[layer].max():.2g} of the largest); layers before it agree, so its "
            "cache is not written, or written to the wrong row"
        )

    def branches(self) -> _Outcome:
        """Two branches in one pass, rows of the second not at their positions, against each branch alone."""
        first, second = self._branches()
        with passes(self._decoder, len(self._text) + 2 * _BRANCH) as one:
            one.prompt(self._text[: self._prefix])
            rows = one.logits(self._run_tree(one, first, second))
        worst, fault = self._outcome(rows[:_BRANCH], self._alone(first), None), None
        beside = self._outcome(rows[_BRANCH:], self._alone(second), None)
        if worst.difference > self._allowed:
            fault = (
                f"the first branch gives logits that differ by {worst.difference:.2g} of the largest from its tokens "
                "alone: it sees rows of the other branch (mask)"
            )
        elif beside.difference > self._allowed:
            fault = (
                f"the second branch gives logits that differ by {beside.difference:.2g} of the largest from its tokens "
                "alone, the first does not: its rotary positions follow cache rows, or its mask is wrong"
            )
        return _Outcome(max(worst.difference, beside.difference), fault)

    def after_a_tree(self) -> _Outcome:
        """The second branch is kept, its rows close up behind the prompt, and the text goes on."""
        first, second = self._branches()
        start, following = self._prefix, self._text[self._prefix + _BRANCH]
        with passes(self._decoder, len(self._text) + 2 * _BRANCH) as one:
            one.prompt(self._text[:start])
            self._run_tree(one, first, second)
            one.keep(start, list(range(start + _BRANCH, start + 2 * _BRANCH)))
            rows = one.logits(one.run([following]))
        expected = self._alone([*second, following])[-1:]
        outcome, fault = self._outcome(rows, expected, None), None
        if outcome.difference > self._allowed:
            fault = (
                f"after one branch was kept the next token's logits differ by {outcome.difference:.2g} of the largest: "
                "stale cache rows, the cache is not closed up after a tree"
            )
        return _Outcome(outcome.difference, fault)

    def moved(self) -> list[_Outcome]:
        """The text at later positions; empty where there is no room, or no rotary table that reaches so far."""
        spec, length = self._decoder.spec, len(self._text) + MOVED_BY
        if length > spec.max_positions or switches_to_long(spec, length) != switches_to_long(spec, len(self._text)):
            return []
        with passes(self._decoder, length) as one:
            at = list(range(MOVED_BY, length))
            for start in range(0, self._prefix, _CHUNK):
                stop = min(start + _CHUNK, self._prefix)
                one.run(self._text[start:stop], at[start:stop])
            rows = one.logits(one.run(self._text[self._prefix :], at[self._prefix :]))
        outcome, fault = self._outcome(rows, self._expected, None), None
        # Angles are rounded to float32, so later positions are a little less exact.
        if outcome.difference > 10 * self._allowed:
            fault = (
                f"moved by {MOVED_BY} positions the text gives logits that differ by {outcome.difference:.2g} of the "
                "largest: rotary tables are wrong beyond the first rows, or keys and queries are rotated differently"
            )
        return [_Outcome(outcome.difference, fault)]

    def _branches(self) -> tuple[list[int], list[int]]:
        first = self._text[self._prefix : self._prefix + _BRANCH]
        second = [(token + 1) % self._decoder.spec.vocab_size for token in first]
        return first, second

    def _run_tree(self, one: Passes, first: list[int], second: list[int]) -> Array:
        start = self._prefix
        positions = [start + depth for depth in range(_BRANCH)] * 2
        visible = [[*range(row, row + depth)] for row in (start, start + _BRANCH) for depth in range(_BRANCH)]
        return one.run([*first, *second], positions, visible, start)

    def _alone(self, branch: list[int]) -> Array:
        with passes(self._decoder, self._prefix + len(branch)) as one:
            return one.logits(one.prompt([*self._text[: self._prefix], *branch], len(branch)))

    def _outcome(self, rows: Array, expected: Array, fault: str | None) -> _Outcome:
        return _Outcome(relative(rows, expected), fault)
