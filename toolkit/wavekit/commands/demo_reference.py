"""What the demo compares with: transformers, in fp32 and without compilation, reading the same GGUF file on its own.

It is given token ids, not text: of this model's GGUF file transformers reads a tokenizer that does not split numbers
into digits, as the model's own does.
"""

import os
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

from wavekit.commands.demo_comparison import Text

_QUIET = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error", "TQDM_DISABLE": "1"}


def quieten() -> None:
    """Keep transformers' progress bars out of the demo's; to be called before anything imports it."""
    os.environ.update(_QUIET)


class Reference:
    """The model as transformers computes it."""

    def __init__(self, gguf: Path, threads: int, stop_token_ids: Sequence[int]) -> None:
        """Read and dequantize the file; takes long, since transformers parses it several times."""
        import torch
        import transformers

        torch.set_num_threads(threads)
        self._torch = torch
        self._model: Any = transformers.AutoModelForCausalLM.from_pretrained(
            gguf.parent,
            gguf_file=gguf.name,
            dtype=torch.float32,
            attn_implementation="eager",
            quantization_config=transformers.GgufConfig(dequantize=True),
        )
        self._stop_token_ids = list(stop_token_ids)

    def write(self, prompt: Sequence[int], new_tokens: int) -> Text:
        """Greedy text after ``prompt``."""
        ids = self._torch.tensor([list(prompt)])
        watch = _Stopwatch()
        written = self._model.generate(
            ids,
            attention_mask=self._torch.ones_like(ids),
            max_new_tokens=new_tokens,
            do_sample=False,
            eos_token_id=self._stop_token_ids,
            pad_token_id=self._stop_token_ids[0],
            streamer=watch,
        )
        _, first, *_ = watch.times
        return Text(tuple(written[0, len(prompt) :].tolist()), watch.times[-1] - first)

    def margin(self, so_far: Sequence[int], token: int, other: int) -> float:
        """Logit of ``token`` as the next one, minus that of ``other``."""
        with self._torch.no_grad():
            logits = self._model(self._torch.tensor([list(so_far)])).logits[0, -1]
        return float(logits[token] - logits[other])


class _Stopwatch:
    """A streamer of transformers: it is told the prompt first, then every token."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, _: Any) -> None:
        self.times.append(perf_counter())

    def end(self) -> None:
        """Nothing is left to do."""
