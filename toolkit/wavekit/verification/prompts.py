"""The texts that a verification writes after: a few that come along, or those of a file.

They differ in kind (chat, prose, code, several scripts) and length; one is longer than a chunk of prefill. Bundles
without a tokenizer get token ids drawn from a seed instead.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from wavekit.decoding.sequence_workers import PREFILL_CHUNK
from wavekit.llm import LLM
from wavekit_engines.errors import MisuseError, WavekitError

_LEDGER = "".join(
    f"On day {day} the keeper wound {day % 7 + 2} clocks, oiled {day % 5 + 1} of them and set all by the tide. "
    for day in range(1, 26)
)
_CHAT, _PLAIN = "chat", "text"
SHIPPED: tuple[tuple[str, str, str], ...] = (
    ("question", _CHAT, "What is the capital of France, and which river runs through it?"),
    ("prose", _PLAIN, "Once upon a time, in a village at the edge of the forest, there lived a clockmaker who"),
    ("code", _PLAIN, "def quicksort(values):\n    if len(values) < 2:\n        return values\n    pivot ="),
    ("scripts", _PLAIN, "Über den Wolken ist die Freiheit — naïve café, 東京の朝、Привет 🙂👩‍🚀"),
    ("repeats", _PLAIN, "red blue green red blue green red blue green red blue"),
    ("long", _PLAIN, f"{_LEDGER}On day 26 the keeper"),
)
"""Name, kind and text."""

_DRAWN = (1, 5, 24, 90, 40, PREFILL_CHUNK + 20)


@dataclass(frozen=True)
class Sample:
    """A prompt as token ids."""

    name: str
    ids: tuple[int, ...]
    text: str | None = None
    """Where it is plain text."""
    messages: tuple[dict[str, Any], ...] = ()
    """Where it is a chat."""


def shipped_samples(llm: LLM, count: int | None, new_tokens: int) -> list[Sample]:
    """The first ``count`` of the prompts that come along, cut so that ``new_tokens`` fit into the context."""
    if llm.tokenizer is None:
        found = [_drawn(llm, number, length) for number, length in enumerate(_DRAWN)]
    else:
        found = [_encoded(llm, name, text, chat=kind == _CHAT) for name, kind, text in SHIPPED]
    return _fitting(llm, found[:count], new_tokens)


def samples_of_file(llm: LLM, file: Path, count: int | None, new_tokens: int) -> list[Sample]:
    """The first ``count`` prompts of a file, in any form that `calibrate` reads.

    Raises:
        MisuseError: the file holds no prompt that can be used, or the bundle has no tokenizer.
    """
    from wavekit_calibration.prompts import read_prompts

    if llm.tokenizer is None:
        raise MisuseError("this bundle has no tokenizer, so it takes no prompts from a file: leave --prompts out")
    prompts = read_prompts(file).prompts[:count]
    found = []
    for number, prompt in enumerate(prompts, 1):
        messages = tuple({"role": turn.role, "content": turn.content} for turn in prompt.messages)
        try:
            ids = tuple(llm.encode(messages))
            found.append(Sample(f"prompt {number}", ids, messages=messages))
        except WavekitError:  # no chat template, or one that takes no such turns
            found.append(_encoded(llm, f"prompt {number}", "\n\n".join(turn["content"] for turn in messages), False))
    return _fitting(llm, found, new_tokens)


def _encoded(llm: LLM, name: str, text: str, chat: bool) -> Sample:
    if chat:
        messages = ({"role": "user", "content": text},)
        try:
            return Sample(name, tuple(llm.encode(messages)), messages=messages)
        except WavekitError:  # a base model, without a chat template
            pass
    return Sample(name, tuple(llm.encode(text)), text=text)


def _drawn(llm: LLM, number: int, length: int) -> Sample:
    ids = np.random.default_rng(number).integers(0, llm.manifest.decoder.vocab_size, length)
    return Sample(f"drawn {number + 1}", tuple(ids.tolist()))


def _fitting(llm: LLM, samples: Sequence[Sample], new_tokens: int) -> list[Sample]:
    room = llm.manifest.decoder.max_positions - new_tokens
    if room < 1:
        raise MisuseError(
            f"{new_tokens} new tokens leave no room for a prompt in a context of "
            f"{llm.manifest.decoder.max_positions}: ask for fewer with --new-tokens"
        )
    return [
        Sample(sample.name, sample.ids[:room]) if len(sample.ids) > room else sample for sample in samples if sample.ids
    ]
