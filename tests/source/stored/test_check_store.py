"""What `penstock check --all` finds in a zarr store, and what it says about checksums."""

import os
from pathlib import Path
from typing import Any

import numcodecs
import numpy as np
import pytest
import zarr

from penstock import ReadError, SourceError, Span
from penstock.source.stored.source import ZarrSource
from penstock.source.stored.zarr.check_store import check_store

DATA = np.arange(1, 201, dtype="<i4").reshape(50, 4)
CHECKED: dict[str, dict[str, Any]] = {
    "crc32c": {"compressors": [zarr.codecs.Crc32cCodec()]},
    "zstd, crc32c": {"compressors": [zarr.codecs.ZstdCodec(), zarr.codecs.Crc32cCodec()]},
    "shards of crc32c": {"chunks": (5, 4), "shards": (10, 4), "compressors": [zarr.codecs.Crc32cCodec()]},
    "gzip": {"zarr_format": 2, "compressors": numcodecs.GZip()},
    "read by zarr-python": {"zarr_format": 2, "order": "F", "compressors": None, "filters": [numcodecs.CRC32()]},
}
UNCHECKED: dict[str, dict[str, Any]] = {
    "plain": {"compressors": None},
    "read by zarr-python": {"zarr_format": 2, "compressors": None, "order": "F"},
}


def write(path: Path, options: dict[str, Any], rows: int = 50) -> Path:
    given = {"chunks": (10, 4), "dtype": "<i4", **options}
    zarr.create_array(path, shape=DATA.shape, **given)[:rows] = DATA[:rows]
    return path


def chunk_file(path: Path) -> Path:
    return path / "2.0" if (path / ".zarray").exists() else path / "c" / "2" / "0"


@pytest.mark.parametrize("options", CHECKED.values(), ids=CHECKED)
def test_every_flipped_bit_is_found_where_the_codec_has_a_checksum(tmp_path: Path, options: dict[str, Any]) -> None:
    path = write(tmp_path / "a", options)
    (array,), problems = check_store(path, workers=2)
    assert (array.name, array.n_chunks, array.has_checksum, problems) == (
        ".",
        10 if "shards" in options else 5,
        True,
        [],
    )
    assert array.n_bytes == sum(
        file.stat().st_size for file in path.rglob("*") if file.name[0].isdigit() and file.is_file()
    )
    content = bytearray(chunk_file(path).read_bytes())
    for place in range(0 if "gzip" not in str(options).lower() else 10, len(content), 13):
        content[place] ^= 4
        chunk_file(path).write_bytes(content)
        with pytest.raises(ReadError):
            ZarrSource(path).read(Span(20, 30))
        found = check_store(path)[1]
        assert found
        assert all(problem.item in (20, 25) for problem in found)
        content[place] ^= 4
    chunk_file(path).write_bytes(content)
    assert check_store(path)[1] == []


@pytest.mark.parametrize("options", UNCHECKED.values(), ids=UNCHECKED)
def test_arrays_without_a_checksum_are_told_apart(tmp_path: Path, options: dict[str, Any]) -> None:
    (array,), problems = check_store(write(tmp_path / "a", options, rows=20))
    assert (array.n_chunks, array.has_checksum, problems) == (2, False, [])


def test_chunks_that_cannot_be_read_are_listed_with_their_array(tmp_path: Path) -> None:
    group = zarr.create_group(tmp_path / "g")
    group.create_array("good", data=DATA, chunks=(10, 4))
    group.create_array("inner/bad", data=DATA, chunks=(10, 4))
    os.truncate(tmp_path / "g" / "inner" / "bad" / "c" / "1" / "0", 5)
    zarr.create_array(tmp_path / "g" / "none", shape=(), dtype="i4")
    arrays, problems = check_store(tmp_path / "g")
    assert [array.name for array in arrays] == ["good", "inner/bad"]
    assert [(problem.shard, problem.item) for problem in problems] == [
        ("chunk (1, 0) of inner/bad", 10),
        ("none", None),
    ]
    with pytest.raises(SourceError, match="No zarr arrays in"):
        check_store(tmp_path / "g" / "good" / "c")
