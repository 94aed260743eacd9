"""What a decoder computes, as data: one description for the Llama family and its relatives.

A `DecoderSpec` is everything a graph writer has to know apart from the weights themselves. It is read from a
checkpoint's configuration by `families`, stored in a bundle's manifest, and lowered to graphs by `graphs`. It knows no
file, no tensor name and no runtime.

Boundaries number the residual stream: boundary 0 is the embedding's output (after any embedding scale), boundary k the
output of decoder layer k - 1, boundary N the output of the last layer before the final norm.
"""

from dataclasses import dataclass
from typing import Literal

Activation = Literal["silu", "gelu_tanh", "gelu"]
NormPlacement = Literal["pre", "post", "sandwich"]
QKNorm = Literal["none", "per_head", "full"]


@dataclass(frozen=True)
class RopeSpec:
    """Rotary embedding of one kind of layer, already scaled.

    The tables are ``cos(p * inv_freq) * factor`` and the same with sine, for positions p, in float32. ``rotary_dim`` is
    ``2 * len(inv_freq)``: that many leading features of every head are rotated, in the half-split (not interleaved)
    layout.

    ``long_inv_freq`` and ``long_factor`` replace both once a sequence holds more than ``switch_length`` tokens
    (longrope, Phi-3); all three are None for every other scaling. The whole sequence then uses the long table, its
    cached keys too.
    """

    inv_freq: tuple[float, ...]
    factor: float = 1.0
    long_inv_freq: tuple[float, ...] | None = None
    long_factor: float | None = None
    switch_length: int | None = None

    @property
    def rotary_dim(self) -> int:
        """Leading features of each head that are rotated."""
        return 2 * len(self.inv_freq)


@dataclass(frozen=True)
class LayerSpec:
    """What may differ from layer to layer."""

    rope: str | None
    """Key into `DecoderSpec.ropes`; None for a layer without rotary embedding."""
    window: int | None
    """A token attends to itself and the ``window - 1`` positions before it; None: to everything before it."""


@dataclass(frozen=True)
class DecoderSpec:
    """A decoder-only transformer with gated MLPs and RMS norms.

    One layer, with x the residual stream and norms applied where ``norm_placement`` puts them:

    - ``pre``: x += s * attn(norm(x)); x += s * mlp(norm(x))
    - ``post`` (OLMo 2): x += s * norm(attn(x)); x += s * norm(mlp(x))
    - ``sandwich`` (Gemma): x += s * norm(attn(norm(x))); x += s * norm(mlp(norm(x)))

    where s is ``residual_scale``. RMS norms multiply by ``norm_offset + weight``.
    """

    family: str
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_positions: int
    norm_eps: float
    layers: tuple[LayerSpec, ...]
    ropes: dict[str, RopeSpec]
    attention_scale: float
    """Multiplies q . k; 1 / sqrt(head_dim) unless the family says otherwise."""
    activation: Activation = "silu"
    norm_placement: NormPlacement = "pre"
    norm_offset: float = 0.0
    qk_norm: QKNorm = "none"
    """``per_head``: over head_dim (Qwen 3, Gemma 3); ``full``: over all heads at once (OLMo 2). Before rotary."""
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    tied_head: bool = False
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logit_scale: float = 1.0
    """The logits are multiplied by this, before any soft cap."""
    attention_softcap: float | None = None
    logit_softcap: float | None = None

    @property
    def num_layers(self) -> int:
        """N: the number of decoder layers, and the number of the last boundary."""
        return len(self.layers)

    @property
    def query_size(self) -> int:
        """Features of all query heads together."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Features of all key (or value) heads together."""
        return self.num_kv_heads * self.head_dim
