"""Engines: every work item once, errors unchanged, and work that is lost with a worker is done again."""

import copyreg
import logging
import os
import signal
import subprocess
import sys
import warnings
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from penstock_convert_parts import OddError, has_happened, mend, mishap, read, rows, tapes, tree, visible

from penstock.convert.convert import convert
from penstock.convert.engines import Engine, ExecutorEngine, LocalEngine
from penstock.convert.scan import ConvertOptions
from penstock.convert.splits import Split
from penstock.convert.to_shards import convert_to_shards
from penstock.convert.write import write_source
from penstock.core.errors import ConversionError, OptionError, WorkerError
from penstock.shard.outputs.write_options import WriteOptions
from penstock.source.tar.source import TarSource


def square(number: int) -> tuple[int, int]:
    return number * number, os.getpid()


def refuse_seven(item: tuple[int, str]) -> None:
    number, seen = item
    (Path(seen) / str(number)).touch()
    if number == 7:
        raise LookupError("seven")


def cannot_travel(number: int) -> int:
    raise OddError("an error", why="by keyword")


def die_on(flag: str) -> str:
    """End this process if a file exists; only the process that removes the file dies."""
    if flag.endswith("always"):
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        Path(flag).unlink()
    except FileNotFoundError:
        return flag
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("not reached")


def length(item: bytes) -> int:
    if item.startswith(b"/"):
        die_on(os.fsdecode(item.rstrip(b"\0")))
    return len(item)


@pytest.mark.parametrize("workers", [1, 2, 4])
@pytest.mark.parametrize("n_items", [0, 1, 2, 30])
def test_every_item_has_one_result_and_its_number(workers: int, n_items: int) -> None:
    items = list(range(100, 100 + n_items))
    found = list(LocalEngine(workers).run(square, items))
    assert sorted((number, value) for number, (value, _) in found) == [(n, (n + 100) ** 2) for n in range(n_items)]


def test_one_worker_is_this_process_and_several_are_not() -> None:
    assert {pid for _, (_, pid) in LocalEngine(1).run(square, [1, 2, 3])} == {os.getpid()}
    assert os.getpid() not in {pid for _, (_, pid) in LocalEngine(2).run(square, [1, 2, 3])}


def test_a_ctrl_c_in_the_middle_of_a_fork_is_not_lost() -> None:
    text = """
import os, signal
from penstock.convert.engines import LocalEngine

os.register_at_fork(after_in_parent=lambda: os.kill(os.getpid(), signal.SIGINT))
signal.signal(signal.SIGINT, signal.default_int_handler)
try:
    list(LocalEngine(2).run(abs, range(4)))
except KeyboardInterrupt:
    print("stopped")
print(signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, []))
"""
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=False, timeout=300)
    assert (done.stdout.split(), done.stderr) == (["stopped", "False"], "")


@pytest.mark.parametrize("workers", [1, 3])
def test_an_error_is_raised_unchanged_and_no_more_work_is_started(workers: int, tmp_path: Path) -> None:
    before, seen = _children(), tmp_path / "seen"
    seen.mkdir()
    with pytest.raises(LookupError, match="seven"):
        list(LocalEngine(workers).run(refuse_seven, [(number, str(seen)) for number in range(1000)]))
    assert _children() <= before
    begun = {int(path.name) for path in seen.iterdir()}
    assert begun == set(range(8)) if workers == 1 else 999 not in begun


@pytest.mark.parametrize("with_context", [False, True])
def test_an_error_that_cannot_be_unpickled_is_reported_and_is_not_a_dead_worker(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, with_context: bool
) -> None:
    if with_context:  # importing dask makes all errors be pickled with those that they came from
        tblib = pytest.importorskip("tblib.pickling_support")
        for kind in (OddError, TypeError, WorkerError):
            monkeypatch.setitem(copyreg.dispatch_table, kind, tblib.pickle_exception)
    with pytest.raises(WorkerError, match=r"OddError in [56]: an error: by keyword"):
        list(LocalEngine(2).run(cannot_travel, [5, 6]))
    assert caplog.records == []


@pytest.mark.parametrize("workers", [2, 4])
def test_what_was_lost_with_a_worker_is_done_again(
    workers: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    items = [str(tmp_path / str(number)) for number in range(20)]
    for number in (3, 11, 19):
        Path(items[number]).touch()
    with caplog.at_level(logging.WARNING, "penstock"):
        found = list(LocalEngine(workers).run(die_on, items))
    assert sorted(found) == list(enumerate(items))
    assert "A worker of the conversion died" in caplog.text


def test_a_work_item_that_always_kills_workers_is_named_and_no_other(tmp_path: Path) -> None:
    items = [str(tmp_path / str(number)) for number in range(20)]
    items[6] = str(tmp_path / "always")
    before = _children()
    with pytest.raises(WorkerError, match=r"died 3 times while working on .*/always. If it ran out of memory"):
        list(LocalEngine(3).run(die_on, items))
    assert _children() <= before


def test_items_larger_than_a_pipe_do_not_hang_a_worker_that_dies(tmp_path: Path) -> None:
    items = [bytes(300_000) for _ in range(8)]
    (tmp_path / "flag").touch()
    items[1] = os.fsencode(tmp_path / "flag") + bytes(300_000)
    found = list(LocalEngine(2).run(length, items))
    assert sorted(found) == [(number, len(item)) for number, item in enumerate(items)]


def test_whoever_stops_early_leaves_no_workers() -> None:
    before = _children()
    running = LocalEngine(2).run(square, list(range(50)))
    next(running)
    running.close()  # type: ignore[attr-defined]  # it is a generator
    assert _children() <= before


def _children() -> set[int]:
    """Return the child processes that still exist, including zombies."""
    found = set()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if fields[1] == str(os.getpid()) and "resource_tracker" not in _command(entry):
                found.add(int(entry.name))
    return found


def _command(entry: Path) -> str:
    try:
        return (entry / "cmdline").read_text()
    except OSError:
        return ""


@pytest.mark.parametrize("workers", [0, -1, 1.5])
def test_an_invalid_number_of_workers_is_refused(workers: Any) -> None:
    with pytest.raises(OptionError, match="workers"):
        LocalEngine(workers=workers)


# -- executors ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [ThreadPoolExecutor, ProcessPoolExecutor])
def test_any_executor_writes_the_same_bytes(kind: Any, tmp_path: Path) -> None:
    given = tapes(tmp_path / "in", (7, 5, 9, 4))
    options = ConvertOptions(WriteOptions(2))
    convert(given, tmp_path / "local", options)
    with kind(2) as executor:
        convert_to_shards(given, tmp_path / "out", options=options, executor=executor, show_progress=False)
        assert tree(tmp_path / "out") == tree(tmp_path / "local")
        write_source(TarSource(tmp_path / "out"), tmp_path / "again", executor=executor, show_progress=False)
    assert read(tmp_path / "again") == rows(given)


def test_an_executor_that_does_no_more_work_is_an_error_and_nothing_is_published(tmp_path: Path) -> None:
    given = tapes(tmp_path / "in", (7, 5))
    mishap(given[1], "die", 3, once=False)
    with ProcessPoolExecutor(2) as executor, pytest.raises(WorkerError, match="died while working on shard_00000"):
        convert(given, tmp_path / "out", ConvertOptions(WriteOptions(2)), engine=ExecutorEngine(executor, 2))
    assert visible(tmp_path / "out") == set()
    mend(given[1])
    convert(given, tmp_path / "out", ConvertOptions(WriteOptions(2)), existing="resume")
    assert read(tmp_path / "out") == rows(given)


# -- dask --------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    distributed = pytest.importorskip("distributed")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # dask's own, of its event loop and of ports in use
        with distributed.LocalCluster(
            n_workers=2,
            threads_per_worker=2,
            processes=True,
            dashboard_address=None,
            scheduler_kwargs={"dashboard_address": ":0"},
        ) as running:
            yield running


@pytest.fixture
def dask(cluster: Any) -> Iterator[Engine]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        distributed = pytest.importorskip("distributed")
        with distributed.Client(cluster) as client:
            yield ExecutorEngine(client.get_executor(pure=False), 4)


def test_dask_writes_the_same_bytes_and_what_fails_there_is_reported_here(dask: Engine, tmp_path: Path) -> None:
    given = tapes(tmp_path / "in", (7, 5, 9, 4))
    split = Split((("train", 0.5), ("val", 0.5)))
    options = ConvertOptions(WriteOptions(2), split)
    convert(given, tmp_path / "local", options)
    convert(given, tmp_path / "dask", options, engine=dask)
    assert tree(tmp_path / "dask") == tree(tmp_path / "local")
    mishap(given[1], "read", 3)
    with pytest.raises(ConversionError, match=r"tape_1\.npy: the tape of tape_1 is torn"):
        convert(given, tmp_path / "again", options, engine=dask)
    convert(given, tmp_path / "again", options, engine=dask, existing="resume")
    assert tree(tmp_path / "again") == tree(tmp_path / "local")


def test_dask_does_the_work_of_a_worker_that_died_again(dask: Engine, tmp_path: Path) -> None:
    given = tapes(tmp_path / "in", (7, 5, 9, 4))
    mishap(given[2], "die", 4)
    convert(given, tmp_path / "out", ConvertOptions(WriteOptions(4)), engine=dask)
    assert has_happened(given[2])
    assert read(tmp_path / "out") == rows(given)


def test_a_task_that_always_kills_dask_workers_is_named_and_nothing_is_published(
    dask: Engine, cluster: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = tapes(tmp_path / "in", (7,))
    mishap(given[0], "die", 6, once=False)
    monkeypatch.setattr(cluster.scheduler, "allowed_failures", 0)
    with pytest.raises(WorkerError, match=r"died while working on shard_000000\.tar, made from .*tape_0"):
        convert(given, tmp_path / "out", ConvertOptions(WriteOptions(7)), engine=dask)
    assert visible(tmp_path / "out") == set()
    mend(given[0])
    convert(given, tmp_path / "out", ConvertOptions(WriteOptions(7)), existing="resume")
    assert read(tmp_path / "out") == rows(given)
