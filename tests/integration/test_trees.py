"""Branches decoded together get the logits each gets alone, before and after the cache is compacted.

Tolerance: 1e-4 of the largest logit in float32. One pass over several rows sums in another order than one row alone;
nothing else may differ.
"""

import numpy as np
import pytest
from engines import exported, opened
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import VOCABULARY, save_tiny

from wavekit.decoding.decoder import Decoder
from wavekit.decoding.lattice import Lattice, Node
from wavekit.decoding.sequence_workers import SequenceWorkers

MODELS = ("llama-tied", "gemma3-tied", "qwen3-window", "smollm3-tied")  # windows of 8, layers without rotary
CASES = [(name, split, "onnxruntime") for name in MODELS for split in ((), (1, 3))] + [("gemma3-tied", (1, 3), "torch")]


@pytest.fixture(scope="module", params=CASES, ids=str)
def decoder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    name, split, engine = request.param
    folder = tmp_path_factory.mktemp(name)
    save_tiny(name, folder / "checkpoint", seed=3)
    return opened(exported(folder / "checkpoint", folder / "bundle", split=split), engine=engine)


def run_tree(workers: SequenceWorkers, lattice: Lattice, committed: int) -> dict[Node, np.ndarray]:
    """One pass of every waiting node through all stages; their logits."""
    nodes = lattice.waiting(0)
    x = np.array([node.token for node in nodes])
    for stage, worker in enumerate(workers.stages):
        for row, node in enumerate(nodes, worker.length):
            node.rows.append(row)
        visible = [lattice.visible_rows(node, stage) for node in nodes]
        worker.load(x, np.array([node.position for node in nodes]), visible, committed)
        worker.run()
        x = worker.output(worker.stage.last)
    return dict(zip(nodes, workers.head.run(x).copy(), strict=True))


def path_tokens(node: Node) -> list[int]:
    return [*path_tokens(node.parent), node.token] if node.parent is not None else [node.token]


def assert_as_alone(decoder: Decoder, before: list[int], logits: dict[Node, np.ndarray]) -> None:
    for node, found in logits.items():
        alone = decoder.logits(before + path_tokens(node))[-1]
        np.testing.assert_allclose(found, alone, atol=1e-4 * np.abs(alone).max())


tree = st.lists(st.tuples(st.integers(0, 100), st.integers(3, VOCABULARY - 1)), min_size=1, max_size=12)


@settings(max_examples=12)
@given(
    prompt=st.lists(st.integers(3, VOCABULARY - 1), min_size=2, max_size=20), first=tree, second=tree, data=st.data()
)
def test_every_branch_gets_the_logits_it_gets_alone(decoder, prompt, first, second, data) -> None:
    with decoder.workers.lent(64) as workers:
        workers.reset(False)
        for _ in workers.prefill(prompt[:-1]):
            pass
        lattice, before = Lattice(len(workers.stages), prompt[-1], len(prompt) - 1), prompt[:-1]
        for proposals in (first, second):
            for parent, token in proposals:
                live = lattice.nodes
                lattice.propose(live[parent % len(live)], token)
            logits = run_tree(workers, lattice, len(before))
            assert_as_alone(decoder, before, logits)
            winner = data.draw(st.sampled_from(lattice.nodes))
            accepted = path_tokens(winner)
            for token in accepted[1:]:
                lattice.commit(token)
            new = {*range(3, VOCABULARY)} - {child.token for child in winner.children}
            lattice.commit(min(new))
            before = before + accepted
            start, kept = lattice.collapse()
            for worker, rows in zip(workers.stages, kept, strict=True):
                worker.keep(start, rows)
