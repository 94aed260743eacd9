"""One tuning from beginning to end: costs, threads, modes, limits, and the decision against plain decoding."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import median

from wavekit.benchmarking.openings import Openings
from wavekit.benchmarking.runs import Written, write
from wavekit.decoding.decoder import Decoder
from wavekit.profiles import Setting
from wavekit.tuning.candidates import limits_around, mode_settings, thread_settings
from wavekit.tuning.search import TIE, Phase, Search, Source, Trial
from wavekit.verification.prompts import Sample

_SHARES: dict[Phase, float] = {"threads": 0.12, "modes": 0.38, "limits": 0.6, "final": 1.0}
"""Of the time given, what has passed when a phase ends at the latest."""

_WARM_UP = 12
_FINALISTS = 3


class BundleSource:
    """Times of a real bundle, opened in every way that is asked for."""

    def __init__(self, openings: Openings, samples: Sequence[Sample], new_tokens: int) -> None:
        self._openings, self._samples, self._new_tokens = openings, samples, new_tokens
        self._warm: set[Setting] = set()

    @property
    def prompts(self) -> int:
        """How many there are."""
        return len(self._samples)

    def write(self, setting: Setting, prompt: int) -> Written:
        """Write after a prompt; a setting's first text is preceded by a short one that does not count."""
        llm = self._openings.get(setting)
        if setting not in self._warm:
            self._warm.add(setting)
            write(llm, setting, self._samples[0], min(_WARM_UP, self._new_tokens))
        return write(llm, setting, self._samples[prompt], self._new_tokens)

    def retain(self, settings: Iterable[Setting]) -> None:
        """Close engines that none of these needs; what is opened again is cold again."""
        kept = {(setting.threads, setting.lanes) for setting in settings}
        self._openings.retain(settings)
        self._warm = {setting for setting in self._warm if (setting.threads, setting.lanes) in kept}


@dataclass(frozen=True)
class Tuned:
    """What was found; speeds are over ``plain``, which has all cores."""

    plain: Setting
    chosen: Trial | None
    trials: tuple[Trial, ...]

    @property
    def setting(self) -> Setting:
        """The one for the profile."""
        return self.chosen.setting if self.chosen is not None else self.plain

    @property
    def plain_rate(self) -> float | None:
        """Tokens a second of plain decoding, the median over all of its texts in the last phase."""
        last = self.trials[-1].phase if self.trials else None
        written = {id(plain): plain for trial in self.trials if trial.phase == last for plain, _ in trial.pairs}
        rates = [plain.rate for plain in written.values() if plain.rate is not None]
        return median(rates) if rates else None

    @property
    def speed(self) -> float:
        """Of that, in total over all texts of the decision."""
        return self.chosen.total if self.chosen is not None else 1.0


def tune(
    decoder: Decoder,
    source: Source,
    cores: int,
    seconds: float,
    clock: Callable[[], float],
    told: Callable[[Phase], None] = lambda phase: None,
) -> Tuned:
    """Search for about ``seconds``; the decision may take longer, since it sees every prompt once at least.

    Args:
        decoder: of the bundle, asked only for what it offers.
        source: of times.
        cores: of this machine.
        seconds: to spend.
        clock: what they are counted on.
        told: of every turn.
    """
    start, search = clock(), Search(source, clock, told)

    def until(phase: Phase) -> float:
        return start + seconds * _SHARES[phase]

    plain, *fewer = thread_settings(cores)
    speculating = bool(mode_settings(decoder, cores, cores))
    counts = search.halve("threads", plain, fewer, until("threads" if speculating else "limits"))
    best = [trial.setting for trial in counts[:1] if trial.speed > TIE]
    settings = mode_settings(decoder, cores, best[0].threads if best else cores)
    modes = search.halve("modes", plain, settings, until("modes"))
    finalists = [trial.setting for trial in modes]
    while finalists and clock() < until("limits"):
        around = [finalists[0], *limits_around(decoder, finalists[0])]
        found = [trial.setting for trial in search.halve("limits", plain, around, until("limits"))]
        if not found or found[0] == finalists[0]:
            break
        finalists = [found[0], *(setting for setting in finalists if setting != found[0])]
    chosen = search.decide(plain, [*finalists[:_FINALISTS], *best], until("final"))
    return Tuned(plain, chosen, tuple(search.trials))
