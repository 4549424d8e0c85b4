"""Row groups of Parquet files are read ahead into the page cache, and given back when they were read whole."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from penstock_page_cache import cached_pages, can_be_dropped, drop
from pyarrow import parquet

from penstock import TableSource

ROWS, GROUP = 400, 100  # of 8 kB


@pytest.fixture
def path(tmp_path: Path) -> Path:
    found = tmp_path / "rows.parquet"
    values = np.random.default_rng(0).integers(0, 2**62, (ROWS, 1024))
    table = pa.table({"x": pa.FixedSizeListArray.from_arrays(values.reshape(-1), 1024)})
    parquet.write_table(table, found, row_group_size=GROUP, compression="none", use_dictionary=False)
    if not can_be_dropped(found):
        pytest.skip("this file system keeps all its pages in memory")
    return found


def quarters(path: Path) -> list[float]:
    """Return how much of each row group is in the page cache, about."""
    return [float(part.mean()) for part in np.array_split(cached_pages(path), ROWS // GROUP)]


def test_row_groups_that_were_read_whole_are_given_back(path: Path) -> None:
    source = TableSource(path)
    path.read_bytes()
    source.release(np.arange(GROUP, 2 * GROUP))
    assert quarters(path)[1] < 0.1
    assert min(quarters(path)[0], *quarters(path)[2:]) > 0.9
    source.release(np.arange(2 * GROUP + 1, 3 * GROUP))  # all rows but one
    assert quarters(path)[2] > 0.9


def test_row_groups_are_read_ahead(path: Path) -> None:
    source = TableSource(path)
    drop(path)
    assert source.prepare(np.array([3 * GROUP + 5])) > 0.9 * path.stat().st_size / 4
    source.take(np.array([3 * GROUP + 5]))
    assert quarters(path)[3] > 0.9
    assert source.prepare(np.array([3 * GROUP + 6])) == 0
