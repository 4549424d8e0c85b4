"""A FIFO, a socket or a device in the place of any file that is read: a typed error at once, and never a hang."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from penstock_special_files import SPECIAL, plant

import penstock as ps
from penstock.convert.inputs.arrays import NpzInput
from penstock.convert.inputs.audio import AudioInput
from penstock.convert.inputs.files import FilesInput
from penstock.convert.inputs.zarr import ZarrInput
from penstock.convert.nwb.file import open_nwb
from penstock.convert.table import read_table
from penstock.core.errors import DamageError, OptionError, ReadError, ResumeError, SourceError, WriteError
from penstock.core.types import Span
from penstock.observe.faults import read_quarantine
from penstock.observe.run_file import is_run_file, read_run
from penstock.observe.tuning import Tuning
from penstock.recipes.cellmap.multi import CellMapDataSplit
from penstock.recipes.crossval.cross_validation import cross_val_training
from penstock.recipes.trainers.config import build_from_config
from penstock.recipes.webdataset.loader import ResumableWebDatasetLoader
from penstock.shard.index_tars import index_archives
from penstock.shard.manifest import MANIFEST
from penstock.shard.outputs.write_options import WriteOptions
from penstock.shard.table import table_path
from penstock.shard.verify import verify_shards
from penstock.shard.writer import ShardWriter
from penstock.source.array import ArraySource
from penstock.source.find_source import open_source
from penstock.source.tar.quarantine import Quarantine

kinds = pytest.mark.parametrize("kind", SPECIAL)


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    """Six items in two shards; x is the number of the item."""
    ps.create_shards_from_arrays(tmp_path / "shards", {"x": np.arange(6)}, shard_size=3)
    return tmp_path / "shards"


def read(shards: Path) -> list[int]:
    items = ps.TarSource(shards, fields=("x",)).read(Span(0, 6))
    return [int(x) for x in items["x"]]


# What is read: the file, what reads it, and the error that names it.
READERS: dict[str, tuple[str, Callable[[Path], Any], type[Exception]]] = {
    "tuning": ("tuning.json", Tuning.load, OptionError),
    "run": ("run.json", read_run, OptionError),
    "csv": ("table.csv", read_table, SourceError),
    "parquet": ("table.parquet", read_table, SourceError),
    "split": ("split.csv", CellMapDataSplit.from_csv, OptionError),
    "yaml": ("config.yaml", build_from_config, OptionError),
    "npy": ("rows.npy", lambda path: open_source(str(path)), SourceError),
    "stored npy": ("rows.npy", ps.ZarrSource, SourceError),
    "hdf5": ("rows.h5", lambda path: ps.ZarrSource(path / "x"), SourceError),
    "zarr": ("zarr.json", lambda path: ps.ZarrSource(path.parent), SourceError),
    "npz": ("rows.npz", lambda path: NpzInput(path).open(), SourceError),
    "zarr zip": ("rows.zip", lambda path: ZarrInput(path).open(), SourceError),
    "zarr chunk": ("0.0", lambda path: ZarrInput(path.parent).open(), SourceError),
    "nwb": ("rows.nwb", open_nwb, SourceError),
    "audio": ("a.wav", lambda path: AudioInput(path).open(), SourceError),
    "audio source": ("a.wav", lambda path: ps.AudioSource([path]), SourceError),
    "image": ("a.png", lambda path: FilesInput(path).open(), SourceError),
    "folds": ("folds.npz", lambda path: cross_val_training(path, model_class=torch.nn.Identity), ReadError),
}


@kinds
@pytest.mark.parametrize("what", READERS)
def test_readers_refuse_special_files(what: str, kind: str, tmp_path: Path) -> None:
    name, use, error = READERS[what]
    path = tmp_path / name
    with plant(kind, path), pytest.raises(error, match=str(tmp_path)):
        use(path)


@kinds
def test_manifests(kind: str, shards: Path) -> None:
    with plant(kind, shards / MANIFEST):
        for use in (ps.TarSource, verify_shards, lambda where: ShardWriter(where, WriteOptions())):
            with pytest.raises(ReadError, match=rf"the manifest {shards / MANIFEST}: It must be a regular file, got a"):
                use(shards)


@kinds
def test_the_manifest_is_read_if_its_table_is_none(kind: str, shards: Path) -> None:
    with plant(kind, table_path(shards / MANIFEST)):
        assert read(shards) == [*range(6)]


@kinds
@pytest.mark.parametrize("suffix", ["", ".index"])
def test_shards_and_side_indexes(kind: str, suffix: str, shards: Path) -> None:
    name = sorted(path.name for path in shards.glob("*.tar"))[1]
    with plant(kind, shards / f"{name}{suffix}"):
        with pytest.raises(DamageError, match=rf"{name}.*It must be a regular file, got a"):
            read(shards)
        problems = [problem for problem in verify_shards(shards)[1] if problem.shard == name]
        assert any("It must be a regular file" in problem.reason for problem in problems)


@kinds
def test_archives_to_index(kind: str, shards: Path) -> None:
    name = sorted(path.name for path in shards.glob("*.tar"))[1]
    (shards / MANIFEST).unlink()
    with plant(kind, shards / name):
        manifest, problems = index_archives(shards)
    assert (manifest, [problem.shard for problem in problems]) == (None, [name])
    assert "It must be a regular file" in problems[0].reason


@kinds
def test_lists_of_bad_items(kind: str, shards: Path) -> None:
    path = shards / "quarantine.jsonl"
    quarantine = Quarantine(path, "mine", 3)
    with plant(kind, path):
        with pytest.raises(OptionError, match="quarantine must be a writable file"):
            ps.TarSource(shards, on_error="substitute")
        with pytest.raises(ReadError, match=str(path)):
            quarantine.items()
        with pytest.raises(WriteError, match=str(path)):
            quarantine.add(1, "a.tar", DamageError("a.tar", 1, "flipped"))
        assert "It must be a regular file" in read_quarantine(path, "mine")["unreadable"]


@kinds
def test_staging(kind: str, tmp_path: Path) -> None:
    writer = ShardWriter(tmp_path, WriteOptions())
    writer.write({"x": np.arange(3)}, None, None)
    writer.abandon()
    with plant(kind, tmp_path / ".writing" / "options.json"), pytest.raises(WriteError, match=r"options\.json"):
        ShardWriter(tmp_path, WriteOptions(), resume=True)


@kinds
def test_checkpoints(kind: str, shards: Path) -> None:
    loader = ResumableWebDatasetLoader(shards, checkpoint_path=shards.parent / "checkpoint.json")
    with plant(kind, shards.parent / "checkpoint.json"), pytest.raises(ResumeError, match=r"checkpoint\.json"):
        loader.load_checkpoint()


@kinds
def test_mapped_arrays(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "rows.npy"
    np.save(path, np.arange(6))
    source = ArraySource({"x": np.load(path, mmap_mode="r")})
    source.close()
    with plant(kind, path), pytest.raises(ReadError, match="It must be a regular file"):
        source.read(Span(0, 6))


@kinds
def test_a_special_file_is_no_run_file(kind: str, tmp_path: Path) -> None:
    with plant(kind, tmp_path / "run.json"):
        assert not is_run_file(tmp_path / "run.json")
