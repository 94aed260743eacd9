"""Where each weight of a decoder lies in a Hugging Face checkpoint: role to tensor names, for every family.

The roles are those of `weights.DecoderWeights`. A role made of several tensors has them one below the other. Names are
given without the prefix, which depends on how the checkpoint was saved.
"""

from wavekit_engines.decoder_spec import DecoderSpec

EMBEDDING = "embed_tokens.weight"
FINAL_NORM = "norm.weight"
HEAD = "lm_head.weight"

MODEL_PREFIXES = ("model.", "model.language_model.", "language_model.model.", "language_model.", "")
"""Before `EMBEDDING`, `FINAL_NORM` and ``layers``: causal models, Gemma 3 with images (now and before), bare models."""
HEAD_PREFIXES = ("", "language_model.")

IGNORED_PREFIXES = ("vision_tower.", "multi_modal_projector.", "model.vision_tower.", "model.multi_modal_projector.")
"""The image half of a Gemma 3, which no text reaches."""
IGNORED_SUFFIXES = ("rotary_emb.inv_freq",)
"""Written by old versions of transformers; computed anew by everyone."""

_SEPARATE = {
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "output": ("self_attn.o_proj",),
    "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "down": ("mlp.down_proj",),
}
_FUSED = {**_SEPARATE, "qkv": ("self_attn.qkv_proj",), "gate_up": ("mlp.gate_up_proj",)}

_NORMS = {
    "pre": {"attention_norm_in": "input_layernorm", "mlp_norm_in": "post_attention_layernorm"},
    "post": {"attention_norm_out": "post_attention_layernorm", "mlp_norm_out": "post_feedforward_layernorm"},
    "sandwich": {
        "attention_norm_in": "input_layernorm",
        "attention_norm_out": "post_attention_layernorm",
        "mlp_norm_in": "pre_feedforward_layernorm",
        "mlp_norm_out": "post_feedforward_layernorm",
    },
}


def layer_tensors(spec: DecoderSpec, fused: bool) -> dict[str, tuple[str, ...]]:
    """Tensor names of one layer by role, without ``layers.N.``, for exactly the roles that `spec` has."""
    tensors = {}
    biases = {"qkv": spec.qkv_bias, "output": spec.output_bias, "gate_up": spec.mlp_bias, "down": spec.mlp_bias}
    for role, modules in (_FUSED if fused else _SEPARATE).items():
        tensors[role] = tuple(f"{module}.weight" for module in modules)
        if biases[role]:
            tensors[f"{role}_bias"] = tuple(f"{module}.bias" for module in modules)
    for role, module in _NORMS[spec.norm_placement].items():
        tensors[role] = (f"{module}.weight",)
    if spec.qk_norm != "none":
        tensors["q_norm"] = ("self_attn.q_norm.weight",)
        tensors["k_norm"] = ("self_attn.k_norm.weight",)
    return tensors


def layer_shapes(spec: DecoderSpec) -> dict[str, tuple[tuple[int, ...], ...]]:
    """Shapes of the tensors that a role's rows are made of, by role, were none of them fused."""
    hidden, inner, query, kv = spec.hidden_size, spec.intermediate_size, spec.query_size, spec.kv_size
    norm = ((hidden,),)
    per_head = spec.qk_norm == "per_head"
    return {
        "qkv": ((query, hidden), (kv, hidden), (kv, hidden)),
        "qkv_bias": ((query,), (kv,), (kv,)),
        "output": ((hidden, query),),
        "output_bias": norm,
        "gate_up": ((inner, hidden), (inner, hidden)),
        "gate_up_bias": ((inner,), (inner,)),
        "down": ((hidden, inner),),
        "down_bias": norm,
        **dict.fromkeys(("attention_norm_in", "attention_norm_out", "mlp_norm_in", "mlp_norm_out"), norm),
        "q_norm": ((spec.head_dim if per_head else query,),),
        "k_norm": ((spec.head_dim if per_head else kv,),),
    }
