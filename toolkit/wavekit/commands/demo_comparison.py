"""Several engines write the same texts in turn: which token ids are equal to the reference's, and how fast each is.

Each prompt is one round: all engines write it one after the other, in an order that rotates, so that what else the
machine does hits all alike. Speed is decoding only, from the first new token to the last. It knows neither wavekit's
engines nor transformers: an engine is a function from prompt ids to a `Text`.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

_WARM_UP_TOKENS = 4
TIE = 1e-3
"""Two tokens whose logits are closer than this are a numeric tie: which one wins is a matter of rounding."""


@dataclass(frozen=True)
class Text:
    """Token ids that an engine wrote, and the seconds, and where stages run, ticks from the first to the last."""

    token_ids: tuple[int, ...]
    decode_seconds: float
    ticks: int = 0

    @property
    def token_seconds(self) -> float:
        """Seconds a token, without the first one, which belongs to the prefill."""
        return self.decode_seconds / (len(self.token_ids) - 1)


Told = Callable[[str, int, int], None]
"""Told what is being done, units done and units in all."""

Write = Callable[[Sequence[int], int], Text]
"""Prompt ids and the most tokens to write, to a text."""


@dataclass(frozen=True)
class Difference:
    """The first token of a text that is not the reference's.

    ``margin`` is the reference's logit of its own choice minus that of the other;
    None where one text just ends earlier.
    """

    prompt: int
    position: int
    margin: float | None

    @property
    def is_tie(self) -> bool:
        """Whether rounding explains it."""
        return self.margin is not None and self.margin < TIE


@dataclass(frozen=True)
class Comparison:
    """One engine beside the reference.

    ``leading`` of all ``of`` tokens come before any difference. ``ratio`` is the median of the speeds relative to the
    reference's on the same prompt, between ``slowest`` and ``fastest``.
    """

    leading: int
    of: int
    differences: tuple[Difference, ...]
    tokens_per_second: float
    ratio: float
    slowest: float
    fastest: float


Margin = Callable[[Sequence[int], int, int], float]
"""Token ids so far and two candidates for the next one, to the reference's logit of the first minus the second's."""


def write_in_turn(
    engines: Mapping[str, Write], prompts: Sequence[Sequence[int]], new_tokens: int, told: Told
) -> Iterator[dict[str, Text]]:
    """For each prompt the text of each engine; all of them write a little first, to warm up."""
    done, total = 0, len(prompts) * len(engines)
    for name, write in engines.items():
        told(f"warming up: {name}", done, total)
        write(prompts[0], _WARM_UP_TOKENS)
    names = list(engines)
    for number, prompt in enumerate(prompts):
        first = number % len(names)
        texts = {}
        for name in names[first:] + names[:first]:
            told(f"text {number + 1}: {name}", done, total)
            texts[name] = engines[name](prompt, new_tokens)
            done += 1
        yield texts


def compare(
    texts: Sequence[Text], reference: Sequence[Text], prompts: Sequence[Sequence[int]], margin: Margin
) -> Comparison:
    """Compare one engine's texts with the reference's, one for each prompt."""
    leading, differences = 0, []
    for number, (text, expected) in enumerate(zip(texts, reference, strict=True)):
        ours, theirs = text.token_ids, expected.token_ids
        equal = common_length(ours, theirs)
        leading += equal
        if ours == theirs:
            continue
        both_go_on = equal < min(len(ours), len(theirs))
        so_far = [*prompts[number], *theirs[:equal]]
        differences.append(
            Difference(number, equal, margin(so_far, theirs[equal], ours[equal]) if both_go_on else None)
        )
    timed = [pair for pair in zip(texts, reference, strict=True) if min(len(text.token_ids) for text in pair) > 1]
    ratios = [expected.token_seconds / text.token_seconds for text, expected in timed]
    return Comparison(
        leading,
        sum(len(expected.token_ids) for expected in reference),
        tuple(differences),
        1 / median(text.token_seconds for text, _ in timed),
        median(ratios),
        min(ratios),
        max(ratios),
    )


def common_length(first: Sequence[int], second: Sequence[int]) -> int:
    """How many leading items are equal."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((index for index, (one, other) in pairs if one != other), min(len(first), len(second)))
