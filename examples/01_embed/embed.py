"""Load a bundle once; write texts whole, piece by piece, and from two threads at the same time."""

import sys
from concurrent.futures import ThreadPoolExecutor

import wavekit


def main(bundle: str) -> None:
    """Write a few short texts with ``bundle``."""
    llm = wavekit.load(bundle)

    whole = llm.generate("The capital of France is", max_new_tokens=8)
    print(repr(whole.text), whole.finish_reason, f"{whole.timings.tokens_per_second:.0f} tokens a second")

    for piece in llm.stream("Once upon a time", max_new_tokens=24, temperature=0.8, seed=7):
        print(piece, end="", flush=True)
    print()

    prompts = ["A haiku about rain:", "Three red fruits:"]
    with ThreadPoolExecutor(len(prompts)) as pool:
        for result in pool.map(lambda prompt: llm.generate(prompt, max_new_tokens=16), prompts):
            print(repr(result.text))


if __name__ == "__main__":
    main(*sys.argv[1:])
