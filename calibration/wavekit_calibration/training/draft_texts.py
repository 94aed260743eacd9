"""The texts a draft learns from: prompts answered by the target, on disk with what made them.

``texts.jsonl`` begins with one line of provenance, then holds one text a line: the prompt's number, its token ids, the
answer's and the temperature it was drawn at. A run that was interrupted leaves the answers it has in its state and
goes on with the others; a finished file can be given to other runs, for other boundaries or settings. Every second
answer is greedy, the rest is drawn at a temperature, so that a draft meets both.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from wavekit_calibration.measure import Progress
from wavekit_calibration.state import RunState
from wavekit_calibration.training.draft_data import AnsweredText, StateStore
from wavekit_engines.atomic import write_file
from wavekit_engines.errors import MisuseError

TEXTS = "texts.jsonl"
_FEWEST_HELD_OUT = 4


@dataclass(frozen=True)
class Request:
    """A prompt to be answered."""

    number: int
    prompt: list[int]
    temperature: float
    seed: int


@dataclass(frozen=True)
class WrittenStates:
    """What the target computed while it wrote an answer, for a writer that can tell.

    ``boundaries`` holds float [L - 1, H] for tokens 0..L-2 of prompt and answer at every tapped boundary and at N;
    ``likeliest`` int64 [A] the target's choice for each token of the answer.
    """

    boundaries: Mapping[int, NDArray[Any]]
    likeliest: NDArray[np.int64]


Answered = Callable[[Request, list[int], WrittenStates | None], None]
TextWriter = Callable[[Sequence[Request], int, Answered], None]
"""(requests, the most new tokens, told of each answer when it is complete), in any order."""


@dataclass(frozen=True)
class TextProvenance:
    """What made a file of texts."""

    checkpoint_digest: str
    prompts: str
    prompts_sha256: str
    max_new_tokens: int
    temperature: float
    seed: int
    writer: str


@dataclass(frozen=True)
class _Line:
    number: int
    prompt: tuple[int, ...]
    answer: tuple[int, ...]
    temperature: float


def write_texts(
    prompts: Sequence[list[int]],
    made_by: TextProvenance,
    writer: TextWriter,
    state: RunState,
    store: StateStore,
    file: Path,
    progress: Progress,
) -> list[AnsweredText]:
    """Have all prompts answered, those that ``state`` has not seen yet, and keep the texts in ``file``.

    States that the writer brings along go to ``store``.
    """
    requests = [
        Request(number, prompt, made_by.temperature if number % 2 else 0.0, made_by.seed + number)
        for number, prompt in enumerate(prompts)
    ]
    answers = state.answers()
    waiting = [request for request in requests if request.number not in answers]

    def answered(request: Request, answer: list[int], states: WrittenStates | None) -> None:
        if states is not None and len(answer) > 1:
            _keep(states, len(request.prompt), request.number, store)
        state.add_answers([request.number], [answer])
        answers[request.number] = answer
        progress("writing texts", len(answers), len(requests))

    if waiting:
        writer(waiting, made_by.max_new_tokens, answered)
    lines = [asdict(made_by)] + [
        asdict(_Line(r.number, tuple(r.prompt), tuple(answers[r.number]), r.temperature)) for r in requests
    ]
    write_file(file, b"".join(json.dumps(line).encode() + b"\n" for line in lines))
    return list(_usable(_Line(**line) for line in lines[1:]))


def _keep(states: WrittenStates, prompt_length: int, number: int, store: StateStore) -> None:
    deepest = max(states.boundaries)
    taps = np.stack([states.boundaries[boundary][:-1] for boundary in store.boundaries], axis=1)
    final = states.boundaries[deepest][prompt_length:]
    store.save(number, torch.from_numpy(taps), torch.from_numpy(final), torch.from_numpy(states.likeliest[1:]))


def read_texts(file: Path, checkpoint_digest: str, vocab_size: int) -> tuple[TextProvenance, list[AnsweredText]]:
    """Texts of an earlier run.

    Raises:
        MisuseError: no such file, damaged, or written by another model.
    """
    if not file.is_file():
        raise MisuseError(f"no texts at {file}; leave out --texts to have them written")
    try:
        first, *lines = file.read_bytes().splitlines()
        made_by = msgspec.json.decode(first, type=TextProvenance)
        texts = list(_usable(msgspec.json.decode(line, type=_Line) for line in lines))
    except (msgspec.MsgspecError, ValueError) as error:
        raise MisuseError(f"{file} is damaged ({error}); have the texts written again") from None
    if made_by.checkpoint_digest != checkpoint_digest:
        raise MisuseError(f"{file} was written by another model; have the texts written by this one")
    if any(not 0 <= token < vocab_size for text in texts for token in text.tokens):
        raise MisuseError(f"{file} is damaged: it has tokens outside the vocabulary; have the texts written again")
    return made_by, texts


def _usable(lines: Iterator[_Line]) -> Iterator[AnsweredText]:
    for line in lines:
        text = AnsweredText(line.number, line.prompt, line.answer, line.temperature == 0)
        if text.trained_rows >= 1:
            yield text


def split_held_out(
    texts: Sequence[AnsweredText], share: float, seed: int
) -> tuple[list[AnsweredText], list[AnsweredText]]:
    """Texts to train on and texts held out: the latter drawn from the greedy ones, on which tau is defined.

    Raises:
        MisuseError: too few texts.
    """
    greedy = [index for index, text in enumerate(texts) if text.greedy]
    count = max(_FEWEST_HELD_OUT, round(share * len(texts)))
    if len(greedy) <= count:
        raise MisuseError(f"{len(texts)} usable texts are too few: {count} greedy ones are held out; give more prompts")
    order = np.random.default_rng([seed, 0x5E1D]).permutation(len(greedy))
    held_out = {greedy[int(index)] for index in order[:count]}
    return (
        [text for index, text in enumerate(texts) if index not in held_out],
        [text for index, text in enumerate(texts) if index in held_out],
    )
