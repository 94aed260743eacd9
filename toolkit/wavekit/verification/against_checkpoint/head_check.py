"""The final norm and head alone: both sides given the checkpoint's states of the last boundary."""

import math

import numpy as np

from wavekit.llm import LLM
from wavekit.verification.against_checkpoint.reference import Reference
from wavekit.verification.findings import Check
from wavekit.verification.passes import passes
from wavekit_engines.engine import Array
from wavekit_engines.weights import DecoderWeights

_ALLOWED = {"fp32": 1e-4, "fp16": 3e-2, "int8": 1e-1, "int4": 3e-1}
_EPS = (0.0, 1e-12, 1e-8, 1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1)
_TOKENS = 256


class HeadCheck:
    """Collects logits of both sides over several texts."""

    def __init__(self, llm: LLM, reference: Reference, weights: DecoderWeights, wrong: dict[str, str]) -> None:
        """``wrong``: what is known to be wrong with stored weights, by name."""
        self._llm, self._reference, self._weights, self._wrong = llm, reference, weights, wrong
        self._worst = 0.0
        self._example: tuple[Array, Array] | None = None

    def engines(self, states: Array) -> Array:
        """The engines' logits [n, V] after states [n, H] of the last boundary."""
        dtype = self._llm.manifest.engine.compute_dtype
        with passes(self._llm.decoder, 1) as one:
            return one.logits(states.astype(dtype))

    def take(self, states: Array, expected: Array) -> None:
        """Compare on states [n, H] of the checkpoint, whose logits [n, V] are given."""
        found = self.engines(states)
        with np.errstate(invalid="ignore"):
            off = float(np.nan_to_num(np.abs(found - expected), nan=np.inf).max() / max(np.abs(expected).max(), 1e-30))
        if self._example is None or off > self._worst:
            self._worst, self._example = off, (states.copy(), found)

    def check(self) -> Check:
        """Pass, or what is wrong."""
        allowed = _ALLOWED[self._llm.manifest.engine.head_precision]
        if self._worst <= allowed:
            says = f"the same logits from the same states, to {self._worst:.1g} of the largest ({allowed:g} allowed)"
            return Check("checkpoint", "head", "pass", says)
        return Check("checkpoint", "head", "FAIL", f"logits are off by {self._worst:.2g} of the largest: {self._why()}")

    def _why(self) -> str:
        spec = self._weights.spec
        for name in ("embedding" if spec.tied_head else "head", "final_norm"):
            if name in self._wrong:
                return f"the {'head' if name != 'final_norm' else 'final norm'} {self._wrong[name]}"
        assert self._example is not None
        states, found = self._example
        tokens = min(_TOKENS, spec.vocab_size)
        rows, norm = self._weights["head"].read(0, tokens), self._weights["final_norm"].read()
        found = found[:, :tokens]

        def logits(eps: float = spec.norm_eps, offset: float = 0.0, scale: float = spec.logit_scale,
                   cap: float | None = spec.logit_softcap) -> Array:  # fmt: skip
            x = states / np.sqrt(np.mean(states * states, -1, keepdims=True) + np.float32(eps))
            out: Array = (x * (norm + np.float32(offset))) @ rows.T * np.float32(scale)
            return out if cap is None else np.tanh(out / cap) * cap

        tried = {f"the final norm's epsilon is {eps:g}, the checkpoint's is {spec.norm_eps:g}": logits(eps=eps)
                 for eps in _EPS if not math.isclose(eps, spec.norm_eps, rel_tol=1e-3)}  # fmt: skip
        tried |= {f"norm offset: the final norm's weights are {by:+g} off": logits(offset=by) for by in (1.0, -1.0)}
        tried["the scale of the logits is lost"] = logits(scale=1.0)
        tried["the soft cap of the logits is lost"] = logits(cap=None)
        errors = {name: float(np.abs(found - other).max()) for name, other in tried.items()}
        best = min(errors, key=lambda name: errors[name])
        if errors[best] < 0.1 * float(np.abs(found - logits()).max()):
            return best
        return "the head computes something else than the checkpoint's"
