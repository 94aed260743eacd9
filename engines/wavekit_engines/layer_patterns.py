"""Which layers of a model have the sliding window, and which are rotated: the rules by which families say it.

Each rule takes the configuration, the number of layers and the window (None where there is none), and returns one truth
value per layer.
"""

from collections.abc import Callable

from wavekit_engines.config_reader import ConfigReader
from wavekit_engines.errors import MisuseError, UnsupportedModelError

SLIDING, FULL = "sliding_attention", "full_attention"

WindowRule = Callable[[ConfigReader, int, int | None], list[bool]]


def all_layers(reader: ConfigReader, layers: int, window: int | None) -> list[bool]:
    """Mistral, Phi-3: one window for the whole model."""
    return [window is not None] * layers


def from_layer_number(reader: ConfigReader, layers: int, window: int | None) -> list[bool]:
    """Qwen: layers from ``max_window_layers`` on."""
    first = reader.value("max_window_layers")
    if isinstance(first, bool) or not isinstance(first, int):
        raise MisuseError(f"max_window_layers in the model's configuration must be an integer, not {first!r}")
    return [window is not None and layer >= first for layer in range(layers)]


def all_but_every_nth(reader: ConfigReader, layers: int, window: int | None) -> list[bool]:
    """Gemma 3: all but every ``sliding_window_pattern``-th."""
    # transformers writes the pattern it was given under the second name, beside the layer_types made from it.
    written = reader.optional_integer("_sliding_window_pattern")
    pattern = reader.optional_integer("sliding_window_pattern") or written or 6
    return [(layer + 1) % pattern != 0 for layer in range(layers)]


def three_of_four(reader: ConfigReader, layers: int, window: int | None) -> list[bool]:
    """OLMo 3: all but every fourth."""
    return [(layer + 1) % 4 != 0 for layer in range(layers)]


def every_second(reader: ConfigReader, layers: int, window: int | None) -> list[bool]:
    """Gemma 2: the first, the third, and so on."""
    return [layer % 2 == 0 for layer in range(layers)]


def where_not_rotated(reader: ConfigReader, layers: int, window: int | None) -> list[bool]:
    """SmolLM 3: the layers without rotary embedding."""
    return [window is not None and not rotated for rotated in rotated_layers(reader, layers)]


def unless_listed(otherwise: WindowRule) -> WindowRule:
    """``layer_types`` decides where the configuration has it, `otherwise` where not."""

    def rule(reader: ConfigReader, layers: int, window: int | None) -> list[bool]:
        fallback = otherwise(reader, layers, window)
        types = reader.per_layer("layer_types", layers)
        if types is None:
            return fallback
        unknown = sorted({str(kind) for kind in types} - {SLIDING, FULL})
        if unknown:
            raise UnsupportedModelError(f"layer_types has {', '.join(unknown)}; supported: {FULL}, {SLIDING}")
        return [kind == SLIDING for kind in types]

    return rule


def rotated_layers(reader: ConfigReader, layers: int) -> list[bool]:
    """SmolLM 3: the layers with rotary embedding, by list or all but every ``no_rope_layer_interval``-th."""
    interval = reader.optional_integer("no_rope_layer_interval") or 4
    listed = reader.per_layer("no_rope_layers", layers)  # despite the name, 1 marks a layer that is rotated
    if listed is not None:
        return [bool(rotated) for rotated in listed]
    return [(layer + 1) % interval != 0 for layer in range(layers)]
