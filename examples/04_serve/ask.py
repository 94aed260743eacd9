"""Ask a running `wavekit serve` with OpenAI's package: whole, streamed, and in a given shape."""

import json
import os
import sys

import openai

SHAPE = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 20}, "country": {"type": "string", "maxLength": 20}},
    "required": ["city", "country"],
    "additionalProperties": False,
}


def main(url: str = "http://127.0.0.1:8000/v1") -> None:
    """Send three requests to the server at ``url``."""
    client = openai.OpenAI(base_url=url, api_key=os.environ.get("WAVEKIT_API_KEY", "none"))
    model = client.models.list().data[0].id

    chat = [{"role": "user", "content": "What is the capital of France?"}]
    answer = client.chat.completions.create(model=model, messages=chat, temperature=0, max_tokens=24)
    print(answer.choices[0].message.content, answer.usage.completion_tokens, "tokens")

    # "steps" adds to every chunk what a pass of the model gave: here, proposed tokens that it accepted are in brackets.
    story = [{"role": "user", "content": "Tell me a story about a cat, a hat and a bat."}]
    steps = {"wavekit": {"steps": True}}
    stream = client.chat.completions.create(
        model=model, messages=story, temperature=0.7, seed=7, max_tokens=48, stream=True, extra_body=steps
    )
    for chunk in stream:
        told = getattr(chunk, "wavekit", {})
        for number, part in enumerate(told.get("parts", [])):
            print(f"[{part}]" if number < told["accepted"] else part, end="", flush=True)
        if "tau" in told:
            print(f"\n{told['tau']:.2f} tokens a pass, {told['tokens_per_second']:.0f} tokens a second")

    shape = {"type": "json_schema", "json_schema": {"name": "place", "schema": SHAPE}}
    answer = client.chat.completions.create(
        model=model, messages=chat, temperature=0, max_tokens=150, response_format=shape
    )
    print(json.loads(answer.choices[0].message.content))


if __name__ == "__main__":
    main(*sys.argv[1:])
