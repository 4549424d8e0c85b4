"""Makes the files of `written_by_d511aa8`: every kind of file that Penstock saves, with the code of that commit.

They were made once, before the modules were moved, and stay as they are: what was saved then has to be read for ever.
Run it again only to add a file, with the code of that very commit:

    git worktree add /tmp/before d511aa8
    cd /tmp/before && PYTHON hatch_build.py
    PYTHONPATH=/tmp/before/src PYTHON REPOSITORY/tests/compatibility/make_fixtures.py

where PYTHON is that of the virtual environment. Everything is written to a folder of temporary files first. The result
is the same each time: values are their own position, clocks stand still, and processes have the same number. Names that
are not public are imported where they are used, since they are those of d511aa8.
"""

import gzip
import hashlib
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import time
import wave
from collections.abc import Iterator
from contextlib import suppress
from datetime import datetime
from itertools import islice
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

sys.path.append(str(Path(__file__).parent))
import parts_compatibility as parts
import parts_states
from parts_compatibility import numbered

import penstock as ps

COMMIT = "d511aa8"
BUILT = Path("/tmp/penstock-fixtures")
"""Where the files are made: some of them say where they lay."""


def main() -> None:
    """Make all files, and put them in their place."""
    found = subprocess.check_output(["git", "rev-parse", "HEAD"], cwd=Path(ps.__file__).parent, text=True)
    assert found.startswith(COMMIT), f"{ps.__file__} is of {found.strip()}, not of {COMMIT}"
    shutil.rmtree(BUILT, ignore_errors=True)
    BUILT.mkdir()
    for make in (
        shards, foreign, sound, simulation, cell, converted, unfinished, images, quarantine, states, checkpoint,
        run, tuning, moments, folds, fold, lightning, accelerate, orders,
    ):  # fmt: skip
        make(BUILT)
    shutil.rmtree(parts.WRITTEN, ignore_errors=True)
    shutil.copytree(BUILT, parts.WRITTEN)
    sizes = [path.stat().st_size for path in parts.WRITTEN.rglob("*") if path.is_file()]
    print(f"{len(sizes)} files, {sum(sizes)} bytes, by {ps.__file__}")


def _dump(path: Path, content: Any) -> None:
    """Write JSON, an entry a line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [f"{json.dumps(name)}: {json.dumps(entry)}" for name, entry in content.items()]
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def digests(folder: Path) -> dict[str, str]:
    """Return the SHA-256 of each file below a folder."""
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


# -- data sets of shards -----------------------------------------------------------------------------------------------


def shards(folder: Path) -> None:
    """Write data sets: by arrays, compressed, sample by sample, and as pickles."""
    each = [{"trial": number} for number in range(1, parts.N_ARRAYS + 1)]
    quiet: dict[str, Any] = {"show_progress": False}
    ps.create_shards_from_arrays(folder / "shards/arrays", parts.arrays(), parts.ARRAYS_SHARD, each, **quiet)
    for compression in ("gz", "bz2"):
        where = folder / "shards" / compression
        ps.create_shards_from_arrays(where, parts.arrays(), 3, parts.ABOUT, compression=compression, **quiet)
    with ps.WebDatasetWriter(folder / "shards/writer", shard_size=1) as writer:
        for number in range(1, 3):
            writer.write_sample(parts.odd_sample(number), parts.odd_id(number), {"trial": number})
    with ps.WebDatasetWriter(folder / "shards/pyd", 2, "old_{shard_idx:03d}.tar", "xz", "pyd") as writer:
        writer.write_batch([{"x": row} for row in numbered(3, 2)], show_progress=False)


def foreign(folder: Path) -> None:
    """Give an index to archives that tarfile wrote: plain, compressed, and one of them by a pattern."""
    where = folder / "foreign"
    where.mkdir()
    packed = io.BytesIO()
    for name, items, target in (("a-000000.tar", (1, 2, 3), None), ("a-000001.tar", (4, 5), packed)):
        with tarfile.open(where / name, "w", target, format=tarfile.USTAR_FORMAT) as archive:
            for item in items:
                content = io.BytesIO()
                np.save(content, np.array([item, item + 100], np.int32))
                for suffix, payload in (("x.npy", content.getvalue()), ("cls", str(item).encode())):
                    info = tarfile.TarInfo(f"item{item}.{suffix}")
                    info.size = len(payload)
                    archive.addfile(info, io.BytesIO(payload))
    (where / "a-000001.tar.gz").write_bytes(gzip.compress(packed.getvalue(), mtime=0))
    for given in (where, where / "a-{000000..000000}.tar"):
        _command("index", str(given), "--quiet")


def _command(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "penstock", *arguments], check=True, capture_output=True)


def sound(folder: Path) -> None:
    """Write two audio files, whose frames are counted."""
    (folder / "sound").mkdir()
    for name, first, count in (("one.wav", 1, 13), ("two.wav", 14, 9)):
        with wave.open(str(folder / "sound" / name), "wb") as file:
            file.setnchannels(1)
            file.setsampwidth(2)
            file.setframerate(1000)
            file.writeframes((np.arange(first, first + count) * 1024).astype("<i2").tobytes())


def simulation(folder: Path) -> None:
    """Write a simulation of three neurons, eleven steps long."""
    metadata = numbered(3, 5)
    metadata[:, 4] = [0, 1, 1]
    with ps.SimulationWriter(folder / "simulation", metadata, 11) as writer:
        writer.append(numbered(11, 3, 4)[:4])
        writer.append(numbered(11, 3, 4)[4:])


# -- conversions -------------------------------------------------------------------------------------------------------


def converted(folder: Path) -> None:
    """Convert inputs of every kind but NWB: one with splits and statistics, in a random order."""
    inputs = folder / "converted/inputs"
    inputs.mkdir(parents=True)
    for number, name in enumerate("abc"):
        rows = numbered(9, 2)[3 * number : 3 * number + 3]
        np.savez(inputs / f"session_{name}.npz", x=rows, number=rows[:, 0].astype(np.int32))
    np.save(inputs / "rows.npy", numbered(5, 2, dtype=np.int16))
    _zarr(inputs / "rows.zarr", numbered(4, 2, dtype="<i4"))
    for name, given in parts.conversions(folder).items():
        ps.convert_to_shards(given.pop("inputs"), folder / "converted" / name, **given)
    _dump(folder / "converted/values.json", parts.converted_values(folder))


def _zarr(path: Path, values: Any, chunks: Any = None) -> None:
    """Write a zarr array of one chunk, as plain bytes."""
    path.mkdir(parents=True)
    about = {
        "zarr_format": 2, "shape": values.shape, "chunks": chunks or values.shape, "dtype": values.dtype.str,
        "compressor": None, "fill_value": 0, "order": "C", "filters": None,
    }  # fmt: skip
    (path / ".zarray").write_text(json.dumps(about))
    (path / ".".join("0" * values.ndim)).write_bytes(values.tobytes())


# -- what is not finished ----------------------------------------------------------------------------------------------

KILLED = """
import os, signal, sys, time
from pathlib import Path
sys.path.append(sys.argv[1])
import make_fixtures
os.getpid, own = lambda: 1, os.getpid()
time.time_ns = lambda: 1
make_fixtures.WRITES[sys.argv[2]](Path(sys.argv[3]), lambda: os.kill(own, signal.SIGKILL))
"""


def _killed(name: str, folder: Path) -> None:
    """Begin a write in a process of its own, which is killed in the middle."""
    done = subprocess.run([sys.executable, "-c", KILLED, str(Path(__file__).parent), name, str(folder)], check=False)
    assert done.returncode == -signal.SIGKILL, f"{name} ended with {done.returncode}"
    for path in folder.rglob("*.part"):  # they are named by the machine
        path.rename(path.with_name(f"{path.name.split('.tar')[0]}.tar.host-1.part"))


def _write_samples(folder: Path, kill: Any) -> None:
    with parts.begin_unfinished(folder) as writer:
        for number in range(4):
            if number == 3:
                kill()
            writer.write_sample(parts.unfinished_sample(number), metadata={"trial": number + 1})


def _publish(folder: Path, kill: Any) -> None:
    rename, count = os.replace, 0

    def counted(source: Any, target: Any, **options: Any) -> None:
        nonlocal count
        if ".writing" not in str(target):  # the second one that is moved into place
            count += 1
            if count == 2:
                kill()
        rename(source, target, **options)

    with parts.begin_unpublished(folder) as writer:
        for number in range(3):
            writer.write_sample(parts.unfinished_sample(number))
        with mock.patch("os.replace", counted), mock.patch.object(Path, "replace", counted):
            writer.finalize()


def _convert(folder: Path, kill: Any) -> None:
    from penstock.convert import run, work

    def killed(task: Any) -> int:
        if task.number == 1:
            kill()
        return work.write_task(task)

    with mock.patch.object(run, "write_task", killed):
        parts.convert_unfinished(BUILT, folder)


def _predict(folder: Path, kill: Any, blend: Any = "abut") -> None:
    with parts.predictions(BUILT / "cell/em", folder, blend=blend) as writer:
        for count, item in enumerate(writer.writer_indices):
            if count == 2:
                kill()
            writer[item] = parts.predicted(writer, item)


def _blend(folder: Path, kill: Any) -> None:
    _predict(folder, kill, "linear")


WRITES = {"writer": _write_samples, "publish": _publish, "convert": _convert, "abut": _predict, "linear": _blend}
IMAGES = ("abut", "linear")


def unfinished(folder: Path) -> None:
    """Begin writes that are killed, and note what they come to when they are not."""
    finished: dict[str, Any] = {}
    for name, write in WRITES.items():
        if name in IMAGES:
            continue
        _killed(name, folder / "unfinished" / name)
        whole = folder.with_name("penstock-fixtures-finished") / name
        shutil.rmtree(whole, ignore_errors=True)
        write(whole, lambda: None)
        finished[name] = digests(whole)
        shutil.rmtree(whole)
    finished["convert"].pop("dataset_metadata.json")  # which names the versions of other packages
    _dump(folder / "unfinished/digests.json", finished)


def cell(folder: Path) -> None:
    """Write a small cell: voxels that are counted, and labels of two classes."""
    shape = (2, 4, 4)
    labels = np.indices(shape)
    mito, er = (labels.sum(axis=0) % 3 == 0).astype("u1"), (labels[2] < 2).astype("u1")
    for name, values in (("em", numbered(*shape, dtype="<f4")), ("labels/mito", mito), ("labels/er", er)):
        where = folder / "cell" / name
        _zarr(where / "s0", values)
        (where / ".zgroup").write_text('{"zarr_format": 2}')
        scale = [{"type": "scale", "scale": [8.0, 8.0, 8.0]}, {"type": "translation", "translation": [0.0, 0.0, 0.0]}]
        axes = [{"name": axis, "type": "space", "unit": "nanometer"} for axis in "zyx"]
        datasets = [{"path": "s0", "coordinateTransformations": scale}]
        image = {"multiscales": [{"version": "0.4", "axes": axes, "datasets": datasets}]}
        (where / ".zattrs").write_text(json.dumps(image))


def images(folder: Path) -> None:
    """Write predictions, and begin some that are killed: with patches side by side, and blended."""
    with mock.patch("time.time_ns", return_value=1), mock.patch("os.getpid", return_value=1):  # a run is named by them
        _predict(folder / "predictions", lambda: None)
    for name in IMAGES:
        _killed(name, folder / "unfinished" / name)


def quarantine(folder: Path) -> None:
    """Read a data set of which two items are damaged."""
    damaged = folder.with_name("penstock-fixtures-damaged")
    shutil.rmtree(damaged, ignore_errors=True)
    shutil.copytree(folder / "shards/arrays", damaged)
    parts.damage(damaged)
    listed = folder / "quarantine.jsonl"
    source = ps.TarSource(damaged, on_error="substitute", max_bad_items=2, quarantine=listed)
    found = source.take(np.arange(parts.N_ARRAYS))["number"].tolist()
    _dump(folder / "quarantine_values.json", {"number": found})
    shutil.rmtree(damaged)


# -- states ------------------------------------------------------------------------------------------------------------


def states(folder: Path) -> None:
    """Save where loaders stand, and what they give from there on."""
    groups = {
        "sources": parts_states.source_cases(folder),
        "plans": parts_states.plan_cases(),
        "recipes": parts_states.recipe_cases(folder),
    }
    for group, cases in groups.items():
        _dump(folder / f"states/{group}.json", {name: _saved(name, case) for name, case in cases.items()})


def _saved(name: str, case: parts_states.Case) -> dict[str, Any]:
    loader = case.make()
    stream = case.stream(loader)
    for _ in islice(stream, case.before):
        pass
    state = json.loads(json.dumps(parts_states.state_of(loader)))
    follows = list(islice(stream, case.after))
    parts_states.close(loader)
    resumed = (case.again or case.make)()
    parts_states.restore(resumed, state)
    rest = json.loads(json.dumps(list(islice(case.stream(resumed), case.after))))
    parts_states.close(resumed)
    assert case.again is not None or rest == json.loads(json.dumps(follows)), f"{name} goes on as if never stopped"
    return {"state": state, "rest": rest}


def checkpoint(folder: Path) -> None:
    """Let a loader save its own file, in the middle of its second epoch."""
    loader = parts.resumable(folder, folder / "checkpoint.json")
    stream = parts.batches(loader)
    for _ in islice(stream, 10):
        pass
    loader.close()
    _dump(folder / "checkpoint_rest.json", {"rest": [sample["number"] for sample in islice(_resumed(folder), 9)]})


def _resumed(folder: Path) -> Iterator[Any]:
    copy = folder.with_name("penstock-fixtures-checkpoint.json")
    shutil.copy(folder / "checkpoint.json", copy)
    yield from parts.batches(parts.resumable(folder, copy))


# -- single files ------------------------------------------------------------------------------------------------------


def run(folder: Path) -> None:
    """Watch a loader of shards, under a clock that goes on by a millisecond each time it is looked at."""
    from penstock.report import run_file, watch

    now = 0.0

    def clock() -> float:
        nonlocal now
        now += 0.001
        return now

    class Noon(datetime):
        @classmethod
        def now(cls, tz: Any = None) -> Any:
            return cls(2025, 1, 1, 12, tzinfo=tz)

    source = ps.TarSource(folder / "shards/arrays", fields=["number", "x"])
    with (
        mock.patch.object(time, "perf_counter", clock),
        mock.patch.object(watch, "resident_bytes", return_value=1 << 20),
        mock.patch.object(run_file, "datetime", Noon),
        mock.patch.object(sys, "argv", ["train.py"]),
        ps.Loader(
            source, ps.Plan(source.index, ps.WindowShuffle(2), 2, seed=3, tail="drop"), observer=ps.Timings()
        ) as loader,
        ps.watch(loader, show=False) as watched,
    ):
        for _ in range(4):
            for batch in watched:
                watched.record(loss=1 / batch["number"].sum().item())
        watched.record(loss=float("nan"))
        watched.save(folder / "run.json")


def tuning(folder: Path) -> None:
    """Save what a tuning might have found."""
    from penstock.recipes.tuned import Setting, Trial
    from penstock.run.machine import Machine

    trials = (
        Trial(Setting.of("inline"), 0.5, 0.25),
        Trial(Setting.of("threads", 2, 3), 0.125, 0.375),
        Trial(Setting.of("processes", 2, 4), 0.25, 2.0),
    )
    ps.Tuning(trials, 32, 4096, 0.0625, Machine(2, 1 << 30, 1 << 28), ("One remark.",)).save(folder / "tuning.json")


def moments(folder: Path) -> None:
    """Save moments of each kind."""
    found = {name: made.to_json() for name, made in parts.moments().items()}
    _dump(folder / "moments.json", found)


def folds(folder: Path) -> None:
    """Let folds be searched for, and their seeds be kept."""
    found = parts.found_folds(folder / "folds.json")
    _dump(folder / "folds_found.json", found)


def fold(folder: Path) -> None:
    """Interrupt the training of a fold in its third epoch, and note what a whole one does."""
    dataset = parts.Noted(fail_at=2 * 16 + 6)
    with suppress(RuntimeError):
        parts.train_fold(dataset, folder / "fold")
    whole = parts.Noted()
    history = parts.train_fold(whole, folder.with_name("penstock-fixtures-fold"))["history"]
    shutil.rmtree(folder.with_name("penstock-fixtures-fold"))
    # What follows the two epochs, and the look at the best weights at the end.
    _dump(folder / "fold/rest.json", {"asked": whole.asked[32:], "history": history})


def lightning(folder: Path) -> None:
    """Save a checkpoint of Lightning in the middle of its second epoch."""
    whole = parts.fit(save_after=(5, folder / "lightning.ckpt"))
    found = parts.fit(folder / "lightning.ckpt")
    assert found.weight == whole.weight
    _dump(folder / "lightning_rest.json", found._asdict())


def accelerate(folder: Path) -> None:
    """Save a state of Accelerate, in the middle of the second epoch."""
    _dump(folder / "accelerate_rest.json", {"rest": parts.accelerated(folder / "accelerate", save=True)})
    (folder / "accelerate/random_states_0.pkl").unlink()  # of torch and numpy, not ours, and large


def orders(folder: Path) -> None:
    """Note the order of every plan."""
    _dump(folder / "orders.json", {name: parts_states.described(plan) for name, plan in parts_states.plans().items()})


if __name__ == "__main__":
    main()
