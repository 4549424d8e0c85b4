"""What a source is told before it is read, and what it gives back afterwards."""

import itertools
import math
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from penstock_test_parts import (
    CountingSource,
    Surroundings,
    delivered_items,
    eventually,
    numbered_source,
    planned_items,
)

from penstock import Loader, Order, Plan, RunOptions, Sequential, Shuffle, WindowShuffle, World
from penstock.core.types import Draw
from penstock.plan.cursor import Cursor
from penstock.run import read_ahead as module
from penstock.run.pages import Pages, decide_pages
from penstock.run.read_ahead import ReadAhead, choose_told_plan, draws_into_next_epoch

MEGABYTE = 1 << 20


@pytest.fixture(scope="module", autouse=True)
def no_thread() -> Iterator[None]:
    """Tell in the thread that asks, however long a busy machine lets it wait."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_BLOCKED_SECONDS", math.inf)
        yield


class ToldSource(CountingSource):
    """Remembers what it is told; `missing` says how many bytes of these items are not in memory."""

    def __init__(self, n_items: int, missing: Callable[[list[int]], int | None], chunk: int | None = None) -> None:
        super().__init__(numbered_source(n_items, chunk))
        self.told: list[list[int]] = []
        self.given_back: list[list[int]] = []
        self.stored_bytes = n_items * MEGABYTE
        self._missing = missing

    def prepare(self, items: Any) -> int | None:
        self.told.append(items.tolist())
        return self._missing(self.told[-1])

    def release(self, items: Any) -> None:
        self.given_back.append(items.tolist())


def cold(items: list[int]) -> int:
    return len(items)


def warm(items: list[int]) -> int:
    return 0


class ColdDisk:
    """Items are in memory once they were told, from the next call on."""

    def __init__(self) -> None:
        self.resident: set[int] = set()

    def __call__(self, items: list[int]) -> int:
        missing = set(items) - self.resident
        self.resident |= missing
        return len(missing)


def first_told(source: ToldSource) -> list[int]:
    """Return all items in the order in which they were first told."""
    return list(dict.fromkeys(itertools.chain.from_iterable(source.told)))


def follow(plan: Plan, source: ToldSource, n_bytes: int, **options: Any) -> Iterator[tuple[int, Draw, list[int]]]:
    """Yield each step of epoch 0, its draw, and what was told until it is made."""
    draws_from = partial(draws_into_next_epoch, plan, World(), Cursor())
    ahead = ReadAhead(source, Pages(n_bytes, MEGABYTE), draws_from, **options)
    for step, draw in enumerate(plan.epoch(0).share(World()).draws()):
        ahead.advance(step)
        yield step, draw, first_told(source)
    ahead.close()


@given(st.integers(1, 60), st.integers(1, 9), st.integers(1, 64), st.sampled_from([Sequential(), Shuffle()]))
def test_every_item_is_told_before_it_is_read_and_not_further_ahead_than_asked(
    n_items: int, batch_size: int, ahead: int, order: Order
) -> None:
    source = ToldSource(n_items, ColdDisk())
    plan = Plan(source.index, order, batch_size=batch_size, tail="short", seed=5)
    upcoming = list(itertools.chain(*planned_items(plan, 0), *planned_items(plan, 1)))
    for step, draw, told in follow(plan, source, ahead * MEGABYTE):
        assert set(draw.items.tolist()) <= set(told)
        # One batch after the one that is made now is within reach, and the batch in which the reach ends is told whole.
        reach = (step + 1) * batch_size + ahead + batch_size
        assert set(told) <= set(upcoming[:reach])


def test_the_next_epoch_is_told_at_the_end_of_this_one() -> None:
    source = ToldSource(40, cold)
    plan = Plan(source.index.select(np.arange(40) % 2 == 0), Shuffle(), batch_size=4, seed=1)
    for _ in follow(plan, source, 8 * MEGABYTE):
        pass
    assert source.told[-1] == planned_items(plan, 1)[2]  # from item 8 of the next epoch on: the distance


@given(st.integers(1, 4), st.integers(1, 5), st.integers(0, 3), st.integers(1, 3))
def test_a_window_is_told_whole_before_it_is_read(chunks: int, chunk: int, windows_ahead: int, lanes: int) -> None:
    source = ToldSource(60, ColdDisk(), chunk)
    plan = Plan(source.index, WindowShuffle(chunks), batch_size=4, lanes=lanes, tail="short", seed=2)
    draws = list(plan.epoch(0).share(World()).draws())
    for step, _, told in follow(plan, source, 2 * MEGABYTE, windows_ahead=windows_ahead):
        for draw in draws[step : step + windows_ahead + 1]:
            for part in draw.parts:
                window = {item for start, stop in part.window.spans.tolist() for item in range(start, stop)}
                assert window <= set(told)


@pytest.mark.parametrize("order", [Shuffle(), WindowShuffle(2)], ids=["items", "windows"])
def test_workers_tell_a_part_each(order: Order) -> None:
    parts = []
    for number in range(3):
        source = ToldSource(48, ColdDisk(), 4)
        plan = Plan(source.index, order, batch_size=4, seed=3)
        list(follow(plan, source, 4 * MEGABYTE, part=(number, 3)))
        parts.append(source.told)
    in_time = [set(itertools.chain(*told)) for told in parts]
    assert set.union(*in_time) == set(range(48))
    assert max(map(len, in_time)) < 48


@pytest.mark.parametrize("order", [Shuffle(), WindowShuffle(2), WindowShuffle(2, held=False)], ids=str)
def test_from_a_network_each_worker_tells_what_it_makes_in_the_next_epoch_too(order: Order) -> None:
    for number in range(2):
        source = ToldSource(52, cold, 4)
        source.is_remote = True  # type: ignore[attr-defined]
        plan = Plan(source.index, order, batch_size=4, seed=3, lanes=2)  # 13 batches: an odd number
        assert plan.n_batches == 13
        list(follow(plan, source, 256 * MEGABYTE, part=(number, 2)))
        draws = [draw for epoch in (0, 1) for draw in list(plan.epoch(epoch).draws(range(13)))[number::2]]
        mine = {
            (draw.epoch, item)
            for draw in draws
            for items in ([draw.items] if not draw.parts else [_window_items(part.window) for part in draw.parts])
            for item in items
        }
        # Told ahead of the first step: all but that step, once for each epoch in which it is needed.
        needed = [item for _, item in mine]
        first = set(draws[0].items.tolist()) | {item for part in draws[0].parts for item in _window_items(part.window)}
        told = list(itertools.chain(*source.told))
        assert {item for item in needed if needed.count(item) != told.count(item)} <= first
        assert set(told) <= set(needed)


def _window_items(window: Any) -> list[int]:
    return [item for start, stop in window.spans.tolist() for item in range(start, stop)]


@pytest.mark.parametrize("lanes", [1, 2, 3])
def test_from_a_network_windows_are_told_in_the_order_of_the_storage_though_they_are_not_held(lanes: int) -> None:
    source = ToldSource(96, cold, 4)
    source.is_remote = True  # type: ignore[attr-defined]
    plan = Plan(source.index, WindowShuffle(3, held=False), batch_size=4, seed=3, lanes=lanes)
    with Loader(source, plan, options=RunOptions(read_ahead_bytes=MEGABYTE)) as loader:
        assert delivered_items(loader) == planned_items(plan, 0)
    told = list(itertools.chain(*source.told))
    assert set(told) == set(range(96))
    breaks = np.count_nonzero(np.diff(told) < 0)
    assert breaks <= 2 * plan.with_windows().arrangement(0).windows.count  # between windows only


@pytest.mark.parametrize(
    ("is_remote", "item_bytes", "lanes", "processes", "is_told"),
    [
        (True, 1000, 2, 2, True),
        (True, 1000, 4, 2, True),
        (True, 1000, 1, 2, False),  # both processes need items of every window
        (True, 1000, 3, 2, False),
        (False, 1000, 2, 2, False),
        (True, 8 * MEGABYTE, 1, 1, False),  # a window of 96 MiB
        (True, 8 * MEGABYTE // 2, 1, 1, True),
        (True, 8 * MEGABYTE // 2, 2, 1, False),  # two of them at a time
    ],
)
def test_windows_that_are_not_held_are_told_if_they_fit_and_belong_to_one_process(
    is_remote: bool, item_bytes: int, lanes: int, processes: int, is_told: bool
) -> None:
    source = ToldSource(96, cold, 4)
    source.is_remote = is_remote  # type: ignore[attr-defined]
    plan = Plan(source.index, WindowShuffle(3, held=False), batch_size=4, seed=3, lanes=lanes)
    told = choose_told_plan(source, plan, Pages(128 * MEGABYTE, item_bytes), processes=processes)
    assert (told.passes.arrangement(0).windows is not None) == is_told
    assert told.identity() == plan.identity()


def test_a_process_that_has_read_nothing_yet_tells_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_count_inputs", lambda who: 0)
    source = ToldSource(20, cold)
    next(follow(Plan(source.index, Sequential(), batch_size=1), source, 4 * MEGABYTE))
    assert source.told == [[0, 1], [2, 3, 4, 5]]


def test_nothing_is_told_while_all_is_in_memory_but_now_and_then() -> None:
    source = ToldSource(1000, warm)
    plan = Plan(source.index, Shuffle(), batch_size=1, seed=4)
    list(follow(plan, source, 4 * MEGABYTE))
    n_calls = len(source.told)
    # A few calls, a rest of up to 256 steps, and so on. Other tests may read from the disk, which ends a rest early.
    assert n_calls < 500
    assert len(set(itertools.chain(*source.told))) < 900


def test_the_next_epoch_is_at_rest_if_this_one_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_count_inputs", lambda who: 0)
    source = ToldSource(40, warm)
    plan = Plan(source.index, Shuffle(), batch_size=4, seed=9)
    with Loader(source, plan) as loader:
        told = []
        for epoch in range(3):
            assert delivered_items(loader) == planned_items(plan, epoch)
            told.append(len(source.told))
    assert told[0] > 0
    assert told[0] == told[1] == told[2]


def test_items_that_are_larger_than_the_distance_are_told_one_step_ahead() -> None:
    source = ToldSource(20, ColdDisk())
    plan = Plan(source.index, Sequential(), batch_size=2)
    for step, _, told in follow(plan, source, MEGABYTE // 100):
        assert told == list(range(min(20, 2 * step + 4))) or step >= 8


def test_a_read_from_the_disk_ends_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs: Iterator[int] = itertools.repeat(0)
    monkeypatch.setattr(module, "_count_inputs", lambda who: next(inputs))
    source = ToldSource(200, warm)
    plan = Plan(source.index, Sequential(), batch_size=1)
    counts = []
    for step, _, _ in follow(plan, source, 4 * MEGABYTE):
        counts.append(len(source.told))
        if step == 20:
            inputs = itertools.count(1)
    assert counts[19] == counts[20]  # at rest
    assert counts[21] > counts[20]


def test_the_distance_grows_while_the_disk_is_late() -> None:
    late, punctual = ToldSource(400, cold), ToldSource(400, ColdDisk())
    reach = []
    for source in (late, punctual):
        plan = Plan(source.index, Sequential(), batch_size=1)
        reach.append([max(told) - step for step, _, told in follow(plan, source, 64 * MEGABYTE)][100])
    assert reach == [65, 33]  # items of a megabyte: the most that is allowed, and the first distance


@pytest.mark.parametrize("executor", ["inline", "threads"])
@pytest.mark.parametrize("order", [Shuffle(), WindowShuffle(2)], ids=["items", "windows"])
def test_an_error_of_the_source_changes_nothing(order: Order, executor: Any) -> None:
    def fail(items: list[int]) -> int:
        raise OSError("no such file")

    source = ToldSource(40, fail, 4)
    plan = Plan(source.index, order, batch_size=4, seed=6)
    workers = 0 if executor == "inline" else 2
    with Loader(source, plan, num_workers=workers, options=RunOptions(executor=executor)) as loader:
        for epoch in range(2):
            assert delivered_items(loader) == planned_items(plan, epoch)
    assert source.told


@pytest.mark.parametrize("executor", ["inline", "threads", "processes"])
def test_nothing_is_told_with_read_ahead_bytes_0(executor: Any) -> None:
    source = ToldSource(40, cold)
    plan = Plan(source.index, Shuffle(), batch_size=4, seed=6)
    options = RunOptions(executor=executor, read_ahead_bytes=0, start_method="fork")
    with Loader(source, plan, num_workers=0 if executor == "inline" else 1, options=options) as loader:
        assert delivered_items(loader) == planned_items(plan)
    assert source.told == []


@pytest.mark.parametrize("executor", ["inline", "threads"])
@pytest.mark.parametrize("order", [Shuffle(), WindowShuffle(2)], ids=["items", "windows"])
def test_a_thread_tells_if_telling_makes_batches_wait(
    order: Order, executor: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_BLOCKED_SECONDS", 0.02)
    tellers: set[str] = set()

    def wait(items: list[int]) -> int:
        tellers.add(threading.current_thread().name)
        time.sleep(0.03)  # as a full queue of a disk does
        return len(items)

    source = ToldSource(120, wait, 4)
    plan = Plan(source.index, order, batch_size=4, seed=6)
    options = RunOptions(executor=executor, read_ahead_bytes=8 * MEGABYTE)
    surroundings = Surroundings.now()
    with Loader(source, plan, num_workers=0 if executor == "inline" else 2, options=options) as loader:
        found = []
        for batch in loader:
            found.append(batch["x"].tolist())
            assert len(found) < 5 or eventually(lambda: "penstock-tell" in tellers)
        assert found == planned_items(plan)
        assert next(iter(loader))["x"].tolist() == planned_items(plan, 1)[0]
    surroundings.check()


# -- giving back -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", [Sequential(), Shuffle(), WindowShuffle(2)], ids=lambda order: type(order).__name__)
@pytest.mark.parametrize("workers", [0, 2])
def test_items_are_given_back_unless_the_next_epoch_needs_them_first(order: Order, workers: int) -> None:
    source = ToldSource(60, cold, 5)
    plan = Plan(source.index, order, batch_size=4, seed=7)
    options = RunOptions(executor="threads" if workers else "inline", page_cache_bytes=20 * MEGABYTE)
    with Loader(source, plan, num_workers=workers, options=options) as loader:
        for epoch in range(2):
            source.given_back.clear()
            assert delivered_items(loader) == planned_items(plan, epoch)
            kept = {item for batch in planned_items(plan, epoch + 1)[:5] for item in batch}
            assert sorted(itertools.chain(*source.given_back)) == sorted(set(range(60)) - kept)


@pytest.mark.parametrize("order", [Shuffle(), WindowShuffle(2)], ids=["items", "windows"])
def test_an_error_while_giving_back_loses_nothing(order: Order, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(source: ToldSource, items: Any) -> None:
        source.given_back.append(items.tolist())
        raise OSError("no such file")

    monkeypatch.setattr(ToldSource, "release", fail)
    source = ToldSource(60, cold, 5)
    plan = Plan(source.index, order, batch_size=4, seed=7)
    with Loader(source, plan, options=RunOptions(page_cache_bytes=0)) as loader:
        assert delivered_items(loader) == planned_items(plan)
    assert sorted(itertools.chain(*source.given_back)) == list(range(60))


def test_a_dataset_that_fits_is_kept() -> None:
    source = ToldSource(60, cold)
    plan = Plan(source.index, Shuffle(), batch_size=4, seed=7)
    with Loader(source, plan, options=RunOptions(page_cache_bytes=60 * MEGABYTE)) as loader:
        assert delivered_items(loader) == planned_items(plan)
    assert source.given_back == []


def test_small_items_that_lie_apart_are_kept_and_neighbours_given_back() -> None:
    source = ToldSource(6000, cold)
    source.stored_bytes = 6000 * 100
    scattered, together = np.arange(0, 6000, 7), np.arange(100, 200)
    pages = decide_pages(source, Plan(source.index, Shuffle(), batch_size=4), RunOptions(page_cache_bytes=0))
    for items in (scattered, together):
        pages.give_back(source, items, 0)
    assert source.given_back == [together.tolist()]


def test_nothing_is_given_back_if_the_size_is_not_known() -> None:
    source = ToldSource(60, cold)
    source.stored_bytes = None  # type: ignore[assignment]
    pages = decide_pages(source, Plan(source.index, Shuffle(), batch_size=4), RunOptions(page_cache_bytes=0))
    assert pages.plan is None


def test_a_source_of_the_least_needs_nothing_of_this() -> None:
    source = CountingSource(numbered_source(20))
    pages = decide_pages(source, Plan(source.index, Shuffle(), batch_size=4), RunOptions())
    assert (pages.read_ahead_bytes, pages.plan) == (0, None)
