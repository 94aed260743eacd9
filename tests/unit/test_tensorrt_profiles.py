"""The shapes that engines are built for fit into the cache."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wavekit_engines.bundle import GraphInfo, TensorInfo
from wavekit_engines.errors import MisuseError
from wavekit_engines.tensorrt.profiles import Limits, Profile, profiles, shapes


def graph(**inputs: tuple[int | str, ...]) -> GraphInfo:
    return GraphInfo("g.onnx", tuple(TensorInfo(name, "float32", shape) for name, shape in inputs.items()), (), 0, 0)


STAGE = graph(hidden=("B", "S", 64), positions=("B", "S"), mask=("M", 1, "S", "T"), key_0=("B", 2, "C", 16))
HEAD = graph(hidden=("n", 64))
DRAFT = graph(taps=(1, "P", 192), hidden=(1, "Q", 64), token_ids=(1, "S"), mask=("M", 1, "S", "T"), head_rows=("n",))


@given(st.integers(1, 5000), st.integers(1, 200), st.sampled_from([STAGE, HEAD, DRAFT]))
def test_every_pass_fits_and_every_shape_lies_in_its_range(context: int, tree: int, of: GraphInfo) -> None:
    limits = Limits(context, tree)
    made = profiles(of, limits)
    for profile, found in zip(made, shapes(of, made, limits.capacity(of)), strict=True):
        assert profile.past + profile.dims.get("S", (0, 0, 0))[2] <= limits.capacity(of)
        for least, usual, most in found.values():
            assert all(a <= b <= c for a, b, c in zip(least, usual, most, strict=True))


def test_a_stage_has_a_profile_for_prompts_and_one_for_trees() -> None:
    limits = Limits(1000, 32)
    prefill, decode = shapes(STAGE, profiles(STAGE, limits), limits.capacity(STAGE))
    assert prefill["hidden"] == ([1, 1, 64], [1, 512, 64], [1, 512, 64])
    assert decode["hidden"] == ([1, 1, 64], [1, 32, 64], [1, 32, 64])  # passes are filled up to a tree's rows
    assert decode["mask"] == ([1, 1, 1, 1088], [1, 1, 32, 1088], [1, 1, 32, 1088])
    assert "key_0" not in decode  # of a fixed shape


@given(st.integers(1, 5000), st.integers(1, 200))
def test_the_cache_holds_a_text_with_a_tree_and_a_pass_filled_up_upon_it(context: int, tree: int) -> None:
    limits = Limits(context, tree)
    assert context + 2 * tree <= limits.capacity(STAGE) < context + 2 * tree + 64
    assert limits.capacity(DRAFT) - limits.capacity(STAGE) == 512  # rows that a draft head grows trees in
    assert limits.capacity(STAGE) * 16 * 2 % 256 == 0  # where tensors must begin, for 16 features in float16


def test_a_draft_is_fed_states_of_the_target_or_its_own() -> None:
    limits = Limits(100, 8)
    for found in shapes(DRAFT, profiles(DRAFT, limits), limits.capacity(DRAFT)):
        for index in range(3):
            assert found["taps"][index][1] + found["hidden"][index][1] == found["token_ids"][index][1]


def test_rows_that_do_not_fit_are_refused() -> None:
    with pytest.raises(MisuseError, match="the profile decode adds 9 rows to 40, but the cache has 48"):
        shapes(STAGE, [Profile("decode", 40, {"S": (1, 1, 9)})], 48)


def test_a_dimension_without_a_range_is_named() -> None:
    with pytest.raises(ValueError, match="no range for n of hidden"):
        shapes(HEAD, [Profile("decode", 0, {"S": (1, 1, 1)})], 48)
