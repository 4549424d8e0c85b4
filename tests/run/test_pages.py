"""How much of a dataset is read ahead, by the size of its items."""

from pathlib import Path

import numpy as np

from penstock import ArraySource, DatasetSource, Plan, RunOptions, Shuffle, Source
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
