"""An imaginary target, an imaginary draft head and imaginary exits, as engines of a decoder.

They compute nothing but check everything: each row finds out which text it stands for from the cache rows that its mask
lets it see, and the state it puts out names that text. So a wrong mask, a row left in the cache, a state paired with
the wrong token or a tap of the wrong row shows as a text that is not one, and such a row's states and logits are
poison. What the target writes after a text is a function of the text; so plain decoding can be said in one line.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from wavekit.decoding.decoder import Decoder
from wavekit.decoding.sequence_workers import Engines
from wavekit_engines.bundle import (
    DraftInfo,
    EngineInfo,
    ExitsInfo,
    GenerationDefaults,
    GraphInfo,
    Manifest,
    Provenance,
    StageInfo,
)
from wavekit_engines.decoder_spec import DecoderSpec, LayerSpec, RopeSpec
from wavekit_engines.draft_spec import DraftSpec
from wavekit_engines.exit_spec import ExitSpec
from wavekit_engines.kv_cache import KVCache

VOCABULARY = 6
POISON = VOCABULARY
"""Chosen after a row that saw anything but a text."""

HIDDEN = 4
SWITCH = 24

Text = tuple[int, ...]
Array = np.ndarray[Any, Any]


@dataclass
class World:
    """What the target writes, and the names of texts in states: a state is (boundary, length, name, long)."""

    salt: int
    switch: int | None = None
    texts: list[Text] = field(default_factory=list)
    names: dict[Text, int] = field(default_factory=dict)

    def name(self, text: Text) -> int:
        if text not in self.names:
            self.names[text] = len(self.texts)
            self.texts.append(text)
        return self.names[text]

    def logits(self, text: Text, long: bool) -> Array:
        """Logits float32 [VOCABULARY + 1] after a text, with the short or the long rotary tables."""
        draw = random.Random(f"{self.salt} {text} {long}")
        return np.array([draw.gauss(0, 1.5) for _ in range(VOCABULARY)] + [-30.0], np.float32)

    def next(self, text: Text) -> int:
        """The likeliest token after a text."""
        return int(self.logits(text, self.switch is not None and len(text) > self.switch).argmax())

    def plain(self, prompt: Sequence[int], count: int) -> list[int]:
        """What plain decoding writes."""
        text = tuple(prompt)
        while len(text) < len(prompt) + count:
            text += (self.next(text),)
        return list(text[len(prompt) :])


@dataclass
class FakeBinding:
    work: "Callable[[dict[str, Array], dict[str, Array]], None]"
    inputs: dict[str, Array] = field(default_factory=dict)
    outputs: dict[str, Array] = field(default_factory=dict)

    def bind_input(self, name: str, array: Array) -> None:
        self.inputs[name] = array

    def bind_output(self, name: str, array: Array) -> None:
        self.outputs[name] = array

    def bind_cache(self, name: str, cache: KVCache, index: int) -> None:
        for part, rows in ((f"key_{name}", cache.keys(index)), (f"value_{name}", cache.values(index))):
            self.inputs[part] = self.outputs[f"{part}_out"] = rows

    def run(self) -> None:
        self.work(self.inputs, self.outputs)


@dataclass
class FakeEngine:
    work: "Callable[[dict[str, Array], dict[str, Array]], None]"

    def bind(self) -> FakeBinding:
        return FakeBinding(self.work)

    def cache(self, layers: int, kv_heads: int, head_dim: int, capacity: int, dtype: str) -> KVCache:
        return KVCache(layers, kv_heads, head_dim, capacity, dtype)

    def close(self) -> None:
        pass


def seen_text(inputs: dict[str, Array], cache: Array, row: int, index: int) -> Text | None:
    """The tokens of the rows that a row sees, itself included, if they are one at each position from 0 on."""
    visible = np.flatnonzero(inputs["mask"][0, 0, index, : row + 1] == 0)
    assert inputs["mask"].shape[-1] == inputs["total_rows"][0] > row
    seen = sorted((int(cache[column, 1]), int(cache[column, 0])) for column in visible)
    if [position for position, _ in seen] != list(range(len(seen))):
        return None
    return tuple(token for _, token in seen)


@dataclass
class FakeTarget:
    """K stages of one layer each, and a head."""

    world: World
    stages: int
    context: int = 64
    rows: list[int] = field(default_factory=list)
    """How many rows every pass of the first stage had."""

    def stage(self, number: int) -> FakeEngine:
        def work(inputs: dict[str, Array], outputs: dict[str, Array]) -> None:
            positions, cache = inputs["positions"][0], inputs[f"key_{number}"][0, 0]
            assert outputs[f"key_{number}_out"][0, 0] is cache or np.shares_memory(outputs[f"key_{number}_out"], cache)
            first = int(inputs["last_rows"][0]) - len(positions) + 1
            long = float("rope_main_cos" in inputs and inputs["rope_main_cos"][1, 0] < 0)
            if number == 0:
                self.rows.append(len(positions))
            x = inputs["token_ids" if number == 0 else "hidden"][0]
            for index, position in enumerate(positions):
                token = int(x[index]) if number == 0 else self.token(x[index])
                cache[first + index] = token, position
            for index in range(len(positions)):
                text = seen_text(inputs, cache, first + index, index)
                if number and text is not None and x[index].tolist() != self.state(number, text, long):
                    text = None
                for name, rows in outputs.items():
                    if name.startswith("boundary_"):
                        rows[0, index] = self.state(int(name.split("_")[1]), text, long)

        return FakeEngine(work)

    def state(self, boundary: int, text: Text | None, long: float) -> list[float]:
        return [boundary, *((len(text), self.world.name(text)) if text is not None else (-1, -1)), long]

    def token(self, state: Array) -> int:
        return self.world.texts[int(state[2])][-1] if state[2] >= 0 else POISON

    def head(self) -> FakeEngine:
        def work(inputs: dict[str, Array], outputs: dict[str, Array]) -> None:
            for state, logits in zip(inputs["hidden"], outputs["logits"], strict=True):
                boundary, _, name, long = state.tolist()
                assert boundary == self.stages
                logits[:] = self.world.logits(self.world.texts[int(name)], bool(long)) if name >= 0 else 0
                logits[POISON] = 50 if name < 0 else logits[POISON]

        return FakeEngine(work)


@dataclass
class FakeDraft:
    """A draft head that says what ``guess`` says about a text: its k tokens with probabilities, best first."""

    target: FakeTarget
    boundaries: tuple[int, ...]
    guess: Callable[[Text], list[tuple[int, float]]]
    top_k: int = 3
    max_positions: int = 1000
    steps: list[tuple[int, int]] = field(default_factory=list)
    """Rows with taps and rows fed back, of every pass."""
    last_position: int = -1

    def engine(self) -> FakeEngine:
        world = self.target.world

        def work(inputs: dict[str, Array], outputs: dict[str, Array]) -> None:
            cache, tokens, positions = inputs["key_draft"][0, 0], inputs["token_ids"][0], inputs["positions"][0]
            taps, hidden = inputs["taps"][0], inputs["hidden"][0]
            assert len(tokens) == len(positions) == len(taps) + len(hidden)
            assert inputs["mask"].shape[2] == len(tokens)
            self.steps.append((len(taps), len(hidden)))
            self.last_position = max(self.last_position, int(positions.max()))
            first = int(inputs["last_rows"][0]) - len(tokens) + 1
            for index, pair in enumerate(zip(tokens, positions, strict=True)):
                cache[first + index] = pair
            texts: list[Text] = []
            for index, token in enumerate(tokens.tolist()):
                if index < len(taps):
                    states = taps[index].reshape(len(self.boundaries), HIDDEN).tolist()
                    before = world.texts[int(states[0][2])]
                    for boundary, state in zip(self.boundaries, states, strict=True):
                        assert state == self.target.state(boundary, before, state[3])
                else:
                    before = world.texts[int(hidden[index - len(taps), 2])]
                text = (*before, token)
                assert positions[index] == len(text) - 2, "the position of a pair is that of its first token"
                assert seen_text(inputs, cache, first + index, index) == text[1:]
                texts.append(text)
                outputs["fed_back"][0, index] = -1, len(text), world.name(text), 0
            for row, index in enumerate(inputs["head_rows"].tolist()):
                guesses = self.guess(texts[index])
                outputs["top_tokens"][row] = [token for token, _ in guesses]
                outputs["top_logprobs"][row] = np.log([chance for _, chance in guesses])

        return FakeEngine(work)

    def info(self) -> DraftInfo:
        spec = DraftSpec(
            boundaries=self.boundaries,
            target_layers=self.target.stages,
            hidden_size=HIDDEN,
            intermediate_size=1,
            num_heads=1,
            num_kv_heads=1,
            head_dim=2,
            vocab_size=VOCABULARY + 1,
            draft_vocab_size=VOCABULARY,
            max_positions=self.max_positions,
            norm_eps=1e-5,
            rope=RopeSpec((1.0,)),
        )
        return DraftInfo(spec, _GRAPH, "fp32", "fp32", self.top_k, "", "")


Ranked = list[tuple[int, float]]


@dataclass
class FakeExits:
    """Exits behind the stages ``at``, that say what ``guess`` says about a text and a stage: k tokens, best first."""

    target: FakeTarget
    at: tuple[int, ...]
    guess: Callable[[Text, int], Ranked]
    top_k: int = 3

    def engine(self, stage: int) -> FakeEngine:
        def work(inputs: dict[str, Array], outputs: dict[str, Array]) -> None:
            for row, state in enumerate(inputs["hidden"]):
                boundary, _, name, _ = state.tolist()
                assert boundary == stage + 1
                assert name >= 0, "a row saw anything but a text"
                ranked = self.guess(self.target.world.texts[int(name)], stage)
                outputs["top_tokens"][row] = [token for token, _ in ranked]
                outputs["top_logprobs"][row] = np.log([chance for _, chance in ranked])

        return FakeEngine(work)

    def info(self) -> ExitsInfo:
        boundaries = tuple(stage + 1 for stage in self.at)
        spec = ExitSpec(boundaries, self.target.stages, HIDDEN, VOCABULARY + 1, VOCABULARY, 1e-5, 0)
        return ExitsInfo(spec, (_GRAPH,) * len(self.at), "fp32", self.top_k, "", "", "", "")


_GRAPH = GraphInfo("", (), (), 0, 0)


def fake_decoder(
    target: FakeTarget,
    draft: FakeDraft | None = None,
    precision: str = "fp32",
    exits: FakeExits | None = None,
    lanes: int = 1,
) -> Decoder:
    """A decoder of the imaginary engines; with a switch, the world's long rotary tables are the negative ones."""
    stages, switch = target.stages, target.world.switch
    rope = RopeSpec((0.0,), 1.0, *((0.0,), -1.0, switch) if switch is not None else ())
    spec = DecoderSpec(
        family="fake",
        hidden_size=HIDDEN,
        intermediate_size=1,
        num_heads=1,
        num_kv_heads=1,
        head_dim=2,
        vocab_size=VOCABULARY + 1,
        max_positions=target.context,
        norm_eps=1e-5,
        layers=tuple(LayerSpec("main", None) for _ in range(stages)),
        ropes={"main": rope},
        attention_scale=1.0,
    )
    manifest = Manifest(
        decoder=spec,
        engine=EngineInfo("fake", precision, precision, 32, "float32"),  # type: ignore[arg-type]
        stages=tuple(StageInfo(_GRAPH, k, k + 1, (0, 1) if k == 0 else (k + 1,)) for k in range(stages)),
        head=_GRAPH,
        taps=draft.boundaries if draft is not None else (),
        generation=GenerationDefaults(),
        files={},
        provenance=Provenance("", "", "", "", {}),
        draft=draft.info() if draft is not None else None,
        exits=exits.info() if exits is not None else None,
    )
    engines = Engines(
        [target.stage(number) for number in range(stages)],
        target.head(),
        draft=draft.engine() if draft is not None else None,
        exits={stage + 1: exits.engine(stage) for stage in exits.at} if exits is not None else {},
    )
    return Decoder(manifest, engines, lanes)


def greedy(logits: Array, position: int) -> int:
    return int(logits.argmax())
