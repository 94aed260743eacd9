"""The bodies of requests, and what they ask of a generation.

Fields that would change the answer and are not served are refused by name; unknown ones are ignored, as clients send
fields that only say who they are. Knows the form of the API and `wavekit.options`, no engine and no HTTP.
"""

import secrets
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from wavekit.decoding.speculation import Mode
from wavekit.llm import Prompt
from wavekit.options import Options
from wavekit.serving.errors import ApiError

_MOST_STOPS = 16
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "tools": ([],),
    "functions": ([],),
    "tool_choice": ("none", "auto"),
    "audio": (),
    "modalities": (["text"],),
    "prediction": (),
    "stop_token_ids": ([],),
    "include_stop_str_in_output": (False,),
    "skip_special_tokens": (True,),
    "use_beam_search": (False,),
    "guided_json": (),
    "guided_regex": (),
    "structured_outputs": (),
    "continue_final_message": (False,),
    "chat_template": (),
    "chat_template_kwargs": ({},),
}
"""Fields that are not served, and the values that ask for nothing: OpenAI's, and some that other servers add."""


class StreamOptions(BaseModel):
    """What a stream holds besides text."""

    include_usage: bool = False


class JsonSchema(BaseModel):
    """A schema by name."""

    name: str = "schema"
    schema_: dict[str, Any] = Field(default_factory=dict, alias="schema")


class ResponseFormat(BaseModel):
    """The shape of an answer."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class Extension(BaseModel):
    """What this server does beside the API."""

    model_config = ConfigDict(extra="forbid")

    speculate: Mode = "auto"
    regex: str | None = None
    steps: bool = False
    """Tell in every chunk of a stream which tokens a tick committed, and which had been proposed."""


class Body(BaseModel):
    """What chat and text completions have in common."""

    model_config = ConfigDict(extra="allow")

    model: str
    n: int | None = Field(1, ge=1, le=128)
    max_tokens: int | None = Field(None, ge=1)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    seed: int | None = None
    stop: str | list[str] | None = None
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    logit_bias: dict[int, float] | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    top_k: int = Field(0, ge=-1)
    """Both 0 and -1 are off: others' servers say it so."""
    min_p: float = Field(0.0, ge=0, le=1)
    repetition_penalty: float = Field(1.0, gt=0)
    min_tokens: int = Field(0, ge=0)
    ignore_eos: bool = False
    wavekit: Extension = Extension()

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with the numbers of tokens."""
        return self.stream_options is not None and self.stream_options.include_usage

    def check(self, model: str) -> None:
        """Refuse what is not served.

        Raises:
            ApiError: another model, or a field that is not served.
        """
        if self.model != model:
            raise ApiError(
                404, f"the model {self.model!r} is not here; {model!r} is", param="model", code="model_not_found"
            )
        for name, value in (self.model_extra or {}).items():
            if name in _NEUTRAL and value is not None and value not in _NEUTRAL[name]:
                raise ApiError(
                    400, f"{name} is not served here: leave it out", param=name, code="unsupported_parameter"
                )
        if self.stream_options is not None and not self.stream:
            raise ApiError(400, "stream_options goes with stream only", param="stream_options")

    @property
    def most_tokens(self) -> int | None:
        """How long the text may be."""
        return self.max_tokens

    @property
    def prompts(self) -> Sequence[Prompt]:
        """What texts are to go on from, checked as far as that needs no tokenizer.

        Raises:
            ApiError: content that is not text.
        """
        raise NotImplementedError

    @property
    def each(self) -> int:
        """Texts a prompt."""
        return self.n or 1

    def asked(self, context: int, ends: frozenset[int], seconds: float | None) -> list[tuple[Prompt, Options]]:
        """The texts that are asked for, prompt by prompt; those of one prompt differ in their seeds only.

        Raises:
            ApiError: what `options` or `prompts` raises.
        """
        options = self.options(context, ends, seconds)
        seed = options["seed"]
        return [(prompt, {**options, "seed": (seed + i) % 2**64}) for prompt in self.prompts for i in range(self.each)]

    def options(self, context: int, ends: frozenset[int], seconds: float | None) -> Options:
        """The keywords of a generation of a model that reads ``context`` tokens, and whose texts ``ends`` end.

        Raises:
            ApiError: too many stop strings.
        """
        stops = [self.stop] if isinstance(self.stop, str) else self.stop or []
        if len(stops) > _MOST_STOPS:
            raise ApiError(400, f"{len(stops)} stop strings are too many; at most {_MOST_STOPS}", param="stop")
        tokens = self.most_tokens or context
        return {
            "max_new_tokens": tokens,
            "min_tokens": min(self.min_tokens, tokens),
            "temperature": 1.0 if self.temperature is None else self.temperature,
            "top_p": 1.0 if self.top_p is None else self.top_p,
            "top_k": max(self.top_k, 0),
            "min_p": self.min_p,
            "repetition_penalty": self.repetition_penalty,
            "frequency_penalty": self.frequency_penalty or 0.0,
            "presence_penalty": self.presence_penalty or 0.0,
            "logit_bias": self.logit_bias or {},
            "seed": secrets.randbits(63) if self.seed is None else self.seed % 2**64,
            "stop": stops,
            "stop_token_ids": [] if self.ignore_eos else sorted(ends),
            "regex": self.wavekit.regex,
            "speculate": self.wavekit.speculate,
            "deadline": seconds,
        }


class Message(BaseModel):
    """One message of a chat; fields that only a template knows stay."""

    model_config = ConfigDict(extra="allow")

    role: str
    content: str | list[dict[str, Any]] | None = None


class ChatBody(Body):
    """A chat completion."""

    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool = False
    top_logprobs: int | None = Field(None, ge=0, le=20)
    response_format: ResponseFormat | None = None

    @property
    def prompts(self) -> Sequence[Prompt]:
        """See `Body.prompts`: the messages, as a chat template takes them."""
        return [[_plain(message, number) for number, message in enumerate(self.messages)]]

    @property
    def most_tokens(self) -> int | None:
        """See `Body.most_tokens`; where both names are given, the newer one holds."""
        return self.max_completion_tokens or self.max_tokens

    def options(self, context: int, ends: frozenset[int], seconds: float | None) -> Options:
        """See `Body.options`."""
        options = super().options(context, ends, seconds)
        if self.logprobs:
            options["logprobs"] = self.top_logprobs or 0
        elif self.top_logprobs is not None:
            raise ApiError(400, "top_logprobs needs logprobs: true", param="top_logprobs")
        shape = self.response_format
        if shape is not None and shape.type == "json_object":
            options["json_schema"] = {"type": "object"}
        elif shape is not None and shape.type == "json_schema":
            if shape.json_schema is None:
                raise ApiError(400, "response_format lacks its json_schema", param="response_format.json_schema")
            options["json_schema"] = shape.json_schema.schema_
        return options


class CompletionBody(Body):
    """A text completion."""

    prompt: str | list[int] | list[str] | list[list[int]]
    max_tokens: int | None = Field(16, ge=1)
    logprobs: int | None = Field(None, ge=0, le=20)

    @property
    def prompts(self) -> Sequence[Prompt]:
        """See `Body.prompts`."""
        given: Any = self.prompt
        several = not isinstance(given, str) and any(not isinstance(part, int) for part in given)
        return given if several else [given]

    def options(self, context: int, ends: frozenset[int], seconds: float | None) -> Options:
        """See `Body.options`."""
        return {**super().options(context, ends, seconds), "logprobs": self.logprobs}


def _plain(message: Message, number: int) -> Mapping[str, Any]:
    """A message whose content is one text."""
    content = message.content
    if isinstance(content, list):
        parts = [part.get("text") if part.get("type") == "text" else None for part in content]
        if not all(isinstance(part, str) for part in parts):
            where = f"messages.{number}.content"
            raise ApiError(400, f"{where} holds more than text, and nothing else is understood here", param=where)
        content = "".join(part for part in parts if part)
    return {**message.model_dump(exclude_none=True), "content": content or ""}
