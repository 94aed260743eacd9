"""The embedded API: load a bundle once, then write texts from prompts, whole or piece by piece.

This is where text meets token ids: prompts are encoded, the lattice decoder commits ids, and stop strings and stop
tokens end the text. An `LLM` may be shared between threads; every generation has buffers of its own.
"""

import os
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import zip_longest
from numbers import Integral
from pathlib import Path
from time import perf_counter
from typing import Any, Literal, TypeAlias

from wavekit.decoder import Decoder, DecodeStats
from wavekit.sampling import Sampler, SamplingParams, SeenTokens
from wavekit.sequence_workers import Engines
from wavekit.speculation import Mode, Speculation, SpeculationStats
from wavekit.speculator import SpeculatorMaker
from wavekit.streaming import TextStream
from wavekit.tokenizer import Tokenizer
from wavekit_engines.bundle import Manifest, open_bundle
from wavekit_engines.engine import Array
from wavekit_engines.errors import MisuseError
from wavekit_engines.ort_engine import OrtEngine

Prompt: TypeAlias = str | Sequence[Mapping[str, Any]] | Sequence[int]
"""Plain text, chat messages for the model's chat template, or token ids."""

FinishReason = Literal["stop", "length"]

_MOST_THREADS = 1024  # beyond any use, and ONNX Runtime does start as many as it is told to


@dataclass(frozen=True)
class Timings:
    """Where the time went, in seconds, and tokens a second.

    ``prefill_seconds`` ends with the first token; ``decode_seconds`` covers the others, without what the reader of a
    stream did between pieces. ``host_share`` is the part of ``decode_seconds`` spent outside engine runs.
    """

    prefill_seconds: float
    decode_seconds: float
    tokens_per_second: float
    host_share: float
    ticks: int


@dataclass(frozen=True)
class GenerationResult:
    """A finished text.

    ``token_ids`` holds every committed token, a stop token at the end included; ``text`` ends before a stop string and
    shows no special tokens. ``finish_reason`` is "stop" after a stop token or string; "length" at ``max_new_tokens``,
    at the end of the context, or where a stream was closed.
    """

    token_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason
    prompt_tokens: int
    timings: Timings
    speculation: SpeculationStats


class GenerationStream(Iterator[str]):
    """Pieces of a text as they become certain; ``result`` is there once they have run out.

    Closing it early ends the generation and frees its buffers; ``result`` then holds what was written, unless nothing
    was read.
    """

    def __init__(self, pieces: Generator[str, None, GenerationResult]) -> None:
        self._pieces = pieces
        self._result: GenerationResult | None = None

    def __next__(self) -> str:
        try:
            return next(self._pieces)
        except StopIteration as end:
            self._result = self._result or end.value
            raise StopIteration from None

    @property
    def result(self) -> GenerationResult:
        """The finished text. Raises RuntimeError while pieces are still to come."""
        if self._result is None:
            raise RuntimeError("the text is not finished: read the stream to its end first")
        return self._result

    def close(self) -> None:
        """End the generation now."""
        try:
            self._pieces.throw(_ClosedEarlyError)
        except StopIteration as end:
            self._result = end.value
        except _ClosedEarlyError:  # it has ended, or not begun
            pass


class _ClosedEarlyError(Exception):
    """The reader of a stream wants no more pieces."""


class LLM:
    """A loaded bundle. Made by `load`."""

    def __init__(self, manifest: Manifest, decoder: Decoder, tokenizer: Tokenizer | None) -> None:
        self.manifest = manifest
        self.decoder = decoder
        self.tokenizer = tokenizer

    def generate(
        self,
        prompt: Prompt,
        *,
        max_new_tokens: int = 256,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        min_p: float = 0.0,
        repetition_penalty: float = 1.0,
        seed: int = 0,
        stop: str | Sequence[str] = (),
        stop_token_ids: Sequence[int] | None = None,
        speculate: Mode | Speculation = "auto",
    ) -> GenerationResult:
        """Write a text after ``prompt`` and return it whole.

        Args:
            prompt: text, chat messages (``[{"role": "user", "content": "..."}]``) or token ids.
            max_new_tokens: the most tokens to write; the end of the context may come first.
            temperature: 0 is greedy; with `top_k`, `top_p`, `min_p`, `repetition_penalty` see `SamplingParams`.
            top_k: keep this many most likely tokens; 0: all.
            top_p: keep the most likely tokens that together reach this probability.
            min_p: keep tokens at least this likely relative to the most likely one.
            repetition_penalty: above 1 discourages tokens of the prompt and the text so far.
            seed: the draw for a position depends on seed and position only.
            stop: the text ends before any of these strings.
            stop_token_ids: tokens that end the text; None: those the checkpoint names.
            speculate: who proposes tokens ahead of the model, or a `Speculation` with limits too. The text is the
                same whatever it is; how fast it was written and why is in the result's ``speculation``.

        Raises:
            MisuseError: a parameter out of range, an empty prompt, text for a bundle without tokenizer, a draft for
                a bundle without draft head.
            ContextLengthError: a prompt as long as the context or longer.

        Example:
            >>> wavekit.load("bundle").generate("The capital of France is", max_new_tokens=4).text
            ' Paris.'
        """
        sampling = SamplingParams(temperature, top_k, top_p, min_p, repetition_penalty, seed)
        stream = self._start(prompt, max_new_tokens, sampling, stop, stop_token_ids, speculate)
        for _ in stream:
            pass
        return stream.result

    def stream(
        self,
        prompt: Prompt,
        *,
        max_new_tokens: int = 256,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        min_p: float = 0.0,
        repetition_penalty: float = 1.0,
        seed: int = 0,
        stop: str | Sequence[str] = (),
        stop_token_ids: Sequence[int] | None = None,
        speculate: Mode | Speculation = "auto",
    ) -> GenerationStream:
        """Like `generate`, piece by piece: whole characters only, and nothing of a stop string.

        Example:
            >>> for piece in llm.stream("Once upon a time"):
            ...     print(piece, end="", flush=True)
        """
        sampling = SamplingParams(temperature, top_k, top_p, min_p, repetition_penalty, seed)
        return self._start(prompt, max_new_tokens, sampling, stop, stop_token_ids, speculate)

    def encode(self, prompt: Prompt) -> list[int]:
        """The token ids of a prompt; ids pass through as they are."""
        if not isinstance(prompt, str | Iterable) or isinstance(prompt, bytes | Mapping):
            raise MisuseError("a prompt is a text, a list of chat messages or a list of token ids")
        parts: list[Any] = [] if isinstance(prompt, str) else list(prompt)
        if not isinstance(prompt, str) and all(isinstance(part, Integral) for part in parts):
            return [int(part) for part in parts]
        if self.tokenizer is None:
            raise MisuseError("this bundle has no tokenizer: give the prompt as token ids")
        return self.tokenizer.encode(prompt) if isinstance(prompt, str) else self.tokenizer.apply_chat_template(parts)

    def close(self) -> None:
        """Close the engines. No generation may be under way."""
        self.decoder.close()

    def _start(
        self,
        prompt: Prompt,
        max_new_tokens: int,
        sampling: SamplingParams,
        stop: str | Sequence[str],
        stop_token_ids: Sequence[int] | None,
        speculate: Mode | Speculation,
    ) -> GenerationStream:
        """Check everything now, so that a mistake is raised here and not at the first piece."""
        if isinstance(max_new_tokens, bool) or not isinstance(max_new_tokens, int) or max_new_tokens < 1:
            raise MisuseError(f"max_new_tokens is {max_new_tokens!r}; it must be an integer from 1 up")
        ids = self.encode(prompt)
        self.decoder.check_prompt(ids)
        if stop and self.tokenizer is None:
            raise MisuseError("this bundle has no tokenizer, so stop strings cannot be found: use stop_token_ids")
        text = TextStream(self.tokenizer, stop) if self.tokenizer is not None else None
        ending = self.manifest.generation.stop_token_ids if stop_token_ids is None else tuple(stop_token_ids)
        sampler = Sampler(sampling, self.manifest.decoder.vocab_size)
        speculation = speculate if isinstance(speculate, Speculation) else Speculation(speculate)
        mode = speculation.resolved(self.manifest.draft is not None)
        maker = self.decoder.speculator(speculation, sampling.is_argmax)
        return GenerationStream(self._pieces(_Job(ids, max_new_tokens, sampler, text, frozenset(ending), mode, maker)))

    def _pieces(self, job: "_Job") -> Generator[str, None, GenerationResult]:
        ids, sampler, text = job.prompt, job.sampler, job.text
        stats, committed, written = DecodeStats(), list[int](), list[str]()
        context = SeenTokens()
        context.add(ids)

        def choose(logits: Array, position: int) -> int:
            token = sampler.choose(logits, position, context)
            context.add((token,))
            return token

        finish: FinishReason = "length"
        start, paused = perf_counter(), 0.0
        chooser = None if sampler.params.is_argmax else choose
        ticks = self.decoder.decode(ids, chooser, job.max_new_tokens, stats, job.maker, job.ends)
        try:
            for token in (token for tokens in ticks for token in tokens):
                committed.append(token)
                piece = text.push(token) if text is not None else ""
                if piece:
                    written.append(piece)
                    handed_over = perf_counter()
                    try:
                        yield piece
                    finally:
                        paused += perf_counter() - handed_over
                if token in job.ends or (text is not None and text.stop_string is not None):
                    finish = "stop"
                    break
        except _ClosedEarlyError:
            text = None
        finally:
            ticks.close()
        timings = _timings(stats, perf_counter() - start - paused, len(committed))
        rest = text.flush() if text is not None else ""
        if rest:
            written.append(rest)
            with suppress(_ClosedEarlyError):
                yield rest
        if text is not None and text.stop_string is not None:  # the last characters may have completed one
            finish = "stop"
        speculation = _speculation(job.mode, stats, timings, len(committed))
        return GenerationResult(tuple(committed), "".join(written), finish, len(ids), timings, speculation)


@dataclass(frozen=True)
class _Job:
    """One generation, checked and ready to start."""

    prompt: list[int]
    max_new_tokens: int
    sampler: Sampler
    text: TextStream | None
    ends: frozenset[int]
    mode: Mode
    maker: SpeculatorMaker | None


def load(path: str | Path, *, threads: int | None = None, check_hashes: bool = True) -> LLM:
    """Open a bundle for decoding.

    Args:
        path: a bundle's directory.
        threads: threads an engine may use; None: one for every core this process may run on.
        check_hashes: compare every file with its hash in the manifest, not only its size.

    Raises:
        MisuseError: ``path`` is no bundle, or ``threads`` is no number of threads.
        BundleError: the bundle is damaged or comes from a newer wavekit.
    """
    if threads is None:
        threads = available_cores()
    if isinstance(threads, bool) or not isinstance(threads, int) or not 1 <= threads <= _MOST_THREADS:
        raise MisuseError(f"threads is {threads!r}; it must be an integer from 1 to {_MOST_THREADS}")
    bundle = open_bundle(path, check_hashes)
    has_tokenizer = (bundle.tokenizer_folder / "tokenizer.json").is_file()
    tokenizer = Tokenizer.from_files(bundle.tokenizer_folder) if has_tokenizer else None
    stages = [OrtEngine(bundle.path, stage.graph, threads) for stage in bundle.manifest.stages]
    draft, greedy = bundle.manifest.draft, bundle.manifest.greedy_head
    engines = Engines(
        stages,
        head=OrtEngine(bundle.path, bundle.manifest.head, threads),
        greedy_head=OrtEngine(bundle.path, greedy, threads) if greedy is not None else None,
        draft=OrtEngine(bundle.path, draft.graph, threads) if draft is not None else None,
    )
    return LLM(bundle.manifest, Decoder(bundle.manifest, engines), tokenizer)


def available_cores() -> int:
    """Cores this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _timings(stats: DecodeStats, seconds: float, new_tokens: int) -> Timings:
    decode = seconds - stats.prefill_seconds
    if new_tokens == 1:  # nothing was decoded
        return Timings(stats.prefill_seconds, decode, tokens_per_second=0.0, host_share=0.0, ticks=0)
    return Timings(
        prefill_seconds=stats.prefill_seconds,
        decode_seconds=decode,
        tokens_per_second=(new_tokens - 1) / decode,
        host_share=1.0 - stats.decode_engine_seconds / decode,
        ticks=stats.ticks,
    )


def _speculation(mode: Mode, stats: DecodeStats, timings: Timings, new_tokens: int) -> SpeculationStats:
    counts, engine = stats.speculation, stats.decode_engine_seconds
    passed = zip_longest(counts.accepted_at, counts.proposed_at, fillvalue=0)
    return SpeculationStats(
        mode=mode,
        passes=stats.passes,
        tau=(new_tokens - 1) / stats.passes if stats.passes else 1.0,
        proposed=counts.proposed,
        accepted=sum(counts.accepted_at),
        acceptance=tuple(accepted / proposed for accepted, proposed in passed),
        silent=counts.silent,
        draft_seconds=stats.draft_engine_seconds,
        target_seconds=engine - stats.draft_engine_seconds,
        host_seconds=timings.decode_seconds - engine,
    )
