"""Byte ranges that are read ahead and given back: which pages, and nothing outside of the file."""

import ctypes
import mmap
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from penstock_page_cache import cached_pages, can_be_dropped, drop
from penstock_test_parts import eventually

from penstock.source.native import FileMap, StoredItems, StoredRanges, copy_items, give_back, read_ahead

PAGE = mmap.PAGESIZE
MEGABYTE = 1 << 20
EXTREME = (-(1 << 63), -(1 << 62), -1, 1 << 31, 1 << 62, (1 << 63) - 1)


@dataclass
class Stored:
    """An open file of several megabytes that is mapped."""

    path: Path
    file: int
    map: FileMap

    def ranges(self, *ranges: tuple[int, int]) -> StoredRanges:
        begins, ends = np.array(ranges, np.int64).reshape(-1, 2).T.copy()
        return StoredRanges.of_file(self.file, self.map.n_bytes, begins, ends, address=self.map.address)

    def read_mapped(self, begin: int, n_bytes: int) -> bytes:
        """Return bytes of the map; without the C part there is none, and they are those of the file."""
        if not self.map.address:
            return os.pread(self.file, n_bytes, begin)
        return ctypes.string_at(self.map.address + begin, n_bytes)

    def resident(self, *places: int) -> list[bool]:
        return cached_pages(self.path)[np.array(places) // PAGE].tolist()  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def numbers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("pages") / "numbers"
    path.write_bytes(np.arange(3 * MEGABYTE, dtype="<i4").tobytes())  # 12 MB, each number its own position
    if not can_be_dropped(path):
        pytest.skip("the file system of the temporary folder keeps all pages")
    return path


@contextmanager
def open_mapped(path: Path) -> Iterator[Stored]:
    """Open and map it for one test: pages that are mapped stay in memory, whatever drops the others."""
    file = os.open(path, os.O_RDONLY)
    try:
        yield Stored(path, file, FileMap(file, 12 * MEGABYTE))
    finally:
        os.close(file)


@pytest.fixture
def stored(numbers: Path) -> Iterator[Stored]:
    with open_mapped(numbers) as found:
        yield found


def test_ranges_are_read_without_being_touched(stored: Stored) -> None:
    drop(stored.path)
    asked = stored.ranges((9 * MEGABYTE + 100, 9 * MEGABYTE + 300_000), (MEGABYTE, 2 * MEGABYTE))
    assert read_ahead(asked) == MEGABYTE + 299_900
    within = (MEGABYTE, 2 * MEGABYTE - 1, 9 * MEGABYTE + 150_000)
    assert eventually(lambda: all(stored.resident(*within)))
    assert stored.resident(5 * MEGABYTE, 11 * MEGABYTE) == [False, False]
    assert eventually(lambda: read_ahead(asked) == 0)


def test_ranges_that_are_in_memory_in_part_are_completed(stored: Stored) -> None:
    drop(stored.path)
    for begin in (0, 2 * MEGABYTE):
        os.pread(stored.file, 1, begin + MEGABYTE // 2)
        os.posix_fadvise(stored.file, begin, MEGABYTE, os.POSIX_FADV_WILLNEED)
        assert eventually(lambda begin=begin: read_ahead(stored.ranges((begin, begin + MEGABYTE))) == 0)
    read_ahead(stored.ranges((0, 3 * MEGABYTE)))
    assert eventually(lambda: all(stored.resident(*range(0, 3 * MEGABYTE, 1 << 16))))


@pytest.mark.parametrize("n_missing", [1, 3])
def test_items_that_are_missing_after_many_that_are_not_are_read_at_once(stored: Stored, n_missing: int) -> None:
    """Pages of a map are read one by one as they are touched, unless they were asked for: then no fault reads."""
    n_items, size = 32, MEGABYTE // 4
    present = (n_items - n_missing) * size
    os.pread(stored.file, 12 * MEGABYTE, 0)
    give_back(stored.ranges((present, 12 * MEGABYTE)))
    assert not any(stored.resident(*range(present + size // 2, n_items * size, size)))
    shards = np.array([[stored.file, stored.map.address, stored.map.n_bytes, 0]], np.int64)
    items = StoredItems(shards, np.zeros(n_items, np.int64), np.arange(n_items) * size)
    out = np.zeros((n_items, size), np.uint8)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_majflt
    members, places = np.array([[0, 0, size, size]], np.int64), np.arange(n_items)
    assert copy_items(items, members, targets=[out], places=places, expected=None) == (n_items, -1)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_majflt - before < 16 * n_missing, "64 pages of each are missing"
    assert out.tobytes() == os.pread(stored.file, n_items * size, 0)


def test_pages_are_given_back_if_they_hold_nothing_else(stored: Stored) -> None:
    os.pread(stored.file, 12 * MEGABYTE, 0)
    stored.read_mapped(0, 12 * MEGABYTE)  # a page that is mapped is given back as well
    begin, end = 2 * MEGABYTE + 100, 9 * MEGABYTE - 100
    give_back(stored.ranges((begin, end)))
    # What the kernel treats as one page may be several of them: those at the ends may stay.
    assert not any(stored.resident(5 * MEGABYTE, 6 * MEGABYTE))
    assert stored.resident(begin, end, MEGABYTE, 11 * MEGABYTE) == [True] * 4
    assert stored.read_mapped(begin, 8) == os.pread(stored.file, 8, begin)


def test_neighbours_give_back_the_page_that_they_share(stored: Stored) -> None:
    os.pread(stored.file, 4 * MEGABYTE, 0)
    border = 2 * MEGABYTE + 17
    give_back(stored.ranges((border, 4 * MEGABYTE), (0, border)))
    assert stored.resident(border) == [False]


def test_the_last_page_of_a_file_holds_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "short"
    path.write_bytes(bytes(range(256)) * 20)  # a page and 1,024 bytes
    if not can_be_dropped(path):
        pytest.skip("the file system of the temporary folder keeps all pages")
    path.read_bytes()
    with path.open("rb") as opened:
        file, n_bytes = opened.fileno(), 20 * 256
        assert cached_pages(path).all()
        give_back(StoredRanges.of_file(file, n_bytes, np.array([0]), np.array([n_bytes])))
        assert not cached_pages(path).any()


NUMBERS = st.one_of(st.sampled_from(EXTREME), st.integers(-100, 13 * MEGABYTE))


@given(st.lists(st.tuples(st.one_of(st.sampled_from(EXTREME), st.integers(-1, 3)), NUMBERS, NUMBERS), max_size=8))
def test_nothing_outside_of_the_file_is_touched(numbers: Path, ranges: list[tuple[int, int, int]]) -> None:
    which, begins, ends = np.array(ranges, np.int64).reshape(-1, 3).T.copy()
    with open_mapped(numbers) as stored:
        closed = os.open("/", os.O_RDONLY)
        os.close(closed)
        rows = [[file, stored.map.address, stored.map.n_bytes, 0] for file in (stored.file, -1, closed)]
        asked = StoredRanges(np.array(rows, np.int64), which, begins, ends)
        inside = [end - max(0, begin) for _, begin, end in ranges if 0 <= begin < end <= 12 * MEGABYTE]
        assert 0 <= read_ahead(asked) <= sum(inside) + 12 * MEGABYTE * len(ranges)
        give_back(asked)
        assert stored.read_mapped(0, 8) == os.pread(stored.file, 8, 0)


def test_a_file_that_shrinks_is_no_error(tmp_path: Path) -> None:
    path = tmp_path / "shrinks"
    path.write_bytes(b"x" * MEGABYTE)
    with path.open("rb") as opened:
        file = opened.fileno()
        asked = StoredRanges.of_file(file, MEGABYTE, np.array([0]), np.array([MEGABYTE]), address=0)
        os.truncate(path, 10)
        read_ahead(asked)
        give_back(asked)
        assert os.pread(file, 20, 0) == b"x" * 10
