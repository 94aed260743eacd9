"""The residual adapters of early exits as a torch module.

B starts at zero, so that an untrained adapter is the logit lens. It is kept in units of the residual stream at its
boundary, whose size differs by orders of magnitude between depths and models, so that one learning rate serves all;
`weight_arrays` gives it as `ExitSpec` has it. Knows no data and no loss.
"""

import math
from collections.abc import Sequence

import torch
from torch import nn
from torch.nn import functional

from wavekit_engines.exit_spec import ExitSpec


class ExitAdapters(nn.Module):
    """The adapters of all exits of a model."""

    def __init__(self, spec: ExitSpec, sizes: Sequence[float], seed: int) -> None:
        """Start adapters for ``spec``; ``sizes`` are the root mean squares of the residual stream at its boundaries."""
        super().__init__()
        self.spec = spec
        generator = torch.Generator().manual_seed(seed)
        shapes = spec.weight_shapes()
        # Dots are not allowed in parameter names.
        self.weights = nn.ParameterDict(
            {name.replace(".", "_"): nn.Parameter(_start(name, shape, generator)) for name, shape in shapes.items()}
        )
        self.register_buffer("sizes", torch.tensor(list(sizes), dtype=torch.float32))
        self.sizes: torch.Tensor

    def forward(self, states: torch.Tensor, exit_: int) -> torch.Tensor:
        """What the ``exit_``-th exit scores instead of its boundary's states: both [n, H]."""
        if not self.spec.rank:
            return states
        norm, reduce, expand = (self._weight(exit_, part) for part in ("norm", "A", "B"))
        normed = functional.rms_norm(states.to(norm.dtype), states.shape[-1:], norm, self.spec.norm_eps)
        inner = functional.silu(functional.linear(normed, reduce))
        adapted: torch.Tensor = states + functional.linear(inner, expand) * self.sizes[exit_]
        return adapted

    def weight_arrays(self) -> dict[str, torch.Tensor]:
        """The weights by role, float32 on the CPU."""
        found = {}
        for index, boundary in enumerate(self.spec.boundaries if self.spec.rank else ()):
            for part, factor in (("norm", 1.0), ("A", 1.0), ("B", float(self.sizes[index]))):
                found[f"{boundary}.{part}"] = self._weight(index, part).detach().float().cpu() * factor
        return found

    def _weight(self, exit_: int, part: str) -> torch.Tensor:
        weight: torch.Tensor = self.weights[f"{self.spec.boundaries[exit_]}_{part}"]
        return weight


def _start(name: str, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    if name.endswith(".A"):  # what is normed has unit size, and so does A times it
        return torch.randn(shape, generator=generator) / math.sqrt(shape[1])
    return torch.ones(shape) if name.endswith(".norm") else torch.zeros(shape)
