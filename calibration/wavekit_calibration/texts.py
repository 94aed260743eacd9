"""From prompts to the texts that are measured: drawn, tokenised, answered.

The answers are written by the model itself (what a draft will have to predict) or taken from the prompt file.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from wavekit_calibration.errors import PromptError
from wavekit_calibration.measure import Progress, Text, plan_batches
from wavekit_calibration.model import encode_answer, encode_prompt
from wavekit_calibration.prompts import Prompt, PromptFile
from wavekit_calibration.settings import MeasureSettings
from wavekit_calibration.state import RunState
from wavekit_calibration.writer import Writer


@dataclass(frozen=True)
class EncodedPrompts:
    """The prompts that are used, as token ids, and how many were not."""

    prompts: tuple[Prompt, ...]
    token_ids: tuple[list[int], ...]
    too_long: int
    not_drawn: int


def encode_prompts(tokenizer: Any, source: PromptFile, settings: MeasureSettings, context: int) -> EncodedPrompts:
    """Draw at most ``max_prompts`` prompts (seeded, kept in file order) and tokenise them.

    Args:
        tokenizer: the checkpoint's.
        source: the prompts.
        settings: limits and seed.
        context: the most positions the model has.

    Raises:
        PromptError: nothing is left.
    """
    usable = [p for p in source.prompts if settings.answers == "self" or p.answer is not None]
    if not usable:
        raise PromptError(f"{source.name} holds no answers; let the model write them (leave out --answers given)")
    order = np.random.default_rng([settings.seed, 0xD4A3]).permutation(len(usable))
    limit = min(settings.max_prompt_tokens, context - settings.max_new_tokens)
    kept: dict[int, list[int]] = {}
    too_long = 0
    for number in order:
        if len(kept) == settings.max_prompts:
            break
        ids = encode_prompt(tokenizer, usable[number])
        if len(ids) > limit:
            too_long += 1
        elif ids:
            kept[int(number)] = ids
    if not kept:
        raise PromptError(
            f"{source.name}: all {len(usable)} prompts are longer than {limit} tokens; raise --max-prompt-tokens"
        )
    numbers = sorted(kept)
    not_drawn = len(usable) - len(kept) - too_long
    return EncodedPrompts(tuple(usable[i] for i in numbers), tuple(kept[i] for i in numbers), too_long, not_drawn)


def complete_texts(
    encoded: EncodedPrompts,
    settings: MeasureSettings,
    tokenizer: Any,
    writer: Writer,
    state: RunState,
    progress: Progress,
) -> list[Text]:
    """Put an answer behind every prompt: the file's, or one by ``writer``, batch by batch and kept in ``state``."""
    if settings.answers == "given":
        answers = {
            i: encode_answer(tokenizer, p.answer or "")[: settings.max_new_tokens]
            for i, p in enumerate(encoded.prompts)
        }
    else:
        answers = _written_answers(encoded.token_ids, settings, writer, state, progress)
    return [Text((*ids, *answers[i]), len(ids)) for i, ids in enumerate(encoded.token_ids)]


def _written_answers(
    prompts: Sequence[list[int]], settings: MeasureSettings, writer: Writer, state: RunState, progress: Progress
) -> dict[int, list[int]]:
    """Answers to all prompts; a batch that is complete in ``state`` is not written again."""
    answers = state.answers()
    batches = plan_batches([len(p) for p in prompts], settings.batch_size)
    for number, batch in enumerate(batches):
        if not all(i in answers for i in batch):
            written = writer([prompts[i] for i in batch], settings.max_new_tokens)
            state.add_answers(batch, written)
            answers.update(zip(batch, written, strict=True))
        progress("writing answers", number + 1, len(batches))
    return answers
