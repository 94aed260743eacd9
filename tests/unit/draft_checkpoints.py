"""EAGLE-3 checkpoints of the four formats, written field by field as the tools that own the formats write them.

The head is 8 wide, for a target of 9 layers and 40 tokens; it taps boundaries 2, 4 and 6 and scores 10 tokens.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from wavekit_engines.families import decoder_spec

WIDTH, INNER, VOCABULARY, DRAFTED = 8, 12, 40, 10
TAPS = (2, 4, 6)
TOKENS = np.array([0, 1, 3, 7, 8, 15, 20, 31, 38, 39])
IDS = "eagle_aux_hidden_state_layer_ids"
TARGET_CONFIG = {
    "model_type": "llama",
    "hidden_size": WIDTH,
    "intermediate_size": 16,
    "num_hidden_layers": 9,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 64,
}
TARGET = decoder_spec(TARGET_CONFIG)
LAYER = {"eagle": "midlayer.", "specforge": "midlayer.", "modelopt": "layers.0.", "speculators": "layers.0."}

_HEAD = {
    "hidden_act": "silu",
    "hidden_size": WIDTH,
    "intermediate_size": INNER,
    "max_position_embeddings": 64,
    "model_type": "llama",
    "num_attention_heads": 2,
    "num_hidden_layers": 1,
    "num_key_value_heads": 1,
    "rms_norm_eps": 1e-5,
    "vocab_size": VOCABULARY,
}
_CONFIGS: dict[str, dict[str, Any]] = {
    "eagle": {
        "architectures": ["LlamaForCausalLM"],
        "bos_token_id": 1,
        "eos_token_id": 2,
        "initializer_range": 0.02,
        "pad_token_id": 0,
        "tie_word_embeddings": False,
        "torch_dtype": "float16",
        "transformers_version": "4.28.1",
        "use_cache": True,
        "draft_vocab_size": DRAFTED,
        **_HEAD,
    },
    "specforge": {
        "architectures": ["LlamaForCausalLMEagle3"],
        "eagle_config": {IDS: [1, 3, 5], "use_aux_hidden_state": True},
        "attention_bias": False,
        "head_dim": 4,
        "rope_scaling": None,
        "rope_theta": 500000.0,
        "sliding_window": None,
        "use_sliding_window": False,
        "max_window_layers": 48,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "draft_vocab_size": DRAFTED,
        **_HEAD,
    },
    "modelopt": {
        "architectures": ["LlamaForCausalLMEagle3"],
        "rope_theta": 10000.0,
        "rope_scaling": {
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 16,
            "rope_type": "llama3",
        },
        "attention_bias": False,
        "mlp_bias": False,
        "pretraining_tp": 1,
        "head_dim": 4,
        "draft_vocab_size": DRAFTED,
        "eagle_config": {
            IDS: [1, 3, 5],
            "use_aux_hidden_state": True,
            "use_input_layernorm_in_first_layer": True,
            "use_last_layernorm": True,
            "use_mtp_layernorm": False,
            "next_layer_regular": True,
            "parallel_draft_step": 1,
            "parallel_draft_heads_num_layers": None,
        },
        **_HEAD,
    },
    "speculators": {
        "architectures": ["Eagle3Speculator"],
        "draft_vocab_size": DRAFTED,
        IDS: [2, 4, 6],
        "norm_before_residual": True,
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {
                    "accept_tolerance": 0.0,
                    "proposal_type": "greedy",
                    "speculative_tokens": 3,
                    "verifier_accept_k": 1,
                }
            ],
            "verifier": {"architectures": ["LlamaForCausalLM"], "name_or_path": "some/model"},
        },
        "speculators_model_type": "eagle3",
        "speculators_version": "0.1.0",
        "target_hidden_size": None,
        "tie_word_embeddings": False,
        "transformer_layer_config": {
            **_HEAD,
            "head_dim": 4,
            "rope_parameters": {"rope_theta": 20000.0, "rope_type": "linear", "factor": 2.0},
        },
    },
}


def config(form: str, **changes: Any) -> dict[str, Any]:
    """The ``config.json`` that the tool behind a format writes; a value of ... removes the field."""
    fields = {**json.loads(json.dumps(_CONFIGS[form])), **changes}
    return {key: value for key, value in fields.items() if value is not ...}


def tensors(form: str, taps: int = 3, dtype: Any = np.float32) -> dict[str, np.ndarray]:
    """The tensors of a head, every weight random; all formats have the same weights."""
    generator = np.random.default_rng(7)
    layer = LAYER[form]
    shapes = {
        "fc.weight": (WIDTH, taps * WIDTH),
        f"{layer}input_layernorm.weight": (WIDTH,),
        f"{layer}hidden_norm.weight": (WIDTH,),
        f"{layer}self_attn.q_proj.weight": (8, 2 * WIDTH),
        f"{layer}self_attn.k_proj.weight": (4, 2 * WIDTH),
        f"{layer}self_attn.v_proj.weight": (4, 2 * WIDTH),
        f"{layer}self_attn.o_proj.weight": (WIDTH, 8),
        f"{layer}post_attention_layernorm.weight": (WIDTH,),
        f"{layer}mlp.gate_proj.weight": (INNER, WIDTH),
        f"{layer}mlp.up_proj.weight": (INNER, WIDTH),
        f"{layer}mlp.down_proj.weight": (WIDTH, INNER),
        "norm.weight": (WIDTH,),
        "lm_head.weight": (DRAFTED, WIDTH),
    }
    weights = {name: generator.standard_normal(shape).astype(dtype) for name, shape in shapes.items()}
    marked = np.zeros(VOCABULARY, bool)
    marked[TOKENS] = True
    maps = {"d2t": TOKENS - np.arange(DRAFTED), "t2d": marked}
    if form == "modelopt":
        del maps["t2d"]
    return {**weights, **maps}


def save(folder: Path, fields: dict[str, Any], arrays: dict[str, np.ndarray]) -> Path:
    """Write a checkpoint folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(fields))
    save_file(arrays, folder / "model.safetensors")
    return folder
