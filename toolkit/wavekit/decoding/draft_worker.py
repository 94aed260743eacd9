"""Running a draft head: its engine with the cache and the buffers of one text.

Row t of the cache belongs to the pair of the token at position t and the one after it. *Fed* rows are made from the
target's own states and stay; *grown* rows, made from states that the head fed back, follow them and are dropped before
the next text is fed. What a row is grown from and which rows it sees is the caller's knowledge; see `draft_spec` for
the arithmetic and `graphs.draft_graph` for the graph.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter

import numpy as np

from wavekit.decoding.masks import Mask, mask_columns
from wavekit_engines.bundle import DraftInfo
from wavekit_engines.draft_spec import DraftSpec
from wavekit_engines.engine import Array, Binding, Engine
from wavekit_engines.rope import rope_tables

GROWN_ROWS = 512
"""Rows beyond the text that a tree may occupy."""

_MOST_STEP_ROWS = 64  # as many as passes are measured with


@dataclass(frozen=True)
class Scores:
    """What the head says after n rows: states to feed back [n, H], the best tokens and their log-probabilities [n, k].

    The arrays are views, overwritten by the next pass of the same kind.
    """

    states: Array
    tokens: Array
    logprobs: Array


class DraftWorker:
    """The draft head of one text of up to ``capacity`` tokens."""

    def __init__(self, engine: Engine, draft: DraftInfo, dtype: str, capacity: int, max_fed: int) -> None:
        spec = draft.spec
        self.spec = spec
        self.top_k = draft.top_k
        self.max_fed = max_fed
        self.engine_seconds = 0.0
        rows = capacity + GROWN_ROWS
        self._cache = engine.cache(1, spec.num_kv_heads, spec.head_dim, rows, dtype)
        self._dtype = dtype
        self._feed = _Pass(engine.bind(), draft, dtype, rows, max_fed, scored=1)
        self._step = _Pass(engine.bind(), draft, dtype, rows, _MOST_STEP_ROWS, scored=_MOST_STEP_ROWS)
        for runs in (self._feed, self._step):
            runs.binding.bind_cache("draft", self._cache, 0)
        self._long = False
        self._fed = 0
        self._bind_rope()

    def _bind_rope(self) -> None:
        tables = rope_tables(self.spec.rope, self._cache.capacity, self._long)
        for part, table in zip(("cos", "sin"), tables, strict=True):
            rows = np.ascontiguousarray(table, self._dtype)
            for runs in (self._feed, self._step):
                runs.binding.bind_input(f"rope_draft_{part}", rows)

    def reset(self, length: int) -> None:
        """Forget every row, before a text of ``length`` tokens is fed."""
        self._cache.length = self._fed = 0
        self.engine_seconds = 0.0
        switch = self.spec.rope.switch_length
        long = switch is not None and length > switch
        if long != self._long:
            self._long = long
            self._bind_rope()

    @property
    def limit(self) -> int:
        """Positions that the head was made for; pairs beyond them are no use."""
        switch = self.spec.rope.switch_length
        return self.spec.max_positions if switch is None or self._long else min(switch, self.spec.max_positions)

    @property
    def fed(self) -> int:
        """Pairs of the text fed so far: those of positions 0 to ``fed - 1``."""
        return self._fed

    @property
    def long(self) -> bool:
        """Whether it runs with its rotary tables for long texts."""
        return self._long

    @property
    def fed_rows(self) -> Array:
        """Keys and values of the fed rows, [1, 2, 1, kv_heads, fed, head_dim]; a view."""
        rows: Array = self._cache.array[..., : self._fed, :]
        return rows

    def restore(self, rows: Array) -> None:
        """Take over fed rows, as `fed_rows` gives them, of the pairs at positions 0, 1, ... after a reset."""
        taken = self._cache.append(rows.shape[-2])
        self._cache.array[..., taken.start : taken.stop, :] = rows
        self._fed = taken.stop

    @property
    def room(self) -> int:
        """Rows that may still be grown."""
        return self._cache.capacity - self._cache.length

    @property
    def cache(self) -> Array:
        """Keys and values [2, kv_heads, rows in use, head_dim], for tests that compare them with a fresh run's."""
        rows: Array = self._cache.array[0, :, 0, :, : self._cache.length]
        return rows

    def feed(self, taps: Sequence[Array], next_tokens: Sequence[int]) -> Scores:
        """Run the next S pairs of the text, after dropping grown rows.

        Args:
            taps: the target's states [S, taps, H] by stage; their taps, one stage after the other, are the draft's.
            next_tokens: the token after each, [S].

        Returns:
            What the head says after the last of them.
        """
        self.forget_grown()
        count = len(next_tokens)
        rows = self._cache.append(count)
        self._fed += count
        feed, at = self._feed, 0
        for states in taps:
            feed.taps[0, :count].reshape(count, -1, self.spec.hidden_size)[:, at : at + states.shape[1]] = states
            at += states.shape[1]
        feed.token_ids[0, :count] = next_tokens
        feed.positions[0, :count] = np.arange(rows.start, rows.stop)
        feed.head_rows[0] = count - 1
        self._run(feed, rows, (count, 0, 1))
        return Scores(feed.fed_back[0, count - 1 : count], feed.tokens[:1], feed.logprobs[:1])

    def forget_grown(self) -> None:
        """Drop the grown rows."""
        self._cache.length = self._fed

    def step(self, states: Array, tokens: Array, depth: int, above: Array) -> Scores:
        """Run S rows at the same depth below the last fed pair.

        Args:
            states: what the head fed back for the row above each, [S, H].
            tokens: the token after each row's, [S].
            depth: 1 for rows right below the last fed pair.
            above: the grown rows that each row sees, [S, depth - 1], as `step` numbered them.

        Returns:
            What the head says after each of them. Their own rows are the last S in use.
        """
        count = len(tokens)
        rows = self._cache.append(count)
        step = self._step
        step.hidden[0, :count] = states
        step.token_ids[0, :count] = tokens
        step.positions[0, :count] = self._fed - 1 + depth
        self._run(step, rows, (0, count, count), above.tolist())
        return Scores(step.fed_back[0, :count], step.tokens[:count], step.logprobs[:count])

    @property
    def next_row(self) -> int:
        """The row that the first row of the next step gets."""
        return self._cache.length

    def _run(
        self, runs: "_Pass", rows: range, shape: tuple[int, int, int], above: list[list[int]] | None = None
    ) -> None:
        runs.load(rows, shape, above, self._fed)
        start = perf_counter()
        runs.binding.run()
        self.engine_seconds += perf_counter() - start


class _Pass:
    """The buffers of passes of one kind; feeding and growing have their own, so that shapes stay bound."""

    def __init__(self, binding: Binding, draft: DraftInfo, dtype: str, rows: int, most: int, scored: int) -> None:
        spec: DraftSpec = draft.spec
        self.binding = binding
        self.taps = np.zeros((1, most, len(spec.boundaries) * spec.hidden_size), dtype)
        self.hidden = np.zeros((1, most, spec.hidden_size), dtype)
        self.token_ids = np.zeros((1, most), np.int64)
        self.positions = np.zeros((1, most), np.int64)
        self.head_rows = np.arange(scored)
        self.fed_back = np.zeros((1, most, spec.hidden_size), dtype)
        self.tokens = np.zeros((scored, draft.top_k), np.int64)
        self.logprobs = np.zeros((scored, draft.top_k), np.float32)
        self._capacity = rows
        self._last_rows = np.zeros(1, np.int32)
        self._total_rows = np.zeros(1, np.int32)
        self._mask = Mask(binding, None, most * rows, dtype)
        self._bound: tuple[int, int, int] | None = None
        self._no_window = np.zeros(0, np.int64)
        binding.bind_input("last_rows", self._last_rows)
        binding.bind_input("total_rows", self._total_rows)

    def load(self, rows: range, shape: tuple[int, int, int], above: list[list[int]] | None, committed: int) -> None:
        """Bind the inputs of (tap rows, rows fed back, rows scored), and lay out the mask."""
        if shape != self._bound:
            taps, hidden, scored = shape
            self.binding.bind_input("taps", self.taps[:, :taps])
            self.binding.bind_input("hidden", self.hidden[:, :hidden])
            self.binding.bind_input("token_ids", self.token_ids[:, : taps + hidden])
            self.binding.bind_input("positions", self.positions[:, : taps + hidden])
            self.binding.bind_input("head_rows", self.head_rows[:scored])
            self.binding.bind_output("fed_back", self.fed_back[:, : taps + hidden])
            self.binding.bind_output("top_tokens", self.tokens[:scored])
            self.binding.bind_output("top_logprobs", self.logprobs[:scored])
            self._bound = shape
        self._last_rows[0] = rows.stop - 1
        self._total_rows[0] = columns = mask_columns(rows.stop, self._capacity)
        self._mask.lay_out(rows, columns, self._no_window, above, committed)
