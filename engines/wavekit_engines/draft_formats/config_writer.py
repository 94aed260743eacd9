"""``config.json`` of a head in each of the four formats.

What servers read besides the format's own fields is written too: layer ids outside ``eagle_config`` as the boundaries
vLLM takes them for, rotary parameters in both spellings, options where each of them looks.
"""

from typing import Any

from wavekit_engines.draft_formats.head_config import ACTIVATIONS, DEFAULT_PROPOSAL, OWN, TOKEN_IDS
from wavekit_engines.draft_formats.layouts import IDS, Layout
from wavekit_engines.draft_formats.rope_config import write_rope
from wavekit_engines.draft_spec import Draft, DraftSpec


def write_config(draft: Draft, layout: Layout) -> dict[str, Any]:
    """The contents of ``config.json``."""
    spec = draft.spec
    own = {OWN: _own(draft, layout)}
    layer = {**_layer(draft), **_token_ids(draft)}
    if layout.name == "speculators":
        return {
            "architectures": [layout.written_architecture],
            "speculators_model_type": "eagle3",
            "draft_vocab_size": spec.draft_vocab_size,
            "target_hidden_size": None,
            "embed_requires_grad": False,
            **_options(spec),
            IDS: list(spec.boundaries),
            "tie_word_embeddings": False,
            "torch_dtype": draft.dtype,
            "transformer_layer_config": layer,
            "speculators_config": _speculators_config(draft),
            **own,
        }
    common = {
        "architectures": [layout.written_architecture],
        **layer,
        "draft_vocab_size": spec.draft_vocab_size,
        "tie_word_embeddings": False,
        "torch_dtype": draft.dtype,
        "dtype": draft.dtype,
    }
    if layout.name == "eagle":
        return {**common, **own}
    return {**common, **_options(spec), IDS: list(spec.boundaries), "eagle_config": _eagle_config(spec, layout), **own}


def _layer(draft: Draft) -> dict[str, Any]:
    spec = draft.spec
    return {
        "model_type": "llama",
        "hidden_size": spec.hidden_size,
        "intermediate_size": spec.intermediate_size,
        "num_hidden_layers": 1,
        "num_attention_heads": spec.num_heads,
        "num_key_value_heads": spec.num_kv_heads,
        "head_dim": spec.head_dim,
        "vocab_size": spec.vocab_size,
        "max_position_embeddings": spec.max_positions,
        "rms_norm_eps": spec.norm_eps,
        "hidden_act": next(name for name, activation in ACTIVATIONS.items() if activation == spec.activation),
        "attention_bias": spec.qkv_bias,
        "mlp_bias": spec.mlp_bias,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "pretraining_tp": 1,
        "use_cache": True,
        **write_rope(draft.rope_parameters),
    }


def _options(spec: DraftSpec) -> dict[str, Any]:
    return {
        "norm_before_residual": spec.norm_before_residual,
        "norm_before_fc": spec.fc_norm == "joint",
        "fc_norm": spec.fc_norm == "each",
        "norm_output": spec.norm_output,
    }


def _eagle_config(spec: DraftSpec, layout: Layout) -> dict[str, Any]:
    ids = {IDS: [boundary - 1 for boundary in spec.boundaries], "use_aux_hidden_state": True}
    if layout.name == "specforge":
        return {**ids, "norm_before_fc": spec.fc_norm == "joint"}
    return {
        **ids,
        "use_input_layernorm_in_first_layer": True,
        "use_last_layernorm": True,
        "use_mtp_layernorm": False,
        "next_layer_regular": True,
        "norm_before_fc": spec.fc_norm == "joint",
        "return_hidden_post_norm": spec.norm_output,
    }


def _token_ids(draft: Draft) -> dict[str, Any]:
    return {key: draft.carried[key] for key in TOKEN_IDS if key in draft.carried}


def _speculators_config(draft: Draft) -> dict[str, Any]:
    return {
        "algorithm": "eagle3",
        "default_proposal_method": "greedy",
        "proposal_methods": draft.carried.get("proposal_methods", [DEFAULT_PROPOSAL]),
        "verifier": {"name_or_path": None, "architectures": [], **draft.carried.get("verifier", {})},
    }


def _own(draft: Draft, layout: Layout) -> dict[str, Any]:
    spec = draft.spec
    is_told = layout.name == "speculators" or not {"verifier", "proposal_methods"} & {*draft.carried}
    fields = {
        "target_layers": spec.target_layers,
        "target_digest": draft.target_digest,
        "origin": draft.origin or None,
        "embedding_scale": spec.embedding_scale,
        "boundaries": list(spec.boundaries) if layout.ids_are == "absent" else None,
        "speculators_config": None if is_told else _speculators_config(draft),
    }
    return {key: value for key, value in fields.items() if value is not None}
