"""Rows of arrays read by zarr-python, `.npy` files and HDF5 datasets."""

import multiprocessing as mp
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numcodecs
import numpy as np
import pytest
import zarr
from penstock_source_suite import Case, SourceSuite
from penstock_test_parts import open_files, run_isolated
from zarr.codecs import TransposeCodec

from penstock import DamageError, ReadError, SourceError, Span
from penstock.source.stored.source import ZarrSource
from penstock.source.stored.zarr import store_folder as zarr_store
from penstock.source.stored.zarr.zarr_python import ZarrPythonArray


def numbers(*shape: int, dtype: str = "f4") -> np.ndarray:
    """Return an array of distinct values; none is 0."""
    return np.arange(1, 1 + int(np.prod(shape))).reshape(shape).astype(dtype)


def check_all(source: ZarrSource, wanted: np.ndarray) -> None:
    n = len(wanted)
    for start, stop in ((0, n), (1, n - 1), (n // 2, n // 2)):
        found = source.read(Span(start, stop))["data"]
        assert found.dtype == wanted.dtype
        assert found.tobytes() == wanted[start:stop].tobytes()
    items = np.array([n - 1, 0, 0, n // 2])
    assert source.take(items)["data"].tobytes() == wanted[items].tobytes()
    out = np.zeros((2 * n, *wanted.shape[1:]), wanted.dtype)
    source.read(Span(0, n), {"data": out[::2]})
    assert out[::2].tobytes() == wanted.tobytes()
    assert not out[1::2].any()


# -- left to zarr-python -----------------------------------------------------------------------------------------------

LEFT: dict[str, dict[str, Any]] = {
    "delta": {"zarr_format": 2, "filters": [numcodecs.Delta("i4")]},
    "Fortran order": {"zarr_format": 2, "order": "F"},
    "a codec of its own": {"zarr_format": 2, "compressors": numcodecs.LZMA()},
    "transposed": {"zarr_format": 3, "filters": [TransposeCodec(order=(1, 0))]},
    "transposed in shards": {"zarr_format": 3, "filters": [TransposeCodec(order=(1, 0))], "shards": (8, 4)},
}


def write(path: Path, data: np.ndarray, **options: Any) -> Path:
    zarr.create_array(path, shape=data.shape, chunks=(4, 2), dtype=data.dtype, **options)[...] = data
    return path


@pytest.mark.parametrize("options", LEFT.values(), ids=LEFT)
def test_arrays_read_by_zarr_python_have_the_same_values(tmp_path: Path, options: dict[str, Any]) -> None:
    data = numbers(23, 3, dtype="i4")
    source = ZarrSource(write(tmp_path / "a", data, **options))
    assert isinstance(source._arrays["data"], ZarrPythonArray)
    assert source.index.largest_chunk == 4
    check_all(source, data)
    chosen = ZarrSource(tmp_path, {"x": ("a", slice(1, 3)), "y": ("a", 0)}).read(Span(2, 9))
    assert chosen["x"].tobytes() == data[2:9, 1:3].tobytes()
    assert chosen["y"].tobytes() == data[2:9, 0].tobytes()


@pytest.mark.parametrize("options", LEFT.values(), ids=LEFT)
def test_an_array_read_by_zarr_python_that_has_changed_is_a_read_error(tmp_path: Path, options: dict[str, Any]) -> None:
    path = write(tmp_path / "a", numbers(23, 3, dtype="i4"), **options)
    source = ZarrSource(path)
    zarr.open_array(path, mode="r+").resize((9, 3))
    with pytest.raises(ReadError, match=r"/a has changed since it was opened: \(23, 3\) then, \(9, 3\) now"):
        source.read(Span(0, 4))
    for file in path.iterdir():
        if file.is_file():
            file.unlink()
    with pytest.raises(ReadError, match="/a has changed since it was opened"):
        source.read(Span(0, 4))


@pytest.mark.parametrize("kind", ["delta", "Fortran order", "a codec of its own"])
def test_a_missing_chunk_is_damage_also_if_zarr_python_reads_it(tmp_path: Path, kind: str) -> None:
    data = numbers(23, 3, dtype="i4")
    path = write(tmp_path / "a", data, fill_value=None, **LEFT[kind])
    source = ZarrSource(path)
    check_all(source, data)
    (path / "2.1").unlink()
    with pytest.raises(
        DamageError, match=r"item 9 in chunk \(2, 1\) of .*/a: it is missing, and the store has no fill value"
    ):
        source.read(Span(9, 20))
    assert source.read(Span(12, 23))["data"].tobytes() == data[12:].tobytes()
    strict = ZarrSource(write(tmp_path / "b", data, fill_value=5, **LEFT[kind]))
    filled = ZarrSource(tmp_path / "b", missing_chunks="fill")
    (tmp_path / "b" / "2.1").unlink()
    with pytest.raises(
        DamageError, match=r"item 8 in chunk \(2, 1\) of .*/b: .*/b/2\.1 is missing, but was there when"
    ):
        strict.read(Span(8, 9))
    assert ZarrSource(tmp_path / "b").read(Span(8, 9))["data"].tolist() == [[*data[8, :2].tolist(), 5]]
    assert filled.read(Span(8, 9))["data"].tolist() == [[*data[8, :2].tolist(), 5]]


@pytest.mark.parametrize("dtype", [[("x", "i4"), ("y", "f4")], "S5", "M8[s]"])
def test_a_dtype_that_is_not_numeric_is_refused(tmp_path: Path, dtype: Any) -> None:
    zarr.create_array(tmp_path / "a", shape=(5,), chunks=(5,), dtype=np.dtype(dtype), zarr_format=2)
    np.save(tmp_path / "a.npy", np.zeros(5, dtype))
    for name in ("a", "a.npy"):
        with pytest.raises(SourceError, match=rf"/{name} must be a numeric array with rows, got "):
            ZarrSource(tmp_path, [name])


# -- .npy --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["<f4", ">f4", ">i2", "?", "u8", ">c16", "f2"])
@pytest.mark.parametrize("shape", [(23,), (23, 3), (9, 2, 3), (7, 0)])
def test_npy_files_are_read_as_numpy_reads_them(tmp_path: Path, dtype: str, shape: tuple[int, ...]) -> None:
    data = numbers(*shape, dtype=dtype)
    np.save(tmp_path / "a.npy", data)
    native = data.astype(data.dtype.newbyteorder("="))
    check_all(ZarrSource(tmp_path / "a.npy"), native)
    if len(shape) > 1 and shape[1] > 1:
        found = ZarrSource(tmp_path, {"x": ("a.npy", slice(1, 2))}).take(np.array([5, 1]))["x"]
        assert found.tobytes() == native[[5, 1], 1:2].tobytes()


def test_npy_files_of_many_chunks_are_read_by_threads(tmp_path: Path) -> None:
    data = numbers(5000, 150, dtype="f8")
    np.save(tmp_path / "a.npy", data)
    source = ZarrSource(tmp_path / "a.npy", threads=4)
    assert source.index.n_chunks == 6
    assert source.read(Span(3, 4999))["data"].tobytes() == data[3:4999].tobytes()
    items = np.array([4999, 0, 2500, 874])
    assert source.take(items)["data"].tobytes() == data[items].tobytes()
    source.close()


REFUSED: dict[str, tuple[Callable[[Path], Any], str]] = {
    "Fortran order": (
        lambda p: np.save(p, np.asfortranarray(numbers(4, 3))),
        "Fortran order; save it again in C order",
    ),
    "0-d": (lambda p: np.save(p, np.float32(3)), r"must be a numeric array with rows, got float32 \(\)"),
    "objects": (lambda p: np.save(p, np.array([{}, 1], object), allow_pickle=True), "Python objects"),
    "empty": (lambda p: p.write_bytes(b""), r"must be a \.npy file"),
    "an .npz": (lambda p: p.write_bytes(b"PK\x03\x04" + bytes(60)), r"must be a \.npy file"),
    "text": (lambda p: p.write_text("1,2,3\n" * 30), r"must be a \.npy file"),
    "a header that is cut": (lambda p: (np.save(p, numbers(4)), os.truncate(p, 40)), r"must be a \.npy file"),
    "numbers that are cut": (
        lambda p: (np.save(p, numbers(9)), os.truncate(p, p.stat().st_size - 1)),
        r"must be a \.npy file",
    ),
    "a huge shape": (lambda p: p.write_bytes(header("(10**15, 3)")), r"must be a \.npy file"),
    "a negative shape": (lambda p: p.write_bytes(header("(-1, 3)")), r"must be a \.npy file"),
    "a shape that is code": (lambda p: p.write_bytes(header("__import__('os')")), r"must be a \.npy file"),
}


def header(shape: str) -> bytes:
    text = f"{{'descr': '<f4', 'fortran_order': False, 'shape': {shape}, }}".encode().ljust(117) + b"\n"
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text + bytes(64)


@pytest.mark.parametrize(("make", "message"), REFUSED.values(), ids=REFUSED)
def test_invalid_npy_files_are_refused(tmp_path: Path, make: Callable[[Path], Any], message: str) -> None:
    make(tmp_path / "a.npy")
    with pytest.raises(SourceError, match=rf"a\.npy .*{message}"):
        ZarrSource(tmp_path / "a.npy")


CHANGES: dict[str, Callable[[Path], Any]] = {
    "cut": lambda p: os.truncate(p, 200),
    "cut to nothing": lambda p: os.truncate(p, 0),
    "longer": lambda p: os.truncate(p, 100_000),
    "another shape of that size": lambda p: np.save(p, numbers(50, 20)),
    "another type of that size": lambda p: np.save(p, numbers(100, 10, dtype="i4")),
    "gone": lambda p: p.unlink(),
}


def read_after(change: Callable[[Path], Any], path: Path) -> str:
    np.save(path, numbers(100, 10))
    source = ZarrSource(path)
    source.read(Span(0, 100))
    change(path)
    with pytest.raises(ReadError, match=r"The array .*a\.npy (has changed since it was opened|is gone)"):
        source.read(Span(50, 60))
    with pytest.raises(ReadError, match=r"The array .*a\.npy (has changed since it was opened|is gone)"):
        source.take(np.array([99]))
    return "alive"


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_an_npy_file_that_changes_while_it_is_open_is_a_read_error_and_not_a_sigbus(
    tmp_path: Path, change: Callable[[Path], Any]
) -> None:
    assert run_isolated(read_after, change, tmp_path / "a.npy") == "alive"


def test_new_numbers_in_an_npy_file_are_read(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", numbers(10))
    source = ZarrSource(tmp_path / "a.npy")
    np.save(tmp_path / "a.npy", numbers(10) + 5)
    check_all(source, numbers(10) + 5)


def test_short_reads_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Linux reads at most 2 GB at a time; network file systems may read less."""
    data = numbers(23, 3)
    np.save(tmp_path / "a.npy", data)
    zarr.create_array(tmp_path / "plain", data=data, chunks=(5, 3), compressors=None)
    zarr.create_array(tmp_path / "packed", data=data, chunks=(5, 3))
    real = os.preadv
    monkeypatch.setattr(zarr_store.os, "preadv", lambda fd, buffers, offset: real(fd, [buffers[0][:7]], offset))
    for name in ("a.npy", "plain", "packed"):
        check_all(ZarrSource(tmp_path / name), data)


# -- HDF5 --------------------------------------------------------------------------------------------------------------

DATASETS: dict[str, dict[str, Any]] = {
    "contiguous": {},
    "chunked": {"chunks": (5, 2)},
    "compressed": {"chunks": (6, 3), "compression": "gzip", "shuffle": True},
}


@pytest.mark.parametrize("options", DATASETS.values(), ids=DATASETS)
@pytest.mark.parametrize("dtype", ["<f4", ">f8", "?", ">i2", "c8"])
def test_hdf5_datasets_are_read_as_h5py_reads_them(tmp_path: Path, options: dict[str, Any], dtype: str) -> None:
    data = numbers(23, 3, dtype=dtype)
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_dataset("deep/x", data=data, **options)
    native = data.astype(data.dtype.newbyteorder("="))
    source = ZarrSource(tmp_path, {"data": "a.h5/deep/x"})
    check_all(source, native)
    assert source.index.largest_chunk == options.get("chunks", (23,))[0]
    found = ZarrSource(tmp_path / "a.h5", {"x": ("deep/x", slice(1, 3)), "y": ("deep/x", -1)}).read(Span(3, 20))
    assert found["x"].tobytes() == native[3:20, 1:3].tobytes()
    assert found["y"].tobytes() == native[3:20, 2].tobytes()


def test_a_missing_dataset_is_named_with_those_that_exist(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["deep/x"], file["y"], file["single"], file["text"] = numbers(4), numbers(4), 3.0, ["a", "b"]
    with pytest.raises(
        SourceError,
        match=r"a\.h5 is a file of datasets, not one: it has deep/x, single, text, y\. Name one in the path, "
        r"'.*/a\.h5/deep/x', or several as fields=\['deep/x', 'y'\]",
    ):
        ZarrSource(tmp_path / "a.h5")
    with pytest.raises(SourceError, match=r"no dataset 'deep/xx'.* Did you mean 'deep/x'\?"):
        ZarrSource(tmp_path / "a.h5", ["deep/xx"])
    with h5py.File(tmp_path / "empty.h5", "w"), pytest.raises(SourceError, match=r"empty\.h5 has no dataset: it is"):
        ZarrSource(tmp_path / "empty.h5")
    for name in ("z", "deep", "y/z"):
        with pytest.raises(SourceError, match=r"a\.h5 has no dataset '.*'; it has deep/x, single, text, y\."):
            ZarrSource(tmp_path / "a.h5", [name])
    for name in ("single", "text"):
        with pytest.raises(SourceError, match=rf"a\.h5/{name} must be a numeric array with rows, got "):
            ZarrSource(tmp_path / "a.h5", [name])
    (tmp_path / "b.h5").write_bytes(b"no HDF5")
    with pytest.raises(SourceError, match=r"Could not open .*b\.h5"):
        ZarrSource(tmp_path / "b.h5", ["x"])


def hdf5(path: Path, data: np.ndarray) -> ZarrSource:
    with h5py.File(path, "w") as file:
        file.create_dataset("x", data=data, chunks=(5, data.shape[1]), compression="gzip")
    return ZarrSource(path, {"data": "x"}, threads=2)


def test_close_closes_the_file(tmp_path: Path) -> None:
    source = hdf5(tmp_path / "a.h5", numbers(20, 2))
    source.read(Span(0, 20))
    assert str(tmp_path / "a.h5") in open_files().values()
    source.close()
    assert str(tmp_path / "a.h5") not in open_files().values()
    check_all(source, numbers(20, 2))


def test_a_dataset_that_is_gone_or_has_shrunk_is_a_read_error(tmp_path: Path) -> None:
    source = hdf5(tmp_path / "a.h5", numbers(20, 2))
    source.close()
    hdf5(tmp_path / "a.h5", numbers(10, 2)).close()
    with pytest.raises(ReadError, match=r"a\.h5/x has changed since it was opened: \(20, 2\) then, \(10, 2\) now"):
        source.read(Span(0, 1))
    source.close()
    (tmp_path / "a.h5").unlink()
    with pytest.raises(ReadError, match=r"a\.h5/x is gone"):
        source.read(Span(0, 1))


def test_a_damaged_chunk_of_a_dataset_is_a_read_error(tmp_path: Path) -> None:
    data = numbers(20, 500)
    source = hdf5(tmp_path / "a.h5", data)
    with h5py.File(tmp_path / "a.h5") as file:
        place = file["x"].id.get_chunk_info(2)
    source.close()
    with (tmp_path / "a.h5").open("r+b") as file:
        file.seek(place.byte_offset)
        file.write(b"\xff" * place.size)
    with pytest.raises(ReadError, match=r"Could not read rows 8–11 of .*a\.h5/x"):
        source.read(Span(8, 12))
    assert source.read(Span(0, 10))["data"].tobytes() == data[:10].tobytes()
    source.close()


def read_in_children(source: ZarrSource, data: np.ndarray) -> list[int | None]:
    """Fork while a thread reads continuously; every child reads, too."""
    # Once before: zarr-python hangs in a child that is forked while another thread starts its first event loop.
    check_all(source, data)
    stop = threading.Event()

    def reader() -> None:
        while not stop.is_set():
            check_all(source, data)

    thread = threading.Thread(target=reader)
    thread.start()
    children = [mp.get_context("fork").Process(target=check_all, args=(source, data)) for _ in range(6)]
    try:
        for child in children:
            child.start()
        for child in children:
            child.join(120)
    finally:
        stop.set()
        thread.join()
    return [child.exitcode for child in children]


@pytest.mark.parametrize("kind", ["h5", "npy", "delta", "v3"])
def test_a_fork_reads_while_a_thread_of_its_parent_reads(tmp_path: Path, kind: str) -> None:
    data = numbers(40, 4, dtype="i4")
    if kind == "h5":
        source = hdf5(tmp_path / "a.h5", data)
    elif kind == "npy":
        np.save(tmp_path / "a.npy", data)
        source = ZarrSource(tmp_path / "a.npy", threads=2)
    else:
        source = ZarrSource(write(tmp_path / "a", data, **LEFT["delta"] if kind == "delta" else {}), threads=2)
    check_all(source, data)
    assert run_isolated(read_in_children, source, data) == [0] * 6
    source.close()


# -- what every source does --------------------------------------------------------------------------------------------


class TestFiles(SourceSuite):
    @pytest.fixture(scope="class", params=["npy", "h5"])
    @classmethod
    def case(cls, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
        folder, data = tmp_path_factory.mktemp("files"), numbers(23, 3)
        for name, offset in (("one", 0), ("other", 1)):
            np.save(folder / f"{name}.npy", data + offset)
            hdf5(folder / f"{name}.h5", data + offset).close()
        suffix = {"npy": ".npy", "h5": ".h5/x"}[request.param]
        return Case(
            make=lambda: ZarrSource(folder, {"data": f"one{suffix}"}, threads=2),
            truth=lambda item: {"data": data[item]},
            n_items=23,
            other=lambda: ZarrSource(folder, {"data": f"other{suffix}"}, threads=2),
        )
