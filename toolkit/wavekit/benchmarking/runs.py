"""One text written once in one way, and what a reader of its stream saw."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import TypeVar

from wavekit.benchmarking.quiet import Others
from wavekit.llm import LLM
from wavekit.profiles import Setting
from wavekit.verification.prompts import Sample

T = TypeVar("T")
P = TypeVar("P")


@dataclass(frozen=True)
class Way:
    """A way to write texts, under the name it has in tables."""

    name: str
    setting: Setting


@dataclass(frozen=True)
class Written:
    """What came of one prompt; times in seconds.

    Attributes:
        tokens: those written, one that ended the text included.
        first_seconds: from the call until a reader had the first token.
        decode_seconds: from the first token to the last.
        others: cores that other processes kept busy meanwhile; None: not known.
        groups: for each pass of the target that committed something, the prefill left out, how many tokens it did.
            What was proposed is committed in one group with the token that the target adds itself. Empty: not known.
        gaps: from each token to the next, as they reach a reader: a group comes at once, so all but its first token
            come 0 s after the one before. Empty: not known.
        ticks: runs of all stages with work, the prefill left out.
        draft_seconds: of the decoding, inside the draft head.
        target_seconds: inside the target, its exits and its head.
        host_seconds: outside all engines.
    """

    tokens: tuple[int, ...]
    first_seconds: float
    decode_seconds: float
    others: float | None
    groups: tuple[int, ...] = ()
    gaps: tuple[float, ...] = ()
    ticks: int = 0
    draft_seconds: float = 0.0
    target_seconds: float = 0.0
    host_seconds: float = 0.0

    @property
    def rate(self) -> float | None:
        """Tokens a second from the first token to the last; None where there was only one."""
        return (len(self.tokens) - 1) / self.decode_seconds if len(self.tokens) > 1 else None


@dataclass(frozen=True)
class Run:
    """One entry of the record: which prompt of which set, in which round, in which way, and what came of it."""

    way: str
    set: str
    prompt: str
    prompt_tokens: int
    round: int
    written: Written


def write(llm: LLM, setting: Setting, sample: Sample, new_tokens: int) -> Written:
    """Write greedily after one prompt, until the model ends the text or ``new_tokens``; ``llm`` was opened so."""
    others, start = Others(), perf_counter()
    stream = llm.stream(list(sample.ids), max_new_tokens=new_tokens, speculate=setting.speculation)
    arrived, groups = list[float](), list[int]()
    for step in stream.steps():
        if step.token_ids:
            arrived.append(perf_counter())
            groups.append(len(step.token_ids))
    busy, result = others.cores(), stream.result
    return Written(
        tokens=result.token_ids,
        first_seconds=arrived[0] - start,
        decode_seconds=result.timings.decode_seconds,
        others=busy,
        groups=tuple(groups[1:]),
        gaps=tuple(gaps_of(arrived, groups)),
        ticks=result.timings.ticks,
        draft_seconds=result.speculation.draft_seconds,
        target_seconds=result.speculation.target_seconds,
        host_seconds=result.speculation.host_seconds,
    )


def gaps_of(arrived: Sequence[float], groups: Sequence[int]) -> Iterator[float]:
    """Seconds between the tokens of groups that arrived then."""
    for number, size in enumerate(groups):
        if number:
            yield arrived[number] - arrived[number - 1]
        yield from [0.0] * (size - 1)


def alternated(prompts: Sequence[P], ways: Sequence[T], rounds: int) -> Iterator[tuple[int, P, T]]:
    """Who writes after which prompt, round by round: everybody in turn, and who is first moves on each time."""
    for turn in range(rounds):
        for number, prompt in enumerate(prompts):
            first = (turn + number) % len(ways)
            for way in (*ways[first:], *ways[:first]):
                yield turn, prompt, way


def first_difference(one: Sequence[int], other: Sequence[int]) -> int | None:
    """The first position at which two texts differ, None where one begins with the other."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), None)
