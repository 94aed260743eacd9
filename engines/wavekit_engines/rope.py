"""Rotary frequencies for every scaling wavekit knows, and the cosine and sine tables made from them.

The arithmetic runs in float32 in the order that transformers uses (``modeling_rope_utils``), since a relative error of
1e-7 in a frequency is an error of 1e-3 radians at position 10,000. It knows no family and no configuration file: it
takes rope parameters in the spelling of transformers 5 (``rope_type``, ``rope_theta``, ...), already normalized.

Sources of the formulas: linear (position interpolation, kaiokendev), YaRN (arXiv 2309.00071), LongRoPE
(arXiv 2402.13753), llama3 (the Llama 3.1 reference code).
"""

import math
from collections.abc import Callable, Mapping
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from wavekit_engines.decoder_spec import RopeSpec
from wavekit_engines.errors import MisuseError, UnsupportedModelError

FloatArray = NDArray[np.float32]

# "finetuned" is a note some YaRN checkpoints carry; nothing reads it.
_COMMON_KEYS = frozenset({"rope_type", "type", "rope_theta", "partial_rotary_factor", "finetuned"})
_TABLE_CHUNK = 4096
_SMALLEST, _LARGEST = 1e-9, 1e15


def scaled_rope(parameters: Mapping[str, Any], head_dim: int, max_positions: int) -> RopeSpec:
    """Compute the frequencies that `parameters` describe.

    Args:
        parameters: ``rope_type``, ``rope_theta``, optionally ``partial_rotary_factor``, and what the type needs.
        head_dim: features of one head; the leading ``int(head_dim * partial_rotary_factor)`` are rotated.
        max_positions: the context length the checkpoint states, which YaRN and LongRoPE take their factor from.

    Raises:
        UnsupportedModelError: the type, or a parameter that the type has no use for, is unknown.
        MisuseError: a parameter that the type needs is missing or no number.
    """
    rope_type = parameters.get("rope_type", "default")
    if not isinstance(rope_type, str) or rope_type not in _SCALINGS:
        known = ", ".join(sorted(_SCALINGS))
        raise UnsupportedModelError(f"rope type {rope_type!r} is not supported; supported: {known}")
    scale, keys = _SCALINGS[rope_type]
    for key, value in parameters.items():
        if value and key not in _COMMON_KEYS and key not in keys:
            raise UnsupportedModelError(f"rope parameter {key}={value!r} is not understood for rope type {rope_type!r}")
    dim = int(head_dim * float(_number(parameters, "partial_rotary_factor", 1.0)))
    if not 2 <= dim <= head_dim or dim % 2:
        raise MisuseError(f"{dim} of a head's {head_dim} features would be rotated; it must be an even number of them")
    return scale(parameters, dim, max_positions)


def rope_tables(rope: RopeSpec, length: int, long: bool) -> tuple[FloatArray, FloatArray]:
    """Cosines and sines for positions 0 to ``length - 1``, times the rope's factor.

    Args:
        rope: the frequencies.
        length: number of positions.
        long: take the frequencies for sequences beyond ``rope.switch_length``; without effect where there are none.

    Returns:
        Two float32 arrays ``[length, rotary_dim / 2]``.
    """
    frequencies, factor = rope.inv_freq, rope.factor
    if long and rope.long_inv_freq is not None:
        frequencies, factor = rope.long_inv_freq, rope.long_factor or rope.factor
    inv_freq = np.array(frequencies, np.float32)
    cos = np.empty((length, inv_freq.size), np.float32)
    sin = np.empty_like(cos)
    for start in range(0, length, _TABLE_CHUNK):
        stop = min(start + _TABLE_CHUNK, length)
        # The angle is rounded to float32 as the reference does; its cosine is then taken exactly.
        angle = (np.arange(start, stop, dtype=np.float32)[:, None] * inv_freq).astype(np.float64)
        cos[start:stop] = np.cos(angle)
        sin[start:stop] = np.sin(angle)
    return cos * np.float32(factor), sin * np.float32(factor)


def _default(parameters: Mapping[str, Any], dim: int, max_positions: int) -> RopeSpec:
    return _spec(1.0 / _wavelengths(parameters, dim))


def _linear(parameters: Mapping[str, Any], dim: int, max_positions: int) -> RopeSpec:
    return _spec(1.0 / _wavelengths(parameters, dim) / np.float32(_number(parameters, "factor")))


def _llama3(parameters: Mapping[str, Any], dim: int, max_positions: int) -> RopeSpec:
    """Leave high frequencies, divide low ones by the factor, and blend in between."""
    factor = _number(parameters, "factor")
    low, high = _number(parameters, "low_freq_factor"), _number(parameters, "high_freq_factor")
    original = _number(parameters, "original_max_position_embeddings", max_positions)
    if high <= low:
        raise MisuseError("rope parameter high_freq_factor must be greater than low_freq_factor")
    inv_freq = (1.0 / _wavelengths(parameters, dim)).astype(np.float32)
    wavelength = np.float32(2 * math.pi) / inv_freq
    smooth = (np.float32(original) / wavelength - np.float32(low)) / np.float32(high - low)
    blended = (1 - smooth) * inv_freq / np.float32(factor) + smooth * inv_freq
    is_low = wavelength > np.float32(original / low)
    is_high = wavelength < np.float32(original / high)
    return _spec(np.where(is_low, inv_freq / np.float32(factor), np.where(is_high, inv_freq, blended)))


def _yarn(parameters: Mapping[str, Any], dim: int, max_positions: int) -> RopeSpec:
    """Interpolate low frequencies, keep high ones, ramp in between, and sharpen attention by the factor's logarithm."""
    wavelengths = _wavelengths(parameters, dim)
    theta = _number(parameters, "rope_theta")
    original = _number(parameters, "original_max_position_embeddings", max_positions)
    factor = _number(parameters, "factor", max_positions / original)

    def boundary(rotations: float) -> float:
        return dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low = boundary(_number(parameters, "beta_fast", 32))
    high = boundary(_number(parameters, "beta_slow", 1))
    if parameters.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    high += 0.001 if low == high else 0.0  # a ramp of no width would divide by zero
    ramp = np.clip((np.arange(dim // 2, dtype=np.float32) - np.float32(low)) / np.float32(high - low), 0, 1)
    keep = np.float32(1) - ramp
    inv_freq = 1.0 / (np.float32(factor) * wavelengths) * (1 - keep) + 1.0 / wavelengths * keep
    return _spec(inv_freq, _yarn_attention_factor(parameters, factor))


def _yarn_attention_factor(parameters: Mapping[str, Any], factor: float) -> float:
    if parameters.get("attention_factor") is not None:
        return float(_number(parameters, "attention_factor"))

    def magnitude(scale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0

    if parameters.get("mscale") and parameters.get("mscale_all_dim"):
        return magnitude(_number(parameters, "mscale")) / magnitude(_number(parameters, "mscale_all_dim"))
    return magnitude(1.0)


def _longrope(parameters: Mapping[str, Any], dim: int, max_positions: int) -> RopeSpec:
    """Divide each frequency by a factor of its own; a second list serves sequences beyond the original context."""
    original = int(_number(parameters, "original_max_position_embeddings", max_positions))
    if original < 2:
        raise MisuseError(f"rope parameter original_max_position_embeddings must be at least 2, not {original}")
    factor = _number(parameters, "factor", max_positions / original)
    default = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    attention_factor = _number(parameters, "attention_factor", default)
    wavelengths = _wavelengths(parameters, dim)
    short, long = (_factors(parameters, key, wavelengths.size) for key in ("short_factor", "long_factor"))
    spec = _spec(1.0 / (short * wavelengths), float(attention_factor))
    if original >= max_positions:
        return spec
    return RopeSpec(spec.inv_freq, spec.factor, _floats(1.0 / (long * wavelengths)), spec.factor, original)


_SCALINGS: dict[str, tuple[Callable[[Mapping[str, Any], int, int], RopeSpec], frozenset[str]]] = {
    "default": (_default, frozenset()),
    "linear": (_linear, frozenset({"factor"})),
    "llama3": (
        _llama3,
        frozenset({"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}),
    ),
    "yarn": (
        _yarn,
        frozenset(
            {
                *("factor", "original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow"),
                *("mscale", "mscale_all_dim", "truncate"),
            }
        ),
    ),
    "longrope": (
        _longrope,
        frozenset(
            {"factor", "original_max_position_embeddings", "attention_factor", "short_factor", "long_factor"},
        ),
    ),
}


def _wavelengths(parameters: Mapping[str, Any], dim: int) -> FloatArray:
    """``theta ** (i / dim)`` for i = 0, 2, ..., rounded to float32 at each step."""
    theta = np.float64(np.float32(_number(parameters, "rope_theta")))
    if not 1 < theta < math.inf:
        raise MisuseError(f"rope parameter rope_theta must be greater than 1, not {theta}")
    exponents = np.arange(0, dim, 2, dtype=np.float32) / np.float32(dim)
    return np.asarray(theta ** exponents.astype(np.float64), np.float32)


def _number(parameters: Mapping[str, Any], key: str, default: float | None = None) -> float:
    value = parameters.get(key)
    value = default if value is None else value
    if not _is_positive(value):
        raise MisuseError(f"rope parameter {key} must be a positive number, not {value!r}")
    return cast(float, value)


def _is_positive(value: object) -> bool:
    """Whether `value` is a positive number of a size whose products float32 holds."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and _SMALLEST < value < _LARGEST


def _factors(parameters: Mapping[str, Any], key: str, count: int) -> FloatArray:
    value = parameters.get(key)
    if not isinstance(value, (list, tuple)) or len(value) != count or not all(map(_is_positive, value)):
        raise MisuseError(
            f"rope parameter {key} must list {count} positive numbers, one for each rotated pair of features"
        )
    return np.array(value, np.float32)


def _spec(inv_freq: FloatArray, factor: float = 1.0) -> RopeSpec:
    return RopeSpec(_floats(inv_freq), factor)


def _floats(values: FloatArray) -> tuple[float, ...]:
    return tuple(float(value) for value in np.asarray(values, np.float32))
