"""The checkpoint in transformers, and what equal text means against it."""

from collections.abc import Sequence
from pathlib import Path

import torch
import transformers

TIE = 1e-3
"""Top-2 logit margin below which float32 sums in another order may pick the other token."""


def reference(checkpoint: Path) -> transformers.PreTrainedModel:
    """Load the checkpoint in float32 with eager attention."""
    return transformers.AutoModelForCausalLM.from_pretrained(
        checkpoint, dtype=torch.float32, attn_implementation="eager"
    )


def assert_greedy(model: transformers.PreTrainedModel, prompt: Sequence[int], written: Sequence[int]) -> None:
    """Check that ``written`` is the greedy continuation: at every position the argmax after the text before it."""
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *written[:-1]]])).logits[0, len(prompt) - 1 :].numpy()
    for position, (token, row) in enumerate(zip(written, logits, strict=True)):
        best = int(row.argmax())
        margin = float(row[best] - row[token])
        assert margin < TIE, f"position {position}: {token} instead of {best}, whose logit is {margin:.5f} higher"
