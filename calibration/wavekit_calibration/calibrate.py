"""`calibrate`: from a model and prompts to a folder with calibration.json, matrices, figures and report.

The order of work: prompts -> answers (by a writer) -> one streaming pass -> statistics -> choice -> result. All that
takes long goes through `RunState`, so that a run that is interrupted, or out of time, can be resumed.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from wavekit_calibration.choose import Choice, candidate_boundaries, choose
from wavekit_calibration.errors import CalibrationPausedError
from wavekit_calibration.exits import StageCosts
from wavekit_calibration.measure import Progress, Text, measure
from wavekit_calibration.model import Decoder, open_decoder
from wavekit_calibration.parts_check import check_parts
from wavekit_calibration.prompts import PromptFile
from wavekit_calibration.readiness import measure_readiness
from wavekit_calibration.report import write_report
from wavekit_calibration.result import Calibration, load_calibration
from wavekit_calibration.sample import PositionSample, sample_positions
from wavekit_calibration.selection import check_members, check_size
from wavekit_calibration.settings import MeasureSettings, SelectSettings
from wavekit_calibration.state import MeasuredArrays, RunState, Unfinished
from wavekit_calibration.statistics import Statistics, compute_statistics, gram_stack
from wavekit_calibration.summary import Findings, Origin, summarise
from wavekit_calibration.texts import EncodedPrompts, complete_texts, encode_prompts
from wavekit_calibration.token_filter import keep_tokens
from wavekit_calibration.writer import Writer, transformers_writer
from wavekit_engines.atomic import held
from wavekit_engines.checkpoint import open_checkpoint
from wavekit_engines.errors import MisuseError

WriterFactory = Callable[[Decoder], Writer]


@dataclass(frozen=True)
class Job:
    """What to calibrate and how."""

    model: str
    """A Hugging Face folder, or a repository id where the hub can be reached."""
    prompts: PromptFile
    out: Path
    measure: MeasureSettings = field(default_factory=MeasureSettings)
    select: SelectSettings = field(default_factory=SelectSettings)
    device: str = "cpu"
    unfinished: Unfinished = "refuse"
    """What to do with an unfinished run in ``out``."""
    max_minutes: float | None = None
    command: str = ""
    """The command line, for the record."""


def calibrate(
    job: Job, progress: Progress | None = None, make_writer: WriterFactory = transformers_writer
) -> Calibration:
    """Measure the model and choose its boundaries; files appear in ``job.out`` at the end.

    Args:
        job: what to do.
        progress: told about every step.
        make_writer: gives the function that writes answers with the opened model.

    Raises:
        CalibrationPausedError: Ctrl-C, or out of time; ``unfinished="resume"`` goes on from there.
        WavekitError: anything a user can mend.
    """
    begun = time.monotonic()
    watched = _with_deadline(progress, begun, job.max_minutes)
    try:
        return _calibrate(job, watched, make_writer, begun)
    except KeyboardInterrupt:
        raise CalibrationPausedError(
            "interrupted; what is done is kept: give the same command with --resume to go on"
        ) from None


def _calibrate(job: Job, progress: Progress, make_writer: WriterFactory, begun: float) -> Calibration:
    checkpoint = open_checkpoint(job.model)
    decoder, tokenizer = open_decoder(job.model, job.device, job.measure.dtype)
    check_size(job.select.size, candidate_boundaries(job.select, decoder.num_layers))
    for members in job.select.user_sets:
        check_members(members, decoder.num_layers)
    costs = _costs(decoder, job.select)
    context = int(getattr(decoder.model.config.get_text_config(), "max_position_embeddings", None) or 1 << 20)
    encoded = encode_prompts(tokenizer, job.prompts, job.measure, context)
    check_parts(decoder, encoded.token_ids[0])

    _make_folder(job.out)
    origin = Origin(checkpoint.name, checkpoint.digest(), job.prompts, job.prompts.sha256, job.command)
    with held(job.out):
        state = RunState(job.out / "state", _key(origin, job.measure), job.unfinished)
        writer = make_writer(decoder)
        texts = complete_texts(encoded, job.measure, tokenizer, writer, state, progress)
        sample = _sample(texts, job.measure)
        lens_slots = np.sort(sample.order[: job.measure.readiness_tokens])
        arrays = measure(decoder, texts, sample, lens_slots, state, job.measure.batch_size, progress)
        findings = _analyse(job, decoder, costs, encoded, texts, sample, arrays, progress)
        calibration, matrices = summarise(decoder, origin, findings, job.measure, job.select, time.monotonic() - begun)
        calibration.save(job.out, matrices)
        write_report(calibration, matrices, job.out)
        state.remove()
        return load_calibration(job.out)


def _analyse(
    job: Job,
    decoder: Decoder,
    costs: StageCosts,
    encoded: EncodedPrompts,
    texts: Sequence[Text],
    sample: PositionSample,
    arrays: MeasuredArrays,
    progress: Progress,
) -> Findings:
    """Everything that is computed from the measured arrays."""
    kept, threshold = keep_tokens(np.asarray(arrays.entropy), job.select.filter)
    statistics, choice = _statistics_and_choice(job, arrays, kept, sample.sequence[kept], progress)
    agrees = np.asarray(arrays.lens == arrays.lens[:, -1:])
    return Findings(
        encoded=encoded,
        tokens_read=sum(len(t.token_ids) for t in texts),
        eligible=sample.eligible,
        entropies=np.asarray(arrays.entropy),
        kept=len(kept),
        threshold=threshold,
        statistics=statistics,
        choice=choice,
        agrees=agrees,
        readiness=measure_readiness(agrees),
        costs=costs,
    )


def _statistics_and_choice(
    job: Job, arrays: MeasuredArrays, kept: NDArray[np.int64], sequence_of: NDArray[np.int64], progress: Progress
) -> tuple[Statistics, Choice]:
    # float64 sums and eigenvalues are not there on every kind of device
    device = torch.device(job.device if job.device.startswith("cuda") else "cpu")
    with torch.inference_mode():
        grams = gram_stack(arrays.rows, kept, device, progress)
        statistics = compute_statistics(grams, job.select.alpha, progress)
        return statistics, choose(statistics, sequence_of, job.select, job.measure.seed, progress)


def _sample(texts: Sequence[Text], settings: MeasureSettings) -> PositionSample:
    ranges = [t.eligible(settings.positions, settings.skip_first) for t in texts]
    return sample_positions(ranges, settings.sample_tokens, settings.seed)


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise MisuseError(f"cannot write to {folder}: {error.strerror}; choose another -o") from None


def _costs(decoder: Decoder, settings: SelectSettings) -> StageCosts:
    layers = settings.layer_costs or (1.0,) * decoder.num_layers
    head = decoder.head_in_layers if settings.head_cost is None else settings.head_cost
    costs = StageCosts(tuple(layers), head)
    costs.check_layers(decoder.num_layers)
    return costs


def _key(origin: Origin, settings: MeasureSettings) -> dict[str, Any]:
    """What must not change between an interrupted run and its resumption."""
    return {"model": origin.checkpoint_digest, "prompts": origin.prompts_sha256, **asdict(settings)}


def _with_deadline(progress: Progress | None, begun: float, max_minutes: float | None) -> Progress:
    def report(what: str, done: int, total: int) -> None:
        if progress is not None:
            progress(what, done, total)
        if max_minutes is not None and time.monotonic() - begun > 60.0 * max_minutes:
            raise CalibrationPausedError(
                f"stopped after {max_minutes:g} minutes while {what} ({done} of {total}); "
                "give the same command with --resume to go on",
            )

    return report
