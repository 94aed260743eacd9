"""The streaming pass: texts through the model, sampled positions into their slots.

One forward pass over every text, in batches of fixed composition. At sampled positions the residual stream of every
boundary, the entropy of the model's next-token distribution and, for a part of them, the logit lens's token at every
boundary are stored; everything else is dropped at once.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from wavekit_calibration.entropy import next_token_entropy
from wavekit_calibration.hidden_states import capture
from wavekit_calibration.model import Decoder, check_finite
from wavekit_calibration.sample import PositionSample
from wavekit_calibration.state import MeasuredArrays, RunState

TOKENS_A_BATCH = 4096
_LOGITS_AT_ONCE = 1 << 24

Progress = Callable[[str, int, int], None]
"""(what is being done, steps done, steps in all); may raise to stop the run."""


@dataclass(frozen=True)
class Text:
    """A prompt and its answer, as one sequence of token ids."""

    token_ids: tuple[int, ...]
    answer_start: int
    """Index of the answer's first token."""

    def eligible(self, positions: str, skip_first: int) -> tuple[int, int]:
        """Positions start..stop-1 that may be sampled; position t predicts token t + 1."""
        start = self.answer_start - 1 if positions == "answer" else 0
        return max(start, skip_first), len(self.token_ids) - 1


def plan_batches(lengths: Sequence[int], batch_size: int, tokens: int = TOKENS_A_BATCH) -> list[list[int]]:
    """Group items of similar length, shortest first: at most ``batch_size`` and, filled up, at most ``tokens`` each."""
    batches: list[list[int]] = []
    for item in sorted(range(len(lengths)), key=lambda i: (lengths[i], i)):
        current = batches[-1] if batches else None
        if current and len(current) < batch_size and (len(current) + 1) * lengths[item] <= tokens:
            current.append(item)
        else:
            batches.append([item])
    return batches


def measure(
    decoder: Decoder,
    texts: Sequence[Text],
    sample: PositionSample,
    lens_slots: NDArray[np.int64],
    state: RunState,
    batch_size: int,
    progress: Progress,
) -> MeasuredArrays:
    """Run the pass, or the rest of it that ``state`` does not have yet.

    Args:
        decoder: the model.
        texts: the sequences.
        sample: which positions to store.
        lens_slots: [R] slots of the sample on which the logit lens is read.
        state: where results and progress are kept.
        batch_size: sequences a batch at most.
        progress: told after every batch.

    Raises:
        NonFiniteStatesError: the model gives NaN or infinity.
    """
    arrays = state.arrays(len(sample), len(lens_slots), decoder.num_layers + 1, decoder.hidden_size)
    lens_row = np.full(len(sample), -1)
    lens_row[lens_slots] = np.arange(len(lens_slots))
    used = np.unique(sample.sequence)
    batches = [[int(used[i]) for i in b] for b in plan_batches([len(texts[s].token_ids) for s in used], batch_size)]
    for number, batch in enumerate(batches):
        if number >= state.measured:
            _measure_batch(decoder, texts, batch, sample, lens_row, arrays)
            state.count_batch(arrays, number + 1)
        progress("measuring hidden states", number + 1, len(batches))
    return arrays


def _measure_batch(
    decoder: Decoder,
    texts: Sequence[Text],
    batch: list[int],
    sample: PositionSample,
    lens_row: NDArray[np.int64],
    arrays: MeasuredArrays,
) -> None:
    width = max(len(texts[s].token_ids) for s in batch)
    ids = torch.zeros(len(batch), width, dtype=torch.long)
    for row, s in enumerate(batch):
        ids[row, : len(texts[s].token_ids)] = torch.tensor(texts[s].token_ids)
    slots = np.concatenate([np.flatnonzero(sample.sequence == s) for s in batch])
    row_of = {s: row for row, s in enumerate(batch)}
    places = [(row_of[int(sample.sequence[i])], int(sample.position[i])) for i in slots]
    with_lens = lens_row[slots] >= 0
    lens_rows = lens_row[slots][with_lens]

    def sink(boundary: int, states: torch.Tensor) -> None:
        check_finite(boundary, states)
        arrays.rows[slots, boundary] = states.float().cpu().numpy()
        if boundary == decoder.num_layers:
            best, entropy = _read_logits(decoder, states)
            arrays.entropy[slots] = entropy
            arrays.lens[lens_rows, boundary] = best[with_lens]
        elif len(lens_rows):
            wanted = torch.from_numpy(with_lens).to(states.device)
            arrays.lens[lens_rows, boundary] = _read_best(decoder, states[wanted])

    capture(decoder, ids, places, sink)


def _read_logits(decoder: Decoder, states: torch.Tensor) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Best token and next-token entropy of states [P, D], a few rows of logits at a time."""
    best, entropy = [], []
    for part in _portions(decoder, states):
        logits = decoder.logits(part)
        best.append(logits.argmax(dim=-1).cpu())
        entropy.append(next_token_entropy(logits).cpu())
    return torch.cat(best).numpy(), torch.cat(entropy).numpy()


def _read_best(decoder: Decoder, states: torch.Tensor) -> NDArray[np.int64]:
    best = [decoder.logits(part).argmax(dim=-1).cpu() for part in _portions(decoder, states)]
    return torch.cat(best).numpy()


def _portions(decoder: Decoder, states: torch.Tensor) -> list[torch.Tensor]:
    """Cut states [P, D] so that the logits of one portion stay near 64 MB."""
    step = max(1, _LOGITS_AT_ONCE // decoder.vocab_size)
    return [states[start : start + step] for start in range(0, len(states), step)]
