"""A bundle opened in several ways at once: one set of engines for every number of threads and lanes."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from wavekit.llm import LLM, load
from wavekit.profiles import Setting


@dataclass(frozen=True)
class Place:
    """What runs the bundle, and on which device: as `wavekit.load` takes them."""

    engine: str = "onnxruntime"
    device: str | None = None


class Openings:
    """Opens a bundle as it is asked for, and keeps what it opened."""

    def __init__(self, bundle: Path, place: Place | None = None) -> None:
        self._bundle, self._place = bundle, place or Place()
        self._open: dict[tuple[int, int], LLM] = {}
        self._checked = False

    def get(self, setting: Setting) -> LLM:
        """The bundle opened with the threads and lanes of ``setting``. Raises as `wavekit.load` does."""
        key = setting.threads, setting.lanes
        if key not in self._open:
            self._open[key] = load(
                self._bundle,
                threads=setting.threads,
                lanes=setting.lanes,
                check_hashes=not self._checked,
                engine=self._place.engine,
                device=self._place.device,
            )
            self._checked = True
        return self._open[key]

    def retain(self, settings: Iterable[Setting]) -> None:
        """Close what none of these settings needs."""
        needed = {(setting.threads, setting.lanes) for setting in settings}
        for key in [key for key in self._open if key not in needed]:
            self._open.pop(key).close()

    def close(self) -> None:
        """Close everything."""
        self.retain(())
