"""Workers that are forked off a process which has used zarr, HDF5, asyncio, threads and locks before."""

import asyncio
import multiprocessing as mp
import threading
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import zarr
from penstock_test_parts import planned_items, run_isolated

from penstock import ArraySource, Loader, Plan, RunOptions, Shuffle
from penstock.source.stored.source import ZarrSource

DATA = np.arange(80, dtype="i8")


def use_zarr(folder: Path) -> list[Any]:
    """zarr-python has an event loop and threads of its own from the first read on."""
    array = zarr.open_array(folder / "a.zarr", mode="r")
    assert array[:].tolist() == DATA.tolist()
    return [array]


def use_h5py(folder: Path) -> list[Any]:
    file = h5py.File(folder / "a.h5")
    assert file["data"][:].tolist() == DATA.tolist()
    return [file]


def use_asyncio(folder: Path) -> list[Any]:
    """Run an event loop in a thread, and one that is over in this one."""
    asyncio.run(asyncio.sleep(0))
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    asyncio.run_coroutine_threadsafe(asyncio.sleep(0), loop).result()
    return [loop, thread]


def use_threads(folder: Path) -> list[Any]:
    """Read in threads without an end, so that one of them is in the middle of a read, with its locks, at the fork."""
    sources = [ZarrSource(folder / "a.zarr", threads=3), ZarrSource(folder / "a.h5", ["data"])]
    threads = [threading.Thread(target=read_without_end, args=(source,), daemon=True) for source in sources]
    for thread in threads:
        thread.start()
    return [sources, threads]


def read_without_end(source: ZarrSource) -> None:
    while True:
        source.take(np.arange(80))


def use_tensorstore(folder: Path) -> list[Any]:
    tensorstore = pytest.importorskip("tensorstore")
    spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": str(folder / "a.zarr")}}
    store = tensorstore.open(spec).result()
    assert store.read().result().tolist() == DATA.tolist()
    return [store]


def use_all(folder: Path) -> list[Any]:
    return [use(folder) for use in (use_zarr, use_h5py, use_asyncio, use_threads)]


def read_in_forked_workers(use: Any, folder: Path, kind: str) -> list[list[list[int]]]:
    held = use(folder)
    source = ZarrSource(folder / "a.zarr") if kind == "zarr" else ZarrSource(folder / "a.h5", ["data"])
    source.take(np.arange(80))  # its own threads and files, too
    plan = Plan(source.index, Shuffle(), batch_size=4, seed=2)
    options = RunOptions(executor="processes", start_method="fork")
    with Loader(source, plan, num_workers=2, options=options) as loader:
        found = [[batch["data"].tolist() for batch in loader] for _ in range(3)]
    assert held
    return found


USES = [use_zarr, use_h5py, use_asyncio, use_threads, use_all]


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
@pytest.mark.parametrize("kind", ["zarr", "hdf5"])
@pytest.mark.parametrize("use", USES, ids=lambda use: use.__name__)
def test_forked_workers_read_what_they_should(use: Any, kind: str, tmp_path: Path) -> None:
    zarr.create_array(tmp_path / "a.zarr", data=DATA, chunks=(8,))
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_dataset("data", data=DATA, chunks=(8,))
    plan = Plan(ZarrSource(tmp_path / "a.zarr").index, Shuffle(), batch_size=4, seed=2)
    wanted = [planned_items(plan, epoch) for epoch in range(3)]
    assert run_isolated(read_in_forked_workers, use, tmp_path, kind) == wanted


def test_forked_workers_read_after_tensorstore(tmp_path: Path) -> None:
    pytest.importorskip("tensorstore")
    zarr.create_array(tmp_path / "a.zarr", data=DATA, chunks=(8,))
    plan = Plan(ZarrSource(tmp_path / "a.zarr").index, Shuffle(), batch_size=4, seed=2)
    wanted = [planned_items(plan, epoch) for epoch in range(3)]
    assert run_isolated(read_in_forked_workers, use_tensorstore, tmp_path, "zarr") == wanted


def read_after_a_fork_beside_a_server() -> list[list[int]]:
    """Use workers that a server forks, fork, and use such workers again."""
    source = ArraySource({"data": DATA})
    plan = Plan(source.index, Shuffle(), batch_size=4, seed=2)
    options = RunOptions(executor="processes", start_method="forkserver")

    def read() -> list[list[int]]:
        with Loader(source, plan, num_workers=2, options=options) as loader:
            return [batch["data"].tolist() for batch in loader]

    before = read()
    receiving, sending = mp.Pipe(duplex=False)
    child = mp.get_context("fork").Process(target=lambda: sending.send(read()))
    child.start()
    sending.close()
    assert receiving.recv() == before
    child.join()
    return read()


def test_a_forked_child_has_a_server_of_workers_of_its_own() -> None:
    plan = Plan(ArraySource({"data": DATA}).index, Shuffle(), batch_size=4, seed=2)
    assert run_isolated(read_after_a_fork_beside_a_server) == planned_items(plan, 0)
