"""Shards from a bucket and from a web server, with and without a cache: the batches of the local ones, bit for bit."""

from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from penstock_cases import few_cases
from penstock_remote import Endpoint
from penstock_remote_sets import Place, RemoteSet, digests_of, make_plan, write_set
from penstock_test_parts import run_side_by_side, with_noise

from penstock import Loader, RunOptions, Sequential, Shuffle, WindowShuffle
from tests.faults.test_ranks import join_group

ORDERS: dict[str, Any] = {
    "sequential": Sequential(),
    "shuffle": Shuffle(),
    "windows": WindowShuffle(2),
    "windows, not held": WindowShuffle(2, held=False),
}
FORK = RunOptions(executor="processes", start_method="fork")
KEPT = RunOptions(executor="processes", start_method="fork", persistent=True)
SPAWN = RunOptions(executor="processes", start_method="spawn", persistent=True)
THREADS = RunOptions(executor="threads")
PLACES: tuple[Place, ...] = ("local", "s3", "s3 cached", "http", "http cached")

# Pairwise: each place with each executor and each order at least once.
CASES: list[tuple[Place, str, int, RunOptions]] = [
    ("s3", "shuffle", 0, RunOptions()),
    ("s3", "windows", 2, FORK),
    ("s3", "sequential", 3, THREADS),
    ("s3", "windows, not held", 1, SPAWN),
    ("s3 cached", "windows", 0, RunOptions()),
    ("s3 cached", "shuffle", 3, FORK),
    ("s3 cached", "windows, not held", 2, THREADS),
    ("s3 cached", "sequential", 2, KEPT),
    ("http", "windows, not held", 0, RunOptions()),
    ("http", "sequential", 1, FORK),
    ("http", "shuffle", 1, SPAWN),
    ("http", "windows", 1, THREADS),
    ("http cached", "sequential", 0, RunOptions()),
    ("http cached", "windows", 2, SPAWN),
    ("http cached", "shuffle", 2, RunOptions()),
]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, s3_server: Endpoint, http_server: Endpoint) -> RemoteSet:
    folder = tmp_path_factory.mktemp("batches")
    return write_set(folder, s3=s3_server.below("batches"), http=http_server.below("batches")).with_cache(0.5)


@pytest.fixture(scope="module")
def expected(served: RemoteSet) -> dict[str, list[Any]]:
    """Every batch of two epochs from the local folder, in each order."""
    return {order: digests_of(make_loader(served, "local", order), 2) for order in ORDERS}


def make_loader(shards: RemoteSet, place: Place, order: str, workers: int = 0, options: Any = None) -> Loader:
    source = shards.open(place)
    plan = make_plan(source, ORDERS[order], lanes=3)
    return Loader(source, plan, transform=with_noise, num_workers=workers, options=options)


@pytest.mark.parametrize("case", CASES, ids=lambda case: " ".join(map(str, case[:3])))
def test_the_batches_are_those_of_the_local_folder(
    case: tuple[Place, str, int, RunOptions], served: RemoteSet, expected: dict[str, list[Any]]
) -> None:
    with make_loader(served, *case) as loader:
        assert digests_of(loader, 2) == expected[case[1]]


@given(
    places=st.tuples(st.sampled_from(PLACES), st.sampled_from(PLACES)),
    order=st.sampled_from(sorted(ORDERS)),
    stop=st.integers(0, 28),
)
@few_cases
def test_a_state_of_one_place_resumes_at_any_other(
    places: tuple[Place, Place], order: str, stop: int, served: RemoteSet, expected: dict[str, list[Any]]
) -> None:
    n_done = 0
    with make_loader(served, places[0], order, 2, THREADS) as loader:
        while n_done < stop:
            for _ in loader:
                n_done += 1
                if n_done == stop:
                    break
        state = loader.state_dict()
    with make_loader(served, places[1], order) as loader:
        loader.load_state_dict(state)
        assert digests_of(loader, 2) == expected[order][stop:]


# -- ranks -------------------------------------------------------------------------------------------------------------


def train_rank(store: str, rank: int, shards: RemoteSet, place: Place, order: str) -> list[Any]:
    """Return the digests of the batches of one rank of two, in two epochs."""
    join_group(store, rank, 2)
    with make_loader(shards, place, order, 1, THREADS) as loader:
        found = digests_of(loader, 2)
    dist.barrier()
    dist.destroy_process_group()
    return found


@pytest.mark.parametrize(("place", "order"), [("s3 cached", "shuffle"), ("http cached", "windows")])
def test_two_ranks_that_share_a_cache_deliver_the_order(
    place: Place, order: str, served: RemoteSet, expected: dict[str, list[Any]], tmp_path: Path
) -> None:
    cases = [(train_rank, str(tmp_path / "store"), rank, served, place, order) for rank in range(2)]
    ranks = run_side_by_side(*cases)
    assert [batch for step in zip(*ranks, strict=True) for batch in step] == expected[order]
