"""How much of a dataset is read ahead, by the size of its items, and what is given back."""

import multiprocessing as mp
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock import ArraySource, DatasetSource, Loader, Plan, RunOptions, Sequential, Shuffle, Source
from penstock.plan import Listed
from penstock.run.pages import decide_pages


def item_bytes(source: Source) -> int:
    plan = Plan(source.index, Shuffle(), batch_size=1)
    return decide_pages(source, plan, RunOptions()).item_bytes


def test_items_that_overlap_count_with_their_own_size(tmp_path: Path) -> None:
    values = np.memmap(tmp_path / "x", np.float32, "w+", shape=(10_000,))
    windows = np.ndarray((9_001, 1_000), np.float32, values, strides=(4, 4))
    source = ArraySource({"x": windows})
    assert source.stored_bytes == 40_000
    assert item_bytes(source) == 4_000  # not 4: a million items are not read ahead


def test_items_in_memory_count_with_their_own_size() -> None:
    assert item_bytes(ArraySource({"x": np.zeros((10, 300))})) == 2_400


def test_items_of_unknown_size_are_a_few() -> None:
    assert item_bytes(DatasetSource(list(range(1000)))) >= 1 << 16


class Released(ArraySource):
    """Stored in more bytes than the page cache may hold; notes which items are given back, by any process."""

    stored_bytes = 40 << 17

    def __init__(self) -> None:
        super().__init__({"x": np.arange(40)})
        self.given_back = mp.get_context("fork").Array("b", 40)

    def release(self, items: Any) -> None:
        for item in items.tolist():
            self.given_back[item] = 1


@pytest.mark.parametrize("executor", ["inline", "threads", "processes"])
def test_after_set_plan_the_items_that_the_new_plan_needs_first_are_kept(executor: Any) -> None:
    method = "fork" if executor == "processes" else None
    options = RunOptions(executor, start_method=method, persistent=True, page_cache_bytes=10 << 17)
    source = Released()
    with Loader(
        source,
        Plan(source.index, Sequential(), batch_size=4),
        num_workers=0 if executor == "inline" else 2,
        options=options,
    ) as loader:
        list(loader)
        assert list(source.given_back) == [0] * 10 + [1] * 30
        source.given_back[:] = [0] * 40
        loader.set_plan(Plan(source.index, Listed(range(39, -1, -1)), batch_size=4))
        list(loader)
        assert list(source.given_back) == [1] * 30 + [0] * 10
