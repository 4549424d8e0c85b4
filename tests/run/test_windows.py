from typing import Any

import numpy as np
import pytest
from penstock_test_parts import (
    CountingSource,
    MixedSource,
    Numbers,
    delivered_items,
    numbered_source,
    planned_items,
)

from penstock import (
    ArraySource,
    DatasetSource,
    Loader,
    Plan,
    RandomChunks,
    ReadError,
    RunOptions,
    Segments,
    WindowShuffle,
)
from penstock.core.types import UNNAMED, Window
from penstock.run.pages import Pages
from penstock.run.windows import WindowStore


def window(number: int, *spans: tuple[int, int], epoch: int = 0) -> Window:
    return Window(epoch, number, np.array(spans, np.int64))


def lend(n_items: int) -> dict[str, np.ndarray]:
    return {"x": np.empty(n_items, np.int64), "y": np.empty((n_items, 2), np.float32)}


def test_a_window_is_its_spans_laid_end_to_end() -> None:
    store = WindowStore(numbered_source(30), lend, capacity=2, pages=Pages())
    block = store.get(window(0, (2, 5), (11, 12), (20, 24)))
    assert block["x"].tolist() == [2, 3, 4, 11, 20, 21, 22, 23]
    assert block["y"][:, 1].tolist() == [item + 0.25 for item in block["x"].tolist()]


def test_a_window_is_read_once_while_it_is_kept() -> None:
    source = CountingSource(numbered_source(30))
    store = WindowStore(source, lend, capacity=2, pages=Pages())
    for number in (0, 1, 1, 0, 0):
        store.get(window(number, (10 * number, 10 * number + 4)))
    assert source.spans == [(0, 4), (10, 14)]


def test_the_window_that_was_used_longest_ago_is_dropped() -> None:
    source = CountingSource(numbered_source(30))
    store = WindowStore(source, lend, capacity=2, pages=Pages())
    for number in (0, 1, 0, 2, 0, 1):
        store.get(window(number, (number, number + 1)))
    # 2 drops 1, since 0 was used after it; then 1 is read again and drops 2.
    assert source.spans == [(0, 1), (1, 2), (2, 3), (1, 2)]
    store.get(window(0, (0, 1)))
    assert len(source.spans) == 4


def test_the_same_number_in_another_epoch_is_another_window() -> None:
    store = WindowStore(numbered_source(30), lend, capacity=4, pages=Pages())
    first = store.get(window(0, (0, 3), epoch=0))["x"].tolist()
    assert (first, store.get(window(0, (5, 8), epoch=1))["x"].tolist()) == ([0, 1, 2], [5, 6, 7])


def test_a_dropped_window_stays_valid_for_its_holder() -> None:
    store = WindowStore(numbered_source(3000), lend, capacity=1, pages=Pages())
    kept = store.get(window(0, (0, 1000)))
    for number in range(1, 6):
        store.get(window(number, (1000, 2000)))
    assert kept["x"].tolist() == list(range(1000))


def test_objects_are_kept_as_they_are() -> None:
    store = WindowStore(DatasetSource(Numbers(9)), lambda _: None, capacity=1, pages=Pages())
    block = store.get(window(0, (1, 3), (7, 8)))[UNNAMED]
    assert [int(item) for item in block] == [1, 2, 7]


def test_objects_lie_beside_arrays_of_fixed_shape() -> None:
    source = MixedSource(30)
    store = WindowStore(source, lambda n: {"x": np.empty(n, np.int64)}, capacity=1, pages=Pages())
    block = store.get(window(0, (1, 3), (7, 8)))
    assert block["x"].tolist() == [1, 2, 7]
    assert block["note"].tolist() == [{"item": 1}, {"item": 2}, {"item": 7}]


# -- in a loader -------------------------------------------------------------------------------------------------------


def items_of_windows(plan: Plan, epoch: int = 0) -> list[int]:
    """Return the items of every window of an epoch, sorted."""
    drawn = plan.epoch(epoch)
    parts = [part.window for n in range(drawn.n_batches) for part in drawn.draw(n).parts]
    found = {found.key: found.spans.tolist() for found in parts}
    return sorted(item for spans in found.values() for start, stop in spans for item in range(start, stop))


def items_read(source: CountingSource) -> list[int]:
    """Return the items that were read, span by span or with one call, sorted."""
    return sorted([item for span in source.spans for item in range(*span)] + [n for some in source.taken for n in some])


@pytest.mark.parametrize("lanes", [1, 2, 3])
@pytest.mark.parametrize(("window_chunks", "batch_size"), [(3, 8), (2, 25), (5, 6)])
@pytest.mark.parametrize("workers", [0, 1, 3])
def test_every_window_is_read_once_per_epoch(lanes: int, window_chunks: int, batch_size: int, workers: int) -> None:
    source = CountingSource(numbered_source(120, chunk=5))
    plan = Plan(source.index, WindowShuffle(window_chunks), batch_size=batch_size, lanes=lanes, tail="short", seed=3)
    options = RunOptions(executor="threads") if workers else RunOptions()
    with Loader(source, plan, num_workers=workers, options=options) as loader:
        for epoch in range(2):
            source.spans.clear()
            source.taken.clear()
            assert delivered_items(loader) == planned_items(plan, epoch)
            expected = items_of_windows(plan, epoch)
            assert items_read(source) == expected == list(range(120))


def test_large_spans_of_a_window_are_read_one_by_one_where_they_belong() -> None:
    arrays = {"x": np.arange(20), "large": np.arange(20)[:, None] * np.ones((1, 1 << 16))}  # half a megabyte each
    source = CountingSource(ArraySource(arrays, chunk_items=2))
    plan = Plan(source.index, WindowShuffle(3), batch_size=4, tail="short", seed=3)
    with Loader(source, plan) as loader:
        for batch, items in zip(loader, planned_items(plan), strict=True):
            assert batch["x"].tolist() == items
            assert (batch["large"] == batch["x"][:, None]).all()
    assert (items_read(source), source.taken) == (items_of_windows(plan), [])


def test_a_window_that_is_a_whole_batch_is_read_at_once_and_not_kept() -> None:
    source = CountingSource(numbered_source(100))
    plan = Plan(source.index, RandomChunks(size=8, count=6), batch_size=8, seed=1)
    with Loader(source, plan) as loader:
        assert delivered_items(loader) == planned_items(plan)
    runs = planned_items(plan)
    assert source.spans == [(run[0], run[-1] + 1) for run in runs]


def test_segments_continue_where_the_last_one_ended() -> None:
    source = CountingSource(numbered_source(60, chunk=5))
    plan = Segments(Plan(source.index, WindowShuffle(3), batch_size=7, seed=2), length=3)
    with Loader(source, plan, num_workers=2, options=RunOptions(executor="threads")) as loader:
        for segment in range(6):
            assert delivered_items(loader) == planned_items(plan, segment)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_selection_reads_only_from_the_first_to_the_last_selected_item_of_each_chunk(workers: int) -> None:
    source = CountingSource(numbered_source(60, chunk=10))
    kept = np.zeros(60, np.bool_)
    kept[[3, 5, 7, 21, 22, 40, 49, 58]] = True
    plan = Plan(source.index.select(kept), WindowShuffle(1), batch_size=3, tail="short", seed=4)
    options = RunOptions(executor="threads") if workers else RunOptions()
    with Loader(source, plan, num_workers=workers, options=options) as loader:
        assert sorted(item for batch in delivered_items(loader) for item in batch) == [3, 5, 7, 21, 22, 40, 49, 58]
    assert sorted(source.spans) == [(3, 8), (21, 23), (40, 50), (58, 59)]


@pytest.mark.parametrize("workers", [0, 1, 3])
def test_a_window_that_cannot_be_read_fails_in_its_place(workers: int) -> None:
    source = numbered_source(60, chunk=5)
    plan = Plan(source.index, WindowShuffle(2), batch_size=6, seed=5)
    bad = planned_items(plan)[4][0]

    def fail(items: list[int]) -> None:
        if bad in items:
            raise ReadError(f"item {bad} cannot be read")

    options = RunOptions(executor="threads") if workers else RunOptions()
    found = []
    with Loader(CountingSource(source, fail), plan, num_workers=workers, options=options) as loader:
        with pytest.raises(ReadError, match=f"item {bad} cannot be read") as caught:
            found.extend(batch["x"].tolist() for batch in loader)
    # The window of the bad item is the first that cannot be read; all batches before the one that needs it are given.
    first = next(
        n for n in range(plan.n_batches) if any(bad in _items_of(part) for part in plan.epoch(0).draw(n).parts)
    )
    assert found == planned_items(plan)[:first]
    assert any(f"batch {first} of epoch 0" in note for note in caught.value.__notes__)


def _items_of(part: Any) -> set[int]:
    return {item for start, stop in part.window.spans.tolist() for item in range(start, stop)}
