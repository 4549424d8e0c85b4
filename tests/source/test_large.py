"""Arrays of more than 2³¹ elements, in sparse files: items beyond every border of 32 bits are read as written."""

import os
from pathlib import Path

import numpy as np
import pytest
import zarr

from penstock import ArraySource, Span, TarSource
from penstock.shard.outputs.write_options import WriteOptions
from penstock.shard.writer import ShardWriter
from penstock.source.stored.source import ZarrSource

SOAK = os.environ.get("PENSTOCK_TESTS") == "soak"
N_ROWS, WIDTH = 2**31 + 1000, 3
PLACES = [0, 2**31 // WIDTH, 2**32 // WIDTH, 2**31 - 1, 2**31, N_ROWS - 2]  # rows around which something is written


def value(row: int) -> list[int]:
    return [row % 251, row % 13, 1]


def check(source: ArraySource | ZarrSource, field: str) -> None:
    for place in PLACES:
        found = source.read(Span(place, place + 2))[field]
        assert found.tolist() == [value(place), value(place + 1)], place
    rows = np.array([place + 1 for place in PLACES[::-1]])
    assert source.take(rows)[field].tolist() == [value(row) for row in rows.tolist()]


def test_a_memory_map_of_more_than_two_to_the_31_rows(tmp_path: Path) -> None:
    path = tmp_path / "a.npy"
    rows = np.lib.format.open_memmap(path, "w+", np.uint8, (N_ROWS, WIDTH))
    for place in PLACES:
        rows[place : place + 2] = [value(place), value(place + 1)]
    rows.flush()
    assert path.stat().st_blocks < 10_000, "the file is sparse"
    check(ArraySource({"x": np.load(path, mmap_mode="r")}), "x")
    check(ZarrSource(path), "data")


@pytest.mark.parametrize(
    "options", [{"zarr_format": 2}, {"zarr_format": 3}, {"zarr_format": 3, "shards": (4000, WIDTH)}]
)
def test_a_zarr_array_of_more_than_two_to_the_31_rows(options: dict[str, object], tmp_path: Path) -> None:
    array = zarr.create_array(tmp_path / "a", shape=(N_ROWS, WIDTH), chunks=(1000, WIDTH), dtype="u1", **options)
    for place in PLACES:
        array[place : place + 2] = np.array([value(place), value(place + 1)], "u1")
    check(ZarrSource(tmp_path / "a"), "data")


@pytest.mark.skipif(not SOAK, reason="writes and reads two gigabytes; run with PENSTOCK_TESTS=soak")
def test_an_item_of_more_than_two_to_the_31_elements_comes_back_from_a_shard(tmp_path: Path) -> None:
    large = np.zeros(2**31 + 9, np.uint8)
    large[[0, 2**31 - 1, 2**31, -1]] = [1, 2, 3, 4]
    writer = ShardWriter(tmp_path / "set", WriteOptions(shard_size=2))
    writer.write({"x": large}, None, None)
    writer.commit()
    found = TarSource(tmp_path / "set", fields=["x"]).take(np.array([0]))["x"][0]
    assert found.dtype == np.uint8
    assert np.array_equal(found, large)
