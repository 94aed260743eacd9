"""Built TensorRT engines as a table: what the build log says of each."""

from collections.abc import Sequence

from wavekit.commands.formatting import size, table
from wavekit_engines.tensorrt.engine_cache import EngineInfo

_COLUMNS = ("engine", "layers", "fused", "weights", "activations", "scratch", "file")


def engine_table(engines: Sequence[EngineInfo], last: tuple[str, Sequence[str]]) -> str:
    """One row an engine; layers are those of all its profiles together. ``last`` is a column more, with its header."""
    rows = [
        (
            info.part,
            str(info.facts.layers),
            str(len(info.facts.fused)),
            *map(size, (info.facts.weight_bytes, info.facts.activation_bytes, info.facts.scratch_bytes, info.bytes)),
            cell,
        )
        for info, cell in zip(engines, last[1], strict=True)
    ]
    return table((*_COLUMNS, last[0]), rows, right=frozenset(range(1, len(_COLUMNS))))


def target(info: EngineInfo) -> str:
    """What an engine is for, in words."""
    cards = ", ".join(info.compute_capabilities) or "any GPU"
    return f"{info.precision}, {info.capacity} rows, {cards}"


def makers(engines: Sequence[EngineInfo]) -> str:
    """The libraries that built engines, each with its version."""
    return ", ".join(sorted({f"{info.library} {info.version}" for info in engines}))
