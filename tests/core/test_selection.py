"""Sets of item numbers: the same numbers, whether they are held as a list, as spans or as bits."""

import pickle
import tracemalloc
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.core import selection
from penstock.core.index import Index
from penstock.core.selection import select_mask, select_numbers

masks = st.one_of(
    st.lists(st.booleans(), max_size=300),
    # Long runs.
    st.lists(st.tuples(st.booleans(), st.integers(1, 200)), max_size=6).map(
        lambda runs: [value for value, length in runs for _ in range(length)]
    ),
).map(lambda values: np.array(values, np.bool_))


@pytest.fixture(params=["all at once", "in blocks"])
def block(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hold few numbers as many are held, and work them out in blocks."""
    monkeypatch.setattr(selection, "_LIST_NUMBERS", 3)
    if request.param == "in blocks":
        monkeypatch.setattr(selection, "_AT_ONCE", 64)


def forms(mask: np.ndarray) -> list[selection.NumberSet]:
    """Return the set in every form there is."""
    numbers = [selection._NumberList(np.flatnonzero(mask))]
    if mask.any():
        starts = np.flatnonzero(np.diff(mask, prepend=False) & mask)
        stops = np.flatnonzero(np.diff(mask, append=False) & mask) + 1
        blocks = (mask[begin : begin + selection._AT_ONCE] for begin in range(0, len(mask), selection._AT_ONCE))
        numbers += [
            selection._SpanList(starts, np.concatenate([[0], np.cumsum(stops - starts)])),
            selection._pack_bits(blocks, len(mask), int(mask.sum())),
        ]
    return [*numbers, select_mask(mask), select_numbers(np.flatnonzero(mask), len(mask))]


@pytest.mark.usefixtures("block")
class TestForms:
    @given(masks, st.data())
    def test_every_form_has_the_same_numbers(self, mask: np.ndarray, data: st.DataObject) -> None:
        wanted = np.flatnonzero(mask)
        some = np.array(data.draw(st.lists(st.integers(0, max(0, len(wanted) - 1)), max_size=9)), np.int64)
        some = some[some < len(wanted)]
        asked = np.array(data.draw(st.lists(st.integers(0, len(mask)), max_size=9)), np.int64)
        for found in forms(mask):
            assert len(found) == len(wanted)
            assert found.at(np.arange(len(wanted))).tolist() == wanted.tolist()
            assert found.at(some).tolist() == wanted[some].tolist()
            assert found.rank(np.arange(len(mask) + 1)).tolist() == [0, *np.cumsum(mask).tolist()]
            assert found.rank(asked).tolist() == [int(mask[:number].sum()) for number in asked]
            assert [number for block in found.blocks() for number in block.tolist()] == wanted.tolist()

    @given(masks, st.data(), st.sampled_from([np.int64, np.uint16, np.int32, np.uint64]))
    def test_numbers_in_any_order_are_those_of_the_mask(
        self, mask: np.ndarray, data: st.DataObject, dtype: type[np.integer]
    ) -> None:
        wanted = np.flatnonzero(mask)
        given_numbers = np.array(data.draw(st.permutations(wanted.tolist())), dtype)
        repeats = given_numbers[: data.draw(st.integers(0, 3))]
        for numbers in (wanted.astype(dtype), given_numbers, np.concatenate([given_numbers, repeats])):
            found = select_numbers(numbers, len(mask))
            assert found.at(np.arange(len(found))).tolist() == wanted.tolist()
            assert found.at(np.arange(len(found))).dtype == np.int64

    @given(masks, st.integers(1, 9), st.booleans(), st.data())
    def test_a_selection_is_that_of_a_table(self, mask: np.ndarray, chunk: int, cut: bool, data: st.DataObject) -> None:
        whole = Index.from_sizes([len(mask)], chunk=chunk) if cut else Index.uniform(len(mask), chunk)
        wanted = np.flatnonzero(mask)
        chunks = np.searchsorted([*whole.chunk_starts(np.arange(1, whole.n_chunks)), len(mask)], wanted, side="right")
        borders = [*np.flatnonzero(np.diff(chunks, prepend=-1)).tolist(), len(wanted)]
        numbers = data.draw(st.permutations(wanted.tolist()))
        for index in (whole.select(mask), whole.select(numbers), pickle.loads(pickle.dumps(whole.select(mask)))):
            assert index.borders.tolist() == (borders if len(wanted) else [0])
            assert index.selected.tolist() == wanted.tolist()
            assert index.stored(np.arange(len(wanted))).tolist() == wanted.tolist()
            assert index.find(wanted).tolist() == list(range(len(wanted)))
            assert index == whole.select(wanted)
            spans = np.array(list(pairwise(borders)), np.int64).reshape(-1, 2)
            covered = [[int(wanted[a]), int(wanted[b - 1]) + 1] for a, b in spans.tolist()]
            assert [index.stored_spans(spans[k : k + 1]).tolist() for k in range(len(spans))] == [[c] for c in covered]

    @given(st.lists(st.tuples(masks, st.booleans()), min_size=1, max_size=3), st.integers(1, 9))
    def test_concatenated_selections_keep_their_chunks_and_numbers(
        self, parts: list[tuple[np.ndarray, bool]], chunk: int
    ) -> None:
        indexes = [
            Index.uniform(len(mask), chunk).select(mask) if partly else Index.uniform(len(mask), chunk)
            for mask, partly in parts
        ]
        whole = Index.concat(indexes)
        offsets = np.cumsum([0, *(index.n_stored for index in indexes)]).tolist()
        stored = [index.stored(np.arange(len(index))) + offset for index, offset in zip(indexes, offsets, strict=False)]
        assert whole.stored(np.arange(len(whole))).tolist() == np.concatenate(stored).tolist()
        sizes = [index.chunk_sizes(np.arange(index.n_chunks)).tolist() for index in indexes]
        assert whole.chunk_sizes(np.arange(whole.n_chunks)).tolist() == [size for some in sizes for size in some]


def test_item_numbers_given_twice_are_refused_if_there_are_many() -> None:
    with pytest.raises(ValueError, match="takes each item at most once, got item 3 twice"):
        Index.uniform(100, 5).select([1, 2, 3, 4, 5, 3])


ITEMS = 10_000_000
PATTERNS = {
    "every second item": (lambda: np.tile([True, False], ITEMS // 2), 0.2),
    "half of the items": (lambda: np.random.default_rng(0).random(ITEMS, np.float32) < 0.5, 0.2),
    "few items": (lambda: np.random.default_rng(0).random(ITEMS, np.float32) < 0.01, 0.2),
    "long runs": (lambda: np.tile(np.repeat([False, True], 10_000), ITEMS // 20_000), 0.01),
    "all items": (lambda: np.ones(ITEMS, np.bool_), 0.01),
}


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("chunk", [1, 1000])
def test_a_selection_takes_at_most_two_bits_per_item(pattern: str, chunk: int) -> None:
    make, bytes_per_item = PATTERNS[pattern]
    mask = make()
    tracemalloc.start()
    try:
        index = Index.uniform(ITEMS, chunk).select(mask)
        assert index.n_chunks > 0
        held_bytes, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    working_bytes = 12_000_000  # of blocks, whatever the number of items
    assert held_bytes < bytes_per_item * ITEMS + 1_000_000
    assert peak_bytes < bytes_per_item * ITEMS + working_bytes
    places = np.arange(0, len(index), max(1, len(index) // 1000))
    assert np.array_equal(index.find(index.stored(places)), places)
    assert mask[index.stored(places)].all()
    assert index.stored(np.array([len(index) - 1])).tolist() == [int(np.flatnonzero(mask)[-1])]
