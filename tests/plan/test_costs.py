"""What an epoch costs is what a simulation of every cache, item by item, says."""

import math
from collections import OrderedDict

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock import OptionError, Plan, Segments, Sequential, Shuffle, WindowShuffle
from penstock.core.index import Index
from penstock.core.protocols import Order
from penstock.plan.balanced import Balanced
from penstock.plan.costs import Download, EpochCosts, Prices

MB = 1_000_000
ORDERS = [Sequential(), Shuffle(), WindowShuffle(3), WindowShuffle(3, held=False)]


def costs_of(plan: Plan, item_bytes: int, cached: float, epoch: int = 0) -> EpochCosts:
    stored = plan.index.n_stored * item_bytes
    found = plan.mixing(epoch, max_batches=1, stored_bytes=stored, cache_bytes=round(cached * stored)).costs
    assert found is not None
    return found


def items_of(plan: Plan, epoch: int) -> list[int]:
    return [item for items in plan.epoch(epoch).items(range(plan.n_batches)) for item in items.tolist()]


def count_optimal(before: list[int], after: list[int], room: int) -> int:
    """Return the misses of the best cache of all (Belady), in the second of two epochs, cache full of the best."""
    sequence = before + after
    following: dict[int, int] = {}
    next_use = [0] * len(sequence)
    for place in range(len(sequence) - 1, -1, -1):
        next_use[place] = following.get(sequence[place], len(sequence) + sequence[place])
        following[sequence[place]] = place
    held: dict[int, int] = {}
    misses = 0
    for place, item in enumerate(sequence):
        if item not in held:
            misses += place >= len(before)
        held[item] = next_use[place]
        if len(held) > room:
            del held[max(held, key=lambda each: held[each])]
    return misses


def count_lru(before: list[int], after: list[int], room: int) -> int:
    held: OrderedDict[int, None] = OrderedDict()
    misses = 0
    for place, item in enumerate(before + after):
        misses += item not in held and place >= len(before)
        held[item] = None
        held.move_to_end(item)
        if len(held) > room:
            held.popitem(last=False)
    return misses


@given(n_items=st.integers(2, 60), room=st.integers(1, 60), seed=st.integers(0, 9), order=st.sampled_from(ORDERS[:2]))
def test_a_cache_that_knows_the_plan_downloads_one_minus_c_and_none_does_better(
    n_items: int, room: int, seed: int, order: Order
) -> None:
    plan = Plan(Index.uniform(n_items), order, batch_size=4, seed=seed)
    found = plan.mixing(stored_bytes=n_items * MB, cache_bytes=room * MB).costs
    assert found is not None
    assert found.later.n_bytes == max(0, n_items - room) * MB
    before, after = items_of(plan, 0), items_of(plan, 1)
    assert found.later.n_bytes / MB <= count_optimal(before, after, room)
    assert found.later_lru.n_bytes == count_lru(before, after, room) * MB


@pytest.mark.parametrize(("cached", "expected"), [(0.25, 0.97), (0.5, 0.85), (0.75, 0.6), (0.9, 0.33)])
def test_an_lru_cache_of_shuffled_epochs_downloads_most_of_them_again(cached: float, expected: float) -> None:
    found = costs_of(Plan(Index.uniform(1000), Shuffle(), batch_size=10), MB, cached)
    assert found.later.n_bytes == pytest.approx((1 - cached) * 1000 * MB)
    assert found.later_lru.n_bytes == pytest.approx(expected * 1000 * MB, rel=0.1)


@pytest.mark.parametrize("order", [Shuffle(), WindowShuffle(16), WindowShuffle(16, held=False)], ids=str)
def test_of_too_many_items_to_visit_the_lru_figure_is_the_limit_of_large_sets(order: Order) -> None:
    index = Index.uniform(10**9, chunk=64)
    found = costs_of(Plan(index, order, batch_size=10), 1000, 0.5)
    assert found.later_lru.n_bytes == pytest.approx(0.5 * (1 - math.log(0.5)) * 1e12)
    small = costs_of(Plan(Index.uniform(2**14, chunk=2), order, batch_size=10), 1000, 0.5)
    assert small.later_lru.n_bytes / small.stored_bytes == pytest.approx(0.8466, rel=0.02)


@pytest.mark.parametrize("order", [Sequential(), WindowShuffle(16, permute_chunks=False)], ids=str)
@pytest.mark.parametrize("n_items", [2**14, 10**9])
def test_an_lru_cache_keeps_nothing_of_epochs_in_storage_order(order: Order, n_items: int) -> None:
    found = costs_of(Plan(Index.uniform(n_items, chunk=64), order, batch_size=10), 1000, 0.5)
    assert found.later_lru.n_bytes == n_items * 1000
    assert found.later.n_bytes == n_items * 500


@pytest.mark.parametrize("order", ORDERS, ids=str)
def test_a_cache_of_everything_downloads_nothing_again_and_none_everything(order: Order) -> None:
    plan = Plan(Index.uniform(1200, chunk=10), order, batch_size=10)
    whole = costs_of(plan, 10_000, 1.0)
    assert whole.first.n_bytes == 1200 * 10_000
    assert (whole.later, whole.later_lru) == (Download(0, 0), Download(0, 0))
    none = costs_of(plan, 10_000, 0.0)
    assert none.later == none.later_lru == none.first


# -- requests ----------------------------------------------------------------------------------------------------------


def test_scattered_items_are_a_request_each_and_neighbours_one_of_up_to_2_mib() -> None:
    index = Index.uniform(4_000_000, chunk=64)
    scattered = costs_of(Plan(index, Shuffle(), batch_size=32), 10_000, 0.0)
    assert scattered.first.requests == pytest.approx(4_000_000, rel=0.01)
    in_sequence = costs_of(Plan(index, Sequential(), batch_size=32), 10_000, 0.0)
    assert in_sequence.first.requests == pytest.approx(4e10 / (1 << 21), rel=0.05)


def test_the_chunks_of_windows_are_joined() -> None:
    # 64 items of 10 kB: a chunk is one request of 640 kB, and neighbouring chunks are one of up to 2 MiB.
    index = Index.uniform(640_000, chunk=64)
    assert costs_of(Plan(index, WindowShuffle(16), batch_size=32), 10_000, 0.0).first.requests == pytest.approx(
        10_000, rel=0.02
    )
    assert costs_of(
        Plan(index, WindowShuffle(16, permute_chunks=False), batch_size=32), 10_000, 0.0
    ).first.requests == pytest.approx(5 * 625, rel=0.02)


def test_windows_that_are_not_held_cost_about_the_same() -> None:
    index = Index.uniform(640_000, chunk=64)
    held, free = (Plan(index, WindowShuffle(16, held=held), batch_size=32) for held in (True, False))
    assert costs_of(free, 10_000, 0.0).first.requests == pytest.approx(
        costs_of(held, 10_000, 0.0).first.requests, rel=0.4
    )


def test_an_item_is_never_cut_and_two_large_ones_never_joined() -> None:
    plan = Plan(Index.uniform(100), Sequential(), batch_size=4)
    assert costs_of(plan, 3 << 20, 0.0).first.requests == 100
    assert costs_of(plan, 64 << 20, 0.5).later.requests == 50


def test_if_all_of_it_is_kept_scattered_items_come_with_their_span() -> None:
    plan = Plan(Index.uniform(4_000_000, chunk=64), Shuffle(), batch_size=32)
    assert costs_of(plan, 10_000, 1.0).first.requests == pytest.approx(4e10 / 27e4, rel=0.02)


# -- plans that visit something else than each item once ---------------------------------------------------------------


def test_of_a_selection_only_the_selected_items_count() -> None:
    index = Index.uniform(1000).select(np.arange(200))
    found = Plan(index, Shuffle(), batch_size=10).mixing(stored_bytes=1000 * MB, cache_bytes=100 * MB).costs
    assert found is not None
    assert (found.stored_bytes, found.first.n_bytes, found.later.n_bytes) == (200 * MB, 200 * MB, 100 * MB)


def test_items_that_come_more_often_are_downloaded_more_often() -> None:
    labels = np.array([0] * 90 + [1] * 10)
    plan = Plan(Index.uniform(100), Balanced(labels), batch_size=10)
    found = costs_of(plan, MB, 0.5)
    visited = len(set(items_of(plan, 0)))
    assert found.stored_bytes == visited * MB
    assert found.first.n_bytes == plan.length * MB
    assert 0 < found.later.n_bytes <= found.later_lru.n_bytes < found.first.n_bytes


def test_the_epochs_of_segments_cost_what_a_pass_costs() -> None:
    plan = Plan(Index.uniform(100), Shuffle(), batch_size=10)
    assert costs_of(Segments(plan, length=3), MB, 0.5, epoch=2) == costs_of(plan, MB, 0.5)


def test_a_plan_without_items_costs_nothing() -> None:
    found = Plan(Index.uniform(0), Shuffle(), batch_size=10).mixing(stored_bytes=0, cache_bytes=10).costs
    assert found is not None
    assert found.first == found.later == Download(0, 0)


# -- words and money ---------------------------------------------------------------------------------------------------


def test_prices_are_per_thousand_requests_and_per_gb() -> None:
    download = Download(requests=2_000_000, n_bytes=50 * 10**9)
    assert download.price_usd(Prices()) == pytest.approx(0.8)
    assert download.price_usd(Prices(0.005, 0.09)) == pytest.approx(10 + 4.5)
    found = EpochCosts(10, 5, download, download, download).to_dict(Prices())
    assert found["first_epoch"] == {"requests": 2_000_000, "bytes": 50 * 10**9, "usd": pytest.approx(0.8)}


def test_the_costs_are_part_of_what_mixing_says() -> None:
    plan = Plan(Index.uniform(1000), Shuffle(), batch_size=10)
    text = str(plan.mixing(stored_bytes=1000 * MB, cache_bytes=500 * MB))
    assert "the first epoch downloads 1 GB in" in text
    assert "each later one 0.5 GB in" in text
    assert "cache of 0.5 GB (0.85 GB if it were LRU)" in text
    assert plan.mixing().costs is None


def test_a_cache_needs_the_size_of_what_it_caches() -> None:
    plan = Plan(Index.uniform(10), Shuffle(), batch_size=2)
    with pytest.raises(OptionError, match=r"cache_bytes=5 needs stored_bytes, such as source\.stored_bytes"):
        plan.mixing(cache_bytes=5)
    with pytest.raises(OptionError, match="cache_bytes must be an integer >= 0, got -1"):
        plan.mixing(stored_bytes=10, cache_bytes=-1)
    with pytest.raises(OptionError, match=r"stored_bytes must be an integer >= 0, got 1\.5"):
        plan.mixing(stored_bytes=1.5)  # type: ignore[arg-type]  # what is tested
