"""Sizes of chunks: the same chunks, whether they are held as one size, as runs or as borders."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.core import chunks
from penstock.core.chunks import ChunkSizes, EqualChunks, join_chunks, list_chunks
from penstock.core.index import Index

sizes = st.lists(st.tuples(st.integers(0, 6), st.integers(0, 9)), max_size=8)


def expand(runs: list[tuple[int, int]]) -> list[int]:
    """Return the size of each chunk."""
    return [size for size, count in runs for _ in range(count) if size]


def forms(wanted: list[int]) -> list[ChunkSizes]:
    """Return chunks of the wanted sizes in every form that can hold them."""
    table = np.array(wanted, np.int64)
    starts = np.flatnonzero(np.diff(table, prepend=0))
    counts = np.diff(np.append(starts, len(table)))
    made: list[ChunkSizes] = [list_chunks(table), chunks._ChunkBorders(np.array([0, *np.cumsum(table)], np.int64))]
    if wanted:
        first = [0, *np.cumsum(counts)], [0, *np.cumsum(table[starts] * counts)]
        made.append(chunks._ChunkRuns(table[starts], *(np.array(column) for column in first)))
    if wanted and set(wanted[:-1]) <= {wanted[0]} and wanted[-1] <= wanted[0]:
        made.append(EqualChunks(sum(wanted), wanted[0]))
    return made


@pytest.fixture(params=["all at once", "in blocks"])
def block(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "in blocks":
        monkeypatch.setattr(chunks, "_CHUNKS_AT_ONCE", 3)


@pytest.mark.usefixtures("block")
class TestForms:
    @given(
        sizes | st.tuples(st.integers(1, 6), st.integers(1, 20), st.integers(1, 6)).map(lambda t: [t[:2], (t[2], 1)])
    )
    def test_every_form_has_the_same_chunks(self, runs: list[tuple[int, int]]) -> None:
        wanted = expand(runs)
        numbers, borders = np.arange(len(wanted)), np.array([0, *np.cumsum(wanted)], np.int64)
        for found in forms(wanted):
            assert (found.n_chunks, found.n_items) == (len(wanted), sum(wanted))
            assert found.n_runs >= len([k for k in range(len(wanted)) if k == 0 or wanted[k] != wanted[k - 1]])
            assert found.sizes_of(numbers).tolist() == wanted
            assert found.starts_of(np.arange(len(wanted) + 1)).tolist() == borders.tolist()
            assert found.locate(np.arange(sum(wanted))).tolist() == np.repeat(numbers, wanted).tolist()
            assert np.repeat(*found.count_runs()).tolist() == wanted
            for size in range(1, 7):
                others = [pair for block in found.other_chunks(size) for pair in zip(*block, strict=True)]
                assert others == [(number, each) for number, each in enumerate(wanted) if each != size]

    @given(st.lists(sizes, max_size=4))
    def test_joined_chunks_come_one_after_the_other(self, parts: list[list[tuple[int, int]]]) -> None:
        wanted = [size for part in parts for size in expand(part)]
        found = join_chunks([forms(expand(part))[number % 2] for number, part in enumerate(parts)])
        assert found.sizes_of(np.arange(found.n_chunks)).tolist() == wanted
        assert found.n_items == sum(wanted)


@given(sizes)
def test_the_usual_chunk_is_the_one_that_most_chunks_have(runs: list[tuple[int, int]]) -> None:
    wanted = expand(runs)
    index = Index.from_sizes(wanted)
    most = max((wanted.count(size) for size in wanted), default=0)
    assert wanted.count(index.usual_chunk) == most
    assert index.n_unusual_chunks == len(wanted) - most
    unusual = [pair for block in index.unusual_chunks() for pair in zip(*block, strict=True)]
    assert unusual == [(number, size) for number, size in enumerate(wanted) if size != index.usual_chunk]


def test_equal_shards_in_chunks_take_no_memory_for_each_chunk() -> None:
    found = Index.from_sizes(np.full(10**5, 10**4), chunk=64)._chunks
    assert (found.n_chunks, found.n_items, found.n_runs) == (157 * 10**5, 10**9, 2 * 10**5)
