"""Whether a decoder taken apart still computes what the model computes as a whole."""

from collections.abc import Sequence

import torch

from wavekit_calibration.errors import NonFiniteStatesError
from wavekit_calibration.hidden_states import capture
from wavekit_calibration.model import Decoder, check_finite
from wavekit_engines.errors import UnsupportedModelError

_TOKENS = 8


@torch.inference_mode()
def check_parts(decoder: Decoder, token_ids: Sequence[int]) -> None:
    """Compare body, final norm and head put together with the whole model on the beginning of a text.

    Raises:
        NonFiniteStatesError: the logits hold NaN or infinity.
        UnsupportedModelError: the parts do not give the model's logits.
    """
    ids = torch.tensor([list(token_ids)[:_TOKENS]])
    whole = decoder.model(input_ids=ids.to(decoder.input_device), use_cache=False).logits[0].float()
    last: list[torch.Tensor] = []

    def keep_last(boundary: int, states: torch.Tensor) -> None:
        check_finite(boundary, states)
        if boundary == decoder.num_layers:
            last.append(states)

    capture(decoder, ids, [(0, t) for t in range(ids.shape[1])], keep_last)
    ours = decoder.logits(last[0]).to(whole.device)
    if not bool(torch.isfinite(whole).all()):
        raise NonFiniteStatesError("the model's logits are not finite; the checkpoint's head is damaged")
    tolerance = 1e-3 if whole.dtype == decoder.model.dtype else 3e-2
    if float((ours - whole).abs().max()) > tolerance * max(1.0, float(whole.abs().max())):
        kind = type(decoder.model).__name__
        raise UnsupportedModelError(f"{kind} does more between its last layer and its logits than wavekit knows")
