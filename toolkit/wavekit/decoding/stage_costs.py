"""What the stages of a bundle, their exits and the head cost on this machine with all lanes at work.

The costs are those that a tick meets: in every round each stage runs a pass and what reads its output, on the lanes of
the decoder, so that cores and memory are shared as they will be. A curve of rows is measured the same way. Times are
medians, in seconds.
"""

from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from time import perf_counter

import numpy as np

from wavekit.decoding.decoder import Decoder, DecodeStats
from wavekit.decoding.exit_worker import ExitWorker
from wavekit.decoding.sequence_workers import SequenceWorkers
from wavekit.decoding.speculation import Speculation
from wavekit.decoding.stage_worker import StageWorker

ROWS = (1, 2, 4, 8, 16)
_CONTEXT = 128
_ROUNDS = 24
_WARM_UP = 4
_TOKENS = 48


@dataclass(frozen=True)
class StageCosts:
    """Seconds of one pass of one row each; ``rows`` are relative to that."""

    stages: tuple[tuple[int, float], ...]
    """Boundary at which a stage ends, and its cost without exit or head."""
    head: float
    exit_head: float
    """Mean over exits."""
    rows: tuple[tuple[int, float], ...]
    overhead: float
    """Of a tick, outside its engines."""


def measure_stage_costs(decoder: Decoder) -> StageCosts:
    """Measure for some seconds; the bundle must have exits."""
    rows, spent = list[tuple[int, float]](), dict[int, _Spent]()
    with decoder.workers.lent(_CONTEXT + ROWS[-1], decoder.least_rows(True)) as workers:
        exits = workers.exits(decoder.exit_boundaries, ROWS[-1])
        workers.reset(False)
        for _ in workers.prefill([0] * _CONTEXT):
            pass
        for count in ROWS:
            spent[count] = _rounds(workers, exits, count)
    alone = spent[1]
    for count in ROWS:
        relative = [many / one for many, one in zip(spent[count].stages, alone.stages, strict=True)]
        rows.append((count, max(sum(relative) / len(relative), rows[-1][1] if rows else 1.0)))
    rows[0] = (1, 1.0)
    ends = [stage.last for stage in decoder.manifest.stages]
    return StageCosts(
        stages=tuple(zip(ends, alone.stages, strict=True)),
        head=alone.head,
        exit_head=alone.exit,
        rows=tuple(rows),
        overhead=_overhead(decoder),
    )


@dataclass(frozen=True)
class _Spent:
    stages: list[float]
    head: float
    exit: float


def _rounds(workers: SequenceWorkers, exits: dict[int, ExitWorker], count: int) -> _Spent:
    """Medians of rounds in which every stage runs ``count`` rows."""
    runs: list[list[float]] = [[] for _ in workers.stages]
    reads: list[list[float]] = [[] for _ in workers.stages]
    last = len(workers.stages) - 1

    def job(number: int, worker: StageWorker) -> Callable[[], None]:
        def run() -> None:
            start = perf_counter()
            worker.run()
            middle = perf_counter()
            hidden = worker.output(worker.stage.last)
            if number == last:
                workers.best(hidden[:1])
            elif number in exits:
                exits[number].run(hidden)
            runs[number].append(middle - start)
            reads[number].append(perf_counter() - middle)

        return run

    for _ in range(_WARM_UP + _ROUNDS):
        for worker in workers.stages:
            worker.load(np.zeros(()), np.arange(_CONTEXT, _CONTEXT + count))
        workers.lanes.run([job(number, worker) for number, worker in reversed([*enumerate(workers.stages)])])
        for worker in workers.stages:
            worker.keep(_CONTEXT, [])
    medians = [median(times[_WARM_UP:]) for times in reads]
    of_exits = [medians[number] for number in exits] or [0.0]
    return _Spent([median(times[_WARM_UP:]) for times in runs], medians[last], sum(of_exits) / len(of_exits))


def _overhead(decoder: Decoder) -> float:
    """Time of a tick outside its engines, from a short text."""
    stats, start = DecodeStats(), perf_counter()
    make = decoder.speculator(Speculation("exits"))
    for _ in decoder.decode([0] * 8, None, _TOKENS, stats, make):
        pass
    decoding = perf_counter() - start - stats.prefill_seconds
    return max(0.0, decoding - stats.exploration.tick_seconds) / max(stats.ticks, 1)
