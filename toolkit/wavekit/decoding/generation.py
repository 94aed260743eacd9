"""One text being written: ticks over the stages, proposals before them, commits after them.

A tick loads every stage that has nodes waiting, runs them all at once, lets the exits at their ends propose, and
commits as far as the target's choices are known. Where nobody proposes it is plain decoding; one stage with proposals
for every anchor is EAGLE-3, several with exits are DEX. Proposals only ever save ticks, since what is committed is the
choice made from the final logits of the committed prefix. Token ids only: no text, no files.
"""

from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field
from functools import partial
from time import perf_counter
from typing import Any, TypeAlias

import numpy as np

from wavekit.decoding.exit_worker import ExitScores
from wavekit.decoding.exploration import ExplorationCounts
from wavekit.decoding.lattice import Lattice, Node
from wavekit.decoding.prefix_cache import PrefixCache
from wavekit.decoding.sequence_workers import SequenceWorkers, switches_to_long
from wavekit.decoding.speculation import SpeculationCounts
from wavekit.decoding.speculator import Speculator
from wavekit.decoding.stage_worker import StageWorker
from wavekit.decoding.timeline import Timeline
from wavekit_engines.decoder_spec import DecoderSpec
from wavekit_engines.engine import Array

Chooser = Callable[[Array, int], int]
"""The target's choice: logits float32 [V] for a position, and that position, to a token id."""

Said: TypeAlias = Any
"""What the target says after a node: logits float32 [V], or a token id where the choice is greedy."""


@dataclass
class DecodeStats:
    """Where the time of one generation went, in seconds, and how many ticks and passes it took.

    ``prefill_seconds`` ends with the first token. ``decode_engine_seconds`` is spent inside engine runs after that,
    ``draft_engine_seconds`` of it inside the draft head's; where several engines run at once, that time counts once.
    ``passes`` counts the ticks that committed something, ``reused`` the tokens of the prompt that did not have to run.
    A ``timeline`` is told what runs when.
    """

    prefill_seconds: float = 0.0
    decode_engine_seconds: float = 0.0
    draft_engine_seconds: float = 0.0
    ticks: int = 0
    passes: int = 0
    reused: int = 0
    speculation: SpeculationCounts = field(default_factory=SpeculationCounts)
    exploration: ExplorationCounts = field(default_factory=ExplorationCounts)
    timeline: Timeline | None = None


@dataclass(frozen=True)
class Request:
    """What is to be written: up to ``room`` tokens after ``prompt``, as ``choose`` says, or up to one of ``ends``."""

    prompt: list[int]
    choose: Chooser | None
    """None: the token of greatest logit, for which a head need not give all of them."""
    room: int
    ends: frozenset[int]


@dataclass
class _Pass:
    """One stage's run in a tick, and what came out of it."""

    stage: int
    worker: StageWorker
    nodes: list[Node]
    said: Array | None = None
    hidden: Array | None = None
    scores: ExitScores | None = None
    start: float = 0.0
    end: float = 0.0


class Generation:
    """One text being written."""

    def __init__(
        self,
        workers: SequenceWorkers,
        spec: DecoderSpec,
        request: Request,
        stats: DecodeStats,
        speculator: Speculator | None = None,
        prefixes: PrefixCache | None = None,
    ) -> None:
        self._workers = workers
        self._spec = spec
        self._tokens = [*request.prompt]
        self._prompt_length = len(request.prompt)
        self._prefixes = prefixes
        self._choose = request.choose
        self._room = request.room
        self._ends = request.ends
        self._stats = stats
        self._speculator = speculator
        self._exits = speculator.exits if speculator is not None else None
        if speculator is not None:
            stats.speculation = speculator.counts
        stats.exploration.stage_seconds = [0.0] * len(workers.stages)
        self._asked: Node | None = None  # the anchor that proposals were last made for
        self._hidden: dict[Node, Array] = {}
        self._engine_seconds = 0.0  # before the text started over, see `_reset`
        self._draft_seconds = 0.0

    def ticks(self) -> Iterator[list[int]]:
        """Yield the tokens each tick commits; ticks that commit nothing yield nothing.

        Between the chunks of a long prompt an empty list is yielded: there, too, the text can be ended.
        """
        stats, workers, start = self._stats, self._workers, perf_counter()
        self._reset(switches_to_long(self._spec, len(self._tokens)))
        if self._prefixes is not None:
            stats.reused = self._prefixes.restore(workers, self._tokens)
        committed = self._commit((yield from self._prefill()))
        stats.prefill_seconds = perf_counter() - start
        stats.exploration.commits.clear()  # no tick brought the first token
        self._engine_seconds, self._draft_seconds = -workers.engine_seconds, -workers.draft_seconds
        yield committed
        while self._room > 0:
            outgrown = not self._long and switches_to_long(self._spec, len(self._tokens))
            committed = (yield from self._start_over_long()) if outgrown else self._tick()
            stats.ticks += 1
            stats.decode_engine_seconds = self._engine_seconds + workers.engine_seconds
            stats.draft_engine_seconds = self._draft_seconds + workers.draft_seconds
            if committed:
                stats.passes += 1
                yield committed

    def remember(self) -> None:
        """Keep as much of the text as has run for those that begin like it; where `ticks` has yielded or ended."""
        if self._prefixes is not None:
            run = self._workers.stages[0].length
            self._prefixes.store(self._workers, self._tokens[: run + 1], self._prompt_length)

    def _reset(self, long: bool) -> None:
        """Forget what has run; the time it took stays counted."""
        self._engine_seconds += self._workers.engine_seconds
        self._draft_seconds += self._workers.draft_seconds
        self._long = long
        self._workers.reset(long, len(self._tokens))

    def _prefill(self) -> Generator[list[int], None, dict[Node, Said]]:
        """Run the text so far; what the target says after it belongs to the anchor of a new lattice."""
        first = self._workers.stages[0]
        for rows in self._workers.prefill(self._tokens[first.length :]):
            hidden = rows
            if self._speculator is not None:
                self._speculator.follow(self._tokens)
            if first.length < len(self._tokens):
                yield []
        last, stages = len(self._tokens) - 1, len(self._workers.stages)
        self._lattice = Lattice(stages, self._tokens[-1], last, [last] * stages)
        return {self._lattice.anchor: self._said(hidden[-1:])[0]}

    def _said(self, hidden: Array) -> Array:
        """What the target says after each row [n, H]: logits float32 [n, V], or the tokens int64 [n] where greedy."""
        return self._workers.logits(hidden) if self._choose is not None else self._workers.best(hidden)

    def _tick(self) -> list[int]:
        self._propose()
        passes = self._passes()
        for one in passes:
            self._load(one.worker, one.nodes)
        start = perf_counter()
        # The last stage first: the head makes its job the longest.
        self._workers.lanes.run([partial(self._run, one) for one in reversed(passes)])
        self._count(passes, perf_counter() - start)
        said: dict[Node, Said] = {}
        for one in passes:
            if one.said is not None:
                said = dict(zip(one.nodes, one.said, strict=True))
            elif one.hidden is not None:
                self._hidden.update(zip(one.nodes, one.hidden, strict=True))
        self._expand(passes)
        return self._commit(said)

    def _propose(self) -> None:
        """Ask who proposes ahead of ticks, once for every anchor."""
        speculator, lattice = self._speculator, self._lattice
        if speculator is not None and self._asked is not lattice.anchor:
            self._asked = lattice.anchor
            start = perf_counter()
            speculator.propose(lattice, self._tokens, self._depth())
            if self._stats.timeline is not None and speculator.sources:
                self._stats.timeline.span("proposals", "propose", start, perf_counter())

    def _passes(self) -> list[_Pass]:
        """What each stage has to run; with single-exit selection the stages behind that exit let the others finish."""
        lattice, stages = self._lattice, self._workers.stages
        found = [
            _Pass(stage, worker, nodes) for stage, worker in enumerate(stages) if (nodes := lattice.waiting(stage))
        ]
        if self._exits is not None and self._exits.selected is not None and found[0].stage <= self._exits.selected:
            found = [one for one in found if one.stage <= self._exits.selected]
        return found

    def _run(self, one: _Pass) -> None:
        """Run a loaded pass and what reads its output. On a lane: touches nothing that another pass does."""
        one.start = perf_counter()
        one.worker.run()
        hidden = one.worker.output(one.worker.stage.last)
        if one.stage == len(self._workers.stages) - 1:
            one.said = self._said(hidden)
        else:
            one.hidden = hidden.copy()
            if self._exits is not None and one.stage in self._exits.workers:
                one.scores = self._exits.workers[one.stage].run(hidden)
        one.end = perf_counter()

    def _expand(self, passes: list[_Pass]) -> None:
        """Let exits propose, the deepest first: its nodes are the nearest to being decided."""
        counts = self._stats.exploration
        if self._exits is not None:
            last = self._lattice.anchor.position + self._depth()
            for one in reversed(passes):
                if one.scores is not None:
                    self._exits.expand(self._lattice, one.stage, one.nodes, one.scores, self._ends, last)
        counts.peak_nodes = max(counts.peak_nodes, len(self._lattice.nodes))

    def _count(self, passes: list[_Pass], together: float) -> None:
        spent = [(one.stage, one.end - one.start) for one in passes]
        self._stats.exploration.count_tick(spent, together)
        self._stats.exploration.explored += len(passes[0].nodes) if passes[0].stage == 0 else 0
        self._engine_seconds -= max(0.0, sum(seconds for _, seconds in spent) - together)
        if self._stats.timeline is not None:
            tick = self._stats.ticks
            for one in passes:
                rows = {"rows": len(one.nodes), "tick": tick}
                self._stats.timeline.span(f"stage {one.stage}", f"tick {tick}", one.start, one.end, **rows)

    def _depth(self) -> int:
        """How far behind the anchor a proposal is of use: the text may end, or change its rotary tables, before."""
        short = [rope.switch_length for rope in self._spec.ropes.values() if rope.switch_length and not self._long]
        return min([self._room - 1, *(length - len(self._tokens) for length in short)])

    def _load(self, worker: StageWorker, nodes: list[Node]) -> None:
        lattice, stage = self._lattice, nodes[0].depth
        committed = len(self._tokens) - 1
        x = (
            np.array([node.token for node in nodes])
            if stage == 0
            else np.stack([self._hidden.pop(node) for node in nodes])
        )
        alone = len(nodes) == 1 and nodes[0] is lattice.anchor
        first = worker.length
        for row, node in enumerate(nodes, first):
            node.rows.append(row)
        visible = None if alone else [lattice.visible_rows(node, stage) for node in nodes]
        worker.load(x, np.array([node.position for node in nodes]), visible, committed)

    def _commit(self, said: dict[Node, Said]) -> list[int]:
        committed: list[int] = []
        lattice, nodes = self._lattice, list[Node]()
        while self._room > 0 and lattice.anchor in said:
            answer = said[lattice.anchor]
            token = int(answer) if self._choose is None else self._choose(answer, lattice.anchor.position + 1)
            committed.append(token)
            self._room = self._room - 1 if token not in self._ends else 0
            nodes.append(lattice.commit(token))
        if committed:
            self._learn(committed, nodes)
            self._tokens += committed
            start, kept = lattice.collapse()
            for worker, rows in zip(self._workers.stages, kept, strict=True):
                worker.keep(start, rows)
            self._hidden = {node: self._hidden[node] for node in lattice.nodes if node in self._hidden}
        return committed

    def _learn(self, committed: list[int], nodes: list[Node]) -> None:
        for node in nodes:
            self._stats.exploration.count_commit(node.origin)
        if self._asked is not None and self._speculator is not None:
            self._speculator.learn(committed, nodes)
        if self._stats.timeline is not None:
            self._stats.timeline.mark("commits", f"{len(committed)} tokens", perf_counter(), tokens=committed)

    def _start_over_long(self) -> Generator[list[int], None, list[int]]:
        """The text has outgrown the short rotary tables: run it again with the long ones, as transformers does."""
        self._reset(True)
        self._asked = None
        self._stats.exploration.explored += 1  # the anchor, which runs with the text before it
        return self._commit((yield from self._prefill()))
