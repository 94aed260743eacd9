"""Configurations in the wording of published models: none is refused for a key that changes nothing."""

import pytest

from wavekit_engines.families import decoder_spec, full_rope
from wavekit_engines.rope import scaled_rope

SHAPE = {
    "vocab_size": 1000,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "initializer_range": 0.02,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.44.0",
    "use_cache": True,
    "bos_token_id": 1,
    "eos_token_id": [2, 7],
    "attention_dropout": 0.0,
}

PUBLISHED = {
    "SmolLM2-135M-Instruct": {
        **{"model_type": "llama", "architectures": ["LlamaForCausalLM"], "attention_bias": False, "mlp_bias": False},
        **{"hidden_act": "silu", "is_llama_config": True, "max_position_embeddings": 8192, "pad_token_id": 2},
        **{"pretraining_tp": 1, "rope_interleaved": False, "rope_scaling": None, "rope_theta": 100000},
        **{"tie_word_embeddings": True, "transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16"}}},
    },
    "Llama-3.2-1B": {
        **{"model_type": "llama", "head_dim": 64, "hidden_act": "silu", "max_position_embeddings": 131072},
        **{"mlp_bias": False, "attention_bias": False, "pretraining_tp": 1, "rope_theta": 500000.0},
        **{"tie_word_embeddings": True},
        "rope_scaling": {
            **{"factor": 32.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0},
            **{"original_max_position_embeddings": 8192, "rope_type": "llama3"},
        },
    },
    "Mistral-7B-v0.3": {
        **{"model_type": "mistral", "head_dim": 32, "hidden_act": "silu", "max_position_embeddings": 32768},
        **{"rope_theta": 1000000.0, "sliding_window": None, "tie_word_embeddings": False},
    },
    "Qwen2.5-0.5B-Instruct": {
        **{"model_type": "qwen2", "hidden_act": "silu", "max_position_embeddings": 32768, "max_window_layers": 21},
        **{"rope_theta": 1000000.0, "sliding_window": 32768, "tie_word_embeddings": True},
        **{"use_sliding_window": False, "use_mrope": False},
    },
    "Qwen3-0.6B": {
        **{"model_type": "qwen3", "attention_bias": False, "head_dim": 128, "hidden_act": "silu"},
        **{"max_position_embeddings": 40960, "max_window_layers": 28, "rope_scaling": None, "rope_theta": 1000000},
        **{"sliding_window": None, "tie_word_embeddings": True, "use_sliding_window": False},
    },
    "SmolLM3-3B": {
        **{"model_type": "smollm3", "attention_bias": False, "hidden_act": "silu", "max_position_embeddings": 65536},
        **{"max_window_layers": 28, "mlp_bias": False, "no_rope_layer_interval": 4, "no_rope_layers": [1, 1, 1, 0]},
        **{"layer_types": ["full_attention"] * 4, "pretraining_tp": 2, "rope_scaling": None, "rope_theta": 5000000.0},
        **{"sliding_window": None, "use_sliding_window": False, "pad_token_id": 128004},
    },
    "Phi-3-mini-4k-instruct": {
        **{"model_type": "phi3", "attention_bias": False, "auto_map": {"AutoConfig": "configuration_phi3.Phi3Config"}},
        **{"embd_pdrop": 0.0, "resid_pdrop": 0.0, "hidden_act": "silu", "max_position_embeddings": 4096},
        **{"original_max_position_embeddings": 4096, "rope_scaling": None, "rope_theta": 10000.0},
        **{"sliding_window": 2047, "tie_word_embeddings": False, "pad_token_id": 32000},
    },
    "Phi-4-mini-instruct": {
        **{"model_type": "phi3", "attention_bias": False, "embd_pdrop": 0.0, "resid_pdrop": 0.0, "hidden_act": "silu"},
        **{"full_attn_mod": 1, "interpolate_factor": 1, "lm_head_bias": False, "mlp_bias": False},
        **{"max_position_embeddings": 131072, "original_max_position_embeddings": 4096, "partial_rotary_factor": 0.75},
        **{"rope_theta": 10000.0, "sliding_window": 262144, "tie_word_embeddings": True},
        "rope_scaling": {"type": "longrope", "long_factor": [2.0] * 12, "short_factor": [1.0] * 12},
    },
    "granite-3.3-2b-instruct": {
        **{"model_type": "granite", "attention_bias": False, "attention_multiplier": 0.015625, "hidden_act": "silu"},
        **{"embedding_multiplier": 12.0, "logits_scaling": 8.0, "residual_multiplier": 0.22, "mlp_bias": False},
        **{"max_position_embeddings": 131072, "rope_scaling": None, "rope_theta": 10000000.0},
        **{"tie_word_embeddings": True, "pad_token_id": 0},
    },
    "OLMo-2-0425-1B": {
        **{"model_type": "olmo2", "attention_bias": False, "hidden_act": "silu", "max_position_embeddings": 4096},
        **{"rope_scaling": None, "rope_theta": 500000, "tie_word_embeddings": False, "pad_token_id": 100277},
    },
    "gemma-2-2b-it": {
        **{"model_type": "gemma2", "attention_bias": False, "attn_logit_softcapping": 50.0, "head_dim": 256},
        **{"cache_implementation": "hybrid", "final_logit_softcapping": 30.0, "hidden_act": "gelu_pytorch_tanh"},
        **{"hidden_activation": "gelu_pytorch_tanh", "max_position_embeddings": 8192, "query_pre_attn_scalar": 256},
        **{"rope_theta": 10000.0, "sliding_window": 4096, "pad_token_id": 0},
    },
    "gemma-2-9b-it": {
        **{"model_type": "gemma2", "attention_bias": False, "attn_logit_softcapping": 50.0, "head_dim": 256},
        **{"cache_implementation": "hybrid", "final_logit_softcapping": 30.0, "hidden_act": "gelu_pytorch_tanh"},
        **{"hidden_activation": "gelu_pytorch_tanh", "max_position_embeddings": 8192, "query_pre_attn_scalar": 256},
        **{"rope_theta": 10000.0, "sliding_window": 4096, "sliding_window_size": 4096, "pad_token_id": 0},
    },
    "gemma-3-1b-it": {
        **{"model_type": "gemma3_text", "attention_bias": False, "attn_logit_softcapping": None, "head_dim": 256},
        **{"cache_implementation": "hybrid", "final_logit_softcapping": None, "query_pre_attn_scalar": 256},
        **{"hidden_activation": "gelu_pytorch_tanh", "max_position_embeddings": 32768, "pad_token_id": 0},
        **{"rope_local_base_freq": 10000, "rope_scaling": None, "rope_theta": 1000000},
        **{"sliding_window": 512, "sliding_window_pattern": 6},
    },
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_nothing_in_it_is_refused(name):
    spec = decoder_spec({**SHAPE, **PUBLISHED[name]})
    assert spec.num_layers == 4
    assert spec.max_positions == PUBLISHED[name]["max_position_embeddings"]


GEMMA_3_4B = {
    **{"model_type": "gemma3", "architectures": ["Gemma3ForConditionalGeneration"], "torch_dtype": "bfloat16"},
    **{"boi_token_index": 255999, "eoi_token_index": 256000, "eos_token_id": [1, 106]},
    **{"image_token_index": 262144, "initializer_range": 0.02, "mm_tokens_per_image": 256},
    "text_config": {
        **{"hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text"},
        **{"num_hidden_layers": 34, "rope_scaling": {"factor": 8.0, "rope_type": "linear"}},
        "sliding_window": 1024,
    },
    "transformers_version": "4.50.0.dev0",
    "vision_config": {"hidden_size": 1152, "model_type": "siglip_vision_model"},
}


def test_gemma_3_4b_leaves_most_of_its_shape_to_the_defaults():
    spec = decoder_spec(GEMMA_3_4B)
    assert (spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.vocab_size) == (8, 4, 256, 262208)
    assert spec.tied_head
    assert spec.max_positions == 131072
    assert [layer.window for layer in spec.layers[:6]] == [1024] * 5 + [None]
    assert spec.ropes["full_attention"].inv_freq[0] == 1 / 8
    assert spec.ropes["sliding_attention"].inv_freq[0] == 1


def test_the_rope_of_gemma_3_4b_in_words_gives_its_frequencies():
    spec, rope = decoder_spec(GEMMA_3_4B), full_rope(GEMMA_3_4B)
    assert (rope["rope_type"], rope["factor"], rope["rope_theta"]) == ("linear", 8.0, 1_000_000)
    assert scaled_rope(rope, spec.head_dim, spec.max_positions) == spec.ropes["full_attention"]


def test_windows_of_the_published_phi_models():
    assert [layer.window for layer in decoder_spec({**SHAPE, **PUBLISHED["Phi-3-mini-4k-instruct"]}).layers] == [
        2047
    ] * 4
    assert [layer.window for layer in decoder_spec({**SHAPE, **PUBLISHED["Phi-4-mini-instruct"]}).layers] == [None] * 4
