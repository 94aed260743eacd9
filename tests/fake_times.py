"""A source of times that were made up, and the clock that they pass on."""

from collections.abc import Callable, Iterable

from wavekit.benchmarking.runs import Written
from wavekit.profiles import Setting

TOKENS = 11


class FakeTimes:
    """Every text takes what ``seconds`` says of a setting, a prompt and how many texts were written before."""

    def __init__(self, seconds: Callable[[Setting, int, int], float], prompts: int = 4) -> None:
        self._seconds = seconds
        self.prompts = prompts
        self.now = 0.0
        self.asked: list[tuple[Setting, int]] = []
        self.other_text: set[Setting] = set()

    def clock(self) -> float:
        return self.now

    def write(self, setting: Setting, prompt: int) -> Written:
        seconds = self._seconds(setting, prompt, len(self.asked))
        self.asked.append((setting, prompt))
        self.now += seconds
        tokens = (prompt, *range(2, TOKENS + (setting in self.other_text)))
        return Written(tokens, 0.0, seconds, 0.0, (1,) * (len(tokens) - 1))

    def retain(self, settings: Iterable[Setting]) -> None:
        self.kept = [*settings]
