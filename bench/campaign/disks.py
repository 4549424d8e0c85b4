"""Disks that become full at every level: a WriteError, nothing published, no temporary file; then the same bytes.

A trial has a file system (tmpfs) of its own, and makes it full after so many pages of 4 kB: trial n tries every eighth
level from n on, so that eight trials try all. Where nothing may be mounted, the size of each file is limited instead.
"""

import os
import random
import resource
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from penstock_convert_parts import read, tapes, tree
from penstock_test_mounts import mount_tmpfs, resize_tmpfs
from penstock_test_shards import SECOND, archive, flip, npy, read_quarantine, write_items

from bench.campaign.trials import Kind, Run, Trials
from penstock import TarSource
from penstock.convert.convert import convert
from penstock.convert.engines import LocalEngine
from penstock.convert.scan import ConvertOptions
from penstock.core.errors import SourceError, WriteError
from penstock.files.machine import Machine
from penstock.observe.page import gather_report, save_report
from penstock.observe.tuning import Setting, Trial, Tuning
from penstock.recipes.streams import FlyVisSim, SimulationWriter, load_column_slice
from penstock.recipes.webdataset import ResumableWebDatasetLoader
from penstock.shard.index_tars import index_archives
from penstock.shard.outputs.write_options import WriteOptions
from penstock.shard.writer import ShardWriter

__all__ = ["DISKS"]

_PAGE, _STEP = 4096, 8
_COLUMNS = (FlyVisSim.VOLTAGE, FlyVisSim.FLUORESCENCE)


class Disk:
    """A folder with limited space."""

    def __init__(self, place: Path) -> None:
        self.place = place
        self.place.mkdir()
        self._limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        try:
            mount_tmpfs(place, "size=64m")
            self._is_mounted = True
        except OSError:
            self._is_mounted = False

    def limit(self, pages: int) -> None:
        """Leave so many pages free."""
        if self._is_mounted:
            found = os.statvfs(self.place)
            used = (found.f_blocks - found.f_bfree) * found.f_frsize // _PAGE
            resize_tmpfs(self.place, f"size={_PAGE * max(used + pages, 1)}")
        else:
            resource.setrlimit(resource.RLIMIT_FSIZE, (_PAGE * pages, self._limits[1]))

    def release(self) -> None:
        """Leave more than enough free."""
        if self._is_mounted:
            resize_tmpfs(self.place, "size=64m")
        else:
            resource.setrlimit(resource.RLIMIT_FSIZE, self._limits)


@dataclass(frozen=True)
class Write:
    """What is written.

    Parameters
    ----------
    run
        `run(place)` writes, and goes on with what it finds; `place` exists.
    read
        `read(place)` returns what a reader finds; None if there is nothing.
    """

    run: Callable[[Path], Any]
    read: Callable[[Path], Any]


def _fill_disk(write: Write, folder: Path, number: int) -> int:
    """Write with little space, then with enough, at some levels; return at how many."""
    disk = Disk(folder / "disk")
    whole = disk.place / "whole"
    whole.mkdir()
    write.run(whole)
    truth, expected = write.read(whole), tree(whole)
    assert truth is not None, "what was written can be read"
    pages = sum(-(-len(content) // _PAGE) for content in expected.values())
    levels = range(number % _STEP, 2 * pages + 2, _STEP)
    for level in levels:
        place = disk.place / f"level {level}"
        place.mkdir()
        disk.limit(level)
        try:
            write.run(place)
            assert write.read(place) == truth, f"with {level} pages, it said that it had written"
        except WriteError:
            assert write.read(place) is None, f"with {level} pages, something was published"
            asides = [name for name in tree(place) if name.endswith((".aside", ".part")) and ".writing/" not in name]
            assert asides == [], f"with {level} pages, temporary files are left: {asides}"
        finally:
            disk.release()
        write.run(place)
        assert write.read(place) == truth, f"after {level} pages, and with more"
        assert tree(place) == expected, f"after {level} pages, and with more"
    return len(levels)


def _read_shards(place: Path) -> Any:
    try:
        source = TarSource(place)
    except SourceError:
        return None
    found = [row.tolist() for row in source.take(np.arange(len(source.index)))["x"]]
    source.close()
    return found


def _read_file(place: Path) -> bytes | None:
    return (place / "file").read_bytes() if (place / "file").exists() else None


def _fill_at_shards(rng: random.Random, folder: Path, number: int) -> int:
    sizes = [rng.choice((3, 300, 3000)) for _ in range(rng.randint(1, 8))]
    options = WriteOptions(rng.randint(1, 4), compression=rng.choice(("none", "gz")))

    def run(place: Path) -> None:
        writer = ShardWriter(place, options, resume=True)
        try:
            for one in range(writer.written, len(sizes)):
                values = random.Random(one).sample(range(10**9), sizes[one])
                writer.write({"x": np.array(values, np.int32)}, None, {"number": one})
            writer.commit()
        finally:
            writer.abandon()

    return _fill_disk(Write(run, _read_shards), folder, number)


def _fill_at_the_manifest(rng: random.Random, folder: Path, number: int) -> int:
    """Shards are small, and so many that the manifest is the largest file."""
    n_shards = rng.randint(20, 30)

    def run(place: Path) -> None:
        writer = ShardWriter(place, WriteOptions(1, metadata={"text": "x" * 20_000}), resume=True)
        try:
            for one in range(writer.written, n_shards):
                writer.write({"x": np.array([one, -one])}, None, None)
            writer.commit()
        finally:
            writer.abandon()

    return _fill_disk(Write(run, _read_shards), folder, number)


def _fill_at_the_index(rng: random.Random, folder: Path, number: int) -> int:
    sizes = [rng.randint(1, 200) for _ in range(rng.randint(1, 3))]
    content = {}
    for one, size in enumerate(sizes):
        path = folder / "made"
        archive(path, [{"x.npy": npy(np.array([one, n]))} for n in range(size)], sum(sizes[:one]))
        content[f"old_{one}.tar"] = path.read_bytes()

    def run(place: Path) -> None:
        for name, stored in content.items():
            if not (place / name).exists():
                try:
                    (place / name).write_bytes(stored)
                except OSError as error:
                    (place / name).unlink()
                    raise WriteError(f"no space for the archives of others: {error}") from error
        manifest, problems = index_archives(place)
        assert (manifest is not None, problems) == (True, [])

    return _fill_disk(Write(run, _read_shards), folder, number)


def _fill_at_a_conversion(rng: random.Random, folder: Path, number: int) -> int:
    inputs = tapes(folder / "in", [rng.randint(3, 9) for _ in range(3)])
    options = ConvertOptions(WriteOptions(4))
    workers = rng.choice((1, 2))

    def run(place: Path) -> None:
        convert(inputs, place, options, engine=LocalEngine(workers), existing="resume")

    def read_rows(place: Path) -> Any:
        try:
            return read(place)
        except SourceError:
            return None

    return _fill_disk(Write(run, read_rows), folder, number)


def _fill_at_a_simulation(rng: random.Random, folder: Path, number: int) -> int:
    n_steps, n_neurons = rng.randint(1, 4500), rng.randint(1, 3)
    about = np.arange(5 * n_neurons, dtype=np.float32).reshape(n_neurons, 5)
    steps = np.random.default_rng(n_steps).standard_normal((n_steps, n_neurons, 4)).astype(np.float32)

    def run(place: Path) -> None:
        with SimulationWriter(place / "sim", about, n_steps, overwrite=True) as writer:
            writer.append(steps)

    def read_steps(place: Path) -> Any:
        try:
            return [load_column_slice(place / "sim", column, 0, n_steps).tobytes() for column in _COLUMNS]
        except SourceError:
            return None

    return _fill_disk(Write(run, read_steps), folder, number)


def _fill_at_a_report(rng: random.Random, folder: Path, number: int) -> int:
    write_items(folder / "set")
    report = gather_report(dataset=folder / "set", title="faults")
    return _fill_disk(Write(lambda place: save_report(place / "file", report), _read_file), folder, number)


def _fill_at_a_tuning(rng: random.Random, folder: Path, number: int) -> int:
    trials = tuple(Trial(Setting.of("threads", one), 1.0 + one, 0.1) for one in range(rng.randint(1, 99)))
    tuning = Tuning(trials, batch_items=32, batch_bytes=10**6, step_seconds=None, machine=Machine(2, 10**9, 10**9))
    return _fill_disk(Write(lambda place: tuning.save(place / "file"), _read_file), folder, number)


def _fill_at_a_checkpoint(rng: random.Random, folder: Path, number: int) -> int:
    write_items(folder / "set")

    def run(place: Path) -> None:
        loader = ResumableWebDatasetLoader(folder / "set", place / "file", checkpoint_interval=1)
        loader.save_checkpoint()

    return _fill_disk(Write(run, _read_file), folder, number)


def _fill_at_the_quarantine(rng: random.Random, folder: Path, number: int) -> int:
    write_items(folder / "set")
    flip(folder / "set" / SECOND, rng.randrange(3000))

    def run(place: Path) -> None:
        source = TarSource(folder / "set", on_error="substitute", quarantine=place / "quarantine.jsonl")
        try:
            source.take(np.arange(6))
        finally:
            source.close()

    return _fill_disk(Write(run, lambda place: read_quarantine(place) or None), folder, number)


def _kind(name: str, what: str, run: Run, share: float = 1.0, most: int | None = None) -> Kind:
    return Kind(name, f"full disk: {what}", (3,), run, share=share, most=most)


DISKS = Trials(
    "disks",
    [
        _kind("shards", "shards", _fill_at_shards, share=2),
        _kind("manifest", "manifest", _fill_at_the_manifest),
        _kind("index", "`penstock index`", _fill_at_the_index),
        _kind("conversion", "conversion", _fill_at_a_conversion),
        _kind("simulation", "simulation", _fill_at_a_simulation),
        _kind("report", "report", _fill_at_a_report, most=2 * _STEP),
        _kind("tuning", "tuning", _fill_at_a_tuning, most=2 * _STEP),
        _kind("checkpoint", "checkpoint", _fill_at_a_checkpoint, most=2 * _STEP),
        _kind("quarantine", "list of bad items", _fill_at_the_quarantine, most=2 * _STEP),
    ],
)
