"""Token readiness: at which depth the model's next token is already decided.

The logit lens reads boundary k with the model's own final norm and head and takes the best token. ``agrees[t, k]`` says
whether that is the token the last boundary gives. The *earliest available depth* (EAD) of a token is the shallowest
boundary that agrees and from which on every deeper one agrees too; an oracle that knew it would compute EAD of N
layers.

Knows agreement matrices only, no models.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from wavekit_calibration.errors import TooFewTokensError


@dataclass(frozen=True)
class Readiness:
    """What the logit lens saw on T tokens of a model with N layers."""

    agreement: NDArray[np.float64]
    """[N + 1]: the share of tokens whose final token each boundary already gives; the last entry is 1."""
    ead: NDArray[np.int64]
    """[T]: the earliest available depth of each token, 0..N."""

    @property
    def num_layers(self) -> int:
        """N."""
        return len(self.agreement) - 1

    @property
    def histogram(self) -> NDArray[np.int64]:
        """[N + 1]: how many tokens have each EAD."""
        return np.bincount(self.ead, minlength=len(self.agreement))

    @property
    def ready(self) -> NDArray[np.float64]:
        """[N + 1]: the share of tokens with EAD at or before each boundary."""
        return self.histogram.cumsum() / len(self.ead)

    @property
    def oracle_saving(self) -> float:
        """The share of layers an oracle would not compute: 1 - mean(EAD) / N."""
        return 1.0 - float(self.ead.mean()) / self.num_layers


def measure_readiness(agrees: NDArray[np.bool_]) -> Readiness:
    """Summarise an agreement matrix [T, N + 1]; its last column is true by definition and is set so.

    Raises:
        TooFewTokensError: T is 0.
    """
    if len(agrees) == 0:
        raise TooFewTokensError("no token was measured for readiness; give more or longer prompts")
    agrees = agrees.copy()
    agrees[:, -1] = True
    return Readiness(agrees.mean(axis=0), earliest_depths(agrees))


def earliest_depths(agrees: NDArray[np.bool_]) -> NDArray[np.int64]:
    """[T, N + 1] -> [T]: the first column of the run of agreements that reaches the last column."""
    disagrees_later = np.logical_not(agrees)[:, ::-1]
    last_disagreement = np.argmax(disagrees_later, axis=1)
    never = ~disagrees_later.any(axis=1)
    return np.where(never, 0, agrees.shape[1] - last_disagreement).astype(np.int64)
