"""The target's choice: log probabilities beside it, stop tokens that must wait, shapes that mask it."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from wavekit.choice import Additions, TargetChoice, token_logprobs
from wavekit.decoding.sampling import Sampler, SamplingParams

VOCABULARY = 8


class Alternating:
    """Odd tokens at odd places, even ones at even places, and complete after ``length``."""

    def __init__(self, length: int) -> None:
        self.taken: list[int] = []
        self._length = length

    def forbid(self, logits: np.ndarray) -> None:
        logits[(np.arange(len(logits)) + len(self.taken)) % 2 == 1] = -np.inf

    def advance(self, token: int) -> bool:
        self.taken.append(token)
        return len(self.taken) == self._length


@given(
    st.lists(st.integers(-8, 8), min_size=1, max_size=12),
    st.integers(0, 14),
    st.floats(-300, 300),
    st.data(),
)
def test_log_probabilities_are_a_softmax_and_the_best_come_first(
    values: list[int], count: int, offset: float, data: st.DataObject
) -> None:
    token = data.draw(st.integers(0, len(values) - 1))
    logits = np.array(values, np.float32)
    expected = np.log(np.exp(logits.astype(float)) / np.exp(logits.astype(float)).sum())
    entry = token_logprobs(logits + np.float32(offset), token, count)
    assert entry.logprob == pytest.approx(expected[token], abs=1e-4)
    order = sorted(range(len(values)), key=lambda index: (-logits[index], index))[:count]
    if offset == 0:
        assert [index for index, _ in entry.best] == order
    assert [logprob for _, logprob in entry.best] == pytest.approx(sorted(expected)[::-1][:count], abs=1e-4)


@pytest.mark.parametrize("params", [SamplingParams(), SamplingParams(temperature=1.0, seed=3)])
def test_stop_tokens_wait_and_a_shape_masks_without_touching_the_logits(params: SamplingParams) -> None:
    logits = np.linspace(0, 3, VOCABULARY, dtype=np.float32)
    before = logits.copy()
    choice = TargetChoice(Sampler(params, VOCABULARY), [1, 2], ends=frozenset({7, 6}), min_tokens=5)
    chosen = [choice(logits, position) for position in range(2, 40)]
    assert not {6, 7}.intersection(chosen[:5])
    assert {6, 7}.intersection(chosen[5:])
    shape = Alternating(4)
    choice = TargetChoice(Sampler(params, VOCABULARY), [1, 2], constraint=shape, logprobs=1)
    chosen = [choice(logits, position) for position in range(2, 8)]
    assert [token % 2 for token in chosen[:4]] == [0, 1, 0, 1]
    assert (choice.complete_at, shape.taken) == (4, chosen[:4])
    assert [entry.token_id for entry in choice.record] == chosen
    assert all(entry.best[0][0] == VOCABULARY - 1 for entry in choice.record)  # the model's own, not the masked
    assert (logits == before).all()


@given(
    st.lists(st.lists(st.integers(-12, 12), min_size=VOCABULARY, max_size=VOCABULARY), min_size=1, max_size=12),
    st.sampled_from([-2.0, -0.5, 0.0, 0.5, 1.25]),
    st.sampled_from([-1.0, 0.0, 0.75, 2.0]),
    st.dictionaries(st.integers(0, VOCABULARY - 1), st.sampled_from([-100.0, -0.25, 3.0, 100.0])),
)
def test_what_was_written_is_penalised_as_the_api_defines_it(
    rows: list[list[int]], frequency: float, presence: float, bias: dict[int, float]
) -> None:
    additions = Additions(VOCABULARY, bias, frequency, presence)
    choice = TargetChoice(Sampler(SamplingParams(), VOCABULARY), [1, 2, 2], additions=additions)
    written: list[int] = []
    for position, row in enumerate(rows, 3):
        expected = [
            logit + bias.get(token, 0) - written.count(token) * frequency - (token in written) * presence
            for token, logit in enumerate(row)
        ]
        written.append(choice(np.array(row, np.float32), position))
        assert written[-1] == expected.index(max(expected))
