"""What every kind of training begins and ends with: texts the target wrote, its states on them, and a record.

In the output folder::

    texts.jsonl         what the target wrote (see `draft_texts`)
    training.json       what made the result: settings, held-out looks as they went, versions
    training.png|svg    the looks
    state/              answers, the target's states and the last checkpoint, until the run is complete

Knows nothing of what is trained.
"""

import datetime
import importlib.metadata
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import torch
from matplotlib.figure import Figure

from wavekit_calibration.figures import save_figure
from wavekit_calibration.measure import Progress
from wavekit_calibration.model import Decoder, encode_prompt, open_decoder, usable_device
from wavekit_calibration.processes import Processes
from wavekit_calibration.prompts import PromptFile
from wavekit_calibration.state import RunState, Unfinished
from wavekit_calibration.training.draft_data import AnsweredText, StateStore
from wavekit_calibration.training.draft_texts import (
    TEXTS,
    TextProvenance,
    TextWriter,
    read_texts,
    split_held_out,
    write_texts,
)
from wavekit_calibration.training.training_loop import LoopSettings
from wavekit_engines.atomic import write_file
from wavekit_engines.checkpoint import Checkpoint, open_checkpoint
from wavekit_engines.decoder_spec import DecoderSpec
from wavekit_engines.draft_spec import StoredType
from wavekit_engines.errors import MisuseError, WavekitError
from wavekit_engines.families import decoder_spec

RECORD = "training.json"
_KEY = ("boundaries", "max_new_tokens", "max_prompt_tokens", "temperature", "held_out", "train")
_ORIGINS = ("wavekit", "torch", "transformers", "numpy")


@dataclass(frozen=True, kw_only=True)
class TrainingJob:
    """For which model, on what, and where to put the result."""

    model: str
    out: Path
    boundaries: tuple[int, ...]
    """Where states are read."""
    prompts: PromptFile
    texts: Path | None = None
    """Texts of an earlier run, instead of having the prompts answered."""
    max_new_tokens: int = 192
    max_prompt_tokens: int = 512
    temperature: float = 0.7
    held_out: float = 0.05
    train: LoopSettings = field(default_factory=LoopSettings)
    stored: StoredType = "float16"
    device: str = "cpu"
    unfinished: Unfinished = "refuse"
    max_minutes: float | None = None
    command: str = ""


@dataclass(frozen=True)
class Target:
    """The model that a job is for."""

    checkpoint: Checkpoint
    spec: DecoderSpec

    @classmethod
    def open(cls, job: TrainingJob) -> "Target":
        """Read its configuration.

        Raises:
            CheckpointError: it cannot be read.
        """
        checkpoint = open_checkpoint(job.model)
        return cls(checkpoint, decoder_spec(checkpoint.config))


@dataclass(frozen=True)
class Prepared:
    """Everything there is before training starts."""

    decoder: Decoder
    device: torch.device
    processes: Processes
    state: RunState
    store: StateStore
    made_by: TextProvenance
    train: list[AnsweredText]
    held_out: list[AnsweredText]

    @property
    def texts(self) -> list[AnsweredText]:
        """All of them."""
        return self.train + self.held_out


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """What made a result, whatever it is."""

    model: str
    checkpoint_digest: str
    boundaries: tuple[int, ...]
    texts: TextProvenance
    texts_used: int
    texts_held_out: int
    answer_tokens: int
    steps: int
    minutes: float
    """Of training alone."""
    command: str
    device: str
    created: str
    versions: dict[str, str]


def check_free(path: Path) -> None:
    """Refuse, before anything is trained, a result that is there already.

    Raises:
        MisuseError: saying so.
    """
    if path.exists():
        raise MisuseError(f"{path} exists already; choose another folder, or remove it")


def prepare(
    job: TrainingJob,
    target: Target,
    key: tuple[str, ...],
    writer: Callable[[], TextWriter],
    processes: Processes,
    progress: Progress,
) -> Prepared:
    """Open the target, and have texts and states ready; ``writer`` is asked for only if texts are missing.

    ``key`` names the fields of the job, beside those that every job has, that a resumed run must share.

    Raises:
        MisuseError: settings, prompts or texts that do not fit; an unfinished run in the folder.
        CheckpointError: the target cannot be opened.
        WavekitError: the disk is too small.
    """
    device = usable_device(processes.device(job.device))
    decoder, tokenizer = open_decoder(job.model, str(device), "auto" if device.type != "cpu" else "float32")
    with processes.first_before_others():
        unfinished = job.unfinished if processes.is_first else "resume"
        given = read_texts(job.texts, target.checkpoint.digest(), target.spec.vocab_size) if job.texts else None
        prompts = [] if given else _prompts(job, target, tokenizer)
        state = RunState(job.out / "state", _key(job, target.checkpoint, key), unfinished)
        store = StateStore(job.out / "state" / "states", job.boundaries)
        made_by, texts = given or _written(job, target, prompts, writer, state, store, progress)
        train, held_out = split_held_out(texts, job.held_out, job.train.seed)
        _check_room(job, target.spec, store, texts)
        store.fill(texts, decoder, job.train.batch_size, progress)
    return Prepared(decoder, device, processes, state, store, made_by, train, held_out)


def _key(job: TrainingJob, checkpoint: Checkpoint, names: tuple[str, ...]) -> dict[str, Any]:
    """What an unfinished run belongs to."""
    # As JSON gives it back, in which the key is kept.
    settings = msgspec.json.decode(msgspec.json.encode({name: getattr(job, name) for name in (*_KEY, *names)}))
    texts = str(job.texts) if job.texts else job.prompts.sha256
    return {**settings, "model": checkpoint.digest(), "texts": texts}


def _prompts(job: TrainingJob, target: Target, tokenizer: Any) -> list[list[int]]:
    limit = min(job.max_prompt_tokens, target.spec.max_positions - job.max_new_tokens)
    encoded = [encode_prompt(tokenizer, prompt) for prompt in job.prompts.prompts]
    prompts = [ids for ids in encoded if 0 < len(ids) <= limit]
    if not prompts:
        raise MisuseError(f"{job.prompts.name}: no prompt of at most {limit} tokens; raise --max-prompt-tokens")
    return prompts


def _written(
    job: TrainingJob,
    target: Target,
    prompts: list[list[int]],
    writer: Callable[[], TextWriter],
    state: RunState,
    store: StateStore,
    progress: Progress,
) -> tuple[TextProvenance, list[AnsweredText]]:
    made_by = TextProvenance(
        checkpoint_digest=target.checkpoint.digest(),
        prompts=job.prompts.name,
        prompts_sha256=job.prompts.sha256,
        max_new_tokens=job.max_new_tokens,
        temperature=job.temperature,
        seed=job.train.seed,
        writer=f"wavekit {importlib.metadata.version('wavekit')}",
    )
    return made_by, write_texts(prompts, made_by, writer(), state, store, job.out / TEXTS, progress)


def _check_room(job: TrainingJob, spec: DecoderSpec, store: StateStore, texts: list[AnsweredText]) -> None:
    missing = [text for text in texts if not store.has(text.number)]
    needed = StateStore.bytes_needed(missing, len(job.boundaries), spec.hidden_size)
    free = shutil.disk_usage(job.out).free
    if needed > free:
        raise WavekitError(
            f"the target's states on {len(missing)} texts take {needed / 1e9:.1f} GB and {job.out} has "
            f"{free / 1e9:.1f} GB free; give fewer prompts or another folder"
        )


def run_fields(job: TrainingJob, target: Target, ready: Prepared, steps: int, minutes: float) -> dict[str, Any]:
    """The fields of a `RunRecord`."""
    return {
        "model": target.checkpoint.name,
        "checkpoint_digest": target.checkpoint.digest(),
        "boundaries": job.boundaries,
        "texts": ready.made_by,
        "texts_used": len(ready.train),
        "texts_held_out": len(ready.held_out),
        "answer_tokens": sum(len(text.answer) for text in ready.train),
        "steps": steps,
        "minutes": minutes,
        "command": job.command,
        "device": job.device,
        "created": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "versions": {name: importlib.metadata.version(name) for name in _ORIGINS},
    }


def write_record(record: RunRecord, figure: Figure | None, folder: Path) -> None:
    """Write the figure, if there is one, and the record, last."""
    if figure is not None:
        save_figure(figure, folder, "training")
    write_file(folder / RECORD, msgspec.json.format(msgspec.json.encode(record), indent=1) + b"\n")
