"""Many texts at once, for throughput: the answers that calibration and training learn from.

Sequences take slots of one batched cache, ``[layers, 2, slots, kv_heads, capacity, head_dim]``. A pass runs one new
token of every slot; a slot whose text ends takes the next prompt, so passes stay full. Weights are read once for all
slots, which is where the throughput comes from. Latency, streaming and speculation are `decoder`'s. Knows token ids
only.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from wavekit.decoding.sampling import Sampler, SamplingParams
from wavekit_engines.bundle import Manifest, StageInfo
from wavekit_engines.decoder_spec import DecoderSpec
from wavekit_engines.engine import Array, Binding, Engine
from wavekit_engines.errors import ContextLengthError, MisuseError
from wavekit_engines.kv_cache import KVCache
from wavekit_engines.rope import rope_tables

_COLUMNS = 64  # attention lengths are rounded up to this, since binding a new shape costs more than reading a few zeros


@dataclass
class Answer:
    """A finished answer, and what the decoder computed on the way.

    ``boundaries`` holds the states [L - 1, H] that the stages put out for tokens 0..L-2 of prompt and answer;
    ``likeliest`` the token of greatest logit for each of the answer's.
    """

    tokens: list[int] = field(default_factory=list)
    likeliest: list[int] = field(default_factory=list)
    states: dict[int, list[Array]] = field(default_factory=dict)

    @property
    def boundaries(self) -> dict[int, Array]:
        """Float [L - 1, H] by boundary; empty unless asked for."""
        return {boundary: np.concatenate(rows) for boundary, rows in self.states.items()}


Written = Callable[[int, Answer], None]
"""Called with a prompt's number and its answer as soon as it is complete."""


@dataclass
class _Slot:
    prompt: int
    length: int
    """Tokens of the text in the cache: all but the newest."""
    room: int
    sampler: Sampler
    answer: Answer = field(default_factory=Answer)


class BatchWriter:
    """Writes answers in batches with the engines of a bundle."""

    def __init__(self, manifest: Manifest, stages: Sequence[Engine], head: Engine, slots: int = 32) -> None:
        """Use ``slots`` sequences a pass.

        Raises:
            MisuseError: fewer than one slot.
        """
        if slots < 1:
            raise MisuseError(f"{slots} sequences at once: at least one is needed")
        self._manifest, self._spec = manifest, manifest.decoder
        self._stages, self._head, self._slots = stages, head, slots

    def write(
        self,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int,
        stop_token_ids: Sequence[int],
        sampling: Callable[[int], SamplingParams] = lambda number: SamplingParams(),
        written: Written = lambda number, answer: None,
        keep_states: bool = False,
    ) -> list[list[int]]:
        """The answers to all prompts, in their order, each up to and with a stop token if one came.

        Args:
            prompts: token ids; none empty.
            max_new_tokens: the longest answer; the end of the context may come first.
            stop_token_ids: tokens that end an answer.
            sampling: how the answer to prompt ``number`` is chosen; greedy unless given.
            written: told each answer when it is complete.
            keep_states: give ``written`` the states that the stages put out as well.

        Raises:
            MisuseError: an empty prompt or a negative number of tokens.
            ContextLengthError: a prompt that leaves no room.
        """
        self._check(prompts, max_new_tokens)
        longest = min(max(map(len, prompts), default=0) + max_new_tokens, self._limit)
        batch = _Batch(self._manifest, self._stages, self._head, min(self._slots, len(prompts)) or 1, longest)
        run = _Run(batch, prompts, frozenset(stop_token_ids), written, keep_states)

        def start(number: int) -> _Slot:
            room = min(max_new_tokens, self._limit - len(prompts[number]))
            return _Slot(number, len(prompts[number]), room, Sampler(sampling(number), self._spec.vocab_size))

        run.write(start)
        return run.answers

    @property
    def _limit(self) -> int:
        """Longest text; it ends where the rotary tables for long texts would take over (see `RopeSpec`)."""
        switches = (rope.switch_length or self._spec.max_positions for rope in self._spec.ropes.values())
        return min(self._spec.max_positions, *switches)

    def _check(self, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> None:
        if max_new_tokens < 1:
            raise MisuseError(f"max_new_tokens is {max_new_tokens}; it must be at least 1")
        for number, prompt in enumerate(prompts):
            if not prompt:
                raise MisuseError(f"prompt {number} is empty; give at least one token")
            if len(prompt) >= self._limit:
                raise ContextLengthError(
                    f"prompt {number} has {len(prompt)} tokens and {self._limit} fit; leave it out or shorten it"
                )


class _Run:
    """Answers being written: which prompt has which slot, and which wait."""

    def __init__(
        self,
        batch: "_Batch",
        prompts: Sequence[Sequence[int]],
        ends: frozenset[int],
        written: Written,
        keep_states: bool,
    ) -> None:
        self.answers: list[list[int]] = [[] for _ in prompts]
        self._batch, self._prompts, self._ends = batch, prompts, ends
        self._written, self._keep_states = written, keep_states
        self._waiting = iter(sorted(range(len(prompts)), key=lambda number: -len(prompts[number])))

    def write(self, start: Callable[[int], _Slot]) -> None:
        """Write all answers; ``start`` makes the slot of a prompt."""
        batch, slots = self._batch, list[_Slot]()
        while len(slots) < batch.slots and (slot := self._fill(len(slots), start)):
            slots.append(slot)
        while slots:
            lengths = [slot.length for slot in slots]
            logits, states = batch.step([slot.answer.tokens[-1] for slot in slots], lengths)
            ended = []
            for index, slot in enumerate(slots):
                slot.length += 1
                if self._take(slot, logits[index], {boundary: rows[index] for boundary, rows in states.items()}):
                    ended.append(index)
            for index in reversed(ended):
                successor = self._fill(index, start)
                if successor is not None:
                    slots[index] = successor
                else:
                    batch.move(len(slots) - 1, index)
                    slots[index] = slots[-1]
                    slots.pop()

    def _fill(self, index: int, start: Callable[[int], _Slot]) -> _Slot | None:
        """Begin the next prompt whose answer is not over at once."""
        for number in self._waiting:
            slot = start(number)
            logits, states = self._batch.prefill(index, self._prompts[number])
            if not self._take(slot, logits, {boundary: rows[0] for boundary, rows in states.items()}):
                return slot
        return None

    def _take(self, slot: _Slot, logits: Array, states: dict[int, Array]) -> bool:
        """Choose the next token of a text; whether it was the last."""
        token = slot.sampler.choose(logits, slot.length)
        slot.answer.tokens.append(token)
        slot.room -= 1
        if self._keep_states:
            slot.answer.likeliest.append(int(logits.argmax()))
            for boundary, rows in states.items():
                slot.answer.states.setdefault(boundary, []).append(rows)
        if token not in self._ends and slot.room > 0:
            return False
        self.answers[slot.prompt] = slot.answer.tokens
        self._written(slot.prompt, slot.answer)
        return True


class _Batch:
    """The buffers and bindings of a batch of sequences."""

    def __init__(self, manifest: Manifest, stages: Sequence[Engine], head: Engine, slots: int, longest: int) -> None:
        spec, dtype = manifest.decoder, manifest.engine.compute_dtype
        self.slots = slots
        capacity = -(-longest // _COLUMNS) * _COLUMNS
        self._stages = [
            _BatchStage(engine, info, spec, dtype, (slots, capacity))
            for engine, info in zip(stages, manifest.stages, strict=True)
        ]
        self._head, self._logits = head.bind(), np.zeros((slots, spec.vocab_size), np.float32)

    def prefill(self, slot: int, prompt: Sequence[int]) -> tuple[Array, dict[int, Array]]:
        """Run a prompt in a slot; logits float32 [V] after it, and states [1, S, H] by boundary."""
        x, states = self._run(np.array(prompt, np.int64)[None], np.arange(len(prompt))[None], slice(slot, slot + 1))
        return self._run_head(x[0, -1:])[0], states

    def step(self, tokens: Sequence[int], lengths: Sequence[int]) -> tuple[Array, dict[int, Array]]:
        """Run one token of each of the first slots at its position.

        Returns:
            Logits float32 [len(tokens), V], and states [len(tokens), 1, H] by boundary.
        """
        x, states = self._run(np.array(tokens)[:, None], np.array(lengths)[:, None], slice(0, len(tokens)))
        return self._run_head(x[:, 0]), states

    def _run(self, x: Array, positions: Array, slots: slice) -> tuple[Array, dict[int, Array]]:
        states: dict[int, Array] = {}
        for stage in self._stages:
            states |= (outputs := stage.run(x, positions, slots))
            x = outputs[stage.last]
        return x, states

    def move(self, source: int, target: int) -> None:
        """Give a sequence another slot."""
        if source != target:
            for stage in self._stages:
                stage.cache.array[:, :, target] = stage.cache.array[:, :, source]

    def _run_head(self, hidden: Array) -> Array:
        logits: Array = self._logits[: len(hidden)]
        self._head.bind_input("hidden", np.ascontiguousarray(hidden))
        self._head.bind_output("logits", logits)
        self._head.run()
        return logits


class _BatchStage:
    """One stage over all slots."""

    def __init__(
        self,
        engine: Engine,
        info: StageInfo,
        spec: DecoderSpec,
        dtype: str,
        size: tuple[int, int],
    ) -> None:
        slots, capacity = size
        self.cache = KVCache(info.last - info.first, spec.num_kv_heads, spec.head_dim, capacity, dtype, slots)
        self._info, self._dtype, self._width, self.last = info, dtype, spec.hidden_size, info.last
        layers = spec.layers[info.first : info.last]
        self._windows = tuple(dict.fromkeys(layer.window for layer in layers))
        self._rope = {
            f"rope_{kind}_{part}": np.ascontiguousarray(table, dtype)
            for kind in {layer.rope for layer in layers if layer.rope is not None}
            for part, table in zip(("cos", "sin"), rope_tables(spec.ropes[kind], capacity, False), strict=True)
        }
        # One set of buffers for prompts, whose slot changes, and one for steps, which changes only at the very end.
        self._bindings: dict[bool, Binding] = {True: engine.bind(), False: engine.bind()}
        self._bound: dict[bool, slice | None] = {True: None, False: None}

    def run(self, x: Array, positions: Array, slots: slice) -> dict[int, Array]:
        """Append S rows to each of the slots [B]: from token ids [B, S] or states to states [B, S, H] by boundary."""
        prompt = x.shape[1] > 1 or slots.start > 0
        binding = self._bindings[prompt]
        if slots != self._bound[prompt]:
            self._bind_cache(binding, slots)
            self._bound[prompt] = slots
        last_rows = positions[:, -1].astype(np.int32)
        columns = min(-(-(int(last_rows.max()) + 1) // _COLUMNS) * _COLUMNS, self.cache.capacity)
        binding.bind_input("token_ids" if self._info.first == 0 else "hidden", np.ascontiguousarray(x))
        binding.bind_input("positions", positions)
        binding.bind_input("last_rows", last_rows)
        binding.bind_input("total_rows", np.array([columns], np.int32))
        for window in self._windows:
            name = "mask" if window is None else f"mask_{window}"
            binding.bind_input(name, self._mask(positions, columns, window))
        outputs = {k: np.zeros((*positions.shape, self._width), self._dtype) for k in self._info.boundaries}
        for boundary, states in outputs.items():
            binding.bind_output(f"boundary_{boundary}", states)
        binding.run()
        return outputs

    def _bind_cache(self, binding: Binding, slots: slice) -> None:
        for name, table in self._rope.items():
            binding.bind_input(name, table)
        for index, layer in enumerate(range(self._info.first, self._info.last)):
            for name, rows in (
                (f"key_{layer}", self.cache.keys(index)[slots]),
                (f"value_{layer}", self.cache.values(index)[slots]),
            ):
                binding.bind_input(name, rows)
                binding.bind_output(f"{name}_out", rows)

    def _mask(self, positions: Array, columns: int, window: int | None) -> Array:
        """Zeros, but minus infinity before the window; causality and each length are the attention's own."""
        if window is None or positions.max() < window:
            return np.zeros((1, 1, positions.shape[1], columns), self._dtype)
        hidden = np.arange(columns) <= positions[:, :, None] - window
        return np.where(hidden, -np.inf, 0.0).astype(self._dtype)[:, None]
