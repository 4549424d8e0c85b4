"""What a remote source keeps from epoch to epoch: always the same part, never more than its cache holds."""

import time
from collections.abc import Mapping

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from penstock import Index, Loader, Order, Plan, RunOptions, Sequential, Shuffle, WindowShuffle
from penstock.core.types import Block, Field, Span
from penstock.run.pages import decide_pages
from penstock.source.tar.remote.spans import find_staying

_ITEM_BYTES = 1 << 17


class _Remote:
    """Items whose value is their number; in memory are those that are not released, in a cache a part of them."""

    is_remote = True
    fields: Mapping[str, Field] = {"x": Field(np.dtype(np.int64), ())}

    def __init__(self, n_items: int, cache_bytes: int) -> None:
        self.index, self.cache_bytes = Index.uniform(n_items, chunk=8), cache_bytes
        self.stored_bytes = n_items * _ITEM_BYTES
        self.held: set[int] = set()
        self.cached: set[int] = set()
        self.staying: set[int] = set()
        self.told: list[int] = []
        self.n_downloads = 0

    def keep_share(self, share: float) -> None:
        self.staying = set(find_staying(np.arange(len(self.index)), len(self.index), share).nonzero()[0].tolist())

    def take(self, items: NDArray[np.int64], out: Block | None = None) -> Block:
        wanted = set(items.tolist())
        self.n_downloads += len(wanted - self.held - self.cached)
        self.held |= wanted
        self.cached |= wanted & self.staying
        if out is not None:
            np.copyto(out["x"], items)
        return {"x": items} if out is None else out

    def read(self, span: Span, out: Block | None = None) -> Block:
        return self.take(np.arange(span.start, span.stop), out)

    def prepare(self, items: NDArray[np.int64]) -> int:
        self.told.extend(items.tolist())
        return len(items)

    def release(self, items: NDArray[np.int64]) -> None:
        self.held -= set(items.tolist())

    def close(self) -> None:
        pass


_ORDERS = st.sampled_from([Shuffle(), Sequential(), WindowShuffle(window=2)])


@given(_ORDERS, st.integers(16, 400), st.integers(1, 20), st.floats(0.05, 1.2))
def test_epochs_download_what_the_cache_has_no_room_for(order: Order, n: int, batch_size: int, share: float) -> None:
    cache_items = int(share * n)
    source = _Remote(n, cache_items * _ITEM_BYTES)
    plan = Plan(source.index, order, batch_size=batch_size, tail="short")
    pages = decide_pages(source, plan, RunOptions())
    kept = int(0.98 * cache_items) if cache_items < n else n
    for epoch in range(4):
        source.n_downloads = 0
        for draw in plan.epoch(epoch).draws(range(plan.epoch(epoch).n_batches)):
            source.take(draw.items)
            pages.give_back(source, draw.items, epoch)
            assert source.held == set()
            assert len(source.cached) <= cache_items
        assert abs(source.n_downloads - (n if epoch == 0 else n - kept)) <= (epoch > 0)


@given(st.integers(1, 5000), st.floats(0.0, 1.2))
def test_of_the_spans_a_share_stays(n_spans: int, share: float) -> None:
    staying = find_staying(np.arange(n_spans), n_spans, share)
    assert staying.sum() == min(n_spans, np.floor(n_spans * share))
    counts, whole = np.cumsum(staying), np.arange(32, n_spans, 32)
    assert (counts[whole - 1] == np.minimum(whole, np.floor(whole * share))).all()
    some = np.random.default_rng(0).permutation(n_spans)[:50]
    assert (find_staying(some, n_spans, share) == staying[some]).all()


def test_without_a_cache_nothing_is_kept_and_everything_is_told_at_once() -> None:
    source = _Remote(200, 0)
    with Loader(source, Plan(source.index, Shuffle(), batch_size=8)) as loader:
        batches = iter(loader)
        first = next(batches)["x"].tolist()
        assert source.held == set()
        assert set(source.told) >= set(range(200)) - set(first)
        assert sorted([*first, *(item for batch in batches for item in batch["x"].tolist())]) == list(range(200))
    assert source.held == set()


def test_read_ahead_goes_through_memory_and_does_not_depend_on_the_cache() -> None:
    source = _Remote(1000, 100 * _ITEM_BYTES)
    pages = decide_pages(source, Plan(source.index, Shuffle(), batch_size=8), RunOptions())
    assert pages.read_ahead_bytes == RunOptions().read_ahead_bytes


def _hold_interpreter(item: Block, _: np.random.Generator) -> Block:
    until = time.thread_time() + 0.005
    while time.thread_time() < until:
        pass
    return item


def test_processes_that_would_download_the_same_windows_are_not_chosen() -> None:
    source = _Remote(48, 0)
    plan = Plan(source.index, WindowShuffle(window=2), batch_size=8)
    with Loader(source, plan, num_workers=2, transform=_hold_interpreter) as loader:
        assert sorted(item for batch in loader for item in batch["x"].tolist()) == list(range(48))
        assert "executor='threads'" in repr(loader)
