"""Inputs are read ahead: the same bytes with and without hints, and a page cache that is left to others."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import soundfile
import zarr
from penstock_page_cache import cached_pages, can_be_dropped, drop
from penstock_test_parts import eventually

from penstock import convert_to_shards
from penstock.convert.fingerprint import fingerprint
from penstock.convert.inputs.zarr import _AxisFirst, _CheckedArray
from penstock.convert.nwb.series import _LocatedRows
from penstock.convert.scan import ConvertOptions
from penstock.files import read_ahead
from penstock.shard.outputs.write_options import WriteOptions
from penstock.source.file_ranges import FileRanges
from penstock.source.stored.folders import Folders


def _write_npy(path: Path) -> Path:
    np.save(path / "rows.npy", np.arange(300 * 50, dtype=np.float32).reshape(300, 50))
    return path / "rows.npy"


def _write_npz(path: Path) -> Path:
    np.savez(path / "rows.npz", x=np.arange(300 * 5).reshape(300, 5), y=np.arange(300.0))
    return path / "rows.npz"


def _write_zarr(path: Path) -> Path:
    array = zarr.create_array(str(path / "rows.zarr"), shape=(300, 6), chunks=(7, 4), dtype="i4")
    array[:] = np.arange(1800).reshape(300, 6)
    return path / "rows.zarr"


def _write_audio(path: Path) -> Path:
    for number in range(30):
        soundfile.write(path / f"{number:02d}.wav", np.arange(100, dtype=np.int16) + 200 * number, 100)
    return path


def _write_images(path: Path) -> Path:
    for number in range(30):
        (path / f"{number:02d}.png").write_bytes(b"\x89PNG\r\n\x1a\n" + bytes([number]) * (100 * number + 1))
    return path


def _write_shards(path: Path) -> Path:
    rows = _write_npy(path)
    convert_to_shards(rows, path / "shards", options=ConvertOptions(WriteOptions(40)), show_progress=False)
    return path / "shards"


_WRITE: list[Callable[[Path], Path]] = [
    *(_write_npy, _write_npz, _write_zarr, _write_audio, _write_images, _write_shards),
]


def _convert(given: Path, folder: Path, **options: Any) -> dict[str, bytes]:
    options = {"write": WriteOptions(64), **options}
    convert_to_shards(given, folder, options=ConvertOptions(**options), show_progress=False)
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


@pytest.mark.parametrize("write", _WRITE, ids=lambda write: write.__name__.removeprefix("_write_"))
@pytest.mark.parametrize("shuffle_seed", [None, 3])
def test_the_bytes_of_a_conversion_do_not_depend_on_hints(
    write: Callable[[Path], Path], shuffle_seed: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "in").mkdir()
    given = write(tmp_path / "in")
    expected = _convert(given, tmp_path / "hints", shuffle_seed=shuffle_seed)
    assert len(expected) >= 3
    monkeypatch.setattr(read_ahead, "_KEPT_SHARE", 0.0)
    assert _convert(given, tmp_path / "given back", shuffle_seed=shuffle_seed) == expected
    monkeypatch.delattr(os, "posix_fadvise")
    monkeypatch.delattr(os, "RWF_NOWAIT")
    assert _convert(given, tmp_path / "no hints", shuffle_seed=shuffle_seed) == expected


# Larger than what the kernel reads ahead by itself after the first read of a file: some of that may stay.
_FILE_BYTES = 24 << 20


def _write_large(path: Path) -> None:
    np.save(path, np.arange(_FILE_BYTES // 4, dtype=np.float32).reshape(48, -1))


@pytest.mark.parametrize("ahead_bytes", [2 * _FILE_BYTES, 1 << 20], ids=["small file", "large file"])
@pytest.mark.parametrize("is_used", [False, True], ids=["nobody has it", "somebody has it"])
def test_inputs_larger_than_memory_and_their_shards_do_not_stay_in_the_page_cache(
    ahead_bytes: int, is_used: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = tmp_path / "rows.npy"
    _write_large(given)
    if not can_be_dropped(given):
        pytest.skip("this file system keeps its pages")
    monkeypatch.setattr(read_ahead, "_KEPT_SHARE", 0.0)
    monkeypatch.setattr(read_ahead, "AHEAD_BYTES", ahead_bytes)

    def convert_once() -> bool:
        drop(given)
        if is_used:
            given.read_bytes()
        convert_to_shards(given, tmp_path / "out", show_progress=False, overwrite=True)
        share = cached_pages(given).mean()
        is_right = share == 1 if is_used else share < 0.5
        return bool(is_right and cached_pages(tmp_path / "out" / "shard_000000.tar").mean() < 0.5)

    assert eventually(convert_once)  # the kernel keeps pages that another processor holds at that moment


def test_inputs_that_fit_in_memory_stay_in_the_page_cache(tmp_path: Path) -> None:
    given = tmp_path / "rows.npy"
    _write_large(given)
    if not can_be_dropped(given):
        pytest.skip("this file system keeps its pages")
    convert_to_shards(given, tmp_path / "out", show_progress=False)
    assert cached_pages(given).mean() > 0.5
    assert cached_pages(tmp_path / "out" / "shard_000000.tar").mean() > 0.5


@pytest.mark.parametrize("give_back", [False, True])
def test_a_fingerprint_leaves_the_page_cache_as_it_is_asked_to(give_back: bool, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(np.arange(1 << 19).tobytes())
    if not can_be_dropped(path):
        pytest.skip("this file system keeps its pages")
    digest = fingerprint(path, give_back=give_back)

    def read_cold() -> bool:
        drop(path)
        assert fingerprint(path, give_back=give_back) == digest
        return bool(cached_pages(path).any()) == (not give_back)

    assert eventually(read_cold)  # the kernel keeps pages that another processor holds at that moment
    path.read_bytes()
    assert fingerprint(path, give_back=True) == digest
    assert cached_pages(path).all()


def _read_ranges(ranges: FileRanges) -> bytes:
    parts = zip(ranges.which.tolist(), ranges.begins.tolist(), ranges.ends.tolist(), strict=True)
    return b"".join(Path(ranges.files[which].path).read_bytes()[begin:end] for which, begin, end in parts)


@pytest.mark.parametrize("chunks", [None, (10, 4), (7, 2)], ids=str)
def test_rows_of_a_series_are_located_where_they_lie_in_the_file(
    chunks: tuple[int, int] | None, tmp_path: Path
) -> None:
    values = np.arange(100 * 4, dtype=np.int32).reshape(100, 4)
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_dataset("before", data=np.full(1000, -1))
        file.create_dataset("data", data=values, chunks=chunks)
    with h5py.File(tmp_path / "a.h5") as file:
        rows = _LocatedRows.of(file["data"], tmp_path / "a.h5")
        found = np.frombuffer(_read_ranges(rows.locate(20, 35)), np.int32)
        assert {*values[20:35].flat} <= {*found.tolist()}
        if chunks is None:
            assert np.array_equal(found, values[20:35].ravel())
        size = 1 if chunks is None else chunks[0]
        low, high = 20 // size * size, -(-35 // size) * size
        assert {*found.tolist()} == {*values[low:high].flat}
        assert np.array_equal(rows[20:35], values[20:35])


@pytest.mark.parametrize("axis", [0, 1])
def test_rows_of_a_zarr_store_are_located_in_their_chunks(axis: int, tmp_path: Path) -> None:
    values = np.arange(1, 401, dtype=np.int32).reshape(20, 20)
    array = zarr.create_array(str(tmp_path / "a.zarr"), shape=(20, 20), chunks=(5, 5), dtype="i4", compressors=None)
    array[:] = values
    rows = _AxisFirst(array, _CheckedArray(Folders().open(str(tmp_path / "a.zarr"))), axis, "it")
    found = rows.locate(3, 8)
    paths = [Path(file.path) for file in found.files]
    stored = np.concatenate([np.frombuffer(path.read_bytes(), np.int32) for path in paths])
    assert {*stored.tolist()} == {*np.moveaxis(values, axis, 0)[:10].flat}
