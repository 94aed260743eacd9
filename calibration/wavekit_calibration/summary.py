"""Puts what was found into the form that is saved: one `Calibration` and a set of arrays."""

import sys
from dataclasses import dataclass
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import numpy as np
from numpy.typing import NDArray

from wavekit_calibration.choose import Choice
from wavekit_calibration.exits import StageCosts, best_exits, even_exits, plan_for
from wavekit_calibration.model import Decoder
from wavekit_calibration.prompts import PromptFile
from wavekit_calibration.readiness import Readiness
from wavekit_calibration.result import (
    Calibration,
    Depths,
    Measured,
    ModelInfo,
    Provenance,
    ReadinessSummary,
    Selection,
)
from wavekit_calibration.settings import MeasureSettings, SelectSettings
from wavekit_calibration.statistics import Statistics
from wavekit_calibration.texts import EncodedPrompts
from wavekit_calibration.verdict import verdict


@dataclass(frozen=True)
class Origin:
    """What a calibration is made from."""

    model_name: str
    checkpoint_digest: str
    prompts: PromptFile
    prompts_sha256: str
    command: str


@dataclass(frozen=True)
class Findings:
    """Everything one run found."""

    encoded: EncodedPrompts
    tokens_read: int
    eligible: int
    entropies: NDArray[np.float64]
    kept: int
    threshold: float
    statistics: Statistics
    choice: Choice
    agrees: NDArray[np.bool_]
    readiness: Readiness
    costs: StageCosts


def summarise(
    decoder: Decoder,
    origin: Origin,
    findings: Findings,
    measure: MeasureSettings,
    select: SelectSettings,
    seconds: float,
) -> tuple[Calibration, dict[str, NDArray[Any]]]:
    """Return the calibration and the arrays of ``matrices.npz``."""
    choice = findings.choice
    calibration = Calibration(
        model=_model(decoder, origin),
        made_by=_made_by(decoder, origin, seconds),
        measure=measure,
        select=select,
        measured=_measured(origin, findings),
        depths=Depths(
            tuple(findings.statistics.entropy.tolist()), tuple(findings.statistics.concatenation_entropy.tolist())
        ),
        selection=Selection(
            boundaries=choice.boundaries,
            by_size=choice.by_size,
            compartments=choice.compartments,
            compartment_similarity=choice.compartment_similarity,
            sets=choice.rows,
            check=choice.check,
            verdict=verdict(choice),
        ),
        readiness=_readiness(findings, select.max_stages),
    )
    return calibration, _matrices(findings)


def _model(decoder: Decoder, origin: Origin) -> ModelInfo:
    return ModelInfo(
        name=origin.model_name,
        checkpoint_digest=origin.checkpoint_digest,
        architecture=type(decoder.model).__name__,
        num_layers=decoder.num_layers,
        hidden_size=decoder.hidden_size,
        vocab_size=decoder.vocab_size,
        dtype=str(decoder.model.dtype).removeprefix("torch."),
    )


def _made_by(decoder: Decoder, origin: Origin, seconds: float) -> Provenance:
    versions = {"python": ".".join(map(str, sys.version_info[:3]))}
    for package in ("wavekit", "torch", "transformers", "numpy"):
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = "not installed"
    return Provenance(
        command=origin.command,
        versions=versions,
        device=str(decoder.input_device),
        created=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        seconds=round(seconds, 1),
        peak_memory_mb=_peak_memory_mb(),
    )


def _peak_memory_mb() -> int | None:
    try:
        import resource
    except ImportError:
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak // (1 << 20) if sys.platform == "darwin" else peak // 1024


def _measured(origin: Origin, findings: Findings) -> Measured:
    return Measured(
        prompts=origin.prompts.name,
        prompts_sha256=origin.prompts_sha256,
        prompts_used=len(findings.encoded.prompts),
        prompts_too_long=findings.encoded.too_long,
        prompts_not_drawn=findings.encoded.not_drawn,
        lines_left_out=len(origin.prompts.left_out),
        left_out=origin.prompts.left_out[:20],
        tokens_read=findings.tokens_read,
        positions_eligible=findings.eligible,
        tokens_sampled=len(findings.entropies),
        tokens_kept=findings.kept,
        entropy_threshold=findings.threshold,
    )


def _readiness(findings: Findings, max_stages: int) -> ReadinessSummary:
    readiness, costs, agrees = findings.readiness, findings.costs, findings.agrees
    layers = readiness.num_layers
    stages = range(2, min(max_stages, layers) + 1)
    return ReadinessSummary(
        tokens=len(readiness.ead),
        agreement=tuple(readiness.agreement.tolist()),
        ead_histogram=tuple(readiness.histogram.tolist()),
        mean_ead=float(readiness.ead.mean()),
        oracle_saving=readiness.oracle_saving,
        layer_costs=costs.layers,
        head_cost=costs.head,
        plans=tuple(best_exits(agrees, readiness.ready, costs, k) for k in stages),
        even_plans=tuple(plan_for(even_exits(layers, k), agrees, readiness.ready, costs) for k in stages),
    )


def _matrices(findings: Findings) -> dict[str, NDArray[Any]]:
    matrices: dict[str, NDArray[Any]] = {
        "cka": findings.statistics.cka,
        "frobenius": findings.statistics.frobenius,
        "token_entropy": findings.entropies,
        "ead": findings.readiness.ead,
        "agrees": findings.agrees,
    }
    if findings.choice.bootstrap is not None:
        matrices["bootstrap"] = findings.choice.bootstrap.scores
    return matrices
