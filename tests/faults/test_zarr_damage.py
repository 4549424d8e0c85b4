"""Damaged, truncated, swapped or missing chunks raise an error that names array and chunk; other chunks are read."""

import gzip
import os
import shutil
import struct
import tempfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import google_crc32c
import numcodecs
import numpy as np
import pytest
import zarr
from hypothesis import given
from hypothesis import strategies as st
from penstock_test_parts import run_isolated
from zarr.codecs import BloscCodec, Crc32cCodec, GzipCodec, ZstdCodec

from penstock import DamageError, ReadError, Span
from penstock.source.stored.source import ZarrSource

DATA = np.arange(1, 201, dtype="i4").reshape(50, 4)
CHUNKS = (10, 4)

CODECS: dict[str, tuple[int, Any]] = {
    "v2 plain": (2, None),
    "v2 blosc lz4": (2, numcodecs.Blosc("lz4")),
    "v2 blosc zstd": (2, numcodecs.Blosc("zstd", shuffle=2)),
    "v2 zstd": (2, numcodecs.Zstd(3)),
    "v2 gzip": (2, numcodecs.GZip(1)),
    "v2 zlib": (2, numcodecs.Zlib(1)),
    "v2 lz4": (2, numcodecs.LZ4()),
    "v2 bz2": (2, numcodecs.BZ2(1)),
    "v3 plain": (3, ()),
    "v3 blosc": (3, (BloscCodec(),)),
    "v3 zstd, checked": (3, (ZstdCodec(checksum=True),)),
    "v3 gzip": (3, (GzipCodec(level=1),)),
    "v3 crc32c": (3, (Crc32cCodec(),)),
    "v3 zstd, crc32c": (3, (ZstdCodec(), Crc32cCodec())),
}
CHECKED = ("v2 gzip", "v2 zlib", "v2 bz2", "v3 zstd, checked", "v3 gzip", "v3 crc32c", "v3 zstd, crc32c")
"""Codecs that detect damage by themselves."""


def write(path: Path, codec: str = "v2 plain", data: np.ndarray = DATA, **options: Any) -> Path:
    version, compressors = CODECS[codec]
    options = {"zarr_format": version, "compressors": compressors, "chunks": CHUNKS, "fill_value": 0, **options}
    zarr.create_array(path, shape=data.shape, dtype=data.dtype, **options)[...] = data
    return path


def chunk_file(path: Path, row: int = 2) -> Path:
    return path / f"{row}.0" if (path / ".zarray").exists() else path / "c" / f"{row}" / "0"


def check_damage(path: Path, source: ZarrSource, chunk: str = r"\(2, 0\)", item: int = 20) -> DamageError:
    """Check that every read of chunk 2 fails, and that all others succeed."""
    with pytest.raises(DamageError, match=rf"item {item} in chunk {chunk} of .*{path.name}: .+") as caught:
        source.read(Span(0, 50))
    assert caught.value.item == item
    for fail in (lambda: source.read(Span(25, 26)), lambda: source.take(np.array([3, 29, 3]))):
        with pytest.raises(DamageError, match=rf"chunk {chunk} of .*{path.name}"):
            fail()
    assert source.read(Span(0, 20))["data"].tobytes() == DATA[:20].tobytes()
    assert source.read(Span(30, 50))["data"].tobytes() == DATA[30:].tobytes()
    items = np.array([49, 0, 31, 19])
    assert source.take(items)["data"].tobytes() == DATA[items].tobytes()
    return caught.value


# -- every codec -------------------------------------------------------------------------------------------------------


def of_size(codec: str, n: int) -> Callable[[Path], Any]:
    """Replace a chunk by a valid one of n numbers."""

    def change(file: Path) -> None:
        with tempfile.TemporaryDirectory() as folder:
            other = write(Path(folder) / "other", codec, np.arange(1, n + 1, dtype="i4"), chunks=(n,))
            file.write_bytes((other / "0" if (other / ".zarray").exists() else other / "c" / "0").read_bytes())

    return change


DAMAGE: dict[str, Callable[[str], Callable[[Path], Any]]] = {
    "empty": lambda _: lambda file: file.write_bytes(b""),
    "one byte": lambda _: lambda file: file.write_bytes(b"\0"),
    "cut by one": lambda _: lambda file: os.truncate(file, file.stat().st_size - 1),
    "cut in half": lambda _: lambda file: os.truncate(file, file.stat().st_size // 2),
    "zeros": lambda _: lambda file: file.write_bytes(bytes(file.stat().st_size - 1)),
    "something else": lambda _: lambda file: file.write_bytes(b"this is no chunk but some text" * 3),
    "a chunk of one number": lambda codec: of_size(codec, 1),
    "a chunk of fewer numbers": lambda codec: of_size(codec, 39),
    "a chunk of more numbers": lambda codec: of_size(codec, 41),
    "a chunk of many more numbers": lambda codec: of_size(codec, 100_000),
}


@pytest.mark.parametrize("codec", CODECS)
def test_a_damaged_chunk_is_refused_and_all_others_are_read(tmp_path: Path, codec: str) -> None:
    whole = write(tmp_path / "whole", codec)
    for number, damage in enumerate(DAMAGE.values()):
        path = tmp_path / f"array{number}"
        shutil.copytree(whole, path)
        source = ZarrSource(path, threads=2)
        # What a chunk was decoded into before must not be given in its place.
        source.read(Span(0, 50))
        damage(codec)(chunk_file(path))
        check_damage(path, source)
        source.close()


@given(
    codec=st.sampled_from(sorted(CODECS)),
    flips=st.lists(st.tuples(st.integers(0, 400), st.integers(1, 255)), min_size=1, max_size=4),
)
def test_flipped_bytes_are_noticed_if_the_codec_can_notice_them(codec: str, flips: list[tuple[int, int]]) -> None:
    """Damage that no checksum can detect gives the values of zarr-python, and never old content of a buffer."""
    with tempfile.TemporaryDirectory() as folder:
        path = write(Path(folder) / "a", codec)
        source = ZarrSource(path, threads=1)
        source.read(Span(0, 50))
        file = chunk_file(path)
        content = bytearray(file.read_bytes())
        for place, flip in flips:
            content[place % len(content)] ^= flip
        file.write_bytes(content)
        try:
            found = source.read(Span(20, 30))["data"]
        except DamageError:
            return
        if codec in CHECKED:
            assert found.tobytes() == DATA[20:30].tobytes()
        else:
            assert found.tobytes() == zarr.open_array(path, mode="r")[20:30].tobytes()


BOMBS: dict[str, tuple[str, bytes | Callable[[], bytes]]] = {
    "gzip": ("v2 gzip", lambda: gzip.compress(bytes(1 << 28), 1)),
    "zlib": ("v2 zlib", lambda: zlib.compress(bytes(1 << 28), 1)),
    "lz4": ("v2 lz4", struct.pack("<I", 1 << 30) + b"\x1f\0" * 30),
    "blosc": ("v2 blosc lz4", struct.pack("<4B3I", 2, 1, 1, 4, 1 << 30, 1 << 18, 16)),
    "zstd": ("v2 zstd", b"\x28\xb5\x2f\xfd\xe0" + struct.pack("<Q", 1 << 40) + bytes(9)),
    "zstd of unknown size": (
        "v2 zstd",
        b"\x28\xb5\x2f\xfd\x00\x88"
        + b"".join(((1 << 20) | 2 | (n == 2047)).to_bytes(3, "little") + b"x" for n in range(2048)),
    ),
    "a file of a terabyte": ("v2 zstd", b""),
}


def peak_growth(path: Path) -> int:
    """Return by how many bytes the process grew while reading a chunk."""
    source = ZarrSource(path, threads=1)
    source.read(Span(0, 20))
    status = Path("/proc/self/status")
    Path("/proc/self/clear_refs").write_text("5")
    before = int(status.read_text().split("VmHWM:")[1].split()[0])
    check_damage(path, source)
    return (int(status.read_text().split("VmHWM:")[1].split()[0]) - before) * 1024


@pytest.mark.parametrize(("codec", "content"), BOMBS.values(), ids=BOMBS)
def test_a_chunk_that_declares_a_huge_size_takes_no_memory(
    tmp_path: Path, codec: str, content: bytes | Callable[[], bytes]
) -> None:
    path = write(tmp_path / "a", codec)
    chunk_file(path).write_bytes(content if isinstance(content, bytes) else content())
    if not content:
        os.truncate(chunk_file(path), 1 << 40)
    assert run_isolated(peak_growth, path) < 30 << 20


# -- missing chunks ----------------------------------------------------------------------------------------------------


def test_a_missing_chunk_is_the_fill_value_if_the_store_has_one(tmp_path: Path) -> None:
    path = write(tmp_path / "a", "v2 zstd", fill_value=7)
    chunk_file(path).unlink()
    wanted = DATA.copy()
    wanted[20:30] = 7
    assert ZarrSource(path).read(Span(0, 50))["data"].tobytes() == wanted.tobytes()


def test_a_missing_chunk_is_damage_if_the_store_has_no_fill_value(tmp_path: Path) -> None:
    path = write(tmp_path / "a", "v2 zstd", fill_value=None)
    source = ZarrSource(path)
    chunk_file(path).unlink()
    error = check_damage(path, source)
    assert "it is missing, and the store has no fill value" in error.reason


# -- shards ------------------------------------------------------------------------------------------------------------

N_CHUNKS = 5


def sharded(path: Path, location: str = "end", codec: str = "v3 zstd, checked", **options: Any) -> Path:
    """Write shards of 5 chunks of 2 rows: 5 shards."""
    shards = {"shape": (10, 4), "index_location": location}
    return write(path, codec, chunks=(2, 4), shards=shards, **options)


def table_of(file: Path, location: str) -> tuple[int, np.ndarray]:
    size = 16 * N_CHUNKS + 4
    content = file.read_bytes()
    begin = len(content) - size if location == "end" else 0
    return begin, np.frombuffer(content[begin : begin + size - 4], "<u8").reshape(-1, 2).copy()


def put_table(file: Path, begin: int, table: np.ndarray) -> None:
    """Write a shard index with a valid checksum."""
    raw = table.astype("<u8").tobytes()
    with file.open("r+b") as opened:
        opened.seek(begin)
        opened.write(raw + google_crc32c.value(raw).to_bytes(4, "little"))


TABLES: dict[str, tuple[int, int]] = {
    "beyond the file": (10**6, 30),
    "far beyond the file": (1 << 62, 30),
    "too long": (0, 10**7),
    "far too long": (0, 1 << 62),
    "no offset": ((1 << 64) - 1, 30),
    "no length": (0, (1 << 64) - 1),
    "of nothing": (0, 0),
    "both too large together": ((1 << 63) - 1, (1 << 63) - 1),
}


@pytest.mark.parametrize("location", ["start", "end"])
@pytest.mark.parametrize("codec", ["v3 zstd, checked", "v3 plain"])
@pytest.mark.parametrize("entry", TABLES.values(), ids=TABLES)
def test_a_shard_index_entry_out_of_range_affects_that_chunk_only(
    tmp_path: Path, location: str, codec: str, entry: tuple[int, int]
) -> None:
    path = sharded(tmp_path / "a", location, codec)
    source = ZarrSource(path)
    source.read(Span(0, 50))
    begin, table = table_of(chunk_file(path), location)
    table[1] = entry
    put_table(chunk_file(path), begin, table)
    source.close()
    with pytest.raises(DamageError, match=r"item 22 in chunk \(11, 0\) of .*/a: "):
        source.read(Span(0, 50))
    assert source.read(Span(24, 50))["data"].tobytes() == DATA[24:].tobytes()
    items = np.array([0, 20, 24, 49])
    assert source.take(items)["data"].tobytes() == DATA[items].tobytes()


@pytest.mark.parametrize("location", ["start", "end"])
@pytest.mark.parametrize("place", range(0, 84, 7))
def test_a_damaged_shard_index_is_noticed_and_affects_that_shard_only(
    tmp_path: Path, location: str, place: int
) -> None:
    path = sharded(tmp_path / "a", location)
    file = chunk_file(path)
    begin, _ = table_of(file, location)
    content = bytearray(file.read_bytes())
    content[begin + place] ^= 0x10
    file.write_bytes(content)
    error = check_damage(path, ZarrSource(path), r"\(1[0-4], 0\)")
    assert "the index of the shard 0: its checksum does not match" in error.reason


@pytest.mark.parametrize("location", ["start", "end"])
@pytest.mark.parametrize("size", [0, 1, 4, 83, 84, 100])
def test_a_truncated_shard_is_noticed(tmp_path: Path, location: str, size: int) -> None:
    path = sharded(tmp_path / "a", location)
    source = ZarrSource(path)
    source.read(Span(0, 50))
    os.truncate(chunk_file(path), size)
    source.close()
    with pytest.raises(DamageError, match=r"chunk \(1[0-4], 0\) of .*/a"):
        source.read(Span(20, 30))
    assert source.read(Span(0, 20))["data"].tobytes() == DATA[:20].tobytes()


def test_a_missing_chunk_of_a_shard_is_the_fill_value(tmp_path: Path) -> None:
    path = sharded(tmp_path / "a", fill_value=9)
    begin, table = table_of(chunk_file(path), "end")
    table[1] = (1 << 64) - 1
    put_table(chunk_file(path), begin, table)
    chunk_file(path, 4).unlink()
    wanted = DATA.copy()
    wanted[22:24], wanted[40:] = 9, 9
    assert ZarrSource(path).read(Span(0, 50))["data"].tobytes() == wanted.tobytes()


# -- while it is open --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", ["v2 zstd", "v3 gzip", "v3 plain"])
@pytest.mark.parametrize("rows", [0, 19, 49, 51, 500])
def test_an_array_that_is_resized_while_it_is_open_is_a_read_error(tmp_path: Path, version: str, rows: int) -> None:
    path = write(tmp_path / "a", version)
    source = ZarrSource(path)
    zarr.open_array(path, mode="r+").resize((rows, 4))
    message = rf"The array .*/a has changed since it was opened: \(50, 4\) .* then, \({rows}, 4\)"
    for fail in (lambda: source.read(Span(0, 5)), lambda: source.take(np.array([49]))):
        with pytest.raises(ReadError, match=message):
            fail()
    zarr.open_array(path, mode="r+").resize((50, 4))
    assert source.read(Span(0, min(10, rows)))["data"].tobytes() == DATA[: min(10, rows)].tobytes()


REWRITES: dict[str, dict[str, Any]] = {
    "chunks": {"chunks": (5, 4)},
    "codec": {"compressors": numcodecs.Zstd(1)},
    "separator": {"chunk_key_encoding": {"name": "v2", "separator": "/"}},
    "fill value": {"fill_value": 3},
    "version": {"zarr_format": 3, "compressors": ()},
    "order": {"order": "F"},
}


@pytest.mark.parametrize("options", REWRITES.values(), ids=REWRITES)
def test_an_array_that_is_rewritten_with_other_metadata_is_a_read_error(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    source = ZarrSource(write(tmp_path / "a", fill_value=0))
    shutil.rmtree(tmp_path / "a")
    write(tmp_path / "a", **options)
    with pytest.raises(ReadError, match=r"The array .*/a (has changed|is gone)"):
        source.read(Span(0, 50))


def test_an_array_that_is_rewritten_with_the_same_metadata_is_read(tmp_path: Path) -> None:
    source = ZarrSource(write(tmp_path / "a", "v3 gzip", DATA.astype("f4"), fill_value=np.nan))
    shutil.rmtree(tmp_path / "a")
    write(tmp_path / "a", "v3 gzip", DATA.astype("f4") + 1, fill_value=np.nan)
    assert source.read(Span(0, 50))["data"].tobytes() == (DATA.astype("f4") + 1).tobytes()


@pytest.mark.parametrize("codec", ["v2 zstd", "v3 gzip"])
def test_an_array_that_is_deleted_while_it_is_open_is_gone(tmp_path: Path, codec: str) -> None:
    path = write(tmp_path / "a", codec)
    source = ZarrSource(path)
    shutil.rmtree(path)
    for fail in (lambda: source.read(Span(0, 5)), lambda: source.take(np.array([49]))):
        with pytest.raises(ReadError, match=r"The array .*/a is gone"):
            fail()


def test_a_shard_that_is_replaced_by_one_of_the_same_size_and_time_is_read_by_its_own_index(tmp_path: Path) -> None:
    for name, rows, values in (("a", slice(0, 2), [5, 6]), ("b", slice(2, 4), [7, 8])):
        options: dict[str, Any] = {"chunks": (2,), "shards": (4,), "compressors": None, "fill_value": 0}
        zarr.create_array(tmp_path / name, shape=(4,), dtype="i4", **options)[rows] = values
    shard, other = tmp_path / "a/c/0", tmp_path / "b/c/0"
    os.utime(shard, ns=(0, 10**18))
    source = ZarrSource(tmp_path / "a")
    assert source.read(Span(0, 4))["data"].tolist() == [5, 6, 0, 0]
    assert other.stat().st_size == shard.stat().st_size
    os.utime(other, ns=(0, 10**18))
    other.replace(shard)
    assert source.read(Span(0, 4))["data"].tolist() == [0, 0, 7, 8]
