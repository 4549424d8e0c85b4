"""Chunk streams: which chunks come, whole and intact, and what happens when something fails or stops early."""

import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from penstock_test_parts import Mishap, Surroundings, eventually, mishap_in_the_users_code, own_threads

from penstock import LoaderError, OptionError, PlanError
from penstock.recipes.streams import Chunk, PipelineChunkLoader, RandomChunkLoader, SimulationWriter, create_zarr_loader

TOTAL, NEURONS, STIM = 5000, 4, 2
Window = tuple[int, int]


def slices(start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
    """Return arrays that say where they lie: 10 t + n, and its negative."""
    data = 10 * np.arange(start, stop, dtype=np.float32)[:, None] + np.arange(NEURONS, dtype=np.float32)
    return data, -data[:, :STIM]


def stream(load_fn: Callable[[int, int], Any] = slices, size: int = 100, **options: Any) -> RandomChunkLoader:
    return RandomChunkLoader(load_fn, TOTAL, size, "cpu", **{"seed": 5, **options})


def rest(loader: RandomChunkLoader) -> list[Window]:
    """Return the windows that are left in the epoch; each is intact, and is written over."""
    found = []
    while True:
        chunk = loader.get_next_chunk()
        if chunk[0] is None:
            return found
        data, stim = chunk
        for tensor, wanted in zip((data, stim), slices(chunk.start, chunk.stop), strict=True):
            assert torch.equal(tensor, torch.from_numpy(wanted.copy())), f"chunk {chunk.index} is not what it claims"
            tensor.fill_(-7)
        found.append((chunk.start, chunk.stop))


def epoch(loader: RandomChunkLoader, num_chunks: int | None = 6) -> list[Window]:
    loader.start_epoch(num_chunks)
    return rest(loader)


# -- what is delivered -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a simulation whose voltage and stimulus say where they lie."""
    folder = tmp_path_factory.mktemp("store") / "sim"
    frames = np.zeros((TOTAL, NEURONS, 4), np.float32)
    frames[..., 0] = slices(0, TOTAL)[0]
    frames[..., 1] = -frames[..., 0]
    with SimulationWriter(folder, np.zeros((NEURONS, 5)), TOTAL) as writer:
        writer.append(frames)
    return folder


def load_fns(store: Path) -> dict[str, Callable[[int, int], Any]]:
    whole, negative = slices(0, TOTAL)
    np.save(store.parent / "x.npy", whole)
    mapped = np.load(store.parent / "x.npy", mmap_mode="r")
    return {
        "fresh arrays": slices,
        "views of one array": lambda a, b: (whole[a:b], negative[a:b]),
        "a read-only map": lambda a, b: (mapped[a:b], -mapped[a:b, :STIM]),
        "zarr": create_zarr_loader(store, 3, 4, STIM),
    }


@pytest.mark.parametrize("kind", ["fresh arrays", "views of one array", "a read-only map", "zarr"])
@pytest.mark.parametrize("options", [{"prefetch": 1}, {"prefetch": 3}, {"coverage": "partition", "align": 20}])
def test_every_chunk_is_the_slice_it_claims_to_be_though_those_before_it_are_written_over(
    store: Path, kind: str, options: dict[str, Any]
) -> None:
    load_fn = load_fns(store)[kind]
    with stream(load_fn, size=700, **options) as loader:
        count = None if "coverage" in options else 8
        for _ in range(3):
            found = epoch(loader, count)
            assert len(found) == (count or loader.chunks_per_pass)
            if count is None:
                assert sorted(row for window in found for row in range(*window)) == list(range(TOTAL))
    for array, wanted in zip(load_fn(0, TOTAL), slices(0, TOTAL), strict=True):
        assert np.array_equal(array, wanted)


def test_chunks_that_are_kept_stay_as_they_are(store: Path) -> None:
    with stream(create_zarr_loader(store, 3, 4, STIM), size=700, prefetch=1) as loader:
        loader.start_epoch(12)
        kept = [loader.get_next_chunk() for _ in range(12)]
    for chunk in kept:
        assert torch.equal(chunk[0], torch.from_numpy(slices(chunk.start, chunk.stop)[0]))


def test_a_chunk_unpacks_and_knows_where_it_lies() -> None:
    with stream() as loader:
        loader.start_epoch(num_chunks=2)
        for number in range(2):
            chunk = loader.get_next_chunk()
            data, stim = chunk
            assert isinstance(chunk, Chunk)
            assert (data.shape, stim.shape, data.dtype) == ((100, NEURONS), (100, STIM), torch.float32)
            assert (chunk.index, chunk.start, chunk.stop - chunk.start) == (number, int(data[0, 0]) // 10, 100)


@pytest.mark.parametrize(("size", "length"), [(1, 1), (TOTAL, TOTAL), (65_536, TOTAL), (333, 333)])
def test_windows_of_any_size(size: int, length: int) -> None:
    with stream(size=size) as loader:
        assert {stop - start for start, stop in epoch(loader)} == {length}


def test_windows_begin_at_multiples_of_time_units() -> None:
    with stream(time_units=7) as loader:
        assert all(start % 7 == 0 for start, _ in epoch(loader, 50))
    with stream(time_units=4, coverage="partition", align=6) as loader:
        assert all(start % 12 == 0 for start, _ in epoch(loader, None))


def test_a_function_may_give_one_array_or_many() -> None:
    for n_arrays in (1, 3):
        with stream(lambda a, b, n=n_arrays: [np.zeros((b - a, k + 1)) for k in range(n)]) as loader:
            loader.start_epoch(1)
            assert [tensor.shape[1] for tensor in loader.get_next_chunk()] == list(range(1, n_arrays + 1))
            assert loader.get_next_chunk() == (None,) * n_arrays


def test_the_number_of_chunks_may_change_between_epochs() -> None:
    with stream() as loader, stream() as other:
        for count in (3, 5, 5, 1, 8):
            assert epoch(loader, count) == epoch(other, 10)[:count]


def test_the_number_of_chunks_of_a_pass_cannot_be_changed() -> None:
    with stream(coverage="partition") as loader:
        assert loader.chunks_per_pass == 51
        assert len(epoch(loader, 51)) == len(epoch(loader, None)) == 51
        with pytest.raises(OptionError, match=r"num_chunks must be None or 51 \(one pass over all rows\), got 50"):
            loader.start_epoch(50)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"prefetch": 0}, "prefetch must be an integer >= 1, got 0"),
        ({"time_units": 0}, "time_units must be an integer >= 1, got 0"),
        ({"coverage": "all"}, "coverage must be one of 'random', 'partition', got 'all'"),
        ({"seed": -1}, "seed must be an integer >= 0, got -1"),
        ({"coverage": "partition", "align": 0}, "align must be an integer >= 1, got 0"),
    ],
)
def test_options_that_cannot_be_are_refused_when_the_loader_is_made(options: dict[str, Any], words: str) -> None:
    with pytest.raises(OptionError, match=words):
        stream(**options)


@pytest.mark.parametrize("count", [None, 0, -1, 2.5])
def test_random_windows_need_a_number_of_chunks(count: Any) -> None:
    with stream() as loader, pytest.raises(OptionError, match="num_chunks"):
        loader.start_epoch(count)


# -- the end -----------------------------------------------------------------------------------------------------------


def test_before_an_epoch_is_started_there_is_a_clear_error() -> None:
    loader = stream()
    for _ in range(2):
        with pytest.raises(LoaderError, match=r"Call start_epoch\(\) before"):
            loader.get_next_chunk()
    loader.start_epoch(1)
    loader.cleanup()
    with pytest.raises(LoaderError, match=r"Call start_epoch\(\) before"):
        loader.get_next_chunk()


def test_after_the_end_comes_the_end_again() -> None:
    with stream() as loader:
        epoch(loader, 2)
        assert [loader.get_next_chunk() for _ in range(3)] == [(None, None)] * 3
        assert loader.get_stats()["chunks_transferred"] == 2


@pytest.mark.parametrize("prefetch", [1, 2, 5])
@pytest.mark.parametrize("taken", [0, 1, 3, 6])
def test_an_epoch_after_an_early_break_is_whole(prefetch: int, taken: int) -> None:
    with stream() as reference:
        first, second, third = (epoch(reference) for _ in range(3))
    with stream(prefetch=prefetch) as loader:
        loader.start_epoch(6)
        for _ in range(taken):
            loader.get_next_chunk()
        # An epoch of which nothing was delivered was not begun.
        assert epoch(loader) == (second if taken else first)
        assert epoch(loader) == (third if taken else second)


@pytest.mark.parametrize("prefetch", [1, 2, 5])
@pytest.mark.parametrize("taken", [0, 1, 6, 7])
def test_cleanup_ends_all_threads_and_twice_is_fine(store: Path, prefetch: int, taken: int) -> None:
    load_fn = create_zarr_loader(store, 3, 4, STIM)
    before = Surroundings.now()
    loader = stream(load_fn, prefetch=prefetch)
    loader.start_epoch(6)
    for _ in range(taken):
        loader.get_next_chunk()
    loader.cleanup()
    assert own_threads() == []
    loader.cleanup()
    before.check()
    assert len(epoch(loader)) == 6  # it can be used again
    loader.cleanup()
    assert own_threads() == []


def test_a_loader_that_is_dropped_ends_its_threads() -> None:
    loader = stream()
    loader.start_epoch(50)
    loader.get_next_chunk()
    del loader
    assert eventually(lambda: not own_threads())


# -- errors ------------------------------------------------------------------------------------------------------------


class Failing:
    """Fails in its k-th call, as long as it is told to."""

    def __init__(self, k: int) -> None:
        self.k, self.calls, self.failing = k, 0, True

    def __call__(self, start: int, stop: int) -> Any:
        self.calls += 1
        if self.failing and self.calls > self.k:
            mishap_in_the_users_code("load_fn", self.k)
        return slices(start, stop)


@pytest.mark.parametrize("prefetch", [1, 2, 5])
@pytest.mark.parametrize("k", [0, 1, 4])
def test_an_error_of_the_function_comes_in_its_place_again_and_again_and_then_a_new_epoch_is_whole(
    prefetch: int, k: int
) -> None:
    load_fn = Failing(k)
    with stream(load_fn, prefetch=prefetch) as loader:
        loader.start_epoch(6)
        for _ in range(k):
            assert loader.get_next_chunk()[0] is not None
        for _ in range(3):
            with pytest.raises(Mishap) as caught:
                loader.get_next_chunk()
            assert (caught.value.where, caught.value.item) == ("load_fn", k)
            assert "mishap_in_the_users_code" in [
                frame.name for frame in traceback.extract_tb(caught.value.__traceback__)
            ]
            assert any("while loading the chunk from" in note for note in caught.value.__notes__)
        load_fn.failing = False
        assert len(epoch(loader)) == 6
    assert eventually(lambda: not own_threads())


def test_cleanup_after_an_error_leaves_nothing() -> None:
    loader = stream(Failing(1))
    loader.start_epoch(6)
    loader.get_next_chunk()
    with pytest.raises(Mishap):
        loader.get_next_chunk()
    loader.cleanup()
    assert eventually(lambda: not own_threads())


# -- statistics --------------------------------------------------------------------------------------------------------


def test_statistics_count_the_chunks_of_this_epoch_and_what_was_waited() -> None:
    with stream(prefetch=2) as loader:
        for _ in range(2):
            loader.start_epoch(6)
            for _ in range(3):
                loader.get_next_chunk()
            # Three are taken, two more are ready.
            assert eventually(lambda: loader.get_stats()["chunks_loaded"] == 5)
            stats = loader.get_stats()
            assert stats["chunks_transferred"] == 3
            assert 0 < stats["wait_fraction"] < 1
        assert loader.timings.stages["read"].calls == 10


# -- windows of the caller's own ---------------------------------------------------------------------------------------


def pipeline(**options: Any) -> PipelineChunkLoader:
    return PipelineChunkLoader(slices, "cpu", **options)


@pytest.mark.parametrize("prefetch", [1, 4])
def test_a_pipeline_gives_the_chunks_it_is_told_in_that_order(prefetch: int) -> None:
    with pipeline(prefetch=prefetch) as loader:
        for chunks in ([(5, 9), (0, 1), (5, 9)], [(0, 1000)], [(7, 8), (100, 321)]):
            loader.start_epoch(chunks)
            found = []
            while True:
                start, arrays = loader.get_next_chunk()
                if start is None:
                    break
                assert torch.equal(arrays[0], torch.from_numpy(slices(start, arrays.stop)[0]))
                found.append((start, arrays.stop))
            assert found == chunks
            assert loader.get_next_chunk() == (None, None)
            assert loader.get_stats()["chunks_transferred"] == len(chunks)


@pytest.mark.parametrize("bad", [(3, 3), (4, 2), (-1, 2), (0, 2**31 + 1)])
def test_a_pipeline_refuses_chunks_that_are_empty_or_inverted(bad: Window) -> None:
    with pipeline() as loader, pytest.raises(PlanError, match=rf"Chunks must be .* got \({bad[0]}, {bad[1]}\)"):
        loader.start_epoch([(0, 5), bad])


def test_a_pipeline_refuses_no_chunks_at_all() -> None:
    with pipeline() as loader, pytest.raises(OptionError, match="non-empty sequence"):
        loader.start_epoch([])


def test_a_pipeline_goes_on_after_a_break_and_cleans_up() -> None:
    with pipeline(prefetch=3) as loader:
        loader.start_epoch([(n, n + 2) for n in range(9)])
        loader.get_next_chunk()
        loader.start_epoch([(40, 50), (60, 70)])
        assert [loader.get_next_chunk()[0] for _ in range(3)] == [40, 60, None]
    assert own_threads() == []


def test_reading_begins_with_the_epoch_and_not_with_the_first_chunk() -> None:
    begun = threading.Event()

    def load(start: int, stop: int) -> Any:
        begun.set()
        return slices(start, stop)

    with RandomChunkLoader(load, 1000, 10, "cpu", seed=1) as loader:
        assert not begun.is_set()
        loader.start_epoch(3)
        assert begun.wait(120)
        assert loader.get_stats()["chunks_transferred"] == 0
