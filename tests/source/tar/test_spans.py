"""Which spans of remote shards are read whole, and when they are done."""

import numpy as np
import pytest

from penstock.shard.table import ShardEntry, ShardTable
from penstock.source.tar.remote.spans import SPAN_BYTES, SpanGrid, SpanUse

ITEM = SPAN_BYTES // 8


def make_grid(n_items: int = 80, item_bytes: int = ITEM, compression: str = "none") -> SpanGrid:
    entries = [
        ShardEntry(f"{n}.tar", n_items, n_items * item_bytes, n_items * item_bytes, "", compression)  # type: ignore[arg-type]
        for n in range(3)
    ]
    return SpanGrid(ShardTable.from_entries(entries))


def spans_of(grid: SpanGrid, items: list[int]) -> np.ndarray:
    numbers = np.array(items)
    return grid.find(numbers // 80, numbers % 80)


def announce(use: SpanUse, grid: SpanGrid, items: list[int], share: float = 1.0) -> np.ndarray:
    return use.announce(np.array(items), spans_of(grid, items), share)


def make_use(kept_bytes: int = 0, stored_bytes: int = 1 << 40) -> tuple[SpanGrid, SpanUse]:
    grid = make_grid()
    return grid, SpanUse(grid, kept_bytes, stored_bytes)


@pytest.mark.parametrize(("item_bytes", "n_items"), [(ITEM, 8), (ITEM - 1, 9), (512, 80), (SPAN_BYTES * 3, 1)])
def test_spans_have_whole_items(item_bytes: int, n_items: int) -> None:
    grid = make_grid(item_bytes=item_bytes)
    assert grid.n_items.tolist() == [n_items] * 3
    per_shard = -(-80 // n_items)
    assert grid.firsts.tolist() == [0, per_shard, 2 * per_shard, 3 * per_shard]
    assert grid.find(np.array([0, 0, 2]), np.array([0, 79, 0])).tolist() == [0, per_shard - 1, 2 * per_shard]
    assert grid.find_shards(np.array([0, per_shard - 1, per_shard, 3 * per_shard - 1])).tolist() == [0, 0, 1, 2]


def test_a_compressed_shard_is_one_span() -> None:
    assert make_grid(compression="gz").firsts.tolist() == [0, 1, 2, 3]


def test_neighbours_are_read_by_spans_and_scattered_items_alone() -> None:
    grid, use = make_use()
    assert announce(use, grid, list(range(16))).all()
    grid, use = make_use()
    assert not announce(use, grid, list(range(0, 240, 9))).any()


def test_a_small_part_of_each_item_is_read_alone() -> None:
    grid, use = make_use()
    assert not use.choose(spans_of(grid, list(range(16))), 0.1).any()
    assert use.choose(spans_of(grid, list(range(16, 32))), 0.9).all()


def test_one_item_of_a_span_of_few_large_ones_is_read_alone() -> None:
    """Whole spans would cost three times the bytes, and as many requests."""
    grid = make_grid(item_bytes=SPAN_BYTES * 2 // 5)  # three in a span
    for n_needed, is_whole in ((1, False), (3, True)):
        use = SpanUse(grid, 0, 1 << 40)
        rows = np.array([row for row in range(78) if row % 3 < n_needed])
        assert use.choose(grid.find(np.zeros_like(rows), rows), 1.0).all() == is_whole


def test_what_fits_into_the_cache_is_read_by_spans() -> None:
    grid, use = make_use(kept_bytes=2 << 30, stored_bytes=1 << 30)
    assert use.choose(spans_of(grid, [3, 200]), 1.0).all()


def test_scattered_items_of_a_part_that_fits_into_the_cache_folder_are_read_by_spans_that_stay() -> None:
    grid = make_grid()
    use = SpanUse(grid, 0, 1 << 30, lambda: 0.5, lambda _: True)
    items = np.random.default_rng(0).permutation(240)
    spans = spans_of(grid, items.tolist())
    chosen = np.concatenate([use.announce(np.array([first]), spans[first : first + 1], 1.0) for first in range(12)])
    again = np.concatenate([use.choose(spans[first : first + 1], 1.0) for first in range(12)])
    assert chosen.tolist() == again.tolist()
    assert 0 < chosen.sum() < 12
    is_alone, done = use.release(spans[:12])
    assert done == []
    assert (is_alone[~chosen]).all()
    few = SpanUse(grid, 0, 1 << 30, lambda: 0.5, lambda _: True)  # of which little is read: a label beside an image
    assert not few.announce(np.arange(12), spans[:12], 0.05).any()


def test_scattered_items_that_turn_out_to_be_dense_are_read_by_spans() -> None:
    """A buffered shuffle announces one item of each span after the other."""
    grid, use = make_use()
    order = np.random.default_rng(0).permutation(240)
    chosen = [bool(announce(use, grid, [int(item)]).all()) for item in order]
    assert not chosen[0]
    grid, use = make_use()
    assert announce(use, grid, order[:120].tolist()).all()


def test_beside_a_cache_folder_a_part_of_a_span_is_read_alone_if_it_is_announced_in_order() -> None:
    """What is announced in order is all that is needed; out of order, the rest of a span may follow."""
    grid = make_grid()
    for is_in_order in (True, False):
        use = SpanUse(grid, 0, 1 << 40, kept_share=lambda: 1e-3)
        assert announce(use, grid, list(range(160))).all()
        parts = [item for item in range(160, 240) if item % 8]  # of each span, seven of eight
        items = parts if is_in_order else parts[::2] + parts[1::2][::-1]
        assert announce(use, grid, items).tolist() == [not is_in_order] * len(items)


def test_a_span_is_read_as_it_was_announced() -> None:
    grid, use = make_use()
    assert not announce(use, grid, [0]).any()
    announce(use, grid, list(range(80, 240)))
    assert not use.choose(spans_of(grid, [0]), 1.0).any()
    assert use.choose(spans_of(grid, [80]), 1.0).all()


def test_a_span_is_done_after_its_last_announced_item() -> None:
    grid, use = make_use()
    announce(use, grid, list(range(24)))
    for start in (0, 5):
        some = spans_of(grid, list(range(start, start + 5)))
        assert use.choose(some, 1.0).all()
        use.finish(some)
        is_alone, done = use.release(some)
        assert not is_alone.any()
        assert done == ([] if start == 0 else [0])


def test_without_announcements_a_span_is_done_when_all_of_it_was_read() -> None:
    grid, use = make_use()
    done: list[int] = []
    for start in range(0, 24, 6):
        some = spans_of(grid, list(range(start, start + 6)))
        use.choose(some, 1.0)
        use.finish(some)
        done += use.release(some)[1]
    assert done == [0, 1, 2]


def test_a_span_of_which_half_is_kept_is_not_done() -> None:
    grid, use = make_use()
    items = spans_of(grid, list(range(8)))
    announce(use, grid, list(range(16)))
    use.choose(items, 1.0)
    use.finish(items)
    assert use.release(items[:4])[1] == []
    assert use.release(items[4:5])[1] == [0]


def test_a_span_is_not_done_while_another_thread_reads_the_last_of_it() -> None:
    """Otherwise it would be downloaded again."""
    grid, use = make_use()
    announce(use, grid, list(range(24)))
    first, last = spans_of(grid, list(range(7))), spans_of(grid, [7, 8, 9])
    use.choose(first, 1.0)
    use.finish(first)
    use.choose(last, 1.0)
    assert use.release(first)[1] == []
    use.finish(last)
    assert use.release(last)[1] == [0]


def test_of_spans_at_the_borders_of_runs_only_what_is_needed_is_read() -> None:
    """Runs of a window do not end where spans do: the items around them are needed with another window."""
    grid, use = make_use()
    items = [*range(4, 36), *range(100, 132), *range(196, 228)]
    is_whole = announce(use, grid, items)
    sizes = grid.count_items(spans_of(grid, items))
    counts = np.bincount(spans_of(grid, items))[spans_of(grid, items)]
    assert is_whole.tolist() == (counts == sizes).tolist()
    assert is_whole.any()
    assert not is_whole.all()
    grid, use = make_use()
    assert announce(use, grid, [item for item in range(240) if item % 16 != 4]).all()  # gaps are not worth a request


def test_items_that_were_read_alone_are_released_alone() -> None:
    grid, use = make_use()
    items = spans_of(grid, [0, 100, 200])
    announce(use, grid, [0, 100, 200])
    use.choose(items, 1.0)
    is_alone, done = use.release(items)
    assert is_alone.all()
    assert done == []
