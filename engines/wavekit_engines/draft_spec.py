"""What an EAGLE-3 draft head computes, as data: one description for heads of every origin.

A `DraftSpec` is what `draft_formats` reads from a checkpoint of any supported format, what training makes, what the
draft graph is written from and what a bundle's manifest stores. Boundaries are numbered as in `decoder_spec`; a format
that counts differently is converted where it is read and written, nowhere else.

The head, for one row that pairs the target's states of token t with the embedding of token t + 1 (EAGLE-3,
arXiv 2503.01840, section 3.1)::

    g   = fc(cat(taps of token t, shallow to deep))           taps normed first where fc_norm says so
    h   = g, or the head's own fed-back state of the row before
    x   = cat(embedding_norm(embedding(token t + 1)), hidden_norm(h))
    res = hidden_norm(h) if norm_before_residual else h
    y   = res + o(attention(q(x), k(x), v(x)))                rotary position t; causal
    y   = y + down(act(gate(mlp_norm(y))) * up(mlp_norm(y)))
    fed back: norm(y) if norm_output else y;   scores of token t + 2: head(norm(y)), over the draft vocabulary

``d2t`` int64 [D] gives the target's id of draft id i as ``i + d2t[i]``, ascending.
"""

from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from wavekit_engines.decoder_spec import Activation, RopeSpec

FcNorm = Literal["none", "joint", "each"]
"""RMS norm before ``fc``: none, one over all taps together [m * H], or one for each tap [H]."""

StoredType = Literal["float32", "float16", "bfloat16"]
"""Number formats that checkpoints of heads are stored in."""


@dataclass(frozen=True)
class DraftSpec:
    """The shape and the options of a draft head; H is the hidden size of head and target, m the number of taps."""

    boundaries: tuple[int, ...]
    """Tapped boundaries of the target, ascending, as ``fc`` takes them."""
    target_layers: int | None
    """N of the target; boundaries lie in 0..N. None where a checkpoint does not say it and no target was at hand."""
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    """Of the target."""
    draft_vocab_size: int
    max_positions: int
    norm_eps: float
    rope: RopeSpec
    activation: Activation = "silu"
    norm_before_residual: bool = False
    fc_norm: FcNorm = "none"
    norm_output: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    embedding_scale: float = 1.0
    """The target's token embeddings are multiplied by this, as in the target itself."""

    @property
    def query_size(self) -> int:
        """Features of all query heads together."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Features of all key (or value) heads together."""
        return self.num_kv_heads * self.head_dim

    def weight_shapes(self) -> dict[str, tuple[int, ...]]:
        """Every weight of the head by role, with its shape; matrices are [out, in]. ``d2t`` is not among them."""
        hidden, taps = self.hidden_size, len(self.boundaries)
        shapes: dict[str, tuple[int, ...]] = {
            "fc": (hidden, taps * hidden),
            "embedding_norm": (hidden,),
            "hidden_norm": (hidden,),
            "q": (self.query_size, 2 * hidden),
            "k": (self.kv_size, 2 * hidden),
            "v": (self.kv_size, 2 * hidden),
            "o": (hidden, self.query_size),
            "mlp_norm": (hidden,),
            "gate": (self.intermediate_size, hidden),
            "up": (self.intermediate_size, hidden),
            "down": (hidden, self.intermediate_size),
            "norm": (hidden,),
            "head": (self.draft_vocab_size, hidden),
        }
        if self.fc_norm == "joint":
            shapes["fc_norm"] = (taps * hidden,)
        elif self.fc_norm == "each":
            shapes |= {f"fc_norm.{tap}": (hidden,) for tap in range(taps)}
        biased = ("q", "k", "v") * self.qkv_bias + ("o",) * self.output_bias + ("gate", "up", "down") * self.mlp_bias
        return shapes | {f"{role}_bias": shapes[role][:1] for role in biased}


@dataclass(frozen=True)
class Draft:
    """A draft head: its description, its weights by role (float32 in memory) and its vocabulary.

    ``dtype`` is what the weights were stored in, so that writing them again loses nothing; ``dtypes`` names the roles
    ("embedding" for the table) that were stored in another one. ``embedding`` is the head's own token table [V, H]
    where its checkpoint brings one that is not the target's; None almost always. ``origin`` says in words what made it;
    ``target_digest`` is the target's `Checkpoint.digest`, where its maker recorded it.

    ``rope_parameters`` is what ``spec.rope`` was computed from, in the spelling of transformers 5 (``rope_type``,
    ``rope_theta``, ...; see `rope.scaled_rope`): frequencies cannot be turned back into a configuration, and every
    checkpoint format wants one. ``carried`` are fields of the source's configuration that compute nothing but that
    servers read: token ids of begin, end and padding, the verifier's name, the number of tokens to draft.
    """

    spec: DraftSpec
    weights: dict[str, npt.NDArray[np.float32]]
    d2t: npt.NDArray[np.int64]
    dtype: StoredType = "float32"
    embedding: npt.NDArray[np.float32] | None = None
    origin: str = ""
    target_digest: str | None = None
    rope_parameters: dict[str, Any] = field(default_factory=dict)
    carried: dict[str, Any] = field(default_factory=dict)
    dtypes: dict[str, StoredType] = field(default_factory=dict)
