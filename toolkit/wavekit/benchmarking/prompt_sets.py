"""The prompts that are measured on: sets of a user's files, or a few that come along.

Those that come along are spread over the kinds of task in the calibration's set: questions, stories, code, sums,
summaries and more. A bundle without a tokenizer gets token ids drawn from a seed, on which only costs mean anything.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import as_file, files
from pathlib import Path

from wavekit.llm import LLM
from wavekit.verification.prompts import Sample, samples_of_file, shipped_samples
from wavekit_engines.errors import MisuseError

SHIPPED = "shipped"


@dataclass(frozen=True)
class PromptSet:
    """Prompts that are summed up together."""

    name: str
    samples: tuple[Sample, ...]


def prompt_sets(llm: LLM, given: Sequence[str], count: int, new_tokens: int) -> list[PromptSet]:
    """The first ``count`` prompts of each of ``given``, or as many that come along where there are none.

    Args:
        llm: whose tokenizer and chat template are used.
        given: ``NAME=FILE`` or ``FILE``, which is then named as the file, in any form that `wavekit calibrate` reads.
        count: prompts of a set.
        new_tokens: prompts are cut so that as many fit behind them.

    Raises:
        MisuseError: two sets of one name, a file without a usable prompt, or files for a bundle without a tokenizer.
        PromptError: a file that cannot be read.
    """
    if not given:
        return [_shipped(llm, count, new_tokens)]
    sets = list[PromptSet]()
    for item in given:
        name, file = _named(item)
        if any(name == other.name for other in sets):
            raise MisuseError(f"two prompt sets are called {name}: give them names, as in --prompts other={file}")
        sets.append(PromptSet(name, tuple(samples_of_file(llm, file, count, new_tokens))))
        if not sets[-1].samples:
            raise MisuseError(f"{file} holds no prompt that can be used")
    return sets


def _named(item: str) -> tuple[str, Path]:
    name, equals, file = item.partition("=")
    if not equals or Path(item).is_file():
        return Path(item).name.partition(".")[0], Path(item)
    if not name or not file:
        raise MisuseError(f"--prompts {item}: say NAME=FILE, or FILE alone")
    return name, Path(file)


def _shipped(llm: LLM, count: int, new_tokens: int) -> PromptSet:
    if llm.tokenizer is None:
        return PromptSet(SHIPPED, tuple(shipped_samples(llm, count, new_tokens)))
    with as_file(files("wavekit_calibration") / "data" / "prompts.jsonl") as file:
        samples = samples_of_file(llm, file, None, new_tokens)
    step = max(1, len(samples) // count)
    return PromptSet(SHIPPED, tuple(samples[::step][:count]))
