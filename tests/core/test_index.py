"""Indexes: number of items, chunk borders, selections, concatenation."""

import hashlib
import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.errors import SourceError
from penstock.core.index import Index

chunk_sizes = st.lists(st.integers(0, 6), max_size=8)


def chunks_of(index: Index) -> list[list[int]]:
    """Return the item numbers in the source, chunk by chunk."""
    numbers = np.arange(index.n_chunks)
    starts, sizes = index.chunk_starts(numbers).tolist(), index.chunk_sizes(numbers).tolist()
    return [index.stored(np.arange(start, start + size)).tolist() for start, size in zip(starts, sizes, strict=True)]


def model_of(sizes: list[int], offset: int = 0) -> list[list[int]]:
    """Return the expected result of `chunks_of` for chunks of these sizes."""
    ends = np.cumsum(sizes, dtype=int).tolist()
    return [list(range(offset + end - size, offset + end)) for end, size in zip(ends, sizes, strict=True) if size]


def keep_items(chunks: list[list[int]], wanted: set[int]) -> list[list[int]]:
    left = [[item for item in chunk if item in wanted] for chunk in chunks]
    return [chunk for chunk in left if chunk]


@given(st.integers(0, 50), st.integers(1, 12))
def test_a_regular_index_has_chunks_of_one_size_and_the_rest_in_the_last(items: int, chunk: int) -> None:
    index = Index.uniform(items, chunk)
    assert chunks_of(index) == [list(range(k, min(k + chunk, items))) for k in range(0, items, chunk)]
    assert (len(index), index.n_stored) == (items, items)
    assert index.largest_chunk == min(chunk, items)


@given(chunk_sizes)
def test_an_index_from_sizes_leaves_out_empty_chunks(sizes: list[int]) -> None:
    index = Index.from_sizes(sizes)
    assert chunks_of(index) == model_of(sizes)
    assert (len(index), index.n_stored, index.largest_chunk) == (sum(sizes), sum(sizes), max(sizes, default=0))
    assert index.n_chunks == sum(size > 0 for size in sizes)


@given(st.lists(st.integers(0, 40), max_size=8), st.data())
def test_parts_are_cut_into_few_equal_chunks(sizes: list[int], data: st.DataObject) -> None:
    chunks = data.draw(st.integers(1, 9) | st.lists(st.integers(1, 9), min_size=len(sizes), max_size=len(sizes)))
    index = Index.from_sizes(sizes, chunk=chunks, identity="cut")
    wanted = []
    for size, chunk in zip(sizes, [chunks] * len(sizes) if isinstance(chunks, int) else chunks, strict=True):
        wanted += [len(part) for part in np.array_split(np.arange(size), -(-size // chunk))] if size else []
    plain = Index.from_sizes(wanted, identity="cut")
    assert chunks_of(index) == chunks_of(plain) == model_of(wanted)
    assert (index.digest, len(index), index.n_chunks) == (plain.digest, sum(sizes), len(wanted))
    assert index.borders.tolist() == plain.borders.tolist() == [0, *np.cumsum(wanted).tolist()]
    for one, other in zip(index.locate(np.arange(sum(sizes))), plain.locate(np.arange(sum(sizes))), strict=True):
        assert one.tolist() == other.tolist()
    mask = np.array(data.draw(st.lists(st.booleans(), min_size=len(index), max_size=len(index))), np.bool_)
    assert index.select(mask).digest == plain.select(mask).digest
    assert Index.concat([index, plain]) == Index.concat([plain, index])


@given(st.lists(st.integers(0, 6), max_size=8), st.booleans(), st.text(max_size=3))
def test_the_digest_is_that_of_all_borders(sizes: list[int], regular: bool, identity: str) -> None:
    index = Index.uniform(sum(sizes), 4, identity) if regular else Index.from_sizes(sizes, identity)
    wanted = hashlib.blake2b(digest_size=8, person=b"penstock-index")
    wanted.update(repr((sum(sizes), 4 if regular else 0, sum(sizes), identity)).encode())
    borders = np.array([0, *np.cumsum([size for size in sizes if size])], "<i8")
    wanted.update(b"-" if regular else borders.tobytes())
    wanted.update(b"-")
    assert index.digest == wanted.hexdigest()


@given(chunk_sizes, st.data())
def test_locate_gives_the_chunk_and_the_place_in_it(sizes: list[int], data: st.DataObject) -> None:
    index = Index.from_sizes(sizes)
    items = np.array(data.draw(st.lists(st.integers(0, len(index) - 1)) if len(index) else st.just([])), np.int64)
    chunks, places = index.locate(items)
    found = [chunks_of(index)[chunk][place] for chunk, place in zip(chunks, places, strict=True)]
    assert found == items.tolist()


@given(st.integers(1, 60), st.integers(1, 9))
def test_locate_is_the_same_for_regular_and_listed_chunks(items: int, chunk: int) -> None:
    regular = Index.uniform(items, chunk)
    listed = Index.from_sizes(regular.chunk_sizes(np.arange(regular.n_chunks)))
    for one, other in zip(regular.locate(np.arange(items)), listed.locate(np.arange(items)), strict=True):
        assert one.tolist() == other.tolist()


@pytest.mark.parametrize("items", [[-1], [10], [3, 12]])
@pytest.mark.parametrize("index", [Index.uniform(10, 4), Index.from_sizes([4, 6])], ids=["regular", "listed"])
def test_locate_refuses_items_outside_of_the_index(index: Index, items: list[int]) -> None:
    with pytest.raises(SourceError, match=rf"Items must be in 0–9, got {min(items)}–{max(items)}"):
        index.locate(np.array(items))


@given(chunk_sizes, st.data())
def test_a_selection_keeps_the_chosen_items_in_their_chunks_in_storage_order(
    sizes: list[int], data: st.DataObject
) -> None:
    index = Index.from_sizes(sizes)
    mask = np.array(data.draw(st.lists(st.booleans(), min_size=len(index), max_size=len(index))), np.bool_)
    chosen = np.flatnonzero(mask).tolist()
    by_mask = index.select(mask)
    by_number = index.select(data.draw(st.permutations(chosen)))
    assert chunks_of(by_mask) == chunks_of(by_number) == keep_items(model_of(sizes), set(chosen))
    assert by_mask.digest == by_number.digest
    assert (len(by_mask), by_mask.n_stored) == (len(chosen), sum(sizes))


@given(st.integers(0, 40), st.integers(1, 9), st.data())
def test_a_selection_of_a_selection_counts_in_what_was_selected(items: int, chunk: int, data: st.DataObject) -> None:
    whole = Index.uniform(items, chunk)
    first = sorted(item for item in range(items) if data.draw(st.booleans()))
    second = sorted(place for place in range(len(first)) if data.draw(st.booleans()))
    twice = whole.select(first).select(second)
    assert chunks_of(twice) == keep_items(chunks_of(whole), {first[place] for place in second})
    assert twice.n_stored == items


@given(chunk_sizes, st.data())
def test_stored_spans_cover_the_chunks_asked_for_and_join_neighbours(sizes: list[int], data: st.DataObject) -> None:
    index = Index.from_sizes(sizes)
    mask = np.array(data.draw(st.lists(st.booleans(), min_size=len(index), max_size=len(index))), np.bool_)
    for part in (index, index.select(mask)):
        held = [n for n in range(part.n_chunks) if data.draw(st.booleans())]
        starts = part.chunk_starts(np.array(held, np.int64))
        spans = np.stack([starts, starts + part.chunk_sizes(np.array(held, np.int64))], axis=1)
        wanted = [chunks_of(part)[chunk] for chunk in held]
        reached = {item for chunk in wanted for item in range(chunk[0], chunk[-1] + 1)}
        stored = part.stored_spans(spans)
        borders = stored.ravel().tolist()
        assert borders == sorted(set(borders))
        assert {item for start, stop in stored.tolist() for item in range(start, stop)} == reached


def test_a_selection_reads_each_chunk_from_its_first_selected_item_to_its_last() -> None:
    index = Index.uniform(20, 5).select([1, 3, 9, 10, 12])
    spans = np.array([[0, 2], [2, 3], [3, 5]])
    assert index.stored_spans(spans).tolist() == [[1, 4], [9, 13]]


@given(st.lists(st.tuples(chunk_sizes, st.booleans()), max_size=4), st.data())
def test_concat_lays_sources_end_to_end_with_their_chunks_and_selections(
    parts: list[tuple[list[int], bool]], data: st.DataObject
) -> None:
    indices, wanted, offset = [], [], 0
    for sizes, partly in parts:
        index, model = Index.from_sizes(sizes), model_of(sizes, offset)
        if partly:
            mask = np.array(data.draw(st.lists(st.booleans(), min_size=len(index), max_size=len(index))), np.bool_)
            index, model = index.select(mask), keep_items(model, set((np.flatnonzero(mask) + offset).tolist()))
        indices.append(index)
        wanted += model
        offset += sum(sizes)
    whole = Index.concat(indices)
    assert chunks_of(whole) == wanted
    assert whole.n_stored == offset
    assert len(whole) == sum(map(len, wanted))


def test_concat_keeps_the_border_between_sources() -> None:
    assert chunks_of(Index.concat([Index.uniform(4, 3), Index.uniform(5, 3)])) == [[0, 1, 2], [3], [4, 5, 6], [7, 8]]


@pytest.mark.parametrize(
    "index",
    [Index.uniform(0), Index.uniform(0, 7), Index.from_sizes([]), Index.from_sizes([0, 0]), Index.concat([])],
)
def test_every_method_works_on_an_empty_index(index: Index) -> None:
    assert (len(index), index.n_chunks, index.largest_chunk, index.n_stored) == (0, 0, 0, 0)
    assert chunks_of(index) == []
    assert [array.tolist() for array in index.locate(np.zeros(0, np.int64))] == [[], []]
    assert len(index.select([])) == len(index.select(np.zeros(0, np.bool_))) == 0
    assert index.stored_spans(np.zeros((0, 2), np.int64)).tolist() == []


def test_selecting_nothing_leaves_an_empty_index_that_knows_its_source() -> None:
    index = Index.uniform(10, 4).select(np.zeros(10, np.bool_))
    assert (len(index), index.n_chunks, index.n_stored) == (0, 0, 10)


def test_equal_indices_have_equal_digests_also_after_pickling() -> None:
    for index in (Index.uniform(10, 4), Index.from_sizes([3, 4]), Index.uniform(10, 4).select([1, 5])):
        assert pickle.loads(pickle.dumps(index)).digest == index.digest
    assert Index.uniform(10, 4).digest == Index.uniform(10, 4).digest
    assert Index.from_sizes([3, 0, 4]).digest == Index.from_sizes([3, 4]).digest


def test_every_difference_between_indices_changes_the_digest() -> None:
    different = [
        Index.uniform(10, 4),
        Index.uniform(11, 4),
        Index.uniform(10, 5),
        Index.uniform(10, 4, identity="monday"),
        Index.uniform(10, 4, identity="tuesday"),
        Index.from_sizes([3, 4]),
        Index.from_sizes([4, 3]),
        Index.from_sizes([4, 3], identity="monday"),
        Index.uniform(10, 4).select([1, 5]),
        Index.uniform(10, 4).select([1, 6]),
        Index.uniform(10, 4, identity="monday").select([1, 5]),
        Index.concat([Index.uniform(5, 5), Index.uniform(5, 5)]),
        Index.concat([Index.uniform(5, 5, identity="monday"), Index.uniform(5, 5)]),
        Index.concat([Index.uniform(5, 5), Index.uniform(5, 5, identity="monday")]),
    ]
    assert len({index.digest for index in different}) == len(different)


def test_the_repr_gives_the_number_of_items_and_chunks() -> None:
    assert repr(Index.uniform(10, 4)) == "Index(10 items in 3 chunks)"
    assert repr(Index.uniform(10, 4).select([0, 9])) == "Index(2 items in 2 chunks, selected from 10)"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Index.uniform(-1), "items must be an integer >= 0, got -1"),
        (lambda: Index.uniform(5, 0), "chunk must be an integer >= 1, got 0"),
        (lambda: Index.uniform(5, -2), "chunk must be an integer >= 1, got -2"),
        (lambda: Index.from_sizes([3, -1]), "sizes must be >= 0, got -1 for chunk 1"),
        (lambda: Index.from_sizes([1.5, 2.0]), "sizes must be a 1-D array of integers, got float64"),
        (lambda: Index.from_sizes(["a"]), "sizes must be a 1-D array of integers, got <U1"),
        (lambda: Index.from_sizes([[1, 2]]), "sizes must be a 1-D array of integers, got int64 with 2 axes"),
        (lambda: Index.from_sizes(5), "sizes must be a 1-D array of integers, got int64 with 0 axes"),
        (lambda: Index.from_sizes([5], chunk=0), "chunk must be an integer >= 1, got 0"),
        (lambda: Index.from_sizes([5], chunk=2.5), r"chunk must be an integer >= 1, got 2\.5"),
        (lambda: Index.from_sizes([5, 5], chunk=[2, 0]), "chunk must be >= 1, got 0 for size 1"),
        (
            lambda: Index.from_sizes([5, 5], chunk=[2]),
            r"one integer for each of the 2 sizes, got int64 of shape \(1,\)",
        ),
        (lambda: Index.from_sizes([5], chunk=[2.0]), r"one integer for each of the 1 sizes, got float64 of shape"),
    ],
)
def test_invalid_sizes_are_refused(make, message: str) -> None:
    with pytest.raises(SourceError, match=message):
        make()


@pytest.mark.parametrize(("items", "chunk"), [(10.7, 2), (10, 2.5), ("10", 2)])
def test_counts_that_are_no_integers_are_refused(items, chunk) -> None:
    with pytest.raises(SourceError, match=r"10\.7|2\.5|'10'"):
        Index.uniform(items, chunk)


@pytest.mark.parametrize(
    ("which", "message"),
    [
        ([True, False], r"The mask must have one bool per item \(10\), got 2"),
        (np.ones(11, np.bool_), r"The mask must have one bool per item \(10\), got 11"),
        ([3, 5, 3], "takes each item at most once, got item 3 twice. Use Balanced"),
        ([3, 10], "Items must be in 0–9, got 3–10"),
        ([-1, 4], "Items must be in 0–9, got -1–4"),
        ([0.5, 1.0], "takes bools or integers, got float64"),
        (["a"], "takes bools or integers, got <U1"),
        ([[1, 2]], "1-D mask or 1-D item numbers, got 2 axes"),
        (4, "1-D mask or 1-D item numbers, got 0 axes"),
    ],
)
@pytest.mark.parametrize("index", [Index.uniform(10, 4), Index.uniform(30, 4).select(range(0, 30, 3))])
def test_invalid_selections_are_refused(index: Index, which, message: str) -> None:
    with pytest.raises(SourceError, match=message):
        index.select(which)


def test_selecting_leaves_the_index_as_it_was() -> None:
    index = Index.uniform(10, 4)
    wanted = np.array([5, 1])
    index.select(wanted)
    assert (len(index), index.selected, wanted.tolist()) == (10, None, [5, 1])


def test_by_default_every_item_is_a_chunk_and_nothing_identifies_the_content() -> None:
    assert Index.uniform(3) == Index.uniform(3, chunk=1, identity="")
    assert Index.from_sizes([3]) == Index.from_sizes([3], identity="")
    plain = Index(3, 1)
    assert (plain.borders, plain.selected, plain.n_stored, plain.identity) == (None, None, 0, "")
