"""What can be asked of one generation, and whether it makes sense.

`Options` is for type checkers: the keywords of `LLM.generate` and its siblings. `GenerationOptions` holds the same with
their defaults, checked. Knows nothing of engines, tokenizers or the bundle.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral, Real
from typing import Any, TypedDict

from wavekit.decoding.sampling import SamplingParams
from wavekit.decoding.speculation import Mode, Speculation
from wavekit.decoding.timeline import Timeline
from wavekit_engines.errors import MisuseError

MOST_LOGPROBS = 100
"""The most tokens a position whose log probabilities can be asked for."""


class Options(TypedDict, total=False):
    """Keywords of `LLM.generate`, `stream`, `stream_async` and `generate_batch`; see `GenerationOptions`."""

    max_new_tokens: int
    min_tokens: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    frequency_penalty: float
    presence_penalty: float
    logit_bias: Mapping[int, float]
    seed: int
    stop: str | Sequence[str]
    stop_token_ids: Sequence[int] | None
    logprobs: int | None
    json_schema: Mapping[str, Any] | str | None
    regex: str | None
    deadline: float | None
    speculate: Mode | Speculation
    timeline: Timeline | None


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationOptions:
    """How one text is written.

    Attributes:
        max_new_tokens: the most tokens to write; the end of the context may come first.
        min_tokens: tokens before which none of the stop tokens is chosen; stop strings end a text all the same.
        temperature: 0 is greedy; with ``top_k``, ``top_p``, ``min_p``, ``repetition_penalty`` see `SamplingParams`.
        top_k: keep this many most likely tokens; 0: all.
        top_p: keep the most likely tokens that together reach this probability.
        min_p: keep tokens at least this likely relative to the most likely one.
        repetition_penalty: above 1 discourages tokens of the prompt and the text so far.
        frequency_penalty: subtracted from a token's logit each time it has been written, -2 to 2.
        presence_penalty: subtracted once it has been written, -2 to 2.
        logit_bias: added to the logits of tokens by id, -100 to 100.
        seed: the draw for a position depends on seed and position only.
        stop: the text ends before any of these strings.
        stop_token_ids: tokens that end the text; None: those the checkpoint names.
        logprobs: tell the log probability of every token written, and of so many most likely ones beside it, 0 to 100;
            None: do not. They are the model's own, before temperature, penalties, filters and masks.
        json_schema: a JSON schema that the text must satisfy, as a mapping or as JSON; needs the extra ``grammar``.
        regex: a regular expression that the whole text must match, in the syntax of Rust's ``regex``; the same extra.
        deadline: seconds from the call on after which the text ends where it is; checked between passes, and after
            every 512 tokens of a long prompt.
        speculate: who proposes tokens ahead of the model, or a `Speculation` with limits too. Never changes the text.
        timeline: is told when each stage ran.

    Raises MisuseError for a value out of range, naming it.
    """

    max_new_tokens: int = 256
    min_tokens: int = 0
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int = 0
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] | None = None
    logprobs: int | None = None
    json_schema: Mapping[str, Any] | str | None = None
    regex: str | None = None
    deadline: float | None = None
    speculate: Mode | Speculation = "auto"
    timeline: Timeline | None = None

    def __post_init__(self) -> None:
        _ = self.sampling  # checks what is its own
        for name in ("frequency_penalty", "presence_penalty"):
            _check_real(name, getattr(self, name), 2)
        if not isinstance(self.logit_bias, Mapping) or not all(
            isinstance(token, Integral) for token in self.logit_bias
        ):
            raise MisuseError(f"logit_bias is {self.logit_bias!r}; it must be a mapping of token ids to numbers")
        for token, bias in self.logit_bias.items():
            _check_real(f"logit_bias of token {token}", bias, 100)
        _check_integer("max_new_tokens", self.max_new_tokens, 1)
        _check_integer("min_tokens", self.min_tokens, 0, self.max_new_tokens)
        if self.logprobs is not None:
            _check_integer("logprobs", self.logprobs, 0, MOST_LOGPROBS)
        if isinstance(self.stop_token_ids, str) or not isinstance(self.stop_token_ids, Iterable | None):
            raise MisuseError(f"stop_token_ids is {self.stop_token_ids!r}; it must be a list of token ids")
        _check_seconds("deadline", self.deadline)
        if self.json_schema is not None and self.regex is not None:
            raise MisuseError("json_schema and regex are two shapes for one text; give one of them")
        if self.min_tokens and self.constrained:
            raise MisuseError("min_tokens does not go with json_schema or regex: they say where the text may end")

    @property
    def constrained(self) -> bool:
        """Whether the text must have a given shape."""
        return self.json_schema is not None or self.regex is not None

    @property
    def adds(self) -> bool:
        """Whether something is added to logits."""
        return bool(self.logit_bias) or self.frequency_penalty != 0 or self.presence_penalty != 0

    @property
    def sampling(self) -> SamplingParams:
        """How a token is chosen from its logits."""
        return SamplingParams(self.temperature, self.top_k, self.top_p, self.min_p, self.repetition_penalty, self.seed)

    @property
    def speculation(self) -> Speculation:
        """Who proposes, and how much."""
        return self.speculate if isinstance(self.speculate, Speculation) else Speculation(self.speculate)


def _check_integer(name: str, value: object, least: int, most: int | None = None) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least or (most is not None and value > most):
        bounds = f"from {least} up" if most is None else f"from {least} to {most}"
        raise MisuseError(f"{name} is {value!r}; it must be an integer {bounds}")


def _check_real(name: str, value: object, most: float) -> None:
    if isinstance(value, bool) or not isinstance(value, Real) or not abs(float(value)) <= most:
        raise MisuseError(f"{name} is {value!r}; it must be a number from {-most} to {most}")


def _check_seconds(name: str, value: object) -> None:
    if value is not None and (isinstance(value, bool) or not isinstance(value, int | float) or not value > 0):
        raise MisuseError(f"{name} is {value!r}; it must be a number of seconds above 0")
