"""Cutting layers into stages: every layer and every tap in exactly one stage, or a message that says what is wrong."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wavekit_engines.errors import MisuseError
from wavekit_engines.stages import StageRange, even_split, plan_stages


@st.composite
def plans(draw: st.DrawFn) -> tuple[int, list[int], list[int]]:
    layers = draw(st.integers(1, 60))
    inner = st.integers(1, layers - 1) if layers > 1 else st.nothing()
    split = sorted(draw(st.lists(inner, unique=True)))
    return layers, split, draw(st.lists(st.integers(0, layers), unique=True))


@given(plans())
def test_stages_cover_the_layers_in_order_and_put_every_tap_out_once(plan: tuple[int, list[int], list[int]]) -> None:
    layers, split, taps = plan
    stages = plan_stages(layers, split, taps)
    assert [index for stage in stages for index in range(stage.first, stage.last)] == list(range(layers))
    assert [stage.last for stage in stages] == [*split, layers]
    outputs = [boundary for stage in stages for boundary in stage.outputs]
    assert outputs == sorted({*taps, *split, layers})
    for stage in stages:
        assert stage.outputs[-1] == stage.last
        assert all(stage.first < k <= stage.last or k == stage.first == 0 for k in stage.taps)


@given(st.integers(1, 80), st.data())
def test_an_even_split_has_as_many_stages_as_asked_for_and_lengths_that_differ_by_one(
    layers: int, data: st.DataObject
) -> None:
    count = data.draw(st.integers(1, layers))
    lengths = [stage.last - stage.first for stage in plan_stages(layers, even_split(layers, count), ())]
    assert len(lengths) == count
    assert max(lengths) - min(lengths) <= 1


@pytest.mark.parametrize("stages", [0, -1, 5])
def test_a_number_of_stages_that_the_layers_do_not_allow(stages: int) -> None:
    with pytest.raises(MisuseError, match=f"--stages {stages}: a model of 4 layers can have 1 to 4 stages"):
        even_split(4, stages)


@pytest.mark.parametrize(
    ("split", "taps", "line"),
    [
        ([0], [], "--split 0: inner boundaries of 4 layers are 1 to 3"),
        ([4], [], "--split 4: inner"),
        ([1, -2], [], "--split -2: inner"),
        ([2, 1], [], "--split 2,1: boundaries must ascend, each once"),
        ([2, 2], [], "--split 2,2: boundaries must ascend, each once"),
        ([], [5], "--taps 5: boundaries of 4 layers are 0 to 4"),
        ([], [-1], "--taps -1: boundaries"),
        ([], [3, 1, 3], "--taps 3,1,3: each boundary once"),
    ],
)
def test_boundaries_that_make_no_sense(split: list[int], taps: list[int], line: str) -> None:
    with pytest.raises(MisuseError, match=line):
        plan_stages(4, split, taps)


def test_boundary_0_belongs_to_the_first_stage_and_an_edge_to_the_stage_that_ends_there() -> None:
    assert plan_stages(4, (2,), (2, 0, 3)) == (StageRange(0, 2, (0, 2)), StageRange(2, 4, (3,)))
