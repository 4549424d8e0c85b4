"""What killed writers leave is named, and the command that is given removes it, or another writer completes it."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from penstock_test_killer import Killer, start_killer
from typer.testing import CliRunner

import penstock as ps
from penstock.cli import app
from penstock.core.errors import SourceError, WriteError
from penstock.files.durable import create_aside
from penstock.files.locks import FolderLock, lock_holder
from penstock.recipes.streams import load_column_slice
from penstock.shard.outputs.write_options import WriteOptions
from penstock.shard.verify import verify_shards
from penstock.shard.writer import ShardWriter
from tests.observe.check.look import look, run_command, tree

SCRIPT = """
import numpy as np
from penstock_test_killer import serve
from penstock.shard.outputs.write_options import WriteOptions
from penstock.shard.writer import ShardWriter

def write(folder, resume, salt):
    writer = ShardWriter(folder, WriteOptions(shard_size=3), resume=resume, overwrite=not resume)
    for number in range(writer.written, 8):
        writer.write({"x": np.array([number, salt])}, None, None)
    writer.commit()

serve(write)
"""


SIMULATION = """
import numpy as np, zarr.codecs  # once, not in every process that is forked
from penstock_test_killer import serve
from penstock.recipes.streams import SimulationWriter

def write(folder, salt):
    metadata = np.arange(10, dtype=np.float32).reshape(2, 5)
    with SimulationWriter(folder, metadata, 3, overwrite=True) as writer:
        writer.append(np.full((3, 2, 4), salt) + np.arange(3)[:, None, None])

serve(write)
"""


CONVERSION = """
from penstock_test_killer import serve
from penstock.convert import ConvertOptions, convert_to_shards
from penstock.shard.outputs.write_options import WriteOptions

def convert(rows, folder):
    options = ConvertOptions(WriteOptions(shard_size=3))
    convert_to_shards(rows, folder, options=options, show_progress=False)

serve(convert)
"""


@pytest.fixture(scope="module")
def killer() -> Iterator[Killer]:
    with start_killer(SCRIPT) as started:
        yield started


def read(folder: Path) -> list[list[int]] | None:
    try:
        return ps.TarSource(folder).take(np.arange(8))["x"].tolist()  # type: ignore[no-any-return]
    except SourceError:
        return None


def rows(salt: int) -> list[list[int]]:
    return [[number, salt] for number in range(8)]


def choose_moments(ticks: int) -> list[int]:
    """Return some of the moments of a write, and all of its publication, which is at the end."""
    return sorted({*range(1, ticks + 1, 5), *range(max(1, ticks - 20), ticks + 1)})


@pytest.mark.parametrize("before", [False, True], ids=["no dataset before", "a dataset before"])
def test_killed_at_any_step_what_is_left_is_named_and_removed_or_completed(
    killer: Killer, before: bool, tmp_path: Path
) -> None:
    def run(folder: Path, at: int = 0, *, resume: bool = False, salt: int = 2) -> dict[str, Any]:
        return killer.run(at=at, folder=str(folder), resume=resume, salt=salt)

    old = rows(1) if before else None
    if before:
        run(tmp_path / "old", salt=1)
    else:
        (tmp_path / "old").mkdir()
    shutil.copytree(tmp_path / "old", tmp_path / "count")
    seen = set()
    for at in choose_moments(run(tmp_path / "count")["count"]):
        folder = tmp_path / str(at)
        shutil.copytree(tmp_path / "old", folder)
        assert run(folder, at)["killed"] == signal.SIGKILL
        there, version = tree(folder), read(folder)
        found = look(folder)
        assert tree(folder) == there, "nothing is changed by looking"
        seen |= {(name, str(finding.facts.get("progress", ""))) for name, finding in found.items()}
        unfinished = found.get("data.unfinished")
        if unfinished is not None and not unfinished.command:
            assert unfinished.facts["progress"] == "publishing"
            run(folder, resume=True)
            assert read(folder) == rows(2), f"killed at {at}"
        else:
            for name in ("data.unfinished", "data.leftover", "data.temporary"):
                if name in found:
                    run_command(found[name])
            assert read(folder) == version, f"killed at {at}"
            assert version in (old, rows(2))
        left = set(look(folder)) - {"data.kind"}
        assert left == set(), f"killed at {at}"
        assert read(folder) is None or verify_shards(folder)[1] == []
    progress = {what for name, what in seen if name == "data.unfinished"}
    assert progress == {"begun", "publishing", "published"}
    assert ("data.leftover", "") in seen


@pytest.mark.parametrize("before", [False, True], ids=["no simulation before", "a simulation before"])
def test_a_killed_writer_of_a_simulation_loses_none_by_the_command(before: bool, tmp_path: Path) -> None:
    def read_simulation(folder: Path) -> float | None:
        try:
            return float(load_column_slice(folder, 3, 0, 3)[0, 0])
        except SourceError:
            return None

    seen = set()
    with start_killer(SIMULATION) as simulator:
        (tmp_path / "old").mkdir()
        if before:
            simulator.run(folder=str(tmp_path / "old"), salt=1)
        shutil.copytree(tmp_path / "old", tmp_path / "count")
        for at in choose_moments(simulator.run(folder=str(tmp_path / "count"), salt=2)["count"]):
            folder = tmp_path / str(at)
            shutil.copytree(tmp_path / "old", folder)
            simulator.run(at=at, folder=str(folder), salt=2)
            version, found = read_simulation(folder), look(folder)
            unfinished = found.get("data.unfinished")
            seen.add(str(unfinished.facts["progress"]) if unfinished else "none")
            if unfinished and not unfinished.command:
                simulator.run(folder=str(folder), salt=2)
                assert read_simulation(folder) == 2, f"killed at {at}"
                continue
            for finding in found.values():
                if finding.command:
                    run_command(finding)
            assert read_simulation(folder) == version, f"killed at {at}"
            assert version in (1.0 if before else None, 2.0)
            assert not {"data.unfinished", "data.leftover", "data.temporary"} & set(look(folder)), f"killed at {at}"
    assert seen == {"none", "begun", "publishing", "published"}


def test_a_killed_conversion_is_resumed_by_the_command_of_the_advice_or_removed(tmp_path: Path) -> None:
    np.save(tmp_path / "rows.npy", np.arange(16).reshape(8, 2))
    out = tmp_path / "out"
    with start_killer(CONVERSION) as converter:
        job = {"rows": str(tmp_path / "rows.npy")}
        ticks = converter.run(folder=str(tmp_path / "whole"), **job)["count"]
        for at in (ticks // 3, ticks // 2):  # it has read some rows, or all of them
            converter.run(at=at, folder=str(out), **job)
            found = look(out)
            assert set(found) == {"data.unfinished"}
            assert all("`penstock convert`" in finding.advice for finding in found.values())
            for finding in found.values():
                assert "--resume" in finding.advice
                run_command(finding)
            assert list(out.iterdir()) == []
        converter.run(at=ticks // 2, folder=str(out), **job)
    words = f"convert {tmp_path}/rows.npy --output {out} --shard-size 3 --resume --quiet"
    assert CliRunner().invoke(app, words.split()).exit_code == 0
    assert look(out) == {}
    assert ps.TarSource(out).index.identity == ps.TarSource(tmp_path / "whole").index.identity


def test_resuming_as_the_advice_says_completes_what_was_begun(killer: Killer, tmp_path: Path) -> None:
    folder = tmp_path / "set"
    killer.run(at=20, folder=str(folder), resume=False, salt=2)
    found = look(folder)["data.unfinished"]
    assert found.level == "problem"
    assert "resume=True" in found.advice
    assert "--resume" in found.advice
    killer.run(folder=str(folder), resume=True, salt=2)
    assert look(folder) == {}
    assert read(folder) == rows(2)


def test_a_writer_at_work_is_named_and_nothing_of_it_is_to_be_removed(tmp_path: Path) -> None:
    writer = ShardWriter(tmp_path / "set", WriteOptions(shard_size=2))
    writer.write({"x": np.arange(3)}, None, None)
    found = look(tmp_path / "set")
    assert list(found) == ["data.lock"]
    assert found["data.lock"].text == f"Process {os.getpid()} is writing in {tmp_path / 'set'} now."
    assert found["data.lock"].level == "note"
    assert not found["data.lock"].command
    writer.abandon()
    assert list(look(tmp_path / "set")) == ["data.unfinished"]


def test_the_staging_folder_of_an_image_is_named_with_its_own_lock(tmp_path: Path) -> None:
    staging = tmp_path / ".volume.zarr.writing"
    lock = FolderLock(staging)
    (staging / "options.json").write_text("{}")
    assert list(look(tmp_path)) == ["data.lock"]
    lock.release()
    found = look(tmp_path)["data.unfinished"]
    assert f"A writer of {tmp_path / 'volume.zarr'} has not finished" in found.text
    run_command(found)
    assert not staging.exists()


def test_a_staging_folder_that_is_a_link_is_removed_and_what_it_leads_to_stays(tmp_path: Path) -> None:
    (tmp_path / "set").mkdir()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "set" / ".writing").symlink_to(tmp_path / "elsewhere")
    found = look(tmp_path / "set")["data.unfinished"]
    assert found.level == "problem"
    run_command(found)
    assert (tmp_path / "elsewhere").is_dir()
    assert not os.path.lexists(tmp_path / "set" / ".writing")


def test_temporary_files_are_removed_unless_a_process_has_them_open(tmp_path: Path) -> None:
    handle, aside = create_aside(tmp_path / "report.html")
    assert "data.temporary" not in look(tmp_path)
    os.close(handle)
    (tmp_path / "mine.aside").touch()  # not a name that Penstock gives
    found = look(tmp_path)["data.temporary"]
    assert found.facts["files"] == [aside.name]
    run_command(found)
    assert [path.name for path in tmp_path.iterdir()] == ["mine.aside"]


# Locks a folder, and leaves the lock to a child that outlives it.
KEEP_LOCK = """
import os, signal, sys
from pathlib import Path
from penstock.files.locks import FolderLock

lock = FolderLock(Path(sys.argv[1]))
child = os.fork()
if child == 0:
    os.setsid()
    nothing = os.open(os.devnull, os.O_RDWR)
    for stream in range(3):
        os.dup2(nothing, stream)
    signal.alarm(100)
    signal.pause()
print(os.getpid(), child, flush=True)
os._exit(0)
"""


def test_a_lock_that_a_forked_child_keeps_is_named_with_the_process_to_end(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", KEEP_LOCK, tmp_path], capture_output=True, text=True, check=True)
    parent, child = map(int, done.stdout.split())
    try:
        found = look(tmp_path)["data.lock"]
        assert f"Process {parent} has locked {tmp_path}" in found.text
        assert found.command == f"kill {child}"
        with pytest.raises(WriteError, match="Another writer"):
            FolderLock(tmp_path)
        run_command(found)
        until = time.monotonic() + 300
        while lock_holder(tmp_path) is not None and time.monotonic() < until:  # until the system has ended it
            time.sleep(0.01)
        assert "data.lock" not in look(tmp_path)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
