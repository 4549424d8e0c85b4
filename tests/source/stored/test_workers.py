"""ZarrSource in threads, forks, spawned processes and loaders: same rows, bounded threads, nothing left behind."""

import pickle
import threading
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from hypothesis import given
from hypothesis import strategies as st
from penstock_test_parts import (
    Surroundings,
    own_threads,
    planned_items,
    read_answer,
    run_isolated,
    start_script,
    to_plain,
)

from penstock import DamageError, Loader, Plan, ReadError, RunOptions, Span, WindowShuffle
from penstock.source import read_pool
from penstock.source.stored.source import ZarrSource
from penstock.source.stored.zarr import array as zarr_store

N = 60


def write(folder: Path, fill_value: Any = 0) -> Path:
    """Write two arrays with different chunks: x of item i is i, y is (i, i + 1/4)."""
    x = np.arange(N)
    y = np.stack([x, x + 0.25], axis=1).astype("f4")
    options: dict[str, Any] = {"zarr_format": 2, "fill_value": fill_value}
    zarr.create_array(folder / "x", shape=x.shape, chunks=(10,), dtype=x.dtype, **options)[...] = x
    zarr.create_array(folder / "y", shape=y.shape, chunks=(5, 1), dtype=y.dtype, **options)[...] = y
    return folder


def check_all(source: ZarrSource) -> str:
    block = source.read(Span(0, N))
    assert block["x"].tolist() == list(range(N))
    assert block["y"].tolist() == [[i, i + 0.25] for i in range(N)]
    assert source.take(np.array([N - 1, 0, 31, 31]))["x"].tolist() == [N - 1, 0, 31, 31]
    return "alive"


def zarr_threads() -> list[str]:
    return [name for name in own_threads() if name.startswith("penstock-help")]


@pytest.fixture
def source(tmp_path: Path) -> Any:
    source = ZarrSource(write(tmp_path), threads=2)
    yield source
    source.close()


# -- pickling ----------------------------------------------------------------------------------------------------------


def test_a_pickle_holds_no_data_and_no_threads(source: ZarrSource) -> None:
    check_all(source)
    pickled = pickle.dumps(source)
    assert len(pickled) < 4096
    again = pickle.loads(pickled)
    assert check_all(again) == "alive"
    again.close()


def test_a_pickle_does_not_grow_with_what_was_read(tmp_path: Path) -> None:
    data = np.arange(4000, dtype="i4")
    zarr.create_array(tmp_path / "a", shape=data.shape, chunks=(2,), shards=(400,), dtype="i4")[...] = data
    source = ZarrSource(tmp_path / "a")
    fresh = len(pickle.dumps(source))
    source.read(Span(0, 4000))
    assert len(pickle.dumps(source)) == fresh < 4096


# -- threads -----------------------------------------------------------------------------------------------------------


def test_no_thread_is_left_after_a_read_and_reading_works_after_close(source: ZarrSource) -> None:
    for _ in range(2):
        check_all(source)
        assert not zarr_threads()
        source.close()


def test_all_readers_of_a_source_share_its_helper_threads(source: ZarrSource, monkeypatch: pytest.MonkeyPatch) -> None:
    counted: list[int] = []
    real = zarr_store.ZarrArray.locate_chunk

    def counting(self: Any, coordinates: Any) -> Any:
        counted.append(len(zarr_threads()))
        return real(self, coordinates)

    monkeypatch.setattr(zarr_store.ZarrArray, "locate_chunk", counting)
    with ThreadPoolExecutor(6) as readers:
        assert set(readers.map(lambda _: check_all(source), range(24))) == {"alive"}
    assert max(counted) == 1  # of two threads, the reader is one
    assert not zarr_threads()


def test_threads_1_starts_no_helper_thread(tmp_path: Path) -> None:
    source = ZarrSource(write(tmp_path), threads=1)
    check_all(source)
    assert not zarr_threads()


def test_the_default_is_one_thread_per_cpu_and_one_in_a_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read_pool, "count_cpus", lambda: 6)
    assert read_pool.ReadPool(None).threads == 6
    monkeypatch.setattr(read_pool, "count_cpus", lambda: 600)
    assert read_pool.ReadPool(None).threads == 8
    monkeypatch.setattr(read_pool, "parent_process", lambda: "a parent")
    assert read_pool.ReadPool(None).threads == 1
    assert read_pool.ReadPool(3).threads == 3


def test_close_during_reads_harms_none_of_them(source: ZarrSource) -> None:
    stop = threading.Event()

    def reader(_: int) -> str:
        for _ in range(40):
            check_all(source)
        return "alive"

    def closer() -> None:
        while not stop.is_set():
            source.close()

    closing = threading.Thread(target=closer)
    closing.start()
    try:
        with ThreadPoolExecutor(3) as readers:
            assert set(readers.map(reader, range(3))) == {"alive"}
    finally:
        stop.set()
        closing.join()
    source.close()
    assert not zarr_threads()


def test_an_error_is_raised_once_no_thread_writes_to_the_rows_any_more(tmp_path: Path) -> None:
    """The first chunk fails while a later one is delayed: the error is raised only when that one is done."""
    source = ZarrSource(write(tmp_path), ["x"], threads=2)
    (tmp_path / "x" / "0").write_bytes(b"broken")
    array = source._arrays["x"]
    real = type(array).locate_chunk
    reached, go_on, late = threading.Event(), threading.Event(), []

    def slow(self: Any, coordinates: tuple[int, ...]) -> Any:
        if coordinates == (0,):
            assert reached.wait(120)
        if coordinates == (1,):
            reached.set()
            assert go_on.wait(120)
            late.append(coordinates)
        return real(self, coordinates)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(array), "locate_chunk", slow)
        with ThreadPoolExecutor(1) as reader:
            reading = reader.submit(source.read, Span(0, N))
            assert not wait([reading], timeout=0.1).done
            go_on.set()
            with pytest.raises(DamageError, match=r"chunk \(0,\)"):
                reading.result(120)
    assert late == [(1,)]
    source.close()


def test_no_process_thread_or_shared_memory_is_left_behind(tmp_path: Path) -> None:
    # zarr-python writes the store, and keeps an event loop of its own: its files do not count.
    write(tmp_path / "warm")
    assert run_isolated(leave_nothing, tmp_path / "warm") == "clean"


def leave_nothing(folder: Path) -> str:
    before = Surroundings.now()
    source = ZarrSource(folder, threads=4)
    check_all(source)
    (folder / "x" / "3").write_bytes(b"broken")
    with pytest.raises(DamageError):
        source.read(Span(0, N))
    source.close()
    before.check()
    return "clean"


# -- processes ---------------------------------------------------------------------------------------------------------


def test_a_fork_after_a_read_has_threads_of_its_own(source: ZarrSource) -> None:
    check_all(source)
    assert run_isolated(read_and_count, source) == ["alive", 0]
    check_all(source)


def read_and_count(source: ZarrSource) -> list[Any]:
    return [check_all(source), len(zarr_threads())]


def test_a_fork_in_the_middle_of_a_read_does_not_hang(source: ZarrSource) -> None:
    stop = threading.Event()

    def reader() -> None:
        while not stop.is_set():
            check_all(source)

    threads = [threading.Thread(target=reader) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        assert [run_isolated(check_all, source) for _ in range(8)] == ["alive"] * 8
    finally:
        stop.set()
        for thread in threads:
            thread.join()


WAYS: dict[str, tuple[int, dict[str, Any]]] = {
    "inline": (0, {}),
    "2 threads": (2, {"executor": "threads"}),
    "2 forks": (2, {"executor": "processes", "start_method": "fork"}),
    "1 spawned": (1, {"executor": "processes", "start_method": "spawn"}),
}


@pytest.mark.parametrize(
    ("workers", "options", "read_before"),
    [(*way, before) for way in WAYS.values() for before in (True, False)][:-1],  # a spawned process knows no before
    ids=[f"{way}, {before}" for way in WAYS for before in ("read before", "not read before")][:-1],
)
def test_a_loader_gives_the_planned_rows_with_every_executor(
    source: ZarrSource, workers: int, options: dict[str, Any], read_before: bool
) -> None:
    if read_before:
        check_all(source)
    plan = Plan(source.index, WindowShuffle(window=2), batch_size=7, seed=5, tail="short")
    with Loader(source, plan, num_workers=workers, options=RunOptions(**options)) as loader:
        epochs = [
            [to_plain(batch) for batch in loader] for _ in range(1 if options.get("start_method") == "spawn" else 2)
        ]
    for epoch, batches in enumerate(epochs):
        assert [batch["x"] for batch in batches] == planned_items(plan, epoch)
        assert [batch["y"] for batch in batches] == [[[i, i + 0.25] for i in batch["x"]] for batch in batches]


@pytest.mark.parametrize(("workers", "options"), list(WAYS.values())[:3], ids=list(WAYS)[:3])
def test_damage_reaches_the_consumer_with_array_and_chunk(
    tmp_path: Path, workers: int, options: dict[str, Any]
) -> None:
    source = ZarrSource(write(tmp_path), threads=2)
    (tmp_path / "y" / "3.1").write_bytes(b"broken")
    plan = Plan(source.index, WindowShuffle(window=1), batch_size=10, tail="short")
    with Loader(source, plan, num_workers=workers, options=RunOptions(**options)) as loader:
        with pytest.raises(DamageError, match=r"chunk \(3, 1\) of .*/y") as caught:
            list(loader)
    assert caught.value.item is not None
    assert 15 <= caught.value.item < 20
    source.close()


def test_another_process_gives_the_same(source: ZarrSource, tmp_path: Path) -> None:
    text = """
import json, pickle, sys
from pathlib import Path
from penstock import Span
source = pickle.loads(Path(sys.argv[1]).read_bytes())
print(json.dumps([source.index.digest, source.read(Span(7, 33))["x"].tolist()]))
"""
    (tmp_path / "pickle").write_bytes(pickle.dumps(source))
    with start_script(tmp_path, text, str(tmp_path / "pickle")) as process:
        assert read_answer(process) == [source.index.digest, list(range(7, 33))]


@given(items=st.lists(st.integers(0, N - 1), max_size=30), threads=st.sampled_from([1, 2, 4]))
def test_items_are_those_requested_with_any_number_of_threads(
    tmp_path_factory: pytest.TempPathFactory, items: list[int], threads: int
) -> None:
    folder = tmp_path_factory.getbasetemp() / "shared_store"
    if not (folder / "y").exists():
        write(folder)
    source = ZarrSource(folder, threads=threads)
    block = source.take(np.array(items, np.int64))
    assert block["x"].tolist() == items
    assert block["y"][:, 1].tolist() == [i + 0.25 for i in items]
    source.close()


def test_a_store_that_is_unreadable_is_a_read_error_with_the_chunk(source: ZarrSource, tmp_path: Path) -> None:
    """A directory in place of the file cannot be read as a chunk, not even by root."""
    (tmp_path / "x" / "2").unlink()
    (tmp_path / "x" / "2").mkdir()
    with pytest.raises(ReadError, match=r"Could not read chunk \(2,\) of .*/x: .*directory"):
        source.read(Span(0, N))
    assert source.read(Span(30, N))["x"].tolist() == list(range(30, N))
