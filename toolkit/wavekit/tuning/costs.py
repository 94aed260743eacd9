"""What passes cost on this machine: curves over the rows of a pass, and the stages with all lanes at work."""

from dataclasses import dataclass

from wavekit.decoding.decoder import Decoder
from wavekit.decoding.pass_costs import MEASURED, PassCosts
from wavekit.decoding.stage_costs import StageCosts, measure_stage_costs


@dataclass(frozen=True)
class CostCurves:
    """Milliseconds of a pass by its rows, for greedy decoding; ``stages`` (in seconds) where there are exits."""

    target: tuple[tuple[int, float], ...]
    draft: tuple[tuple[int, float], ...]
    stages: StageCosts | None


def measure_costs(decoder: Decoder, on_lanes: Decoder | None) -> CostCurves:
    """Measure for some seconds; ``on_lanes``: the same bundle with exits, its stages on lanes."""
    draft = _curve(decoder.draft_costs()) if decoder.manifest.draft is not None else ()
    stages = measure_stage_costs(on_lanes) if on_lanes is not None else None
    return CostCurves(_curve(decoder.target_costs(greedy=True)), draft, stages)


def _curve(costs: PassCosts) -> tuple[tuple[int, float], ...]:
    return tuple((rows, costs.of(rows) * 1e3) for rows in MEASURED)
