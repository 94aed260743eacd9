"""Who writes the answers that are measured: by default the measured model itself.

A writer is any function from prompts to answers, both token ids; the command hands in the fastest it has. This file
holds the plain one, transformers' own greedy decoding.
"""

from collections.abc import Callable
from typing import Any

import torch

from wavekit_calibration.model import Decoder

Writer = Callable[[list[list[int]], int], list[list[int]]]
"""(prompts' token ids, the most new tokens) -> the answers' token ids, up to and with the end token if it came."""


def transformers_writer(decoder: Decoder) -> Writer:
    """Greedy decoding by transformers, one padded batch a call; takes over the model's generation defaults."""
    from transformers import GenerationConfig

    ends = decoder.model.generation_config.eos_token_id
    end_ids: list[int] = [] if ends is None else [ends] if isinstance(ends, int) else list(ends)
    filler = end_ids[0] if end_ids else 0
    # generate() fills whatever a call leaves open from the checkpoint's defaults, penalties and sampling among them
    decoder.model.generation_config = GenerationConfig(  # type: ignore[no-untyped-call]
        do_sample=False, eos_token_id=end_ids or None, pad_token_id=filler
    )

    @torch.inference_mode()
    def write(prompts: list[list[int]], max_new_tokens: int) -> list[list[int]]:
        width = max(map(len, prompts))
        ids = torch.tensor([[filler] * (width - len(p)) + p for p in prompts], device=decoder.input_device)
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts], device=decoder.input_device)
        out: Any = decoder.model.generate(ids, attention_mask=mask, max_new_tokens=max_new_tokens)
        return [_up_to_end(row, end_ids) for row in out[:, width:].tolist()]

    return write


def _up_to_end(answer: list[int], end_ids: list[int]) -> list[int]:
    first = next((i for i, token in enumerate(answer) if token in end_ids), len(answer) - 1)
    return answer[: first + 1]
