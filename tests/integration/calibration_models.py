"""Tiny models with tokenizers, as calibrate takes them, and the jobs that the tests run on them."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from tiny_models import save_tiny
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from wavekit_calibration.calibrate import Job
from wavekit_calibration.prompts import Message, Prompt, PromptFile
from wavekit_calibration.settings import MeasureSettings, SelectSettings

TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}{% if add_generation_prompt %}>{% endif %}"
)


def save_calibratable(name: str, folder: Path, template: str | None = TEMPLATE) -> Any:
    """Write a tiny random model and a byte-level tokenizer to a folder; returns the model."""
    model = save_tiny(name, folder)
    save_byte_tokenizer(folder, template)
    return model


def save_byte_tokenizer(folder: Path, template: str | None = TEMPLATE) -> None:
    """One token a byte, ids 3 to 258; 0, 1 and 2 are padding, beginning and end."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {"<pad>": 0, "<bos>": 1, "<eos>": 2, **{c: i for i, c in enumerate(alphabet, 3)}}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>")
    fast.chat_template = template
    fast.save_pretrained(folder)


def change_weights(folder: Path, change: Any) -> None:
    """Apply ``change`` to the tensors of a saved model, by name."""
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def prompts(count: int = 10) -> PromptFile:
    """Short prompts of different lengths, every other one with an answer."""
    texts = [f"Say {'very ' * (i % 4)}kind words about number {i}." for i in range(count)]
    answers = [f"Number {i} is a friend of mine." if i % 2 else None for i in range(count)]
    return PromptFile("tiny", tuple(Prompt((Message("user", t),), a) for t, a in zip(texts, answers, strict=True)))


def job(model: Path, out: Path, **changes: Any) -> Job:
    """A quick calibration; ``changes`` go to the settings that have them, or to the job."""
    measure = MeasureSettings(sample_tokens=80, readiness_tokens=40, max_new_tokens=10, batch_size=3)
    select = SelectSettings(draws=10, size=2)
    for name in list(changes):
        if hasattr(measure, name):
            measure = replace(measure, **{name: changes.pop(name)})
        elif hasattr(select, name):
            select = replace(select, **{name: changes.pop(name)})
    return replace(Job(str(model), prompts(), out, measure, select), **changes)


def reference_states(model: Any, ids: list[int]) -> list[torch.Tensor]:
    """Transformers' own hidden_states of one text, the last entry replaced by what the final norm is given."""
    before_norm: list[torch.Tensor] = []
    hook = model.get_decoder().norm.register_forward_pre_hook(lambda _m, args: before_norm.append(args[0]))
    with torch.inference_mode():
        states = list(model(torch.tensor([ids]), output_hidden_states=True).hidden_states)
    hook.remove()
    return [s[0] for s in (*states[:-1], before_norm[0])]
