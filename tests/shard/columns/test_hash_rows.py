"""Checksums of rows: those of the xxhash package, whatever their size."""

import numpy as np
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from penstock.shard.columns.hash_rows import hash_rows


@given(st.integers(1, 20) | st.integers(1000, 1050), st.integers(1, 300), st.integers(0, 1000))
def test_rows_of_one_size_have_the_checksums_of_their_bytes(size: int, count: int, seed: int) -> None:
    data = np.random.default_rng(seed).bytes(size * count)
    expected = [xxhash.xxh3_64_intdigest(data[at : at + size]) for at in range(0, len(data), size)]
    assert hash_rows(memoryview(data), np.full(count, size)).tolist() == expected


@given(st.lists(st.binary(max_size=40), min_size=1, max_size=50))
def test_rows_of_any_size_have_the_checksums_of_their_bytes(rows: list[bytes]) -> None:
    found = hash_rows(b"".join(rows), np.array([len(row) for row in rows]))
    assert found.tolist() == [xxhash.xxh3_64_intdigest(row) for row in rows]
