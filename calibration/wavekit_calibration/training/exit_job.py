"""Training exits from end to end: vocabulary, first weights, training, the folder, a trace and the record.

In the output folder, beside what `training_job` puts there::

    exits/              the exits (see `wavekit_engines.exit_files`)
    trace.npz           what they would have said on the held-out texts (see `simulation.trace`)
"""

import importlib.metadata
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from wavekit_calibration.measure import Progress
from wavekit_calibration.processes import Processes
from wavekit_calibration.readout import Readout
from wavekit_calibration.simulation.trace import TRACE_NAME, ExitTrace, TraceHeader
from wavekit_calibration.training.draft_data import AnsweredText
from wavekit_calibration.training.draft_start import choose_vocabulary, coverage
from wavekit_calibration.training.draft_texts import TextWriter
from wavekit_calibration.training.exit_adapters import ExitAdapters
from wavekit_calibration.training.exit_figure import draw_exits
from wavekit_calibration.training.exit_train import ExitLearner, ExitLook, Report, residual_sizes
from wavekit_calibration.training.training_job import (
    Prepared,
    RunRecord,
    Target,
    TrainingJob,
    check_free,
    prepare,
    run_fields,
    write_record,
)
from wavekit_calibration.training.training_loop import LoopSettings, Standing, Trainer
from wavekit_engines.errors import MisuseError
from wavekit_engines.exit_files import write_exits
from wavekit_engines.exit_spec import Exits, ExitSpec, boundary_problem

TRACE = TRACE_NAME
_SIZED_TEXTS = 16


@dataclass(frozen=True, kw_only=True)
class ExitJob(TrainingJob):
    """What to train, on what, and where to put it."""

    exit_vocab: int | None = None
    """None: the target's whole vocabulary."""
    rank: int | None = None
    """Of the adapters; None: an eighth of the hidden size; 0: exits without adapters, which need no training."""


@dataclass(frozen=True, kw_only=True)
class ExitRecord(RunRecord):
    """What made exits, and what came of it; lists go by boundary."""

    rank: int
    exit_vocab: int
    coverage: float
    """Share of the held-out answers' tokens that the exit vocabulary holds: no exit can agree more often."""
    train: LoopSettings
    agreement_before: tuple[float, ...]
    """On the held-out texts, of the logit lens over the exit vocabulary."""
    agreement: tuple[float, ...]
    speed_up_before: float
    """See `exit_train`: ticks only."""
    speed_up: float
    looks: tuple[ExitLook, ...]


def train_exits(
    job: ExitJob, writer: Callable[[], TextWriter], progress: Progress, report: Report
) -> tuple[Exits, ExitRecord]:
    """Run a job; ``writer`` is asked for only if texts are missing.

    Raises:
        MisuseError: settings, prompts, texts or boundaries that do not fit; an unfinished run in the folder.
        CheckpointError: the target cannot be read.
        WavekitError: the disk is too small.
    """
    target = Target.open(job)
    _check(job, target)
    processes = Processes()
    if not processes.is_first:
        progress, report = (lambda what, done, total: None), (lambda look: None)
    ready = prepare(job, target, ("exit_vocab", "rank"), writer, processes, progress)
    _check_texts(ready)
    d2t = _vocabulary(job, target, ready.train)
    learner = _learner(job, target, ready, d2t)
    trainer = _train(job, ready, learner, progress, report) if learner.module.spec.rank else None
    last = learner.look(Standing(0, 0.0, 0.0, math.nan), ready.held_out)
    looks = trainer.state.looks if trainer else [last]
    record = ExitRecord(
        **run_fields(
            job, target, ready, trainer.state.step if trainer else 0, trainer.state.minutes if trainer else 0.0
        ),
        rank=learner.module.spec.rank,
        exit_vocab=len(d2t),
        coverage=coverage(ready.held_out, d2t),
        train=job.train,
        agreement_before=tuple(looks[0].agreement),
        agreement=tuple(last.agreement),
        speed_up_before=looks[0].speed_up,
        speed_up=last.speed_up,
        looks=tuple(looks),
    )
    exits = _exits(job, target, learner, d2t)
    processes.wait()
    if processes.is_first:
        _trace(exits, target, learner, ready.held_out).save(job.out / TRACE)
        write_exits(job.out / "exits", exits)
        write_record(record, draw_exits(looks, job.boundaries) if trainer else None, job.out)
        ready.state.remove()
    return exits, record


def _check(job: ExitJob, target: Target) -> None:
    if problem := boundary_problem(job.boundaries, target.spec.num_layers):
        raise MisuseError(problem)
    if job.rank is not None and job.rank < 0:
        raise MisuseError(f"--rank must be at least 1, got {job.rank}")
    if job.exit_vocab is not None and job.exit_vocab < 1:
        raise MisuseError(f"--exit-vocab must be at least 1, got {job.exit_vocab}")
    check_free(job.out / "exits")


def _check_texts(ready: Prepared) -> None:
    for texts in (ready.train, ready.held_out):
        if not any(len(text.answer) > 2 for text in texts):
            raise MisuseError("exits learn between an answer's first token and its last: no answer has more than two")


def _vocabulary(job: ExitJob, target: Target, texts: Sequence[AnsweredText]) -> NDArray[np.int64]:
    size = target.spec.vocab_size
    if job.exit_vocab is None or job.exit_vocab >= size:
        return np.zeros(size, np.int64)
    return choose_vocabulary(texts, size, job.exit_vocab)


def _learner(job: ExitJob, target: Target, ready: Prepared, d2t: NDArray[np.int64]) -> ExitLearner:
    spec = target.spec
    exit_spec = ExitSpec(
        boundaries=job.boundaries,
        target_layers=spec.num_layers,
        hidden_size=spec.hidden_size,
        vocab_size=spec.vocab_size,
        exit_vocab_size=len(d2t),
        norm_eps=spec.norm_eps,
        rank=max(1, spec.hidden_size // 8) if job.rank is None else job.rank,
    )
    sizes = residual_sizes(ready.store, ready.train[:_SIZED_TEXTS], job.boundaries)
    ids = d2t + np.arange(len(d2t))
    whole = len(ids) == spec.vocab_size
    readout = Readout(ready.decoder, None if whole else torch.from_numpy(ids), ready.device)
    adapters = ExitAdapters(exit_spec, sizes, job.train.seed)
    return ExitLearner(adapters, readout, ids, ready.store, job.train, ready.device)


def _train(
    job: ExitJob, ready: Prepared, learner: ExitLearner, progress: Progress, report: Report
) -> Trainer[ExitLook]:
    checkpoint = job.out / "state" / "checkpoint.pt"
    trainer = Trainer(learner, (ready.train, ready.held_out), job.train, checkpoint, ready.processes)
    trainer.resume()
    trainer.run(job.max_minutes, progress, report)
    return trainer


def _exits(job: ExitJob, target: Target, learner: ExitLearner, d2t: NDArray[np.int64]) -> Exits:
    spec = learner.module.spec
    made = "trained" if spec.rank else "without adapters,"
    return Exits(
        spec=spec,
        weights={name: value.numpy() for name, value in learner.module.weight_arrays().items()},
        d2t=d2t,
        dtype=job.stored,
        origin=f"wavekit {importlib.metadata.version('wavekit')}, {made} for {target.checkpoint.name}",
        target_digest=target.checkpoint.digest(),
    )


def _trace(exits: Exits, target: Target, learner: ExitLearner, texts: Sequence[AnsweredText]) -> ExitTrace:
    """What the exits say on some texts, with as many ranks as DECS can pass over, a draft's token among them."""
    usable = [text for text in texts if len(text.answer) > 2]
    ranks = min(len(exits.spec.boundaries) + 1, exits.spec.exit_vocab_size)
    candidates, written = learner.candidates(usable, ranks)
    lengths = [len(text.answer) - 2 for text in usable]
    header = TraceHeader(
        num_layers=exits.spec.target_layers,
        boundaries=exits.spec.boundaries,
        model=target.checkpoint.name,
        checkpoint_digest=target.checkpoint.digest(),
        origin=f"held-out text of a training run: exits of {exits.origin}",
    )
    starts = np.cumsum([0, *lengths[:-1]])
    return ExitTrace(header, candidates.astype(np.int32), written.astype(np.int32), starts)
