"""The choice of a token from final logits: greedy, or a draw that depends on seed and position alone.

Contract: penalties and filters mean what transformers' logits processors mean, in the same order (repetition penalty,
temperature, top-k, top-p, min-p). The random number of a position is a hash of seed and position, so a token does not
depend on what was speculated before it. Tokens are drawn by inverse distribution in the order of their ids, so that
rounding differences between engines move a draw only where they straddle its random number. Knows nothing of engines.
"""

import hashlib
import math
import struct
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from wavekit_engines.errors import MisuseError, WavekitError

Floats = NDArray[np.float32]
Ids = NDArray[np.int64]

_SUM_BLOCK = 512  # float32 entries summed pairwise before float64 takes over
_FIRST_CUT = 2.0**-8  # weight at which the search for a nucleus starts, relative to the most likely token
_CUT_STEP = 2.0**-4

_RANGES: dict[str, tuple[type, Callable[[Any], bool], str]] = {
    "temperature": (float, lambda t: t == 0 or 1e-6 <= t <= 1e6, "0 (greedy) or from 1e-6 to 1e6"),
    "top_k": (int, lambda k: k >= 0, "an integer from 0 (off) up"),
    "top_p": (float, lambda p: 0 < p <= 1, "above 0 and at most 1 (off)"),
    "min_p": (float, lambda p: 0 <= p <= 1, "from 0 (off) to 1"),
    "repetition_penalty": (float, lambda r: 1e-3 <= r <= 1e3, "from 1e-3 to 1e3; 1 is off"),
    "seed": (int, lambda s: 0 <= s < 2**64, "an integer from 0 to 2**64 - 1"),
}


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are chosen; the defaults choose the most likely one.

    Attributes:
        temperature: logits are divided by it; 0 is greedy and leaves only ``repetition_penalty`` in force.
        top_k: keep the k most likely tokens, and those exactly as likely as the last of them; 0 keeps all.
        top_p: keep the fewest most likely tokens whose probabilities sum to at least this.
        min_p: keep tokens at least this likely, relative to the most likely one.
        repetition_penalty: positive logits of tokens in the context are divided by it, negative ones multiplied.
        seed: which of the possible texts is drawn.

    Raises MisuseError for a value out of range, naming the parameter and its range.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        for name, (kind, fits, allowed) in _RANGES.items():
            value = getattr(self, name)
            number = Integral if kind is int else Real
            if isinstance(value, bool) or not isinstance(value, number) or not fits(value):
                raise MisuseError(f"{name} must be {allowed}, not {value!r}")
            object.__setattr__(self, name, kind(value))

    @property
    def is_argmax(self) -> bool:
        """Whether the choice is the token of greatest logit, whatever came before."""
        return self.temperature == 0 and self.repetition_penalty == 1


class SeenTokens:
    """The distinct token ids of a growing context, so that a repetition penalty need not scan it for every token."""

    def __init__(self) -> None:
        self._known: set[int] = set()
        self._ids: Ids = np.empty(256, np.int64)

    def add(self, ids: Iterable[int]) -> None:
        """Take in the next ids of the context."""
        for token_id in ids:
            if token_id not in self._known:
                count = len(self._known)
                if count == len(self._ids):
                    self._ids = np.resize(self._ids, 2 * count)
                self._ids[count] = token_id
                self._known.add(token_id)

    @property
    def ids(self) -> Ids:
        """The ids, int64 [distinct], each once, in order of first appearance; a view."""
        return self._ids[: len(self._known)]


class Sampler:
    """Chooses the tokens of one text. Holds buffers the size of the vocabulary: not for use by two threads at once."""

    def __init__(self, params: SamplingParams, vocab_size: int) -> None:
        self.params = params
        self._penalised: Floats = np.empty(vocab_size if params.repetition_penalty != 1 else 0, np.float32)
        self._weights: Floats = np.empty(vocab_size if params.temperature != 0 else 0, np.float32)

    def choose(self, logits: Floats, position: int, context: SeenTokens | Sequence[int] = ()) -> int:
        """Return the token for ``position`` (tokens before it in the text) from its logits, float32 [vocab_size].

        ``context`` is every token before it, or the set of them; only a repetition penalty looks at it. Of equally
        likely tokens greedy choice takes the lowest id. Raises WavekitError for logits that are not finite numbers.
        """
        if self.params.temperature == 0:
            return _most_likely(self._penalise(logits, context))
        ids, weights = self.candidates(logits, context)
        sums = _block_sums(weights)
        index = _reach(weights, sums, uniform(self.params.seed, position) * sums.sum(), "right")
        return index if ids is None else int(ids[index])

    def candidates(self, logits: Floats, context: SeenTokens | Sequence[int] = ()) -> tuple[Ids | None, Floats]:
        """Return what may be drawn at a temperature above 0: ids, ascending, and their weights, float32.

        Ids are None if every token may be. Probabilities are the weights over their sum; the most likely token weighs
        1. The weights may share memory with this sampler and hold until its next call.
        """
        params = self.params
        logits = self._penalise(logits, context)
        peak = float(logits[_most_likely(logits)])
        ids: Ids | None = None
        if 0 < params.top_k < len(logits):
            last = len(logits) - params.top_k
            ids = np.flatnonzero(logits >= np.partition(logits, last)[last])
        elif params.top_p == 1 and params.min_p > 0:
            # What is far below min_p needs no exponential; the margin leaves the comparison itself to the weights.
            margin = 0.01 * params.temperature + 1e-6 * abs(peak)
            ids = np.flatnonzero(logits >= peak + params.temperature * math.log(params.min_p) - margin)
        weights = self._weigh(logits if ids is None else logits[ids], peak)
        if params.top_p < 1:
            kept = _nucleus(weights, params.top_p)
            ids, weights = kept if ids is None else ids[kept], weights[kept]
        if params.min_p > 0 and ids is not None:
            kept = np.flatnonzero(weights >= params.min_p)
            ids, weights = ids[kept], weights[kept]
        return ids, weights

    def _penalise(self, logits: Floats, context: SeenTokens | Sequence[int]) -> Floats:
        penalty = self.params.repetition_penalty
        if penalty == 1:
            return logits
        ids = context.ids if isinstance(context, SeenTokens) else np.asarray(context, np.int64)
        seen = logits[ids]
        np.copyto(self._penalised, logits)
        self._penalised[ids] = np.where(seen < 0, seen * penalty, seen / penalty)
        return self._penalised

    def _weigh(self, logits: Floats, peak: float) -> Floats:
        """Weights exp((logit - peak) / temperature), in this sampler's buffer."""
        weights = self._weights[: len(logits)]
        np.subtract(logits, peak, out=weights)
        with np.errstate(over="ignore"):  # to -inf, whose exponential is 0
            np.divide(weights, self.params.temperature, out=weights)
        return np.exp(weights, out=weights)


def uniform(seed: int, position: int) -> float:
    """Return the random number of a position, in [0, 1): 53 bits of a keyed BLAKE2b hash, a counter-based generator."""
    digest = hashlib.blake2b(struct.pack("<QQ", seed, position), digest_size=8).digest()
    return float(int.from_bytes(digest, "little") >> 11) * 2.0**-53


def _most_likely(logits: Floats) -> int:
    best = int(logits.argmax())
    if not math.isfinite(logits[best]):  # argmax stops at the first NaN
        raise WavekitError(f"the model's logits are {logits[best]}: export the bundle again with a wider precision")
    return best


def _reach(weights: Floats, sums: NDArray[np.float64], target: float, side: Literal["left", "right"]) -> int:
    """Index at which the running sum of ``weights`` reaches ``target`` ("left") or exceeds it ("right").

    Float32 adds up within blocks, float64 beyond. The same block added in another order can come out a rounding
    smaller, so targets are kept below every sum, and an index is always that of a positive weight.
    """
    ends = sums.cumsum()
    target = min(target, np.nextafter(ends[-1], 0))
    block = int(ends.searchsorted(target, side))
    start = block * _SUM_BLOCK
    inside = weights[start : start + _SUM_BLOCK].cumsum(dtype=np.float64)
    rest = min(target - (ends[block - 1] if block else 0.0), np.nextafter(inside[-1], 0))
    return start + int(inside.searchsorted(rest, side))


def _block_sums(weights: Floats) -> NDArray[np.float64]:
    """Sum of each block of ``_SUM_BLOCK`` weights, and of what is left, as ``_reach`` takes them."""
    whole = len(weights) // _SUM_BLOCK * _SUM_BLOCK
    blocks = weights[:whole].reshape(-1, _SUM_BLOCK).sum(axis=1)
    return np.append(blocks.astype(np.float64), weights[whole:].sum(dtype=np.float64))


def _nucleus(weights: Floats, top_p: float) -> Ids:
    """Indices, ascending, of the fewest largest weights that sum to ``top_p`` of all; of equal ones the first.

    Sorts only the weights above a cut, which is lowered until they suffice. It need not go below ``enough``: what is
    below that cannot, all together, make up the share that may be left out.
    """
    total = float(_block_sums(weights).sum())
    target = top_p * total
    enough = (1 - top_p) * total / (2 * len(weights))
    cut = max(_FIRST_CUT, enough)
    while True:
        kept = np.flatnonzero(weights >= cut)
        values = weights[kept]
        if cut == enough or values.sum(dtype=np.float64) >= target:
            break
        cut = max(cut * _CUT_STEP, enough)
    falling = -np.sort(-values)
    last = _reach(falling, _block_sums(falling), target, "left")
    inside = values >= falling[last]
    surplus = np.count_nonzero(falling[last + 1 :] == falling[last])
    if surplus:
        inside[np.flatnonzero(values == falling[last])[-surplus:]] = False
    nucleus: Ids = kept[inside]
    return nucleus
