"""Training a draft from end to end: texts, states, vocabulary, first weights, training, checkpoint and record.

In the output folder::

    draft/              the head, in the checkpoint format asked for
    texts.jsonl         what the target wrote (see `draft_texts`)
    training.json       what made it: settings, held-out tau as it went, versions
    training.png|svg    loss and tau
    state/              answers, the target's states and the last checkpoint, until the run is complete
"""

import dataclasses
import datetime
import importlib.metadata
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import torch

from wavekit_calibration.draft_data import AnsweredText, StateStore
from wavekit_calibration.draft_figure import draw_training
from wavekit_calibration.draft_head import DraftHead
from wavekit_calibration.draft_loss import Acceptance, Teacher
from wavekit_calibration.draft_start import choose_vocabulary, coverage, untrained_draft
from wavekit_calibration.draft_texts import (
    TEXTS,
    TextProvenance,
    TextWriter,
    read_texts,
    split_held_out,
    write_texts,
)
from wavekit_calibration.draft_train import Look, Report, Trainer, TrainSettings
from wavekit_calibration.figures import save_figure
from wavekit_calibration.measure import Progress
from wavekit_calibration.model import encode_prompt, open_decoder, usable_device
from wavekit_calibration.processes import Processes
from wavekit_calibration.prompts import PromptFile
from wavekit_calibration.state import RunState, Unfinished, write_file
from wavekit_engines.checkpoint import Checkpoint, open_checkpoint
from wavekit_engines.decoder_spec import DecoderSpec
from wavekit_engines.draft_formats import DraftFormat, write_draft
from wavekit_engines.draft_spec import Draft, StoredType
from wavekit_engines.errors import MisuseError, WavekitError
from wavekit_engines.families import decoder_spec

RECORD = "training.json"


@dataclass(frozen=True)
class DraftJob:
    """What to train, on what, and where to put it."""

    model: str
    out: Path
    boundaries: tuple[int, ...]
    prompts: PromptFile
    texts: Path | None = None
    """Texts of an earlier run, instead of having the prompts answered."""
    max_new_tokens: int = 192
    max_prompt_tokens: int = 512
    temperature: float = 0.7
    draft_vocab: int = 8192
    held_out: float = 0.05
    train: TrainSettings = field(default_factory=TrainSettings)
    stored: StoredType = "float16"
    format: DraftFormat = "speculators"
    device: str = "cpu"
    unfinished: Unfinished = "refuse"
    max_minutes: float | None = None
    command: str = ""


@dataclass(frozen=True)
class TrainingRecord:
    """What made a draft, and what came of it."""

    model: str
    checkpoint_digest: str
    boundaries: tuple[int, ...]
    draft_vocab: int
    coverage: float
    """Share of the answers' tokens that the draft vocabulary holds."""
    texts: TextProvenance
    texts_used: int
    texts_held_out: int
    answer_tokens: int
    train: TrainSettings
    steps: int
    minutes: float
    """Of training alone."""
    tau: float
    """On the held-out texts, drafting greedy chains of ``train.steps_ahead`` tokens, the bonus token counted."""
    acceptance: tuple[float, ...]
    looks: tuple[Look, ...]
    command: str
    device: str
    created: str
    versions: dict[str, str]


def train_draft(
    job: DraftJob, writer: Callable[[], TextWriter], progress: Progress, report: Report
) -> tuple[Draft, TrainingRecord]:
    """Run a job; ``writer`` is asked for only if texts are missing.

    Raises:
        MisuseError: settings, prompts, texts or boundaries that do not fit; an unfinished run in the folder.
        CheckpointError: the target cannot be read.
        WavekitError: the disk is too small.
    """
    checkpoint = open_checkpoint(job.model)
    spec = decoder_spec(checkpoint.config)
    _check(job, spec)
    processes = Processes()
    if not processes.is_first:
        progress, report = (lambda what, done, total: None), (lambda look: None)
    device = usable_device(processes.device(job.device))
    decoder, tokenizer = open_decoder(job.model, str(device), "auto" if device.type != "cpu" else "float32")
    with processes.first_before_others():
        unfinished = job.unfinished if processes.is_first else "resume"
        state = RunState(job.out / "state", _key(job, checkpoint), unfinished)
        store = StateStore(job.out / "state" / "states", job.boundaries)
        made_by, texts = _texts(job, checkpoint, spec, tokenizer, writer, state, store, progress)
        split = split_held_out(texts, job.held_out, job.train.seed)
        _check_room(job, spec, store, texts)
        store.fill(texts, decoder, job.train.batch_size, progress)
    d2t = choose_vocabulary(split[0], spec.vocab_size, min(job.draft_vocab, spec.vocab_size))
    start = untrained_draft(checkpoint, spec, job.boundaries, d2t, job.train.seed)
    head = DraftHead(start.spec, max(len(text.tokens) for text in texts) + job.train.steps_ahead)
    head.load(start)
    teacher = Teacher(decoder, torch.from_numpy(d2t + range(len(d2t))), spec.embedding_scale, device)
    trainer = Trainer(head, teacher, store, split, job.train, job.out / "state" / "checkpoint.pt", device, processes)
    trainer.resume()
    trainer.run(job.max_minutes, progress, report)
    found = trainer.evaluate(split[1], job.train.steps_ahead)
    draft = _trained(start, head, job, found)
    record = _record(job, checkpoint, made_by, split, trainer, found, draft)
    processes.wait()
    if processes.is_first:
        _write(job, draft, record)
        state.remove()
    return draft, record


def _check(job: DraftJob, spec: DecoderSpec) -> None:
    boundaries = job.boundaries
    if not boundaries or list(boundaries) != sorted(set(boundaries)):
        raise MisuseError(f"boundaries {list(boundaries)}: give them in ascending order, each once")
    if not 0 <= boundaries[0] <= boundaries[-1] <= spec.num_layers:
        raise MisuseError(f"boundaries {list(boundaries)}: the model has 0 to {spec.num_layers}")


def _key(job: DraftJob, checkpoint: Checkpoint) -> dict[str, Any]:
    """What an unfinished run belongs to."""
    names = ("boundaries", "max_new_tokens", "max_prompt_tokens", "temperature", "draft_vocab", "held_out", "train")
    # As JSON gives it back, in which the key is kept.
    settings = msgspec.json.decode(msgspec.json.encode({name: getattr(job, name) for name in names}))
    texts = str(job.texts) if job.texts else job.prompts.sha256
    return {**settings, "model": checkpoint.digest(), "texts": texts}


def _texts(
    job: DraftJob,
    checkpoint: Checkpoint,
    spec: DecoderSpec,
    tokenizer: Any,
    writer: Callable[[], TextWriter],
    state: RunState,
    store: StateStore,
    progress: Progress,
) -> tuple[TextProvenance, list[AnsweredText]]:
    if job.texts is not None:
        return read_texts(job.texts, checkpoint.digest(), spec.vocab_size)
    limit = min(job.max_prompt_tokens, spec.max_positions - job.max_new_tokens)
    encoded = [encode_prompt(tokenizer, prompt) for prompt in job.prompts.prompts]
    prompts = [ids for ids in encoded if 0 < len(ids) <= limit]
    if not prompts:
        raise MisuseError(f"{job.prompts.name}: no prompt of at most {limit} tokens; raise --max-prompt-tokens")
    made_by = TextProvenance(
        checkpoint_digest=checkpoint.digest(),
        prompts=job.prompts.name,
        prompts_sha256=job.prompts.sha256,
        max_new_tokens=job.max_new_tokens,
        temperature=job.temperature,
        seed=job.train.seed,
        writer=f"wavekit {importlib.metadata.version('wavekit')}",
    )
    return made_by, write_texts(prompts, made_by, writer(), state, store, job.out / TEXTS, progress)


def _check_room(job: DraftJob, spec: DecoderSpec, store: StateStore, texts: list[AnsweredText]) -> None:
    missing = [text for text in texts if not store.has(text.number)]
    needed = StateStore.bytes_needed(missing, len(job.boundaries), spec.hidden_size)
    free = shutil.disk_usage(job.out).free
    if needed > free:
        raise WavekitError(
            f"the target's states on {len(missing)} texts take {needed / 1e9:.1f} GB and {job.out} has "
            f"{free / 1e9:.1f} GB free; give fewer prompts or another folder"
        )


def _trained(start: Draft, head: DraftHead, job: DraftJob, found: Acceptance) -> Draft:
    weights = {name: value.numpy() for name, value in head.weight_arrays().items()}
    origin = (
        f"wavekit {importlib.metadata.version('wavekit')}, trained for {job.model}, held-out tau {found.tau:.2f} "
        f"with chains of {found.steps}"
    )
    return dataclasses.replace(start, weights=weights, dtype=job.stored, origin=origin)


def _record(
    job: DraftJob,
    checkpoint: Checkpoint,
    made_by: TextProvenance,
    split: tuple[list[AnsweredText], list[AnsweredText]],
    trainer: Trainer,
    found: Acceptance,
    draft: Draft,
) -> TrainingRecord:
    return TrainingRecord(
        model=checkpoint.name,
        checkpoint_digest=checkpoint.digest(),
        boundaries=job.boundaries,
        draft_vocab=len(draft.d2t),
        coverage=coverage(split[1], draft.d2t),
        texts=made_by,
        texts_used=len(split[0]),
        texts_held_out=len(split[1]),
        answer_tokens=sum(len(text.answer) for text in split[0]),
        train=job.train,
        steps=trainer.state.step,
        minutes=trainer.state.minutes,
        tau=found.tau,
        acceptance=tuple(found.by_position),
        looks=tuple(trainer.state.looks),
        command=job.command,
        device=job.device,
        created=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        versions={name: importlib.metadata.version(name) for name in ("wavekit", "torch", "transformers", "numpy")},
    )


def _write(job: DraftJob, draft: Draft, record: TrainingRecord) -> None:
    write_draft(job.out / "draft", draft, job.format)
    save_figure(draw_training(record.looks), job.out, "training")
    write_file(job.out / RECORD, msgspec.json.format(msgspec.json.encode(record), indent=1) + b"\n")
