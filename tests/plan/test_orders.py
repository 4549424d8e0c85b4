"""Orders that visit each item once, or some of the items."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.errors import PlanError
from penstock.core.index import Index
from penstock.core.protocols import Order
from penstock.plan.balanced import Balanced
from penstock.plan.orders import RandomChunks, Sequential, Shuffle, Subset, WindowShuffle, shuffle_within
from penstock.plan.plan import Plan


def visit_items(order: Order, index: Index, seed: int = 0, epoch: int = 0) -> list[int]:
    """Return the items of an epoch in order."""
    arrangement = order.arrange(index, seed, epoch)
    return arrangement.items(np.arange(arrangement.length)).tolist()


def test_sequential_is_storage_order_in_every_epoch() -> None:
    index = Index.uniform(7, 3)
    assert [visit_items(Sequential(), index, seed, epoch) for seed, epoch in ((0, 0), (1, 0), (0, 9))] == [
        [0, 1, 2, 3, 4, 5, 6]
    ] * 3


@pytest.mark.parametrize(
    "order",
    [Shuffle(), WindowShuffle(4), Subset(50), RandomChunks(10, count=10), Balanced([0, 1] * 50)],
    ids=lambda order: type(order).__name__,
)
def test_every_seed_and_every_epoch_has_an_order_of_its_own(order: Order) -> None:
    index = Index.uniform(100, 5)
    orders = {tuple(visit_items(order, index, seed, epoch)) for seed in range(5) for epoch in range(5)}
    assert len(orders) == 25
    assert visit_items(order, index, seed=0, epoch=1) != visit_items(order, index, seed=1, epoch=0)


@pytest.mark.parametrize("window", [1, 3, 8])
def test_window_shuffle_permutes_the_chunks_and_the_items_of_a_window(window: int) -> None:
    index = Index.from_sizes([4, 7, 1, 5, 6, 3, 8, 2])
    order = WindowShuffle(window)
    arrangement = order.arrange(index, 0, 0)
    items = visit_items(order, index)
    borders = arrangement.windows.starts(np.arange(arrangement.windows.count + 1)).tolist()
    assert (borders[0], borders[-1]) == (0, len(index))
    held = []
    for number, (start, stop) in enumerate(pairwise(borders)):
        spans = arrangement.windows.spans(number).tolist()
        assert sorted(items[start:stop]) == [item for a, b in spans for item in range(a, b)]
        assert len(spans) <= window
        held += spans
    chunk_spans = [[0, 4], [4, 11], [11, 12], [12, 17], [17, 23], [23, 26], [26, 34], [34, 36]]
    assert sorted(held) == chunk_spans
    assert window == 8 or held != chunk_spans
    assert items != sorted(items)


def test_window_shuffle_mixes_the_chunks_of_a_window() -> None:
    items = visit_items(WindowShuffle(4), Index.uniform(400, 100))
    chunks_in_head = np.bincount(np.array(items[:100]) // 100, minlength=4)
    assert chunks_in_head.min() > 10


def test_every_window_is_permuted_by_itself() -> None:
    # Ten windows of one chunk each: as places within their chunks, no two have the same order.
    items = np.array(visit_items(WindowShuffle(1), Index.uniform(200, 20))).reshape(10, 20)
    assert len({tuple(row) for row in (items % 20).tolist()}) == 10
    assert all(len(set(row)) == 1 for row in (items // 20).tolist())


def test_chunks_are_visited_in_any_order_equally_often() -> None:
    index = Index.uniform(30, 10)
    firsts = [visit_items(WindowShuffle(1), index, epoch=epoch)[::10] for epoch in range(600)]
    kinds, counts = np.unique([[item // 10 for item in first] for first in firsts], axis=0, return_counts=True)
    assert len(kinds) == 6
    assert ((counts - 100) ** 2 / 100).sum() < 25  # five degrees of freedom: passed once in 7 000 tries


@pytest.mark.parametrize("window", [1, 3, 8])
def test_chunks_that_are_not_permuted_follow_storage_order_and_items_mix_within_a_window(window: int) -> None:
    index = Index.from_sizes([4, 7, 1, 5, 6, 3, 8, 2])
    order = WindowShuffle(window, permute_chunks=False)
    items, borders = visit_items(order, index), [0, 4, 11, 12, 17, 23, 26, 34, 36]
    for first in range(0, 8, window):
        start, stop = borders[first], borders[min(first + window, 8)]
        assert sorted(items[start:stop]) == list(range(start, stop))
        assert stop - start < 4 or items[start:stop] != list(range(start, stop))


def test_items_that_are_not_permuted_come_as_they_are_stored_chunk_by_chunk() -> None:
    index = Index.from_sizes([4, 7, 1, 5, 6, 3, 8, 2])
    runs = {0: 4, 4: 7, 11: 1, 12: 5, 17: 6, 23: 3, 26: 8, 34: 2}
    items, firsts = visit_items(WindowShuffle(1, permute_items=False), index), []
    while items:
        firsts.append(items[0])
        length = runs[items[0]]
        assert items[:length] == list(range(items[0], items[0] + length))
        items = items[length:]
    assert sorted(firsts) == sorted(runs)
    assert firsts != sorted(firsts)


def test_a_window_of_several_chunks_whose_items_are_not_permuted_is_in_storage_order() -> None:
    index = Index.uniform(60, 5)
    items = visit_items(WindowShuffle(3, permute_items=False), index)
    windows = [items[start : start + 15] for start in range(0, 60, 15)]
    assert windows == [sorted(window) for window in windows]
    assert items != sorted(items)


def test_without_permutations_the_order_is_storage_order() -> None:
    index = Index.from_sizes([4, 0, 7, 1, 5])
    order = WindowShuffle(2, permute_chunks=False, permute_items=False)
    assert [visit_items(order, index, seed, epoch) for seed, epoch in ((0, 0), (3, 0), (0, 5))] == [list(range(17))] * 3


@pytest.mark.parametrize("flag", ["permute_chunks", "permute_items"])
def test_what_is_still_permuted_differs_between_epochs_and_seeds(flag: str) -> None:
    order = WindowShuffle(2, **{flag: False})
    index = Index.uniform(100, 5)
    orders = {tuple(visit_items(order, index, seed, epoch)) for seed in range(4) for epoch in range(4)}
    assert len(orders) == 16


@pytest.mark.parametrize("flags", [{}, {"permute_chunks": False}, {"permute_items": False}], ids=str)
def test_held_false_gives_the_same_sequence_without_windows(flags: dict[str, bool]) -> None:
    index = Index.from_sizes([4, 7, 1, 5, 6, 3, 8, 2])
    held, free = WindowShuffle(3, **flags), WindowShuffle(3, **flags, held=False)
    for epoch in range(3):
        assert visit_items(free, index, 5, epoch) == visit_items(held, index, 5, epoch)
    assert held.arrange(index, 5, 0).windows is not None
    assert free.arrange(index, 5, 0).windows is None
    assert Plan(index, held, batch_size=5).epoch(0).draw(1).parts
    assert Plan(index, free, batch_size=5).epoch(0).draw(1).parts == ()


def test_a_state_does_not_depend_on_held() -> None:
    index = Index.uniform(40, 5)
    held, free = (Plan(index, WindowShuffle(2, held=held), batch_size=4) for held in (True, False))
    assert held.identity() == free.identity()
    assert held.identity() != Plan(index, WindowShuffle(2, permute_items=False), batch_size=4).identity()


def test_a_flag_at_its_default_leaves_the_repr_as_it_was() -> None:
    assert repr(WindowShuffle(4, permute_chunks=True, permute_items=True, held=False)) == "WindowShuffle(window=4)"


@given(st.integers(1, 60), st.integers(1, 9), st.data())
def test_a_subset_has_as_many_different_items_as_asked_for(n: int, chunk: int, data: st.DataObject) -> None:
    count = data.draw(st.integers(1, n))
    items = visit_items(Subset(count), Index.uniform(n, chunk), seed=data.draw(st.integers(0, 99)))
    assert len(items) == len(set(items)) == count
    assert set(items) <= set(range(n))


def test_every_epoch_has_another_subset_and_every_item_comes() -> None:
    epochs = [frozenset(visit_items(Subset(5), Index.uniform(50), epoch=epoch)) for epoch in range(100)]
    assert len(set(epochs)) == 100
    assert set().union(*epochs) == set(range(50))


@given(
    n=st.integers(1, 60),
    size=st.integers(1, 20),
    count=st.none() | st.integers(1, 8),
    align=st.integers(1, 7),
    epoch=st.integers(0, 50),
)
def test_stretches_are_consecutive_items_and_start_at_multiples_of_align(
    n: int, size: int, count: int | None, align: int, epoch: int
) -> None:
    order = RandomChunks(size, count=count, align=align)
    length = min(size, n)
    runs = np.array(visit_items(order, Index.uniform(n), epoch=epoch)).reshape(-1, length)
    assert len(runs) == (n // length if count is None else count)
    for run in runs.tolist():
        assert run == list(range(run[0], run[0] + length))
        assert run[0] % align == 0
        assert 0 <= run[0] <= n - length


def test_stretches_start_at_every_possible_place() -> None:
    starts = np.array(visit_items(RandomChunks(4, count=400), Index.uniform(10))).reshape(-1, 4)[:, 0]
    assert set(starts.tolist()) == {0, 1, 2, 3, 4, 5, 6}
    aligned = np.array(visit_items(RandomChunks(4, count=400, align=3), Index.uniform(10))).reshape(-1, 4)[:, 0]
    assert set(aligned.tolist()) == {0, 3, 6}


@pytest.mark.parametrize("align", [1, 3, 100])
def test_a_stretch_is_all_items_if_there_are_fewer_than_its_size(align: int) -> None:
    assert visit_items(RandomChunks(10, count=3, align=align), Index.uniform(4)) == [0, 1, 2, 3] * 3
    assert visit_items(RandomChunks(10, align=align), Index.uniform(4)) == [0, 1, 2, 3]


def test_shuffled_stretches_have_the_same_items_in_another_order() -> None:
    index = Index.uniform(500)
    plain = np.array(visit_items(RandomChunks(20, count=30), index)).reshape(30, 20)
    mixed = np.array(visit_items(RandomChunks(20, count=30, shuffle=True), index)).reshape(30, 20)
    assert np.array_equal(np.sort(mixed, axis=1), plain)
    # Every run in an order of its own.
    assert len({tuple(row) for row in (mixed - plain[:, :1]).tolist()}) == 30


def test_batches_of_the_stretch_size_are_one_read_each() -> None:
    epoch = Plan(Index.uniform(100, 10), RandomChunks(8, count=5), batch_size=8, seed=2).epoch(0)
    for draw in epoch.draws(range(5)):
        (part,) = draw.parts
        first = int(draw.items[0])
        assert draw.items.tolist() == list(range(first, first + 8))
        assert part.window.spans.tolist() == [[first, first + 8]]


def test_visits_tell_stretches_that_share_an_item_apart() -> None:
    draws = list(Plan(Index.uniform(6), RandomChunks(4, count=20), batch_size=4).epoch(0).draws(range(20)))
    assert [draw.visits.tolist() for draw in draws] == [[run] * 4 for run in range(20)]


def test_a_window_larger_than_the_data_is_refused_with_the_largest_that_fits() -> None:
    index = Index.uniform(10, 4)
    with pytest.raises(PlanError, match=r"window must be <= 3, the number of chunks, got 4"):
        Plan(index, WindowShuffle(4), batch_size=2)
    assert sorted(visit_items(WindowShuffle(3), index)) == list(range(10))


@pytest.mark.parametrize(
    "order",
    [Sequential(), Shuffle(), WindowShuffle(16), Subset(5), RandomChunks(4), RandomChunks(4, count=3)],
    ids=repr,
)
def test_every_order_is_empty_over_no_items(order: Order) -> None:
    assert visit_items(order, Index.uniform(0)) == []
    assert Plan(Index.uniform(0), order, batch_size=2, tail="pad").n_batches == 0


def test_the_repr_names_all_that_the_sequence_depends_on() -> None:
    different = [
        Sequential(),
        Shuffle(),
        WindowShuffle(2),
        WindowShuffle(3),
        WindowShuffle(2, permute_chunks=False),
        WindowShuffle(2, permute_items=False),
        WindowShuffle(2, permute_chunks=False, permute_items=False),
        Subset(2),
        Subset(3),
        RandomChunks(4),
        RandomChunks(5),
        RandomChunks(4, count=2),
        RandomChunks(4, align=2),
        RandomChunks(4, shuffle=True),
        RandomChunks(4, key="windows"),
    ]
    assert len({repr(order) for order in different}) == len(different)
    assert repr(RandomChunks(4, count=2)) == repr(RandomChunks(4, count=2))


def test_the_defaults_of_orders_are_what_they_were() -> None:
    assert WindowShuffle() == WindowShuffle(window=16, permute_chunks=True, permute_items=True, held=True)
    assert Subset(5) == Subset(count=5, near=1, window=16)
    assert RandomChunks(5) == RandomChunks(size=5, count=None, align=1, shuffle=False)


@pytest.mark.parametrize(("reach_items", "window"), [(1, 1), (74, 1), (76, 2), (200, 4), (224, 4), (226, 5), (999, 20)])
def test_a_shuffle_within_reach_has_a_window_of_about_that_many_items(reach_items: int, window: int) -> None:
    index = Index.uniform(1000, 50)
    assert shuffle_within(index, reach_items) == WindowShuffle(window, permute_chunks=True, held=False)
    assert shuffle_within(index, reach_items, permute_chunks=False, held=True) == WindowShuffle(
        window, permute_chunks=False, held=True
    )


@pytest.mark.parametrize("reach_items", [1000, 1001, 10**9])
def test_a_shuffle_that_reaches_all_items_is_exact_unless_windows_are_held(reach_items: int) -> None:
    index = Index.uniform(1000, 50)
    assert shuffle_within(index, reach_items) == Shuffle()
    assert shuffle_within(index, reach_items, held=True) == WindowShuffle(20)


def test_a_shuffle_within_reach_of_no_items_is_a_shuffle_of_none() -> None:
    assert shuffle_within(Index.uniform(0), 10) == Shuffle()
    assert shuffle_within(Index.uniform(0), 10, held=True) == WindowShuffle(1)
