"""The bodies of answers, whole or as the chunks of a stream.

Knows the form of the API, tokens and their texts; no HTTP.
"""

import time
import uuid
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from wavekit.results import GenerationResult, Step, TokenLogprobs
from wavekit.streaming import token_bytes
from wavekit.tokenizer import Tokenizer

_REASONS = {"stop": "stop", "length": "length", "deadline": "length", "cancelled": "length"}


class Answer:
    """The answer to one request; `ChatAnswer` and `CompletionAnswer` say in what form."""

    prefix = ""
    kind = chunk_kind = ""

    def __init__(
        self, model: str, tokenizer: Tokenizer, ends: frozenset[int], steps: bool, usage: bool, each: int = 1
    ) -> None:
        """Tell of ``steps`` and of ``usage`` in chunks if asked for; tokens of ``ends`` are no text.

        There are ``each`` choices a prompt, and choices are numbered prompt by prompt.
        """
        self._tokenizer, self._ends, self._each = tokenizer, ends, each
        self._steps, self._usage = steps, usage
        self._head = {"id": f"{self.prefix}-{uuid.uuid4().hex}", "created": int(time.time()), "model": model}

    def whole(self, results: Sequence[GenerationResult]) -> dict[str, Any]:
        """The answer in one body."""
        choices = [
            {
                "index": choice,
                **self._text(result.text),
                "logprobs": self._logprobs(choice, result.logprobs),
                "finish_reason": _REASONS[result.finish_reason],
            }
            for choice, result in enumerate(results)
        ]
        return {**self._head, "object": self.kind, "choices": choices, "usage": self._counts(results)}

    def first(self, choice: int) -> list[dict[str, Any]]:
        """Chunks before any text of a choice."""
        return []

    def chunk(self, choice: int, step: Step) -> list[dict[str, Any]]:
        """Chunks for what a tick added."""
        if not (step.text or step.logprobs or self._steps):
            return []
        chunk = self._chunk(choice, self._delta(step.text), self._logprobs(choice, step.logprobs), None)
        if self._steps:
            chunk["wavekit"] = {"tokens": len(step.token_ids), "accepted": step.accepted, "parts": self._parts(step)}
        return [chunk]

    def last(self, choice: int, result: GenerationResult) -> list[dict[str, Any]]:
        """Chunks after all text of a choice."""
        chunk = self._chunk(choice, self._delta(""), None, _REASONS[result.finish_reason])
        if self._steps:
            chunk["wavekit"] = {
                "tau": result.speculation.tau,
                "speculate": result.speculation.mode,
                "tokens_per_second": result.timings.tokens_per_second,
                "prefill_seconds": result.timings.prefill_seconds,
            }
        return [chunk]

    def end(self, results: Sequence[GenerationResult]) -> list[dict[str, Any]]:
        """Chunks after all choices."""
        if not self._usage:
            return []
        return [{**self._head, "object": self.chunk_kind, "choices": [], "usage": self._counts(results)}]

    def _chunk(self, choice: int, delta: dict[str, Any], logprobs: Any, reason: str | None) -> dict[str, Any]:
        said = {"index": choice, **delta, "logprobs": logprobs, "finish_reason": reason}
        chunk = {**self._head, "object": self.chunk_kind, "choices": [said]}
        return {**chunk, "usage": None} if self._usage else chunk

    def _counts(self, results: Sequence[GenerationResult]) -> dict[str, Any]:
        """Numbers of tokens; a prompt counts once, however many choices it has."""
        prompts = results[:: self._each]
        prompt = sum(result.prompt_tokens for result in prompts)
        new = sum(len(result.token_ids) for result in results)
        cached = {"cached_tokens": sum(result.reused_tokens for result in prompts)}
        counts = {"prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new}
        return {**counts, "prompt_tokens_details": cached}

    def _parts(self, step: Step) -> list[str]:
        """The text of each token by itself."""
        return [self._token(token) if token not in self._ends else "" for token in step.token_ids]

    def _token(self, token: int) -> str:
        return token_bytes(self._tokenizer, token).decode(errors="replace")

    def _said(self, entries: Iterable[TokenLogprobs]) -> list[TokenLogprobs]:
        return [entry for entry in entries if entry.token_id not in self._ends]

    def _text(self, text: str) -> dict[str, Any]:
        raise NotImplementedError

    def _delta(self, text: str) -> dict[str, Any]:
        raise NotImplementedError

    def _logprobs(self, choice: int, entries: Sequence[TokenLogprobs]) -> dict[str, Any] | None:
        raise NotImplementedError


class ChatAnswer(Answer):
    """In the form of chat completions."""

    prefix, kind, chunk_kind = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def first(self, choice: int) -> list[dict[str, Any]]:
        """See `Answer.first`: whose message it is."""
        return [self._chunk(choice, {"delta": {"role": "assistant", "content": ""}}, None, None)]

    def _text(self, text: str) -> dict[str, Any]:
        return {"message": {"role": "assistant", "content": text, "refusal": None}}

    def _delta(self, text: str) -> dict[str, Any]:
        return {"delta": {"content": text} if text else {}}

    def _logprobs(self, choice: int, entries: Sequence[TokenLogprobs]) -> dict[str, Any] | None:
        if not entries:
            return None
        content = [
            {
                **self._named(entry.token_id, entry.logprob),
                "top_logprobs": [self._named(token, logprob) for token, logprob in entry.best],
            }
            for entry in self._said(entries)
        ]
        return {"content": content, "refusal": None}

    def _named(self, token: int, logprob: float) -> dict[str, Any]:
        data = token_bytes(self._tokenizer, token)
        return {"token": data.decode(errors="replace"), "logprob": logprob, "bytes": list(data)}


class CompletionAnswer(Answer):
    """In the form of text completions."""

    prefix, kind, chunk_kind = "cmpl", "text_completion", "text_completion"

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._offsets = Counter[int]()  # by choice

    def _text(self, text: str) -> dict[str, Any]:
        return {"text": text}

    def _delta(self, text: str) -> dict[str, Any]:
        return {"text": text}

    def _logprobs(self, choice: int, entries: Sequence[TokenLogprobs]) -> dict[str, Any] | None:
        if not entries:
            return None
        said = self._said(entries)
        tokens = [self._token(entry.token_id) for entry in said]
        offsets = []
        for token in tokens:
            offsets.append(self._offsets[choice])
            self._offsets[choice] += len(token)
        best = [{self._token(token): logprob for token, logprob in entry.best} for entry in said]
        return {
            "tokens": tokens,
            "token_logprobs": [entry.logprob for entry in said],
            "top_logprobs": best if any(best) else None,
            "text_offset": offsets,
        }
