"""The lattice decoder: the opened engines of a bundle, and what is shared by all texts they write.

How one text is written, tick by tick, is in `generation`; what may be proposed to it in `speculator`.
"""

import threading
from collections.abc import Generator, Sequence
from dataclasses import replace

import numpy as np

from wavekit.decoding.budget import Budget
from wavekit.decoding.draft_source import DraftSource
from wavekit.decoding.exit_source import ExitSource
from wavekit.decoding.generation import Chooser, DecodeStats, Generation, Request
from wavekit.decoding.head_worker import HEAD_ROWS
from wavekit.decoding.lanes import Lanes
from wavekit.decoding.lattice import LATTICE_ROWS
from wavekit.decoding.lookup import LookupSource
from wavekit.decoding.pass_costs import MEASURED, PassCosts
from wavekit.decoding.prefix_cache import PrefixCache
from wavekit.decoding.sequence_workers import Engines, SequenceWorkers, WorkerPool, switches_to_long
from wavekit.decoding.sources import Source
from wavekit.decoding.speculation import Speculation
from wavekit.decoding.speculator import Speculator, SpeculatorMaker
from wavekit_engines.bundle import Manifest
from wavekit_engines.engine import Array
from wavekit_engines.errors import ContextLengthError, MisuseError

__all__ = ["Chooser", "DecodeStats", "Decoder"]

_MEASURED_CONTEXT = 128


class Decoder:
    """The opened engines of a bundle. Safe to share between threads: every generation has workers of its own."""

    def __init__(
        self, manifest: Manifest, engines: Engines, lanes: int = 1, prefix_memory: int = 0, concurrency: int = 2
    ) -> None:
        """Decode with these engines; ``lanes`` stages may run at once, ``prefix_memory`` bytes hold earlier texts.

        The buffers of ``concurrency`` generations are kept for later ones; more may be under way.
        """
        self.manifest = _within(engines, manifest)
        self._whose = "model's" if self.manifest is manifest else "engines'"
        manifest, self.spec = self.manifest, self.manifest.decoder
        self._engines = engines
        self._lanes = Lanes(lanes)
        self.workers = WorkerPool(manifest, engines, self._lanes, concurrency)
        # Such engines round activations, which carries differences of the last bit far. None arise between passes of
        # two rows or more in which every row takes the place in the cache that it has in the text.
        self._rounds = engines.rounds or {manifest.engine.precision, manifest.engine.head_precision} != {"fp32"}
        self.prefixes = PrefixCache(prefix_memory, self._rounds) if prefix_memory else None
        self._target_costs: dict[bool, PassCosts] = {}  # by whether the choice is greedy
        self._draft_costs: PassCosts | None = None
        self._measuring = threading.Lock()

    def decode(
        self,
        prompt: Sequence[int],
        choose: Chooser | None,
        max_new_tokens: int,
        stats: DecodeStats | None = None,
        speculator: SpeculatorMaker | None = None,
        ends: frozenset[int] = frozenset(),
        nodes: int = LATTICE_ROWS,
    ) -> Generator[list[int], None, None]:
        """Yield committed tokens, tick by tick, until ``max_new_tokens``, one of ``ends`` or the end of the context.

        Between the chunks of a long prompt it yields empty lists, so that the caller, who ends a text early by closing
        the iterator, can do so there. ``choose`` is called once a position, in order; None is greedy choice, for which
        the head need not give every logit. What is proposed (see `speculator`) changes only how many passes the same
        text takes; at most ``nodes`` are explored at a time.

        Raises:
            MisuseError: an empty prompt, or a token id outside the vocabulary.
            ContextLengthError: the prompt leaves no room for a new token.
        """
        self.check_prompt(prompt)
        room = min(max_new_tokens, self.spec.max_positions - len(prompt))
        stats = stats if stats is not None else DecodeStats()
        least_rows = self.least_rows(speculator is not None)
        with self.workers.lent(len(prompt) + room, least_rows, nodes) as workers:
            proposing = speculator(workers) if speculator is not None else None
            request = Request(list(prompt), choose, room, ends)
            generation = Generation(workers, self.spec, request, stats, proposing, self.prefixes)
            try:
                yield from generation.ticks()
            except GeneratorExit:
                generation.remember()
                raise
            generation.remember()

    def check_prompt(self, prompt: Sequence[int]) -> None:
        """Raises what `decode` raises for a prompt it cannot continue."""
        if not prompt:
            raise MisuseError("the prompt is empty; give at least one token")
        worst = max(prompt) if min(prompt) >= 0 else min(prompt)
        if not 0 <= worst < self.spec.vocab_size:
            raise MisuseError(f"token id {worst} is outside the vocabulary of {self.spec.vocab_size}")
        if len(prompt) >= self.spec.max_positions:
            raise ContextLengthError(
                f"the prompt has {len(prompt)} tokens, the {self._whose} context holds {self.spec.max_positions}; "
                "shorten it"
            )

    def logits(self, tokens: Sequence[int]) -> Array:
        """Logits float32 [len(tokens), V] at every position of a text, as `verify` and tests compare them."""
        self.check_prompt(tokens)
        with self.workers.lent(len(tokens)) as workers:
            workers.reset(switches_to_long(self.spec, len(tokens)))
            return np.concatenate([workers.logits(rows).copy() for rows in workers.prefill(tokens, HEAD_ROWS)])

    def speculator(self, speculation: Speculation, greedy: bool = False) -> SpeculatorMaker | None:
        """What makes the speculators of texts that are written so; None for plain decoding.

        Measures, once, what passes cost on this machine, where that decides how much is proposed; ``greedy`` where the
        texts will be decoded without a chooser, for which the head costs less.

        Raises:
            MisuseError: the bundle has no draft head or exits, or a head that scores fewer tokens than asked for, or
                its engines have no room for so many nodes.
        """
        draft, exits = self.manifest.draft, self.exit_boundaries
        mode = speculation.resolved(draft is not None, exits)
        if mode == "off":
            return None
        most = self._engines.rows
        if most is not None and speculation.nodes > most:
            raise MisuseError(
                f"nodes of a speculation is {speculation.nodes}, these engines have room for {most}: ask for fewer, or "
                "build with a larger --max-tree"
            )
        drafting, top_k = draft is not None and "draft" in mode, 0
        if draft is not None and drafting:
            top_k = speculation.top_k or draft.top_k
            if top_k > draft.top_k:
                raise MisuseError(f"top_k of a speculation is {top_k}, this bundle's head scores {draft.top_k} tokens")
            top_k = 1 if self._rounds else top_k
        budget = None
        if speculation.adaptive and mode != "exits":
            costs = self.draft_costs() if drafting else None
            budget = Budget(self.target_costs(greedy), costs, self.least_rows(True))

        def make(workers: SequenceWorkers) -> Speculator:
            sources: list[Source] = []
            if "lookup" in mode:
                sources.append(LookupSource(speculation.lookup_depth))
            if drafting:
                depth, tokens = speculation.draft_depth, speculation.tokens
                sources.append(DraftSource(*workers.draft(), depth, top_k, tokens, budget))
            exploring = self._exit_source(speculation, workers) if "exits" in mode else None
            return Speculator(sources, budget, speculation.tokens, self._rounds, exploring)

        return make

    @property
    def exit_boundaries(self) -> tuple[int, ...]:
        """Where the bundle has exits."""
        return self.manifest.exits.spec.boundaries if self.manifest.exits is not None else ()

    def _exit_source(self, speculation: Speculation, workers: SequenceWorkers) -> ExitSource:
        boundaries = speculation.exits if speculation.exits is not None else self.exit_boundaries
        exits = workers.exits(boundaries, speculation.nodes)
        return ExitSource(
            exits,
            decs=speculation.decs,
            least_probability=speculation.least_probability,
            most_nodes=speculation.nodes,
            chain=self._rounds,
            selected=min(exits) if speculation.selection else None,
        )

    def target_costs(self, greedy: bool = False) -> PassCosts:
        """What passes of the target cost here; measured when first asked for, in a fraction of a second."""
        with self._measuring:
            if greedy not in self._target_costs:
                self._target_costs[greedy] = self._measure_target(greedy)
            return self._target_costs[greedy]

    def draft_costs(self) -> PassCosts:
        """What passes of the draft head cost here; measured when first asked for."""
        with self._measuring:
            if self._draft_costs is None:
                self._draft_costs = self._measure_draft()
            return self._draft_costs

    def least_rows(self, speculating: bool) -> int:
        """Rows that every pass must have for texts not to depend on speculation, see `stage_worker`."""
        proposers = self.manifest.draft is not None or self.manifest.exits is not None
        return 2 if self._rounds and (speculating or proposers) else 1

    def close(self) -> None:
        """End the lanes and close the engines."""
        self._lanes.close()
        self._engines.close()

    def _measure_target(self, greedy: bool) -> PassCosts:
        context = max(min(_MEASURED_CONTEXT, self.spec.max_positions - MEASURED[-1]), 1)
        with self.workers.lent(context + MEASURED[-1]) as workers:
            workers.reset(False)
            for _ in workers.prefill([0] * context):
                pass

            def run(count: int) -> None:
                for hidden in workers.prefill([0] * count):
                    _ = workers.best(hidden) if greedy else workers.logits(hidden)
                for worker in workers.stages:
                    worker.keep(context, [])

            return PassCosts.measure(run)

    def _measure_draft(self) -> PassCosts:
        """Each pass after one of the target, whose weights push the head's out of the processor's caches."""
        context = min(_MEASURED_CONTEXT, self.spec.max_positions - 1)
        with self.workers.lent(context + 1) as workers:
            worker, _ = workers.draft()
            workers.reset(False)
            spec = worker.spec
            size = len(spec.boundaries), spec.hidden_size
            states, above = np.zeros((MEASURED[-1], spec.hidden_size), np.float32), np.zeros((MEASURED[-1], 0), int)
            worker.feed([np.zeros((context, *size), np.float32)], [0] * context)

            def target() -> None:
                for _ in workers.prefill([0]):
                    pass
                for stage in workers.stages:
                    stage.keep(0, [])

            def run(count: int) -> None:
                worker.forget_grown()
                worker.step(states[:count], np.zeros(count, np.int64), 1, above[:count])

            return PassCosts.measure(run, target)


def _within(engines: Engines, manifest: Manifest) -> Manifest:
    """The manifest of a model whose context is that of the engines, where they have less room."""
    spec = manifest.decoder
    if engines.context is None or engines.context >= spec.max_positions:
        return manifest
    return replace(manifest, decoder=replace(spec, max_positions=engines.context))
