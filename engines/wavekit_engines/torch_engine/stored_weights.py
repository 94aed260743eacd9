"""The weights of a bundle as torch tensors on a device, read from the files that its graphs point to.

A graph file says which tensor lies where; its nodes are not looked at. Blocks of 8 or 4 bits become the floating-point
numbers that they stand for, which is what a product with them means when activations are not rounded. Tensors that
several graphs share are held once.
"""

from pathlib import Path

import onnx_ir as ir
import torch

from wavekit_engines.bundle import Bundle, GraphInfo
from wavekit_engines.quantization import QuantizedBlocks, dequantize_rows

_STEP_BYTES = 32 << 20


class StoredWeights:
    """All weights of a bundle that were read so far."""

    def __init__(self, bundle: Bundle, device: torch.device) -> None:
        self.device = device
        self.block_size = bundle.manifest.engine.block_size
        self.dtype: torch.dtype = getattr(torch, bundle.manifest.engine.compute_dtype)
        self._folder = bundle.path
        self._read: dict[tuple[str, int | None], torch.Tensor] = {}

    def of(self, info: GraphInfo) -> "GraphWeights":
        """The weights of one graph."""
        return GraphWeights(self, self._folder / info.file)

    def shared(self, stored: ir.ExternalTensor, scales: ir.ExternalTensor | None) -> torch.Tensor:
        """A tensor in the dtype of activations, integers as they are; blocks, given ``scales``, as rows [N, K]."""
        place = (str(stored.location), stored.offset)
        if place not in self._read:
            self._read[place] = self._plain(stored) if scales is None else self._dequantized(stored, scales)
        return self._read[place]

    def _plain(self, stored: ir.ExternalTensor) -> torch.Tensor:
        array = stored.numpy()
        return torch.tensor(array, dtype=self.dtype if array.dtype.kind == "f" else None, device=self.device)

    def _dequantized(self, stored: ir.ExternalTensor, scales: ir.ExternalTensor) -> torch.Tensor:
        factors = scales.numpy()
        values = stored.numpy().reshape(*factors.shape, -1)
        bits = 8 * values.shape[-1] // self.block_size
        width = factors.shape[1] * self.block_size
        rows = torch.empty((len(values), width), dtype=self.dtype, device=self.device)
        step = max(1, _STEP_BYTES // (4 * width))
        for start in range(0, len(values), step):
            blocks = QuantizedBlocks(values[start : start + step], factors[start : start + step])
            rows[start : start + step] = torch.from_numpy(dequantize_rows(blocks, bits, width))
        return rows


class GraphWeights:
    """The weights that one graph names."""

    def __init__(self, weights: StoredWeights, file: Path) -> None:
        self._weights = weights
        self._tensors = {
            str(value.name): value.const_value
            for value in ir.load(file).graph.initializers.values()
            if isinstance(value.const_value, ir.ExternalTensor)
        }

    def has(self, name: str) -> bool:
        """Whether the graph names such a weight."""
        return name in self._tensors or f"{name}.table" in self._tensors

    def vector(self, name: str) -> torch.Tensor:
        """A norm weight, a bias or a list of ids, [N]."""
        return self._weights.shared(self._tensors[name], None)

    def matrix(self, name: str, width: int) -> torch.Tensor:
        """A layer's matrix [N, width]; floating-point ones are stored transposed."""
        scales = self._tensors.get(f"{name}.scales")
        stored = self._weights.shared(self._tensors[name], scales)
        return stored.T if scales is None else stored[:, :width]

    def table(self, name: str, width: int) -> torch.Tensor:
        """A vocabulary table [V, width]; its rows are also what tokens are embedded with."""
        scales = self._tensors.get(f"{name}.scales")
        stored = self._tensors[name if name in self._tensors else f"{name}.table"]
        return self._weights.shared(stored, scales)[:, :width]
