"""What a generation tells: the text in steps while it is written, and everything about it at its end."""

from dataclasses import dataclass
from typing import Literal

from wavekit.decoding.exploration import ExplorationStats
from wavekit.decoding.generation import DecodeStats
from wavekit.decoding.speculation import SpeculationStats

FinishReason = Literal["stop", "length", "deadline", "cancelled"]


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural logarithms of probabilities, as the model gives them before temperature, penalties, filters and masks.

    ``best`` holds the most likely tokens and theirs, the likeliest first; as many as were asked for.
    """

    token_id: int
    logprob: float
    best: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class Step:
    """What one tick added to a text.

    ``text`` may be empty, while a character is unfinished or may begin a stop string. ``accepted`` of the tokens, the
    first ones, had been proposed before the model said them. ``logprobs`` has one entry a token if they were asked for.
    """

    text: str
    token_ids: tuple[int, ...] = ()
    accepted: int = 0
    logprobs: tuple[TokenLogprobs, ...] = ()


@dataclass(frozen=True)
class Timings:
    """Where the time went, in seconds, and tokens a second.

    ``prefill_seconds`` ends with the first token; ``decode_seconds`` covers the others, without what the reader of a
    stream did between pieces. ``host_share`` is the part of ``decode_seconds`` spent outside engine runs.
    """

    prefill_seconds: float
    decode_seconds: float
    tokens_per_second: float
    host_share: float
    ticks: int

    @classmethod
    def of(cls, stats: DecodeStats, seconds: float, new_tokens: int) -> "Timings":
        """Timings of ``new_tokens`` tokens in ``seconds``."""
        decode = max(seconds - stats.prefill_seconds, 0.0)
        if new_tokens < 2:  # nothing was decoded
            return cls(stats.prefill_seconds, decode, 0.0, 0.0, 0)
        return cls(
            prefill_seconds=stats.prefill_seconds,
            decode_seconds=decode,
            tokens_per_second=(new_tokens - 1) / decode,
            host_share=1.0 - stats.decode_engine_seconds / decode,
            ticks=stats.ticks,
        )


@dataclass(frozen=True)
class GenerationResult:
    """A finished text.

    ``token_ids`` holds every committed token, a stop token at the end included; ``text`` ends before a stop string and
    shows no special tokens. ``finish_reason`` is "stop" after a stop token or string, or where a schema or regular
    expression is complete; "length" at ``max_new_tokens`` or the end of the context; "deadline" where time ran out;
    "cancelled" where a stream was closed. ``logprobs`` has one entry a token if they were asked for.
    ``reused_tokens`` of the prompt were known from earlier texts.
    """

    token_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason
    prompt_tokens: int
    timings: Timings
    speculation: SpeculationStats
    exploration: ExplorationStats
    logprobs: tuple[TokenLogprobs, ...] = ()
    reused_tokens: int = 0
