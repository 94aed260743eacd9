"""What the server measures, in Prometheus' form. One registry a server, so that several may live in one process."""

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from wavekit.results import GenerationResult
from wavekit.statistics import Statistics

_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
_TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1)
_TOKENS = (1, 2, 3, 4, 5, 6, 8, 10, 15, 20)


class Metrics:
    """Counts, sums and distributions since the server started."""

    def __init__(self, statistics: Callable[[], Statistics], in_system: Callable[[], int]) -> None:
        """Read what runs from the loaded bundle, and how many requests are there, waiting ones included."""
        self._registry = registry = CollectorRegistry()
        self._requests = Counter("wavekit_requests", "Answers", ["path", "status"], registry=registry)
        self._finished = Counter("wavekit_generations", "Finished texts", ["reason"], registry=registry)
        self._prompt = Counter("wavekit_prompt_tokens", "Tokens of prompts", registry=registry)
        self._reused = Counter("wavekit_reused_tokens", "Tokens of prompts known from earlier texts", registry=registry)
        self._new = Counter("wavekit_new_tokens", "Tokens written", registry=registry)
        self._decoded = Counter(
            "wavekit_decoded_tokens", "Tokens that passes after the prefill gave", registry=registry
        )
        self._passes = Counter("wavekit_passes", "Passes of the model after the prefill", registry=registry)
        self._tau = Histogram(
            "wavekit_tau", "Tokens a pass, the model's own included", registry=registry, buckets=_TOKENS
        )
        self._seconds = Histogram(
            "wavekit_request_seconds", "From request to last token", registry=registry, buckets=_SECONDS
        )
        self._first = Histogram(
            "wavekit_time_to_first_token_seconds", "From request to first token", registry=registry, buckets=_SECONDS
        )
        self._between = Histogram(
            "wavekit_time_per_token_seconds",
            "Between two tokens, the mean of a text, as its reader sees it",
            registry=registry,
            buckets=_TOKEN_SECONDS,
        )
        self._queued = Histogram(
            "wavekit_queue_seconds", "From request to the begin of its text", registry=registry, buckets=_SECONDS
        )
        failed = Gauge("wavekit_failed", "Texts that an error ended", registry=registry)
        failed.set_function(lambda: statistics().failed)
        running = Gauge("wavekit_running", "Texts being written", registry=registry)
        running.set_function(lambda: statistics().running)
        waiting = Gauge("wavekit_waiting", "Requests that wait for their text to begin", registry=registry)
        waiting.set_function(lambda: max(in_system() - statistics().running, 0))

    def answered(self, path: str, status: int) -> None:
        """A request got its answer, or its headers."""
        self._requests.labels(path, str(status)).inc()

    def began(self, queued: float) -> None:
        """A text was begun so many seconds after its request."""
        self._queued.observe(queued)

    def first_token(self, seconds: float) -> None:
        """The first token came so many seconds after the request."""
        self._first.observe(seconds)

    def finished(self, result: GenerationResult, seconds: float, first: float | None) -> None:
        """A text is finished: seconds since its request, and between that and its first token."""
        count, passes = len(result.token_ids), result.speculation.passes
        self._finished.labels(result.finish_reason).inc()
        self._prompt.inc(result.prompt_tokens)
        self._reused.inc(result.reused_tokens)
        self._new.inc(count)
        self._seconds.observe(seconds)
        if passes:
            self._decoded.inc(count - 1)
            self._passes.inc(passes)
            self._tau.observe(result.speculation.tau)
        if first is not None and count > 1:
            self._between.observe((seconds - first) / (count - 1))

    def text(self) -> bytes:
        """All of it, as Prometheus reads it."""
        return generate_latest(self._registry)
