"""The loss of a draft, and how well it drafts: both from the target's own states on text it wrote.

Loss (EAGLE-3): at each step of the training-time test the soft cross-entropy between the target's distribution,
renormalised over the draft vocabulary, and the draft's; positions where the target's choice lies outside that
vocabulary are left out; step k weighs 0.8^k.

tau counts the bonus token: a text of n tokens that takes p passes of the target has tau n / p; plain decoding is 1.00.
It is found by walking through the text as a greedy chain drafter would: every pass accepts drafted tokens up to the
first wrong one, and the target adds one.
"""

from dataclasses import dataclass, field

import torch
from torch.nn import functional

from wavekit_calibration.model import Decoder
from wavekit_calibration.readout import Readout
from wavekit_calibration.training.draft_data import Batch
from wavekit_calibration.training.draft_head import DraftHead

STEP_WEIGHT = 0.8


class Teacher:
    """The frozen parts of the target that training needs: its embeddings, and its distribution over a vocabulary."""

    def __init__(self, decoder: Decoder, token_ids: torch.Tensor, embedding_scale: float, device: torch.device) -> None:
        """``token_ids`` int64 [D] is the draft vocabulary, in target ids."""
        self.token_ids = token_ids.to(device)
        self._embedding: torch.Tensor = decoder.model.get_input_embeddings().weight.detach().to(device)
        self._scale = embedding_scale
        self._readout = Readout(decoder, token_ids, device)
        self._known = torch.zeros(len(self._embedding), dtype=torch.bool, device=device)
        self._known[self.token_ids] = True

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        """Float32 [..., H]."""
        return self._embedding[ids].float() * self._scale

    @torch.no_grad()
    def distribution(self, final: torch.Tensor) -> torch.Tensor:
        """Probabilities [n, D] over the draft vocabulary of states at boundary N [n, H]."""
        return self._readout.scores(final).softmax(-1)

    def knows(self, ids: torch.Tensor) -> torch.Tensor:
        """Whether tokens are in the draft vocabulary."""
        return self._known[ids]


def batch_loss(head: DraftHead, teacher: Teacher, batch: Batch, steps: int) -> torch.Tensor:
    """The weighted loss of one batch, ``steps`` ahead."""
    inside = batch.valid(0)
    # Where each row's prediction lies among the rows that are no padding.
    flat = inside.flatten().cumsum(0).reshape(inside.shape) - 1
    probabilities = teacher.distribution(batch.final[inside])
    usable = teacher.knows(batch.likeliest[inside])
    total = probabilities.new_zeros(())
    states = head.steps(batch.taps.float(), teacher.embed(batch.next_ids), batch.rows, steps)
    for step, state in enumerate(states):
        valid = batch.valid(step)
        index = flat[valid] + step
        kept = usable[index]
        if not bool(kept.any()):
            continue
        scores = head.scores(state[valid][kept]).float()
        loss = -(probabilities[index[kept]] * scores.log_softmax(-1)).sum(-1).mean()
        total = total + STEP_WEIGHT**step * loss
    return total


@dataclass
class Acceptance:
    """How drafts of up to ``steps`` tokens fared on held-out texts."""

    steps: int
    tokens: int = 0
    passes: int = 0
    tried: list[int] = field(default_factory=list)
    right: list[int] = field(default_factory=list)

    @property
    def tau(self) -> float:
        """Tokens a pass of the target, the bonus token counted."""
        return self.tokens / self.passes if self.passes else 1.0

    @property
    def by_position(self) -> list[float]:
        """Of the drafts whose earlier tokens were right, the share whose k-th token was."""
        return [right / tried if tried else 0.0 for right, tried in zip(self.right, self.tried, strict=True)]

    def walk(self, matches: torch.Tensor) -> None:
        """Take in one text: ``matches`` bool [R, steps], whether row r's k-th drafted token is the text's.

        Row r drafts what follows token r of the answer, which the target wrote in the pass before.
        """
        self.tried, self.right = self.tried or [0] * self.steps, self.right or [0] * self.steps
        rows = matches.tolist()
        row = 0
        while row < len(rows):
            accepted = 0
            while accepted < min(self.steps, len(rows) - row) and rows[row][accepted]:
                accepted += 1
            for step in range(min(accepted + 1, self.steps, len(rows) - row)):
                self.tried[step] += 1
                self.right[step] += step < accepted
            self.passes += 1
            self.tokens += min(accepted + 1, len(rows) - row)
            row += accepted + 1


@torch.no_grad()
def count_accepted(head: DraftHead, teacher: Teacher, batch: Batch, found: Acceptance) -> None:
    """Walk through the texts of a batch with the head's likeliest tokens."""
    matches = []
    for step, state in enumerate(
        head.steps(batch.taps.float(), teacher.embed(batch.next_ids), batch.rows, found.steps)
    ):
        tokens = teacher.token_ids[head.scores(state).argmax(-1)]
        shifted = functional.pad(batch.written[:, step:], (0, step), value=-1)
        matches.append((tokens == shifted) & batch.valid(step))
    for text, length in enumerate(batch.lengths.tolist()):
        found.walk(torch.stack([match[text, :length] for match in matches], dim=-1).cpu())
