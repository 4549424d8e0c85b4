"""What a loader has downloaded is the sum over its own process and all of its workers, however they run."""

from typing import Any

import numpy as np
import pytest
from penstock_download_parts import ITEM_BYTES, CountedDownloads

from penstock import ArraySource, Loader, Plan, RunOptions, Shuffle
from penstock.core.transfers import Transfers

N_ITEMS = 120
MISSING = 3 * N_ITEMS // 4
OF_AN_EPOCH = Transfers(
    MISSING, ITEM_BYTES * MISSING, N_ITEMS // 10, N_ITEMS // 4, MISSING, 0.25 * MISSING, 0.125 * MISSING
)


def make_loader(**options: Any) -> Loader:
    source = CountedDownloads(N_ITEMS)
    workers = options.pop("num_workers", 2)
    plan = Plan(source.index, Shuffle(), batch_size=7, seed=3)
    return Loader(source, plan, num_workers=workers, options=RunOptions(**options))


@pytest.mark.parametrize(
    "options",
    [
        {"num_workers": 0},
        {"executor": "threads", "num_workers": 1},
        {"executor": "processes", "start_method": "fork"},
        {"executor": "processes", "start_method": "fork", "persistent": True},
        {"executor": "processes", "start_method": "spawn"},
        {"num_workers": 3},
    ],
    ids=str,
)
def test_the_sum_is_that_of_all_items_that_were_read(options: dict[str, Any]) -> None:
    with make_loader(**options) as loader:
        assert loader.transfers == Transfers()
        list(loader)
        assert loader.transfers == OF_AN_EPOCH
        list(loader)
        assert loader.transfers == OF_AN_EPOCH + OF_AN_EPOCH
    assert loader.transfers == OF_AN_EPOCH + OF_AN_EPOCH


def test_what_was_downloaded_before_a_fork_counts_once() -> None:
    loader = make_loader(executor="processes", start_method="fork")
    loader.source.take(np.arange(N_ITEMS))
    with loader:
        list(loader)
        assert loader.transfers == OF_AN_EPOCH + OF_AN_EPOCH


def test_a_loader_of_local_data_has_no_counts() -> None:
    source = ArraySource({"x": np.arange(8)})
    with Loader(source, Plan(source.index, Shuffle(), batch_size=4)) as loader:
        list(loader)
        assert loader.transfers is None
