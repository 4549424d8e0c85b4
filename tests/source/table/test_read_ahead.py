"""Record batches of Arrow files are read ahead into the page cache."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from penstock_page_cache import cached_pages, can_be_dropped, drop
from pyarrow import feather

from penstock import TableSource
from penstock.source.native import is_compiled

ROWS, BATCH = 400, 100  # of 8 kB


@pytest.mark.skipif(not is_compiled(), reason="without the C part, the file is decoded as a whole")
def test_record_batches_are_read_ahead(tmp_path: Path) -> None:
    path = tmp_path / "rows.feather"
    values = np.random.default_rng(0).integers(0, 2**62, (ROWS, 1024))
    table = pa.table({"x": pa.FixedSizeListArray.from_arrays(values.reshape(-1), 1024)})
    feather.write_feather(table, path, compression="uncompressed", chunksize=BATCH)
    if not can_be_dropped(path):
        pytest.skip("this file system keeps all its pages in memory")
    source = TableSource(path)
    drop(path)
    assert source.prepare(np.array([3 * BATCH + 5])) > 0.9 * path.stat().st_size / 4
    assert source.take(np.array([3 * BATCH + 5]))["x"].tolist() == [values[305].tolist()]
    assert cached_pages(path)[-path.stat().st_size // 4096 // 4 :].mean() > 0.9
    assert source.prepare(np.array([3 * BATCH + 6])) == 0
