"""wavekit: staged engines and a lattice decoder for a language model you already have.

>>> import wavekit
>>> llm = wavekit.load("bundle")
>>> llm.generate("The capital of France is", max_new_tokens=8).text

Importing this module loads nothing heavy; `load` brings in the engine's runtime.
"""

import logging as _logging
from importlib.metadata import version as _version
from pathlib import Path
from typing import TYPE_CHECKING

from wavekit.decoding.speculation import Speculation
from wavekit.decoding.timeline import Timeline
from wavekit_engines.errors import BundleError, ContextLengthError, MisuseError, WavekitError

if TYPE_CHECKING:
    from wavekit.llm import LLM

__version__ = _version("wavekit")
__all__ = [
    "BundleError",
    "ContextLengthError",
    "MisuseError",
    "Speculation",
    "Timeline",
    "WavekitError",
    "__version__",
    "load",
]

_logging.getLogger("wavekit").addHandler(_logging.NullHandler())


def load(
    path: str | Path,
    *,
    threads: int | None = None,
    lanes: int | None = None,
    check_hashes: bool = True,
    concurrency: int = 4,
    prefix_memory: int = 0,
    engine: str = "onnxruntime",
    device: str | None = None,
) -> "LLM":
    """Open a bundle for decoding; see `wavekit.llm.load`."""
    from wavekit import llm

    return llm.load(
        path,
        threads=threads,
        lanes=lanes,
        check_hashes=check_hashes,
        concurrency=concurrency,
        prefix_memory=prefix_memory,
        engine=engine,
        device=device,
    )
