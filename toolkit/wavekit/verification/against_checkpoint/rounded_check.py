"""Layers whose weights are rounded, computed in numpy from the weights as they are stored.

Against the checkpoint such a layer differs by what its weights were rounded by, which hides all but gross faults. With
the stored weights on both sides only the rounding of activations is left.
"""

from pathlib import Path

import numpy as np

from wavekit.verification.against_checkpoint.drift import relative_rows
from wavekit.verification.against_checkpoint.explain import closest_assumption
from wavekit.verification.against_checkpoint.half_layers import HalfLayer, HalfName
from wavekit.verification.against_checkpoint.reference import States
from wavekit.verification.against_checkpoint.stored import StoredWeights
from wavekit.verification.findings import Check
from wavekit_engines.bundle import Manifest
from wavekit_engines.engine import Array
from wavekit_engines.errors import BundleError
from wavekit_engines.weights import DecoderWeights

_ALLOWED = {"fp16": 2e-2, "int8": 2e-1, "int4": 2e-1}
"""Activations are rounded to 8 bits block by block: by up to 1/254 of the largest of a block, which may be many times
the others. Median over tokens, over what the half adds.
"""
_NAME = "layers as stored"


def check_rounded(folder: Path, manifest: Manifest, weights: DecoderWeights, states: States) -> Check:
    """Every half layer on the states that the engines gave it; ``weights`` tells shapes and roles, not values."""
    worst, allowed = (0.0, ""), _ALLOWED[manifest.engine.precision]
    for stage in manifest.stages:
        stored = StoredWeights(folder / stage.graph.file)
        for layer in range(stage.first, stage.last):
            try:
                roles = {role: _read(stored, manifest, weights, layer, role) for role in weights.layer_roles()}
            except (KeyError, ValueError):
                raise BundleError(f"a weight of layer {layer} cannot be read back") from None
            for name in ("attention", "mlp"):
                half = HalfLayer(name, weights.spec, weights.spec.layers[layer], roles)
                before, after = _sides(states, name, layer)
                off = float(np.median(relative_rows(after, half.run(before), after - before)))
                if off > allowed:
                    why = closest_assumption(half, before, after, 0.6) or "no single setting explains it"
                    says = f"layer {layer}'s {name} is off by {off:.2g} from what its stored weights give: {why}"
                    return Check("checkpoint", _NAME, "FAIL", says)
                worst = max(worst, (off, f"layer {layer}'s {name}"))
    says = f"every half layer adds what its stored weights give, to {worst[0]:.1g} ({worst[1]}; {allowed:g} allowed)"
    return Check("checkpoint", _NAME, "pass", says)


def _sides(states: States, name: HalfName, layer: int) -> tuple[Array, Array]:
    if name == "attention":
        return states.entering[layer], states.middle[layer]
    return states.middle[layer], states.leaving[layer]


def _read(stored: StoredWeights, manifest: Manifest, weights: DecoderWeights, layer: int, role: str) -> Array:
    shape, name = weights.layer(layer, role).shape, f"layers.{layer}.{role}"
    if len(shape) == 1:
        return stored.array(name).astype(np.float32)
    return stored.rows(name, shape[1], manifest.engine.precision, 0, shape[0], table=False)
