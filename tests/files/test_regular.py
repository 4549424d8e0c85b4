"""Only regular files are opened, and nothing that is opened can block or never end."""

import os
from pathlib import Path

import pytest
from penstock_special_files import SPECIAL, plant

from penstock.core.errors import ReadError, SourceError
from penstock.files.regular import (
    NotRegularError,
    check_regular,
    open_descriptor,
    open_input,
    open_regular,
    read_regular,
)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "numbers.bin"
    path.write_bytes(bytes(range(8)))
    return path


def test_regular_files_are_read_also_through_links(file: Path) -> None:
    link = file.with_name("link")
    link.symlink_to(file)
    for path in (file, link, str(link)):
        assert read_regular(path) == read_regular(path, 8) == read_regular(path, None) == bytes(range(8))
        with open_regular(path) as opened, open_input(path) as unbuffered:
            assert (opened.read(3), os.pread(unbuffered.fileno(), 2, 6)) == (bytes([0, 1, 2]), bytes([6, 7]))
        handle, status = open_descriptor(path)
        assert status.st_size == 8
        assert not os.get_inheritable(handle)
        os.close(handle)
        check_regular(path)


def test_a_file_without_a_declared_size_is_read_to_its_end() -> None:
    assert read_regular("/proc/self/status").startswith(b"Name:")


@pytest.mark.parametrize("path", ["file", "/proc/self/status"])
def test_a_file_that_is_too_long_is_not_returned(path: str, file: Path) -> None:
    with pytest.raises(OSError, match="It must have at most 7 bytes, got more"):
        read_regular(file if path == "file" else path, 7)


def test_a_sparse_file_beyond_the_limit_is_not_even_read(tmp_path: Path) -> None:
    with (tmp_path / "manifest.json").open("wb") as sparse:
        sparse.truncate(1 << 40)
    with pytest.raises(OSError, match="at most"):
        read_regular(tmp_path / "manifest.json")


@pytest.mark.parametrize("kind", SPECIAL)
def test_special_files_are_refused_and_stay_closed(kind: str, tmp_path: Path) -> None:
    n_open = len(list(Path("/proc/self/fd").iterdir()))
    wrong = tmp_path / "wrong"
    with plant(kind, wrong):
        for use in (read_regular, open_regular, open_descriptor, check_regular):
            with pytest.raises(NotRegularError, match="It must be a regular file, got a") as caught:
                use(wrong)
            assert caught.value.filename == str(wrong)
        with pytest.raises(SourceError, match=str(wrong)):
            open_input(wrong)
    assert len(list(Path("/proc/self/fd").iterdir())) == n_open


def test_folders_and_missing_files_raise_what_open_raises(tmp_path: Path) -> None:
    with pytest.raises(IsADirectoryError):
        open_regular(tmp_path)
    with pytest.raises(FileNotFoundError):
        read_regular(tmp_path / "missing")
    with pytest.raises(SourceError, match="got a directory"):
        open_input(tmp_path)
    with pytest.raises(ReadError, match="missing"):
        open_input(tmp_path / "missing")
