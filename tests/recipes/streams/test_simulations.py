"""Simulations on disk: written, read column by column, and rejected with a reason."""

import gc
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from penstock_remote import Endpoint
from penstock_test_parts import own_threads

from penstock import DamageError, OptionError, SourceError, Span, WriteError
from penstock.recipes.streams import (
    DataSplit,
    FlyVisSim,
    NeuronData,
    RandomChunkLoader,
    SimulationWriter,
    create_zarr_loader,
    load_column_slice,
    load_metadata,
)
from penstock.source.stored.folders import RemoteArguments

TIME, NEURONS = 4500, 6
DYNAMIC = [FlyVisSim.VOLTAGE, FlyVisSim.STIMULUS, FlyVisSim.CALCIUM, FlyVisSim.FLUORESCENCE]
STATIC = [FlyVisSim.INDEX, FlyVisSim.XPOS, FlyVisSim.YPOS, FlyVisSim.GROUP_TYPE, FlyVisSim.TYPE]


def frames(start: int, stop: int) -> np.ndarray:
    """Return numbers that say where they lie: 100 t + 10 n + column."""
    time, neuron, column = np.ogrid[start:stop, 0:NEURONS, 0:4]
    return (100 * time + 10 * neuron + column).astype(np.float32)


def metadata() -> np.ndarray:
    columns = [np.arange(NEURONS), np.linspace(0, 1, NEURONS), -np.arange(NEURONS), [7, 8] * 3, [0, 1, 2] * 2]
    return np.stack(columns, axis=1).astype(np.float32)


@pytest.fixture(scope="module")
def simulation(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("flyvis") / "x_list_0"
    with SimulationWriter(folder, metadata(), TIME) as writer:
        for start, stop in ((0, 700), (700, 2000), (2000, 2001), (2001, 4400), (4400, TIME)):
            writer.append(frames(start, stop))
    return folder


# -- the layout --------------------------------------------------------------------------------------------------------


def test_the_files_have_the_documented_shapes_chunks_and_compression(simulation: Path, tmp_path: Path) -> None:
    series = json.loads((simulation / "timeseries.zarr" / "zarr.json").read_text())
    assert (series["zarr_format"], series["shape"], series["data_type"]) == (3, [TIME, NEURONS, 4], "float32")
    assert series["chunk_grid"]["configuration"]["chunk_shape"] == [2000, NEURONS, 1]
    assert [codec["name"] for codec in series["codecs"]] == ["bytes", "blosc", "crc32c"]
    compression = series["codecs"][1]["configuration"]
    assert [compression[key] for key in ("cname", "clevel", "shuffle")] == ["zstd", 3, "bitshuffle"]
    with SimulationWriter(tmp_path / "sim", metadata(), TIME, zarr_format=2) as writer:
        writer.append(frames(0, TIME))
    old = json.loads((tmp_path / "sim" / "timeseries.zarr" / ".zarray").read_text())
    assert (old["zarr_format"], old["shape"], old["chunks"]) == (2, [TIME, NEURONS, 4], [2000, NEURONS, 1])
    assert [old["compressor"][key] for key in ("id", "cname", "clevel", "shuffle")] == ["blosc", "zstd", 3, 2]
    assert np.array_equal(load_column_slice(tmp_path / "sim", 3, 0, TIME), frames(0, TIME)[..., 0])


def test_a_simulation_at_a_url_is_read_as_on_this_machine(simulation: Path, s3: Endpoint) -> None:
    shutil.copytree(simulation, s3.folder / "sim")
    where = str(s3.url / "sim")
    remote: RemoteArguments = {"store": s3.options}
    assert load_metadata(f"{where}.zarr", **remote).tobytes() == load_metadata(simulation).tobytes()
    wanted = load_column_slice(simulation, 3, 1990, 2500, 4)
    assert load_column_slice(where, 3, 1990, 2500, 4, **remote).tobytes() == wanted.tobytes()
    orders = []
    for load_fn in (create_zarr_loader(where, 3, 4, 2, **remote), create_zarr_loader(simulation, 3, 4, 2)):
        with RandomChunkLoader(load_fn, TIME, 300, "cpu", seed=4) as loader:
            loader.start_epoch(num_chunks=6)
            orders.append([[part.numpy().tobytes() for part in loader.get_next_chunk()] for _ in range(6)])
    assert orders[0] == orders[1]
    with pytest.raises(SourceError, match=r"No zarr array in s3://.*/none/timeseries\.zarr"):
        create_zarr_loader(str(s3.url / "none"), 3, 4, 2, **remote)


def test_zarr_reads_what_was_written(simulation: Path) -> None:
    zarr: Any = pytest.importorskip("zarr")
    assert np.array_equal(zarr.open_array(simulation / "timeseries.zarr", mode="r")[:], frames(0, TIME))


def test_the_columns_have_fixed_numbers() -> None:
    assert [entry.value for entry in STATIC] == [0, 1, 2, 5, 6]
    assert [entry.value for entry in DYNAMIC] == [3, 4, 7, 8]
    assert FlyVisSim["VOLTAGE"].value == 3


def test_a_writer_says_what_does_not_fit(tmp_path: Path) -> None:
    with pytest.raises(
        OptionError, match=r"metadata must have shape \(neurons, 5\), of 1 to \d+ neurons, got \(3, 4\)"
    ):
        SimulationWriter(tmp_path / "a", np.zeros((3, 4)), 10)
    with pytest.raises(OptionError, match="total_timesteps must be an integer >= 1, got 0"):
        SimulationWriter(tmp_path / "b", np.zeros((3, 5)), 0)
    writer = SimulationWriter(tmp_path / "c", np.zeros((3, 5)), 10)
    with pytest.raises(OptionError, match=r"frames must have shape \(time, 3, 4\), got \(2, 4, 4\)"):
        writer.append(np.zeros((2, 4, 4)))
    writer.append(np.zeros((6, 3, 4)))
    with pytest.raises(OptionError, match="At most total_timesteps=10 steps can be appended, got 11"):
        writer.append(np.zeros((5, 3, 4)))
    with pytest.raises(
        OptionError, match=r"total_timesteps=10 steps must be appended before close\(\), got 6\. Nothing is published"
    ):
        writer.close()


def test_steps_may_come_one_by_one_in_memory_that_is_used_again(tmp_path: Path) -> None:
    given = np.empty((1, NEURONS, 4), np.float32)
    with SimulationWriter(tmp_path / "single", metadata(), 2100) as single:
        for step in range(2100):
            given[:] = frames(step, step + 1)
            single.append(given)
    assert np.array_equal(load_column_slice(tmp_path / "single", 3, 0, 2100), frames(0, 2100)[..., 0])


def test_a_block_that_fails_is_not_told_that_steps_are_missing(tmp_path: Path) -> None:
    with pytest.raises(KeyError, match="mine"), SimulationWriter(tmp_path / "a", np.zeros((3, 5)), 10):
        raise KeyError("mine")


# -- replacing ---------------------------------------------------------------------------------------------------------


def test_one_writer_at_a_time_and_what_it_left_is_written_again(tmp_path: Path, simulation: Path) -> None:
    writer = SimulationWriter(tmp_path / "sim", metadata(), TIME)
    writer.append(frames(0, 4100))
    with pytest.raises(WriteError, match="Another writer is at work"):
        SimulationWriter(tmp_path / "sim", metadata(), TIME)
    with pytest.raises(KeyError), writer:
        raise KeyError
    with pytest.raises(WriteError, match=r"this writer of .*sim was closed before it was complete"):
        writer.append(frames(4100, TIME))
    with pytest.raises(SourceError, match=r"a writer has not finished there\. Run it again: it starts over"):
        load_metadata(tmp_path / "sim")
    writer = SimulationWriter(tmp_path / "sim", metadata(), TIME)
    del writer  # without an end, as if its process had died
    gc.collect()
    with SimulationWriter(tmp_path / "sim", metadata(), TIME) as writer:
        writer.append(frames(0, TIME))
    writer.close()
    assert _contents(tmp_path / "sim") == _contents(simulation)


def test_a_simulation_is_replaced_only_on_request_and_when_the_next_one_is_complete(tmp_path: Path) -> None:
    folder = tmp_path / "sim"
    with SimulationWriter(folder, metadata(), TIME) as writer:
        writer.append(frames(0, TIME))
    (folder / "notes.txt").write_text("mine")
    with pytest.raises(WriteError, match=r"sim holds a simulation already\. Replace it with overwrite=True"):
        SimulationWriter(folder, metadata(), TIME)
    with SimulationWriter(folder, metadata() + 1, 5, overwrite=True) as writer:
        assert np.array_equal(load_column_slice(folder, 3, 0, TIME), frames(0, TIME)[..., 0])
        writer.append(frames(7, 12))
    assert np.array_equal(load_column_slice(folder, 3, 0, 5), frames(7, 12)[..., 0])
    assert np.array_equal(load_metadata(folder), metadata() + 1)
    assert sorted(path.name for path in folder.iterdir()) == ["metadata.zarr", "notes.txt", "timeseries.zarr"]


def _contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


# -- reading -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("column", DYNAMIC)
@pytest.mark.parametrize("span", [(0, TIME), (1999, 2001), (4499, 4500), (7, 4321), (5, 5)])
def test_a_column_of_a_stretch_of_time(simulation: Path, column: FlyVisSim, span: tuple[int, int]) -> None:
    found = load_column_slice(simulation, column.value, *span)
    assert found.dtype == np.float32
    assert np.array_equal(found, frames(*span)[..., DYNAMIC.index(column)])


@pytest.mark.parametrize("limit", [0, 1, 4, NEURONS])
def test_a_limit_of_neurons_is_exact_also_zero(simulation: Path, limit: int) -> None:
    found = load_column_slice(simulation, 4, 1990, 2010, neuron_limit=limit)
    assert np.array_equal(found, frames(1990, 2010)[:, :limit, 1])


@pytest.mark.parametrize("name", ["x_list_0", "x_list_0.zarr", "x_list_0.npy"])
def test_a_trailing_suffix_is_left_out(simulation: Path, name: str) -> None:
    assert load_column_slice(str(simulation.parent / name), 3, 0, 3).shape == (3, NEURONS)
    assert load_metadata(simulation.parent / name).shape == (NEURONS, 5)


@pytest.mark.parametrize("column", [*STATIC, 9, -1])
def test_a_column_that_does_not_change_with_time_is_refused(simulation: Path, column: int) -> None:
    for ask in (
        lambda: load_column_slice(simulation, column, 0, 3),
        lambda: create_zarr_loader(simulation, column, 4, 2),
        lambda: create_zarr_loader(simulation, 3, column, 2),
    ):
        with pytest.raises(OptionError, match=r"column must be one of VOLTAGE \(3\).*load_metadata"):
            ask()


@pytest.mark.parametrize("span", [(-1, 3), (3, 2), (0, TIME + 1)])
def test_time_that_is_not_there_is_refused(simulation: Path, span: tuple[int, int]) -> None:
    with pytest.raises(OptionError, match=f"within the {TIME} steps of .*, got {span[0]} to {span[1]}"):
        load_column_slice(simulation, 3, *span)


@pytest.mark.parametrize("limit", [-1, NEURONS + 1, 2.0])
def test_neurons_that_are_not_there_are_refused(simulation: Path, limit: Any) -> None:
    said = f"<= {NEURONS}, the neurons of .*, got {NEURONS + 1}" if limit > NEURONS else "an integer >= 0"
    with pytest.raises(OptionError, match=f"neuron_limit must be {said}"):
        load_column_slice(simulation, 3, 0, 3, neuron_limit=limit)
    with pytest.raises(OptionError, match=f"num_stim_dims must be {said}"):
        create_zarr_loader(simulation, 3, 4, limit)


def test_a_folder_without_a_simulation_says_so(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=r"No simulation in .*: timeseries\.zarr is missing"):
        create_zarr_loader(tmp_path, 3, 4, 2)


# -- the loader --------------------------------------------------------------------------------------------------------


def test_a_zarr_loader_reads_both_columns_of_absolute_times(simulation: Path) -> None:
    load_fn = create_zarr_loader(data_path=simulation, column_idx=7, stim_column_idx=4, num_stim_dims=2)
    for span in ((0, 10), (1990, 4010), (4400, TIME)):
        data, stim = load_fn(*span)
        assert np.array_equal(data, frames(*span)[..., 2])
        assert np.array_equal(stim, frames(*span)[:, :2, 1])
        assert data.flags.c_contiguous
        assert stim.flags.c_contiguous
    assert own_threads() == []


def test_arrays_that_are_kept_are_not_read_over(simulation: Path) -> None:
    load_fn = create_zarr_loader(simulation, 3, 4, 2)
    kept = [load_fn(start, start + 100)[0] for start in range(0, 2000, 100)]
    for start, data in zip(range(0, 2000, 100), kept, strict=True):
        assert np.array_equal(data, frames(start, start + 100)[..., 0])


def test_what_is_decoded_for_what_is_given_can_be_asked(simulation: Path) -> None:
    load_fn: Any = create_zarr_loader(simulation, 3, 4, 2)
    # Chunks of 2000 steps hold all neurons of one column: two of six neurons cost three times as much.
    assert load_fn.source.read_amplification(Span(0, 4000)) == {"data": 1.0, "stim": 3.0}


def test_a_chunk_that_is_damaged_is_named(tmp_path: Path) -> None:
    with SimulationWriter(tmp_path / "sim", metadata(), TIME) as writer:
        writer.append(frames(0, TIME))
    chunk = tmp_path / "sim" / "timeseries.zarr" / "c" / "1" / "0" / "0"
    content = bytearray(chunk.read_bytes())
    content[-40] ^= 1  # blosc alone would not notice
    chunk.write_bytes(content)
    load_fn = create_zarr_loader(tmp_path / "sim", 3, 4, 2)
    assert np.array_equal(load_fn(0, 2000)[0], frames(0, 2000)[..., 0])
    with pytest.raises(DamageError, match=r"chunk \(1, 0, 0\) of .*timeseries\.zarr"):
        load_fn(1500, 2500)
    assert own_threads() == []


# -- neurons and splits ------------------------------------------------------------------------------------------------


def test_what_is_known_of_each_neuron(simulation: Path) -> None:
    found = load_metadata(simulation)
    assert np.array_equal(found, metadata())
    neurons = NeuronData.from_metadata(found)
    assert (neurons.ix.tolist(), neurons.ix.dtype) == (list(range(NEURONS)), np.int32)
    assert np.array_equal(neurons.pos, metadata()[:, 1:3])
    assert (neurons.group_type.tolist(), neurons.group_type.dtype) == ([7, 8] * 3, np.uint8)
    assert (neurons.type.tolist(), neurons.type.dtype) == ([0, 1, 2] * 2, np.uint8)
    assert [indices.tolist() for indices in neurons.indices_per_type] == [[0, 3], [1, 4], [2, 5]]


def test_types_with_gaps_are_refused() -> None:
    gaps = metadata()
    gaps[:, 4] = [0, 1, 3, 0, 1, 3]
    with pytest.raises(SourceError, match=r"types of neurons must be .*, got \[0, 1, 3\]"):
        NeuronData.from_metadata(gaps)


def test_a_split_names_two_stretches_that_do_not_meet() -> None:
    split = DataSplit(train_start=0, train_end=80, validation_start=80, validation_end=100)
    assert (split.train_end, split.validation_end) == (80, 100)
    assert DataSplit(train_start=50, train_end=80, validation_start=0, validation_end=50).train_start == 50


@pytest.mark.parametrize(
    ("numbers", "words"),
    [
        ((-1, 80, 80, 100), "train_start must be an integer >= 0, got -1"),
        ((0, 80, 80, 80), "validation_end must be > validation_start=80, got 80"),
        ((80, 80, 0, 10), "train_end must be > train_start=80, got 80"),
        ((0, 80, 79, 100), "Training and validation must not overlap, got 0 to 80 and 79 to 100"),
        ((0, 80.0, 80, 100), "train_end must be an integer >= 0, got 80.0"),
    ],
)
def test_splits_that_cannot_be_are_refused(numbers: tuple[Any, ...], words: str) -> None:
    with pytest.raises(OptionError, match=words):
        DataSplit(*numbers)


def test_a_split_has_no_other_fields() -> None:
    with pytest.raises(TypeError, match="test_start"):
        DataSplit(0, 80, 80, 100, test_start=3)  # type: ignore[call-arg]
