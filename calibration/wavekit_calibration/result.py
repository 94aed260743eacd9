"""calibration.json and matrices.npz: what a calibration found, to be read by people, export and training.

The JSON is versioned and checked whole when it is read: field by field, and its numbers against the number of layers.
The arrays beside it are for research: ``cka`` and ``frobenius`` [L, L], ``token_entropy`` [S], ``ead`` [T],
``agrees`` [T, L] and ``bootstrap`` [draws, sets] (L = N + 1 boundaries, S sampled and T readiness tokens). Reading
needs numpy and msgspec only, no torch.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from wavekit_calibration.errors import CalibrationFileError
from wavekit_calibration.exits import ExitPlan
from wavekit_calibration.prompts import LeftOut
from wavekit_calibration.sets import BeamCheck, BoundarySet, ScoredSet, SetRow
from wavekit_calibration.settings import MeasureSettings, SelectSettings
from wavekit_engines.atomic import write_file

SCHEMA_VERSION = 1
JSON_NAME = "calibration.json"
MATRICES_NAME = "matrices.npz"
NUMBERING = (
    "boundary 0 is the embedding's output, boundary k the output of decoder layer k - 1, "
    "boundary N the output of the last layer before the final norm"
)


@dataclass(frozen=True)
class ModelInfo:
    """The model that was measured."""

    name: str
    checkpoint_digest: str
    """See `wavekit_engines.checkpoint.Checkpoint.digest`."""
    architecture: str
    num_layers: int
    hidden_size: int
    vocab_size: int
    dtype: str


@dataclass(frozen=True)
class Provenance:
    """What made the calibration."""

    command: str
    versions: dict[str, str]
    device: str
    created: str
    seconds: float
    peak_memory_mb: int | None
    """Peak resident memory of the process; None where the system does not tell."""


@dataclass(frozen=True)
class Measured:
    """What was measured on what."""

    prompts: str
    prompts_sha256: str
    prompts_used: int
    prompts_too_long: int
    prompts_not_drawn: int
    lines_left_out: int
    """Lines of the prompt file that could not be used."""
    left_out: tuple[LeftOut, ...]
    """The first 20 of them."""
    tokens_read: int
    positions_eligible: int
    tokens_sampled: int
    tokens_kept: int
    """Of the sampled ones, after the entropy filter."""
    entropy_threshold: float
    """Nats."""


@dataclass(frozen=True)
class Depths:
    """By boundary 0..N, in nats."""

    entropy: tuple[float, ...]
    concatenation_entropy: tuple[float, ...]
    """Of boundaries 0..k together."""


@dataclass(frozen=True)
class Selection:
    """The choice, and everything it was compared with."""

    boundaries: BoundarySet
    by_size: tuple[ScoredSet, ...]
    """The best set of every size 1..m."""
    compartments: tuple[tuple[int, int], ...]
    """First and last boundary of each."""
    compartment_similarity: float
    """Mean CKA within the compartments."""
    sets: tuple[SetRow, ...]
    """Best score first."""
    check: BeamCheck | None
    """None where there are too many sets to score all."""
    verdict: str


@dataclass(frozen=True)
class ReadinessSummary:
    """When tokens become predictable, and what exits that suggests; lists go by boundary 0..N."""

    tokens: int
    agreement: tuple[float, ...]
    ead_histogram: tuple[int, ...]
    mean_ead: float
    oracle_saving: float
    """1 - mean EAD / N."""
    layer_costs: tuple[float, ...]
    head_cost: float
    plans: tuple[ExitPlan, ...]
    """The best stage ends for 2, 3, ... stages."""
    even_plans: tuple[ExitPlan, ...]
    """Stages of equal length, for comparison."""


@dataclass(frozen=True)
class Calibration:
    """All that a calibration found."""

    model: ModelInfo
    made_by: Provenance
    measure: MeasureSettings
    select: SelectSettings
    measured: Measured
    depths: Depths
    selection: Selection
    readiness: ReadinessSummary
    numbering: str = NUMBERING
    schema_version: int = SCHEMA_VERSION

    @property
    def boundaries(self) -> BoundarySet:
        """The chosen boundaries: what a draft head is to be fed with."""
        return self.selection.boundaries

    def exits(self, stages: int) -> tuple[int, ...]:
        """The stage ends recommended for so many stages, the last one N.

        Raises:
            CalibrationFileError: the calibration has no plan for that number.
        """
        plans = {len(p.exits): p.exits for p in self.readiness.plans}
        if stages not in plans:
            known = ", ".join(map(str, plans)) or "none"
            raise CalibrationFileError(f"the calibration has exits for {known} stages, not for {stages}")
        return plans[stages]

    def check_model(self, checkpoint_digest: str) -> None:
        """Refuse to be used for another model than the one measured.

        Raises:
            CalibrationFileError: the digests differ.
        """
        if checkpoint_digest != self.model.checkpoint_digest:
            raise CalibrationFileError(
                f"the calibration was made for another model ({self.model.name}, {self.model.checkpoint_digest[:8]}, "
                f"not {checkpoint_digest[:8]}); run wavekit calibrate on this one"
            )

    def save(self, folder: Path, matrices: Mapping[str, NDArray[Any]]) -> None:
        """Write both files to ``folder``, each under a temporary name first; the JSON last."""
        temporary = folder / (MATRICES_NAME + ".tmp")
        with temporary.open("wb") as stream:
            np.savez_compressed(stream, **matrices)  # type: ignore[arg-type]
        os.replace(temporary, folder / MATRICES_NAME)
        write_file(folder / JSON_NAME, msgspec.json.format(msgspec.json.encode(self), indent=1) + b"\n")


@dataclass(frozen=True)
class _Header:
    schema_version: int


def load_calibration(path: Path) -> Calibration:
    """Read and check a calibration.

    Args:
        path: the folder that ``wavekit calibrate`` wrote, or the JSON file in it.

    Raises:
        CalibrationFileError: missing, damaged, or of another schema; the message names the field.
    """
    file = path / JSON_NAME if path.is_dir() else path
    if not file.is_file():
        raise CalibrationFileError(f"no calibration at {path}; make one with wavekit calibrate MODEL -o {path}")
    content = file.read_bytes()
    try:
        version = msgspec.json.decode(content, type=_Header).schema_version
        if version != SCHEMA_VERSION:
            raise CalibrationFileError(
                f"{file} has schema {version} and this wavekit reads {SCHEMA_VERSION}; "
                + ("update wavekit" if version > SCHEMA_VERSION else "calibrate again")
            )
        calibration = msgspec.json.decode(content, type=Calibration)
    except msgspec.MsgspecError as error:
        raise CalibrationFileError(f"{file} is damaged: {error}; calibrate again") from None
    problem = _first_contradiction(calibration)
    if problem:
        raise CalibrationFileError(f"{file} is damaged: {problem}; calibrate again")
    return calibration


def _first_contradiction(found: Calibration) -> str | None:
    layers = found.model.num_layers
    by_boundary: dict[str, tuple[float, ...]] = {
        "depths.entropy": found.depths.entropy,
        "depths.concatenation_entropy": found.depths.concatenation_entropy,
        "readiness.agreement": found.readiness.agreement,
        "readiness.ead_histogram": found.readiness.ead_histogram,
    }
    for name, values in by_boundary.items():
        if len(values) != layers + 1:
            return f"{name} has {len(values)} values for the {layers + 1} boundaries of {layers} layers"
    sets = {"selection.boundaries": found.selection.boundaries}
    sets |= {f"selection.sets[{i}]": s.boundaries for i, s in enumerate(found.selection.sets)}
    sets |= {f"readiness.plans[{i}]": p.exits for i, p in enumerate(found.readiness.plans)}
    for name, members in sets.items():
        if not members or list(members) != sorted(set(members)) or not 0 <= members[0] <= members[-1] <= layers:
            return f"{name}: {list(members)} are no boundaries of a model with {layers} layers, shallow to deep"
    for i, plan in enumerate(found.readiness.plans):
        if plan.exits[-1] != layers:
            return f"readiness.plans[{i}]: the stages {list(plan.exits)} do not end at boundary {layers}"
    return None
