"""The engines' states and logits against the checkpoint's, text by text, and what is wrong where they differ.

States of one text are in memory at a time; what stays of it are relative differences by layer and token.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from wavekit.llm import LLM
from wavekit.verification.against_checkpoint.drift import DriftRows, TextDrift, by_boundary, measure, relative_rows
from wavekit.verification.against_checkpoint.explain import explain_half, nearest_boundary
from wavekit.verification.against_checkpoint.half_layers import HalfName
from wavekit.verification.against_checkpoint.head_check import HeadCheck
from wavekit.verification.against_checkpoint.reference import Reference
from wavekit.verification.against_checkpoint.rounded_check import check_rounded
from wavekit.verification.against_checkpoint.trace import TracedEngines
from wavekit.verification.findings import Check, Divergence, Drift
from wavekit.verification.lossless import Told, token_text
from wavekit.verification.prompts import Sample
from wavekit.verification.tolerances import TIE, Tolerance, rounds, tolerance_of
from wavekit_engines.engine import Array
from wavekit_engines.weights import DecoderWeights

_MOST = 90  # percentile of tokens that rounded weights are judged by: single tokens may hardly be changed by a layer
_JUMP = 4.0


@dataclass
class StatesCheck:
    """Everything compared on the same texts."""

    llm: LLM
    folder: Path
    reference: Reference
    weights: DecoderWeights
    engines: TracedEngines
    wrong: dict[str, str]
    """What is known to be wrong with stored weights, by name."""
    divergences: list[Divergence] = field(default_factory=list)
    _texts: list[list[int]] = field(default_factory=list)
    _rows: list[DriftRows] = field(default_factory=list)
    _embedding: tuple[float, str] = (0.0, "")
    _taps: dict[int, list[tuple[int, float, float]]] = field(default_factory=dict)
    _logits: tuple[float, float] = (0.0, 0.0)
    _same: int = 0
    _positions: int = 0

    def compare(self, samples: Sequence[Sample], texts: Sequence[list[int]], told: Told) -> None:
        """Run all texts."""
        self._head = HeadCheck(self.llm, self.reference, self.weights, self.wrong)
        for number, (sample, text) in enumerate(zip(samples, texts, strict=True)):
            told("comparing states", number, len(texts))
            measured = measure(self.engines, self.reference, text)
            self._texts.append(text)
            self._rows.append(measured.rows)
            self._take_embedding(measured)
            self._take_boundaries(measured)
            self._take_logits(sample, text, measured)

    @property
    def drift(self) -> Drift:
        """What the report draws."""
        rows = DriftRows.of_all(self._rows)
        largest = self._logits[0] / max(self._logits[1], 1e-30)
        return Drift(rows.mlp.shape[1], by_boundary(rows), largest, self._same / max(self._positions, 1))

    def checks(self) -> list[Check]:
        """One for each thing compared."""
        allowed = tolerance_of(self.llm.manifest.engine)
        return [
            self._embedding_check(),
            self._layers_check(allowed),
            self._boundaries_check(),
            self._head.check(),
            *self._rounded_check(),
            self._drift_check(allowed),
            *self._text_check(),
        ]

    def _take_embedding(self, measured: TextDrift) -> None:
        ours, theirs = measured.engines.states.boundary(0), measured.checkpoint.boundary(0)
        worst = float(measured.rows.boundaries[0].max())
        if worst > self._embedding[0]:
            factor = float((ours * theirs).sum() / max(float((theirs * theirs).sum()), 1e-30))
            rest = float(np.median(relative_rows(ours, theirs * np.float32(factor), ours)))
            scaled = rest < 0.1 * abs(1 - factor)
            self._embedding = (
                worst,
                f"the embedding scale is lost: states are {factor:.4g} times the checkpoint's"
                if scaled
                else f"{np.count_nonzero(measured.rows.boundaries[0] > 0.5 * worst)} of {len(measured.ids)} tokens get "
                "another token's state, or one of another model",
            )

    def _embedding_check(self) -> Check:
        worst, why = self._embedding
        allowed = {"fp32": 1e-5, "fp16": 5e-3, "int8": 5e-2, "int4": 4e-1}[self.llm.manifest.engine.head_precision]
        if worst > allowed:
            stored = self.wrong.get("embedding")
            return Check("checkpoint", "embedding", "FAIL", f"the embedding {stored}" if stored else why)
        return Check("checkpoint", "embedding", "pass", f"boundary 0 agrees to {worst:.1g}")

    def _layers_check(self, allowed: Tolerance) -> Check:
        rows = DriftRows.of_all(self._rows)
        halves: dict[HalfName, Array] = {"attention": rows.attention, "mlp": rows.mlp}
        exact = not rounds(self.llm.manifest.engine)
        worst = {name: self._judged(part) for name, part in halves.items()}
        failed = [
            (layer, name)
            for layer in range(len(rows.mlp))
            for name, values in worst.items()
            if values[layer] > allowed.layer or self._jumps(values, layer, allowed.layer)
        ]
        if not failed:
            most = max(float(values.max()) for values in worst.values())
            says = f"every half layer adds the same to the same state, to {most:.1g} ({allowed.layer:g} allowed)"
            return Check("checkpoint", "layers", "pass", says)
        layer, name = failed[0]
        others = f" (and {len(failed) - 1} more halves of layers)" if len(failed) > 1 else ""
        return Check(
            "checkpoint",
            "layers",
            "FAIL",
            f"drift begins at layer {layer}'s {name}{others}, which is off by {worst[name][layer]:.2g}: "
            f"{self._why(layer, name, exact)}",
        )

    def _rounded_check(self) -> list[Check]:
        """With the shortest text; nothing where weights are those of the checkpoint."""
        manifest = self.llm.manifest
        if manifest.engine.precision == "fp32":
            return []
        states = self.engines.run(min(self._texts, key=len)).states
        return [check_rounded(self.folder, manifest, self.weights, states)]

    def _judged(self, rows: Array) -> Array:
        """By layer: the worst token where arithmetic is exact, and all but a few of the tokens where it is not."""
        values: Array = np.percentile(rows, _MOST, axis=1) if rounds(self.llm.manifest.engine) else rows.max(axis=1)
        return values

    def _jumps(self, values: Array, layer: int, allowed: float) -> bool:
        """Whether a layer stands out from the others, though what it does might be rounding."""
        others = np.delete(values, layer)
        return bool(len(others) and values[layer] > _JUMP * np.median(others) and values[layer] > allowed / 3)

    def _why(self, layer: int, name: HalfName, exact: bool) -> str:
        roles = (
            ("attention", "qkv", "output", "q_norm", "k_norm") if name == "attention" else ("mlp", "gate_up", "down")
        )
        for stored, what in self.wrong.items():
            if stored.startswith(f"layers.{layer}.") and stored.split(".")[2].startswith(roles):
                return f"its {stored.split('.')[2]} {what}"
        rows = [getattr(text, name)[layer].max() for text in self._rows]
        measured = measure(self.engines, self.reference, self._texts[int(np.argmax(rows))])
        return explain_half(self.weights, layer, name, measured, exact)

    def _take_boundaries(self, measured: TextDrift) -> None:
        theirs = [measured.checkpoint.boundary(k) for k in range(len(measured.rows.boundaries))]
        for number, states in measured.engines.put_out.items():
            best, distance = nearest_boundary(states, theirs)
            own = float(np.median(relative_rows(states, theirs[number], theirs[number])))
            self._taps.setdefault(number, []).append((best, distance, own))

    def _boundaries_check(self) -> Check:
        wrong = []
        for number, seen in sorted(self._taps.items()):
            best = max({b for b, _, _ in seen}, key=[b for b, _, _ in seen].count)
            distance, own = (float(np.median([row[i] for row in seen])) for i in (1, 2))
            if best != number and own > 2 * distance + 1e-6:
                by = best - number
                off = "off by one" if abs(by) == 1 else f"off by {abs(by)}"
                wrong.append(
                    f"boundary {number} does not match the checkpoint's ({own:.2g}), it is the checkpoint's boundary "
                    f"{best} ({distance:.2g}): the tap is {off}"
                )
        if wrong:
            return Check("checkpoint", "boundaries", "FAIL", "; ".join(wrong))
        listed = ", ".join(map(str, sorted(self._taps)))
        return Check("checkpoint", "boundaries", "pass", f"what is put out as {listed} is the checkpoint's there")

    def _take_logits(self, sample: Sample, text: list[int], measured: TextDrift) -> None:
        layers, prompt = len(measured.rows.mlp), len(sample.ids)
        theirs = self.reference.logits(measured.checkpoint.boundary(layers)[prompt - 1 : -1])
        ours = self._head.engines(measured.engines.states.boundary(layers)[prompt - 1 : -1])
        largest, scale = self._logits
        self._logits = max(largest, float(np.abs(ours - theirs).max())), max(scale, float(np.abs(theirs).max()))
        self._same += int((ours.argmax(1) == theirs.argmax(1)).sum())
        self._positions += len(theirs)
        self._head.take(measured.checkpoint.boundary(layers)[prompt - 1 : -1], theirs)
        if rounds(self.llm.manifest.engine):
            return  # another model numerically, which writes texts of its own
        for position, (token, row) in enumerate(zip(text[prompt:], theirs, strict=True)):
            best = int(row.argmax())
            if token != best:
                self._diverges(sample, position, (best, token), float(row[best] - row[token]))
                break

    def _diverges(self, sample: Sample, position: int, tokens: tuple[int, int], margin: float) -> None:
        best, token = tokens
        texts = token_text(self.llm, best), token_text(self.llm, token)
        where = ("transformers", "greedy", sample.name, position)
        self.divergences.append(Divergence(*where, best, token, *texts, margin, TIE, margin <= TIE))

    def _drift_check(self, allowed: Tolerance) -> Check:
        drift = self.drift
        worst, last = max(row.worst for row in drift.boundaries), drift.boundaries[-1].drift
        says = (
            f"median drift at the last boundary {last:.1g}, logits {drift.logits:.1g}, same best token {drift.top1:.1%}"
        )
        if allowed.drift is None or allowed.logits is None:
            return Check("checkpoint", "drift", "pass", f"{says} (reported: rounded weights are another model)")
        if worst > allowed.drift or drift.logits > allowed.logits:
            return Check("checkpoint", "drift", "FAIL", f"{says}; up to {allowed.drift:g} is rounding")
        return Check("checkpoint", "drift", "pass", f"{says} (up to {allowed.drift:g} is rounding)")

    def _text_check(self) -> list[Check]:
        if rounds(self.llm.manifest.engine):
            return []
        unexplained = [found for found in self.divergences if not found.explained]
        if unexplained:
            first = unexplained[0]
            return [
                Check("checkpoint", "greedy texts", "FAIL", f"{len(unexplained)} of {len(self._texts)} texts are not "
                      f"those of transformers; the first: {first.prompt}, token {first.position + 1}: "
                      f"{first.found_text!r} instead of {first.expected_text!r}, margin {first.margin:.3g}")
            ]  # fmt: skip
        ties = f", {len(self.divergences)} part where rounding decides" if self.divergences else ""
        return [
            Check("checkpoint", "greedy texts", "pass", f"{len(self._texts)} texts are those of transformers{ties}")
        ]
