"""Memory of chunk streams on host and device, and how chunks get there (with a stand-in for CUDA)."""

import gc
import tracemalloc
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from penstock_test_parts import eventually, run_isolated

from penstock import LoaderError, OptionError
from penstock.feed import device as device_stage
from penstock.feed import loader as loader_module
from penstock.recipes.streams import (
    PipelineChunkLoader,
    PipelineProfiler,
    RandomChunkLoader,
    SimulationWriter,
    create_zarr_loader,
)
from penstock.recipes.streams import loaders as chunk_loaders
from penstock.recipes.streams import rows as chunk_rows

# -- main memory -------------------------------------------------------------------------------------------------------

ROWS, NEURONS = 8000, 700  # 22.4 MB, and half as much stimulus


def fresh(start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
    return np.ones((stop - start, NEURONS), np.float32), np.ones((stop - start, NEURONS // 2), np.float32)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("memory") / "sim"
    with SimulationWriter(folder, np.zeros((NEURONS, 5)), 2 * ROWS) as writer:
        for _ in range(0, 2 * ROWS, 2000):
            writer.append(np.ones((2000, NEURONS, 4), np.float32))
    return folder


class SlowestMoment:
    """A profiler that keeps the loop at its worst moment: the next chunk has come, all others are read ahead again.

    The loop still holds the chunk before, since it has not got the next one yet.
    """

    def __init__(self, prefetch: int, chunks: int) -> None:
        self.prefetch, self.chunks, self.loaded, self.taken = prefetch, chunks, 0, 0

    def record(self, stage: str, seconds: float, nbytes: int) -> None:
        if stage == "read":
            self.loaded += 1
        if stage == "wait":
            self.taken += 1
            ready = min(self.chunks, self.taken + self.prefetch)
            assert eventually(lambda: self.loaded >= ready), "chunks are read ahead while the loop is busy"


def measured(folder: Path | None, prefetch: int) -> tuple[int, int, int]:
    """Return the estimate, the peak of a training loop, and its peak at the slowest moment."""
    peaks = []
    for profiler in (None, SlowestMoment(prefetch, 8)):
        load_fn: Any = fresh if folder is None else create_zarr_loader(folder, 3, 4, NEURONS // 2)
        loader = RandomChunkLoader(load_fn, 2 * ROWS, ROWS, "cpu", prefetch=prefetch, profiler=profiler)
        estimate = loader.memory_estimate().host_bytes
        gc.collect()
        tracemalloc.start()
        loader.start_epoch(8)
        for _ in range(8):
            chunk_data, chunk_stim = loader.get_next_chunk()
            chunk_data[0, 0] += chunk_stim[0, 0]
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        del chunk_data, chunk_stim
        loader.cleanup()
    return estimate, peaks[0], peaks[1]


@pytest.mark.parametrize("prefetch", [1, 3])
@pytest.mark.parametrize("kind", ["fresh arrays", "zarr"])
def test_the_estimate_is_the_measured_peak(store: Path, prefetch: int, kind: str) -> None:
    estimate, loop, worst = run_isolated(measured, store if kind == "zarr" else None, prefetch)
    chunk_bytes = ROWS * (NEURONS + NEURONS // 2) * 4
    assert estimate == (prefetch + 2) * chunk_bytes
    # What the function makes is its own, and is there while it is copied.
    peak = estimate + chunk_bytes * (kind == "fresh arrays")
    assert worst == pytest.approx(peak, rel=0.1)
    assert loop <= 1.1 * peak


def test_the_memory_of_large_chunks_is_estimated_from_one_row() -> None:
    asked = []

    def load(start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        asked.append((start, stop))
        return np.zeros((stop - start, 13_741), np.float32), np.zeros((stop - start, 1_736), np.float32)

    estimate = RandomChunkLoader(load, 967_680, 65_536, "cpu", prefetch=2).memory_estimate()
    assert [stop - start for start, stop in asked] == [1]
    assert estimate.batch_bytes == 65_536 * (13_741 + 1_736) * 4  # 4.06 GB, 3.60 of them data
    assert (estimate.host_bytes, estimate.device_bytes) == (4 * estimate.batch_bytes, 0)


def test_a_pipeline_knows_its_memory_when_it_knows_its_chunks() -> None:
    with PipelineChunkLoader(fresh, "cpu", prefetch=2) as loader:
        with pytest.raises(LoaderError, match=r"Call start_epoch\(\) before memory_estimate"):
            loader.memory_estimate()
        loader.start_epoch([(50, 60), (0, 30), (7, 9)])
        assert loader.memory_estimate().host_bytes == 4 * 30 * (NEURONS + NEURONS // 2) * 4


# -- the device --------------------------------------------------------------------------------------------------------


class Event:
    """A copy that is over at once, or when it is waited for."""

    def __init__(self, over: bool) -> None:
        self.over = over

    def query(self) -> bool:
        return self.over

    def synchronize(self) -> None:
        self.over = True


class Streams:
    """Stands in for CudaStreams: copies are clones; notes what is issued, and what there is at the same time."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, int]] = []
        self.copies_are_over = True
        self.on_side = False
        self.before_delivery: Callable[[], Any] = lambda: None
        self.most_on_device = 0
        self._on_device: list[weakref.ref[torch.Tensor]] = []

    @contextmanager
    def side(self) -> Iterator[None]:
        self.on_side = True
        yield
        self.on_side = False

    def move(self, tensor: torch.Tensor) -> torch.Tensor:
        assert self.on_side, "copies are issued on the side stream"
        self.calls.append(("move", int(tensor[0])))
        copy = tensor.clone()
        self._on_device = [ref for ref in self._on_device if ref() is not None] + [weakref.ref(copy)]
        self.most_on_device = max(self.most_on_device, len(self._on_device))
        return copy

    def record_copy(self) -> Event:
        return Event(self.copies_are_over)

    def wait(self, event: Event) -> None:
        self.calls.append(("wait", 0))
        self.before_delivery()

    def record_use(self, tensor: torch.Tensor) -> torch.Tensor:
        self.calls.append(("record_use", int(tensor[0])))
        return tensor

    def moved(self) -> list[int]:
        return [number for step, number in self.calls if step == "move"]


class Pinned:
    """Stands in for page-locked memory, and counts it."""

    def __init__(self) -> None:
        self.n_bytes = 0

    def __call__(self, n_bytes: int) -> np.ndarray:
        self.n_bytes += n_bytes
        return np.empty(n_bytes, np.uint8)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> tuple[Streams, Pinned]:
    """Let loaders believe that there is a CUDA device."""
    streams, pinned = Streams(), Pinned()
    monkeypatch.setattr(device_stage, "CudaStreams", lambda device: streams)
    for module in (chunk_loaders, loader_module):
        monkeypatch.setattr(module, "resolve_device", torch.device)
    for module in (chunk_rows, loader_module):
        monkeypatch.setattr(module, "allocate_pinned", pinned)
    monkeypatch.setattr(chunk_loaders, "torch", SimpleNamespace(Generator=lambda device: torch.Generator()))
    return streams, pinned


def rows(start: int, stop: int) -> np.ndarray:
    return np.arange(start, stop, dtype=np.int64)


CHUNKS = [(1000 * n, 1000 * n + 512) for n in range(12)]


@pytest.mark.parametrize("ahead", [1, 2])
def test_chunks_are_copied_to_the_device_ahead_of_the_one_that_computes(
    cuda: tuple[Streams, Pinned], ahead: int
) -> None:
    streams, profiler = cuda[0], PipelineProfiler()
    profiler.start()
    with PipelineChunkLoader(rows, "cuda", prefetch=1, gpu_prefetch=ahead, profiler=profiler) as loader:
        loader.start_epoch(CHUNKS)
        for taken in range(1, len(CHUNKS) + 1):
            start, (chunk,) = loader.get_next_chunk()
            assert start == CHUNKS[taken - 1][0]
            assert torch.equal(chunk, torch.arange(*CHUNKS[taken - 1]))
            assert streams.moved() == [start for start, _ in CHUNKS[: taken + ahead]]
            assert ("record_use", start) in streams.calls
        assert loader.get_next_chunk() == (None, None)
    stats = profiler.get_stats()
    assert stats["gpu_transfer"]["count"] == stats["disk_load"]["count"] == len(CHUNKS)


@pytest.mark.parametrize("ahead", [1, 2])
@pytest.mark.parametrize("prefetch", [1, 3])
def test_the_estimate_for_a_device_is_what_is_there_at_once(
    cuda: tuple[Streams, Pinned], prefetch: int, ahead: int
) -> None:
    streams, pinned = cuda
    profiler = PipelineProfiler()
    profiler.start()

    def until_all_is_read_ahead() -> None:
        ready = min(len(CHUNKS), len(streams.moved()) + prefetch)
        assert eventually(lambda: profiler.get_stats()["disk_load"]["count"] >= ready)

    streams.before_delivery = until_all_is_read_ahead
    with PipelineChunkLoader(rows, "cuda", prefetch, ahead, profiler=profiler) as loader:
        loader.start_epoch(CHUNKS)
        for _ in CHUNKS:
            chunk = loader.get_next_chunk()
        estimate = loader.memory_estimate()
        del chunk
    chunk_bytes = 512 * 8
    assert streams.most_on_device * chunk_bytes == estimate.device_bytes
    assert pinned.n_bytes == estimate.host_bytes


def test_memory_of_copies_under_way_is_not_used_again(cuda: tuple[Streams, Pinned]) -> None:
    streams, pinned = cuda
    streams.copies_are_over = False
    with PipelineChunkLoader(rows, "cuda") as loader:
        loader.start_epoch(CHUNKS)
        for _ in CHUNKS:
            loader.get_next_chunk()
    assert pinned.n_bytes == len(CHUNKS) * 512 * 8


def test_random_chunks_take_the_same_way(cuda: tuple[Streams, Pinned]) -> None:
    profiler = PipelineProfiler()
    profiler.start()
    with RandomChunkLoader(rows, 4000, 100, "cuda", seed=1, profiler=profiler) as loader:
        for _ in range(2):
            loader.start_epoch(5)
            while (chunk := loader.get_next_chunk())[0] is not None:
                assert torch.equal(chunk[0], torch.arange(chunk.start, chunk.stop))
                chunk[0].fill_(-1)
    assert profiler.get_stats()["gpu_transfer"]["count"] == 10


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_cuda_without_a_cuda_device_is_refused_when_the_loader_is_made() -> None:
    with pytest.raises(ValueError, match="no CUDA device"):
        RandomChunkLoader(rows, 100, 10)


def test_a_stream_that_needs_more_than_it_may_take_is_refused_before_it_starts() -> None:
    data = np.zeros((1000, 250), np.float32)  # 1 kB a row

    def load(start: int, stop: int) -> Any:
        return (data[start:stop].copy(),)

    with RandomChunkLoader(load, 1000, 100, "cpu", prefetch=2, memory_bytes=390_000) as loader:
        with pytest.raises(OptionError, match=r"memory_bytes must be enough .* needs 0\.4 MB.*, got 0\.4 MB"):
            loader.start_epoch(3)
    with RandomChunkLoader(load, 1000, 100, "cpu", prefetch=2, memory_bytes=400_000, device_bytes=1) as loader:
        loader.start_epoch(3)
        assert loader.get_next_chunk()[0].shape == (100, 250)
    with PipelineChunkLoader(load, "cpu", memory_bytes=390_000) as loader:
        loader.start_epoch([(0, 100)])
        with pytest.raises(OptionError, match="memory_bytes"):
            loader.start_epoch([(0, 200)])
