"""Windows as batches: where they lie, anywhere, side by side or as listed; and the plan whose batches they are."""

import pickle
from collections import Counter
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock import ArraySource, Loader, PlanError, RandomChunks, ResumeError, Shuffle, WindowShuffle
from penstock.core.index import Index
from penstock.plan.epoch import join_ranges
from penstock.plan.plan import Plan
from penstock.plan.window_batches import ListedChunks, PartitionChunks, WindowBatches
from penstock.plan.world import World

Window = tuple[int, int]


def plan(order: Any, total: int = 100, seed: int = 0) -> Any:
    return WindowBatches(Index.uniform(total), order, seed)


def windows(order: Any, total: int, seed: int = 0, epoch: int = 0) -> list[Window]:
    """Return the windows of an epoch, in order."""
    batches = plan(order, total, seed)
    spans = [batches.passes.span(epoch, number) for number in range(batches.n_batches)]
    return [(span.start, span.stop) for span in spans]


def anywhere(size: int, count: int, align: int = 1) -> RandomChunks:
    return RandomChunks(size, count, align, key="windows")


ORDERS = {
    "random": anywhere(7, 9),
    "partition": PartitionChunks(8, 3),
    "listed": ListedChunks(((5, 9), (0, 1), (5, 9), (2, 12))),
}


# -- side by side ------------------------------------------------------------------------------------------------------


@st.composite
def partitions(draw: st.DrawFn) -> tuple[PartitionChunks, int]:
    total, size = draw(st.integers(1, 300)), draw(st.integers(1, 80))
    align = draw(st.integers(1, size if size <= total else 100))
    return PartitionChunks(size, align), total


@given(drawn=partitions(), seed=st.integers(0, 2**40), epoch=st.integers(0, 1000))
def test_a_partition_holds_every_row_exactly_once_in_aligned_windows(
    drawn: tuple[PartitionChunks, int], seed: int, epoch: int
) -> None:
    order, total = drawn
    found = windows(order, total, seed, epoch)
    borders = [0, *(stop for _, stop in sorted(found))]
    assert sorted(found) == list(pairwise(borders))
    assert borders[-1] == total
    assert all(0 < stop - start <= order.size for start, stop in found)
    assert all(start % order.align == 0 for start, _ in found)


@given(drawn=partitions(), seed=st.integers(0, 2**40), epochs=st.lists(st.integers(0, 10_000), min_size=2, max_size=5))
def test_a_partition_has_equally_many_windows_in_each_epoch(
    drawn: tuple[PartitionChunks, int], seed: int, epochs: list[int]
) -> None:
    batches = plan(*drawn, seed)
    assert {batches.passes.windows(epoch).count for epoch in epochs} == {batches.n_batches}


@pytest.mark.parametrize(
    ("total", "size", "align", "shifts"),
    [
        (20, 5, 1, {1, 2, 3, 4}),
        (22, 5, 1, {2, 3, 4}),
        (24, 8, 2, {2, 4, 6}),
        (967_680, 65_536, 2000, set(range(8000, 64_000, 2000))),
        (12, 12, 4, {4, 8}),
        (20, 6, 3, {3}),
        (21, 6, 3, {3}),
        (23, 6, 3, {6}),  # another border would make one window more than in other epochs, so there is none
        (20, 1, 1, {1}),
        (16, 4, 4, {4}),
    ],
)
def test_borders_are_shifted_to_wherever_they_may_lie(total: int, size: int, align: int, shifts: set[int]) -> None:
    order = PartitionChunks(size, align)
    epochs = range(400 if total > 100 else 60)
    assert {sorted(windows(order, total, seed=3, epoch=epoch))[0][1] for epoch in epochs} == shifts


def test_windows_of_a_partition_come_in_another_order_each_epoch() -> None:
    order = PartitionChunks(4, align=4)  # no shift is possible
    first, second = windows(order, 40, epoch=0), windows(order, 40, epoch=1)
    assert sorted(first) == sorted(second)
    assert first != second != sorted(second)
    assert windows(order, 40, seed=1) != first


def test_data_smaller_than_a_window_are_one_window() -> None:
    assert [windows(PartitionChunks(10, align=4), 7, epoch=epoch) for epoch in range(3)] == [[(0, 7)]] * 3
    assert windows(anywhere(10, 3, align=4), 7) == [(0, 7)] * 3


@pytest.mark.parametrize(("size", "align"), [(0, 1), (4, 0), (2.5, 1), (True, 1)])
def test_sizes_of_a_partition_must_be_integers(size: Any, align: Any) -> None:
    with pytest.raises(PlanError, match=r"(size|align) must be an integer >= 1"):
        PartitionChunks(size, align)


# -- anywhere ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("total", "size", "align"), [(23, 8, 4), (23, 8, 1), (24, 8, 4), (20, 1, 1), (9, 9, 3)])
def test_random_windows_begin_at_every_multiple_equally_often_both_ends_included(
    total: int, size: int, align: int
) -> None:
    found = windows(anywhere(size, 4000, align), total, seed=11)
    possible = range(0, total - size + 1, align)
    counts = Counter(start for start, _ in found)
    assert {stop - start for start, stop in found} == {size}
    assert sorted(counts) == list(possible)
    expected = 4000 / len(possible)
    # Chi squared, ten standard deviations above its mean: the draws are fixed, so this holds for ever or never.
    wrong = sum((counts[start] - expected) ** 2 / expected for start in possible)
    assert wrong < len(possible) + 10 * (2 * len(possible)) ** 0.5


def test_random_windows_depend_on_seed_and_epoch_and_key_but_their_count_does_not_change_them() -> None:
    first = windows(anywhere(10, 8), 100_000)
    assert windows(anywhere(10, 5), 100_000) == first[:5]
    assert windows(anywhere(10, 8), 100_000) == first
    others = [windows(anywhere(10, 8), 100_000, seed=seed, epoch=epoch) for seed, epoch in ((1, 0), (0, 1), (1, 1))]
    others.append(windows(RandomChunks(10, 8), 100_000))
    assert len({tuple(some) for some in [first, *others]}) == 5


# -- listed ------------------------------------------------------------------------------------------------------------


def test_listed_windows_come_as_they_are_listed() -> None:
    given_windows = ((5, 9), (0, 1), (5, 9), (2, 12))
    assert windows(ListedChunks(given_windows), 12, epoch=4) == list(given_windows)


@pytest.mark.parametrize("bad", [(3, 3), (4, 2), (-1, 2), (5, 13)])
def test_windows_that_are_empty_inverted_or_outside_are_refused(bad: Window) -> None:
    with pytest.raises(PlanError, match=rf"Chunks must be .* got \({bad[0]}, {bad[1]}\)"):
        plan(ListedChunks(((0, 3), bad)), 12)


def test_the_repr_of_listed_windows_is_short_written_once_and_depends_on_all_of_them() -> None:
    # It is part of every saved state.
    order = ListedChunks(tuple((n, n + 2) for n in range(10_000)))
    assert repr(order).startswith("ListedChunks(10000 windows, ")
    assert len(repr(order)) < 60
    first, second = repr(order), repr(order)
    assert first is second
    different = [ListedChunks(some) for some in (((0, 3), (5, 9)), ((5, 9), (0, 3)), ((0, 3),), ((0, 4), (5, 9)))]
    assert len({repr(some) for some in different}) == 4


# -- the plan ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ORDERS)
def test_a_batch_is_one_window_of_its_own_length_in_storage_order(kind: str) -> None:
    batches = plan(ORDERS[kind], 50, seed=3)
    for number in (0, 2):
        epoch = batches.epoch(number)
        found = windows(ORDERS[kind], 50, seed=3, epoch=number)
        assert epoch.n_batches == len(found) == batches.n_batches
        drawn = list(epoch.draws(range(epoch.n_batches)))
        assert [draw.items.tolist() for draw in drawn] == [list(range(*window)) for window in found]
        assert [(draw.epoch, draw.batch, draw.parts) for draw in drawn] == [(number, n, ()) for n in range(len(found))]
        assert [draw.items.tolist() for draw in drawn] == [epoch.draw(n).items.tolist() for n in range(len(found))]
        some = [item for window in found[1:3] for item in range(*window)]
        assert np.concatenate(list(epoch.items(range(1, 3)))).tolist() == some
        with pytest.raises(PlanError, match=f"batch must be >= 0 and < {len(found)}"):
            epoch.draw(len(found))
    assert batches.length == sum(stop - start for start, stop in found)
    assert batches.passes.batch_size >= max(stop - start for start, stop in found)


@pytest.mark.parametrize("kind", ORDERS)
def test_positions_are_those_of_the_order(kind: str) -> None:
    batches = plan(ORDERS[kind], 50, seed=3)
    base = Plan(Index.uniform(50), ORDERS[kind], batch_size=1, seed=3)
    for number in (0, 1):
        starts, stops, _ = batches.epoch(number).borders(np.arange(batches.n_batches))
        arrangement = base.arrangement(number)
        flat = join_ranges(starts, stops - starts) - number * batches.length
        assert flat.tolist() == list(range(batches.length))
        in_order = np.concatenate([draw.items for draw in batches.epoch(number).draws(range(batches.n_batches))])
        assert arrangement.items(flat).tolist() == in_order.tolist()


@pytest.mark.parametrize("kind", ["random", "listed"])
def test_an_item_in_two_windows_has_randomness_of_its_own_in_each(kind: str) -> None:
    batches = plan(ORDERS[kind], 12, seed=3)
    drawn = list(batches.epoch(1).draws(range(batches.n_batches)))
    paths = [draw.seed_path(row) for draw in drawn for row in range(len(draw))]
    assert len(set(paths)) == len(paths) > len({path[:2] for path in paths})


def test_ranks_share_the_windows() -> None:
    batches = plan(ORDERS["partition"], 50)
    found = windows(ORDERS["partition"], 50)
    for rank in range(2):
        share = batches.epoch(0).share(World(rank, 2), start=1)
        assert [draw.items.tolist() for draw in share.draws()] == [
            list(range(*window)) for window in found[1 + rank :: 2][: share.n_steps]
        ]


def test_windows_of_a_selection_hold_the_items_that_are_selected() -> None:
    index = Index.uniform(20).select(np.arange(0, 20, 2))
    batches = WindowBatches(index, ListedChunks(((1, 4), (0, 2))))
    assert [batches.epoch(0).draw(n).items.tolist() for n in range(2)] == [[2, 4, 6], [0, 2]]


def test_the_identity_names_the_order_and_that_windows_are_batches() -> None:
    identities = [plan(order).identity() for order in (*ORDERS.values(), PartitionChunks(8, 2), anywhere(7, 10))]
    identities.append(Plan(Index.uniform(100), ORDERS["random"], batch_size=7).identity())
    assert len({str(identity) for identity in identities}) == len(identities)


def test_a_plan_of_windows_pickles_compares_and_describes_itself() -> None:
    batches = plan(ORDERS["partition"], 50, seed=4)
    assert isinstance(batches, Plan)
    again = pickle.loads(pickle.dumps(batches))
    assert again == batches != plan(ORDERS["partition"], 50, seed=5)
    assert again.order_hash(2) == batches.order_hash(2) != batches.order_hash(1)
    assert "taken directly from the source" in batches.explain(0)
    assert batches.mixing().read_amplification == 1.0


@pytest.mark.parametrize("order", [Shuffle(), WindowShuffle(1), RandomChunks(4, shuffle=True)], ids=repr)
def test_orders_without_windows_of_consecutive_items_are_refused(order: Any) -> None:
    with pytest.raises(PlanError, match=r"order must have windows of consecutive items, as RandomChunks\(4\), got"):
        WindowBatches(Index.uniform(9), order)


# -- in a loader -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ORDERS)
@pytest.mark.parametrize("options", [{}, {"num_workers": 2}])
def test_a_loader_delivers_windows_and_resumes_after_any_of_them(kind: str, options: dict[str, Any]) -> None:
    source = ArraySource({"x": np.arange(60)})
    batches = WindowBatches(source.index, ORDERS[kind], 3)
    wanted = [[list(range(*some)) for some in windows(ORDERS[kind], 60, 3, epoch)] for epoch in range(2)]
    for done in range(batches.n_batches + 1):
        with Loader(source, batches, **options) as loader:
            found = [batch["x"].tolist() for _, batch in zip(range(done), loader, strict=False)]
            state = loader.state_dict()
        with Loader(source, batches) as resumed:
            resumed.load_state_dict(state)
            found += [batch["x"].tolist() for batch in resumed]
            assert found == wanted[0]
            assert [batch["x"].tolist() for batch in resumed] == wanted[1]


def test_a_state_of_other_windows_is_refused() -> None:
    source = ArraySource({"x": np.arange(60)})
    state = Loader(source, WindowBatches(source.index, PartitionChunks(8, 3))).state_dict()
    with Loader(source, WindowBatches(source.index, PartitionChunks(8, 2))) as loader:
        with pytest.raises(ResumeError, match="the order changed from"):
            loader.load_state_dict(state)
