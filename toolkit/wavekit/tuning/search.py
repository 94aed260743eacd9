"""The search: halve what is slowest, step by step, and decide at the end against plain decoding.

Everything is compared with plain decoding after the same prompt, in turn and with who is first moving on, so that a
slow minute hits all alike. Where times come from is a parameter; the search knows no engines.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Literal, Protocol

from wavekit.benchmarking.runs import Written
from wavekit.benchmarking.spread import Spread
from wavekit.profiles import Setting

Phase = Literal["threads", "modes", "limits", "final"]
Outcome = Literal["measured", "behind", "another text", "no time", "no gain", "chosen"]

TIE = 1.02
"""A setting must be faster than plain decoding by more than this to be chosen."""

_FIRST_PROMPTS = 2
_MOST_ROUNDS = 5


class Source(Protocol):
    """Where times come from."""

    @property
    def prompts(self) -> int:
        """How many prompts there are."""

    def write(self, setting: Setting, prompt: int) -> Written:
        """Write after a prompt, by number, as this setting says."""

    def retain(self, settings: Iterable[Setting]) -> None:
        """None but these will be asked for next."""


@dataclass
class Trial:
    """One setting in one phase, beside plain decoding after the same prompts."""

    phase: Phase
    setting: Setting
    outcome: Outcome = "no time"
    pairs: list[tuple[Written, Written]] = field(default_factory=list)
    """Plain and this, turn by turn."""

    @property
    def ratios(self) -> list[float]:
        """Speed over plain decoding, turn by turn; texts of one token have none."""
        return [plain.decode_seconds / mine.decode_seconds for plain, mine in self.pairs if len(plain.tokens) > 1]

    @property
    def speed(self) -> float:
        """Their median; 0 where nothing was measured."""
        return median(self.ratios) if self.ratios else 0.0

    @property
    def spread(self) -> Spread | None:
        """The same with quartiles."""
        return Spread.of(self.ratios)

    @property
    def total(self) -> float:
        """Time of all plain texts over that of all these; 0 where nothing was measured."""
        mine = sum(one.decode_seconds for _, one in self.pairs)
        return sum(plain.decode_seconds for plain, _ in self.pairs) / mine if mine else 0.0

    @property
    def groups(self) -> list[int]:
        """Tokens that passes committed."""
        return [size for _, one in self.pairs for size in one.groups]


class Search:
    """Tries settings and remembers all of it."""

    def __init__(
        self, source: Source, clock: Callable[[], float], told: Callable[[Phase], None] = lambda phase: None
    ) -> None:
        """Measure with ``source``; ``told`` is told of every turn."""
        self.trials: list[Trial] = []
        self._source, self._clock, self._told = source, clock, told
        self._turn = 0

    def halve(self, phase: Phase, plain: Setting, settings: Sequence[Setting], until: float) -> list[Trial]:
        """Measure settings on 2 prompts, drop the slower half, go on with twice as many prompts, until one is left.

        Stops where ``until`` has come on the clock. Returns those that came that far, the fastest first; settings that
        write another text than ``plain`` are not among them.
        """
        alive = [Trial(phase, setting) for setting in settings]
        self.trials += alive
        count = _FIRST_PROMPTS
        while alive:
            self._source.retain([plain, *(trial.setting for trial in alive)])
            complete = self._turns(plain, alive, min(count, self._source.prompts), until)
            alive = sorted(_right(alive), key=lambda trial: trial.speed, reverse=True)
            if not complete or len(alive) <= 1:
                break
            kept = alive[: (len(alive) + 1) // 2]
            for trial in alive[len(kept) :]:
                trial.outcome = "behind"
            alive, count = kept, count * 2
        return [trial for trial in alive if trial.pairs]

    def decide(self, plain: Setting, settings: Sequence[Setting], until: float) -> Trial | None:
        """The fastest of these that is faster than plain decoding beyond doubt, or None.

        All prompts are written in rounds, one at least and up to 5 while there is time. What is chosen was faster than
        ``plain`` by more than `TIE`, in the median of its turns and in total, and slower in no round. Where plain
        decoding with another number of threads is among the settings, the others must be that much faster than it too.
        """
        finalists = [Trial("final", setting) for setting in settings]
        self.trials += finalists
        self._source.retain([plain, *settings])
        rounds = 0
        while finalists and rounds < _MOST_ROUNDS and (not rounds or self._clock() < until):
            self._turns(plain, _right(finalists), self._source.prompts, until if rounds else None)
            rounds += 1
        gaining = [trial for trial in _right(finalists) if _gains(trial, self._source.prompts)]
        for trial in _right(finalists):
            trial.outcome = "no gain" if trial not in gaining else "behind"
        if not gaining:
            return None
        bar = max((trial.total for trial in gaining if _is_plain(trial)), default=1.0)
        rivals = [trial for trial in gaining if _is_plain(trial) or trial.total > TIE * bar]
        best = max(rivals, key=lambda trial: trial.total)
        best.outcome = "chosen"
        return best

    def _turns(self, plain: Setting, trials: Sequence[Trial], count: int, until: float | None) -> bool:
        """Everybody writes after the next ``count`` prompts; False where time ran out before."""
        for _ in range(count):
            if until is not None and self._clock() >= until:
                return False
            self._one_turn(plain, _right(trials))
        return True

    def _one_turn(self, plain: Setting, trials: Sequence[Trial]) -> None:
        if not trials:
            return
        prompt, first = self._turn % self._source.prompts, self._turn % (len(trials) + 1)
        self._turn += 1
        order: list[Trial | None] = [None, *trials]
        written = dict[int, Written]()
        for trial in (*order[first:], *order[:first]):
            self._told(trials[0].phase)
            setting = trial.setting if trial is not None else plain
            written[id(trial)] = self._source.write(setting, prompt)
        reference = written[id(None)]
        for trial in trials:
            mine = written[id(trial)]
            trial.pairs.append((reference, mine))
            trial.outcome = "measured" if mine.tokens == reference.tokens else "another text"


def _right(trials: Iterable[Trial]) -> list[Trial]:
    return [trial for trial in trials if trial.outcome != "another text"]


def _is_plain(trial: Trial) -> bool:
    return trial.setting.speculation.mode == "off"


def _gains(trial: Trial, prompts: int) -> bool:
    rounds = [trial.pairs[at : at + prompts] for at in range(0, len(trial.pairs), prompts)]
    faster = all(
        sum(mine.decode_seconds for _, mine in pairs) <= sum(plain.decode_seconds for plain, _ in pairs)
        for pairs in rounds
    )
    return faster and trial.speed > TIE and trial.total > TIE
