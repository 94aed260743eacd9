"""Texts for training, written in batches by the engines of a bundle made for it.

On a processor that is several times faster than transformers. The bundle lies in a temporary folder beside the run and
is removed when the texts are written; it computes in float32, so that the draft learns what the target writes and not
what a quantized copy would. It puts out the tapped boundaries, so that the target need not run over the texts again.
"""

import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from wavekit.decoding.batch_writer import BatchWriter
from wavekit.decoding.sampling import SamplingParams
from wavekit.llm import available_cores
from wavekit_calibration.training.draft_texts import Answered, Request, TextWriter, WrittenStates
from wavekit_engines.bundle import open_bundle
from wavekit_engines.checkpoint import open_checkpoint
from wavekit_engines.export import ExportOptions, Progress, export_bundle
from wavekit_engines.ort_engine import OrtEngine

SLOTS = 48


def engine_writer(
    model: str, folder: Path, taps: tuple[int, ...], threads: int | None, progress: Progress
) -> TextWriter:
    """A writer that answers with wavekit's own engines and tells the states at ``taps``."""

    def write(requests: Sequence[Request], max_new_tokens: int, answered: Answered) -> None:
        temporary = Path(tempfile.mkdtemp(prefix="writer-", dir=folder))
        try:
            options = ExportOptions(taps=taps)
            export_bundle(open_checkpoint(model), temporary / "bundle", options, progress=progress)
            bundle = open_bundle(temporary / "bundle", check_hashes=False)
            manifest, count = bundle.manifest, threads or available_cores()
            stages = [OrtEngine(bundle.path, stage.graph, count) for stage in manifest.stages]
            writer = BatchWriter(manifest, stages, OrtEngine(bundle.path, manifest.head, count), SLOTS)
            writer.write(
                [request.prompt for request in requests],
                max_new_tokens,
                manifest.generation.stop_token_ids,
                lambda index: SamplingParams(temperature=requests[index].temperature, seed=requests[index].seed),
                lambda index, answer: answered(
                    requests[index],
                    answer.tokens,
                    WrittenStates(answer.boundaries, np.array(answer.likeliest)),
                ),
                keep_states=True,
            )
        finally:
            shutil.rmtree(temporary, ignore_errors=True)

    return write
