"""Early exits: what their residual adapters compute.

The exit at boundary k reads the residual stream h there and leaves it as it is; on its own path it scores ::

    h' = h + B silu(A norm(h))          RMS norm with a weight of its own; no adapter where rank is 0
    scores = head(final norm(h'))       the target's own final norm and head, its soft cap and scale

over an exit vocabulary: row i of the head is that of target token ``i + d2t[i]``, ids ascending. An adapter whose B is
zero is the logit lens.

Boundaries are numbered as in `decoder_spec`; only those inside the model, 1 to N - 1, have exits. Nothing is read or
written here.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from wavekit_engines.decoder_spec import DecoderSpec
from wavekit_engines.draft_spec import StoredType
from wavekit_engines.errors import MisuseError


@dataclass(frozen=True)
class ExitSpec:
    """The shape of all exits of a model; H is its hidden size."""

    boundaries: tuple[int, ...]
    """Ascending."""
    target_layers: int
    """N of the target; boundaries lie in 1..N - 1."""
    hidden_size: int
    vocab_size: int
    """Of the target."""
    exit_vocab_size: int
    norm_eps: float
    rank: int
    """Of every adapter; 0 for exits without."""

    def weight_shapes(self) -> dict[str, tuple[int, ...]]:
        """Every weight by role, with its shape; matrices are [out, in]. ``d2t`` is not among them."""
        if not self.rank:
            return {}
        parts = {"norm": (self.hidden_size,), "A": (self.rank, self.hidden_size), "B": (self.hidden_size, self.rank)}
        return {f"{boundary}.{part}": shape for boundary in self.boundaries for part, shape in parts.items()}

    def problem(self) -> str | None:
        """What makes no sense about it, None if nothing does."""
        sizes = {"hidden_size": self.hidden_size, "exit_vocab_size": self.exit_vocab_size, "norm_eps": self.norm_eps}
        for name, size in sizes.items():
            if not size > 0:
                return f"{name} is {size}"
        if self.rank < 0:
            return f"rank is {self.rank}"
        if self.exit_vocab_size > self.vocab_size:
            return f"exits score {self.exit_vocab_size} tokens, more than the {self.vocab_size} of their model"
        return boundary_problem(self.boundaries, self.target_layers)


@dataclass(frozen=True)
class Exits:
    """Exits of a model: description, weights by role (float32 in memory) and exit vocabulary.

    ``d2t`` int64 [exit_vocab_size] holds offsets, zeros for the target's whole vocabulary. ``dtype`` is what the
    weights are stored in. ``origin`` says in words what made them; ``target_digest`` is the target's
    `Checkpoint.digest`.
    """

    spec: ExitSpec
    weights: dict[str, npt.NDArray[np.float32]]
    d2t: npt.NDArray[np.int64]
    dtype: StoredType = "float32"
    origin: str = ""
    target_digest: str | None = None

    @property
    def token_ids(self) -> npt.NDArray[np.int64]:
        """int64 [exit_vocab_size]: the target's ids of the exit vocabulary, ascending."""
        ids: npt.NDArray[np.int64] = self.d2t + np.arange(len(self.d2t))
        return ids

    def check_target(self, target: DecoderSpec) -> None:
        """Refuse exits of a model of another shape.

        Raises:
            MisuseError: hidden size, vocabulary or number of layers differ.
        """
        for what, found, expected in (
            ("hidden size", self.spec.hidden_size, target.hidden_size),
            ("vocabulary", self.spec.vocab_size, target.vocab_size),
            ("number of layers", self.spec.target_layers, target.num_layers),
        ):
            if found != expected:
                raise MisuseError(
                    f"the exits are for a model with a {what} of {found}, but this model's is {expected}: take the "
                    "model they were trained for, or make others with `wavekit train exits`"
                )


def boundary_problem(boundaries: tuple[int, ...], layers: int) -> str | None:
    """Why a model of so many layers cannot have exits at these boundaries, None if it can."""
    if not boundaries or list(boundaries) != sorted(set(boundaries)):
        return f"exits at boundaries {list(boundaries)} do not ascend, each once"
    if not 0 < boundaries[0] <= boundaries[-1] < layers:
        return (
            f"exits at boundaries {list(boundaries)} are not all inside a model of {layers} layers, 1 to {layers - 1}"
        )
    return None
