"""Training a draft from end to end: vocabulary, first weights, training, checkpoint and record.

In the output folder, beside what `training_job` puts there::

    draft/              the head, in the checkpoint format asked for
"""

import dataclasses
import importlib.metadata
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch

from wavekit_calibration.measure import Progress
from wavekit_calibration.processes import Processes
from wavekit_calibration.training.draft_figure import draw_training
from wavekit_calibration.training.draft_head import DraftHead
from wavekit_calibration.training.draft_loss import Acceptance, Teacher
from wavekit_calibration.training.draft_start import choose_vocabulary, coverage, untrained_draft
from wavekit_calibration.training.draft_texts import TextWriter
from wavekit_calibration.training.draft_train import DraftLearner, Look, Report, TrainSettings
from wavekit_calibration.training.training_job import (
    RunRecord,
    Target,
    TrainingJob,
    check_free,
    prepare,
    run_fields,
    write_record,
)
from wavekit_calibration.training.training_loop import Trainer
from wavekit_engines.decoder_spec import DecoderSpec
from wavekit_engines.draft_formats import DraftFormat, write_draft
from wavekit_engines.draft_spec import Draft
from wavekit_engines.errors import MisuseError


@dataclass(frozen=True, kw_only=True)
class DraftJob(TrainingJob):
    """What to train, on what, and where to put it."""

    draft_vocab: int = 8192
    train: TrainSettings = field(default_factory=TrainSettings)
    format: DraftFormat = "speculators"


@dataclass(frozen=True, kw_only=True)
class TrainingRecord(RunRecord):
    """What made a draft, and what came of it."""

    draft_vocab: int
    coverage: float
    """Share of the answers' tokens that the draft vocabulary holds."""
    train: TrainSettings
    tau: float
    """On the held-out texts, drafting greedy chains of ``train.steps_ahead`` tokens, the bonus token counted."""
    acceptance: tuple[float, ...]
    looks: tuple[Look, ...]


def train_draft(
    job: DraftJob, writer: Callable[[], TextWriter], progress: Progress, report: Report
) -> tuple[Draft, TrainingRecord]:
    """Run a job; ``writer`` is asked for only if texts are missing.

    Raises:
        MisuseError: settings, prompts, texts or boundaries that do not fit; an unfinished run in the folder.
        CheckpointError: the target cannot be read.
        WavekitError: the disk is too small.
    """
    target = Target.open(job)
    spec = target.spec
    _check(job, spec)
    processes = Processes()
    if not processes.is_first:
        progress, report = (lambda what, done, total: None), (lambda look: None)
    ready = prepare(job, target, ("draft_vocab",), writer, processes, progress)
    d2t = choose_vocabulary(ready.train, spec.vocab_size, min(job.draft_vocab, spec.vocab_size))
    start = untrained_draft(target.checkpoint, spec, job.boundaries, d2t, job.train.seed)
    head = DraftHead(start.spec, max(len(text.tokens) for text in ready.texts) + job.train.steps_ahead)
    head.load(start)
    tokens = torch.from_numpy(d2t + range(len(d2t)))
    teacher = Teacher(ready.decoder, tokens, spec.embedding_scale, ready.device)
    learner = DraftLearner(head, teacher, ready.store, job.train, ready.device)
    checkpoint = job.out / "state" / "checkpoint.pt"
    trainer = Trainer(learner, (ready.train, ready.held_out), job.train, checkpoint, processes)
    trainer.resume()
    trainer.run(job.max_minutes, progress, report)
    found = learner.evaluate(ready.held_out, job.train.steps_ahead)
    draft = _trained(start, head, job, found)
    record = TrainingRecord(
        **run_fields(job, target, ready, trainer.state.step, trainer.state.minutes),
        draft_vocab=len(d2t),
        coverage=coverage(ready.held_out, d2t),
        train=job.train,
        tau=found.tau,
        acceptance=tuple(found.by_position),
        looks=tuple(trainer.state.looks),
    )
    processes.wait()
    if processes.is_first:
        write_draft(job.out / "draft", draft, job.format)
        write_record(record, draw_training(record.looks), job.out)
        ready.state.remove()
    return draft, record


def _check(job: DraftJob, spec: DecoderSpec) -> None:
    boundaries = job.boundaries
    if not boundaries or list(boundaries) != sorted(set(boundaries)):
        raise MisuseError(f"boundaries {list(boundaries)}: give them in ascending order, each once")
    if not 0 <= boundaries[0] <= boundaries[-1] <= spec.num_layers:
        raise MisuseError(f"boundaries {list(boundaries)}: the model has 0 to {spec.num_layers}")
    check_free(job.out / "draft")


def _trained(start: Draft, head: DraftHead, job: DraftJob, found: Acceptance) -> Draft:
    weights = {name: value.numpy() for name, value in head.weight_arrays().items()}
    origin = (
        f"wavekit {importlib.metadata.version('wavekit')}, trained for {Path(job.model).name}, "
        f"held-out tau {found.tau:.2f} with chains of {found.steps}"
    )
    return dataclasses.replace(start, weights=weights, dtype=job.stored, origin=origin)
