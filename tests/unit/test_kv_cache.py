"""The cache against a list of rows: whatever is kept, dropped or moved, keys and values of all layers stay together."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wavekit_engines.kv_cache import KVCache

LAYERS, HEADS, HEAD_DIM, CAPACITY, BATCH = 3, 2, 4, 24, 2


def filled() -> KVCache:
    return KVCache(LAYERS, HEADS, HEAD_DIM, CAPACITY, "float32", BATCH)


def write(cache: KVCache, row: int, token: int) -> None:
    """What a graph does: write a row into every layer, keys and values apart."""
    for layer in range(LAYERS):
        cache.keys(layer)[:, :, row] = 100 * token + layer
        cache.values(layer)[:, :, row] = -(100 * token + layer)


def tokens(cache: KVCache) -> list[int]:
    """The token in every row in use, checked to be the same everywhere."""
    found = []
    for row in range(cache.length):
        token = int(cache.keys(0)[0, 0, row, 0]) // 100
        for layer in range(LAYERS):
            assert (cache.keys(layer)[:, :, row] == 100 * token + layer).all()
            assert (cache.values(layer)[:, :, row] == -(100 * token + layer)).all()
        found.append(token)
    return found


@given(st.data())
def test_rows_are_kept_like_the_items_of_a_list(data: st.DataObject) -> None:
    cache, model, token = filled(), list[int](), 1
    for _ in range(data.draw(st.integers(1, 8))):
        count = data.draw(st.integers(0, CAPACITY - len(model)))
        assert cache.append(count) == range(len(model), len(model) + count)
        for row in range(len(model), len(model) + count):
            write(cache, row, token)
            model.append(token)
            token += 1
        start = data.draw(st.integers(0, len(model)))
        after = st.sampled_from(range(start, len(model))) if start < len(model) else st.nothing()
        rows = data.draw(st.lists(after, unique=True))
        if data.draw(st.booleans()):
            rows.sort()  # as the decoder has them
        cache.keep(start, rows)
        model = [*model[:start], *(model[row] for row in rows)]
        assert cache.length == len(model)
        assert tokens(cache) == model


def test_a_full_cache_refuses_more_and_stays_as_it_is() -> None:
    cache = filled()
    cache.append(CAPACITY - 1)
    with pytest.raises(ValueError, match="2 rows do not fit: 23 of 24 are in use"):
        cache.append(2)
    assert cache.append(1) == range(23, 24)
    assert cache.capacity == CAPACITY


def test_keys_and_values_are_views_into_one_buffer_that_never_moves() -> None:
    cache = filled()
    before = [cache.keys(1), cache.values(1)]
    cache.append(5)
    cache.keep(0, [4, 2])
    for view, now in zip(before, (cache.keys(1), cache.values(1)), strict=True):
        assert view.ctypes.data == now.ctypes.data
        assert view.shape == (BATCH, HEADS, CAPACITY, HEAD_DIM)
        assert view.flags.c_contiguous


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_rows_have_the_dtype_of_the_engine(dtype: str) -> None:
    cache = KVCache(1, 1, 8, 4, dtype)
    assert cache.keys(0).dtype == dtype
    assert cache.keys(0).shape == (1, 1, 4, 8)
