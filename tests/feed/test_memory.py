import inspect
from typing import Any

import numpy as np
import pytest
from penstock_test_parts import Pairs, numbered_source

from penstock import (
    ArraySource,
    DatasetSource,
    Index,
    Loader,
    OptionError,
    Plan,
    RunOptions,
    Sequential,
    WindowShuffle,
)
from penstock.feed.memory import max_window_items, window_capacity

ITEM = 1_000_000  # bytes: large enough that draws are made one at a time


def big(n: int = 40, chunk: int = 5) -> ArraySource:
    return ArraySource({"x": np.broadcast_to(np.uint8(0), (n, ITEM - 8)), "t": np.zeros(n)}, chunk_items=chunk)


def estimate(plan_order, *, workers: int = 0, executor: str = "auto", batch_size: int = 4, **options):
    source = big()
    plan = Plan(source.index, plan_order, batch_size=batch_size)
    with Loader(source, plan, num_workers=workers, options=RunOptions(executor=executor, **options)) as loader:
        return loader.memory_estimate()


def test_inline_holds_the_batch_in_progress_and_the_one_in_use() -> None:
    found = estimate(Sequential())
    assert (found.batch_bytes, found.batches_held, found.window_bytes, found.device_bytes) == (4 * ITEM, 2, 0, 0)
    assert found.host_bytes == 8 * ITEM


@pytest.mark.parametrize(("workers", "prefetch"), [(1, 1), (2, 2), (4, 3)])
def test_threads_hold_the_batches_they_may_be_ahead(workers: int, prefetch: int) -> None:
    found = estimate(Sequential(), workers=workers, executor="threads", prefetch=prefetch)
    assert found.batches_held == workers * prefetch + 1
    assert found.host_bytes == found.batches_held * 4 * ITEM


@pytest.mark.parametrize(("batch_size", "ahead"), [(1, 16), (4, 4), (16, 2)])
def test_by_default_large_batches_are_made_less_far_ahead(batch_size: int, ahead: int) -> None:
    found = estimate(Sequential(), workers=2, executor="threads", batch_size=batch_size)
    assert found.batches_held == 2 * ahead + 1


def test_processes_hold_at_least_what_threads_do() -> None:
    threads = estimate(Sequential(), workers=2, executor="threads", prefetch=2)
    processes = estimate(Sequential(), workers=2, executor="processes", prefetch=2)
    assert processes.host_bytes >= threads.host_bytes
    # A worker may be making one batch more than it has ready.
    assert processes.batches_held == 2 * (2 + 1) + 1


@pytest.mark.parametrize("workers", [0, 2])
def test_a_window_counts_with_all_of_its_chunks(workers: int) -> None:
    found = estimate(WindowShuffle(3), workers=workers, executor="threads" if workers else "auto")
    assert found.window_bytes == 15 * ITEM
    # At least the one in use; with threads also the one that is read ahead.
    assert found.windows_held >= (2 if workers else 1)
    assert found.host_bytes == found.batches_held * 4 * ITEM + found.windows_held * 15 * ITEM


def test_the_last_window_may_be_smaller_but_the_largest_counts() -> None:
    source = numbered_source(23, chunk=5)
    plan = Plan(source.index, WindowShuffle(2), batch_size=4)
    with Loader(source, plan) as loader:
        assert loader.memory_estimate().window_bytes == 10 * 16


def test_small_batches_count_as_often_as_they_are_made_at_once() -> None:
    source = numbered_source(400)
    with Loader(source, Plan(source.index, Sequential(), batch_size=2)) as loader:
        found = loader.memory_estimate()
    assert (found.batch_bytes, found.batches_held) == (32, 65)


@pytest.mark.parametrize(
    ("kilobytes", "at_once"), [(1, 64), (32, 64), (33, 62), (64, 32), (1024, 2), (1025, 1), (2048, 1), (2049, 1)]
)
def test_batches_of_together_two_megabytes_are_made_at_once_and_at_most_64(kilobytes: int, at_once: int) -> None:
    source = ArraySource({"x": np.broadcast_to(np.uint8(0), (100, kilobytes << 10))})
    with Loader(source, Plan(source.index, Sequential(), batch_size=1)) as loader:
        assert loader.memory_estimate().batches_held == at_once + 1


@pytest.mark.parametrize(
    ("sizes", "lanes", "in_flight", "held", "ahead"),
    [
        # items, chunk, chunks per window, batch size, lanes of the plan
        ((400, 10, 4, 8, 1), 1, 0, 3, 0),
        ((400, 10, 4, 8, 2), 2, 0, 4, 0),
        ((400, 10, 1, 64, 1), 1, 0, 9, 0),  # a batch of seven windows
        ((40, 10, 4, 8, 1), 1, 0, 1, 0),  # there is only one window
        ((400, 10, 4, 8, 1), 1, 2, 2, 2),
        ((400, 10, 4, 8, 4), 2, 4, 4, 8),
        ((4000, 100, 8, 4, 2), 2, 6, 4, 392),
        ((4000, 100, 1, 16, 1), 1, 5, 3, 1),
        ((4000, 100, 2, 16, 1), 3, 7, 6, 8),
        ((400, 10, 1, 64, 1), 1, 4, 40, 1),  # all there are
    ],
)
def test_as_many_windows_are_held_as_the_batches_in_progress_reach_over(
    sizes: tuple[int, ...], lanes: int, in_flight: int, held: int, ahead: int
) -> None:
    items, chunk, window, batch_size, plan_lanes = sizes
    plan = Plan(Index.uniform(items, chunk), WindowShuffle(window), batch_size, lanes=plan_lanes)
    assert window_capacity(plan, lanes=lanes, in_flight=in_flight) == (held, ahead)


def test_orders_without_windows_hold_none() -> None:
    for plan in (Plan(Index.uniform(9), Sequential(), 2), Plan(Index.uniform(0), WindowShuffle(1), 2)):
        assert window_capacity(plan, lanes=1, in_flight=2) == (0, 0)
        assert max_window_items(plan) == 0


@pytest.mark.parametrize(("executor", "windows"), [("threads", 4), ("processes", 9)])
def test_each_worker_process_holds_windows_of_its_own(executor: str, windows: int) -> None:
    source = ArraySource({"x": np.zeros((40, 4), np.float32)}, chunk_items=5)
    plan = Plan(source.index, WindowShuffle(3), batch_size=4, lanes=2)
    with Loader(source, plan, num_workers=3, options=RunOptions(executor=executor)) as loader:
        found = loader.memory_estimate()
    # Of the three windows, one lies in two lanes: in threads, which need all of them, it counts twice.
    assert (found.batches_held, found.windows_held, found.window_bytes) == (3 * 2 * 64 + 1, windows, 15 * 16)


@pytest.mark.parametrize(("device_ahead", "n_batches"), [(1, 3), (4, 6)])
def test_a_device_holds_the_batch_in_use_the_one_before_it_and_those_ahead(device_ahead: int, n_batches: int) -> None:
    source = big()
    plan, options = Plan(source.index, Sequential(), batch_size=4), RunOptions(device_ahead=device_ahead)
    with Loader(source, plan, device="meta", options=options) as loader:
        found = loader.memory_estimate()
    assert found.device_bytes == n_batches * 4 * ITEM
    assert str(found) == f"8.0 MB: 2 batches of 4.00 MB; {4 * n_batches}.0 MB on the device"


def test_without_workers_each_batch_is_made_when_it_is_asked_for_by_default() -> None:
    assert inspect.signature(Loader).parameters["num_workers"].default == 0
    source = big()
    with Loader(source, Plan(source.index, Sequential(), batch_size=4)) as loader:
        assert repr(loader).endswith("num_workers=0, executor='inline')")


def test_if_item_sizes_vary_a_batch_is_made_to_measure_it() -> None:
    source = DatasetSource(Pairs(20))  # two float32 and one int64 each
    with Loader(source, Plan(source.index, Sequential(), batch_size=5)) as loader:
        assert loader.memory_estimate().batch_bytes == 5 * 16
        assert (loader.state_dict()["epoch"], loader.state_dict()["batch"]) == (0, 0)


def test_a_budget_that_is_too_small_is_refused_with_both_numbers() -> None:
    with pytest.raises(OptionError, match=r"(?s)allows 7\.0 MB.*needs 8\.0 MB"):
        estimate(Sequential(), memory_bytes=7 * ITEM)
    with pytest.raises(
        OptionError, match=r"(?s)allows 20\.0 MB.*\d+\.\d MB: \d+ batches of 4\.00 MB, \d+ windows of 15\.00 MB"
    ):
        estimate(WindowShuffle(3), memory_bytes=20 * ITEM)


def test_a_budget_that_is_just_enough_is_accepted() -> None:
    assert estimate(Sequential(), memory_bytes=8 * ITEM).host_bytes == 8 * ITEM


def test_the_estimate_reads_as_a_sentence() -> None:
    assert str(estimate(Sequential())) == "8.0 MB: 2 batches of 4.00 MB"


@pytest.mark.parametrize(("workers", "executor", "copies"), [(0, "auto", 1), (2, "threads", 1), (2, "processes", 2)])
def test_what_the_source_keeps_counts_once_per_process(workers: int, executor: Any, copies: int) -> None:
    source = numbered_source(20)
    source.memory_bytes = 3_000_000  # type: ignore[attr-defined]  # as the sources with a cache have it
    plan = Plan(source.index, Sequential(), batch_size=4)
    with Loader(source, plan, num_workers=workers, options=RunOptions(executor=executor)) as loader:
        found = loader.memory_estimate()
    assert found.cache_bytes == copies * 3_000_000
    assert found.host_bytes == found.batch_bytes * found.batches_held + found.cache_bytes
    assert f"up to {copies * 3.0:.1f} MB kept by the source" in str(found)
