"""Files that change, other threads and forks while items are read ahead and given back."""

import multiprocessing as mp
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from penstock_special_files import plant
from penstock_stores import TRUTH, WRITERS, Store, write_shards
from penstock_test_parts import run_at_once

from penstock import ReadError, SourceError
from penstock.source.stored.source import ZarrSource

_N_ROWS = 16
_ITEMS = np.array([1, 0, 15, 1])
_WHOLE = np.array([*range(4), *range(12, 16)])

each_store = pytest.mark.parametrize("write", WRITERS, ids=lambda write: write.__name__.removeprefix("write_"))


def files_of(store: Store) -> list[Path]:
    return sorted({path for path, _, _ in store.ranges})


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 3)


def remove(path: Path) -> None:
    path.unlink()


def replace(path: Path) -> None:
    other = path.with_name("other")
    other.write_bytes(path.read_bytes()[::-1])
    other.replace(path)


def outcome(source: ZarrSource, path: Path) -> Any:
    try:
        return source.take(_ITEMS)["x"].tolist()
    except (ReadError, SourceError) as error:
        return type(error), str(error).replace(str(path), "PATH")


@each_store
@pytest.mark.parametrize("is_open", [False, True], ids=["not opened", "opened"])
def test_a_store_that_changes_raises_what_it_did_before_when_it_is_read(
    tmp_path: Path, write: Callable[[Path], Store], is_open: bool
) -> None:
    store = write(tmp_path, _N_ROWS)
    files = {path: path.read_bytes() for path in files_of(store)}
    for fault in (truncate, remove, replace):
        outcomes = []
        for is_prepared in (False, True):
            for path, content in files.items():
                path.write_bytes(content)
                os.utime(path, ns=(10**18, 10**18))
            source = store.open()
            if is_open:
                source.take(_ITEMS)
                source.prepare(_ITEMS)
            for path in files:
                fault(path)
            if is_prepared:
                assert source.prepare(_ITEMS) >= 0
                source.release(_WHOLE)
            outcomes.append(outcome(source, tmp_path))
            source.close()
        assert outcomes[0] == outcomes[1], fault


@each_store
def test_a_fifo_in_place_of_a_file_does_not_block(tmp_path: Path, write: Callable[[Path], Store]) -> None:
    store = write(tmp_path, _N_ROWS)
    source = store.open()
    path = files_of(store)[0]
    aside = path.rename(path.with_name("aside"))
    with plant("fifo", path):
        source.prepare(_ITEMS)
        source.release(_WHOLE)
    aside.rename(path)
    assert (source.take(_ITEMS)["x"] == TRUTH[_ITEMS]).all()


@each_store
def test_threads_may_prepare_read_release_and_close_at_once(tmp_path: Path, write: Callable[[Path], Store]) -> None:
    source = write(tmp_path, _N_ROWS).open()

    def work(number: int) -> None:
        rng = np.random.default_rng(number)
        for _ in range(3):
            items = rng.integers(0, _N_ROWS, 4)
            source.prepare(items)
            assert (source.take(items)["x"] == TRUTH[items]).all()
            source.release(np.arange(items[0] // 4 * 4, items[0] // 4 * 4 + 4))
            if number == 0:
                source.close()

    run_at_once(4, work)


def _read_in_child(source: ZarrSource) -> None:
    source.prepare(_ITEMS)
    assert (source.take(_ITEMS)["x"] == TRUTH[_ITEMS]).all()
    source.release(_WHOLE)


def test_a_child_process_reads_ahead_for_itself(tmp_path: Path) -> None:
    store = write_shards(tmp_path, _N_ROWS)
    source = store.open()
    source.prepare(_ITEMS)
    child = mp.get_context("fork").Process(target=_read_in_child, args=(source,))
    child.start()
    child.join(60)
    assert child.exitcode == 0
    again = pickle.loads(pickle.dumps(source))
    store.check_read_ahead(again)
