"""Early exits with random weights for small models, a torch module of their own, and their graphs run from a bundle."""

from pathlib import Path

import numpy as np
import torch
import transformers

from wavekit_engines.bundle import open_bundle
from wavekit_engines.checkpoint import Checkpoint
from wavekit_engines.exit_spec import Exits, ExitSpec
from wavekit_engines.families import decoder_spec
from wavekit_engines.ort_engine import OrtEngine
from wavekit_engines.quantization import Precision, bits_of, dequantize_rows, quantize_rows


def random_exits(
    checkpoint: Checkpoint,
    boundaries: tuple[int, ...] = (1, 2, 3),
    rank: int = 8,
    vocab: int | None = 100,
    seed: int = 0,
) -> Exits:
    """Exits whose every weight is random and whose adapters matter; ``vocab`` None for the whole vocabulary."""
    target, generator = decoder_spec(checkpoint.config), np.random.default_rng(seed)
    size = target.vocab_size if vocab is None else vocab
    spec = ExitSpec(boundaries, target.num_layers, target.hidden_size, target.vocab_size, size, 1e-3, rank)
    weights = {role: _noise(generator, role, shape) for role, shape in spec.weight_shapes().items()}
    ids = np.sort(generator.choice(target.vocab_size, size, replace=False)).astype(np.int64)
    return Exits(spec, weights, ids - np.arange(size), origin=f"random weights, seed {seed}")


def _noise(generator: np.random.Generator, role: str, shape: tuple[int, ...]) -> np.ndarray:
    noise = generator.standard_normal(shape).astype(np.float32)
    return noise / np.float32(shape[1] ** 0.5) if len(shape) == 2 else 1 + noise / 4


class TorchExit(torch.nn.Module):
    """The exit at one boundary as `exit_spec` has it, with the norm, the head and the scalings of transformers' model.

    With a precision, its matrices are what a bundle stores of them.
    """

    def __init__(
        self,
        model: transformers.PreTrainedModel,
        exits: Exits,
        boundary: int,
        precision: Precision = "fp32",
        block_size: int = 32,
    ) -> None:
        super().__init__()
        self.norm, self.eps, self.config = model.model.norm, exits.spec.norm_eps, model.config
        self.ids = torch.from_numpy(exits.token_ids)
        rows = model.get_output_embeddings().weight.detach()[self.ids].numpy()
        self.rows = as_stored(rows, precision, block_size)
        names = ("norm", "A", "B") if exits.spec.rank else ()
        self.weights = [as_stored(exits.weights[f"{boundary}.{name}"], precision, block_size) for name in names]

    @torch.no_grad()
    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Log-probabilities [n, exit vocabulary] of states [n, H]."""
        if self.weights:
            norm, reduce, expand = self.weights
            normed = norm * hidden * torch.rsqrt(hidden.square().mean(-1, keepdim=True) + self.eps)
            inner = normed @ reduce.T
            hidden = hidden + (inner * torch.sigmoid(inner)) @ expand.T
        scores = self.norm(hidden) @ self.rows.T
        if self.config.model_type == "granite":
            scores = scores / self.config.logits_scaling
        cap = getattr(self.config, "final_logit_softcapping", None)
        if cap is not None:
            scores = cap * torch.tanh(scores / cap)
        return torch.log_softmax(scores, -1)


def as_stored(weight: np.ndarray, precision: Precision, block_size: int) -> torch.Tensor:
    """What a bundle stores of a matrix; vectors stay as they are."""
    bits = bits_of(precision)
    if bits is None or weight.ndim == 1:
        return torch.from_numpy(weight)
    return torch.from_numpy(dequantize_rows(quantize_rows(weight, bits, block_size), bits, weight.shape[1]))


def run_exit(bundle: Path, boundary: int, hidden: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The best tokens [n, k] and their log-probabilities that a bundle's exit gives for states [n, H]."""
    manifest = open_bundle(bundle, check_hashes=False).manifest
    assert manifest.exits is not None
    info = manifest.exits.graphs[manifest.exits.spec.boundaries.index(boundary)]
    rows = hidden.astype(manifest.engine.compute_dtype)
    tokens, logprobs = OrtEngine(bundle, info, 1).session.run(None, {"hidden": rows})
    return tokens, logprobs
