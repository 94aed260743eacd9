"""Token for token: every way of writing a text against plain decoding in the same engines."""

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from wavekit.llm import LLM
from wavekit.sampling import Sampler, SamplingParams, uniform
from wavekit.verification.findings import Check, Divergence
from wavekit.verification.known_text import written_knowing
from wavekit.verification.passes import next_logits
from wavekit.verification.prompts import Sample
from wavekit.verification.ways import CHOICES, ways_of
from wavekit_engines.engine import Array

Told = Callable[[str, int, int], None]
"""Told what is being done, units done and units in all."""

Write = Callable[[Sample, Sequence[int], SamplingParams], Sequence[int]]
"""Writes a text after a prompt; it may know what plain decoding wrote."""

PLAIN_AGAIN, KNOWN = "plain, once more", "known text"


def plain_texts(llm: LLM, samples: Sequence[Sample], new_tokens: int, told: Told) -> dict[str, list[tuple[int, ...]]]:
    """What plain decoding writes after every prompt, by how tokens are chosen."""
    texts: dict[str, list[tuple[int, ...]]] = {choice: [] for choice in CHOICES}
    total, done = len(CHOICES) * len(samples), 0
    for choice, params in CHOICES.items():
        for sample in samples:
            told("plain decoding", done, total)
            texts[choice].append(_generated(llm, sample, new_tokens, params, "off"))
            done += 1
    return texts


def compare_ways(
    llm: LLM,
    samples: Sequence[Sample],
    texts: dict[str, list[tuple[int, ...]]],
    tolerance: float,
    told: Told,
) -> Iterator[tuple[Check, list[Divergence]]]:
    """One check a way: its texts against the plain ones.

    Args:
        llm: the bundle.
        samples: the prompts.
        texts: what `plain_texts` gave.
        tolerance: a margin of logits that rounding explains; 0 where nothing does.
        told: told of progress.
    """
    new_tokens = max(map(len, texts["greedy"]))
    ways = _writers(llm, new_tokens)
    for number, (name, write) in enumerate(ways.items()):
        found: list[Divergence] = []
        for choice, params in CHOICES.items():
            for sample, plain in zip(samples, texts[choice], strict=True):
                told(f"decoding: {name}", number, len(ways))
                other = write(sample, plain, params)
                if tuple(other) != plain:
                    found.append(_divergence(llm, (name, choice, sample), plain, other, tolerance))
        yield _check(name, len(samples) * len(CHOICES), found), found


def _writers(llm: LLM, new_tokens: int) -> dict[str, Write]:
    def plain_again(sample: Sample, plain: Sequence[int], params: SamplingParams) -> Sequence[int]:
        return _generated(llm, sample, new_tokens, params, "off")

    def knowing(sample: Sample, plain: Sequence[int], params: SamplingParams) -> Sequence[int]:
        return written_knowing(llm.decoder, sample.ids, plain, params)

    def by(speculation: object) -> Write:
        return lambda sample, plain, params: _generated(llm, sample, new_tokens, params, speculation)

    ways = {way.name: by(way.speculation) for way in ways_of(llm.decoder)}
    return {PLAIN_AGAIN: plain_again, **ways, KNOWN: knowing}


def _generated(
    llm: LLM, sample: Sample, new_tokens: int, params: SamplingParams, speculation: object
) -> tuple[int, ...]:
    return llm.generate(
        list(sample.ids),
        max_new_tokens=new_tokens,
        temperature=params.temperature,
        seed=params.seed,
        stop_token_ids=(),
        speculate=speculation,  # type: ignore[arg-type]
    ).token_ids


def _divergence(
    llm: LLM,
    where: tuple[str, str, Sample],
    plain: Sequence[int],
    other: Sequence[int],
    tolerance: float,
) -> Divergence:
    name, choice, sample = where
    at = common_length(plain, other)
    if at >= min(len(plain), len(other)):
        ours, theirs, margin, allowed = -1, -1, None, tolerance
    else:
        ours, theirs = plain[at], other[at]
        logits = next_logits(llm.decoder, [*sample.ids, *plain[:at]])
        margin, allowed = _margin(logits, ours, theirs, CHOICES[choice], len(sample.ids) + at, tolerance)
    return Divergence(
        way=name,
        choice=choice,
        prompt=sample.name,
        position=at,
        expected=ours,
        found=theirs,
        expected_text=token_text(llm, ours),
        found_text=token_text(llm, theirs),
        margin=margin,
        tolerance=allowed,
        explained=margin is not None and allowed > 0 and margin <= allowed,
    )


def _margin(
    logits: Array, ours: int, theirs: int, params: SamplingParams, position: int, tolerance: float
) -> tuple[float, float]:
    """How narrow the choice was, and what rounding explains: see `Divergence`."""
    if params.is_argmax:
        return float(logits[ours] - logits[theirs]), tolerance
    _, weights = Sampler(params, len(logits)).candidates(logits)
    ends = weights.cumsum(dtype=np.float64)
    ends /= ends[-1]
    draw = uniform(params.seed, position)
    edges = np.array([ends[ours] - weights[ours] / weights.sum(dtype=np.float64), ends[ours]])
    # A change of every logit by up to d / 2 changes a probability by a factor of up to exp(d / T).
    return float(np.abs(edges - draw).min()), min(1.0, tolerance / params.temperature)


def token_text(llm: LLM, token: int) -> str:
    """A token as a reader sees it."""
    if token < 0:
        return "end of text"
    return llm.tokenizer.decode([token], skip_special_tokens=False) if llm.tokenizer is not None else f"#{token}"


def _check(name: str, texts: int, found: Sequence[Divergence]) -> Check:
    says = f"{texts} texts are those of plain decoding"
    unexplained = [divergence for divergence in found if not divergence.explained]
    if unexplained:
        worst = unexplained[0]
        why = {
            PLAIN_AGAIN: "plain decoding does not repeat itself: an engine reads memory that it did not write",
            KNOWN: "rows that were accepted or dropped change what follows: caches are not closed up, or a branch sees "
            "another",
        }.get(name, "this mode changes the text")
        margin = "" if worst.margin is None else f", margin {worst.margin:.3g} where {worst.tolerance:.3g} is rounding"
        return Check(
            "decoding",
            name,
            "FAIL",
            f"{len(unexplained)} of {texts} texts differ; the first: {worst.prompt}, {worst.choice}, token "
            f"{worst.position + 1}: {worst.found_text!r} instead of {worst.expected_text!r}{margin}. {why}.",
        )
    if found:
        margins = max(one.margin or 0.0 for one in found)
        says = (
            f"{texts - len(found)} of {texts} texts are those of plain decoding, others part where rounding decides "
            f"(margins up to {margins:.2g}; {found[0].tolerance:.2g} is rounding)"
        )
    return Check("decoding", name, "pass", says)


def common_length(first: Sequence[int], second: Sequence[int]) -> int:
    """How many leading items are equal."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((index for index, (one, other) in pairs if one != other), min(len(first), len(second)))
