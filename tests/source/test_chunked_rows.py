"""Rows of a chunked array, read in whole chunks."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.source import chunked_rows as blocks
from penstock.source.chunked_rows import BlockReader


class Chunked:
    """An array that notes which rows are asked of it."""

    def __init__(self, array: np.ndarray, chunks: tuple[int, ...] | None) -> None:
        self._array, self.chunks = array, chunks
        self.shape, self.dtype = array.shape, array.dtype
        self.asked: list[tuple[int, int]] = []

    def __getitem__(self, rows: slice) -> Any:
        self.asked.append((rows.start, rows.stop))
        return self._array[rows]


@given(
    n_rows=st.integers(1, 60),
    chunk=st.sampled_from([None, 1, 3, 7, 100]),
    block_bytes=st.sampled_from([1, 64, 4096]),
    kept_bytes=st.sampled_from([1, 200, 1 << 20]),
    data=st.data(),
)
def test_rows_are_those_of_the_array_in_any_order_of_asking(
    n_rows: int, chunk: int | None, block_bytes: int, kept_bytes: int, data: st.DataObject
) -> None:
    array = np.arange(n_rows * 2, dtype=np.int32).reshape(n_rows, 2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blocks, "_BLOCK_BYTES", block_bytes)
        patch.setattr(blocks, "_KEPT_BYTES", kept_bytes)
        reader = BlockReader(Chunked(array, chunk and (chunk, 2)))
        for _ in range(5):
            start = data.draw(st.integers(0, n_rows))
            stop = data.draw(st.integers(start, n_rows))
            found = reader.rows(start, stop)
            assert (found.dtype, found.tolist()) == (array.dtype, array[start:stop].tolist())


def test_windows_that_overlap_decode_each_chunk_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "_BLOCK_BYTES", 1)
    array = Chunked(np.arange(100), (10,))
    reader = BlockReader(array)
    for start in range(81):
        assert reader.rows(start, start + 20).tolist() == list(range(start, start + 20))
    assert array.asked == [(start, start + 10) for start in range(0, 100, 10)]


def test_small_chunks_are_read_several_at_a_time_and_end_with_the_array(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "_BLOCK_BYTES", 8 * 30)
    array = Chunked(np.arange(100), (10,))
    reader = BlockReader(array)
    assert reader.rows(95, 100).tolist() == [95, 96, 97, 98, 99]
    assert reader.rows(0, 1).tolist() == [0]
    assert array.asked == [(90, 100), (0, 30)]


@pytest.mark.parametrize("chunks", [None, (10,)])
def test_what_was_read_can_be_changed_without_changing_what_is_read_next(chunks: tuple[int, ...] | None) -> None:
    stored = np.arange(30)
    reader = BlockReader(Chunked(stored, chunks))
    for start, stop in ((0, 30), (3, 5), (0, 10)):
        reader.rows(start, stop)[:] = -1
    assert reader.rows(0, 30).tolist() == list(range(30))
    assert stored.tolist() == list(range(30))


def test_no_more_is_kept_than_the_limit_and_two_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "_BLOCK_BYTES", 1)
    monkeypatch.setattr(blocks, "_KEPT_BYTES", 8 * 40)
    array = Chunked(np.arange(200), (10,))
    reader = BlockReader(array)
    for start in [*range(0, 200, 10), 0]:
        reader.rows(start, start + 10)
    assert array.asked[-1] == (0, 10), "the first block was let go of"
    array.asked.clear()
    reader.rows(180, 200)
    assert array.asked == [], "the last ones were kept"
