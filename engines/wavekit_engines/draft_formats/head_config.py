"""A head's ``config.json`` in any of the four formats, read into one form.

Every key is either understood, known to compute nothing, or refused by name. An option may stand in more than one place
(at top level, in ``eagle_config``); places that disagree are refused, since servers read different ones.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from wavekit_engines.config_reader import ConfigReader
from wavekit_engines.decoder_spec import Activation
from wavekit_engines.draft_formats.check import GIVE_BOUNDARIES
from wavekit_engines.draft_formats.layouts import IDS, Layout
from wavekit_engines.draft_formats.rope_config import read_rope
from wavekit_engines.draft_spec import FcNorm
from wavekit_engines.errors import CheckpointError, MisuseError, UnsupportedModelError

OWN = "wavekit"
"""Key of a dictionary with what no format has a field for; whatever else reads the file ignores it."""

DEFAULT_PROPOSAL: dict[str, Any] = {
    **{"proposal_type": "greedy", "speculative_tokens": 5},
    **{"verifier_accept_k": 1, "accept_tolerance": 0.0},
}
"""How a server is told to draft where nobody said it, in the words of speculators."""

TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
ACTIVATIONS: dict[str, Activation] = {"silu": "silu", "swish": "silu", "gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh"}
# Those of transformers' LlamaConfig, which every tool reads the fields with.
_DEFAULTS = {"rms_norm_eps": 1e-6, "hidden_act": "silu", "max_position_embeddings": 2048}

# Fields that say how EAGLE-3 works, with the values it has where they are stated.
_FIXED: dict[str, tuple[Any, ...]] = {
    "num_hidden_layers": (1,),
    "use_aux_hidden_state": (True,),
    "use_input_layernorm_in_first_layer": (True,),
    "use_last_layernorm": (True,),
    "use_mtp_layernorm": (False,),
    "eh_proj_before_attn": (False,),
    "parallel_draft_step": (0, 1),
    "use_sliding_window": (False,),
    "bias": (False,),
}
_IGNORED = (
    *("next_layer_regular", "parallel_draft_heads_num_layers", "max_window_layers", "has_no_defaults_at_init"),
    *("embed_requires_grad", "speculators_version", "speculators_model_type", "has_lm_head", "eagle_decoder_type"),
)


@dataclass(frozen=True)
class HeadConfig:
    """What a configuration says of a head, whatever its format."""

    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    draft_vocab_size: int
    max_positions: int
    norm_eps: float
    activation: Activation
    rope_parameters: dict[str, Any]
    norm_before_residual: bool
    fc_norm: FcNorm
    norm_output: bool
    attention_bias: bool
    mlp_bias: bool
    boundaries: tuple[int, ...] | None
    """None where the configuration states no ids."""
    taps: int | None
    """How many ids there are, where that is said by itself."""
    carried: dict[str, Any]
    own: "OwnFields"


@dataclass(frozen=True)
class OwnFields:
    """What wavekit itself wrote under `OWN`, and nobody else does."""

    boundaries: tuple[int, ...] | None
    target_layers: int | None
    target_digest: str | None
    origin: str
    embedding_scale: float


def read_config(config: Mapping[str, Any], layout: Layout, ids_wanted: bool) -> HeadConfig:
    """Read a configuration as `layout` has it.

    Args:
        config: the contents of ``config.json``.
        layout: its format.
        ids_wanted: False where the caller knows the boundaries, so that ids that contradict each other do not matter.

    Raises:
        MisuseError: a field is missing or has an impossible value.
        UnsupportedModelError: a field is not understood, or says something that no EAGLE-3 head does.
        CheckpointError: places that say the same thing contradict each other.
    """
    speculators = layout.name == "speculators"
    outer = ConfigReader(config, {} if speculators else _DEFAULTS)
    nested = ConfigReader(outer.mapping("transformer_layer_config" if speculators else "eagle_config"), _DEFAULTS)
    shape = nested if speculators else outer
    places, own = [outer, nested], ConfigReader(outer.mapping(OWN), {})
    for place in places:
        _check_fixed(place)
        place.ignore(_IGNORED)
    if shape.value("model_type") not in (None, "llama"):
        raise UnsupportedModelError(f"model_type {shape.value('model_type')!r} is not supported; supported: llama")
    if outer.mapping("quantization_config"):
        raise UnsupportedModelError("the head is quantized (quantization_config): give the unquantized one")
    hidden_size, num_heads = shape.integer("hidden_size"), shape.integer("num_attention_heads")
    _check_hidden(outer, hidden_size)
    _check_tied(outer)
    _check_windows(shape)
    head = HeadConfig(
        hidden_size=hidden_size,
        intermediate_size=shape.integer("intermediate_size"),
        num_heads=num_heads,
        num_kv_heads=shape.optional_integer("num_key_value_heads") or num_heads,
        head_dim=_head_dim(shape, hidden_size, num_heads),
        vocab_size=shape.integer("vocab_size"),
        draft_vocab_size=outer.optional_integer("draft_vocab_size") or shape.integer("vocab_size"),
        max_positions=shape.integer("max_position_embeddings"),
        norm_eps=shape.number("rms_norm_eps"),
        activation=_activation(shape),
        rope_parameters=read_rope(shape),
        norm_before_residual=_norm_before_residual(places, required=speculators),
        fc_norm=_fc_norm(places),
        norm_output=_stated(places, "norm_output", "return_hidden_post_norm"),
        attention_bias=_stated([shape], "attention_bias"),
        mlp_bias=_stated([shape], "mlp_bias"),
        boundaries=_boundaries(layout, outer, nested) if ids_wanted else None,
        taps=outer.optional_integer("num_aux_hidden_states"),
        carried={**_verifier(own), **(_verifier(outer) if speculators else {}), **_token_ids(shape)},
        own=_own_fields(own, layout),
    )
    for place in places:
        place.ignore((IDS, "transformer_layer_config", "eagle_config", "tie_word_embeddings"))
        place.refuse_unread()
    return head


def _check_fixed(reader: ConfigReader) -> None:
    for key, allowed in _FIXED.items():
        value = reader.value(key)
        if value is not None and value not in allowed:
            raise UnsupportedModelError(f"{key} is {value!r}: no EAGLE-3 head that is read here has that; take another")


def _check_hidden(outer: ConfigReader, hidden_size: int) -> None:
    target = outer.optional_integer("target_hidden_size")
    if target is not None and target != hidden_size:
        raise UnsupportedModelError(
            f"the head has a hidden size of {hidden_size} and its target one of {target}; only heads as wide as their "
            "target are read: take another, or make one with `wavekit train draft`"
        )


def _check_tied(outer: ConfigReader) -> None:
    if outer.flag("tie_word_embeddings"):
        raise CheckpointError(
            "tie_word_embeddings is true, which has servers score with the embedding instead of the head: set it false"
        )


def _check_windows(shape: ConfigReader) -> None:
    kinds, window = shape.value("layer_types"), shape.optional_integer("sliding_window")
    windowed = isinstance(kinds, list) and any(kind != "full_attention" for kind in kinds)
    if windowed and (window is None or window < shape.integer("max_position_embeddings")):
        raise UnsupportedModelError(
            f"layer_types is {kinds!r} with a window of {window}: heads with a window are not read; take another"
        )


def _head_dim(shape: ConfigReader, hidden_size: int, num_heads: int) -> int:
    head_dim, kv_heads = shape.optional_integer("head_dim"), shape.optional_integer("num_key_value_heads")
    if kv_heads and num_heads % kv_heads:
        raise MisuseError(f"num_attention_heads ({num_heads}) is no multiple of num_key_value_heads ({kv_heads})")
    if head_dim is None and hidden_size % num_heads:
        raise MisuseError(f"hidden_size ({hidden_size}) is no multiple of num_attention_heads ({num_heads})")
    return head_dim or hidden_size // num_heads


def _activation(shape: ConfigReader) -> Activation:
    name = shape.value("hidden_act")
    if not isinstance(name, str) or name not in ACTIVATIONS:
        raise UnsupportedModelError(f"hidden_act={name!r} is not supported; supported: {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]


def _stated(places: list[ConfigReader], *keys: str) -> bool:
    """An option that may stand under several keys in several places; absent means false."""
    stated = [(key, value) for place in places for key in keys if (value := place.value(key)) is not None]
    names = " and ".join(sorted({key for key, _ in stated}))
    for _, value in stated:
        if not isinstance(value, bool):
            raise MisuseError(f"{names} must be true or false, not {value!r}")
    if len({value for _, value in stated}) > 1:
        raise CheckpointError(
            f"{names}: true in one place and false in another, and servers read different ones; remove the wrong one"
        )
    return any(value for _, value in stated)


def _norm_before_residual(places: list[ConfigReader], required: bool) -> bool:
    if required and all(place.value("norm_before_residual") is None for place in places):
        raise CheckpointError(
            "norm_before_residual is missing, and those who read this format assume different values: add it as the "
            "training run had it"
        )
    return _stated(places, "norm_before_residual")


def _fc_norm(places: list[ConfigReader]) -> FcNorm:
    joint, each = _stated(places, "norm_before_fc"), _stated(places, "fc_norm")
    if joint and each:
        raise UnsupportedModelError(
            "norm_before_fc and fc_norm are both true: heads have one or the other; remove the one without weights"
        )
    return "joint" if joint else "each" if each else "none"


def _boundaries(layout: Layout, outer: ConfigReader, nested: ConfigReader) -> tuple[int, ...] | None:
    """The boundaries that the ids mean in the places where they stand."""
    top = _ids(outer)
    if layout.ids_are == "boundaries":
        return top
    inner = _ids(nested)
    if layout.ids_are == "absent" and (top is not None or inner is not None):
        raise CheckpointError(
            f"{IDS} is stated, which the eagle format does not have: name the format that wrote it (--from), or "
            f"{GIVE_BOUNDARIES}"
        )
    from_outputs = None if inner is None else tuple(number + 1 for number in inner)
    if top is not None and from_outputs is not None and top != from_outputs:
        raise CheckpointError(
            f"{IDS} in eagle_config is {list(inner or ())}, outputs of layers and so boundaries {list(from_outputs)}, "
            f"but at top level it is boundaries {list(top)}: if you know the right ones, {GIVE_BOUNDARIES}"
        )
    if from_outputs is None and top is not None:
        raise MisuseError(
            f"{IDS} stands only outside eagle_config, where tools disagree on what it counts: if you know the "
            f"boundaries, {GIVE_BOUNDARIES}"
        )
    return from_outputs


def _ids(reader: ConfigReader) -> tuple[int, ...] | None:
    value = reader.value(IDS)
    if value is None or value == []:
        return None
    if not isinstance(value, list) or not all(isinstance(i, int) and not isinstance(i, bool) for i in value):
        raise MisuseError(f"{IDS} must list whole numbers, not {value!r}")
    if min(value) < 0:
        raise MisuseError(f"{IDS} is {value}: negative ids mean different states in different tools; {GIVE_BOUNDARIES}")
    return tuple(value)


def _token_ids(shape: ConfigReader) -> dict[str, Any]:
    return {key: value for key in TOKEN_IDS if (value := shape.value(key)) is not None}


def _own_fields(own: ConfigReader, layout: Layout) -> OwnFields:
    taps = own.value("boundaries") if layout.ids_are == "absent" else None
    if taps is not None and not (isinstance(taps, list) and all(isinstance(tap, int) for tap in taps)):
        raise MisuseError(f"boundaries in {OWN} must list whole numbers, not {taps!r}")
    digest = own.value("target_digest")
    return OwnFields(
        boundaries=None if taps is None else tuple(taps),
        target_layers=own.optional_integer("target_layers"),
        target_digest=None if digest is None else str(digest),
        origin=str(own.value("origin") or ""),
        embedding_scale=own.optional_number("embedding_scale") or 1.0,
    )


def _verifier(place: ConfigReader) -> dict[str, Any]:
    """What speculators says of the target and of how many tokens to draft; other formats keep it under `OWN`."""
    settings = place.mapping("speculators_config")
    algorithm = settings.get("algorithm", "eagle3")
    if algorithm != "eagle3":
        raise UnsupportedModelError(f"speculators_config is for {algorithm!r}; only eagle3 is read")
    methods, verifier = settings.get("proposal_methods"), settings.get("verifier")
    found: dict[str, Any] = {}
    if isinstance(verifier, Mapping) and any(verifier.values()):
        found["verifier"] = dict(verifier)
    if isinstance(methods, list) and methods not in ([], [DEFAULT_PROPOSAL]):
        found["proposal_methods"] = methods
    return found
