"""A catalogue of small random models, several for every family wavekit reads.

Each variant makes something matter that a default configuration hides: windows shorter than any prompt, rope scalings
with short original contexts, heads whose size is not hidden / heads, biases that are not zero. `save_tiny` writes one
as a Hugging Face folder. All have 4 or more layers, hidden size 64, a vocabulary of 320 and a context of 256.
"""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers

VOCABULARY = 320
CONTEXT = 256


def _variant(kind: str, **changes: Any) -> Callable[[], transformers.PreTrainedConfig]:
    """A configuration of class ``{kind}Config``: the common small shape, with `changes`."""

    def make() -> transformers.PreTrainedConfig:
        shape = {
            "vocab_size": VOCABULARY,
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": CONTEXT,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "pad_token_id": 0,
            "tie_word_embeddings": False,
        }
        # Configurations keep and change the dictionaries they are given.
        return getattr(transformers, f"{kind}Config")(**copy.deepcopy({**shape, **changes}))

    return make


def _rope(rope_type: str, **parameters: Any) -> dict[str, Any]:
    return {"rope_type": rope_type, "rope_theta": 10000.0, **parameters}


_LLAMA3 = _rope("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64)
_YARN = _rope("yarn", factor=4.0, original_max_position_embeddings=64)
_LINEAR = _rope("linear", factor=4.0)
_SHORT, _LONG = [1.0, 1.05, 1.1, 1.3, 1.6, 2.0], [1.0, 1.5, 2.0, 4.0, 7.0, 11.0]
_LONGROPE = _rope(
    "longrope",
    short_factor=_SHORT,
    long_factor=_LONG,
    original_max_position_embeddings=32,
    partial_rotary_factor=0.75,
)
_GEMMA = {"head_dim": 16, "query_pre_attn_scalar": 24, "sliding_window": 8}
_GEMMA3 = {**_GEMMA, "sliding_window_pattern": 3, "num_hidden_layers": 6}
_GEMMA3_ROPE = {"sliding_attention": _rope("default", rope_theta=100.0), "full_attention": _rope("linear", factor=8.0)}
_GRANITE = {
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.4,
    "attention_multiplier": 0.1,
    "logits_scaling": 2.0,
}
_ALTERNATING = ["sliding_attention", "full_attention"] * 2

TINY_MODELS: dict[str, Callable[[], transformers.PreTrainedConfig]] = {
    "llama-untied": _variant("Llama"),
    "llama-tied": _variant("Llama", tie_word_embeddings=True, num_key_value_heads=1),
    "llama-biases": _variant("Llama", attention_bias=True, mlp_bias=True, num_key_value_heads=4),
    "llama-wide-heads": _variant("Llama", head_dim=32, tie_word_embeddings=True),
    "llama-three-heads": _variant("Llama", hidden_size=48, num_attention_heads=3, num_key_value_heads=1),
    "llama-linear": _variant("Llama", rope_parameters=_LINEAR),
    "llama-llama3": _variant("Llama", rope_parameters=_LLAMA3, tie_word_embeddings=True),
    "llama-yarn": _variant("Llama", rope_parameters=_YARN),
    "mistral-window": _variant("Mistral", sliding_window=8),
    "mistral-full": _variant("Mistral", sliding_window=None, tie_word_embeddings=True, head_dim=32),
    "ministral-mixed": _variant("Ministral", sliding_window=8, layer_types=_ALTERNATING, head_dim=16),
    "qwen2-tied": _variant("Qwen2", tie_word_embeddings=True),
    "qwen2-window": _variant("Qwen2", use_sliding_window=True, sliding_window=8, max_window_layers=2),
    "qwen2-yarn": _variant("Qwen2", rope_parameters=_YARN, num_key_value_heads=4),
    "qwen3-untied": _variant("Qwen3", head_dim=32),
    "qwen3-tied-biases": _variant("Qwen3", head_dim=16, attention_bias=True, tie_word_embeddings=True),
    "qwen3-window": _variant("Qwen3", head_dim=16, use_sliding_window=True, sliding_window=8, layer_types=_ALTERNATING),
    "smollm3-tied": _variant("SmolLM3", no_rope_layer_interval=2, tie_word_embeddings=True),
    "smollm3-window": _variant(
        "SmolLM3",
        no_rope_layers=[1, 0, 0, 1],
        use_sliding_window=True,
        sliding_window=8,
        attention_bias=True,
        mlp_bias=True,
        rope_parameters=_YARN,
    ),
    "phi3-untied": _variant("Phi3"),
    "phi3-tied-window": _variant("Phi3", tie_word_embeddings=True, sliding_window=8),
    "phi3-partial": _variant("Phi3", rope_parameters=_rope("default", partial_rotary_factor=0.5)),
    "phi3-longrope": _variant("Phi3", rope_parameters=_LONGROPE, original_max_position_embeddings=32),
    "granite-tied": _variant("Granite", **_GRANITE, tie_word_embeddings=True),
    "granite-biases": _variant("Granite", **_GRANITE, attention_bias=True, mlp_bias=True, rope_parameters=_LINEAR),
    "olmo2-untied": _variant("Olmo2"),
    "olmo2-tied-biases": _variant("Olmo2", tie_word_embeddings=True, attention_bias=True, rope_parameters=_LLAMA3),
    "olmo3-yarn": _variant("Olmo3", sliding_window=8, rope_parameters={"full_attention": _YARN}),
    "gemma-tied": _variant("Gemma", head_dim=32, tie_word_embeddings=True),
    "gemma2-tied": _variant(
        "Gemma2", **_GEMMA, tie_word_embeddings=True, attn_logit_softcapping=3.0, final_logit_softcapping=5.0
    ),
    "gemma2-untied": _variant("Gemma2", **{**_GEMMA, "head_dim": 32}, attn_logit_softcapping=None),
    "gemma3-tied": _variant("Gemma3Text", **_GEMMA3, tie_word_embeddings=True),
    "gemma3-untied": _variant("Gemma3Text", **{**_GEMMA3, "head_dim": 32}, attention_bias=True),
    "gemma3-linear": _variant("Gemma3Text", **_GEMMA3, rope_parameters=_GEMMA3_ROPE, final_logit_softcapping=5.0),
}


def save_tiny(name: str, folder: Path, seed: int = 0) -> transformers.PreTrainedModel:
    """Write the model `name` with random weights to `folder`, and return it (float32, eager attention, eval mode).

    Every weight is random, norms around their neutral value and biases around zero, so that leaving one out or mixing
    two up changes the logits.
    """
    config = TINY_MODELS[name]()
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32)
    fill_with_noise(model, seed)
    model.save_pretrained(folder)
    return model.eval()


def fill_with_noise(model: transformers.PreTrainedModel, seed: int) -> None:
    """Overwrite every parameter of `model` with noise of a size that keeps activations and logits of order one."""
    generator = torch.Generator().manual_seed(seed)
    neutral = 0.0 if model.config.model_type.startswith("gemma") else 1.0
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if parameter.ndim > 1:
            noise /= 4 if "embed_tokens" in name else parameter.shape[1] ** 0.5
        else:
            noise = noise / 4 + (0.0 if name.endswith("bias") else neutral)
        parameter.data.copy_(noise)
