"""The target's final norm and head over a vocabulary, frozen: what turns states into scores in training."""

from typing import Any

import torch
from torch.nn import functional

from wavekit_calibration.model import Decoder


class Readout:
    """Scores of states at boundary N, or of what stands in for them; gradients reach the states and nothing else."""

    def __init__(self, decoder: Decoder, token_ids: torch.Tensor | None, device: torch.device) -> None:
        """``token_ids`` int64 [D] is the vocabulary, in target ids; None for the target's whole one, D = V."""
        self._factor, self._softcap = decoder.scale, decoder.softcap
        self._norm: Any = decoder.norm.to(device).requires_grad_(False)
        rows: torch.Tensor = decoder.model.get_output_embeddings().weight.detach()
        self._rows = (rows if token_ids is None else rows[token_ids]).to(device)

    @property
    def vocab_size(self) -> int:
        """D."""
        return len(self._rows)

    def scores(self, states: torch.Tensor) -> torch.Tensor:
        """Float32 [n, D] of states [n, H]."""
        scores = functional.linear(self._norm(states.to(self._rows.dtype)), self._rows).float() * self._factor
        return scores if self._softcap is None else self._softcap * torch.tanh(scores / self._softcap)
