"""What the runs of one way come to, and how far its texts are those of plain decoding."""

from collections.abc import Sequence
from dataclasses import dataclass

from wavekit.benchmarking.quiet import is_disturbed
from wavekit.benchmarking.runs import Run, first_difference
from wavekit.benchmarking.spread import Spread, percentile

_MILLI = 1e3


@dataclass(frozen=True)
class Gaps:
    """Milliseconds between tokens as a reader of the stream gets them; tokens of one group have 0 between them."""

    p50: float
    p95: float
    p99: float


@dataclass(frozen=True)
class Parts:
    """Milliseconds a token: in the draft head; in the target, its exits and its head; outside all engines."""

    draft: float
    target: float
    host: float


@dataclass(frozen=True)
class Difference:
    """A text that is not the one of plain decoding, and the first token, from 0, that differs."""

    set: str
    prompt: str
    position: int


@dataclass(frozen=True)
class Summary:
    """Of some runs of one way, all sets together or one of them; None where a number is not known.

    Attributes:
        tokens_per_second: of single texts, from the first token to the last.
        speed: over plain decoding after the same prompt in the same round.
        first_token: milliseconds from the call until a reader has the first token.
        gaps: between tokens.
        tau: tokens a pass of the target, the token it adds itself (the bonus token) included; plain decoding is 1.
        acceptance: of all passes, the share that committed at least 1, 2, ... proposed tokens.
        ticks: a token; plain decoding takes as many as there are stages.
        parts: where the time of a token goes.
        runs: how many there were.
        disturbed: runs during which other processes kept more than `QUIET_CORES` of a core busy.
        prompt_tokens: lengths of prompts.
        new_tokens: lengths of texts.
    """

    tokens_per_second: Spread | None
    speed: Spread | None
    first_token: Spread | None
    gaps: Gaps | None
    tau: float | None
    acceptance: tuple[float, ...]
    ticks: float | None
    parts: Parts | None
    runs: int
    disturbed: int
    prompt_tokens: Spread | None
    new_tokens: Spread | None


def summarize(runs: Sequence[Run], plain: Sequence[Run]) -> Summary:
    """Sum up runs of one way, beside those of plain decoding."""
    written = [run.written for run in runs]
    gaps = [gap * _MILLI for one in written for gap in one.gaps]
    groups = [size for one in written for size in one.groups]
    tokens = sum(groups)
    longest = max(groups, default=1)
    return Summary(
        tokens_per_second=Spread.of([one.rate for one in written if one.rate is not None]),
        speed=Spread.of(speeds(runs, plain)),
        first_token=Spread.of([one.first_seconds * _MILLI for one in written]),
        gaps=Gaps(percentile(gaps, 50), percentile(gaps, 95), percentile(gaps, 99)) if gaps else None,
        tau=tokens / len(groups) if groups else None,
        acceptance=tuple(sum(size > count for size in groups) / len(groups) for count in range(1, longest)),
        ticks=sum(one.ticks for one in written) / tokens if tokens else None,
        parts=Parts(
            draft=sum(one.draft_seconds for one in written) / tokens * _MILLI,
            target=sum(one.target_seconds for one in written) / tokens * _MILLI,
            host=sum(one.host_seconds for one in written) / tokens * _MILLI,
        )
        if tokens
        else None,
        runs=len(runs),
        disturbed=sum(is_disturbed(one.others) for one in written),
        prompt_tokens=Spread.of([float(run.prompt_tokens) for run in runs]),
        new_tokens=Spread.of([float(len(one.tokens)) for one in written]),
    )


def speeds(runs: Sequence[Run], plain: Sequence[Run]) -> list[float]:
    """Tokens a second over those of plain decoding after the same prompt in the same round."""
    beside = {(run.set, run.prompt, run.round): run.written.rate for run in plain}
    found = []
    for run in runs:
        rate, other = run.written.rate, beside.get((run.set, run.prompt, run.round))
        if rate is not None and other is not None:
            found.append(rate / other)
    return found


def differences(runs: Sequence[Run], plain: Sequence[Run], complete: bool) -> list[Difference]:
    """Texts that are not those of plain decoding, each once.

    ``complete``: texts must be of equal length too; otherwise they are compared up to the shorter one.
    """
    texts = {(run.set, run.prompt): run.written.tokens for run in reversed(plain)}
    found = dict[tuple[str, str], Difference]()
    for run in runs:
        mine, other = run.written.tokens, texts[run.set, run.prompt]
        at = first_difference(mine, other)
        if at is None and complete and len(mine) != len(other):
            at = min(len(mine), len(other))
        if at is not None:
            found.setdefault((run.set, run.prompt), Difference(run.set, run.prompt, at))
    return [*found.values()]
