"""Reading ahead from zarr stores, npy files and HDF5 files, and giving their pages back."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import zarr
from penstock_hint_checks import check_given_back, check_kept, check_read_ahead, drop_pages, wait_for
from penstock_page_cache import cached_pages
from penstock_stores import (
    ITEMS,
    TRUTH,
    WHOLE,
    WIDTH,
    WRITERS,
    Store,
    chunk_files,
    write_other_codec,
    write_v2,
    write_v3,
)

from penstock import Loader, Plan, RunOptions, WindowShuffle
from penstock.source.stored.source import ZarrSource

each_store = pytest.mark.parametrize("write", WRITERS, ids=lambda write: write.__name__.removeprefix("write_"))


@each_store
def test_items_are_read_ahead_and_given_back(tmp_path: Path, write: Callable[[Path], Store]) -> None:
    store = write(tmp_path)
    source = store.open()
    store.check_read_ahead(source)
    assert (source.take(ITEMS)["x"] == TRUTH[ITEMS]).all()
    assert wait_for(lambda: source.prepare(ITEMS) == 0)
    if not store.by_row:  # other rows are in the same chunks
        check_kept(lambda: source.take(ITEMS), lambda: source.release(ITEMS), store.ranges)
    check_given_back(lambda: source.release(WHOLE), store.ranges)
    assert (source.take(WHOLE)["x"] == TRUTH[WHOLE]).all()
    stored = sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file())
    assert 0.9 * stored < (source.stored_bytes or 0) <= stored
    source.close()


def test_a_loader_gives_back_what_it_read(tmp_path: Path) -> None:
    store = write_v3(tmp_path)
    source = store.open()
    plan = Plan(source.index, WindowShuffle(window=4), batch_size=16)
    options = RunOptions(page_cache_bytes=0, read_ahead_bytes=0)  # reading ahead goes on into the next epoch
    drop_pages(tmp_path)

    def is_given_back() -> bool:
        with Loader(source, plan, options=options) as loader:
            delivered = np.concatenate([batch["x"].numpy() for batch in loader])
        assert (np.sort(delivered[:, 0]) == np.sort(TRUTH[:, 0])).all()
        left = [cached_pages(path).any() for path in (store.path / "c").glob("*/0")]
        return sum(left) <= 0.1 * len(left)

    assert wait_for(is_given_back)


def test_a_store_of_zarr_python_is_read_ahead(tmp_path: Path) -> None:
    store = write_other_codec(tmp_path)
    source = store.open()
    items = np.array([0, 19, 18])
    check_read_ahead(tmp_path, lambda: source.prepare(items), store.ranges)
    whole = np.array([0, 1, 2, 3, 16, 17, 18, 19])
    check_given_back(lambda: source.release(whole), store.ranges)
    assert (source.take(items)["x"] == TRUTH[items]).all()


def test_only_the_chunks_of_selected_columns_are_read(tmp_path: Path) -> None:
    store = write_v2(tmp_path)
    source = ZarrSource(store.path, {"right": (".", slice(WIDTH - 5, WIDTH))})
    check_read_ahead(tmp_path, lambda: source.prepare(ITEMS), chunk_files(["0.1", "79.1"])(store.path))
    assert not cached_pages(store.path / "0.0").any()
    assert not cached_pages(store.path / "5.1").any()


def test_a_chunk_of_several_fields_is_opened_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = write_v2(tmp_path)
    source = ZarrSource(store.path, {"a": (".", slice(0, 10)), "b": ".", "c": (".", 3)})
    opened: list[str] = []
    real = os.open
    monkeypatch.setattr(os, "open", lambda path, *rest: (opened.append(str(path)), real(path, *rest))[1])
    source.prepare(np.repeat(ITEMS, 1000))
    names = [Path(path).name for path in opened if str(store.path) in path]
    assert sorted(names) == ["0.0", "0.1", "79.0", "79.1"]


def test_a_bounded_number_of_files_is_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    zarr.create_array(tmp_path / "x", data=np.arange(600), chunks=(1,), zarr_format=2, compressors=None)
    source = ZarrSource(tmp_path / "x")
    opened: list[str] = []
    held, most = set[int](), [0]
    real, real_close = os.open, os.close

    def open_file(path: Any, *rest: Any) -> int:
        handle = real(path, *rest)
        opened.append(Path(path).name)
        held.add(handle)
        most[0] = max(most[0], len(held))
        return handle

    monkeypatch.setattr(os, "open", open_file)
    monkeypatch.setattr(os, "close", lambda handle: (held.discard(handle), real_close(handle))[1])
    items = np.arange(600)[::-1]
    source.prepare(items)
    monkeypatch.undo()
    assert opened == [str(item) for item in items[:512]]  # those that are read first
    assert most[0] <= 32
    assert source.take(items)["data"].tolist() == items.tolist()


def test_chunks_at_a_url_are_fetched_ahead(tmp_path: Path) -> None:
    store = write_v3(tmp_path)
    local, source = ZarrSource(store.path), ZarrSource(f"file://{store.path}")
    assert (source.is_remote, source.cache_bytes, local.is_remote) == (True, 0, False)
    n_chunks = len(np.unique(ITEMS // local.index.largest_chunk))
    source.close()  # what was read to open it is forgotten
    assert source.prepare(ITEMS) >= n_chunks
    assert source.prepare(ITEMS) == 0, "they were asked for"
    read = {name: array.tobytes() for name, array in source.take(ITEMS).items()}
    assert read == {name: array.tobytes() for name, array in local.take(ITEMS).items()}
    everything = np.arange(len(source.index))
    source.release(everything)
    assert source.prepare(ITEMS) >= n_chunks, "they were given back"
    assert source.stored_bytes == local.stored_bytes
    source.close()


def test_chunks_that_are_not_stored_are_no_reason_to_read(tmp_path: Path) -> None:
    sparse = zarr.create_array(
        tmp_path / "x", shape=(80, 10), dtype="i4", chunks=(4, 10), shards=(40, 10), fill_value=7
    )
    sparse[:4] = np.arange(40).reshape(4, 10)
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file.create_dataset("chunks", (80, 10), "i4", chunks=(4, 10), fillvalue=7)[:4] = sparse[:4]
        file.create_dataset("none", (80, 10), "i4", fillvalue=7)
        layout = h5py.VirtualLayout((80, 10), "i4")
        layout[:] = h5py.VirtualSource(".", "chunks", (80, 10))
        file.create_virtual_dataset("virtual", layout)
    everything = np.arange(80)
    for source in (
        ZarrSource(tmp_path / "x"),
        *(ZarrSource(tmp_path / "x.h5", {"data": name}) for name in ("chunks", "none", "virtual")),
    ):
        before = source.take(everything)["data"]
        assert source.prepare(everything) is not None
        source.release(everything)
        assert (source.take(everything)["data"] == before).all()
