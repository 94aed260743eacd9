"""From a checkpoint folder of any of the four formats to a `Draft`, or one line that says what is wrong with it.

What a folder leaves open is asked for, never assumed: a head with the wrong taps, map or norms runs without an error
and drafts next to nothing.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from wavekit_engines.checkpoint import read_json
from wavekit_engines.decoder_spec import DecoderSpec
from wavekit_engines.draft_formats.check import GIVE_BOUNDARIES, check_boundaries, check_target, eagle_rule
from wavekit_engines.draft_formats.head_config import HeadConfig, read_config
from wavekit_engines.draft_formats.layouts import (
    D2T,
    EMBEDDING,
    LAYOUTS,
    T2D,
    Layout,
    check_architecture,
    check_layer_names,
    detect,
    refuse_unsupported,
    tensor_name,
)
from wavekit_engines.draft_formats.stored_tensor import StoredTensor, stored_type, to_float32
from wavekit_engines.draft_formats.tensor_files import read_tensors
from wavekit_engines.draft_formats.vocabulary import read_vocabulary
from wavekit_engines.draft_spec import Draft, DraftSpec
from wavekit_engines.errors import CheckpointError, MisuseError, WavekitError
from wavekit_engines.rope import scaled_rope


def read_draft(
    path: str | Path,
    *,
    target: DecoderSpec | None = None,
    boundaries: Sequence[int] | None = None,
    format: str | None = None,
) -> Draft:
    """Read an EAGLE-3 head from a folder with ``config.json`` and ``model.safetensors`` or ``pytorch_model.bin``.

    Args:
        path: the folder.
        target: the model it drafts for. With it, everything that has to fit is checked; without it, nothing says
            whether the boundaries lie inside the model, and ``target_layers`` is None unless wavekit wrote the folder.
        boundaries: the taps, ascending; these count, whatever the folder says. For folders that state no layer ids, or
            contradictory ones.
        format: one of `FORMATS`. None: seen from the form of the files. The format decides what layer ids mean; naming
            "eagle" also says that the head taps boundaries 2, N // 2 and N - 3.

    Raises:
        MisuseError: something has to be said that the folder does not say, the folder holds no such head, or the head
            is another model's.
        CheckpointError: files are damaged, or say things that contradict each other.
        UnsupportedModelError: a kind of draft, or an option of it, that is not read.
    """
    folder = Path(path).expanduser()
    if not folder.is_dir():
        raise MisuseError(
            f"{folder} is no folder: give a draft head's folder; one from a hub has to be downloaded first"
        )
    if not (folder / "config.json").is_file():
        if (folder / "draft" / "config.json").is_file():
            raise MisuseError(f"{folder} is the folder of a training run: its head is in {folder / 'draft'}")
        raise MisuseError(f"{folder} is no checkpoint: it has no config.json")
    if format is not None and format not in LAYOUTS:
        raise MisuseError(f"there is no draft format {format!r}: choose one of {', '.join(LAYOUTS)}")
    config, tensors = read_json(folder / "config.json"), read_tensors(folder)
    with _located(folder):
        refuse_unsupported(config, tensors)
        layout = LAYOUTS[format] if format is not None else detect(config, tensors)
        check_layer_names(tensors, layout)
        check_architecture(config, layout)
        head = read_config(config, layout, ids_wanted=boundaries is None)
        rule = eagle_rule(target.num_layers) if format == "eagle" and target is not None else None
        taps = tuple(boundaries) if boundaries is not None else head.boundaries or head.own.boundaries or rule
        if taps is None:
            raise MisuseError(_ids_are_missing(layout))
        _check_count(taps, head, tensors, MisuseError if boundaries is not None else CheckpointError)
        draft = _assemble(head, layout, taps, target, tensors)
        if target is not None:
            check_target(draft, target)
    return draft


@contextmanager
def _located(folder: Path) -> Iterator[None]:
    """Put the folder before every message."""
    try:
        yield
    except WavekitError as error:
        raise type(error)(f"{folder}: {error}") from error


def _ids_are_missing(layout: Layout) -> str:
    rule = "; or, if it follows the rule of EAGLE's own code, name format and model (`--from eagle --target MODEL`)"
    return (
        "no layer ids are stated, and with wrong ones a head drafts next to nothing: if you know its boundaries, "
        f"{GIVE_BOUNDARIES}{rule if layout.name == 'eagle' else ''}"
    )


def _assemble(
    head: HeadConfig,
    layout: Layout,
    taps: tuple[int, ...],
    target: DecoderSpec | None,
    tensors: dict[str, StoredTensor],
) -> Draft:
    layers = head.own.target_layers
    if layers is None and target is not None:
        layers = target.num_layers
    check_boundaries(taps, layers)
    spec = DraftSpec(
        boundaries=taps,
        target_layers=layers,
        hidden_size=head.hidden_size,
        intermediate_size=head.intermediate_size,
        num_heads=head.num_heads,
        num_kv_heads=head.num_kv_heads,
        head_dim=head.head_dim,
        vocab_size=head.vocab_size,
        draft_vocab_size=head.draft_vocab_size,
        max_positions=head.max_positions,
        norm_eps=head.norm_eps,
        rope=scaled_rope(head.rope_parameters, head.head_dim, head.max_positions),
        activation=head.activation,
        norm_before_residual=head.norm_before_residual,
        fc_norm=head.fc_norm,
        norm_output=head.norm_output,
        qkv_bias=head.attention_bias,
        output_bias=head.attention_bias,
        mlp_bias=head.mlp_bias,
        embedding_scale=head.own.embedding_scale,
    )
    weights, kinds = _weights(spec, layout, tensors)
    dtype = Counter(kinds.values()).most_common(1)[0][0]
    return Draft(
        spec=spec,
        d2t=read_vocabulary(tensors, spec.draft_vocab_size, spec.vocab_size),
        embedding=weights.pop("embedding", None),
        weights=weights,
        dtype=dtype,
        dtypes={role: kind for role, kind in kinds.items() if kind != dtype},
        origin=head.own.origin,
        target_digest=head.own.target_digest,
        rope_parameters=head.rope_parameters,
        carried=head.carried,
    )


def _check_count(
    taps: tuple[int, ...], head: HeadConfig, tensors: Mapping[str, StoredTensor], error: type[WavekitError]
) -> None:
    if head.taps is not None and head.taps != len(taps):
        raise error(f"num_aux_hidden_states is {head.taps}, but the boundaries are {list(taps)}: {GIVE_BOUNDARIES}")
    fc = tensors.get("fc.weight")
    if fc is not None and fc.shape != (head.hidden_size, len(taps) * head.hidden_size):
        taken = f"{fc.shape[-1] / head.hidden_size:g}" if fc.shape else "0"
        raise error(
            f"fc.weight has the shape {list(fc.shape)}, for {taken} states of {head.hidden_size} numbers, but the "
            f"boundaries are {list(taps)}: if you know the right {taken}, {GIVE_BOUNDARIES}"
        )


def _weights(
    spec: DraftSpec, layout: Layout, tensors: Mapping[str, StoredTensor]
) -> tuple[dict[str, NDArray[np.float32]], dict[str, Any]]:
    """Weights by role, the embedding among them where there is one, and how each was stored."""
    shapes = spec.weight_shapes()
    names = {role: tensor_name(role, layout) for role in shapes}
    if EMBEDDING in tensors:
        shapes["embedding"], names["embedding"] = (spec.vocab_size, spec.hidden_size), EMBEDDING
    missing = sorted({*names.values()} - {*tensors})
    extra = sorted({*tensors} - {*names.values(), D2T, T2D})
    if missing or extra:
        raise CheckpointError(_mismatch(missing, extra))
    for role, name in names.items():
        if tensors[name].shape != shapes[role]:
            raise CheckpointError(
                f"{name} has the shape {list(tensors[name].shape)}, but config.json makes it {list(shapes[role])}: "
                "they do not belong together; take both from the training run that made the head"
            )
    kinds = {role: stored_type(tensors[name], name) for role, name in names.items()}
    return {role: to_float32(tensors[name], name) for role, name in names.items()}, kinds


def _mismatch(missing: list[str], extra: list[str]) -> str:
    """One line on tensors that do not go with the configuration, by what the first of them belongs to."""
    reasons = {
        "input_norm.": "norm_before_fc",
        "fc_norm.": "fc_norm",
        "_proj.bias": "attention_bias or mlp_bias",
    }
    for names, verdict in ((missing, "is set, but {} is missing"), (extra, "is not set, but {} is there")):
        for part, option in reasons.items():
            found = [name for name in names if part in name]
            if found:
                return (
                    f"{option} {verdict.format(found[0])}: a server that follows config.json would run the head wrong; "
                    "mend config.json as the training run had it, or take complete weights"
                )
    if missing:
        return f"{', '.join(missing[:4])} missing: the head is incomplete; download or save it again"
    return (
        f"{', '.join(extra[:4])} {'is' if len(extra) == 1 else 'are'} no part of an EAGLE-3 head that is read: wavekit "
        "does not know what that changes"
    )
