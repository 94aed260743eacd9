"""Token for token: every way of writing a text against plain decoding in the same engines."""

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from wavekit.decoding.sampling import Sampler, SamplingParams, uniform
from wavekit.decoding.speculation import Mode, Speculation
from wavekit.llm import LLM
from wavekit.verification.findings import Check, Divergence
from wavekit.verification.known_text import written_in_pairs, written_knowing
from wavekit.verification.passes import next_logits
from wavekit.verification.prompts import Sample
from wavekit.verification.tolerances import TIE, rounds, tolerance_of
from wavekit.verification.ways import CHOICES, ways_of
from wavekit_engines.engine import Array

Told = Callable[[str, int, int], None]
"""Told what is being done, units done and units in all."""

Write = Callable[[Sample, Sequence[int], SamplingParams], Sequence[int]]
"""Writes a text after a prompt; it may know what plain decoding wrote."""

TextsByChoice = dict[str, list[tuple[int, ...]]]
"""Texts after every prompt, by how tokens are chosen."""

Allowed = Callable[[Array], float]
"""What a margin may come to where rounding explains it, given the logits float32 [V]."""

PLAIN_AGAIN, IN_PAIRS, KNOWN = "plain, once more", "plain, two rows a pass", "known text"


def plain_texts(llm: LLM, samples: Sequence[Sample], new_tokens: int, told: Told) -> TextsByChoice:
    """What plain decoding writes after every prompt, by how tokens are chosen."""
    texts: TextsByChoice = {choice: [] for choice in CHOICES}
    total, done = len(CHOICES) * len(samples), 0
    for choice, params in CHOICES.items():
        for sample in samples:
            told("plain decoding", done, total)
            texts[choice].append(_generated(llm, sample, new_tokens, params, "off"))
            done += 1
    return texts


def compare_ways(
    llm: LLM, samples: Sequence[Sample], plain: TextsByChoice, told: Told
) -> Iterator[tuple[Check, list[Divergence]]]:
    """One check a way: its texts against plain ones, and where they part.

    Engines that round activations and bring no draft head write plain texts with passes of one row. All else there is
    held, exactly, to the texts of passes of several rows, and these in turn to the plain ones as far as rounding goes.

    Args:
        llm: the bundle.
        samples: the prompts.
        plain: what `plain_texts` gave.
        told: told of progress.
    """
    engine, new_tokens = llm.manifest.engine, max(map(len, plain["greedy"]))
    ways, expected = _writers(llm, new_tokens), {PLAIN_AGAIN: plain}
    allowed: Allowed = (lambda logits: 0.0) if rounds(engine) else (lambda logits: TIE)
    if rounds(engine) and llm.manifest.draft is None:
        pairs = {
            choice: [tuple(written_in_pairs(llm.decoder, sample.ids, new_tokens, params)) for sample in samples]
            for choice, params in CHOICES.items()
        }
        share = tolerance_of(engine).passes
        yield _compared(llm, IN_PAIRS, samples, (plain, pairs), lambda logits: share * float(np.abs(logits).max()))
    else:
        pairs = plain
    for number, (name, write) in enumerate(ways.items()):
        told(f"decoding: {name}", number, len(ways))
        known = expected.get(name, pairs)
        texts = {
            choice: [tuple(write(sample, text, params)) for sample, text in zip(samples, known[choice], strict=True)]
            for choice, params in CHOICES.items()
        }
        yield _compared(llm, name, samples, (known, texts), allowed, against_plain=known is plain)


def _compared(
    llm: LLM,
    name: str,
    samples: Sequence[Sample],
    texts: tuple[TextsByChoice, TextsByChoice],
    allowed: Allowed,
    against_plain: bool = True,
) -> tuple[Check, list[Divergence]]:
    """The texts of a way, the second, against the first."""
    expected, others = texts
    found = [
        _divergence(llm, (name, choice, sample), one, other, allowed)
        for choice in CHOICES
        for sample, one, other in zip(samples, expected[choice], others[choice], strict=True)
        if one != other
    ]
    return _check(name, "plain decoding" if against_plain else IN_PAIRS, len(samples) * len(CHOICES), found), found


def _writers(llm: LLM, new_tokens: int) -> dict[str, Write]:
    def plain_again(sample: Sample, text: Sequence[int], params: SamplingParams) -> Sequence[int]:
        return _generated(llm, sample, new_tokens, params, "off")

    def knowing(sample: Sample, text: Sequence[int], params: SamplingParams) -> Sequence[int]:
        return written_knowing(llm.decoder, sample.ids, text, params)

    def by(speculation: Mode | Speculation) -> Write:
        return lambda sample, text, params: _generated(llm, sample, new_tokens, params, speculation)

    ways = {way.name: by(way.speculation) for way in ways_of(llm.decoder)}
    return {PLAIN_AGAIN: plain_again, **ways, KNOWN: knowing}


def _generated(
    llm: LLM, sample: Sample, new_tokens: int, params: SamplingParams, speculation: Mode | Speculation
) -> tuple[int, ...]:
    return llm.generate(
        list(sample.ids),
        max_new_tokens=new_tokens,
        temperature=params.temperature,
        seed=params.seed,
        stop_token_ids=(),
        speculate=speculation,
    ).token_ids


def _divergence(
    llm: LLM,
    where: tuple[str, str, Sample],
    plain: Sequence[int],
    other: Sequence[int],
    allowed: Allowed,
) -> Divergence:
    name, choice, sample = where
    at = common_length(plain, other)
    if at >= min(len(plain), len(other)):
        ours, theirs, margin, tolerance = -1, -1, None, 0.0
    else:
        ours, theirs = plain[at], other[at]
        logits = next_logits(llm.decoder, [*sample.ids, *plain[:at]])
        position = len(sample.ids) + at
        margin, tolerance = _margin(logits, (ours, theirs), CHOICES[choice], position, allowed(logits))
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
        tolerance=tolerance,
        explained=margin is not None and margin <= tolerance and tolerance > 0,
    )


def _margin(
    logits: Array, tokens: tuple[int, int], params: SamplingParams, position: int, tolerance: float
) -> tuple[float, float]:
    """How narrow the choice of the first of two tokens was, and what rounding explains: see `Divergence`."""
    ours, theirs = tokens
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


def _check(name: str, against: str, texts: int, found: Sequence[Divergence]) -> Check:
    says = f"{texts} texts are those of {against}"
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
            f"{texts - len(found)} of {texts} texts are those of {against}, others part where rounding decides "
            f"(margins up to {margins:.2g}; {found[0].tolerance:.2g} is rounding)"
        )
    return Check("decoding", name, "pass", says)


def common_length(first: Sequence[int], second: Sequence[int]) -> int:
    """How many leading items are equal."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((index for index, (one, other) in pairs if one != other), min(len(first), len(second)))
