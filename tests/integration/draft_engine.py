"""The draft engine of a bundle, run row by row as the docstring of `draft_graph` describes it."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from wavekit_engines.bundle import open_bundle
from wavekit_engines.ort_engine import OrtEngine
from wavekit_engines.rope import rope_tables


@dataclass
class Scored:
    """Copies of a pass's outputs: see `draft_graph`."""

    fed_back: np.ndarray
    tokens: np.ndarray
    logprobs: np.ndarray


class DraftEngine:
    """One sequence of up to ``capacity`` rows; ``length`` may be set back to forget rows."""

    def __init__(self, bundle: Path, capacity: int = 64) -> None:
        manifest = open_bundle(bundle, check_hashes=False).manifest
        assert manifest.draft is not None
        self.spec, self.top_k = manifest.draft.spec, manifest.draft.top_k
        self.dtype, self.capacity, self.length = manifest.engine.compute_dtype, capacity, 0
        self.engine = OrtEngine(bundle, manifest.draft.graph, 1)
        shape = (1, self.spec.num_kv_heads, capacity, self.spec.head_dim)
        self.cache = np.zeros(shape, self.dtype), np.zeros(shape, self.dtype)
        self.rope = [np.ascontiguousarray(t, self.dtype) for t in rope_tables(self.spec.rope, capacity, False)]

    def run(
        self,
        taps: np.ndarray,
        hidden: np.ndarray,
        tokens: Sequence[int],
        positions: Sequence[int],
        head_rows: Sequence[int],
        seen: np.ndarray | None = None,
    ) -> Scored:
        """One pass: taps [P, m * H], hidden [Q, H]; ``seen`` [S, rows so far + S], by default all before."""
        count, stop = len(tokens), self.length + len(tokens)
        mask = np.zeros((1, 1, count, self.capacity), self.dtype)
        if seen is not None:
            mask[0, 0, :, :stop][~seen] = -np.inf
        binding = self.engine.bind()
        fed_back = np.zeros((1, count, self.spec.hidden_size), self.dtype)
        top = np.zeros((len(head_rows), self.top_k), np.int64), np.zeros((len(head_rows), self.top_k), np.float32)
        inputs = {
            "taps": taps[None].astype(self.dtype),
            "hidden": hidden[None].astype(self.dtype),
            "token_ids": np.array([tokens]),
            "positions": np.array([positions]),
            "last_rows": np.array([stop - 1], np.int32),
            "total_rows": np.array([self.capacity], np.int32),
            "mask": mask,
            "rope_draft_cos": self.rope[0],
            "rope_draft_sin": self.rope[1],
            "head_rows": np.array(head_rows, np.int64),
            "key_draft": self.cache[0],
            "value_draft": self.cache[1],
        }
        outputs = {"fed_back": fed_back, "top_tokens": top[0], "top_logprobs": top[1]}
        outputs |= {"key_draft_out": self.cache[0], "value_draft_out": self.cache[1]}
        for name, array in inputs.items():
            binding.bind_input(name, np.ascontiguousarray(array))
        for name, array in outputs.items():
            binding.bind_output(name, array)
        binding.run()
        self.length = stop
        return Scored(fed_back[0], *top)
