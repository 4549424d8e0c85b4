"""Rows of a chunked array, read in whole chunks."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

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
