"""A bundle's draft head against the folder it came from: its map, weights, taps, arithmetic, and how it drafts."""

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from wavekit.llm import LLM
from wavekit.verification.against_checkpoint.drift import relative_rows
from wavekit.verification.against_checkpoint.engine_draft import drafted_through, fed_rows
from wavekit.verification.against_checkpoint.reference import Reference
from wavekit.verification.against_checkpoint.stored import StoredWeights, Weight, difference
from wavekit.verification.against_checkpoint.torch_draft import DraftText, TorchDraft
from wavekit.verification.findings import Check, DraftFigures
from wavekit.verification.lossless import Told
from wavekit.verification.prompts import Sample
from wavekit_calibration.training.draft_loss import Acceptance
from wavekit_engines.bundle import DraftInfo, Manifest
from wavekit_engines.draft_spec import Draft, DraftSpec
from wavekit_engines.engine import Array
from wavekit_engines.quantization import Precision
from wavekit_engines.rope import scaled_rope

DEPTH = 5
_PAIRS = 48
_ROWS: dict[Precision, float] = {"fp32": 1e-3, "fp16": 5e-2, "int8": 2e-1, "int4": 6e-1}
_TAU: dict[Precision, float] = {"fp32": 0.01, "fp16": 0.05, "int8": 0.1, "int4": 0.25}
"""What tau may differ by, relative: a head of other precision drafts other tokens now and then."""
_BETTER = 1.2
"""A head that takes so many times fewer passes with its taps moved by one was trained with those."""
_LEAST_PASSES = 4
_LOGPROBS = 2e-2
"""What log-probabilities may differ by in fp32; rounded heads by twice what their rows may."""
_FUSED = {"qkv": ("q", "k", "v"), "output": ("o",), "gate_up": ("gate", "up"), "down": ("down",)}
_BASES = (1e2, 5e2, 1e3, 1e4, 1e5, 5e5, 1e6, 1e7)


@dataclasses.dataclass(frozen=True)
class _Array:
    """Weights in memory as `stored.Rows`."""

    array: Array

    @property
    def shape(self) -> tuple[int, ...]:
        return self.array.shape

    def read(self, start: int = 0, stop: int | None = None) -> Array:
        return self.array[start:stop]


class DraftCheck:
    """One bundle and one folder's head."""

    def __init__(self, llm: LLM, folder: Path, reference: Reference, draft: Draft) -> None:
        assert llm.manifest.draft is not None
        self._llm, self._info, self._draft = llm, llm.manifest.draft, draft
        self._stored = StoredWeights(folder / self._info.graph.file)
        self._reference, self._torch = reference, TorchDraft(reference, draft)
        self._wrong: str | None = None
        self.figures: DraftFigures | None = None

    def checks(self, samples: Sequence[Sample], texts: Sequence[Sequence[int]], told: Told) -> Iterator[Check]:
        """All checks; ``figures`` is there after the last."""
        yield self._taps()
        yield self._map()
        yield self._weights()
        chosen = [(len(sample.ids), text) for sample, text in zip(samples, texts, strict=True) if len(text) < 400] or [
            (len(samples[0].ids), texts[0])
        ]
        known = list[DraftText]()
        for number, (prompt, tokens) in enumerate(chosen):
            told("running the draft head", number, len(chosen))
            known.append(DraftText(prompt, tuple(tokens), self._reference.states(tokens)))
        yield self._arithmetic(max(known, key=lambda text: len(text.tokens)))
        yield self._tau(known)
        yield self._convention(known)

    def _taps(self) -> Check:
        ours, theirs = self._info.spec.boundaries, self._draft.spec.boundaries
        if ours == theirs:
            return Check("draft", "taps", "pass", f"boundaries {_listed(ours)}, as the draft's folder says")
        shifts = {a - b for a, b in zip(ours, theirs, strict=False)}
        off = ": off by one" if shifts in ({1}, {-1}) else ""
        says = f"the head is fed boundaries {_listed(ours)}, its folder says {_listed(theirs)}{off}: wrong tap"
        return Check("draft", "taps", "FAIL", says)

    def _map(self) -> Check:
        ours, theirs = self._stored.array("draft.target_ids"), self._draft.d2t + np.arange(self._draft.d2t.size)
        if ours.shape != theirs.shape:
            return Check("draft", "d2t", "FAIL", f"d2t holds {ours.size} tokens, the draft's folder {theirs.size}")
        wrong = np.flatnonzero(ours != theirs)
        if not wrong.size:
            return Check("draft", "d2t", "pass", f"{ours.size} draft tokens lead where the draft's folder says")
        kind = "are swapped" if np.array_equal(np.sort(ours), np.sort(theirs)) else "lead elsewhere"
        first = int(wrong[0])
        return Check(
            "draft",
            "d2t",
            "FAIL",
            f"d2t differs from the draft's: {wrong.size} of {ours.size} entries {kind}, the first is draft token "
            f"{first}, which leads to {int(ours[first])} instead of {int(theirs[first])}",
        )

    def _weights(self) -> Check:
        wrong, block = list[str](), self._llm.manifest.engine.block_size
        for weight in _weights_of(self._draft, self._info):
            found = difference(self._stored, weight, block)
            if found is not None:
                wrong.append(f"{weight.name} {found}")
        if wrong:
            self._wrong = wrong[0]
            more = f"; and {len(wrong) - 1} more weights" if len(wrong) > 1 else ""
            return Check("draft", "stored weights", "FAIL", wrong[0] + more)
        return Check("draft", "stored weights", "pass", "the head's weights are the draft folder's, to their rounding")

    def _arithmetic(self, text: DraftText) -> Check:
        count = min(_PAIRS, len(text.tokens) - 2)
        taps = text.taps(self._draft.spec.boundaries)[:count].reshape(count, -1, self._draft.spec.hidden_size)
        fed, _, logprobs = fed_rows(self._llm.decoder, text.tokens[: count + 1], taps)
        expected, scores = self._torch.rows(text, count)
        best = -np.sort(-scores, axis=1)[:, : logprobs.shape[1]]
        off = float(np.median(relative_rows(fed, expected, expected)))
        scored = float(np.median(np.abs(logprobs - best).max(axis=1)))
        allowed, head = _ROWS[self._info.precision], _ROWS[self._info.head_precision]
        if off > allowed:
            why = self._wrong or _assumed(self._torch, text, count, fed, off)
            return Check(
                "draft",
                "arithmetic",
                "FAIL",
                f"given the same states the head feeds back others, off by {off:.2g}: {why}",
            )
        if scored > max(2 * head, _LOGPROBS):
            why = self._wrong or "its final norm or head is not the draft's"
            return Check("draft", "arithmetic", "FAIL", f"log-probabilities are off by {scored:.2g}: {why}")
        says = f"the same states and scores as in torch, to {off:.1g} ({allowed:g} allowed)"
        return Check("draft", "arithmetic", "pass", says)

    def _tau(self, texts: Sequence[DraftText]) -> Check:
        in_torch = self._accepted(texts)
        engines = drafted_through(self._llm.decoder, [(text.prompt, text.tokens) for text in texts], DEPTH)
        passes = max(in_torch.passes, 1)
        self.figures = DraftFigures(
            texts=len(texts),
            tokens=engines.tokens,
            tau_torch=in_torch.tau,
            tau_engines=engines.tau,
            acceptance_torch=tuple(right / passes for right in in_torch.right),
            acceptance_engines=tuple(right / max(engines.passes, 1) for right in engines.right),
        )
        allowed = max(_TAU[precision] for precision in _precisions(self._llm.manifest, self._info))
        says = (
            f"{engines.tau:.3f} in the engines, {in_torch.tau:.3f} in torch, on {engines.tokens} tokens of fixed text"
        )
        if abs(engines.tau - in_torch.tau) > allowed * in_torch.tau:
            why = "the head drafts otherwise than it was trained to, see what else failed"
            return Check("draft", "tau", "FAIL", f"{says}; up to {allowed:.0%} is rounding: {why}")
        return Check("draft", "tau", "pass", f"{says} (up to {allowed:.0%} is rounding)")

    def _convention(self, texts: Sequence[DraftText]) -> Check:
        """Whether the head would draft much better one boundary up or down: then its layer ids were misread."""
        spec = self._draft.spec
        layers = self._llm.manifest.decoder.num_layers
        own = self._accepted(texts)
        for shift in (-1, 1):
            if spec.boundaries[0] + shift < 0 or spec.boundaries[-1] + shift > layers:
                continue
            other = self._accepted(texts, shift)
            if other.passes and own.passes > max(_BETTER * other.passes, other.passes + _LEAST_PASSES):
                there = ",".join(str(k + shift) for k in spec.boundaries)
                return Check(
                    "draft",
                    "layer ids",
                    "FAIL",
                    f"in torch the head drafts better at boundaries {there} (tau {other.tau:.2f}) than at its own (tau "
                    f"{own.tau:.2f}): its layer ids were read one off; `wavekit convert-draft --boundaries {there}`",
                )
        return Check("draft", "layer ids", "pass", "one boundary up or down the head drafts no better")

    def _accepted(self, texts: Sequence[DraftText], shift: int = 0) -> Acceptance:
        found = Acceptance(DEPTH)
        for text in texts:
            self._torch.walk(text, DEPTH, found, shift)
        return found


def _precisions(manifest: Manifest, info: DraftInfo) -> tuple[Precision, ...]:
    return info.precision, info.head_precision, manifest.engine.precision, manifest.engine.head_precision


def _weights_of(draft: Draft, info: DraftInfo) -> Iterator[Weight]:
    weights = draft.weights
    yield Weight("draft.fc", _Array(weights["fc"]), info.head_precision)
    for name, parts in _FUSED.items():
        yield Weight(f"draft.{name}", _Array(np.concatenate([weights[part] for part in parts])), info.precision)
        biases = [weights[f"{part}_bias"] for part in parts if f"{part}_bias" in weights]
        if biases:
            yield Weight(f"draft.{name}_bias", _Array(np.concatenate(biases)), info.precision)
    for role in draft.spec.weight_shapes():
        if role.split(".")[0].endswith("norm"):
            yield Weight(f"draft.{role}", _Array(weights[role]), info.precision)
    yield Weight("draft.head", _Array(weights["head"]), info.head_precision, table=True)


def _assumed(torch: TorchDraft, text: DraftText, count: int, fed: Array, off: float) -> str:
    """What the engines' head computes, if one assumption about it is wrong."""
    best = (np.inf, "")
    for said, other, shift in _assumptions(torch):
        states, _ = other.rows(text, count, shift)
        with np.errstate(all="ignore"):
            best = min(best, (float(np.median(relative_rows(fed, states, states))), said))
    return best[1] if best[0] < 0.2 * off else "no single setting explains it: other weights, or other arithmetic"


def _assumptions(torch: TorchDraft) -> Iterator[tuple[str, TorchDraft, int]]:
    draft, spec = torch.draft, torch.draft.spec

    def as_spec(**changes: object) -> TorchDraft:
        new: DraftSpec = dataclasses.replace(spec, **changes)  # type: ignore[arg-type]
        return torch.changed(spec=new)

    for shift in (-1, 1):
        yield f"it computes with boundaries {shift:+d}: wrong tap", torch, shift
    if spec.fc_norm != "none":
        yield "the norm before fc (norm_before_fc) is missing", as_spec(fc_norm="none"), 0
    for name in ("norm_before_residual", "norm_output"):
        yield (
            f"{name} is {not getattr(spec, name)}, the draft's is {getattr(spec, name)}",
            as_spec(**{name: not getattr(spec, name)}),
            0,
        )
    for role in [role for role in draft.weights if role.split(".")[0].endswith("norm")]:
        ones = {**draft.weights, role: np.ones_like(draft.weights[role])}
        yield f"the draft's {role} is missing: its weights are left out", torch.changed(weights=ones), 0
    for eps in (1e-8, 1e-6, 1e-5, 1e-4, 1e-3, 1e-2):
        if eps != spec.norm_eps:
            yield f"the draft's norm epsilon is {eps:g}, its folder says {spec.norm_eps:g}", as_spec(norm_eps=eps), 0
    for base in _BASES:
        rope = scaled_rope({"rope_type": "default", "rope_theta": base}, spec.head_dim, spec.max_positions)
        if rope.inv_freq != spec.rope.inv_freq:
            yield f"the draft's rotary base is {base:g}, which its folder does not say", as_spec(rope=rope), 0
    if spec.embedding_scale != 1:
        yield "the embedding scale is lost in the draft", as_spec(embedding_scale=1.0), 0
    fc = draft.weights["fc"].reshape(spec.hidden_size, len(spec.boundaries), spec.hidden_size)[:, ::-1]
    reversed_taps = np.ascontiguousarray(fc.reshape(spec.hidden_size, -1))
    yield "taps are given deep to shallow", torch.changed(weights={**draft.weights, "fc": reversed_taps}), 0
    for role in [role for role in draft.weights if role.endswith("_bias")]:
        zeros = {**draft.weights, role: np.zeros_like(draft.weights[role])}
        yield f"the draft's {role} is missing", torch.changed(weights=zeros), 0


def _listed(boundaries: Sequence[int]) -> str:
    return ", ".join(map(str, boundaries))
