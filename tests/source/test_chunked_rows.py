"""Rows of a chunked array, read in whole chunks."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.files import read_ahead
from penstock.source import chunked_rows
from penstock.source.chunked_rows import ChunkedRowReader


class Chunked:
    """An array that records which rows are requested."""

    def __init__(self, array: np.ndarray, chunks: tuple[int, ...] | None) -> None:
        self._array, self.chunks = array, chunks
        self.shape, self.dtype = array.shape, array.dtype
        self.requested: list[tuple[int, int]] = []

    def __getitem__(self, rows: slice) -> Any:
        self.requested.append((rows.start, rows.stop))
        return self._array[rows]


@given(
    n_rows=st.integers(1, 60),
    chunk=st.sampled_from([None, 1, 3, 7, 100]),
    group_bytes=st.sampled_from([1, 64, 4096]),
    cache_bytes=st.sampled_from([1, 200, 1 << 20]),
    data=st.data(),
)
def test_rows_are_those_of_the_array_in_any_order_of_requests(
    n_rows: int, chunk: int | None, group_bytes: int, cache_bytes: int, data: st.DataObject
) -> None:
    array = np.arange(n_rows * 2, dtype=np.int32).reshape(n_rows, 2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunked_rows, "_GROUP_BYTES", group_bytes)
        patch.setattr(chunked_rows, "_CACHE_BYTES", cache_bytes)
        reader = ChunkedRowReader(Chunked(array, chunk and (chunk, 2)))
        for _ in range(5):
            start = data.draw(st.integers(0, n_rows))
            stop = data.draw(st.integers(start, n_rows))
            found = reader.rows(start, stop)
            assert (found.dtype, found.tolist()) == (array.dtype, array[start:stop].tolist())


def test_overlapping_windows_decode_each_chunk_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunked_rows, "_GROUP_BYTES", 1)
    array = Chunked(np.arange(100), (10,))
    reader = ChunkedRowReader(array)
    for start in range(81):
        assert reader.rows(start, start + 20).tolist() == list(range(start, start + 20))
    assert array.requested == [(start, start + 10) for start in range(0, 100, 10)]


def test_small_chunks_are_read_several_at_a_time_up_to_the_end_of_the_array(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunked_rows, "_GROUP_BYTES", 8 * 30)
    array = Chunked(np.arange(100), (10,))
    reader = ChunkedRowReader(array)
    assert reader.rows(95, 100).tolist() == [95, 96, 97, 98, 99]
    assert reader.rows(0, 1).tolist() == [0]
    assert array.requested == [(90, 100), (0, 30)]


@pytest.mark.parametrize("chunks", [None, (10,)])
def test_changing_the_rows_read_does_not_change_later_reads(chunks: tuple[int, ...] | None) -> None:
    stored = np.arange(30)
    reader = ChunkedRowReader(Chunked(stored, chunks))
    for start, stop in ((0, 30), (3, 5), (0, 10)):
        reader.rows(start, stop)[:] = -1
    assert reader.rows(0, 30).tolist() == list(range(30))
    assert stored.tolist() == list(range(30))


def test_the_cache_keeps_its_limit_or_two_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunked_rows, "_GROUP_BYTES", 1)
    monkeypatch.setattr(chunked_rows, "_CACHE_BYTES", 8 * 40)
    array = Chunked(np.arange(200), (10,))
    reader = ChunkedRowReader(array)
    for start in [*range(0, 200, 10), 0]:
        reader.rows(start, start + 10)
    assert array.requested[-1] == (0, 10), "the first group was evicted"
    array.requested.clear()
    reader.rows(180, 200)
    assert array.requested == [], "the last groups were cached"


class Located(Chunked):
    """Notes which rows are asked for and given back, between those that are requested."""

    def __init__(self, array: np.ndarray, chunks: tuple[int, ...] | None, missing: int = 1) -> None:
        super().__init__(array, chunks)
        self.missing = missing
        self.calls: list[tuple[str, int, int]] = []

    def __getitem__(self, rows: slice) -> Any:
        self.calls.append(("read", rows.start, rows.stop))
        return super().__getitem__(rows)

    def locate(self, start: int, stop: int) -> Any:
        assert 0 <= start < stop <= self.shape[0]
        array = self

        class Ranges:
            def read_ahead(self) -> int:
                array.calls.append(("ask", start, stop))
                if array.missing < 0:
                    raise OSError("the disk is gone")
                return array.missing

            def give_back(self) -> None:
                array.calls.append(("give back", start, stop))

        return Ranges()


def rows_of(calls: list[tuple[str, int, int]], what: str) -> list[int]:
    return [row for name, start, stop in calls for row in range(start, stop) if name == what]


@pytest.mark.parametrize("chunks", [None, (3,), (10,)], ids=str)
def test_rows_are_asked_for_once_in_whole_groups_before_they_are_read(
    chunks: tuple[int, ...] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunked_rows, "_GROUP_BYTES", 1)
    array = Located(np.arange(200).reshape(100, 2), chunks)
    reader = ChunkedRowReader(array)
    for start in range(0, 100, 5):
        assert np.array_equal(reader.rows(start, start + 5), np.arange(2 * start, 2 * start + 10).reshape(5, 2))
    asked = rows_of(array.calls, "ask")
    assert asked == sorted(set(asked))
    assert len(asked) > 80
    for number, (what, start, stop) in enumerate(array.calls):
        if what == "ask":
            assert chunks is None or start % chunks[0] == 0
            assert not set(range(start, stop)) & set(rows_of(array.calls[:number], "read"))
    assert rows_of(array.calls, "give back") == []


def test_nothing_is_asked_for_after_a_jump(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read_ahead, "AHEAD_BYTES", 64)
    array = Located(np.arange(2000).reshape(1000, 2), None)
    reader = ChunkedRowReader(array)
    for start in (500, 0, 900, 300):
        reader.rows(start, start + 5)
    assert rows_of(array.calls, "ask") == []


def test_rows_of_an_array_larger_than_memory_are_given_back_when_they_are_far_behind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(read_ahead, "_KEPT_SHARE", 0.0)
    monkeypatch.setattr(read_ahead, "AHEAD_BYTES", 320)
    monkeypatch.setattr(chunked_rows, "AHEAD_BYTES", 320)
    array = Located(np.arange(200).reshape(100, 2), None)  # 16 bytes a row
    reader = ChunkedRowReader(array)
    for row in range(100):
        reader.rows(row, row + 1)
        assert all(given < row - 20 for given in rows_of(array.calls, "give back"))
    given = rows_of(array.calls, "give back")
    assert given == rows_of(array.calls, "ask")[: len(given)]
    assert len(given) > 50
    array = Located(np.arange(200).reshape(100, 2), None, missing=0)
    reader = ChunkedRowReader(array)
    for row in range(100):
        reader.rows(row, row + 1)
    assert rows_of(array.calls, "give back") == []


def test_rows_are_read_if_asking_for_them_fails() -> None:
    array = Located(np.arange(100), None, missing=-1)
    reader = ChunkedRowReader(array)
    assert np.concatenate([reader.rows(start, start + 10) for start in range(0, 100, 10)]).tolist() == list(range(100))
    assert rows_of(array.calls, "ask") != []
