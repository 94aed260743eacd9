"""A draft head in torch on the checkpoint's own states: what it feeds back and scores, and how its drafts fare."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch.nn import functional

from wavekit.verification.against_checkpoint.reference import Reference, States
from wavekit_calibration.training.draft_head import DraftHead
from wavekit_calibration.training.draft_loss import Acceptance
from wavekit_engines.draft_spec import Draft
from wavekit_engines.engine import Array


@dataclass(frozen=True)
class DraftText:
    """A text with the checkpoint's states of it."""

    prompt: int
    """Tokens of the prompt, which come first."""
    tokens: tuple[int, ...]
    states: States

    def taps(self, boundaries: Sequence[int], shift: int = 0) -> Array:
        """Float32 [T, m * H] at boundaries, moved by ``shift`` within the model."""
        layers = len(self.states.entering)
        return np.concatenate([self.states.boundary(min(max(k + shift, 0), layers)) for k in boundaries], axis=1)


class TorchDraft:
    """A draft head and the checkpoint's token table."""

    def __init__(self, reference: Reference, draft: Draft) -> None:
        self.draft = draft
        self._reference = reference
        table = reference.decoder.model.get_input_embeddings().weight.detach()
        self._table = table if draft.embedding is None else torch.from_numpy(np.array(draft.embedding))
        self._ids = torch.from_numpy(draft.d2t + np.arange(draft.d2t.size))

    @torch.inference_mode()
    def rows(self, text: DraftText, count: int, shift: int = 0) -> tuple[Array, Array]:
        """The first ``count`` pairs of a text: what each feeds back [count, H], its log-probabilities [count, D]."""
        taps = torch.from_numpy(text.taps(self.draft.spec.boundaries, shift)[:count])[None]
        head = self._head(count + 1)
        rows = torch.arange(count)[None]
        state = next(head.steps(taps, self._embedded(text.tokens[1 : count + 2], count + 1), rows, 1))
        return state[0].numpy(), head.scores(state)[0].log_softmax(-1).numpy()

    @torch.inference_mode()
    def walk(self, text: DraftText, depth: int, found: Acceptance, shift: int = 0) -> None:
        """Draft through the answer of a text as chains of ``depth`` tokens would, and count what came true."""
        length, answer = len(text.tokens), len(text.tokens) - text.prompt
        taps = torch.from_numpy(text.taps(self.draft.spec.boundaries, shift)[: length - 2])[None]
        rows = torch.arange(text.prompt - 1, length - 2)[None]
        written = torch.tensor(text.tokens[text.prompt + 1 :])
        embedded = self._embedded(text.tokens[1:], length - 2 + depth)
        head, matches = self._head(length + depth), list[torch.Tensor]()
        for step, state in enumerate(head.steps(taps, embedded, rows, depth)):
            tokens = self._ids[head.scores(state)[0].argmax(-1)]
            matches.append(tokens == functional.pad(written[step:], (0, step), value=-1))
        assert len(matches[0]) == answer - 1
        found.walk(torch.stack(matches, dim=-1))

    def changed(self, **parts: object) -> "TorchDraft":
        """The same head with other weights or another description."""
        return TorchDraft(self._reference, dataclasses.replace(self.draft, **parts))  # type: ignore[arg-type]

    def _head(self, longest: int) -> DraftHead:
        head = DraftHead(self.draft.spec, longest + 1)
        head.load(self.draft)
        return head.eval()

    def _embedded(self, tokens: Sequence[int], count: int) -> torch.Tensor:
        """Float32 [1, count, H]; tokens beyond the text's are zeros and matter to nothing that is counted."""
        ids = torch.tensor([*tokens, *[0] * count][:count])
        return (self._table[ids].float() * self.draft.spec.embedding_scale)[None]
