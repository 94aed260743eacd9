"""Reads the residual stream between decoder layers while the model runs.

Boundary 0 is what the first layer is given (the embedding's output after any scale), boundary k what layer k - 1 gives,
boundary N what the last layer gives, *before* the final norm. This is transformers' ``hidden_states[k]``, whose last
entry alone is taken after the norm. Hooks on the layers see exactly these tensors on whatever device each layer lives,
and only the rows asked for are kept, so nothing grows with the length of the text.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from wavekit_calibration.model import Decoder

Sink = Callable[[int, torch.Tensor], None]


@torch.inference_mode()
def capture(decoder: Decoder, token_ids: torch.Tensor, positions: Sequence[tuple[int, int]], sink: Sink) -> None:
    """Run the body of a decoder on a batch and hand over its residual stream at some positions.

    Args:
        decoder: the model.
        token_ids: [B, T] int64. Shorter sequences are filled up on the right with any token: under causal attention no
            position sees what comes after it, so no mask is needed.
        positions: P pairs (sequence in the batch, position in the sequence).
        sink: called with k and states [P, D] (the layer's dtype and device) for k = 0..N in order. It must not keep a
            view into them longer than the call unless it copies.
    """
    sequence = torch.tensor([s for s, _ in positions], dtype=torch.long)
    position = torch.tensor([p for _, p in positions], dtype=torch.long)

    def pick(boundary: int, states: torch.Tensor) -> None:
        sink(boundary, states[sequence.to(states.device), position.to(states.device)])

    def before_first(_module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        pick(0, args[0] if args else kwargs["hidden_states"])

    def after(boundary: int) -> Callable[[Any, Any, Any], None]:
        def hook(_module: Any, _args: Any, output: Any) -> None:
            pick(boundary, output[0] if isinstance(output, tuple) else output)

        return hook

    hooks = [decoder.layers[0].register_forward_pre_hook(before_first, with_kwargs=True)]
    hooks += [layer.register_forward_hook(after(k)) for k, layer in enumerate(decoder.layers, 1)]
    try:
        decoder.body(input_ids=token_ids.to(decoder.input_device), use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
