"""Files that are there whole or not at all, locks on folders, and staging folders that vanish at once."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.core.errors import ReadError, SourceError, WriteError
from penstock.files.durable import write_aside
from penstock.files.kinds import open_regular_file
from penstock.files.locks import lock, unlock
from penstock.files.staging import remove_staging


def test_a_file_is_replaced_whole_and_nothing_is_left_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    path.write_bytes(b"old")
    write_aside(path, b"new")
    assert path.read_bytes() == b"new"
    assert list(tmp_path.iterdir()) == [path]


def test_a_file_that_cannot_be_written_leaves_the_old_one_and_names_its_path(tmp_path: Path) -> None:
    path = tmp_path / "folder"
    path.mkdir()
    with pytest.raises(WriteError, match=f"Could not write {path}"):
        write_aside(path, b"new")
    assert list(tmp_path.iterdir()) == [path]


def test_a_locked_folder_refuses_another_writer_until_it_is_unlocked(tmp_path: Path) -> None:
    handle = lock(tmp_path / "shards")
    with pytest.raises(WriteError, match="Another writer is at work in"):
        lock(tmp_path / "shards")
    unlock(handle)
    unlock(lock(tmp_path / "shards"))


def test_the_lock_of_a_process_that_dies_is_released(tmp_path: Path) -> None:
    code = (
        f"import os, pathlib; from penstock.files.locks import lock; lock(pathlib.Path({str(tmp_path)!r})); os._exit(9)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 9
    unlock(lock(tmp_path))


def test_a_staging_folder_is_removed_together_with_what_an_earlier_removal_left(tmp_path: Path) -> None:
    staging, aside = tmp_path / ".writing", tmp_path / ".written"
    for folder in (staging, aside):
        folder.mkdir()
        (folder / "shard.tar").write_bytes(b"1")
    remove_staging(staging, aside)
    assert list(tmp_path.iterdir()) == []


def test_a_staging_folder_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        remove_staging(tmp_path / ".writing", tmp_path / ".written")


def test_only_regular_files_are_opened(tmp_path: Path) -> None:
    path = tmp_path / "numbers.bin"
    path.write_bytes(bytes(range(8)))
    with open_regular_file(path) as file:
        assert os.pread(file.fileno(), 2, 6) == bytes([6, 7])
    os.mkfifo(tmp_path / "pipe")
    for wrong in (tmp_path, tmp_path / "pipe"):
        with pytest.raises(SourceError, match=str(wrong)):
            open_regular_file(wrong)
    with pytest.raises(ReadError, match="missing"):
        open_regular_file(tmp_path / "missing")
