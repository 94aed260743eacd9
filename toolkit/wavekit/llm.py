"""The embedded API: load a bundle once, then write texts from prompts, whole, piece by piece, or many at once.

An `LLM` may be shared between threads and event loops: every generation has buffers of its own, and those in flight run
their ticks at once, for the operating system to share out the cores. What a text may be asked for is in `options`, what
is told about it in `results`.
"""

import threading
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from numbers import Integral
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any, TypeAlias

from wavekit.backends import open_engines
from wavekit.choice import Additions, TargetChoice
from wavekit.decoding.decoder import Decoder
from wavekit.decoding.sampling import Sampler
from wavekit.decoding.speculation import Speculation
from wavekit.grammar import Grammars
from wavekit.machine import available_cores
from wavekit.options import GenerationOptions, Options
from wavekit.profiles import holds_for, opening
from wavekit.results import FinishReason, GenerationResult, Step, Timings, TokenLogprobs
from wavekit.statistics import Statistics, Tally
from wavekit.streaming import TextStream
from wavekit.streams import AsyncGenerationStream, GenerationStream
from wavekit.telemetry import Watch, logger
from wavekit.tokenizer import Tokenizer
from wavekit.writing import Job, Writing
from wavekit_engines.bundle import Manifest, open_bundle
from wavekit_engines.errors import MisuseError

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = [
    "LLM",
    "AsyncGenerationStream",
    "FinishReason",
    "GenerationOptions",
    "GenerationResult",
    "GenerationStream",
    "Prompt",
    "Statistics",
    "Step",
    "Timings",
    "TokenLogprobs",
    "available_cores",
    "load",
]

Prompt: TypeAlias = str | Sequence[Mapping[str, Any]] | Sequence[int]
"""Plain text, chat messages for the model's chat template, or token ids."""

_MOST_THREADS = 1024  # beyond any use, and ONNX Runtime does start as many as it is told to


class LLM:
    """A loaded bundle. Made by `load`."""

    def __init__(
        self,
        manifest: Manifest,
        decoder: Decoder,
        tokenizer: Tokenizer | None,
        concurrency: int = 4,
        auto: Speculation | None = None,
    ) -> None:
        """Let at most ``concurrency`` texts of `generate_batch` and `stream_async` be written at a time.

        ``auto``: what ``speculate="auto"`` means here.
        """
        self.manifest = manifest
        self.decoder = decoder
        self.tokenizer = tokenizer
        self.auto = auto or Speculation()
        self._grammars = Grammars(tokenizer, decoder.spec.vocab_size) if tokenizer is not None else None
        self._tally = Tally()
        self._writers = ThreadPoolExecutor(concurrency, thread_name_prefix="wavekit")
        self._streams: weakref.WeakSet[GenerationStream] = weakref.WeakSet()
        self._streams_lock = threading.Lock()

    def generate(self, prompt: Prompt, **options: "Unpack[Options]") -> GenerationResult:
        """Write a text after ``prompt`` and return it whole.

        Args:
            prompt: text, chat messages (``[{"role": "user", "content": "..."}]``) or token ids.
            options: ``max_new_tokens``, ``temperature``, ``stop`` and more, see `wavekit.options.GenerationOptions`.

        Raises:
            MisuseError: a parameter out of range, an empty prompt, text for a bundle without tokenizer, a draft or
                exits for a bundle without, a schema that cannot be followed.
            ContextLengthError: a prompt as long as the context or longer.

        Example:
            >>> wavekit.load("bundle").generate("The capital of France is", max_new_tokens=4).text
            ' Paris.'
        """
        return _finished(self.stream(prompt, **options))

    def stream(self, prompt: Prompt, **options: "Unpack[Options]") -> GenerationStream:
        """Like `generate`, piece by piece: whole characters only, and nothing of a stop string.

        Everything is checked now, so that a mistake is raised here and not at the first piece.

        Example:
            >>> for piece in llm.stream("Once upon a time"):
            ...     print(piece, end="", flush=True)
        """
        began = perf_counter()
        job = self._job(prompt, GenerationOptions(**options), began)
        writing = Writing(self.decoder, job, Watch(self._tally, job.mode, len(job.prompt)))
        stream = GenerationStream(writing.steps(), writing.cancelled)
        with self._streams_lock:
            self._streams.add(stream)
        return stream

    def stream_async(self, prompt: Prompt, **options: "Unpack[Options]") -> AsyncGenerationStream:
        """Like `stream`, for coroutines: a thread writes, first come first served.

        A mistake is raised at the first piece.

        Example:
            >>> async for piece in llm.stream_async("Once upon a time"):
            ...     print(piece, end="", flush=True)
        """
        return self.read_async(lambda: self.stream(prompt, **options))

    def read_async(self, start: Callable[[], GenerationStream]) -> AsyncGenerationStream:
        """What ``start`` returns, called and read by one of the threads of `stream_async`, for coroutines."""
        return AsyncGenerationStream(start, self._writers)

    def generate_batch(self, prompts: Iterable[Prompt], **options: "Unpack[Options]") -> list[GenerationResult]:
        """The texts after several prompts, in their order, several being written at a time.

        All prompts are checked before anything is written. An error or Ctrl-C ends all of them.

        Example:
            >>> [result.text for result in llm.generate_batch(["One,", "Uno,"], max_new_tokens=8)]
        """
        streams = [self.stream(prompt, **options) for prompt in prompts]
        try:
            return list(self._writers.map(_finished, streams))
        finally:
            for stream in streams:
                stream.cancel()

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

    @property
    def statistics(self) -> Statistics:
        """What the generations so far add up to."""
        return self._tally.now

    def close(self) -> None:
        """End the generations under way, as closing their streams does, and close the engines."""
        with self._streams_lock:
            streams = list(self._streams)
        for stream in streams:
            stream.close()
        self._writers.shutdown()
        self.decoder.close()

    def _job(self, prompt: Prompt, options: GenerationOptions, began: float) -> Job:
        """Check everything that can be known before the first token."""
        ids = self.encode(prompt)
        self.decoder.check_prompt(ids)
        if options.stop and self.tokenizer is None:
            raise MisuseError("this bundle has no tokenizer, so stop strings cannot be found: use stop_token_ids")
        given = options.stop_token_ids
        ends = frozenset(self.manifest.generation.stop_token_ids if given is None else given)
        choice = self._choice(ids, options, ends)
        speculation = options.speculation if options.speculation != Speculation() else self.auto
        return Job(
            ids,
            options.max_new_tokens,
            choice,
            TextStream(self.tokenizer, options.stop) if self.tokenizer is not None else None,
            ends,
            speculation.resolved(self.manifest.draft is not None, self.decoder.exit_boundaries),
            self.decoder.speculator(speculation, choice is None),
            speculation.nodes,
            options.timeline,
            began + options.deadline if options.deadline is not None else None,
        )

    def _choice(self, prompt: list[int], options: GenerationOptions, ends: frozenset[int]) -> TargetChoice | None:
        """How tokens are chosen; None where the greatest logit is all there is to it."""
        constraint = None
        if options.constrained:
            if self._grammars is None:
                raise MisuseError("this bundle has no tokenizer, so json_schema and regex cannot be followed")
            constraint = self._grammars.shape(options.json_schema, options.regex, ends)
        vocabulary = self.manifest.decoder.vocab_size
        additions = _additions(options, vocabulary) if options.adds else None
        plain = constraint is None and additions is None and options.logprobs is None and not options.min_tokens
        if plain and options.sampling.is_argmax:
            return None
        return TargetChoice(
            Sampler(options.sampling, vocabulary),
            prompt,
            ends=ends,
            min_tokens=options.min_tokens,
            additions=additions,
            constraint=constraint,
            logprobs=options.logprobs,
        )


def load(
    path: str | Path,
    *,
    threads: int | None = None,
    lanes: int | None = None,
    check_hashes: bool = True,
    concurrency: int = 4,
    prefix_memory: int = 0,
    engine: str = "onnxruntime",
    device: str | None = None,
) -> LLM:
    """Open a bundle for decoding.

    Args:
        path: a bundle's directory.
        threads: threads an engine may use; None: an equal share of this process's cores for every lane.
        lanes: stages that may run at once, each on a thread of its own; of use where exits propose. None: 1. Where
            neither number is given and `wavekit tune` left a profile of this machine in the bundle, both come from
            there, and so does what ``speculate="auto"`` means.
        check_hashes: compare every file with its hash in the manifest, not only its size.
        concurrency: texts of `LLM.generate_batch` and `LLM.stream_async` that are written at a time; the others wait,
            first come first served. Each needs memory for its KV cache, which is kept for the next ones.
        prefix_memory: bytes for the KV caches of finished texts. A prompt that begins like one of them, with the same
            system prompt or as the next turn of a chat, is not run again that far.
        engine: what runs the bundle, one of `wavekit.backends.ENGINES`.
        device: ``cpu`` or ``cuda``; the torch engine takes any device of torch, TensorRT also ``cuda:1``. None: the GPU
            for TensorRT, the CPU for the others.

    Raises:
        MisuseError: ``path`` is no bundle, ``threads``, ``lanes``, ``concurrency`` or ``prefix_memory`` is no such
            number, or ``engine`` or ``device`` is none that can be used here.
        BundleError: the bundle is damaged or comes from a newer wavekit.
    """
    _check_count("concurrency", concurrency)
    if isinstance(prefix_memory, bool) or not isinstance(prefix_memory, int) or prefix_memory < 0:
        raise MisuseError(f"prefix_memory is {prefix_memory!r}; it must be a number of bytes from 0 (off) up")
    for name, count in (("threads", threads), ("lanes", lanes)):
        if count is not None:
            _check_count(name, count)
    bundle = open_bundle(path, check_hashes)
    setting = opening(bundle, threads, lanes, holds_for(engine, device))
    threads = setting.threads
    has_tokenizer = (bundle.tokenizer_folder / "tokenizer.json").is_file()
    tokenizer = Tokenizer.from_files(bundle.tokenizer_folder) if has_tokenizer else None
    engines = open_engines(bundle, engine, device, threads)
    logger.info(
        "opened a bundle of %d stages in %s on %s, %d threads each",
        len(engines.stages),
        engine,
        device or "its usual device",
        threads,
    )
    lanes = min(setting.lanes, len(engines.stages))
    decoder = Decoder(bundle.manifest, engines, lanes, prefix_memory, concurrency)
    return LLM(decoder.manifest, decoder, tokenizer, concurrency, setting.speculation)


def _additions(options: GenerationOptions, vocabulary: int) -> Additions:
    outside = [token for token in options.logit_bias if not 0 <= token < vocabulary]
    if outside:
        raise MisuseError(f"logit_bias: token id {outside[0]} is outside the vocabulary of {vocabulary}")
    return Additions(vocabulary, options.logit_bias, options.frequency_penalty, options.presence_penalty)


def _check_count(name: str, count: object) -> None:
    if isinstance(count, bool) or not isinstance(count, int) or not 1 <= count <= _MOST_THREADS:
        raise MisuseError(f"{name} is {count!r}; it must be an integer from 1 to {_MOST_THREADS}")


def _finished(stream: GenerationStream) -> GenerationResult:
    """The whole text."""
    for _ in stream.steps():
        pass
    return stream.result
