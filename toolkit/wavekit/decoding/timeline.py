"""A timeline of one generation, as Chrome's trace viewer and Perfetto read it.

Every run of a stage is a bar on the stage's own row, so that one sees which stages run at once and who waits for whom;
commits are marks. Times come from `time.perf_counter`.
"""

import json
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Timeline:
    """Collects what happens; give a new one to each generation."""

    events: list[dict[str, Any]] = field(default_factory=list)

    def span(self, row: str, what: str, start: float, end: float, **details: Any) -> None:
        """Something took from ``start`` to ``end``, in seconds."""
        times = {"ts": start * 1e6, "dur": (end - start) * 1e6}
        self.events.append({"ph": "X", "name": what, "pid": 1, "tid": row, **times, "args": details})

    def mark(self, row: str, what: str, at: float, **details: Any) -> None:
        """Something happened."""
        mark = {"ph": "i", "s": "t", "name": what, "pid": 1, "tid": row, "ts": at * 1e6, "args": details}
        self.events.append(mark)

    def encode(self) -> bytes:
        """Everything as the content of a trace file, JSON; times from the first event on."""
        rows = {row: number for number, row in enumerate(dict.fromkeys(event["tid"] for event in self.events))}
        names = [
            {"ph": "M", "name": "thread_name", "pid": 1, "tid": number, "args": {"name": row}}
            for row, number in rows.items()
        ]
        start = min((event["ts"] for event in self.events), default=0.0)
        events = [{**event, "tid": rows[event["tid"]], "ts": event["ts"] - start} for event in self.events]
        return json.dumps({"traceEvents": names + events}).encode()
