"""A cache of c of the shards: each epoch after the first downloads 1 - c of the bytes, measured at the endpoint.

Half of the shards may be 0.52 of the bytes: side indexes need room in a cache, too, and spans are not cut. It is the
same for worker processes and ranks, on a busy machine: which part of a set stays in a cache depends on no moment.
"""

from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from penstock_remote import Endpoint
from penstock_remote_sets import RemoteSet, make_plan, watch_folder, write_set
from penstock_test_parts import run_side_by_side

from penstock import Loader, RunOptions, Sequential, Shuffle, WindowShuffle
from tests.faults.test_ranks import join_group

N_ITEMS, ITEM_BYTES = 320, 1 << 18  # an item is a span
MOST = 0.52
FORK = RunOptions(executor="processes", start_method="fork")  # workers of another epoch have nothing in memory
THREADS = RunOptions(executor="threads")
CASES: dict[str, tuple[Any, int, RunOptions]] = {
    "shuffle, inline": (Shuffle(), 0, RunOptions()),
    "shuffle, processes": (Shuffle(), 2, FORK),
    # Of an eighth of the set, cut between two lanes.
    "windows, processes": (WindowShuffle(20), 2, FORK),
    "windows that are not held, threads": (WindowShuffle(20, held=False), 2, THREADS),
    "sequential, processes": (Sequential(), 2, FORK),
}


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory, s3_server: Endpoint) -> RemoteSet:
    endpoint = s3_server.below("cached")
    return write_set(tmp_path_factory.mktemp("cached"), N_ITEMS, s3=endpoint, item_bytes=ITEM_BYTES)


@pytest.fixture
def shards(written: RemoteSet, tmp_path: Path, s3_server: Endpoint) -> RemoteSet:
    """The set, with a cache folder of its own, on a server that is fast enough for 2 cores."""
    s3_server.reset()
    s3_server.set_line(direct=True)
    return written.copy(tmp_path)


def make_loader(shards: RemoteSet, case: tuple[Any, int, RunOptions]) -> Loader:
    order, workers, options = case
    source = shards.open("s3 cached", chunk_items=2)
    return Loader(source, make_plan(source, order, batch_size=2, lanes=2), num_workers=workers, options=options)


def deliver(loader: Loader) -> None:
    """Check that an epoch has every item once, by its values."""
    length = ITEM_BYTES // 8
    items = sorted(int(first) for batch in loader for first in batch["x"][:, 0])
    assert items == [length * item for item in range(N_ITEMS)]


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_with_half_of_the_shards_each_epoch_downloads_the_other_half(
    case: tuple[Any, int, RunOptions], shards: RemoteSet
) -> None:
    shards = shards.with_cache(0.5)
    with make_loader(shards, case) as loader, watch_folder(shards.cache) as most:
        deliver(loader)
        found = [shards.downloaded()]
        for _ in range(3):
            deliver(loader)
            found.append(shards.downloaded())
    assert max(found[1:]) <= MOST, found
    assert found[0] <= 1.01 or case[2] is not FORK, found
    assert sum(found) <= 1.01 + 3 * MOST, found  # a process that stays reads ahead into the next epoch
    assert most[1] > 3, "the folder was measured while it was used"
    assert most[0] <= (shards.cache_bytes or 0), most


@pytest.mark.parametrize("name", ["shuffle, inline", "windows, processes"])
def test_with_all_of_them_nothing_is_downloaded_again_also_by_another_run(name: str, shards: RemoteSet) -> None:
    shards = shards.with_cache(1.1)
    with make_loader(shards, CASES[name]) as loader:
        deliver(loader)
        assert 1.0 <= shards.downloaded() <= 1.1
        deliver(loader)
        assert shards.downloaded() == 0.0
    with make_loader(shards, CASES[name]) as loader:
        deliver(loader)
    assert shards.downloaded() == 0.0


@pytest.mark.parametrize("share", [1e-5, 0.1])
def test_a_cache_that_is_too_small_costs_no_more_than_none(share: float, tmp_path: Path, s3_server: Endpoint) -> None:
    """Many items to a span: a whole span for each item would be many times the set."""
    s3_server.reset()
    endpoint = s3_server.below(f"small-{share}")
    shards = write_set(tmp_path, 960, s3=endpoint).with_cache(share)
    source = shards.open("s3 cached")
    with Loader(source, make_plan(source, Shuffle())) as loader:
        for _ in range(2):
            assert sorted(int(first) // 2048 for batch in loader for first in batch["x"][:, 0]) == list(range(960))
    assert shards.downloaded() <= 2.02


# -- ranks -------------------------------------------------------------------------------------------------------------


def train_rank(store: str, rank: int, shards: RemoteSet, name: str) -> list[float]:
    """Return what both ranks downloaded in each of four epochs, as rank 0 sees it."""
    join_group(store, rank, 2)
    found = []
    with make_loader(shards, CASES[name]) as loader:
        for _ in range(4):
            for _ in loader:
                pass
            dist.barrier()
            if rank == 0:
                found.append(shards.downloaded())
            dist.barrier()
    dist.destroy_process_group()
    return found


@pytest.mark.parametrize("name", ["shuffle, inline", "windows that are not held, threads"])
def test_two_ranks_that_share_a_cache_download_as_much_as_one(name: str, shards: RemoteSet, tmp_path: Path) -> None:
    shards = shards.with_cache(0.5)
    with watch_folder(shards.cache) as most:
        found, _ = run_side_by_side(
            *((train_rank, str(tmp_path / "store"), rank, shards, name) for rank in range(2)), seconds=200
        )
    assert max(found[1:]) <= MOST, found
    assert sum(found) <= 1.01 + 3 * MOST, found
    assert most[0] <= (shards.cache_bytes or 0), most
