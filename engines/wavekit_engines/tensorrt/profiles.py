"""The shapes that an engine is built for: one range of sizes for prefill, one for every other pass.

A decoding pass takes up to the rows of the largest tree, on any number of rows that are in the cache; `runtime` fills
every one up to that many, so that is what engines are tuned for. TensorRT refuses other shapes when it runs; what it
does not notice is a range that does not fit into the cache, so that is checked here. Nothing here knows the library.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from wavekit_engines.bundle import GraphInfo
from wavekit_engines.errors import MisuseError

Range = tuple[int, int, int]
"""The least, the usual and the most."""

Shapes = dict[str, tuple[list[int], list[int], list[int]]]
"""By input: its least, usual and largest shape."""

_USUAL_PREFILL = 512
_GROWN_ROWS = 512  # of a draft head's cache, for the trees that it grows beyond the text
_ALIGNED_ROWS = 64  # so that keys and values of every layer begin where TensorRT wants tensors to begin


@dataclass(frozen=True)
class Limits:
    """What engines are built for: tokens of a text, rows of a tree and of a piece of a prompt."""

    context: int
    tree: int
    prefill: int = _USUAL_PREFILL

    def capacity(self, graph: GraphInfo) -> int:
        """Rows of a graph's cache: the text, a tree upon it, and a pass filled up upon that."""
        grown = _GROWN_ROWS if _feeds(graph) else 0
        return -(-(self.context + grown + 2 * self.tree) // _ALIGNED_ROWS) * _ALIGNED_ROWS

    def check(self, max_positions: int) -> None:
        """Raises MisuseError for limits that no engine has, or that the model does not reach."""
        if min(self.context, self.tree, self.prefill) < 1:
            raise MisuseError("an engine for no tokens: give --max-context and --max-tree of 1 or more")
        if self.context > max_positions:
            raise MisuseError(
                f"--max-context {self.context}: the model's context is {max_positions} tokens; ask for that or less"
            )


@dataclass(frozen=True)
class Profile:
    """Ranges of the free dimensions of a graph; ``past`` rows may be in the cache before a pass."""

    name: str
    past: int
    dims: Mapping[str, Range]


def profiles(graph: GraphInfo, limits: Limits) -> list[Profile]:
    """The profiles of a stage, a head, a draft head or an exit, told apart by the free dimensions they have."""
    tree = (1, limits.tree, limits.tree)
    chunk = max(min(limits.prefill, limits.context), limits.tree)
    prompt, earlier = (1, chunk, chunk), max(limits.context - chunk, 0)
    if _feeds(graph):  # pairs of states and tokens are fed, then the head goes on from what it said
        pairs = {"S": prompt, "P": prompt, "Q": (0, 0, 0), "n": (1, 1, chunk)}
        grown = limits.context + _GROWN_ROWS
        return [
            Profile("feed", earlier, pairs),
            Profile("draft", grown, {"S": tree, "P": (0, 0, 0), "Q": tree, "n": tree}),
        ]
    if "S" in _free_dims(graph):
        return [
            Profile("prefill", earlier, {"S": prompt}),
            Profile("decode", limits.context + limits.tree, {"S": tree}),
        ]
    return [Profile("rows", 0, {"n": tree})]


def _feeds(graph: GraphInfo) -> bool:
    """Whether it is a draft head, which has rows of two kinds."""
    return "P" in _free_dims(graph)


def _free_dims(graph: GraphInfo) -> set[str]:
    return {dim for tensor in graph.inputs for dim in tensor.shape if isinstance(dim, str)}


def shapes(graph: GraphInfo, made: Sequence[Profile], capacity: int) -> list[Shapes]:
    """What each profile means for the inputs of the rewritten graph that have a free dimension.

    Raises:
        MisuseError: the rows of a pass and those before it are more than the cache has.
        ValueError: a free dimension that a profile has no range for.
    """
    for profile in made:
        new = profile.dims.get("S", (0, 0, 0))[2]
        if profile.past + new > capacity:
            raise MisuseError(
                f"the profile {profile.name} adds {new} rows to {profile.past}, but the cache has {capacity}: "
                "build with a larger --max-context or a smaller --max-tree"
            )
    fixed = {"B": 1, "M": 1, "C": capacity, "T": capacity, "R": capacity}
    return [_shapes_of(graph, profile, fixed) for profile in made]


def _shapes_of(graph: GraphInfo, profile: Profile, fixed: Mapping[str, int]) -> Shapes:
    found: Shapes = {}
    for tensor in graph.inputs:
        free = [dim for dim in tensor.shape if isinstance(dim, str) and dim not in fixed]
        for dim in free:
            if dim not in profile.dims:
                raise ValueError(f"{graph.file}: the profile {profile.name} has no range for {dim} of {tensor.name}")
        if free:
            ranges = [
                profile.dims.get(dim, (fixed.get(dim, 0),) * 3) if isinstance(dim, str) else (dim,) * 3
                for dim in tensor.shape
            ]
            least, usual, most = ([each[index] for each in ranges] for index in range(3))
            found[tensor.name] = least, usual, most
    return found
