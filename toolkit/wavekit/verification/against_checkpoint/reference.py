"""The checkpoint as transformers computes it, in float32: states at every boundary and within layers, and logits."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from wavekit_calibration.model import Decoder, open_decoder
from wavekit_engines.decoder_spec import NormPlacement
from wavekit_engines.engine import Array
from wavekit_engines.errors import WavekitError

_BEFORE_MLP: dict[NormPlacement, str] = {
    "pre": "post_attention_layernorm",
    "sandwich": "pre_feedforward_layernorm",
    "post": "mlp",
}
"""The module of a layer whose input is the residual stream between attention and MLP."""


@dataclass(frozen=True)
class States:
    """The residual stream over one text: before layer i in ``entering[i]``, between its halves in ``middle[i]``, after
    it in ``leaving[i]``; each float32 [layers, T, H].
    """

    entering: Array
    middle: Array
    leaving: Array

    def boundary(self, number: int) -> Array:
        """Float32 [T, H]."""
        rows: Array = self.entering[number] if number < len(self.entering) else self.leaving[-1]
        return rows


def joined(boundaries: Array, middle: Array) -> States:
    """The states of layers that hand theirs on, from every boundary [layers + 1, T, H]: kept once."""
    return States(boundaries[:-1], middle, boundaries[1:])


class Reference:
    """An opened checkpoint."""

    def __init__(self, path: str, placement: NormPlacement) -> None:
        """Open a folder or GGUF file in float32; ``placement`` says where its layers have norms.

        Raises:
            CheckpointError: the files cannot be read.
        """
        self.decoder: Decoder
        self.decoder, self.tokenizer = open_decoder(path, dtype="float32")
        self._before_mlp = _BEFORE_MLP[placement]

    @torch.inference_mode()
    def states(self, ids: Sequence[int], given: Array | None = None) -> States:
        """Run a text.

        Args:
            ids: T tokens.
            given: float32 [layers, T, H]: what every layer is given instead of what the one before it left. So each
                layer answers for itself alone, all in one pass.
        """
        kept: dict[str, list[torch.Tensor]] = {"entering": [], "middle": [], "leaving": []}
        replacing = None if given is None else torch.from_numpy(np.ascontiguousarray(given))[:, None]
        hooks = []
        for index, layer in enumerate(self.decoder.layers):
            module = getattr(layer, self._before_mlp, None)
            if module is None:
                raise WavekitError(
                    f"{type(layer).__name__} has no {self._before_mlp}, so its halves cannot be told apart"
                )
            hooks.append(layer.register_forward_pre_hook(_entering(kept, replacing, index), with_kwargs=True))
            hooks.append(module.register_forward_pre_hook(_middle(kept), with_kwargs=True))
            hooks.append(layer.register_forward_hook(_leaving(kept)))
        try:
            self.decoder.body(input_ids=torch.tensor([list(ids)]), use_cache=False)
        finally:
            for hook in hooks:
                hook.remove()
        middle = torch.cat(kept["middle"]).numpy()
        if given is not None:
            return States(torch.cat(kept["entering"]).numpy(), middle, torch.cat(kept["leaving"]).numpy())
        return joined(torch.cat([*kept["entering"], kept["leaving"][-1]]).numpy(), middle)

    @torch.inference_mode()
    def logits(self, states: Array) -> Array:
        """Final norm and head on states [n, H] of the last boundary: float32 [n, V]."""
        logits: Array = self.decoder.logits(torch.from_numpy(np.ascontiguousarray(states, np.float32))).numpy()
        return logits

    def encode(self, text: str) -> list[int]:
        """Token ids as the checkpoint's own tokenizer gives them."""
        ids: list[int] = self.tokenizer(text)["input_ids"]
        return ids

    def encode_chat(self, messages: Sequence[dict[str, Any]]) -> list[int] | None:
        """The same of a chat; None where the checkpoint has no template."""
        if not getattr(self.tokenizer, "chat_template", None):
            return None
        ids: list[int] = self.tokenizer.apply_chat_template(
            list(messages), add_generation_prompt=True, return_dict=False
        )
        return ids


def _entering(kept: dict[str, list[torch.Tensor]], replacing: torch.Tensor | None, index: int) -> Callable[..., Any]:
    def hook(_module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if replacing is not None and args:
            args = (replacing[index], *args[1:])
        elif replacing is not None:
            kwargs = {**kwargs, "hidden_states": replacing[index]}
        kept["entering"].append((args[0] if args else kwargs["hidden_states"]).clone())
        return args, kwargs

    return hook


def _middle(kept: dict[str, list[torch.Tensor]]) -> Callable[..., Any]:
    def hook(_module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        kept["middle"].append((args[0] if args else next(iter(kwargs.values()))).clone())

    return hook


def _leaving(kept: dict[str, list[torch.Tensor]]) -> Callable[..., Any]:
    def hook(_module: Any, _args: Any, output: Any) -> None:
        kept["leaving"].append((output[0] if isinstance(output, tuple) else output).clone())

    return hook
