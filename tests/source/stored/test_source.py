"""Rows of zarr arrays of every layout equal those of zarr-python, bit for bit."""

import itertools
import tempfile
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numcodecs
import numpy as np
import pytest
import zarr
from hypothesis import given
from hypothesis import strategies as st
from penstock_source_suite import Case, ShortSuite
from zarr.codecs import BloscCodec, BytesCodec, Crc32cCodec, GzipCodec, ZstdCodec

from penstock import OptionError, Span
from penstock.source.stored.source import ZarrSource
from penstock.source.stored.zarr.codec import Codec
from penstock.source.stored.zarr.zarr_python import ZarrPythonArray

# -- stores: every value tells where it lies ---------------------------------------------------------------------------


def encoded(shape: tuple[int, ...], dtype: str, offset: int = 0) -> np.ndarray:
    """Return numbers other than 0, so that none is a fill value by accident."""
    numbers = np.arange(1 + offset, 1 + offset + int(np.prod(shape))).reshape(shape)
    kind = np.dtype(dtype)
    if kind.kind == "b":
        return (numbers * 2654435761 >> 7) % 2 == 1
    if kind.kind == "c":
        return (numbers + 1j * (numbers + 0.5)).astype(kind)
    return numbers.astype(kind)


V2 = {
    "plain": None,
    "blosc lz4": numcodecs.Blosc("lz4", shuffle=1),
    "blosc zstd bitshuffle": numcodecs.Blosc("zstd", clevel=3, shuffle=2),
    "blosc without shuffle": numcodecs.Blosc("blosclz", shuffle=0),
    "zstd": numcodecs.Zstd(3),
    "gzip": numcodecs.GZip(1),
    "zlib": numcodecs.Zlib(1),
    "lz4": numcodecs.LZ4(),
    "bz2": numcodecs.BZ2(1),
}
V3 = {
    "plain": (),
    "blosc lz4": (BloscCodec(cname="lz4", shuffle="shuffle"),),
    "blosc zstd bitshuffle": (BloscCodec(cname="zstd", shuffle="bitshuffle"),),
    "zstd": (ZstdCodec(level=3),),
    "zstd with a checksum": (ZstdCodec(level=3, checksum=True),),
    "gzip": (GzipCodec(level=1),),
    "crc32c": (Crc32cCodec(),),
    "blosc, then crc32c": (BloscCodec(cname="lz4"), Crc32cCodec()),
    "zstd, then crc32c": (ZstdCodec(level=1), Crc32cCodec()),
}
LAYOUTS = [("v2", name) for name in V2] + [("v3", name) for name in V3]


def write(
    path: Path,
    data: np.ndarray,
    chunks: tuple[int, ...],
    layout: tuple[str, str] = ("v3", "plain"),
    separator: str = "/",
    **options: Any,
) -> Path:
    """Write an array with zarr-python; `dtype` in the options is the stored dtype."""
    dtype = np.dtype(options.pop("dtype", data.dtype))
    version, codec = layout
    if version == "v2":
        options |= {"zarr_format": 2, "compressors": V2[codec], "dtype": dtype, "filters": None}
    else:
        endian = "big" if dtype.byteorder == ">" else "little"
        one_byte = dtype.itemsize == 1
        options |= {"zarr_format": 3, "compressors": V3[codec], "dtype": dtype.newbyteorder("=")}
        options["serializer"] = BytesCodec(endian=None if one_byte else endian)
    key = {"name": "v2" if version == "v2" else "default", "separator": separator}
    array = zarr.create_array(path, shape=data.shape, chunks=chunks, chunk_key_encoding=key, **options)
    array[...] = data
    return path


def same(found: np.ndarray, wanted: np.ndarray) -> bool:
    """Return whether two arrays are equal bit for bit, and the first is in native byte order."""
    native = wanted.astype(wanted.dtype.newbyteorder("="))
    alike = (found.dtype, found.shape) == (native.dtype, native.shape)
    return found.dtype.isnative and alike and found.tobytes() == native.tobytes()


def check_all(source: ZarrSource, wanted: np.ndarray) -> None:
    """Read all rows, an unaligned span, and single items out of order."""
    n = len(wanted)
    spans = [(0, n), (1, n - 1), (n // 3, n // 2 + 1)]
    for start, stop in spans:
        assert same(source.read(Span(start, stop))["data"], wanted[start:stop])
    items = np.array([n - 1, 0, n // 2, n // 2, 1, n - 1])
    assert same(source.take(items)["data"], wanted[items])


# -- every layout ------------------------------------------------------------------------------------------------------

SHAPES = {
    "1-D": ((23,), (5,)),
    "2-D, rows whole": ((23, 3), (5, 3)),
    "2-D, columns in chunks": ((23, 5), (4, 2)),
    "3-D, one column a chunk": ((23, 4, 3), (6, 4, 1)),
    "4-D": ((11, 3, 2, 3), (4, 2, 1, 2)),
    "one chunk, larger than all": ((7, 2), (50, 9)),
    "a chunk for each number": ((6, 2), (1, 1)),
}


@pytest.mark.parametrize("layout", LAYOUTS, ids=" ".join)
def test_every_layout_is_read_as_zarr_reads_it(tmp_path: Path, layout: tuple[str, str]) -> None:
    for (shape, chunks), separator, dtype in zip(
        SHAPES.values(), itertools.cycle("./"), itertools.cycle(["i4", "f8", "?", "u2", "f4"])
    ):
        data = encoded(shape, dtype)
        path = write(tmp_path / f"{shape}", data, chunks, layout, separator)
        source = ZarrSource(path)
        assert not isinstance(source._arrays["data"], ZarrPythonArray)
        check_all(source, data)
        source.close()


@pytest.mark.parametrize("dtype", ["?", "i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8", "f2", "f4", "f8", "c8", "c16"])
@pytest.mark.parametrize("order", ["<", ">"])
@pytest.mark.parametrize(
    "layout", [("v2", "plain"), ("v2", "zstd"), ("v3", "plain"), ("v3", "blosc lz4")], ids=" ".join
)
def test_every_type_and_byte_order_is_read(tmp_path: Path, dtype: str, order: str, layout: tuple[str, str]) -> None:
    data = encoded((9, 3), dtype)
    path = write(tmp_path / "a", data, (4, 2), layout, dtype=np.dtype(dtype).newbyteorder(order))
    check_all(ZarrSource(path), data)


def stored_arrays() -> st.SearchStrategy[dict[str, Any]]:
    """Return arrays of any layout, some with shards."""

    def of(axes: int) -> st.SearchStrategy[dict[str, Any]]:
        sizes = st.lists(st.integers(1, 9 if axes < 4 else 4), min_size=axes, max_size=axes).map(tuple)
        per_shard = st.lists(st.integers(1, 3), min_size=axes, max_size=axes)
        return st.fixed_dictionaries(
            {
                "shape": sizes,
                "chunks": st.lists(st.integers(1, 5), min_size=axes, max_size=axes).map(tuple),
                "per_shard": st.none() | per_shard,
                "index_location": st.sampled_from(["start", "end"]),
                "layout": st.sampled_from(LAYOUTS),
                "separator": st.sampled_from("./"),
                "dtype": st.sampled_from(["?", "i1", "<i2", ">i4", "<f4", ">f8"]),
                "fill": st.sampled_from([0, 1]),
                "hole": st.integers(0, 8),
            }
        )

    return st.integers(1, 4).flatmap(of)


def write_drawn(path: Path, drawn: dict[str, Any]) -> np.ndarray:
    """Write an array in which some rows were never written, so that some chunks are missing."""
    options: dict[str, Any] = {"fill_value": drawn["fill"], "dtype": drawn["dtype"]}
    if drawn["per_shard"] is not None and drawn["layout"][0] == "v3":
        shape = [chunk * per for chunk, per in zip(drawn["chunks"], drawn["per_shard"], strict=True)]
        options["shards"] = {"shape": tuple(shape), "index_location": drawn["index_location"]}
    data = encoded(drawn["shape"], np.dtype(drawn["dtype"]).newbyteorder("=").str)
    data[drawn["hole"] :] = np.asarray(drawn["fill"]).astype(data.dtype)
    write(path, data, drawn["chunks"], drawn["layout"], drawn["separator"], **options)
    read = zarr.open_array(path, mode="r")[...]
    assert same(data, read), "zarr-python reads what was written"
    return data


@given(drawn=stored_arrays(), threads=st.sampled_from([1, 2, 4]), choice=st.data())
def test_any_span_items_and_columns_equal_those_of_zarr(
    drawn: dict[str, Any], threads: int, choice: st.DataObject
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        wanted = write_drawn(Path(folder) / "a", drawn)
        keys = [
            choice.draw(
                st.integers(-size, size - 1)
                | st.tuples(st.integers(0, size), st.integers(0, size)).map(lambda ends: slice(*ends))
            )
            for size in wanted.shape[1:]
        ][: choice.draw(st.integers(0, wanted.ndim - 1))]
        source = ZarrSource(folder, {"data": ("a", *keys)}, threads=threads)
        chosen = wanted[(slice(None), *keys)]
        n = len(wanted)
        start = choice.draw(st.integers(0, n))
        stop = choice.draw(st.integers(start, n))
        items = np.array(choice.draw(st.lists(st.integers(0, n - 1), max_size=12)), np.int64)
        assert same(source.read(Span(start, stop))["data"], chosen[start:stop])
        assert same(source.take(items)["data"], chosen[items])
        for fill, rows in (
            (partial(source.read, Span(start, stop)), chosen[start:stop]),
            (partial(source.take, items), chosen[items]),
        ):
            check_outs(fill, rows)
        source.close()


def check_outs(fill: Callable[[Any], Any], wanted: np.ndarray) -> None:
    """Fill contiguous memory, memory with gaps, and memory in another order."""
    native = wanted.dtype.newbyteorder("=")
    roomy = np.full((2 * len(wanted) + 1, *wanted.shape[1:]), 77, native)
    for out in (np.empty(wanted.shape, native), roomy[1::2], np.empty(wanted.shape[::-1], native).T):
        assert fill({"data": out})["data"] is out
        assert same(np.ascontiguousarray(out), wanted)
    assert same(np.ascontiguousarray(roomy[::2]), np.full_like(roomy[::2], 77)), "the gaps are left alone"


@pytest.mark.parametrize("threads", [1, 2, 4])
def test_threads_change_nothing(tmp_path: Path, threads: int) -> None:
    data = encoded((203, 6), "f4")
    source = ZarrSource(write(tmp_path / "a", data, (10, 2), ("v2", "blosc lz4")), threads=threads)
    check_all(source, data)
    source.close()


# -- fill values -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fill", [0, 3.5, np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("version", ["v2", "v3"])
def test_chunks_that_were_never_written_are_the_fill_value(tmp_path: Path, version: str, fill: float) -> None:
    data = encoded((12, 4), "f4")
    data[3:6] = fill
    path = write(tmp_path / "a", data, (3, 2), (version, "zstd"), fill_value=fill)
    assert len([entry for entry in path.rglob("*") if entry.is_file()]) < 9, "the chunks of row 3 are no files"
    assert same(ZarrSource(path).read(Span(0, 12))["data"], zarr.open_array(path, mode="r")[...])


@pytest.mark.parametrize("version", ["v2", "v3"])
def test_a_boolean_is_a_valid_fill_value(tmp_path: Path, version: str) -> None:
    data = np.ones((6, 2), bool)
    data[4:] = False
    path = write(tmp_path / "a", data, (2, 2), (version, "plain"), fill_value=True)
    check_all(ZarrSource(path), data)


def test_a_store_without_fill_value_is_read_if_all_chunks_are_present(tmp_path: Path) -> None:
    data = encoded((12,), "i4")
    path = write(tmp_path / "a", data, (3,), ("v2", "zstd"), fill_value=None)
    assert '"fill_value": null' in (path / ".zarray").read_text()
    check_all(ZarrSource(path), data)


# -- shards ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("index_location", ["start", "end"])
@pytest.mark.parametrize("codec", ["plain", "blosc lz4", "zstd, then crc32c"])
def test_shards_are_read_chunk_by_chunk(tmp_path: Path, index_location: str, codec: str) -> None:
    data = encoded((21, 5), "f4")
    data[0:2], data[9:13] = 0, 0  # a chunk that is missing in a shard; a shard that is missing, and a half
    shards = {"shape": (8, 4), "index_location": index_location}
    path = write(tmp_path / "a", data, (2, 2), ("v3", codec), shards=shards)
    source = ZarrSource(path)
    assert source._arrays["data"].chunk_rows == 2
    check_all(source, data)


def test_a_shard_that_was_rewritten_is_read_again(tmp_path: Path) -> None:
    data = encoded((8, 2), "i4")
    path = write(tmp_path / "a", data, (2, 2), shards=(8, 2))
    source = ZarrSource(path)
    check_all(source, data)
    data[2:4] = 0
    zarr.open_array(path, mode="r+")[...] = data
    check_all(source, data)


# -- what every source does --------------------------------------------------------------------------------------------

SUITE: dict[str, dict[str, Any]] = {
    "v2 blosc": {"layout": ("v2", "blosc zstd bitshuffle"), "separator": "."},
    "v2 plain, big-endian": {"layout": ("v2", "plain"), "dtype": ">f4"},
    "v3 plain": {"layout": ("v3", "plain")},
    "v3 zstd in shards": {"layout": ("v3", "zstd"), "shards": (12, 4)},
    "v2 in Fortran order, by zarr-python": {"layout": ("v2", "zstd"), "order": "F"},
}


class TestZarr(ShortSuite):
    @pytest.fixture(scope="class", params=SUITE.values(), ids=SUITE)
    @classmethod
    def case(cls, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
        folder = tmp_path_factory.mktemp("suite")
        data, beside = encoded((23, 3), "f4"), encoded((23,), "i2")
        for name, offset in (("one", 0), ("other", 1)):
            write(folder / name / "a", data + offset, (6, 2), **request.param)
            write(folder / name / "beside", beside, (4,), ("v2", "gzip"))
        return Case(
            make=lambda: ZarrSource(folder / "one", threads=2),
            truth=lambda item: {"a": data[item], "beside": beside[item]},
            n_items=23,
            other=lambda: ZarrSource(folder / "other", threads=2),
        )


def test_arrays_in_place_of_the_path_are_refused(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="path must be a path or a URL"):
        ZarrSource({"x": tmp_path})  # type: ignore[arg-type]


def test_random_rows_of_compressed_chunks_are_decoded_by_all_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = np.arange(160, dtype="i4").reshape(40, 4)
    zarr.create_array(tmp_path / "a", data=data, chunks=(4, 4))
    together, decode = threading.Barrier(3, timeout=30), Codec.decode

    def decode_together(*args: Any) -> None:
        together.wait()  # fails if chunks are decoded one after the other
        decode(*args)

    monkeypatch.setattr(Codec, "decode", decode_together)
    items = np.array([39, 1, 20, 5, 0, 33, 12])  # of six chunks
    assert ZarrSource(tmp_path / "a", threads=3).take(items)["data"].tobytes() == data[items].tobytes()
