"""Convert a tiny transformers model to a GGUF file as llama.cpp's converter would, for tests of reading one.

Tensor names come from the ``gguf`` package. What the converter does beside renaming is written down here: q and k rows
of the Llama kin are reordered for interleaved rotary embedding, Gemma's norms are stored with one added.
"""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import transformers
from gguf import GGMLQuantizationType

ARCHITECTURES = {"gemma3_text": "gemma3"}
_INTERLEAVED = ("llama", "granite", "smollm3")


def write_gguf(
    model: transformers.PreTrainedModel,
    path: Path,
    kind: GGMLQuantizationType = GGMLQuantizationType.F32,
    **extra: Any,
) -> None:
    """Write `model`, its matrices in blocks of `kind`; `extra` adds metadata (keys without the architecture)."""
    config = model.config
    architecture = ARCHITECTURES.get(config.model_type, config.model_type)
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in {**_metadata(config), **extra}.items():
        _add(writer, f"{architecture}.{key}", value)
    _add_vocabulary(writer, config.vocab_size)
    arch = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        values = _converted(config, name, tensor.numpy())
        module, suffix = name.rsplit(".", 1)
        own_kind = kind if values.ndim > 1 else GGMLQuantizationType.F32
        writer.add_tensor(f"{names.get_name(module)}.{suffix}", gguf.quantize(values, own_kind), raw_dtype=own_kind)
    for name, values in _rope_factors(config).items():
        writer.add_tensor(name, np.array(values, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _converted(config: Any, name: str, values: np.ndarray) -> np.ndarray:
    if config.model_type.startswith("gemma") and name.endswith("norm.weight"):
        return values + 1
    if config.model_type in _INTERLEAVED and ("q_proj" in name or "k_proj" in name):
        heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
        halves = values.reshape(heads, 2, values.shape[0] // heads // 2, *values.shape[1:])
        return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(values.shape)
    return np.ascontiguousarray(values)


def _metadata(config: Any) -> dict[str, Any]:
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    rope = config.rope_parameters.get("full_attention", config.rope_parameters)
    metadata = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "rope.freq_base": float(rope["rope_theta"]),
        "rope.dimension_count": int(head_dim * rope.get("partial_rotary_factor", 1.0)),
        "vocab_size": config.vocab_size,
    }
    if rope["rope_type"] in ("linear", "yarn"):
        metadata |= {"rope.scaling.type": rope["rope_type"], "rope.scaling.factor": float(rope["factor"])}
    if rope["rope_type"] in ("yarn", "longrope"):
        metadata["rope.scaling.original_context_length"] = rope["original_max_position_embeddings"]
    if rope["rope_type"] == "longrope":
        scale = config.max_position_embeddings / rope["original_max_position_embeddings"]
        factor = (1 + np.log(scale) / np.log(rope["original_max_position_embeddings"])) ** 0.5
        metadata |= {"rope.scaling.type": "longrope", "rope.scaling.attn_factor": float(factor)}
    if config.model_type in ("phi3", "gemma2", "gemma3_text") and config.sliding_window:
        metadata["attention.sliding_window"] = config.sliding_window
    if config.model_type == "gemma3_text":
        metadata["attention.sliding_window_pattern"] = [kind == "sliding_attention" for kind in config.layer_types]
    if config.model_type == "gemma2":
        metadata["attn_logit_softcapping"] = config.attn_logit_softcapping
        metadata["final_logit_softcapping"] = config.final_logit_softcapping
    if config.model_type == "granite":
        metadata |= {"attention.scale": config.attention_multiplier, "embedding_scale": config.embedding_multiplier}
        metadata |= {"residual_scale": config.residual_multiplier, "logit_scale": config.logits_scaling}
    return metadata


def _rope_factors(config: Any) -> dict[str, list[float]]:
    rope = config.rope_parameters.get("full_attention", config.rope_parameters)
    if rope["rope_type"] == "longrope":
        return {f"rope_factors_{which}.weight": rope[f"{which}_factor"] for which in ("short", "long")}
    if rope["rope_type"] == "llama3":
        scaled, _ = transformers.modeling_rope_utils.ROPE_INIT_FUNCTIONS["llama3"](config)
        plain = 1 / rope["rope_theta"] ** (torch.arange(0, 2 * len(scaled), 2) / (2 * len(scaled)))
        return {"rope_freqs.weight": (plain / scaled).tolist()}
    return {}


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
    add.get(type(value), writer.add_array)(key, value)


def _add_vocabulary(writer: gguf.GGUFWriter, size: int) -> None:
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list([f"t{number}" for number in range(size)])
    writer.add_token_types([1] * size)
    writer.add_token_merges([])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(0)
