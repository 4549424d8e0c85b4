"""A zarr array over HTTP whose server fails, lies, stalls or refuses: the right rows, or an error that names them."""

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from penstock_faulty_store import FaultyStore, serve_folder

from penstock import Loader, Plan, ReadError, RunOptions, Sequential, Span, WorkerError
from penstock.files.stores.options import StoreOptions
from penstock.source.stored.source import ZarrSource

DATA = np.arange(1, 201, dtype="i4").reshape(50, 4)
BAD = "/c/2/0"  # rows 20 to 29
FAULTS = [500, 503, 429, 403, "reset", "short", "long", "cut"]


BRIEF = StoreOptions(deadline_seconds=0.5)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[FaultyStore]:
    for name, compressors in (("packed", "auto"), ("plain", None)):
        options = {"chunks": (10, 4), "dtype": "i4", "compressors": compressors, "fill_value": 0}
        zarr.create_array(tmp_path / name, shape=DATA.shape, **options)[...] = DATA
    with serve_folder(tmp_path) as served:
        yield served


def is_same(found: Any, start: int, stop: int) -> bool:
    return bool(found["data"].tobytes() == DATA[start:stop].tobytes())


@pytest.mark.parametrize("name", ["packed", "plain"])
def test_whatever_the_server_answers_rows_are_right_or_an_error_names_them(name: str, store: FaultyStore) -> None:
    assert is_same(ZarrSource(f"{store.url}/{name}").read(Span(0, 50)), 0, 50)
    for fault in FAULTS:
        store.fault = lambda path: None
        source = ZarrSource(f"{store.url}/{name}", store=BRIEF)
        source.close()  # what was read to open it is forgotten
        store.fault = lambda path, fault=fault: fault if path.endswith(BAD) else None
        message = rf"(Could not read|Damaged: item 20 in) chunk \(2, 0\) of {re.escape(store.url)}/{name}: \S.*"
        with pytest.raises(ReadError, match=message) as caught:
            source.read(Span(15, 35))
        assert "\n" not in str(caught.value), fault
        assert is_same(source.read(Span(0, 20)), 0, 20), fault
        assert is_same(source.read(Span(30, 50)), 30, 50), fault
    store.fault = lambda path: None
    assert is_same(source.read(Span(0, 50)), 0, 50), "it recovers as soon as the server does"


@pytest.mark.parametrize("fault", [500, 503, 429, "reset", "short"])
def test_a_fault_that_passes_costs_nothing_but_time(fault: Any, store: FaultyStore) -> None:
    source = ZarrSource(f"{store.url}/plain")
    source.close()  # what was read to open it is forgotten
    seen = Counter[str]()

    def first_two(path: str) -> Any:
        seen[path] += 1
        return fault if seen[path] <= 2 else None

    store.fault = first_two
    assert is_same(source.read(Span(0, 50)), 0, 50)
    assert min(seen[f"/plain/c/{row}/0"] for row in range(5)) >= 3


def test_a_server_that_stalls_is_a_read_error_after_the_stated_time(store: FaultyStore) -> None:
    source = ZarrSource(f"{store.url}/plain", store=BRIEF)
    source.close()  # what was read to open it is forgotten
    store.fault = lambda path: "stall" if path.endswith(BAD) else None
    with pytest.raises(ReadError, match=r"chunk \(2, 0\) of .*/plain/c/2/0"):
        source.read(Span(0, 50))
    assert is_same(source.read(Span(30, 50)), 30, 50)


def test_a_batch_that_waits_for_a_stalled_server_is_named_when_its_time_is_over(store: FaultyStore) -> None:
    source = ZarrSource(f"{store.url}/plain")
    source.close()  # what was read to open it is forgotten
    plan = Plan(source.index, Sequential(), batch_size=10)
    store.fault = lambda path: "stall" if path.endswith(BAD) else None
    options = RunOptions(executor="threads", timeout_seconds=2.0)
    found = []
    with Loader(source, plan, num_workers=1, options=options) as loader:
        with pytest.raises(WorkerError, match="No batch within timeout_seconds") as caught:
            found.extend(batch["data"].numpy().tobytes() for batch in loader)
        store.stopped.set()
    # Small batches are read together: the one that is waited for may be before the one that stalls.
    count = len(found)
    assert count <= 2
    assert found == [DATA[start : start + 10].tobytes() for start in range(0, 10 * count, 10)]
    assert f"batch {count} of epoch 0, items {list(range(10 * count, 10 * count + 10))}" in str(caught.value)


def consume(loader: Loader, found: list[bytes], store: FaultyStore, fault: int) -> None:
    """Add the batches to `found`; after two of them, every request is answered with `fault`."""
    for batch in loader:
        found.append(batch["data"].numpy().tobytes())
        if len(found) == 2:
            store.fault = lambda path: fault


@pytest.mark.parametrize("fault", [401, 403])
def test_credentials_that_expire_in_mid_epoch_are_an_error_and_with_others_it_resumes(
    fault: int, store: FaultyStore
) -> None:
    source = ZarrSource(f"{store.url}/packed", store=BRIEF)
    source.close()  # what was read to open it is forgotten
    plan = Plan(source.index, Sequential(), batch_size=10)
    found: list[bytes] = []
    with Loader(source, plan, options=RunOptions(read_ahead_bytes=0)) as loader:
        with pytest.raises(ReadError, match=rf"chunk \(\d, 0\) of {re.escape(store.url)}/packed: .*{fault}"):
            consume(loader, found, store, fault)
        state = loader.state_dict()
    assert 2 <= len(found) < 5, "batches that were made before are delivered"
    store.fault = lambda path: None
    with Loader(ZarrSource(f"{store.url}/packed"), plan) as loader:
        loader.load_state_dict(state)
        found += [batch["data"].numpy().tobytes() for batch in loader]
    assert found == [DATA[start : start + 10].tobytes() for start in range(0, 50, 10)]
