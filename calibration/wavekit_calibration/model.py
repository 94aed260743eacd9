"""The decoder under measurement, opened by transformers: its layers, its final norm and its head.

Finds the parts by their role, so one file serves every family that transformers knows; `parts_check` compares them, put
together, with the model's own logits and refuses a model whose arithmetic differs. Tokenises prompts with the
checkpoint's chat template. Knows nothing of statistics.
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from wavekit_calibration.errors import NonFiniteStatesError
from wavekit_calibration.gguf_model import open_gguf
from wavekit_calibration.prompts import Message, Prompt
from wavekit_engines.checkpoint import open_checkpoint
from wavekit_engines.errors import CheckpointError, MisuseError, UnsupportedModelError

_NORM_NAMES = ("norm", "final_layernorm", "final_layer_norm", "ln_f")
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class Decoder:
    """A causal language model taken apart: body of decoder layers, final norm, head.

    The head's logits are ``softcap(scale * head(norm(h)))``.
    """

    model: Any
    body: Any
    layers: torch.nn.ModuleList
    norm: torch.nn.Module
    head: torch.nn.Module
    scale: float
    softcap: float | None

    @property
    def num_layers(self) -> int:
        """N."""
        return len(self.layers)

    @property
    def hidden_size(self) -> int:
        """Width of the residual stream."""
        return int(self.model.config.get_text_config().hidden_size)

    @property
    def vocab_size(self) -> int:
        """Rows of the head."""
        return int(self.model.get_output_embeddings().weight.shape[0])

    @property
    def input_device(self) -> torch.device:
        """Where token ids go in; a sharded model has several devices."""
        return _device_of(self.model.get_input_embeddings())

    @property
    def head_in_layers(self) -> float:
        """Parameters of the head relative to a layer's: its cost where reading weights is what takes time."""
        layer = sum(p.numel() for p in self.layers[0].parameters())
        return float(sum(p.numel() for p in self.head.parameters()) / layer)

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        """Final norm and head on residual states [P, D]: [P, V] float32."""
        normed = self.norm(states.to(device=_device_of(self.head), dtype=self.model.dtype))
        logits: torch.Tensor = self.head(normed).float() * self.scale
        return logits if self.softcap is None else self.softcap * torch.tanh(logits / self.softcap)


def _device_of(module: Any) -> torch.device:
    """Where a module computes; weights that accelerate keeps elsewhere (meta) are brought to the processor."""
    device: torch.device = module.weight.device
    return torch.device("cpu") if device.type == "meta" else device


def check_finite(boundary: int, states: torch.Tensor) -> None:
    """Refuse NaN and infinity in states of any shape.

    Raises:
        NonFiniteStatesError: naming the boundary.
    """
    if not bool(torch.isfinite(states).all()):
        raise NonFiniteStatesError(
            f"the hidden states at boundary {boundary} are not finite: the checkpoint is damaged, or its numbers "
            "overflow in this dtype (try --dtype float32)"
        )


def take_apart(model: Any) -> Decoder:
    """Find the parts of a causal language model of transformers.

    Raises:
        UnsupportedModelError: no decoder layers, final norm or head where such models have them.
    """
    config = model.config.get_text_config()
    body = model.get_decoder()
    layers = next(
        (
            child
            for child in body.children()
            if isinstance(child, torch.nn.ModuleList) and len(child) == config.num_hidden_layers
        ),
        None,
    )
    norm = next(
        (getattr(body, name) for name in _NORM_NAMES if isinstance(getattr(body, name, None), torch.nn.Module)), None
    )
    head = model.get_output_embeddings()
    if layers is None or norm is None or head is None:
        raise UnsupportedModelError(f"{type(model).__name__} is not a decoder with layers, a final norm and a head")
    scale = getattr(config, "logit_scale", None) or 1.0 / (getattr(config, "logits_scaling", None) or 1.0)
    softcap = getattr(config, "final_logit_softcapping", None)
    return Decoder(model, body, layers, norm, head, float(scale), None if softcap is None else float(softcap))


def open_decoder(path: str, device: str = "cpu", dtype: str = "auto") -> tuple[Decoder, Any]:
    """Open a checkpoint with transformers: the decoder, ready to run, and its tokenizer.

    Args:
        path: a Hugging Face folder, a GGUF file, or a repository id where the hub can be reached.
        device: a torch device, or ``auto`` to spread the layers over the devices there are (needs accelerate).
        dtype: float32, bfloat16, float16, or ``auto`` for the checkpoint's own.

    Raises:
        MisuseError: no such device, or a GGUF file to be spread over several.
        CheckpointError: the files cannot be read.
    """
    if Path(path).is_file() and device == "auto":
        raise MisuseError(f"{path} is a GGUF file, which --device auto cannot spread; name one device")
    placement = {"device_map": "auto"} if device == "auto" else {}
    target = None if device == "auto" else usable_device(device)
    if placement and not find_spec("accelerate"):
        raise MisuseError("--device auto needs accelerate: pip install accelerate")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    if Path(path).is_file():
        model, tokenizer = open_gguf(open_checkpoint(path), _DTYPES.get(dtype, torch.float32))
    else:
        model, tokenizer = _from_pretrained(path, dtype, placement)
    if target is not None:
        model.to(target)
    return take_apart(model.eval()), tokenizer


def _from_pretrained(path: str, dtype: str, placement: dict[str, str]) -> tuple[Any, Any]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    local = Path(path).is_dir()
    try:
        with _quiet():
            model: Any = AutoModelForCausalLM.from_pretrained(
                path, dtype=_DTYPES.get(dtype, "auto"), local_files_only=local, **placement
            )
            tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=local)
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise CheckpointError(f"{path} cannot be opened by transformers: {reason}") from error
    return model, tokenizer


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep transformers' progress bars out of ours."""
    from transformers.utils import logging

    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        logging.enable_progress_bar()  # type: ignore[no-untyped-call]


def usable_device(name: str) -> torch.device:
    """Return a torch device that exists here.

    Raises:
        MisuseError: an unknown name, or a device this machine (or this torch) does not have.
    """
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise MisuseError(f"device {name} cannot be used here: {str(error).splitlines()[0]}") from None
    return device


def encode_prompt(tokenizer: Any, prompt: Prompt) -> list[int]:
    """Token ids of a prompt up to where the answer begins, by the checkpoint's chat template if it has one.

    Templates that know no system turn get it in front of the first user message.
    """
    if not getattr(tokenizer, "chat_template", None):
        ids: list[int] = tokenizer("\n\n".join(m.content for m in prompt.messages))["input_ids"]
        return ids
    from jinja2.exceptions import TemplateError

    try:
        return _apply_template(tokenizer, prompt.messages)
    except TemplateError:
        return _apply_template(tokenizer, _without_system(prompt.messages))


def encode_answer(tokenizer: Any, answer: str) -> list[int]:
    """Token ids of an answer's text, without any that mark a beginning or an end."""
    ids: list[int] = tokenizer(answer, add_special_tokens=False)["input_ids"]
    return ids


def _apply_template(tokenizer: Any, messages: Sequence[Message]) -> list[int]:
    turns = [{"role": m.role, "content": m.content} for m in messages]
    ids: list[int] = tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=False)
    return ids


def _without_system(messages: Sequence[Message]) -> list[Message]:
    system = "\n\n".join(m.content for m in messages if m.role == "system")
    turns = [m for m in messages if m.role != "system"]
    if not system or not turns:
        return turns
    return [Message(turns[0].role, f"{system}\n\n{turns[0].content}"), *turns[1:]]
