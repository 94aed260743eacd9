"""Writing one text: ticks of the decoder become steps of text until something ends them.

This is where token ids become text, and where stop tokens, stop strings, shapes, deadlines and cancellation end it. Its
buffers are free again as soon as the generator of steps has ended or was closed.
"""

import threading
from collections.abc import Generator
from dataclasses import dataclass
from itertools import zip_longest
from time import perf_counter

from wavekit.choice import TargetChoice
from wavekit.decoding.decoder import Decoder, DecodeStats
from wavekit.decoding.exploration import exploration_stats
from wavekit.decoding.lattice import NOBODY
from wavekit.decoding.speculation import Mode, SpeculationStats
from wavekit.decoding.speculator import SpeculatorMaker
from wavekit.decoding.timeline import Timeline
from wavekit.results import FinishReason, GenerationResult, Step, Timings
from wavekit.streaming import TextStream
from wavekit.telemetry import Watch


@dataclass(frozen=True)
class Job:
    """One generation, checked and ready to start."""

    prompt: list[int]
    max_new_tokens: int
    choice: TargetChoice | None
    """None: the token of greatest logit, whatever came before."""
    text: TextStream | None
    ends: frozenset[int]
    mode: Mode
    maker: SpeculatorMaker | None
    nodes: int
    timeline: Timeline | None
    due: float | None
    """When it must have ended, on the clock of `perf_counter`."""


class Writing:
    """One text being written."""

    def __init__(self, decoder: Decoder, job: Job, watch: Watch) -> None:
        self.cancelled = threading.Event()
        """Set, from any thread, to end the text before its next tick, or the next chunk of its prompt."""
        self._job, self._watch = job, watch
        self._stats = DecodeStats(timeline=job.timeline)
        self._stage_ends = [stage.last for stage in decoder.manifest.stages]
        self._ticks = decoder.decode(
            job.prompt, job.choice, job.max_new_tokens, self._stats, job.maker, job.ends, job.nodes
        )
        self._committed: list[int] = []
        self._written: list[str] = []
        self._found = 0  # tokens that nobody had proposed

    def steps(self) -> Generator[Step, None, GenerationResult]:
        """Yield what ticks add to the text, and return it whole."""
        self._watch.start()
        try:
            result = yield from self._steps()
        except GeneratorExit:
            self._watch.end(None)
            raise
        except BaseException as error:
            self._watch.end(None, error)
            raise
        self._watch.end(result)
        return result

    def _steps(self) -> Generator[Step, None, GenerationResult]:
        finish: FinishReason | None = None
        start, paused = perf_counter(), 0.0
        try:
            while finish is None:
                tokens = self._tick()
                if isinstance(tokens, str):
                    finish = tokens
                    break
                step, finish = self._take(tokens)
                handed_over = perf_counter()
                yield step
                paused += perf_counter() - handed_over
        finally:
            self._ticks.close()
        seconds = perf_counter() - start - paused
        rest = self._rest() if finish != "cancelled" else ""
        if rest:
            yield Step(rest)
        if finish == "length" and self._stopped:  # the last characters may have completed a stop string
            finish = "stop"
        return self._result(finish, seconds)

    def _tick(self) -> list[int] | FinishReason:
        """Tokens of the next tick that commits any, or why there is none."""
        tokens: list[int] = []
        while not tokens:
            if self.cancelled.is_set():
                return "cancelled"
            if self._job.due is not None and perf_counter() >= self._job.due:
                return "deadline"
            try:
                tokens = next(self._ticks)
            except StopIteration:
                return "length"
        return tokens

    def _take(self, tokens: list[int]) -> tuple[Step, FinishReason | None]:
        """Make text of a tick's tokens, up to one that ends it."""
        job, before, pieces = self._job, len(self._committed), list[str]()
        finish: FinishReason | None = None
        for token in tokens:
            self._committed.append(token)
            if job.text is not None:
                pieces.append(job.text.push(token))
            complete = job.choice is not None and job.choice.complete_at == len(self._committed)
            if token in job.ends or self._stopped or complete:
                finish = "stop"
                break
        text = "".join(pieces)
        self._written.append(text)
        taken = tuple(self._committed[before:])
        record = tuple(job.choice.record[before : before + len(taken)]) if job.choice is not None else ()
        found, self._found = self._found, self._stats.exploration.commits.get(NOBODY, 0)
        accepted = min(len(tokens) - (self._found - found), len(taken)) if before else 0
        return Step(text, taken, accepted, record), finish

    @property
    def _stopped(self) -> bool:
        return self._job.text is not None and self._job.text.stop_string is not None

    def _rest(self) -> str:
        """What was held back in case it became something else."""
        rest = self._job.text.flush() if self._job.text is not None else ""
        self._written.append(rest)
        return rest

    def _result(self, finish: FinishReason, seconds: float) -> GenerationResult:
        job, count = self._job, len(self._committed)
        timings = Timings.of(self._stats, seconds, count)
        return GenerationResult(
            tuple(self._committed),
            "".join(self._written),
            finish,
            len(job.prompt),
            timings,
            _speculation(job.mode, self._stats, timings, count),
            exploration_stats(self._stats.exploration, self._stage_ends, self._stats.ticks),
            tuple(job.choice.record[:count]) if job.choice is not None else (),
            self._stats.reused,
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
