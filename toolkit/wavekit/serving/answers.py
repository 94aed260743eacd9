"""The bodies of answers, whole or as the chunks of a stream.

Knows the form of the API, tokens and their texts; no HTTP.
"""

import time
import uuid
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

    def __init__(self, model: str, tokenizer: Tokenizer, ends: frozenset[int], steps: bool, usage: bool) -> None:
        """Tell of ``steps`` and of ``usage`` in chunks if asked for; tokens of ``ends`` are no text."""
        self._tokenizer, self._ends = tokenizer, ends
        self._steps, self._usage = steps, usage
        self._head = {"id": f"{self.prefix}-{uuid.uuid4().hex}", "created": int(time.time()), "model": model}

    def whole(self, result: GenerationResult) -> dict[str, Any]:
        """The answer in one body."""
        choice = {"index": 0, **self._text(result.text), "logprobs": self._logprobs(result.logprobs)}
        choice["finish_reason"] = _REASONS[result.finish_reason]
        return {**self._head, "object": self.kind, "choices": [choice], "usage": _usage(result)}

    def first(self) -> list[dict[str, Any]]:
        """Chunks before any text."""
        return []

    def chunk(self, step: Step) -> list[dict[str, Any]]:
        """Chunks for what a tick added."""
        if not (step.text or step.logprobs or self._steps):
            return []
        chunk = self._chunk(self._delta(step.text), self._logprobs(step.logprobs), None)
        if self._steps:
            chunk["wavekit"] = {"tokens": len(step.token_ids), "accepted": step.accepted, "parts": self._parts(step)}
        return [chunk]

    def last(self, result: GenerationResult) -> list[dict[str, Any]]:
        """Chunks after all text."""
        chunk = self._chunk(self._delta(""), None, _REASONS[result.finish_reason])
        if self._steps:
            chunk["wavekit"] = {
                "tau": result.speculation.tau,
                "speculate": result.speculation.mode,
                "tokens_per_second": result.timings.tokens_per_second,
                "prefill_seconds": result.timings.prefill_seconds,
            }
        if not self._usage:
            return [chunk]
        return [chunk, {**self._head, "object": self.chunk_kind, "choices": [], "usage": _usage(result)}]

    def _chunk(self, delta: dict[str, Any], logprobs: Any, reason: str | None) -> dict[str, Any]:
        choice = {"index": 0, **delta, "logprobs": logprobs, "finish_reason": reason}
        chunk = {**self._head, "object": self.chunk_kind, "choices": [choice]}
        return {**chunk, "usage": None} if self._usage else chunk

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

    def _logprobs(self, entries: Sequence[TokenLogprobs]) -> dict[str, Any] | None:
        raise NotImplementedError


class ChatAnswer(Answer):
    """In the form of chat completions."""

    prefix, kind, chunk_kind = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def first(self) -> list[dict[str, Any]]:
        """See `Answer.first`: whose message it is."""
        return [self._chunk({"delta": {"role": "assistant", "content": ""}}, None, None)]

    def _text(self, text: str) -> dict[str, Any]:
        return {"message": {"role": "assistant", "content": text, "refusal": None}}

    def _delta(self, text: str) -> dict[str, Any]:
        return {"delta": {"content": text} if text else {}}

    def _logprobs(self, entries: Sequence[TokenLogprobs]) -> dict[str, Any] | None:
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
        self._offset = 0

    def _text(self, text: str) -> dict[str, Any]:
        return {"text": text}

    def _delta(self, text: str) -> dict[str, Any]:
        return {"text": text}

    def _logprobs(self, entries: Sequence[TokenLogprobs]) -> dict[str, Any] | None:
        if not entries:
            return None
        said = self._said(entries)
        tokens = [self._token(entry.token_id) for entry in said]
        offsets = []
        for token in tokens:
            offsets.append(self._offset)
            self._offset += len(token)
        best = [{self._token(token): logprob for token, logprob in entry.best} for entry in said]
        return {
            "tokens": tokens,
            "token_logprobs": [entry.logprob for entry in said],
            "top_logprobs": best if any(best) else None,
            "text_offset": offsets,
        }


def _usage(result: GenerationResult) -> dict[str, Any]:
    prompt, new = result.prompt_tokens, len(result.token_ids)
    cached = {"cached_tokens": result.reused_tokens}
    counts = {"prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new}
    return {**counts, "prompt_tokens_details": cached}
