"""The worker of a peer: opens one engine, then decodes greedily what standard input asks for.

usage: python peer_worker.py wavekit|genai|transformers MODEL THREADS

Every engine lives in a process of its own, since the engines' packages may need environments of their own; this file is
run by its path and needs nothing but the engine it opens. One JSON object a line each way, on the real standard output:
first ``{"versions": {...}}``, then for each request ``{"prompt": [ids], "new_tokens": n}`` an answer with the ids that
were written and the seconds spent. Nobody stops at an end-of-text token, so that all engines write equally many tokens.
"""

import json
import os
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from time import perf_counter, process_time
from typing import Any, TextIO

Written = dict[str, Any]
"""``tokens``: ids; ``prefill_seconds``: until the first one; ``decode_seconds``: from there to the last one."""

Generate = Callable[[Sequence[int], int], Written]
"""Continue a prompt greedily by so many tokens."""


def written(tokens: list[int], start: float, first: float) -> Written:
    """Time what has just been written."""
    return {"tokens": tokens, "prefill_seconds": first - start, "decode_seconds": perf_counter() - first}


def open_wavekit(path: str, threads: int) -> Generate:
    """Open a bundle with wavekit's public API."""
    import wavekit

    llm = wavekit.load(path, threads=threads)

    def generate(prompt: Sequence[int], new_tokens: int) -> Written:
        start = perf_counter()
        result = llm.generate(list(prompt), max_new_tokens=new_tokens, stop_token_ids=())
        first = start + result.timings.prefill_seconds  # all that follows counts as decoding
        return {**written(list(result.token_ids), start, first), "host_share": result.timings.host_share}

    return generate


def open_genai(path: str, threads: int) -> Generate:
    """Open a folder that onnxruntime-genai's model builder wrote."""
    import numpy as np
    import onnxruntime_genai as og

    config = og.Config(path)
    session = {"intra_op_num_threads": threads}
    config.overlay(json.dumps({"model": {"eos_token_id": [], "decoder": {"session_options": session}}}))
    model = og.Model(config)

    def generate(prompt: Sequence[int], new_tokens: int) -> Written:
        start = perf_counter()
        params = og.GeneratorParams(model)
        params.set_search_options(max_length=len(prompt) + new_tokens, do_sample=False)
        generator = og.Generator(model, params)
        generator.append_tokens(np.array([prompt], np.int32))
        generator.generate_next_token()
        first = perf_counter()
        tokens = [int(generator.get_next_tokens()[0])]
        while not generator.is_done():
            generator.generate_next_token()
            tokens.append(int(generator.get_next_tokens()[0]))
        return written(tokens, start, first)

    return generate


def open_transformers(path: str, threads: int) -> Generate:
    """Open a checkpoint in fp32 with transformers, without compilation."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(threads)
    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    model.eval()
    model.generation_config.eos_token_id = None

    class Stopwatch:
        """A streamer: is told the prompt, then every token."""

        def __init__(self) -> None:
            self.times: list[float] = []

        def put(self, _: torch.Tensor) -> None:
            self.times.append(perf_counter())

        def end(self) -> None:
            """Nothing is left to do."""

    def generate(prompt: Sequence[int], new_tokens: int) -> Written:
        ids = torch.tensor([list(prompt)])
        watch = Stopwatch()
        start = perf_counter()
        ids = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=new_tokens,
            do_sample=False,
            pad_token_id=0,
            streamer=watch,
        )
        return written(ids[0, len(prompt) :].tolist(), start, watch.times[1])

    return generate


OPENERS = {"wavekit": open_wavekit, "genai": open_genai, "transformers": open_transformers}
PACKAGES = {
    "wavekit": ("wavekit", "onnxruntime"),
    "genai": ("onnxruntime-genai", "onnxruntime"),
    "transformers": ("transformers", "torch"),
}


MISSING = 3
"""Exit status where the engine's package is not installed."""


def serve(kind: str, path: str, threads: int, answers: TextIO) -> None:
    """Open the engine, say so, and answer requests until standard input ends."""
    try:
        versions = {package: version(package) for package in PACKAGES[kind]}
    except PackageNotFoundError as error:
        sys.stderr.write(f"{error.name} is not installed\n")
        sys.exit(MISSING)
    generate = OPENERS[kind](path, threads)

    def answer(content: dict[str, object]) -> None:
        answers.write(json.dumps(content) + "\n")
        answers.flush()

    answer({"versions": versions})
    for line in sys.stdin:
        request = json.loads(line)
        cpu = process_time()
        result = generate(request["prompt"], request["new_tokens"])
        answer({**result, "cpu_seconds": process_time() - cpu})


if __name__ == "__main__":
    del sys.path[0]  # the folder of this file, whose modules are no packages of the engine
    if len(sys.argv) != 4 or sys.argv[1] not in OPENERS:
        sys.exit(__doc__)
    protocol = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the engines print must not mix with the answers
    serve(sys.argv[1], sys.argv[2], int(sys.argv[3]), protocol)
