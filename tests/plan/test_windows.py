"""Windows of chunks: the same as from a table of all chunks, at a cost that does not depend on their number."""

import tracemalloc
from collections.abc import Callable, Iterator
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.index import Index
from penstock.core.seeds import key_for, subkeys
from penstock.core.types import Arrangement
from penstock.plan import orders, windows
from penstock.plan.epoch import MOST_CUT
from penstock.plan.orders import RandomChunks, Subset, WindowShuffle
from penstock.plan.permute import permute, unpermute
from penstock.plan.plan import Plan, Segments
from penstock.plan.windows import ChunkWindows

BILLION = 10**9


@pytest.fixture(params=["tables of all", "no tables", "one window at a time"])
def table_rows(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Work the same things out in every way there is."""
    if request.param != "tables of all":
        monkeypatch.setattr(windows, "_TABLE_ROWS", 0)
    if request.param == "one window at a time":
        monkeypatch.setattr(windows, "_CHUNKS_AT_ONCE", 1)


@st.composite
def indexes(draw: st.DrawFn) -> Index:
    """All chunks of one size but for a few, or for none, or for all."""
    kind = draw(st.sampled_from(["uniform", "cut", "some", "any"]))
    if kind == "uniform":
        index = Index.uniform(draw(st.integers(1, 90)), draw(st.integers(1, 9)))
    elif kind == "cut":
        index = Index.from_sizes(
            draw(st.lists(st.integers(1, 30), min_size=1, max_size=9)), chunk=draw(st.integers(1, 9))
        )
    elif kind == "some":
        sizes = np.full(draw(st.integers(1, 60)), 4)
        for _ in range(draw(st.integers(0, 4))):
            sizes[draw(st.integers(0, len(sizes) - 1))] = draw(st.integers(1, 20))
        index = Index.from_sizes(sizes)
    else:
        index = Index.from_sizes(draw(st.lists(st.integers(1, 9), min_size=1, max_size=30)))
    if draw(st.booleans()):
        mask = np.array(draw(st.lists(st.booleans(), min_size=len(index), max_size=len(index))), np.bool_)
        mask[0] = True
        index = index.select(mask)
    return index


class TableWindows:
    """The plain way: all chunks in their order, in a table."""

    def __init__(self, index: Index, window: int, key: int | None, *, sort: bool = True) -> None:
        chunks = np.arange(index.n_chunks)
        if key is not None:
            chunks = permute(chunks, index.n_chunks, key)
        if sort:
            chunks = chunks[np.lexsort((chunks, np.arange(index.n_chunks) // window))]
        self.index, self.window, self.chunks = index, window, chunks
        self.starts = np.cumsum(index.chunk_sizes(chunks)) - index.chunk_sizes(chunks)
        self.borders = np.append(self.starts[::window], len(index))

    def items(self, positions: np.ndarray, mix_key: int | None) -> np.ndarray:
        if mix_key is not None:
            numbers = np.searchsorted(self.borders, positions, side="right") - 1
            first, size = self.borders[numbers], np.diff(self.borders)[numbers]
            positions = first + permute(positions - first, size, subkeys(mix_key, numbers))
        rows = np.searchsorted(self.starts, positions, side="right") - 1
        return self.index.chunk_starts(self.chunks[rows]) + positions - self.starts[rows]

    def spans(self, window: int) -> np.ndarray:
        held = self.chunks[window * self.window : (window + 1) * self.window]
        first = self.index.chunk_starts(held)
        return np.stack([first, first + self.index.chunk_sizes(held)], axis=1)


@pytest.mark.usefixtures("table_rows")
class TestAgainstATable:
    @given(indexes(), st.integers(1, 20), st.none() | st.integers(0, 2**64 - 1), st.booleans(), st.data())
    def test_windows_are_those_of_a_table_of_all_chunks(
        self, index: Index, window: int, key: int | None, sort: bool, data: st.DataObject
    ) -> None:
        found, wanted = ChunkWindows(index, window, key, sort=sort), TableWindows(index, window, key, sort=sort)
        borders = wanted.borders
        assert found.count == len(borders) - 1
        assert found.starts(np.arange(found.count + 1)).tolist() == borders.tolist()
        numbers = np.repeat(np.arange(found.count), np.diff(borders))
        assert found.numbers(np.arange(len(index))).tolist() == numbers.tolist()
        assert [found.spans(w).tolist() for w in range(found.count)] == [
            wanted.spans(w).tolist() for w in range(found.count)
        ]
        assert np.diff(borders)[found.largest()] == np.diff(borders).max()
        for mix_key in (None, 5):
            items = wanted.items(np.arange(len(index)), mix_key)
            assert found.items(np.arange(len(index)), mix_key).tolist() == items.tolist()
            some = np.array(data.draw(st.lists(st.integers(0, len(index) - 1), max_size=9)), np.int64)
            assert found.items(some, mix_key).tolist() == items[some].tolist()

    @given(st.integers(1, 80), st.integers(1, 80), st.integers(2, 9), st.integers(1, 20), st.integers(0, 99))
    def test_a_subset_in_groups_has_the_groups_of_a_table(
        self, n: int, count: int, near: int, window: int, seed: int
    ) -> None:
        count = min(n, count)
        groups = TableWindows(Index.uniform(count, near), window, key_for(seed, "groups", 2), sort=False)
        sampled = np.sort(permute(np.arange(count), n, key_for(seed, "subset", 2)))
        wanted = sampled[groups.items(np.arange(count), key_for(seed, "window", 2))]
        found = Subset(count, near, window).arrange(Index.uniform(n), seed, 2)
        assert found.items(np.arange(count)).tolist() == wanted.tolist()


@given(st.integers(0, 90), st.integers(1, 12), st.none() | st.integers(1, 9), st.booleans())
def test_the_windows_of_random_chunks_are_the_chunks(n: int, size: int, count: int | None, shuffle: bool) -> None:
    arrangement = RandomChunks(size, count, shuffle=shuffle).arrange(Index.uniform(n), 1, 2)
    found = arrangement.windows
    borders = found.starts(np.arange(found.count + 1)).tolist()
    assert (borders[0], borders[-1]) == (0, arrangement.length)
    items = arrangement.items(np.arange(arrangement.length)).tolist()
    numbers = found.numbers(np.arange(arrangement.length)).tolist()
    for number, (start, stop) in enumerate(pairwise(borders)):
        assert set(numbers[start:stop]) <= {number}
        assert sorted(items[start:stop]) == [item for a, b in found.spans(number).tolist() for item in range(a, b)]


LARGE: dict[str, Callable[[], Index]] = {
    "chunks of 1": lambda: Index.uniform(BILLION, 1),
    "chunks of 100": lambda: Index.uniform(BILLION + 37, 100),
    "chunks of 1,000": lambda: Index.uniform(BILLION, 1000),
    "chunks of 100,000": lambda: Index.uniform(BILLION, 10**5),
    "equal shards in chunks of 64": lambda: Index.from_sizes(np.full(10**5, 64 * 156), chunk=64),
    "shards with a rest": lambda: Index.concat([Index.uniform(10**6 + 9, 1000)] * 1000),
}


@pytest.fixture
def permuted(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Count the elements of every call of a permutation."""
    sizes: list[int] = []

    def count(function: Callable[..., np.ndarray]) -> Callable[..., np.ndarray]:
        def counted(numbers: np.ndarray, *rest: object) -> np.ndarray:
            sizes.append(len(numbers))
            return function(numbers, *rest)

        return counted

    monkeypatch.setattr(windows, "permute", count(permute))
    monkeypatch.setattr(orders, "permute", count(permute))
    monkeypatch.setattr(windows, "unpermute", count(unpermute))
    return sizes


@pytest.mark.parametrize("window", [1, 16, 1000])
@pytest.mark.parametrize("make", LARGE.values(), ids=LARGE)
def test_a_window_shuffle_of_a_billion_items_starts_and_resumes_without_all_chunks(
    make: Callable[[], Index], window: int, permuted: list[int]
) -> None:
    index = make()
    tracemalloc.start()
    try:
        plan = Plan(index, WindowShuffle(window), batch_size=32, seed=3, lanes=2, tail="drop")
        epoch = plan.epoch(1)
        for batch in (0, 1, plan.n_batches // 2, plan.n_batches - 1):
            draw = epoch.draw(batch)
            assert len(set(draw.items.tolist())) == 32
            for part in draw.parts:
                starts, stops = part.window.spans.T
                ends = np.cumsum(stops - starts)
                span = np.searchsorted(ends, part.rows, side="right")
                items = stops[span] - (ends[span] - part.rows)
                assert items.tolist() == draw.items[part.at : part.at + len(part.rows)].tolist()
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < 50_000_000
    assert sum(permuted) < 20_000 + MOST_CUT  # of a window in two lanes


@st.composite
def lane_plans(draw: st.DrawFn) -> tuple[Plan, int]:
    """A plan with windows and lanes, or segments of one, and how many of its epochs cover the first pass."""
    index, batch_size = draw(indexes()), draw(st.integers(1, 9))
    order = WindowShuffle(min(draw(st.integers(1, 7)), index.n_chunks))
    plan = Plan(index, order, batch_size, draw(st.integers(0, 9)), draw(st.integers(1, 4)), tail="short")
    length = draw(st.none() | st.integers(1, 5))
    if length is None:
        return plan, 1
    if draw(st.booleans()):
        return Segments(plan, length), -(-plan.n_batches // length)
    return Segments(plan.with_batches(batch_size, "drop"), length), 1 + len(index) // (batch_size * length)


@given(lane_plans())
def test_windows_of_all_lanes_together_have_every_item_once(case: tuple[Plan, int]) -> None:
    """A window that lies in two lanes is cut: neither reads what only the other one visits."""
    plan, n_epochs = case
    epochs = [plan.epoch(number) for number in range(n_epochs)]
    draws = [draw for epoch in epochs for draw in epoch.draws(range(epoch.n_batches))]
    found = {part.window.key: part.window for draw in draws for part in draw.parts if part.window.epoch == 0}
    held = np.concatenate([np.arange(*span) for each in found.values() for span in each.spans.tolist()])
    stored = plan.index.stored(np.arange(len(plan.index)))
    assert np.sort(held[np.isin(held, stored)]).tolist() == stored.tolist()  # a span of a selection has others, too
    assert plan.lanes > 1 or all(cut is None for _, _, cut in found)
    for draw in draws:
        rows = [np.concatenate([np.arange(*span) for span in part.window.spans])[part.rows] for part in draw.parts]
        assert np.concatenate(rows).tolist() == draw.items.tolist()


def check_windows(index: Index, arrangement: Arrangement, numbers: np.ndarray) -> None:
    """Check the borders of some windows, and that their items are those of their chunks."""
    found = arrangement.windows
    starts, stops = found.starts(numbers), found.starts(numbers + 1)
    for positions, expected in ((starts, numbers), (stops - 1, numbers)):
        assert found.numbers(positions).tolist() == expected.tolist()
    for number, start, stop in zip(numbers.tolist(), starts.tolist(), stops.tolist(), strict=True):
        held = [np.arange(first, last) for first, last in found.spans(number).tolist()]
        assert np.array_equal(np.sort(arrangement.items(np.arange(start, stop))), np.concatenate(held))


@pytest.mark.parametrize("make", list(LARGE.values())[1:], ids=list(LARGE)[1:])
def test_the_windows_of_a_billion_items_lie_end_to_end(make: Callable[[], Index]) -> None:
    index = make()
    arrangement = WindowShuffle(3).arrange(index, 7, 1)
    last = arrangement.windows.count - 1
    check_windows(index, arrangement, np.array([0, 1, last // 3, last - 1, last]))
    assert arrangement.windows.starts(np.array([0, last + 1])).tolist() == [0, len(index)]


def test_a_billion_random_chunks_need_no_table() -> None:
    tracemalloc.start()
    try:
        plan = Plan(Index.uniform(BILLION, 100), RandomChunks(size=1), batch_size=32, seed=3, tail="drop")
        assert plan.arrangement(0).windows.count == BILLION
        assert len(plan.epoch(0).draw(plan.n_batches - 1)) == 32
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < 1_000_000


def test_a_padded_batch_returns_to_the_first_window() -> None:
    plan = Plan(Index.from_sizes([1, 1]), WindowShuffle(1, held=True), batch_size=3, seed=0, tail="pad")
    draw = plan.epoch(0).draw(0)
    assert [part.window.number for part in draw.parts] == [0, 1, 0]
    assert [part.window.spans[0, 0] for part in draw.parts] == draw.items.tolist()
