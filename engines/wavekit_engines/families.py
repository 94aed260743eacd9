"""From a checkpoint's ``config.json`` to a `DecoderSpec`: one table, one row for each model family.

A row states what a family does differently from Llama, and the values that transformers assumes for keys a
configuration leaves out. What is not in the row is not understood, and a configuration that sets it is refused by name.
The facts are those of the modelling code in transformers 5.24. Nothing here opens a file or knows a tensor.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from wavekit_engines.config_reader import ConfigReader
from wavekit_engines.decoder_spec import Activation, DecoderSpec, LayerSpec, NormPlacement, QKNorm, RopeSpec
from wavekit_engines.errors import MisuseError, UnsupportedModelError
from wavekit_engines.layer_patterns import (
    FULL,
    SLIDING,
    WindowRule,
    all_but_every_nth,
    all_layers,
    every_second,
    from_layer_number,
    rotated_layers,
    three_of_four,
    unless_listed,
    where_not_rotated,
)
from wavekit_engines.rope import scaled_rope

Scale = Callable[[ConfigReader], float]

_ACTIVATIONS: dict[str, Activation] = {
    **{"silu": "silu", "swish": "silu", "gelu": "gelu"},
    **{"gelu_pytorch_tanh": "gelu_tanh", "gelu_new": "gelu_tanh", "gelu_fast": "gelu_tanh"},
}
_EXTENDED_TYPES = frozenset({"llama3", "yarn", "longrope"})


def _one(reader: ConfigReader) -> float:
    return 1.0


@dataclass(frozen=True)
class Family:
    """What one family does differently from Llama. A string names the configuration key that decides."""

    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Values of keys that a configuration leaves out."""
    harmless: Mapping[str, Any] = field(default_factory=dict)
    """Keys that checkpoints carry without effect, with the one value they may have; None: any."""
    activation: str = "hidden_act"
    qkv_bias: bool | str = "attention_bias"
    output_bias: bool | str = "attention_bias"
    mlp_bias: bool | str = False
    qk_norm: QKNorm = "none"
    norm_placement: NormPlacement = "pre"
    norm_offset: float = 0.0
    fused_tensors: bool = False
    """q, k and v, and gate and up, are each one tensor in the checkpoint (Phi-3)."""
    window_rule: WindowRule | None = None
    window_switch: str | None = None
    """The key that has to be true for ``sliding_window`` to count."""
    skips_rope: bool = False
    """Some layers have no rotary embedding (SmolLM 3)."""
    rope_per_layer_type: bool = False
    """Layers with and without the window have rope parameters of their own (Gemma 3, OLMo 3)."""
    partial_rotary: bool = False
    rope_aliases: Mapping[str, str] = field(default_factory=dict)
    """Old names of rope types."""
    attention_scale: Scale | None = None
    embedding_scale: Scale = _one
    residual_scale: Scale = _one
    logit_scale: Scale = _one
    attention_softcap: str | None = None
    logit_softcap: str | None = None


_LLAMA = {
    **{"max_position_embeddings": 2048, "rms_norm_eps": 1e-6, "hidden_act": "silu"},
    **{"rope_theta": 10_000.0, "tie_word_embeddings": False},
}
_MISTRAL = {**_LLAMA, "num_key_value_heads": 8, "max_position_embeddings": 131072, "sliding_window": 4096}
_QWEN = {
    **{**_LLAMA, "num_key_value_heads": 32, "max_position_embeddings": 32768},
    **{"sliding_window": 4096, "max_window_layers": 28},
}
_GEMMA = {
    **{**_LLAMA, "tie_word_embeddings": True, "head_dim": 256, "max_position_embeddings": 8192},
    **{"vocab_size": 256000, "num_attention_heads": 16, "num_key_value_heads": 16, "hidden_act": "gelu_pytorch_tanh"},
}
_GEMMA_2 = {
    **{**_GEMMA, "num_attention_heads": 8, "num_key_value_heads": 4, "hidden_activation": "gelu_pytorch_tanh"},
    **{"query_pre_attn_scalar": 256, "sliding_window": 4096},
    **{"final_logit_softcapping": 30.0, "attn_logit_softcapping": 50.0},
}
_GEMMA_3 = {
    **{**_GEMMA_2, "vocab_size": 262208, "max_position_embeddings": 131072},
    **{"rope_theta": 1_000_000.0, "rope_local_base_freq": 10_000.0},
    **{"final_logit_softcapping": None, "attn_logit_softcapping": None},
}
_OLMO = {**_LLAMA, "rms_norm_eps": 1e-5}


def _square_root_of_width(reader: ConfigReader) -> float:
    return math.sqrt(reader.integer("hidden_size"))


def _query_scalar(reader: ConfigReader) -> float:
    return 1 / math.sqrt(reader.number("query_pre_attn_scalar"))


FAMILIES: dict[str, Family] = {
    "llama": Family(_LLAMA, mlp_bias="mlp_bias"),
    "mistral": Family(_MISTRAL, qkv_bias=False, output_bias=False, window_rule=all_layers),
    "ministral": Family(_MISTRAL, qkv_bias=False, output_bias=False, window_rule=unless_listed(all_layers)),
    "qwen2": Family(
        _QWEN,
        qkv_bias=True,
        output_bias=False,
        window_rule=unless_listed(from_layer_number),
        window_switch="use_sliding_window",
    ),
    "qwen3": Family(
        {**_QWEN, "head_dim": 128},
        qk_norm="per_head",
        window_rule=unless_listed(from_layer_number),
        window_switch="use_sliding_window",
    ),
    "smollm3": Family(
        {
            **_QWEN,
            "num_key_value_heads": 4,
            "rope_theta": 2_000_000.0,
            "sliding_window": None,
            "tie_word_embeddings": True,
        },
        {"max_window_layers": None},
        mlp_bias="mlp_bias",
        window_rule=unless_listed(where_not_rotated),
        window_switch="use_sliding_window",
        skips_rope=True,
    ),
    "phi3": Family(
        {**_LLAMA, "rms_norm_eps": 1e-5, "max_position_embeddings": 4096, "original_max_position_embeddings": 4096},
        {"full_attn_mod": 1, "interpolate_factor": 1},
        qkv_bias=False,
        output_bias=False,
        fused_tensors=True,
        window_rule=all_layers,
        partial_rotary=True,
        rope_aliases={"su": "longrope", "yarn": "longrope"},
    ),
    "granite": Family(
        {
            **{**_LLAMA, "attention_multiplier": 1.0, "embedding_multiplier": 1.0},
            **{"residual_multiplier": 1.0, "logits_scaling": 1.0},
        },
        mlp_bias="mlp_bias",
        attention_scale=lambda reader: reader.number("attention_multiplier"),
        embedding_scale=lambda reader: reader.number("embedding_multiplier"),
        residual_scale=lambda reader: reader.number("residual_multiplier"),
        logit_scale=lambda reader: 1 / reader.number("logits_scaling"),
    ),
    "olmo2": Family(_OLMO, qk_norm="full", norm_placement="post"),
    "olmo3": Family(
        {**_OLMO, "rope_theta": 500_000.0, "rope_local_base_freq": 500_000.0, "sliding_window": 4096},
        qk_norm="full",
        norm_placement="post",
        window_rule=unless_listed(three_of_four),
        rope_per_layer_type=True,
    ),
    "gemma": Family(
        _GEMMA,
        {"hidden_activation": "gelu_pytorch_tanh"},
        norm_offset=1.0,
        embedding_scale=_square_root_of_width,
    ),
    "gemma2": Family(
        _GEMMA_2,
        {"hidden_act": None, "sliding_window_size": None},
        activation="hidden_activation",
        norm_placement="sandwich",
        norm_offset=1.0,
        window_rule=unless_listed(every_second),
        attention_scale=_query_scalar,
        embedding_scale=_square_root_of_width,
        attention_softcap="attn_logit_softcapping",
        logit_softcap="final_logit_softcapping",
    ),
    "gemma3_text": Family(
        _GEMMA_3,
        {"hidden_act": None},
        activation="hidden_activation",
        qk_norm="per_head",
        norm_placement="sandwich",
        norm_offset=1.0,
        window_rule=unless_listed(all_but_every_nth),
        rope_per_layer_type=True,
        attention_scale=_query_scalar,
        embedding_scale=_square_root_of_width,
        logit_softcap="final_logit_softcapping",
    ),
}


def decoder_spec(config: Mapping[str, Any]) -> DecoderSpec:
    """Describe the decoder that a ``config.json`` configures.

    Raises:
        UnsupportedModelError: the model type, an activation, a rope scaling or any other setting is not understood;
            the message names it.
        MisuseError: a required field is missing or has an impossible value.
    """
    config = _text_part(config)
    model_type = config.get("model_type")
    if model_type is None:
        raise MisuseError("the model's configuration has no model_type")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        supported = ", ".join([*FAMILIES, "gemma3"])
        raise UnsupportedModelError(f"model type {model_type!r} is not supported; supported: {supported}")
    if config.get("quantization_config"):
        raise UnsupportedModelError(
            "the checkpoint is quantized (quantization_config); give the unquantized one, wavekit quantizes on export"
        )
    family = FAMILIES[model_type]
    reader = ConfigReader(config, family.defaults)
    reader.ignore(key for key, value in family.harmless.items() if value is None or config.get(key) == value)
    spec = _spec(model_type, family, reader)
    reader.refuse_unread()
    return spec


def _spec(name: str, family: Family, reader: ConfigReader) -> DecoderSpec:
    hidden_size, num_heads = reader.integer("hidden_size"), reader.integer("num_attention_heads")
    num_kv_heads = reader.optional_integer("num_key_value_heads") or num_heads
    if num_heads % num_kv_heads:
        raise MisuseError(f"num_attention_heads ({num_heads}) is no multiple of num_key_value_heads ({num_kv_heads})")
    head_dim = reader.optional_integer("head_dim")
    if head_dim is None:
        if hidden_size % num_heads:
            raise MisuseError(f"hidden_size ({hidden_size}) is no multiple of num_attention_heads ({num_heads})")
        head_dim = hidden_size // num_heads
    layers = _layers(family, reader)
    ropes = _ropes(family, reader, head_dim)
    used = {layer.rope for layer in layers}
    return DecoderSpec(
        family=name,
        hidden_size=hidden_size,
        intermediate_size=reader.integer("intermediate_size"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        vocab_size=reader.integer("vocab_size"),
        max_positions=reader.integer("max_position_embeddings"),
        norm_eps=reader.number("rms_norm_eps"),
        layers=layers,
        ropes={key: rope for key, rope in ropes.items() if key in used},
        attention_scale=family.attention_scale(reader) if family.attention_scale else head_dim**-0.5,
        activation=_activation(name, family, reader),
        norm_placement=family.norm_placement,
        norm_offset=family.norm_offset,
        qk_norm=family.qk_norm,
        qkv_bias=_decides(family.qkv_bias, reader),
        output_bias=_decides(family.output_bias, reader),
        mlp_bias=_decides(family.mlp_bias, reader),
        tied_head=reader.flag("tie_word_embeddings"),
        embedding_scale=family.embedding_scale(reader),
        residual_scale=family.residual_scale(reader),
        logit_scale=family.logit_scale(reader),
        attention_softcap=reader.optional_number(family.attention_softcap) if family.attention_softcap else None,
        logit_softcap=reader.optional_number(family.logit_softcap) if family.logit_softcap else None,
    )


def _decides(rule: bool | str, reader: ConfigReader) -> bool:
    return reader.flag(rule) if isinstance(rule, str) else rule


def _activation(name: str, family: Family, reader: ConfigReader) -> Activation:
    activation = reader.value(family.activation)
    if name == "gemma" and activation == "gelu":
        return "gelu_tanh"  # published so by mistake; transformers and the original both compute the approximation
    if not isinstance(activation, str) or activation not in _ACTIVATIONS:
        known = ", ".join(sorted(_ACTIVATIONS))
        raise UnsupportedModelError(f"{family.activation}={activation!r} is not supported; supported: {known}")
    return _ACTIVATIONS[activation]


def _layers(family: Family, reader: ConfigReader) -> tuple[LayerSpec, ...]:
    """Window and rope of each layer. A window that no sequence can outgrow is None."""
    count = reader.integer("num_hidden_layers")
    window, windowed = None, [False] * count
    if family.window_rule is not None:
        window = reader.optional_integer("sliding_window")
        if family.window_switch and not reader.flag(family.window_switch):
            window = None
        windowed = family.window_rule(reader, count, window)
        if window is None and any(windowed):
            raise UnsupportedModelError("layer_types asks for sliding_attention, but no sliding_window is in force")
        if window is not None and window >= reader.integer("max_position_embeddings"):
            window = None
    rotated = rotated_layers(reader, count) if family.skips_rope else [True] * count
    return tuple(
        LayerSpec(
            rope=(SLIDING if has_window and family.rope_per_layer_type else FULL) if is_rotated else None,
            window=window if has_window else None,
        )
        for has_window, is_rotated in zip(windowed, rotated, strict=True)
    )


def full_rope(config: Mapping[str, Any]) -> dict[str, Any]:
    """The rotary parameters of layers with full attention, as `rope.scaled_rope` takes them.

    Args:
        config: a configuration that `decoder_spec` takes.
    """
    config = _text_part(config)
    family = FAMILIES[config["model_type"]]
    return _rope_parameters(family, ConfigReader(config, family.defaults))[FULL]


def _ropes(family: Family, reader: ConfigReader, head_dim: int) -> dict[str, RopeSpec]:
    max_positions = reader.integer("max_position_embeddings")
    return {
        kind: scaled_rope(parameters, head_dim, max_positions)
        for kind, parameters in _rope_parameters(family, reader).items()
    }


def _rope_parameters(family: Family, reader: ConfigReader) -> dict[str, dict[str, Any]]:
    """The rope of each kind of layer, from either spelling of the configuration.

    Up to version 4 transformers writes ``rope_theta`` and ``rope_scaling``, since then one dictionary
    ``rope_parameters``, which for some families holds such a dictionary for each kind of layer. Where both are there,
    ``rope_scaling`` wins.
    """
    scaling, parameters = reader.mapping("rope_scaling"), reader.mapping("rope_parameters")
    theta = reader.number("rope_theta")
    if not family.rope_per_layer_type:
        return {FULL: _shared_rope(family, reader, scaling or parameters, theta)}
    strange = [key for key, value in parameters.items() if value and key not in (SLIDING, FULL)]
    if strange:
        raise UnsupportedModelError(f"rope_parameters has {strange[0]} where only {SLIDING} and {FULL} are understood")
    if not all(isinstance(nested, Mapping) for nested in parameters.values() if nested):
        raise MisuseError(f"rope_parameters must hold dictionaries, not {parameters!r}")
    thetas = {FULL: theta, SLIDING: reader.number("rope_local_base_freq")}
    scalings = {FULL: scaling, SLIDING: {}}
    return {
        kind: _named(
            {"rope_theta": thetas[kind], **(parameters.get(kind) or {}), **scalings[kind]}, family, partial=False
        )
        for kind in thetas
    }


def _shared_rope(family: Family, reader: ConfigReader, parameters: dict[str, Any], theta: float) -> dict[str, Any]:
    partial = reader.optional_number("partial_rotary_factor")
    original = reader.optional_integer("original_max_position_embeddings")
    parameters = {"rope_theta": theta, "partial_rotary_factor": partial, **parameters}
    parameters = _named(parameters, family, partial=family.partial_rotary)
    if original is not None and parameters["rope_type"] in _EXTENDED_TYPES:
        parameters["original_max_position_embeddings"] = original
    return parameters


def _named(parameters: dict[str, Any], family: Family, partial: bool) -> dict[str, Any]:
    """The same with ``rope_type`` under its present name; refuses a partial rotation where the family has none."""
    rope_type = str(parameters.get("rope_type") or parameters.get("type") or "default")
    factor = parameters.get("partial_rotary_factor")
    if not partial and factor is not None and factor != 1:
        raise UnsupportedModelError(f"partial_rotary_factor={factor!r} is not supported for this family")
    return {**parameters, "rope_type": family.rope_aliases.get(rope_type, rope_type)}


# What the image half of a Gemma 3 adds to its configuration; a text without images never reaches it.
_IMAGE_KEYS = frozenset({"text_config", "vision_config", "mm_tokens_per_image", "tie_word_embeddings"}) | {
    f"{what}_token_{form}" for what in ("boi", "eoi", "image") for form in ("index", "id")
}


def _text_part(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The configuration of the text model inside a Gemma 3 that also takes images; any other as it is."""
    if config.get("model_type") != "gemma3":
        return config
    outer = ConfigReader(config, {"tie_word_embeddings": True})
    text, tied = outer.mapping("text_config"), outer.flag("tie_word_embeddings")
    outer.ignore(_IMAGE_KEYS)
    outer.refuse_unread()
    if bool(text.get("tie_word_embeddings", tied)) != tied:
        raise UnsupportedModelError("tie_word_embeddings differs between the configuration and its text_config")
    return {**text, "model_type": "gemma3_text", "tie_word_embeddings": tied}
