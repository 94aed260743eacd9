"""What a program that embeds wavekit can watch: statistics, the logger "wavekit", and spans.

None of them ever holds a prompt, a text or a token. Spans need the package opentelemetry; without it nothing is traced.
"""

import logging
from typing import Any

from wavekit.results import GenerationResult
from wavekit.statistics import Tally

try:
    from opentelemetry import context as _context
    from opentelemetry import trace as _trace
except ImportError:
    _trace = None  # type: ignore[assignment]

logger = logging.getLogger("wavekit")


class Watch:
    """Tells of one generation. Its span lies below the one that was current where this was made."""

    def __init__(self, tally: Tally, mode: str, prompt_tokens: int) -> None:
        self._tally, self._mode, self._prompt_tokens = tally, mode, prompt_tokens
        self._parent: Any = _context.get_current() if _trace is not None else None
        self._span: Any = None

    def start(self) -> None:
        """The generation has begun."""
        self._tally.begin()
        if _trace is not None:
            attributes: dict[str, Any] = {
                "wavekit.speculate": self._mode,
                "gen_ai.usage.input_tokens": self._prompt_tokens,
            }
            tracer = _trace.get_tracer("wavekit")
            self._span = tracer.start_span("wavekit.generate", context=self._parent, attributes=attributes)

    def end(self, result: GenerationResult | None, error: BaseException | None = None) -> None:
        """The generation has ended: with a result, with an error, or because its reader let go of it (neither)."""
        self._tally.end(result, error)
        if result is not None:
            logger.debug(
                "generation: %d + %d tokens, %s, seconds: %.3f prefill, %.3f decode, tau %.2f (%s)",
                result.prompt_tokens,
                len(result.token_ids),
                result.finish_reason,
                result.timings.prefill_seconds,
                result.timings.decode_seconds,
                result.speculation.tau,
                result.speculation.mode,
            )
        elif error is not None:
            logger.error("generation of %d prompt tokens failed: %s", self._prompt_tokens, type(error).__name__)
        if self._span is None:
            return
        if result is not None:
            self._span.set_attributes(_attributes(result))
        if error is not None:
            self._span.record_exception(error)
            self._span.set_status(_trace.StatusCode.ERROR, type(error).__name__)
        self._span.end()


def _attributes(result: GenerationResult) -> dict[str, Any]:
    return {
        "gen_ai.usage.output_tokens": len(result.token_ids),
        "gen_ai.response.finish_reasons": [result.finish_reason],
        "wavekit.prefill_seconds": result.timings.prefill_seconds,
        "wavekit.decode_seconds": result.timings.decode_seconds,
        "wavekit.tau": result.speculation.tau,
    }
