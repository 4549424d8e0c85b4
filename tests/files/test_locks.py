"""Locks on folders: one writer at a time, whatever becomes of it."""

import fcntl
import os
from pathlib import Path

import pytest
from penstock_test_processes import exit_code, run_isolated

from penstock.core.errors import WriteError
from penstock.files import locks
from penstock.files.locks import FolderLock, lock_holder


def test_a_locked_folder_refuses_another_writer_until_it_is_unlocked(tmp_path: Path) -> None:
    lock = FolderLock(tmp_path / "shards")
    assert lock.is_held
    with pytest.raises(WriteError, match="Another writer is at work in"):
        FolderLock(tmp_path / "shards")
    for _ in range(2):
        lock.release()
        assert not lock.is_held
    FolderLock(tmp_path / "shards").release()


def die_with_a_lock(folder: Path) -> None:
    FolderLock(folder)
    os._exit(9)


def test_the_lock_of_a_process_that_dies_is_released(tmp_path: Path) -> None:
    assert exit_code(die_with_a_lock, tmp_path) == 9
    FolderLock(tmp_path).release()


def release(lock: FolderLock) -> bool:
    was_held = lock.is_held
    lock.release()
    return was_held


def test_a_forked_child_cannot_release_the_lock_of_its_parent(tmp_path: Path) -> None:
    lock = FolderLock(tmp_path)
    assert run_isolated(release, lock) is False
    with pytest.raises(WriteError, match="Another writer"):
        FolderLock(tmp_path)
    lock.release()


@pytest.mark.parametrize("is_made_again", [False, True])
def test_a_folder_that_its_last_writer_removes_meanwhile_is_not_locked(
    is_made_again: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, flock = tmp_path / ".image.writing", fcntl.flock

    def removed(handle: int, how: int) -> None:
        folder.rename(tmp_path / "removed")
        if is_made_again:
            folder.mkdir()
        flock(handle, how)

    monkeypatch.setattr("fcntl.flock", removed)
    with pytest.raises(WriteError, match="Another writer is at work in"):
        FolderLock(folder)


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(WriteError, match=rf"Could not open the folder {tmp_path}/file"):
        FolderLock(tmp_path / "file")


def test_the_holder_of_a_lock_is_found_without_taking_it(tmp_path: Path) -> None:
    assert lock_holder(tmp_path) is None
    assert lock_holder(tmp_path / "nowhere") is None
    lock = FolderLock(tmp_path)
    assert lock_holder(tmp_path) == os.getpid()
    assert lock.is_held
    lock.release()
    assert lock_holder(tmp_path) is None
    FolderLock(tmp_path).release()  # it was not kept by asking


def test_a_holder_that_proc_does_not_list_is_found_by_trying(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(locks, "_LOCKS", tmp_path / "none")
    lock = FolderLock(tmp_path)
    assert lock_holder(tmp_path) == 0
    lock.release()
    assert lock_holder(tmp_path) is None


def test_two_who_ask_do_not_see_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(locks, "_LOCKS", tmp_path / "none")
    handle = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(handle, fcntl.LOCK_SH)  # as lock_holder of another process
    assert lock_holder(tmp_path) is None
    os.close(handle)
