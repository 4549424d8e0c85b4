"""Zip by a key: every item has the fields that have its key, whatever the order of the other sources."""

from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from penstock_source_suite import Case, ShortSuite

from penstock import ArraySource, OptionError, PenstockError, Source, SourceError, Zip

N = 13


def zip_two(offset: int = 0) -> Zip:
    keys = (np.arange(N) * 7) % 19
    other = np.sort(keys)
    return Zip(
        [ArraySource({"id": keys, "x": np.arange(N)}, chunk_items=4), ArraySource({"id": other, "y": other + offset})],
        on="id",
    )


class TestZipByKey(ShortSuite):
    @pytest.fixture
    def case(self) -> Case:
        def truth(item: int) -> dict[str, Any]:
            key = np.int64(item * 7 % 19)
            return {"id": key, "x": np.int64(item), "y": key}

        return Case(zip_two, truth, N, partial(zip_two, 1))


@given(keys=st.sets(st.integers(-(2**62), 2**62), min_size=1, max_size=20), is_text=st.booleans(), data=st.data())
def test_every_item_gets_the_fields_of_its_key(keys: set[int], is_text: bool, data: Any) -> None:
    orders = [data.draw(st.permutations(sorted(keys))) for _ in range(3)]
    sources: list[Source] = [
        ArraySource({"key": np.array([f"k{key}" if is_text else key for key in order]), f"f{n}": np.array(order) + n})
        for n, order in enumerate(orders)
    ]
    joined = Zip(sources, on="key")
    items = np.array(data.draw(st.lists(st.integers(0, len(keys) - 1), max_size=9)), np.int64)
    block = joined.take(items)
    wanted = np.array(orders[0], np.int64)[items]
    assert [block[f"f{n}"].tolist() for n in range(3)] == [(wanted + n).tolist() for n in range(3)]
    assert joined.index.chunk_items == sources[0].index.chunk_items


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"id": [1, 2, 2, 3, 3, 9], "y": range(6)}, "but 2, 3 in source 1 of Zip.* come several times"),
        ({"id": [1, 2, 3], "y": range(3)}, r"but 4, 5, 6 and 1 other key of source 0 .* are not in source 1"),
        ({"id": range(1, 9), "y": range(8)}, "but 8 of source 1 of Zip.* is not in source 0"),
        ({"id": np.arange(1, 8.0), "y": range(7)}, "must be integers or text, got float64 in source 1"),
        ({"id": list("1234567"), "y": range(7)}, "must have one type, got int64 in source 0.* and text in source 1"),
        ({"id": range(1, 8)}, "must have a field besides the key 'id'"),
        ({"key": range(1, 8), "y": range(7)}, "on='id' must be a field of all sources.*source 1.*has 'key', 'y'"),
        ({"id": range(1, 8), "x": range(7)}, r"Each field must be in one source.*\['x'\]"),
    ],
)
def test_keys_that_do_not_fit_are_named(other: dict[str, Any], message: str) -> None:
    first = ArraySource({"id": np.arange(1, 8), "x": np.arange(7)})
    with pytest.raises((SourceError, OptionError), match=message) as raised:
        Zip([first, ArraySource({name: np.array(values) for name, values in other.items()})], on="id")
    assert isinstance(raised.value, PenstockError)
