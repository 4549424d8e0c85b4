"""Faults of a server while a loader runs: the right batches, or one typed error that names the URL and the items."""

import re
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from penstock_cases import some_cases
from penstock_remote import Endpoint
from penstock_remote_sets import RemoteSet, digest_batch, digests_of, make_plan, write_set

from penstock import Loader, ReadError, RunOptions, Shuffle, WindowShuffle

EXECUTORS = {
    "inline": (0, RunOptions()),
    "threads": (2, RunOptions(executor="threads")),
    "processes": (2, RunOptions(executor="processes", start_method="fork")),
}
ORDERS = {"items": Shuffle(), "windows": WindowShuffle(2)}
PASSING: dict[str, list[dict[str, Any]]] = {
    "a burst of 503": [{"kind": "status", "status": 503, "code": "SlowDown", "times": 6}],
    "429 with Retry-After": [{"kind": "status", "status": 429, "retry_after": 0.1, "times": 3}],
    "connections that are reset": [{"kind": "reset", "skip": 1, "times": 3}],
    "short bodies": [{"kind": "short", "skip": 1, "times": 3}],
    "wrong lengths": [{"kind": "wrong_length", "by": 7, "skip": 1, "times": 2}],
    "all of them": [
        {"kind": "drop", "times": 2},
        {"kind": "status", "status": 500, "times": 2},
        {"kind": "reset", "skip": 2, "times": 1},
        {"kind": "short", "skip": 3, "times": 1},
    ],
}


@pytest.fixture
def shards(tmp_path: Path, s3: Endpoint) -> RemoteSet:
    return write_set(tmp_path, 48, s3=s3).with_cache(0.5)


def make_loader(shards: RemoteSet, place: str, order: str = "items", executor: str = "inline", **more: Any) -> Loader:
    source = shards.open(place, **more)
    workers, options = EXECUTORS[executor]
    return Loader(source, make_plan(source, ORDERS[order]), num_workers=workers, options=options)


def deliver(loader: Loader) -> tuple[list[Any], ReadError | None]:
    """Return digests of the batches of an epoch up to an error, and the error."""
    found: list[Any] = []
    try:
        for batch in loader:
            found.append(digest_batch(batch))  # noqa: PERF401  # what came before an error counts
    except ReadError as error:
        return found, error
    return found, None


@some_cases(6)
@pytest.mark.parametrize("fault", PASSING)
@pytest.mark.parametrize(("place", "executor"), [("s3", "threads"), ("s3 cached", "inline")])
def test_a_fault_that_passes_changes_no_batch(
    fault: str, place: str, executor: str, shards: RemoteSet, s3: Endpoint
) -> None:
    expected = digests_of(make_loader(shards, "local"), 2)
    with make_loader(shards, place, executor=executor) as loader:
        s3.break_requests(*({"method": "GET", "key": "set/*.tar", **rule} for rule in PASSING[fault]))
        assert digests_of(loader, 2) == expected
        assert loader.transfers is not None
        assert loader.transfers.retries > 0


def test_worker_processes_retry_for_themselves_and_the_loader_sees_it(shards: RemoteSet, s3: Endpoint) -> None:
    expected = digests_of(make_loader(shards, "local", "windows"), 2)
    with make_loader(shards, "s3", "windows", "processes") as loader:
        s3.break_requests({"kind": "status", "status": 503, "key": "set/*.tar", "times": 4})
        assert digests_of(loader, 2) == expected
        assert loader.transfers is not None
        assert loader.transfers.retries >= 1
        assert loader.transfers.n_bytes >= shards.stored_bytes // 2


STAYING: dict[str, dict[str, Any]] = {
    "503 for ever": {"kind": "status", "status": 503},
    "403 for ever": {"kind": "status", "status": 403, "code": "AccessDenied"},
    "no connection": {"kind": "drop"},
    "a stall": {"kind": "stall", "seconds": 60},
    "a stall in the body": {"kind": "stall", "seconds": 60, "in_body": True},
}


@some_cases(5)
@pytest.mark.parametrize("fault", STAYING)
@pytest.mark.parametrize("executor", ["threads", "processes"])
def test_a_fault_that_stays_is_one_error_that_names_the_place_and_the_items(
    fault: str, executor: str, shards: RemoteSet, s3: Endpoint
) -> None:
    options = replace(s3.options, deadline_seconds=2.0, retries=4)
    with make_loader(shards, "s3", executor=executor, store=options) as loader:
        s3.break_requests({**STAYING[fault], "method": "GET", "key": "set/*2.tar"})
        began = time.monotonic()
        delivered, error = deliver(loader)
        seconds = time.monotonic() - began
        message = "\n".join([str(error), *getattr(error, "__notes__", [])])
        assert re.search(r"s3://bucket/\S+/set/shard_000002\.tar", message), message
        assert re.search(r"item \d+|items \d+", message), message
        assert f"batch {len(delivered)} of epoch 0" in message
        assert seconds < 60, "the deadline is 2 seconds"
        state = loader.state_dict()
    s3.break_requests()
    expected = digests_of(make_loader(shards, "local"), 1)
    with make_loader(shards, "s3", executor=executor) as loader:
        loader.load_state_dict(state)
        assert digests_of(loader, 1) == expected[len(delivered) :]


@pytest.mark.parametrize("place", ["s3", "s3 cached"])
def test_a_shard_that_is_replaced_during_an_epoch_is_never_mixed(place: str, shards: RemoteSet, s3: Endpoint) -> None:
    expected = digests_of(make_loader(shards, "local"), 2)
    with make_loader(shards, place) as loader:
        first = digest_batch(next(iter(loader)))
        shard = s3.folder / "set" / "shard_000001.tar"
        shard.with_name("new").write_bytes(shard.read_bytes()[:-1] + b"\1")
        shard.with_name("new").replace(shard)
        loader.source.close()  # what was fetched ahead is gone
        loader.load_state_dict(loader.state_dict())
        delivered, error = deliver(loader)
    assert [first, *delivered] == expected[: 1 + len(delivered)]
    if place == "s3":  # a cache has what it was at the beginning
        assert error is not None
    if error is not None:
        assert "set/shard_000001.tar" in str(error)
