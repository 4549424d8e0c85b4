"""One shard, written from its task alone."""

import os
import pickle
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from penstock_convert_parts import Taped, mishap, tapes, tree

from penstock.convert.fingerprint import read_stamp
from penstock.convert.shard_task import InputError, Task, close_recordings, write_task
from penstock.core.errors import OptionError, WriteError
from penstock.shard import compression
from penstock.shard.outputs.local import LocalShards, find_finished_shard
from penstock.shard.outputs.write_options import WriteOptions


@pytest.fixture(autouse=True)
def _closed() -> Iterator[None]:
    yield
    close_recordings()


@pytest.fixture
def task(tmp_path: Path) -> Task:
    """Items of three inputs, in mixed order."""
    given = tapes(tmp_path / "in", (4, 4, 4))
    which, numbers = np.array([0, 2, 2, 1, 0]), np.array([3, 0, 1, 2, 0])
    return make_task(tmp_path / "out", given, which, numbers)


def make_task(writing: Path, given: list[Taped], which: np.ndarray, numbers: np.ndarray) -> Task:
    writing.mkdir(exist_ok=True)
    stamps = tuple(read_stamp(entry.path) for entry in given)
    return Task(LocalShards(writing), 7, 35, WriteOptions(5), tuple(given), stamps, which, numbers)


def test_the_same_task_writes_the_same_bytes_whoever_does_it(task: Task) -> None:
    assert write_task(task) == 5
    first = tree(task.writing.folder)
    assert set(first) == {"shard_000007.tar", "shard_000007.tar.index"}
    close_recordings()
    assert write_task(pickle.loads(pickle.dumps(task))) == 5
    assert tree(task.writing.folder) == first


@pytest.mark.parametrize(("kind", "reason"), [("read", "the tape of tape_2 is torn"), ("grow", "changed while")])
def test_an_input_that_fails_is_named_and_nothing_is_left(kind: str, reason: str, task: Task) -> None:
    mishap(task.inputs[2], kind, 1)
    with pytest.raises(InputError, match=reason) as caught:
        write_task(task)
    assert caught.value.path == task.inputs[2].path
    assert tree(task.writing.folder) == {}
    again = pickle.loads(pickle.dumps(caught.value))
    assert (again.path, again.reason, str(again)) == (caught.value.path, caught.value.reason, str(caught.value))


def test_an_input_that_changed_after_it_was_scanned_is_refused(task: Task) -> None:
    os.utime(task.inputs[1].path, ns=(1, 1))
    with pytest.raises(InputError, match=r"tape_1\.npy: the file changed while it was converted"):
        write_task(task)
    assert tree(task.writing.folder) == {}


def test_an_open_input_is_opened_again_after_it_changed_and_was_scanned_again(task: Task) -> None:
    write_task(task)
    np.save(task.inputs[0].path, np.full((4, 3), 9, np.float32))
    stamps = tuple(read_stamp(entry.path) for entry in task.inputs)
    write_task(replace(task, stamps=stamps, which=np.array([0]), numbers=np.array([1])))
    (content,) = task.writing.folder.glob("*.tar")
    assert np.full((3,), 9, np.float32).tobytes() in content.read_bytes()


def test_an_error_of_the_inputs_own_code_arrives_as_it_is_with_a_note(task: Task) -> None:
    mishap(task.inputs[2], "value", 1)
    with pytest.raises(ValueError, match="tape_2 has its own ideas") as caught:
        write_task(task)
    assert caught.value.__notes__ == [f"[penstock] while converting {task.inputs[2].path}"]
    assert tree(task.writing.folder) == {}


def test_a_folder_that_is_gone_is_a_write_error_that_names_the_shard(task: Task) -> None:
    with pytest.raises(WriteError, match=r"Could not write shard_000007\.tar in .*nowhere"):
        write_task(replace(task, writing=LocalShards(task.writing.folder / "nowhere")))


def test_a_compressed_shard_that_is_too_large_says_what_to_do(task: Task, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.shard.outputs.write_options.max_decompressed_bytes", lambda _: 4096)
    assert compression.max_decompressed_bytes(0) > 4096
    with pytest.raises(OptionError, match=r"at most 4096 bytes.*smaller shard_size"):
        write_task(replace(task, options=WriteOptions(5, compression="gz")))
    assert tree(task.writing.folder) == {}


def test_a_partly_written_shard_is_overwritten(task: Task) -> None:
    write_task(task)
    whole = tree(task.writing.folder)
    (task.writing.folder / task.name).write_bytes(b"half")
    assert find_finished_shard(task.writing.folder, task.name, "none") is None
    write_task(task)
    assert tree(task.writing.folder) == whole


def test_no_more_than_four_inputs_are_kept_open(tmp_path: Path) -> None:
    given = tapes(tmp_path / "in", [1] * 9)
    write_task(make_task(tmp_path / "out", given, np.arange(9), np.zeros(9, np.int64)))
    names = [str(Path(f"/proc/self/fd/{entry.name}").resolve()) for entry in Path("/proc/self/fd").iterdir()]
    assert sorted(name for name in names if name.endswith(".npy")) == [str(entry.path) for entry in given[5:]]
    close_recordings()
    names = [str(Path(f"/proc/self/fd/{entry.name}").resolve()) for entry in Path("/proc/self/fd").iterdir()]
    assert not any(name.endswith(".npy") for name in names)


def test_threads_that_write_shards_of_the_same_inputs_do_not_disturb_each_other(tmp_path: Path) -> None:
    given = tapes(tmp_path / "in", [30] * 6)
    order = np.random.default_rng(0).permuted(np.tile(np.arange(6), 30))
    tasks = [make_task(tmp_path / f"out{number}", given, order, np.arange(180) % 30) for number in range(4)]
    failures: list[BaseException] = []

    def work(task: Task) -> None:
        try:
            write_task(task)
        except BaseException as error:
            failures.append(error)
        finally:
            close_recordings()

    threads = [threading.Thread(target=work, args=(task,)) for task in tasks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    trees = [tree(task.writing.folder) for task in tasks]
    assert all(found == trees[0] for found in trees)


def test_the_text_of_a_task_names_its_shard_and_inputs(task: Task) -> None:
    paths = ", ".join(str(entry.path) for entry in task.inputs)
    assert str(task) == f"shard_000007.tar, made from {paths}"
