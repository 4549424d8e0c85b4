"""Files that are read once: the same bytes with hints, without hints, and whatever becomes of a file meanwhile."""

import os
from pathlib import Path

import numpy as np
import pytest
from penstock_page_cache import cached_pages, can_be_dropped, drop
from penstock_test_parts import eventually

from penstock.files import read_ahead
from penstock.files.read_ahead import exceeds_cache, open_once

_MIB = 1 << 20


def _write(path: Path, n_bytes: int) -> bytes:
    """Write bytes that say where they are."""
    content = np.arange(-(-n_bytes // 8), dtype=np.int64).tobytes()[:n_bytes]
    path.write_bytes(content)
    return content


@pytest.fixture
def cold(tmp_path: Path) -> Path:
    """A file of which no page is in the page cache."""
    path = tmp_path / "cold"
    _write(path, 5 * _MIB + 123)
    if not can_be_dropped(path):
        pytest.skip("this file system keeps its pages")
    return path


@pytest.fixture(params=["hints", "no hints", "hints fail"])
def hints(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    def fail(*_: int) -> None:
        raise OSError(22, "Invalid argument")

    if request.param == "no hints":
        monkeypatch.delattr(os, "posix_fadvise")
        monkeypatch.delattr(os, "RWF_NOWAIT")
    elif request.param == "hints fail":
        monkeypatch.setattr(os, "posix_fadvise", fail)
    return str(request.param)


@pytest.mark.parametrize("n_bytes", [0, 1, 4096, _MIB, 3 * _MIB + 5])
@pytest.mark.parametrize("give_back", [False, True])
def test_a_file_is_read_to_the_last_byte(tmp_path: Path, n_bytes: int, give_back: bool, hints: str) -> None:
    content = _write(tmp_path / "file", n_bytes)
    with open_once(tmp_path / "file", give_back=give_back) as file:
        parts = list(iter(lambda: file.read(300_000), b""))
    assert b"".join(parts) == content, hints


def test_what_is_read_after_a_seek_is_what_lies_there(tmp_path: Path, hints: str) -> None:
    content = _write(tmp_path / "file", 3 * _MIB)
    with open_once(tmp_path / "file") as file:
        for at in (2 * _MIB, 5, _MIB + 7):
            file.seek(at)
            assert file.read(1000) == content[at : at + 1000], hints


def test_the_disk_reads_ahead_of_the_reader(cold: Path) -> None:
    with open_once(cold) as file:
        assert file.read(1) == b"\0"
        while not cached_pages(cold).all():  # they are on their way; nobody else reads them
            os.sched_yield()


def test_pages_of_a_file_that_nobody_used_are_given_back(cold: Path) -> None:
    def read_at_once() -> bool:
        drop(cold)
        with open_once(cold, give_back=True) as file:
            assert len(file.read()) == 5 * _MIB + 123
        return not cached_pages(cold).any()

    def read_in_pieces() -> bool:
        drop(cold)
        with open_once(cold, give_back=True) as file:
            while file.read(100_000):
                pass
        return not cached_pages(cold).any()

    # The kernel keeps pages that another processor holds at that moment, so that one try may fail.
    assert eventually(read_at_once)
    assert eventually(read_in_pieces)


def test_pages_that_were_there_before_stay(cold: Path) -> None:
    cold.read_bytes()
    with open_once(cold, give_back=True) as file:
        while file.read(100_000):
            pass
    assert cached_pages(cold).all()


def test_without_give_back_pages_stay(cold: Path) -> None:
    with open_once(cold) as file:
        while file.read(100_000):
            pass
    assert cached_pages(cold).all()


def test_a_file_that_shrinks_ends_where_it_ends(tmp_path: Path, hints: str) -> None:
    content = _write(tmp_path / "file", 4 * _MIB)
    with open_once(tmp_path / "file", give_back=True) as file:
        assert file.read(10) == content[:10]
        os.truncate(tmp_path / "file", 2 * _MIB)
        assert file.read() == content[10 : 2 * _MIB], hints


def test_a_fifo_is_refused_and_never_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(OSError, match="a regular file, got a FIFO"):
        open_once(tmp_path / "fifo")


def test_nothing_outside_the_file_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _write(tmp_path / "file", 3 * _MIB + 77)
    asked: list[tuple[int, int]] = []
    monkeypatch.setattr(read_ahead, "ask_range", lambda _, begin, end: (asked.append((begin, end)), True)[1])
    with open_once(tmp_path / "file") as file:
        file.read(10)
        file.seek(3 * _MIB)
        file.read()
    assert asked == [(0, _MIB), (_MIB, 2 * _MIB), (2 * _MIB, 3 * _MIB), (3 * _MIB, 3 * _MIB + 77)]


def test_a_dataset_larger_than_half_of_the_memory_exceeds_the_cache() -> None:
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert exceeds_cache([memory])
    assert exceeds_cache(iter([memory // 3, memory // 3]))
    assert not exceeds_cache([])
    assert not exceeds_cache([1 << 20])
