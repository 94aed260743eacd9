"""What a GGUF file says about its model, in the words of Hugging Face: configuration and tensor names.

One row for each architecture that has a family in `families`. The facts are those of llama.cpp: what its converter
changes, and what its graphs know of a model without the file saying so.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from wavekit_engines.config_reader import ConfigReader
from wavekit_engines.errors import MisuseError, UnsupportedModelError
from wavekit_engines.gguf_file import GgufFile
from wavekit_engines.layer_patterns import FULL, SLIDING

ROPE_FACTORS = ("rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight")
"""Tensors that become part of the configuration."""

_BLOCK_PARTS = {
    **{"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"},
    **{"attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj"},
    **{"attn_output": "self_attn.o_proj", "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"},
    **{"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"},
}
_POST_NORMS = {"post_attention_norm": "post_attention_layernorm", "post_ffw_norm": "post_feedforward_layernorm"}
_GLOBAL_PARTS = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_TENSOR_NAME = re.compile(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)")


@dataclass(frozen=True)
class Architecture:
    """One value of ``general.architecture``."""

    model_type: str
    parts: Mapping[str, str] = field(default_factory=dict)
    """Names inside a block that differ from Llama's."""
    permuted: bool = False
    """Rows of q and k were reordered, head by head, for interleaved rotary embedding."""
    norms_plus_one: bool = False
    """Norm weights were stored with the norm offset added (Gemma)."""
    settings: Mapping[str, str] = field(default_factory=dict)
    """Further metadata keys and the configuration keys they become."""
    constants: Mapping[str, Any] = field(default_factory=dict)
    """Configuration that llama.cpp knows without the file saying so."""
    layers_of_27b: int = 0
    """The size of Gemma that scales attention by its width for each head, known by its number of layers."""


_GEMMA = {"ffn_norm": "pre_feedforward_layernorm", **_POST_NORMS}
_GRANITE = {
    **{"attention.scale": "attention_multiplier", "embedding_scale": "embedding_multiplier"},
    **{"residual_scale": "residual_multiplier", "logit_scale": "logits_scaling"},
}
_SOFTCAPS = {"attn_logit_softcapping": "attn_logit_softcapping", "final_logit_softcapping": "final_logit_softcapping"}
_WINDOW = {"attention.sliding_window": "sliding_window"}

ARCHITECTURES: dict[str, Architecture] = {
    # Mistral too. The sliding window of its first version is not in the file, and llama.cpp does without it.
    "llama": Architecture("llama", permuted=True),
    "qwen2": Architecture("qwen2"),
    "qwen3": Architecture("qwen3"),
    "smollm3": Architecture("smollm3", permuted=True, constants={"no_rope_layer_interval": 4}),
    "phi3": Architecture("phi3", {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}, settings=_WINDOW),
    "granite": Architecture("granite", permuted=True, settings=_GRANITE),
    "olmo2": Architecture("olmo2", _POST_NORMS),
    "gemma": Architecture("gemma", norms_plus_one=True),
    "gemma2": Architecture("gemma2", _GEMMA, norms_plus_one=True, settings={**_WINDOW, **_SOFTCAPS}, layers_of_27b=46),
    "gemma3": Architecture(
        "gemma3_text", _GEMMA, norms_plus_one=True, settings={**_WINDOW, **_SOFTCAPS}, layers_of_27b=62
    ),
}

_SHAPE_SETTINGS = {
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "context_length": "max_position_embeddings",
}


def architecture_of(file: GgufFile) -> Architecture:
    """The row for a file's architecture.

    Raises:
        UnsupportedModelError: there is none, or the file is one part of several.
    """
    name = file.metadata.get("general.architecture")
    if file.metadata.get("split.count", 0) > 1:
        raise UnsupportedModelError(
            f"{file.path} is one part of a split model: join them with llama-gguf-split --merge"
        )
    if name not in ARCHITECTURES:
        supported = ", ".join(ARCHITECTURES)
        raise UnsupportedModelError(f"GGUF architecture {name!r} is not supported; supported: {supported}")
    return ARCHITECTURES[name]


def hf_names(file: GgufFile, architecture: Architecture) -> dict[str, str]:
    """Hugging Face name to name in the file. A tensor this module does not know keeps its own name."""
    parts = {**_BLOCK_PARTS, **architecture.parts}
    names = {}
    for name in file.names():
        match = _TENSOR_NAME.fullmatch(name)
        layer, part, kind = match.groups() if match else (None, name, "")
        if layer is not None and part in parts:
            names[f"model.layers.{layer}.{parts[part]}.{kind}"] = name
        elif layer is None and part in _GLOBAL_PARTS:
            names[f"{_GLOBAL_PARTS[part]}.{kind}"] = name
        elif name not in ROPE_FACTORS:
            names[name] = name
    return names


def config_of(file: GgufFile, architecture: Architecture) -> dict[str, Any]:
    """The configuration that ``config.json`` would hold.

    Raises:
        UnsupportedModelError: the metadata has a setting for the model that is not understood.
        MisuseError: it lacks one that is needed.
    """
    prefix = f"{file.metadata['general.architecture']}."
    own = {
        key.removeprefix(prefix): value.tolist() if isinstance(value, np.ndarray) else value
        for key, value in file.metadata.items()
        if key.startswith(prefix)
    }
    reader = ConfigReader(own, {})
    tensors = set(file.names())
    config: dict[str, Any] = {"model_type": architecture.model_type, **architecture.constants}
    for key, hf_key in _SHAPE_SETTINGS.items():
        config[hf_key] = reader.integer(key)
    config["num_key_value_heads"] = reader.optional_integer("attention.head_count_kv") or config["num_attention_heads"]
    config["rms_norm_eps"] = reader.number("attention.layer_norm_rms_epsilon")
    if "token_embd.weight" not in tensors:
        raise MisuseError(f"{file.path} has no token_embd.weight")
    config["vocab_size"] = file.shape("token_embd.weight")[0]
    config["tie_word_embeddings"] = "output.weight" not in tensors
    for key, hf_key in architecture.settings.items():
        if reader.value(key) is not None:
            config[hf_key] = reader.value(key)
    _set_heads(config, reader, architecture)
    _set_layers(config, reader, tensors)
    _set_rope(config, reader, file)
    reader.ignore(("vocab_size", "tensor_data_layout", "rope.scaling.finetuned"))
    if reader.value("attention.causal") is False:
        raise UnsupportedModelError(f"{file.path} attends to later tokens too (attention.causal is false)")
    reader.refuse_unread()
    return config


def _set_heads(config: dict[str, Any], reader: ConfigReader, architecture: Architecture) -> None:
    width, heads = config["hidden_size"], config["num_attention_heads"]
    head_dim = reader.optional_integer("attention.key_length") or width // heads
    if head_dim < 2 or head_dim % 2:
        raise MisuseError(f"heads of {head_dim} features cannot be rotated in pairs")
    if (reader.optional_integer("attention.value_length") or head_dim) != head_dim:
        raise UnsupportedModelError("attention.value_length differs from attention.key_length")
    rotated = reader.optional_integer("rope.dimension_count") or head_dim
    if rotated != head_dim:
        config["partial_rotary_factor"] = rotated / head_dim
    config["head_dim"] = head_dim
    if architecture.layers_of_27b:
        is_27b = config["num_hidden_layers"] == architecture.layers_of_27b
        config["query_pre_attn_scalar"] = width // heads if is_27b else head_dim


def _set_layers(config: dict[str, Any], reader: ConfigReader, tensors: set[str]) -> None:
    """Biases, which only the presence of tensors tells, and the pattern of windows where it is written."""
    if config["model_type"] != "qwen2":  # always has biases, and no key for them
        config["attention_bias"] = "blk.0.attn_q.bias" in tensors
    config["mlp_bias"] = "blk.0.ffn_up.bias" in tensors
    pattern = reader.value("attention.sliding_window_pattern")
    if isinstance(pattern, list):
        config["layer_types"] = [SLIDING if has_window else FULL for has_window in pattern]
    elif pattern:
        config["sliding_window_pattern"] = pattern


def _set_rope(config: dict[str, Any], reader: ConfigReader, file: GgufFile) -> None:
    theta, local_theta = reader.optional_number("rope.freq_base"), reader.optional_number("rope.freq_base_swa")
    if theta is not None:
        config["rope_theta"] = theta
    elif config["model_type"] != "gemma3_text":
        config["rope_theta"] = 10_000.0
    if local_theta is not None:
        config["rope_local_base_freq"] = local_theta
    factor = reader.optional_number("rope.scaling.factor")
    kind = reader.value("rope.scaling.type") or ("linear" if factor else "none")
    original = reader.optional_integer("rope.scaling.original_context_length")
    attention_factor = reader.optional_number("rope.scaling.attn_factor")
    scaling: dict[str, Any] = {"rope_type": kind}
    present = [name for name in ROPE_FACTORS if name in file.names()]
    if present:
        # Llama 3 has one list of divisors for all lengths, Phi-3 one for short and one for long sequences.
        lists = [file.rows(name, 0, file.shape(name)[0]).tolist() for name in present]
        context = config["max_position_embeddings"]
        scaling = {"rope_type": "longrope", "short_factor": lists[0], "long_factor": lists[-1]}
        scaling["attention_factor"] = attention_factor or 1.0
        original = original if len(lists) > 1 and original else context
        scaling["original_max_position_embeddings"] = original
        if config["model_type"] == "phi3":  # transformers reads it there and nowhere else
            config["original_max_position_embeddings"] = original
    elif kind in ("linear", "yarn"):
        scaling["factor"] = factor
        if kind == "yarn":
            scaling["original_max_position_embeddings"] = original
            if attention_factor is not None:  # a multiplier of YaRN's own factor here, that factor itself there
                scaling["attention_factor"] = attention_factor * (1 + 0.1 * math.log(factor or 1.0))
            scaling["beta_fast"] = reader.optional_number("rope.scaling.yarn_beta_fast")
            scaling["beta_slow"] = reader.optional_number("rope.scaling.yarn_beta_slow")
    elif kind != "none":
        raise UnsupportedModelError(f"{file.path} scales its rope by {kind!r} without the factors for it")
    else:
        return
    config["rope_scaling"] = scaling
