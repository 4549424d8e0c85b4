"""Everything that writes a dataset, a row each: `test_kills` says what is left of it if it is killed.

Imported by the processes that are killed, too, which are forked for each write: it does not import pytest.
"""

import io
import tarfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from penstock_convert_parts import Taped, tapes
from penstock_convert_parts import read as read_rows
from penstock_test_killer import serve

from penstock import Span, TarSource, ZarrSource
from penstock.convert import ConvertOptions, Split, write_source
from penstock.convert.add_field import AddField
from penstock.convert.convert import convert
from penstock.convert.engines import LocalEngine
from penstock.recipes.streams import SimulationWriter
from penstock.shard import manifest
from penstock.shard.index_tars import index_archives
from penstock.shard.manifest import Manifest
from penstock.shard.outputs.write_options import WriteOptions
from penstock.shard.writer import ShardWriter
from penstock.source.array import ArraySource
from tests.shard.columns.unpack import unpack_dataset

__all__ = ["SCRIPT", "WRITERS", "How", "WriterCase"]

SCRIPT = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parents[2])!r})
from tests.suites.writers import run_jobs
run_jobs()
"""
How = Literal["refuse", "resume", "overwrite"]
HALVES = (("train", 0.5), ("val", 0.5))


@dataclass(frozen=True)
class WriterCase:
    """What writes version 0 or 1 of a dataset; `read` returns its items, or raises a SourceError."""

    write: Callable[[Path, int, How], Any]
    read: Callable[[Path], Any]
    options: Mapping[str, Any]
    inputs: Callable[[Path], Any] | None = None
    """Writes what the writer reads, beside its output."""

    moments: int = 8
    """At how many changes of files it is killed, spread over the write."""

    resumes: bool = True
    replaces: bool = True
    """Whether it replaces another dataset."""

    has_threads: bool = False
    """Whether threads change files, so that the number of changes varies, and the last one may not come."""


def sample(number: int, version: int) -> dict[str, Any]:
    return {"x": np.array([number, version, -number], np.int32), "y": np.full(number % 4, version, np.float32)}


def write_shards(folder: Path, version: int, how: How, *, count: int = 0, **options: Any) -> int:
    """Write 8 samples, or 11 of another version, or `count`; return how many were there."""
    writer = ShardWriter(
        folder, WriteOptions(**{"shard_size": 3, **options}), resume=how == "resume", overwrite=how == "overwrite"
    )
    start = writer.written
    for number in range(start, count or (8 if version else 11)):
        writer.write(sample(number, version), None, {"number": number})
    writer.commit()
    return start


def read_shards(folder: Path) -> Any:
    if Manifest.read(folder / manifest.MANIFEST).layout == "columns":
        found = unpack_dataset(folder)
        return [(one["x"].tolist(), one["y"].tolist(), one["metadata"]["number"]) for one in found]
    source = TarSource(folder)
    block = source.take(np.arange(len(source.index)))
    about = [entry["number"] for entry in block["metadata"]]
    return list(zip(block["x"].tolist(), [y.tolist() for y in block["y"]], about, strict=True))


def write_conversion(folder: Path, version: int, how: How, *, compression: Any = "none", by: Any = None) -> None:
    sides = Split() if by is None else Split(HALVES, by)
    inputs = [Taped(path) for path in sorted((folder.parent / f"{folder.name} in {version}").glob("*.npy"))]
    options = ConvertOptions(WriteOptions(4, compression=compression), sides)
    convert(inputs, folder, options, engine=LocalEngine(1), existing=how)


def write_tapes(folder: Path) -> None:
    names = (("anna_7", "carl_7"), ("anna_1", "bert_1", "anna_2"))
    for version, sizes in enumerate(((8, 9), (4, 6, 4))):
        tapes(folder.parent / f"{folder.name} in {version}", sizes, names[version])


def read_parts(folder: Path) -> Any:
    places = [folder] if (folder / manifest.MANIFEST).exists() else sorted(folder.glob("[a-z]*/"))
    return {place.name if place != folder else "": read_rows(place) for place in places or [folder]}


def write_from_source(folder: Path, version: int, how: How) -> None:
    """Write items that are chosen, sorted, split and changed."""
    arrays = {"x": np.arange(48).reshape(16, 3) + 100 * version, "rank": np.arange(16) * 5 % 7}
    parts = ArraySource(arrays).where("rank > 1").split(a=0.5, b=0.5)
    write_source(
        {name: part.sort_by("rank") for name, part in parts.items()},
        folder,
        transform=AddField("total", "penstock_convert_parts:add_up"),
        shard_size=4,
        resume=how == "resume",
        overwrite=how == "overwrite",
        show_progress=False,
    )


def read_totals(folder: Path) -> Any:
    found = {}
    for place in sorted(folder.glob("[ab]")) or [folder]:
        source = TarSource(place)
        block = source.take(np.arange(len(source.index)))
        assert block["total"].tolist() == block["x"].sum(axis=1).tolist()
        found[place.name] = block["x"].tolist()
    return found


def write_simulation(folder: Path, version: int, how: How) -> None:
    with SimulationWriter(folder, np.arange(10).reshape(2, 5) + version, 2500, overwrite=how == "overwrite") as writer:
        for start in range(0, 2500, 700):
            time, neuron, column = np.ogrid[start : min(start + 700, 2500), 0:2, 0:4]
            writer.append((1000 * version + 10 * time + 4 * neuron + column + 1).astype(np.float32))


def read_simulation(folder: Path) -> Any:
    return ZarrSource(folder, {"x": ("timeseries.zarr", slice(None), 0)}).read(Span(0, 2500))["x"].tobytes()


def write_archives(folder: Path) -> None:
    folder.mkdir()
    for number in range(3):
        with tarfile.open(folder / f"a{number}.tar", "w") as tar:
            for row in range(4):
                member = tarfile.TarInfo(f"{row}.cls")
                member.size = 1
                tar.addfile(member, io.BytesIO(b"%d" % number))


def write_index(folder: Path, version: int, how: How) -> None:
    found, problems = index_archives(folder)
    assert found is not None, problems


def read_classes(folder: Path) -> Any:
    source = TarSource(folder)
    return source.take(np.arange(len(source.index)))["cls"].tolist()


WRITERS: dict[str, WriterCase] = {
    "shards": WriterCase(write_shards, read_shards, {}, moments=60),
    "shards, gz": WriterCase(write_shards, read_shards, {"compression": "gz"}),
    "shards in columns": WriterCase(write_shards, read_shards, {"layout": "columns"}, moments=15),
    "a conversion": WriterCase(write_conversion, read_parts, {}, write_tapes),
    "a conversion, gz": WriterCase(write_conversion, read_parts, {"compression": "gz"}, write_tapes),
    "a conversion, by time": WriterCase(write_conversion, read_parts, {"by": "time"}, write_tapes),
    "a conversion, by subject": WriterCase(write_conversion, read_parts, {"by": "subject"}, write_tapes),
    "a chosen source": WriterCase(write_from_source, read_totals, {}),
    "a simulation": WriterCase(write_simulation, read_simulation, {}, moments=20, resumes=False, has_threads=True),
    "an index of archives": WriterCase(write_index, read_classes, {}, write_archives, resumes=False, replaces=False),
}


def run_jobs() -> None:
    """Run the jobs that come in; called in the process that is forked for each of them."""

    def run(writer: str, folder: str, version: int, how: How, options: Mapping[str, Any]) -> Any:
        case = WRITERS[writer]
        return case.write(Path(folder), version, how, **case.options, **options)

    manifest._TABLE_FROM = 2  # shards
    serve(run)
