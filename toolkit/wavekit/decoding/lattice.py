"""The lattice: every token position being explored at once, and how far each has come.

A `Node` is one token at one position, below its parent: the text up to it is the path from the root. It runs the stages
in order and occupies one cache row in each stage it has run. The *anchor* is the first node whose successor is not
decided; everything before it is committed. A tick runs, for every stage, the nodes waiting there; when the anchor has
left the last stage, the target's choice after it is known and `commit` moves the anchor to the child that carries that
token, as far as children and choices reach. `collapse` then drops what does not continue the committed text and says
which cache rows stay.

Invariants, which the cache rows and masks rest on:

- a node runs a stage together with its parent or later, and a pass holds parents before children;
- committed rows are numbered as their positions: before the anchor's own row there are exactly ``anchor.position``;
- after a collapse, a stage's rows are the committed ones, the anchor's if it has run there, then its descendants'.

Plain Python: no engine, no logits, no sampling. Who proposes children, and why, is not known here.
"""

from collections.abc import Iterator

LATTICE_ROWS = 64
"""Nodes alive at once, so rows of a cache beyond the committed text, unless more are asked for."""

NOBODY, SPECULATED = -2, -1
"""Origins of nodes: the target's own choice, or a proposal ahead of a tick; from 0 on, the exit of that stage."""


class Node:
    """A token explored at a position; ``rows[s]`` is its cache row in stage s, for the stages it has run.

    ``origin`` says who proposed it first; nothing depends on it.
    """

    __slots__ = ("children", "origin", "parent", "position", "rows", "token")

    def __init__(self, token: int, position: int, parent: "Node | None", origin: int = NOBODY) -> None:
        self.token = token
        self.position = position
        self.parent = parent
        self.origin = origin
        self.children: list[Node] = []
        self.rows: list[int] = []

    @property
    def depth(self) -> int:
        """Stages this node has run."""
        return len(self.rows)

    def child(self, token: int) -> "Node | None":
        """The child that carries ``token``, if it was proposed."""
        return next((child for child in self.children if child.token == token), None)

    def above(self, top: "Node") -> Iterator["Node"]:
        """The nodes from this one's parent up to ``top``, both included; nothing where this node is ``top``."""
        node = self
        while node is not top:
            assert node.parent is not None
            node = node.parent
            yield node


class Lattice:
    """The live nodes above a committed prefix, for a decoder of ``num_stages`` stages."""

    def __init__(self, num_stages: int, token: int, position: int, rows: list[int] | None = None) -> None:
        """Start at one node: the last token of the prompt, with its rows where it has run already."""
        self.num_stages = num_stages
        self.anchor = Node(token, position, None)
        self.anchor.rows = rows or []
        self.nodes = [self.anchor]
        self._root = self.anchor  # the anchor at the last collapse

    def propose(self, parent: Node, token: int, origin: int = SPECULATED) -> Node:
        """A child of ``parent`` that carries ``token``: the existing one, or a new one that waits for stage 0."""
        node = parent.child(token)
        if node is None:
            node = Node(token, parent.position + 1, parent, origin)
            parent.children.append(node)
            self.nodes.append(node)
        return node

    def waiting(self, stage: int) -> list[Node]:
        """Nodes that run ``stage`` next, parents before children."""
        return [node for node in self.nodes if len(node.rows) == stage]

    def visible_rows(self, node: Node, stage: int) -> list[int]:
        """Rows of ``stage``, besides the committed ones, that ``node`` attends to: those of its uncommitted ancestors.

        An ancestor in the same pass must have been given its row before.
        """
        return [above.rows[stage] for above in node.above(self._root)][::-1]

    def commit(self, token: int) -> Node:
        """The target chose ``token`` after the anchor: move the anchor to that child, made now if none proposed it.

        Raises:
            ValueError: the anchor has not run every stage, so nothing can be known after it.
        """
        if self.anchor.depth != self.num_stages:
            raise ValueError(f"the anchor has run {self.anchor.depth} of {self.num_stages} stages")
        self.anchor = self.propose(self.anchor, token, NOBODY)
        return self.anchor

    def collapse(self) -> tuple[int, list[list[int]]]:
        """Keep only the anchor and its descendants, and number cache rows anew.

        Returns:
            How many rows stay in place in every stage, and for each stage the rows that follow them, in order.
        """
        start = self._root.position
        path = [*self.anchor.above(self._root)][::-1]
        alive = {self.anchor}
        for node in self.nodes:
            if node.parent in alive:
                alive.add(node)
        # Creation order has parents first, and the anchor before its descendants.
        self.nodes = [node for node in self.nodes if node in alive]
        self.anchor.parent = None
        self._root = self.anchor
        kept: list[list[int]] = []
        for stage in range(self.num_stages):
            committed = [node.rows[stage] for node in path]
            running = [node for node in self.nodes if len(node.rows) > stage]
            kept.append(committed + [node.rows[stage] for node in running])
            for row, node in enumerate(running, start + len(committed)):
                node.rows[stage] = row
        return start, kept
