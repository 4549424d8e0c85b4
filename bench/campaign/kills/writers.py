"""Writers that are killed: of shards, of predictions, of indexes of archives."""

import math
import random
import re
from pathlib import Path
from typing import Any

import numpy as np
import zarr
from penstock_convert_parts import tree
from penstock_test_shards import archive, npy

from bench.campaign.kills.resumable import Work, kill_and_resume
from bench.campaign.trials import Kind
from penstock import TarSource
from penstock.core.errors import SourceError
from penstock.recipes.cellmap.predictions import CellMapDatasetWriter
from penstock.recipes.streams import FlyVisSim, SimulationWriter, load_column_slice
from penstock.recipes.webdataset import WebDatasetWriter
from penstock.shard.index_tars import index_archives
from penstock.shard.outputs.write_options import WriteOptions
from penstock.shard.writer import ShardWriter

__all__ = ["WRITERS"]


def _sample(number: int) -> dict[str, Any]:
    return {"x": np.array([number, 7, -number], np.int32), "y": np.full(number % 4, number, np.float32)}


def _read_shards(folder: Path) -> Any:
    """Return every item; None if there is no dataset."""
    try:
        source = TarSource(folder)
    except SourceError:
        return None
    block = source.take(np.arange(len(source.index)))
    source.close()
    return [(x.tolist(), y.tolist()) for x, y in zip(block["x"], block["y"], strict=True)]


def _kill_a_shard_writer(rng: random.Random, folder: Path, number: int) -> int:
    n_samples, size = rng.randint(1, 14), rng.randint(1, 5)
    options = WriteOptions(size, compression=rng.choice(("none", "none", "gz")))

    def run(place: Path) -> None:
        writer = ShardWriter(place, options, resume=True)
        for one in range(writer.written, n_samples):
            writer.write(_sample(one), None, {"number": one})
        writer.commit()

    return kill_and_resume(Work(run, _read_shards), rng, folder)


def _kill_a_webdataset_writer(rng: random.Random, folder: Path, number: int) -> int:
    n_samples, size = rng.randint(1, 14), rng.randint(1, 5)

    def run(place: Path) -> None:
        with WebDatasetWriter(place, shard_size=size, resume=True) as writer:
            for one in range(writer.written, n_samples):
                writer.write_sample(_sample(one), sample_id=f"key{one}")

    return kill_and_resume(Work(run, _read_shards), rng, folder)


def _kill_an_index(rng: random.Random, folder: Path, number: int) -> int:
    """Index archives of others, as `penstock index` does; what was killed is begun again."""
    sizes = [rng.randint(1, 6) for _ in range(rng.randint(1, 4))]

    def run(place: Path) -> None:
        place.mkdir(exist_ok=True)
        for one, size in enumerate(sizes):
            if not (place / f"old_{one}.tar").exists():
                first = sum(sizes[:one])
                samples = [{name: npy(value) for name, value in _named(first + n).items()} for n in range(size)]
                archive(place / "making", samples, first)
                (place / "making").rename(place / f"old_{one}.tar")
        manifest, problems = index_archives(place)
        assert manifest is not None
        assert problems == []

    return kill_and_resume(Work(run, _read_shards), rng, folder)


def _named(number: int) -> dict[str, Any]:
    return {f"{name}.npy": value for name, value in _sample(number).items()}


_COLUMNS = (FlyVisSim.VOLTAGE, FlyVisSim.FLUORESCENCE)
_SHAPE, _PATCH = (13, 20, 17), {"shape": (6, 8, 8), "scale": (8, 4, 4)}
_BOUNDS = {"gt": {"z": [0, 64], "y": [0, 64], "x": [0, 32]}}


def _kill_a_writer_of_predictions(rng: random.Random, folder: Path, number: int) -> int:
    raw = folder / "em"
    group = zarr.create_group(raw, zarr_format=2)
    group.create_array("s0", data=np.arange(math.prod(_SHAPE), dtype=np.float32).reshape(_SHAPE), chunks=(7, 5, 6))
    datasets = [{"path": "s0", "coordinateTransformations": [{"type": "scale", "scale": [8.0, 4.0, 4.0]}]}]
    axes = [{"name": name, "type": "space"} for name in "zyx"]
    group.attrs["multiscales"] = [{"version": "0.4", "axes": axes, "datasets": datasets}]

    def run(place: Path) -> None:
        patches = {"raw": _PATCH}, {"gt": _PATCH}
        with CellMapDatasetWriter(str(raw), f"{place}/[mito]", ["mito"], *patches, _BOUNDS, resume=True) as writer:
            for batch in writer.loader(batch_size=2):
                writer[batch["idx"]] = {"mito": batch["raw"] + 100_000}

    def read(place: Path) -> Any:
        if not (place / "mito").exists():
            return None
        found = zarr.open_group(str(place / "mito"), mode="r")
        return {name: np.asarray(array[...]).tobytes() for name, array in found.arrays()}

    def files(place: Path) -> dict[str, bytes]:
        """Return the files, without the number of the run."""
        return {name: re.sub(rb'"run": ".*?"', b"", content) for name, content in tree(place).items()}

    return kill_and_resume(Work(run, read, files), rng, folder)


def _kill_a_simulation_writer(rng: random.Random, folder: Path, number: int) -> int:
    n_steps, n_neurons = rng.randint(1, 9000), rng.randint(1, 3)
    about = np.arange(5 * n_neurons, dtype=np.float32).reshape(n_neurons, 5)
    steps = np.arange(n_steps * n_neurons * 4, dtype=np.float32).reshape(n_steps, n_neurons, 4)
    stride = rng.randint(500, 3000)

    def run(place: Path) -> None:
        with SimulationWriter(place, about, n_steps, overwrite=True) as writer:
            for start in range(0, n_steps, stride):
                writer.append(steps[start : start + stride])

    def read(place: Path) -> Any:
        try:
            return [load_column_slice(place, column, 0, n_steps).tobytes() for column in _COLUMNS]
        except SourceError:
            return None

    return kill_and_resume(Work(run, read), rng, folder)


WRITERS = [
    Kind("shard-writer", "kill -9 of a ShardWriter", (1, 2), _kill_a_shard_writer, share=2),
    Kind("webdataset-writer", "kill -9 of a WebDatasetWriter", (1, 2), _kill_a_webdataset_writer),
    Kind("simulation-writer", "kill -9 of a SimulationWriter", (1, 2), _kill_a_simulation_writer),
    Kind("index", "kill -9 of `penstock index`", (1, 2), _kill_an_index),
    Kind("predictions", "kill -9 of a writer of predictions", (1, 2), _kill_a_writer_of_predictions),
]
