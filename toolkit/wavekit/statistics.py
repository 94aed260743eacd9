"""What the generations of one loaded bundle add up to."""

import threading
from dataclasses import dataclass, field, replace

from wavekit.results import FinishReason, GenerationResult


@dataclass(frozen=True)
class Statistics:
    """Counts since the bundle was loaded.

    ``running`` have begun and not ended, ``finished`` counts ends by reason,
    ``failed`` those by an error, ``dropped`` streams that their reader let go of. Tokens and seconds are of finished
    ones: ``passes`` of the target gave ``decoded_tokens``, so the two make tau.
    """

    running: int = 0
    finished: dict[FinishReason, int] = field(default_factory=dict)
    failed: int = 0
    dropped: int = 0
    prompt_tokens: int = 0
    new_tokens: int = 0
    decoded_tokens: int = 0
    passes: int = 0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0

    @property
    def tau(self) -> float:
        """Tokens a pass, the one that the target adds itself included; 1.0 before any was decoded."""
        return self.decoded_tokens / self.passes if self.passes else 1.0


class Tally:
    """Keeps statistics; safe to share between threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sum = Statistics()

    def begin(self) -> None:
        """A generation has begun."""
        with self._lock:
            self._sum = replace(self._sum, running=self._sum.running + 1)

    def end(self, result: GenerationResult | None, error: BaseException | None = None) -> None:
        """It has ended: with a result, with an error, or with neither where its reader let go of it."""
        with self._lock:
            total = replace(self._sum, running=self._sum.running - 1)
            if result is None:
                failed = error is not None
                self._sum = replace(total, failed=total.failed + failed, dropped=total.dropped + (not failed))
                return
            count, passes = len(result.token_ids), result.speculation.passes
            self._sum = replace(
                total,
                finished=total.finished | {result.finish_reason: total.finished.get(result.finish_reason, 0) + 1},
                prompt_tokens=total.prompt_tokens + result.prompt_tokens,
                new_tokens=total.new_tokens + count,
                decoded_tokens=total.decoded_tokens + (count - 1 if passes else 0),
                passes=total.passes + passes,
                prefill_seconds=total.prefill_seconds + result.timings.prefill_seconds,
                decode_seconds=total.decode_seconds + result.timings.decode_seconds,
            )

    @property
    def now(self) -> Statistics:
        """The statistics up to now."""
        with self._lock:
            return self._sum
