"""Sampling against transformers' logits processors, brute force, and the laws of chance."""

import inspect
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from numpy.typing import NDArray

from wavekit.decoding.sampling import Sampler, SamplingParams, SeenTokens, uniform
from wavekit_engines.errors import MisuseError, WavekitError

Array = NDArray[Any]


def probabilities(logits: Array, context: list[int] | SeenTokens = (), **params: Any) -> Array:  # type: ignore[assignment]
    """The law tokens are drawn from, float64 [V]."""
    ids, weights = Sampler(SamplingParams(**params), len(logits)).candidates(logits, context)
    law = np.zeros(len(logits))
    law[slice(None) if ids is None else ids] = weights.astype(np.float64)
    return law / law.sum()


def reference(logits: Array, context: list[int], **params: Any) -> Array:
    """What transformers draws from: its own processors, in the order in which it makes them."""
    torch = pytest.importorskip("torch")
    from transformers import GenerationConfig, GenerationMixin, PreTrainedConfig

    model = GenerationMixin()
    model.config = PreTrainedConfig()
    config = GenerationConfig(do_sample=True, **{"top_k": 0, **params})
    config._eos_token_tensor = None
    processors = model._get_logits_processor(config, input_ids_seq_length=len(context))
    scores = processors(torch.tensor([context], dtype=torch.long), torch.from_numpy(logits.copy())[None])
    return torch.softmax(scores.double(), -1)[0].numpy()


def exact_nucleus_margin(law: Array, top_p: float) -> float:
    """How far the running sum of a law stays from ``top_p``: nearer than rounding, the outcome is anyone's."""
    return float(np.abs(np.cumsum(np.sort(law)[::-1]) - top_p).min())


PARAMS = st.fixed_dictionaries(
    {"temperature": st.sampled_from([0.3, 0.8, 1.0, 2.5])},
    optional={
        "top_k": st.integers(1, 12),
        "top_p": st.sampled_from([0.0503, 0.3511, 0.7013, 0.9507, 0.9991]),
        "min_p": st.sampled_from([0.0101, 0.1003, 0.5017, 1.0]),
        "repetition_penalty": st.sampled_from([0.7, 1.3, 5.0]),
    },
)
# Multiples of a quarter, so that many logits are equal; zeros and both signs for the penalty.
LOGITS = st.lists(st.integers(-30, 30), min_size=1, max_size=40).map(lambda x: np.array(x, np.float32) / 4)


@given(logits=LOGITS, params=PARAMS, data=st.data())
def test_the_filtered_law_equals_transformers(logits: Array, params: dict[str, Any], data: st.DataObject) -> None:
    context = data.draw(st.lists(st.integers(0, len(logits) - 1), min_size=1, max_size=10))
    if "top_p" in params:
        before = probabilities(logits, context, **{**params, "top_p": 1.0, "min_p": 0.0})
        assume(exact_nucleus_margin(before, params["top_p"]) > 1e-5)
    ours, expected = probabilities(logits, context, **params), reference(logits, context, **params)
    # Of equally likely tokens at the edge of the nucleus transformers keeps any, wavekit the lowest ids.
    np.testing.assert_allclose(np.sort(ours), np.sort(expected), rtol=1e-5, atol=1e-9)
    if "top_p" not in params:
        np.testing.assert_array_equal(ours > 0, expected > 1e-45)  # below that float32 has nothing
    strictly_inside = ours > ours[ours > 0].min() * 1.0001
    np.testing.assert_allclose(ours[strictly_inside], expected[strictly_inside], rtol=1e-5)


@pytest.mark.parametrize("vocabulary", [1000, 49152])
@pytest.mark.parametrize("spread", [0.01, 1.0, 5.0])
@pytest.mark.parametrize(
    "params",
    [
        {"top_p": 0.9},
        {"top_p": 0.5, "temperature": 0.6},
        {"top_k": 50, "top_p": 0.95},
        {"min_p": 0.05, "top_p": 0.99, "repetition_penalty": 1.2},
        {"min_p": 0.02},
        {"top_k": 1},
        {},
    ],
)
def test_the_filtered_law_equals_transformers_on_large_vocabularies(
    vocabulary: int, spread: float, params: dict[str, Any]
) -> None:
    rng = np.random.default_rng(vocabulary)
    logits = (rng.standard_normal(vocabulary) * spread).astype(np.float32)
    context = rng.integers(0, vocabulary, 200).tolist()
    params = {"temperature": 1.0, **params}
    ours, expected = probabilities(logits, context, **params), reference(logits, context, **params)
    # Transformers adds up in float32: the edge may differ by tokens that together weigh no more than its rounding.
    assert np.abs(ours - expected).sum() < 1e-3 if spread == 0.01 else np.abs(ours - expected).sum() < 1e-4
    assert ours[expected.argmax()] == pytest.approx(expected.max(), rel=1e-3)


@pytest.mark.parametrize("top_p", [1e-9, 0.3, 0.9, 0.999, 1 - 1e-7, 1 - 1e-12])
@pytest.mark.parametrize("temperature", [1e-6, 0.1, 1.0, 30.0])
def test_the_nucleus_is_the_smallest_set_that_reaches_top_p(top_p: float, temperature: float) -> None:
    logits = (np.random.default_rng(0).standard_normal(5000) * 4).astype(np.float32)
    ours = probabilities(logits, temperature=temperature, top_p=top_p)
    exact = np.exp((logits.astype(np.float64) - logits.max()) / temperature)
    exact /= exact.sum()
    kept = exact[ours > 0]
    assert kept.sum() >= top_p - 1e-6
    assert kept.sum() - kept.min() < top_p + 1e-6
    assert exact[ours == 0].max(initial=0) <= kept.min()


def test_equal_tokens_at_the_edge_of_the_nucleus_are_kept_lowest_id_first() -> None:
    ours = probabilities(np.zeros(10, np.float32), temperature=1.0, top_p=0.25)
    np.testing.assert_allclose(ours, [1 / 3] * 3 + [0] * 7)
    ours = probabilities(np.float32([0, 2, 0, 2, 0]), temperature=1.0, top_p=0.88)
    assert (ours > 0).tolist() == [True, True, False, True, False]
    assert (probabilities(np.zeros(2, np.float32), temperature=1.0, top_p=0.5) > 0).tolist() == [True, False]


def test_tokens_as_likely_as_the_last_of_the_top_k_are_kept() -> None:
    ours = probabilities(np.float32([1, 3, 2, 2, 2]), temperature=1.0, top_k=2)
    assert (ours > 0).tolist() == [False, True, True, True, True]


def test_greedy_takes_the_lowest_of_the_likeliest_ids_and_ignores_filters_and_seed() -> None:
    logits = np.float32([1, 4, 2, 4])
    for seed in range(3):
        assert Sampler(SamplingParams(seed=seed, top_k=1, top_p=0.1, min_p=1), 4).choose(logits, seed) == 1
    assert Sampler(SamplingParams(repetition_penalty=1.1), 4).choose(logits, 0, [1]) == 3


@given(ids=st.lists(st.integers(0, 5000), max_size=600), data=st.data())
def test_seen_tokens_kept_up_to_date_equal_the_whole_context(ids: list[int], data: st.DataObject) -> None:
    cut = data.draw(st.integers(0, len(ids)))
    seen = SeenTokens()
    seen.add(ids[:cut])
    seen.add(iter(ids[cut:]))
    assert seen.ids.tolist() == list(dict.fromkeys(ids))
    logits = np.linspace(-3, 3, 5001, dtype=np.float32)
    params = {"temperature": 1.0, "repetition_penalty": 1.5}
    np.testing.assert_array_equal(probabilities(logits, seen, **params), probabilities(logits, ids, **params))


def test_logits_are_left_as_they_were() -> None:
    logits = np.random.default_rng(1).standard_normal(3000).astype(np.float32)
    before = logits.copy()
    params = SamplingParams(temperature=0.7, top_k=40, top_p=0.9, min_p=0.01, repetition_penalty=1.3)
    for each in (params, SamplingParams(temperature=1.0), SamplingParams(repetition_penalty=1.3)):
        Sampler(each, 3000).choose(logits, 5, [1, 2, 3])
    np.testing.assert_array_equal(logits, before)


LAWS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.5},
    {"top_k": 4},
    {"top_p": 0.8},
    {"min_p": 0.2},
    {"temperature": 2.0, "top_k": 6, "top_p": 0.9, "min_p": 0.05, "repetition_penalty": 1.4},
]


@pytest.mark.parametrize("params", LAWS)
@pytest.mark.parametrize("seed", [0, 2**64 - 1])
def test_draws_follow_the_law(params: dict[str, Any], seed: int) -> None:
    logits = np.float32([0.3, -1, 2, 1.9, 0, -3, 1, 0.5])
    params = {"temperature": 1.0, **params}
    law = reference(logits, [2, 5], **params)
    sampler = Sampler(SamplingParams(**params, seed=seed), len(logits))
    draws = 4000
    counts = np.bincount([sampler.choose(logits, position, [2, 5]) for position in range(draws)], minlength=len(law))
    assert counts[law == 0].sum() == 0
    expected = law[law > 0] * draws
    statistic = ((counts[law > 0] - expected) ** 2 / expected).sum()
    freedom = len(expected) - 1
    # Wilson-Hilferty: the cube root of chi-square over its freedom is nearly normal; 4 deviations are 1 in 30,000.
    deviations = ((statistic / freedom) ** (1 / 3) - (1 - 2 / (9 * freedom))) / math.sqrt(2 / (9 * freedom))
    assert abs(deviations) < 4


@pytest.mark.parametrize("params", LAWS)
def test_a_large_vocabulary_is_drawn_from_by_inverse_distribution(params: dict[str, Any]) -> None:
    vocabulary = 49_152 + 77  # not a whole number of blocks
    logits = np.random.default_rng(3).standard_normal(vocabulary).astype(np.float32)
    params = {"temperature": 1.0, **params}
    ends = probabilities(logits, **params).cumsum()
    sampler = Sampler(SamplingParams(**params), vocabulary)
    for position in range(50):
        token, u = sampler.choose(logits, position), uniform(0, position)
        assert (ends[token - 1] if token else 0) - 1e-6 <= u <= ends[token] + 1e-6


@given(seed=st.integers(0, 2**64 - 1), position=st.integers(0, 2**40), other=st.integers(0, 2**40))
def test_a_draw_depends_on_seed_and_position_alone(seed: int, position: int, other: int) -> None:
    logits = np.random.default_rng(4).standard_normal(200).astype(np.float32)
    params = SamplingParams(temperature=1.0, top_p=0.9, seed=seed)
    busy = Sampler(params, 200)
    busy.choose(-logits, other)
    assert busy.choose(logits, position) == Sampler(params, 200).choose(logits, position)


def test_a_rounding_difference_between_engines_seldom_moves_a_draw() -> None:
    rng = np.random.default_rng(5)
    logits = np.float32([2.0, 2.0, 1.0, 2.0]).repeat(50)  # ties everywhere: any other order than by id would shuffle
    sampler = Sampler(SamplingParams(temperature=1.0, top_p=0.999), 200)
    moved = 0
    for position in range(300):
        noisy = logits + rng.uniform(-1e-6, 1e-6, 200).astype(np.float32)
        moved += sampler.choose(logits, position) != sampler.choose(noisy, position)
    assert moved <= 1


def test_random_numbers_are_uniform_over_positions_and_over_seeds() -> None:
    for numbers in ([uniform(7, i) for i in range(20_000)], [uniform(i, 7) for i in range(20_000)]):
        counts = np.histogram(numbers, bins=100, range=(0, 1))[0]
        assert ((counts - 200) ** 2 / 200).sum() < 99 + 4 * math.sqrt(2 * 99)
        assert abs(np.corrcoef(numbers[1:], numbers[:-1])[0, 1]) < 0.03


@pytest.mark.parametrize("u", [0.0, 1 - 2**-53])
@pytest.mark.parametrize("vocabulary", [1, 3, 512, 513, 2000])
def test_the_ends_of_the_unit_interval_draw_tokens_that_have_weight(
    monkeypatch: pytest.MonkeyPatch, u: float, vocabulary: int
) -> None:
    monkeypatch.setattr("wavekit.decoding.sampling.uniform", lambda seed, position: u)
    logits = np.full(vocabulary, -np.inf, np.float32)
    logits[vocabulary // 2] = 1
    assert Sampler(SamplingParams(temperature=1.0), vocabulary).choose(logits, 0) == vocabulary // 2


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_not_numbers_are_an_error(bad: float, temperature: float) -> None:
    with pytest.raises(WavekitError, match="wider precision"):
        Sampler(SamplingParams(temperature=temperature), 3).choose(np.float32([1, bad, 2]), 0)
    with pytest.raises(WavekitError, match="wider precision"):
        Sampler(SamplingParams(temperature=temperature), 3).choose(np.full(3, -np.inf, np.float32), 0)


@pytest.mark.parametrize(
    ("name", "values", "allowed"),
    [
        ("temperature", [-1, 1e-9, math.nan, math.inf, "1", None, True], r"0 \(greedy\) or from 1e-6 to 1e6"),
        ("top_k", [-1, 1.5, "3", None, False], r"an integer from 0 \(off\) up"),
        ("top_p", [0, -0.1, 1.01, math.nan, None], r"above 0 and at most 1 \(off\)"),
        ("min_p", [-0.1, 1.01, math.nan, "x"], r"from 0 \(off\) to 1"),
        ("repetition_penalty", [0, -1, math.inf, math.nan], "from 1e-3 to 1e3; 1 is off"),
        ("seed", [-1, 2**64, 0.5, None], r"an integer from 0 to 2\*\*64 - 1"),
    ],
)
def test_a_value_out_of_range_names_the_parameter_and_its_range(name: str, values: list[Any], allowed: str) -> None:
    for value in values:
        with pytest.raises(MisuseError, match=f"^{name} must be {allowed}, not ") as error:
            SamplingParams(**{name: value})
        assert "\n" not in str(error.value)


def test_values_become_plain_numbers() -> None:
    params = SamplingParams(temperature=1, top_k=np.int64(3), top_p=np.float32(0.5), seed=np.uint64(2**63))  # type: ignore[arg-type]
    assert [type(getattr(params, name)) for name in inspect.signature(SamplingParams).parameters] == [
        float,
        int,
        float,
        float,
        float,
        int,
    ]
