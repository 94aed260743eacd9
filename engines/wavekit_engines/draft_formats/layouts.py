"""The four formats of EAGLE-3 checkpoints: what tells them apart, and where each says what.

=============  ==============  ==========================================================================
format         layer           target layer ids
=============  ==============  ==========================================================================
eagle          ``midlayer.``   none: the code that reads it taps boundaries 2, N // 2 and N - 3
specforge      ``midlayer.``   ``eagle_config.eagle_aux_hidden_state_layer_ids``, outputs of layers
modelopt       ``layers.0.``   the same
speculators    ``layers.0.``   top-level ``eagle_aux_hidden_state_layer_ids``, boundary numbers
=============  ==============  ==========================================================================

The output of layer k is boundary k + 1. The place decides what an id means; its value never does.

Sources: eagle/model/cnets.py (SafeAILab/EAGLE), specforge/modeling/draft/llama3_eagle.py (sgl-project/SpecForge),
modelopt/torch/export/plugins/hf_spec_export.py (NVIDIA/Model-Optimizer), src/speculators/models/eagle3
(vllm-project/speculators); for what servers read, llama_eagle3.py of vLLM and of SGLang. Nothing here opens a file.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from wavekit_engines.errors import CheckpointError, UnsupportedModelError

DraftFormat = Literal["eagle", "specforge", "modelopt", "speculators"]
IDS = "eagle_aux_hidden_state_layer_ids"

_FLAT = frozenset({"LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM"})


@dataclass(frozen=True)
class Layout:
    """One format."""

    name: DraftFormat
    layer: str
    """What the names of the layer's tensors begin with."""
    architectures: frozenset[str]
    """Those that are read."""
    written_architecture: str
    ids_are: Literal["absent", "layer outputs", "boundaries"]
    writes_t2d: bool = True


LAYOUTS: dict[str, Layout] = {
    layout.name: layout
    for layout in (
        Layout("eagle", "midlayer.", _FLAT | {"LlamaForCausalLM"}, "LlamaForCausalLMEagle3", "absent"),
        Layout("specforge", "midlayer.", _FLAT, "LlamaForCausalLMEagle3", "layer outputs"),
        Layout("modelopt", "layers.0.", _FLAT, "LlamaForCausalLMEagle3", "layer outputs", writes_t2d=False),
        Layout(
            "speculators",
            "layers.0.",
            frozenset({"Eagle3Speculator", "Eagle3DraftModel"}),
            "Eagle3Speculator",
            "boundaries",
        ),
    )
}
FORMATS: tuple[DraftFormat, ...] = tuple(layout.name for layout in LAYOUTS.values())

# Tensors by the role they have in `draft_spec`; those of the layer come after its prefix.
_OUTER = {"fc": "fc.weight", "norm": "norm.weight", "head": "lm_head.weight", "fc_norm": "input_norm.weight"}
_LAYER = {
    "embedding_norm": "input_layernorm.weight",
    "hidden_norm": "hidden_norm.weight",
    "mlp_norm": "post_attention_layernorm.weight",
}
_MATRICES = {**dict.fromkeys("qkvo", "self_attn"), **dict.fromkeys(("gate", "up", "down"), "mlp")}
EMBEDDING, D2T, T2D = "embed_tokens.weight", "d2t", "t2d"


def tensor_name(role: str, layout: Layout) -> str:
    """The name of a weight in a format; `role` is a key of `DraftSpec.weight_shapes`."""
    if role in _OUTER:
        return _OUTER[role]
    if role in _LAYER:
        return layout.layer + _LAYER[role]
    if role.startswith("fc_norm."):
        return f"{role}.weight"
    matrix, _, bias = role.partition("_")
    return f"{layout.layer}{_MATRICES[matrix]}.{matrix}_proj.{bias or 'weight'}"


def detect(config: Mapping[str, Any], names: Collection[str]) -> Layout:
    """The format of a checkpoint, from the form of its configuration and the names of its tensors.

    Raises:
        UnsupportedModelError: no head that is read has this form.
    """
    refuse_unsupported(config, names)
    if "speculators_config" in config or "speculators_model_type" in config or "transformer_layer_config" in config:
        return LAYOUTS["speculators"]
    has_midlayer = any(name.startswith("midlayer.") for name in names)
    if not has_midlayer and not any(name.startswith("layers.0.") for name in names):
        raise UnsupportedModelError(
            "this is no EAGLE-3 head under the names that are read: no tensor begins with midlayer. or layers.0."
        )
    if isinstance(config.get("eagle_config"), Mapping):
        return LAYOUTS["specforge" if has_midlayer else "modelopt"]
    if config.get(IDS) is not None:
        return LAYOUTS["specforge" if has_midlayer else "modelopt"]
    return LAYOUTS["eagle" if has_midlayer else "modelopt"]


def refuse_unsupported(config: Mapping[str, Any], names: Collection[str]) -> None:
    """Name what kind of draft this is where it is none that is read.

    Raises:
        UnsupportedModelError: EAGLE-1 and 2, several layers, mixtures of experts, latent attention, and others.
    """
    inner = config.get("transformer_layer_config")
    inner = inner if isinstance(inner, Mapping) else config
    kind = config.get("speculators_model_type", "eagle3")
    architectures = config.get("architectures") or []
    described = " ".join(map(str, architectures)) if isinstance(architectures, list) else str(architectures)
    layers = inner.get("num_hidden_layers", 1)
    text = " ".join(names)
    reasons = {
        f"is of the kind {kind}": kind != "eagle3",
        "drafts in parallel (P-EAGLE or Medusa heads)": "Peagle" in described or "parallel_draft_heads" in text,
        "has multi-head latent attention (MLA)": "Deepseek" in described
        or "kv_a_proj" in text
        or "kv_lora_rank" in inner,
        "is a mixture of experts (MoE)": "Moe" in described or ".experts." in text,
        f"has {layers} layers": layers != 1 or "layers.1." in text,
        "normalises its queries and keys (q_norm, k_norm)": "self_attn.q_norm" in text,
        "is of EAGLE-1 or EAGLE-2": "fc.weight" in names
        and not any(key in text for key in ("hidden_norm", "lm_head", D2T)),
    }
    for reason, is_so in reasons.items():
        if is_so:
            raise UnsupportedModelError(
                f"the head {reason}; only EAGLE-3 heads of one Llama layer are read: take another, or make one with "
                "`wavekit train draft`"
            )


def check_architecture(config: Mapping[str, Any], layout: Layout) -> None:
    """Refuse an architecture that the format does not have.

    Raises:
        UnsupportedModelError: naming it.
    """
    found = config.get("architectures")
    if found is None and layout.name != "speculators":
        return
    if not isinstance(found, list) or len(found) != 1 or found[0] not in layout.architectures:
        known = ", ".join(sorted(layout.architectures))
        raise UnsupportedModelError(
            f"architectures is {found!r}, but heads of the {layout.name} format are {known}: name the format (--from)"
        )


def check_layer_names(names: Collection[str], layout: Layout) -> None:
    """Refuse a checkpoint read as a format whose layer has another name.

    Raises:
        CheckpointError: saying which formats name the layer so.
    """
    if any(name.startswith(layout.layer) for name in names):
        return
    found = {prefix for prefix in ("midlayer.", "layers.0.") if any(name.startswith(prefix) for name in names)}
    formats = [other.name for other in LAYOUTS.values() if other.layer in found]
    raise CheckpointError(
        f"no tensor begins with {layout.layer}, as in the {layout.name} format"
        + (f": it looks like {' or '.join(formats)} (--from)" if formats else ": save the head in that format again")
    )
