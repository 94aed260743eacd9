"""Rotary parameters of a configuration, in the spelling of transformers 4 and that of 5.

Version 4 has ``rope_theta`` and ``rope_scaling``, version 5 one dictionary ``rope_parameters``. A checkpoint may have
both; where they differ, its readers do too, so that is refused. Writing gives both.
"""

from collections.abc import Mapping
from typing import Any

from wavekit_engines.config_reader import ConfigReader
from wavekit_engines.errors import CheckpointError

_DEFAULT_THETA = 10_000.0
_THETA, _PARTIAL = "rope_theta", "partial_rotary_factor"


def read_rope(reader: ConfigReader) -> dict[str, Any]:
    """The parameters as `rope.scaled_rope` takes them: ``rope_type``, ``rope_theta`` and what the type needs.

    Raises:
        CheckpointError: the two spellings contradict each other.
        MisuseError: a value has the wrong type.
    """
    scaling, parameters = reader.mapping("rope_scaling"), reader.mapping("rope_parameters")
    theta, partial = reader.optional_number(_THETA), reader.optional_number(_PARTIAL)
    has_old = reader.value("rope_scaling") is not None or theta is not None
    old = _normalized({**_present(rope_theta=theta, partial_rotary_factor=partial), **scaling})
    new = _normalized({**_present(partial_rotary_factor=partial), **parameters})
    if not parameters:
        return _complete(old)
    if has_old:
        compared = new if theta is not None or _THETA in scaling else {**new, _THETA: None}
        for key in sorted({*old, *compared}):
            if old.get(key) != compared.get(key):
                raise CheckpointError(
                    f"{key} is {old.get(key)!r} by rope_theta and rope_scaling but {compared.get(key)!r} by "
                    "rope_parameters: remove the spelling that is wrong"
                )
    return _complete(new)


def write_rope(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a configuration, in both spellings."""
    new = _complete(_normalized(parameters))
    old = {key: value for key, value in new.items() if key not in (_THETA, _PARTIAL)}
    scaling = None if old == {"rope_type": "default"} else {"type": old["rope_type"], **old}
    fields = {_THETA: new[_THETA], "rope_scaling": scaling, "rope_parameters": new}
    return fields | ({_PARTIAL: new[_PARTIAL]} if _PARTIAL in new else {})


def normalized_rope(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """The same parameters in the one form that `read_rope` gives."""
    return _complete(_normalized(parameters))


def _normalized(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Without nulls, the rope's type under its present name, and numbers that are whole as they are."""
    fields = {key: value for key, value in parameters.items() if value is not None and key != "type"}
    fields["rope_type"] = str(parameters.get("rope_type") or parameters.get("type") or "default")
    if fields.get(_PARTIAL) == 1:
        del fields[_PARTIAL]
    return fields


def _complete(fields: dict[str, Any]) -> dict[str, Any]:
    return {"rope_theta": _DEFAULT_THETA, **fields}


def _present(**fields: Any) -> dict[str, Any]:
    return {key: value for key, value in fields.items() if value is not None}
