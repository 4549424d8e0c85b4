"""Files that are there whole or not at all, written by way of temporary files that nobody can guess."""

import os
import stat
from pathlib import Path

import pytest

from penstock.core.errors import WriteError
from penstock.files.durable import create_aside, remove_asides, write_aside


@pytest.mark.parametrize("lasting", [True, False])
def test_a_file_is_replaced_whole_and_nothing_is_left_beside_it(lasting: bool, tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    path.write_bytes(b"old")
    write_aside(path, b"new", lasting=lasting)
    assert path.read_bytes() == b"new"
    assert list(tmp_path.iterdir()) == [path]


def test_a_file_that_cannot_be_written_leaves_the_old_one_and_names_its_path(tmp_path: Path) -> None:
    path = tmp_path / "folder"
    path.mkdir()
    for wrong in (path, tmp_path / "missing" / "file"):
        with pytest.raises(WriteError, match=f"Could not write {wrong}"):
            write_aside(wrong, b"new")
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("function", ["write", "fsync", "replace"])
def test_ctrl_c_leaves_the_old_file_and_nothing_beside_it(
    function: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "state.json"
    path.write_bytes(b"old")

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(os, function, interrupted)
        with pytest.raises(KeyboardInterrupt):
            write_aside(path, b"new")
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_call_that_writes_only_some_bytes_is_followed_by_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = os.write
    monkeypatch.setattr(os, "write", lambda handle, content: write(handle, content[:3]))
    write_aside(tmp_path / "a", b"0123456789")
    assert (tmp_path / "a").read_bytes() == b"0123456789"
    monkeypatch.setattr(os, "write", lambda *_: 0)
    with pytest.raises(WriteError, match="accepts no more bytes"):
        write_aside(tmp_path / "a", b"new")


def test_temporary_files_have_names_that_nobody_can_guess_and_that_fit(tmp_path: Path) -> None:
    path = tmp_path / ("ü" * 127)  # 254 bytes
    found = [create_aside(path) for _ in range(2)]
    for handle, _ in found:
        os.close(handle)
    assert found[0][1] != found[1][1]
    write_aside(path, b"new")
    assert path.read_bytes() == b"new"


def test_a_link_at_the_name_of_a_temporary_file_is_not_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    victim = tmp_path / "victim"
    victim.write_bytes(b"mine")
    monkeypatch.setattr("secrets.token_hex", lambda _: "guessed")
    for target in (victim, tmp_path / "dangling"):
        planted = tmp_path / ".a.guessed.aside"
        planted.symlink_to(target)
        with pytest.raises(WriteError, match="File exists"):
            write_aside(tmp_path / "a", b"new")
        planted.unlink()
    assert victim.read_bytes() == b"mine"
    assert list(tmp_path.iterdir()) == [victim]


def test_a_link_at_the_path_itself_is_replaced_and_not_followed(tmp_path: Path) -> None:
    victim, path = tmp_path / "victim", tmp_path / "a"
    victim.write_bytes(b"mine")
    path.symlink_to(victim)
    write_aside(path, b"new")
    assert (victim.read_bytes(), path.read_bytes(), path.is_symlink()) == (b"mine", b"new", False)


def test_files_have_the_permissions_that_the_umask_leaves(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        write_aside(tmp_path / "a", b"new")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == 0o640


def test_temporary_files_are_not_inherited_by_programs_that_are_started(tmp_path: Path) -> None:
    handle, _ = create_aside(tmp_path / "a")
    assert not os.get_inheritable(handle)
    os.close(handle)


def test_temporary_files_of_killed_writers_are_removed_and_no_others(tmp_path: Path) -> None:
    (tmp_path / "shard.tar.host-1.part").touch()  # of an earlier version
    os.close(create_aside(tmp_path / "shard.tar")[0])
    kept = {tmp_path / name for name in ("shard.tar", "shard.tar.index", "aside", ".part", "options.json")}
    for path in kept:
        path.touch()
    remove_asides(tmp_path)
    assert set(tmp_path.iterdir()) == kept


def test_of_a_folder_that_others_use_only_the_temporary_files_of_the_given_names_are_removed(tmp_path: Path) -> None:
    for name in ("a.index", "b.index"):
        os.close(create_aside(tmp_path / name)[0])
    for name in ("a.index", "a.index.part", ".a.index.aside", "download.part", "mine.aside"):
        (tmp_path / name).touch()
    kept = {path for path in tmp_path.iterdir() if not path.name.startswith(".a.index.") or len(path.name) < 20}
    remove_asides(tmp_path, {"a.index"})
    assert set(tmp_path.iterdir()) == kept
    assert len(kept) == 6
