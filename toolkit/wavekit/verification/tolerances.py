"""How far numbers may differ before it is a fault, by the precision of the engines, and where each figure comes from.

=============  =======================================================================================================
``passes``     Largest difference of a logit between two ways to run the same text in the same engines, over the
               largest logit. Kernels sum in another order for one row than for many: a few units in the last place of
               float32 or float16 in every layer. int8 and int4 engines round activations to 8 bits block by block, so
               such a unit can move an activation by 1/254 of the largest in its block; in small models, whose products
               sum few terms, that adds up to 6 % of the largest logit (`tests/integration/test_precisions.py`).
``layer``      What one half of a layer may add differently from the checkpoint, given the same state: root mean square
               over that of what it adds. Rounding for fp32 and fp16; the stored weights' own error and that of 8-bit
               activations for int8 and int4, which only gross faults exceed; so these are computed with the stored
               weights too (`against_checkpoint.rounded_check`).
``drift``      The same for all layers together, over the state. Only fp32 and fp16 are held to it: where weights are
               rounded, drift is what was asked for.
``logits``     Largest difference of a logit from the checkpoint's, over the largest logit.
=============  =======================================================================================================

Greedy texts in float32 may part from the reference where its two best logits are within `TIE`: sums in another order
move logits of order 10 by up to 1e-4, and each of the two may move.
"""

from dataclasses import dataclass

from wavekit_engines.bundle import EngineInfo

TIE = 1e-3
"""Top-2 logit margin within which float32 sums in another order may pick the other token."""


@dataclass(frozen=True)
class Tolerance:
    """Relative differences that rounding explains; None: not held to any."""

    passes: float
    layer: float
    drift: float | None
    logits: float | None


_FP32 = Tolerance(passes=1e-4, layer=1e-4, drift=1e-3, logits=1e-3)
_FP16 = Tolerance(passes=2e-2, layer=5e-2, drift=5e-2, logits=5e-2)
_INT8 = Tolerance(passes=1e-1, layer=3e-1, drift=None, logits=None)
_INT4 = Tolerance(passes=1.5e-1, layer=1.0, drift=None, logits=None)
_BY_PRECISION = {"fp32": _FP32, "fp16": _FP16, "int8": _INT8, "int4": _INT4}
_ORDER = tuple(_BY_PRECISION)


def tolerance_of(engine: EngineInfo) -> Tolerance:
    """What the coarser of a bundle's two precisions allows."""
    return _BY_PRECISION[max(engine.precision, engine.head_precision, key=_ORDER.index)]


def rounds(engine: EngineInfo) -> bool:
    """Whether passes of other sizes give other numbers, beyond the order of float32 sums."""
    return {engine.precision, engine.head_precision} != {"fp32"}
