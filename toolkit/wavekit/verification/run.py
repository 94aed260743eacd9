"""One verification from beginning to end: a bundle alone, and beside its checkpoint where there is one."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

from wavekit.llm import LLM
from wavekit.verification.distribution import check_distribution
from wavekit.verification.findings import Check, Findings, Group, PromptFacts, Subject
from wavekit.verification.lossless import Told, compare_ways, plain_texts
from wavekit.verification.prompts import Sample
from wavekit.verification.stepwise import check_greedy_head, check_passes
from wavekit.verification.tokens import check_tokens
from wavekit_engines.errors import WavekitError

_BEGINS = 60


@dataclass(frozen=True)
class Texts:
    """The prompts, and what plain decoding wrote after each, by how tokens are chosen."""

    samples: Sequence[Sample]
    plain: dict[str, list[tuple[int, ...]]]

    @property
    def greedy(self) -> list[list[int]]:
        """Every prompt with what was written greedily."""
        return [[*sample.ids, *text] for sample, text in zip(self.samples, self.plain["greedy"], strict=True)]


def verify_alone(llm: LLM, samples: Sequence[Sample], new_tokens: int, found: Findings, told: Told) -> Texts | None:
    """Check what can be checked without a checkpoint; returns the texts, or None where not even they can be written."""
    start = perf_counter()
    try:
        texts = Texts(samples, plain_texts(llm, samples, new_tokens, told))
    except WavekitError as error:
        found.checks.append(Check("decoding", "plain decoding", "FAIL", str(error)))
        found.seconds += perf_counter() - start
        return None
    found.checks += _check_engines(llm, texts, told)
    for check, divergences in compare_ways(llm, samples, texts.plain, told):
        found.checks.append(check)
        found.divergences += divergences
    told("drawing tokens", 1, 1)
    found.checks += guarded("sampling", "sampling", lambda: check_distribution(llm.decoder, texts.greedy[0]))
    found.checks += guarded("text", "tokenizer", lambda: check_tokens(llm))
    found.seconds += perf_counter() - start
    return texts


def _check_engines(llm: LLM, texts: Texts, told: Told) -> list[Check]:
    """With the shortest text and the longest."""
    told("running texts in several ways", 0, 1)
    chosen = sorted(texts.greedy, key=len)[:: max(1, len(texts.greedy) - 1)]
    return [
        *guarded("engines", "one token at a time", lambda: check_passes(llm.decoder, chosen)),
        *guarded("engines", "greedy head", lambda: [check_greedy_head(llm.decoder, chosen[-1])]),
    ]


def guarded(group: Group, name: str, check: Callable[[], Iterable[Check]]) -> list[Check]:
    """The checks, or a failed one where they cannot be done at all."""
    try:
        return list(check())
    except WavekitError as error:
        return [Check(group, name, "FAIL", str(error))]


def subject_of(llm: LLM, bundle: Path, checkpoint: str | None, draft: str | None) -> Subject:
    """What is verified, in names that hold no folders."""
    manifest = llm.manifest
    return Subject(
        bundle=bundle.resolve().name,
        model=manifest.provenance.checkpoint,
        family=manifest.decoder.family,
        layers=manifest.decoder.num_layers,
        stages=len(manifest.stages),
        precision=manifest.engine.precision,
        head_precision=manifest.engine.head_precision,
        draft_boundaries=manifest.draft.spec.boundaries if manifest.draft is not None else (),
        checkpoint=checkpoint,
        draft=draft,
    )


def prompt_facts(llm: LLM, samples: Sequence[Sample]) -> tuple[PromptFacts, ...]:
    """The prompts as the report lists them."""
    found = []
    for sample in samples:
        text = llm.tokenizer.decode(sample.ids) if llm.tokenizer is not None else f"token ids {list(sample.ids[:8])}"
        line = " ".join(text.split())
        found.append(PromptFacts(sample.name, len(sample.ids), line[:_BEGINS] + ("…" if len(line) > _BEGINS else "")))
    return tuple(found)
