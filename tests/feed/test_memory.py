import numpy as np
import pytest
from penstock_test_parts import Pairs, numbered_source

from penstock import ArraySource, DatasetSource, Loader, OptionError, Plan, RunOptions, Sequential, WindowShuffle

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


def test_processes_hold_at_least_what_threads_do() -> None:
    threads = estimate(Sequential(), workers=2, executor="threads")
    processes = estimate(Sequential(), workers=2, executor="processes")
    assert processes.host_bytes >= threads.host_bytes


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
