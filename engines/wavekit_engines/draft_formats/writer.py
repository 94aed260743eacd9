"""From a `Draft` to a complete checkpoint folder in one of the four formats.

A format that cannot state something about a head, so that its readers would run it wrong, is refused.
"""

import json
from pathlib import Path

import numpy as np

from wavekit_engines.atomic import atomic_directory
from wavekit_engines.draft_formats.check import eagle_rule
from wavekit_engines.draft_formats.config_writer import write_config
from wavekit_engines.draft_formats.layouts import D2T, EMBEDDING, LAYOUTS, T2D, Layout, tensor_name
from wavekit_engines.draft_formats.stored_tensor import StoredTensor, from_float32
from wavekit_engines.draft_formats.tensor_files import write_safetensors
from wavekit_engines.draft_formats.vocabulary import marks
from wavekit_engines.draft_spec import Draft
from wavekit_engines.errors import MisuseError
from wavekit_engines.rope import scaled_rope


def write_draft(path: str | Path, draft: Draft, format: str, *, replace: bool = False) -> None:
    """Write ``config.json`` and ``model.safetensors``; the folder appears whole or not at all.

    The weights are stored as ``draft.dtype`` (and ``dtypes``) say. A head over the target's whole vocabulary gets no
    ``d2t`` and no ``t2d``, as the formats have it.

    Args:
        path: the folder's name.
        draft: the head, with ``rope_parameters``.
        format: one of `FORMATS`.
        replace: take the place of a folder of that name, at the very end.

    Raises:
        MisuseError: the format is unknown or cannot state what the head is, or ``path`` exists.
        WavekitError: a number does not fit the stored type, or the disk fails.
    """
    if format not in LAYOUTS:
        raise MisuseError(f"there is no draft format {format!r}: choose one of {', '.join(LAYOUTS)}")
    layout = LAYOUTS[format]
    _check_expressible(draft, layout)
    tensors = _tensors(draft, layout)
    config = json.dumps(write_config(draft, layout), indent=2) + "\n"
    total = sum(tensor.values.nbytes for tensor in tensors.values())
    with atomic_directory(Path(path).expanduser(), replace=replace, needed_bytes=total) as folder:
        write_safetensors(folder / "model.safetensors", tensors)
        (folder / "config.json").write_text(config, encoding="utf-8")


def _tensors(draft: Draft, layout: Layout) -> dict[str, StoredTensor]:
    spec = draft.spec
    tensors = {}
    for role in spec.weight_shapes():
        name = tensor_name(role, layout)
        tensors[name] = from_float32(draft.weights[role], draft.dtypes.get(role, draft.dtype), name)
    if draft.embedding is not None:
        kind = draft.dtypes.get("embedding", draft.dtype)
        tensors[EMBEDDING] = from_float32(draft.embedding, kind, EMBEDDING)
    if spec.draft_vocab_size < spec.vocab_size:
        tensors[D2T] = StoredTensor("I64", np.asarray(draft.d2t, np.int64))
        if layout.writes_t2d:
            tensors[T2D] = marks(draft.d2t, spec.vocab_size)
    return tensors


def _check_expressible(draft: Draft, layout: Layout) -> None:
    spec = draft.spec
    if spec.qkv_bias != spec.output_bias:
        raise MisuseError("biases on q, k and v without one on the output: no draft format can state that")
    if not draft.rope_parameters:
        raise MisuseError("the head does not say what its rotary frequencies came from: set rope_parameters")
    if scaled_rope(draft.rope_parameters, spec.head_dim, spec.max_positions) != spec.rope:
        raise MisuseError(
            "the head's rope_parameters do not give its rotary frequencies: make both from one configuration"
        )
    if layout.ids_are == "layer outputs" and spec.boundaries[0] == 0:
        raise MisuseError(
            f"the head taps boundary 0, the embedding, which is no layer's output as {layout.name} counts: write it as "
            "speculators"
        )
    if layout.name == "eagle":
        _check_plain(draft)


def _check_plain(draft: Draft) -> None:
    """Refuse what EAGLE's own code, which reads neither ids nor options, would run wrong."""
    spec = draft.spec
    options = {
        "norm_before_residual": spec.norm_before_residual,
        "a norm before fc": spec.fc_norm != "none",
        "norm_output": spec.norm_output,
        "biases": spec.qkv_bias or spec.mlp_bias,
    }
    for option, is_set in options.items():
        if is_set:
            raise MisuseError(
                f"the head has {option}, which the eagle format cannot state, so its code would run it wrong: write it "
                "as specforge, modelopt or speculators"
            )
    if spec.target_layers is None:
        raise MisuseError(
            "the eagle format states no layer ids, and whether its rule gives this head's depends on the number of "
            "layers of its model: name that (--target)"
        )
    rule = eagle_rule(spec.target_layers)
    if spec.boundaries != rule:
        taps = "none" if rule is None else list(rule)
        raise MisuseError(
            f"the head taps boundaries {list(spec.boundaries)}, but code that reads the eagle format taps {taps}: "
            "write it as specforge, modelopt or speculators"
        )
