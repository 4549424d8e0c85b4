"""Checksums of chunks, written by `penstock index`: compared on the first read, and by `penstock verify`."""

import json
import os
import pickle
import shutil
from pathlib import Path
from typing import Any

import numcodecs
import numpy as np
import pytest
import xxhash
import zarr
from hypothesis import given
from hypothesis import strategies as st

from penstock import DamageError, PenstockError, SourceError, Span
from penstock.source.stored.source import ZarrSource
from penstock.source.stored.zarr import checksums
from penstock.source.stored.zarr.checksums import SIDECAR, Checksums
from penstock.source.stored.zarr.index_chunks import index_store, verify_store

DATA = np.arange(1, 201, dtype="<i4").reshape(50, 4)
KINDS: dict[str, dict[str, Any]] = {
    "v2 plain": {"zarr_format": 2, "compressors": None},
    "v3 plain": {"compressors": None},
    "v3 compressed": {},
    "shards": {"chunks": (5, 4), "shards": (10, 4), "compressors": None},
    "read by zarr-python": {"zarr_format": 2, "compressors": None, "order": "F"},
}
kinds = pytest.mark.parametrize("kind", KINDS)


def write(path: Path, kind: str, rows: int = 50) -> Path:
    zarr.create_array(path, shape=DATA.shape, **{"chunks": (10, 4), "dtype": "<i4", **KINDS[kind]})[:rows] = DATA[:rows]
    return path


def chunk_file(path: Path, row: int = 2) -> Path:
    return path / f"{row}.0" if (path / ".zarray").exists() else path / "c" / f"{row}" / "0"


def flip(file: Path, place: int = 9) -> None:
    """Change one bit, and neither size nor date."""
    before = file.stat()
    content = bytearray(file.read_bytes())
    content[place % len(content)] ^= 4
    file.write_bytes(content)
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))


@kinds
def test_every_flipped_bit_of_a_chunk_is_found_on_the_first_read_and_by_verify(tmp_path: Path, kind: str) -> None:
    path = write(tmp_path / "a", kind)
    arrays, problems = index_store(path, workers=2)
    n_chunks = 10 if kind == "shards" else 5
    assert ([(array.name, array.n_chunks) for array in arrays], problems) == ([(".", n_chunks)], [])
    assert verify_store(path)[1] == []
    assert ZarrSource(path).read(Span(0, 50))["data"].tobytes() == DATA.tobytes()
    stored = chunk_file(path).read_bytes()
    for place in range(0, len(stored), 13):
        flip(chunk_file(path), place)
        source = ZarrSource(path)
        with pytest.raises(DamageError, match=r"item 2\d in chunk \([2-5], 0\) of .*/a: ") as caught:
            source.read(Span(0, 50))
        if "shard" not in caught.value.reason:  # its own index has a checksum, too
            assert f"do not match its checksum in {path / SIDECAR}. Restore it from a copy" in caught.value.reason
        assert source.read(Span(30, 50))["data"].tobytes() == DATA[30:].tobytes()
        found = verify_store(path)[1]
        assert found
        assert all(problem.item in (20, 25) for problem in found)
        flip(chunk_file(path), place)
    assert verify_store(path)[1] == []


@kinds
def test_a_chunk_is_verified_once_in_a_process_and_again_if_its_file_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr(checksums, "SETTLED_NS", -1)  # as if all files were written long before
    path = write(tmp_path / "a", kind)
    index_store(path)
    source = ZarrSource(path)
    sums = source._arrays["data"].record.checksums  # type: ignore[attr-defined]
    counted: list[int] = []
    verify = sums.verify
    sums.verify = lambda number, *rest: (counted.append(number), verify(number, *rest))
    for _ in range(2):
        assert source.read(Span(23, 41))["data"].tobytes() == DATA[23:41].tobytes()
    assert sorted(counted) == ([4, 5, 6, 7, 8] if kind == "shards" else [2, 3, 4])
    os.utime(chunk_file(path), ns=(0, 10**18))
    source.read(Span(23, 24))
    assert len(counted) == (6 if kind == "shards" else 4)
    del sums.verify
    assert not pickle.loads(pickle.dumps(sums)).is_verified(3, 1)


@kinds
def test_a_chunk_that_was_just_written_to_is_verified_at_each_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr(checksums, "SETTLED_NS", 10**18)
    path = write(tmp_path / "a", kind)
    index_store(path)
    source = ZarrSource(path)
    assert source.read(Span(20, 30))["data"].tobytes() == DATA[20:30].tobytes()
    flip(chunk_file(path))
    with pytest.raises(DamageError, match="do not match its checksum"):
        source.read(Span(20, 30))


@kinds
def test_a_chunk_whose_date_was_set_back_is_verified_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr(checksums, "SETTLED_NS", -1)
    path = write(tmp_path / "a", kind)
    index_store(path)
    victim, source = chunk_file(path), ZarrSource(path)
    before = victim.stat()
    assert source.read(Span(20, 30))["data"].tobytes() == DATA[20:30].tobytes()
    while victim.stat().st_ctime_ns == before.st_ctime_ns:  # until the clock of the file system has ticked
        flip(victim)
        flip(victim)
    flip(victim)
    with pytest.raises(DamageError, match="do not match its checksum"):
        source.read(Span(20, 30))


@kinds
def test_a_chunk_that_was_rewritten_says_what_to_do(tmp_path: Path, kind: str) -> None:
    path = write(tmp_path / "a", kind, rows=20)
    index_store(path)
    later = (path / SIDECAR).stat().st_mtime_ns + 10**9
    array = zarr.open_array(path, mode="r+")
    array[10:20] = DATA[10:20] + 1
    array[30:40] = DATA[30:40]
    for row in (1, 3):
        os.utime(chunk_file(path, row), ns=(later, later))
    source = ZarrSource(path)
    assert source.read(Span(0, 10))["data"].tobytes() == DATA[:10].tobytes()
    with pytest.raises(DamageError, match=r"changed after `penstock index`. .* run `penstock index` again"):
        source.read(Span(10, 20))
    with pytest.raises(DamageError, match=r"no checksum in .*: it was written after `penstock index`"):
        source.read(Span(30, 40))
    assert len(verify_store(path)[1]) == (4 if kind == "shards" else 2)
    arrays, _ = index_store(path)
    assert arrays[0].n_changed == (4 if kind == "shards" else 2)
    assert ZarrSource(path).read(Span(30, 40))["data"].tobytes() == DATA[30:40].tobytes()
    array.resize((60, 4))
    with pytest.raises(SourceError, match=r"must have the checksums of an array of shape \(60, 4\).*was changed after"):
        ZarrSource(path)


@kinds
def test_a_chunk_that_has_a_checksum_must_be_there(tmp_path: Path, kind: str) -> None:
    path = write(tmp_path / "a", kind, rows=40)
    index_store(path)
    chunk_file(path).unlink()
    source = ZarrSource(path)
    assert not source.read(Span(40, 50))["data"].any(), "sparse when it was indexed"
    with pytest.raises(DamageError, match=rf"is missing, but .*{SIDECAR} has its checksum"):
        source.read(Span(20, 30))
    assert not ZarrSource(path, missing_chunks="fill").read(Span(20, 30))["data"].any()
    problems = verify_store(path)[1]
    assert [problem.item for problem in problems] == ([20, 25] if kind == "shards" else [20])
    assert "it is missing. Restore it" in problems[0].reason


def test_damaged_chunks_are_not_indexed(tmp_path: Path) -> None:
    group = zarr.create_group(tmp_path / "g")
    group.create_array("good", data=DATA, chunks=(10, 4))
    group.create_array("inner/bad", data=DATA, chunks=(10, 4))
    os.truncate(tmp_path / "g" / "inner" / "bad" / "c" / "1" / "0", 5)
    arrays, problems = index_store(tmp_path / "g")
    assert [array.name for array in arrays] == ["good", "inner/bad"]
    assert [(problem.shard, problem.item) for problem in problems] == [("chunk (1, 0) of inner/bad", 10)]
    assert not list(tmp_path.rglob(SIDECAR))
    shutil.rmtree(tmp_path / "g" / "inner" / "bad" / "c" / "1")
    assert index_store(tmp_path / "g")[1] == []
    (tmp_path / "g" / "good" / SIDECAR).unlink()
    assert [str(problem) for problem in verify_store(tmp_path / "g")[1]] == [
        "good: it has no checksums; run `penstock index`"
    ]
    with pytest.raises(SourceError, match=r"has no checksums\. Make them: penstock index"):
        verify_store(tmp_path / "g" / "good")
    with pytest.raises(SourceError, match="No zarr arrays in"):
        index_store(tmp_path / "g" / "good" / "c")


def test_a_store_with_checksums_is_one_that_zarr_reads(tmp_path: Path) -> None:
    numcodecs.blosc.use_threads = False
    group = zarr.create_group(tmp_path / "g")
    group.create_array("x", data=DATA, chunks=(10, 4))
    index_store(tmp_path / "g")
    shutil.copytree(tmp_path / "g", tmp_path / "copy")
    again = zarr.open_group(tmp_path / "copy", mode="r")
    assert [name for name, _ in again.arrays()] == ["x"]
    assert np.array_equal(again["x"][:], DATA)
    assert verify_store(tmp_path / "copy")[1] == []


# -- hostile files -----------------------------------------------------------------------------------------------------


def forged(header: dict[str, Any], numbers: list[int], sums: list[int]) -> bytes:
    """Return a file with a valid checksum of itself."""
    text = json.dumps(header).encode()
    body = np.array(numbers, "<i8").tobytes() + np.array(sums, "<u8").tobytes()
    content = b"PSTKZSUM" + len(text).to_bytes(8, "little") + text + body
    return content + xxhash.xxh3_64_intdigest(content).to_bytes(8, "little")


RIGHT = {"version": 1, "shape": [50, 4], "chunks": [10, 4], "n_chunks": 2}
FORGED: dict[str, bytes] = {
    "nothing": b"",
    "something else": b"this is something else, and long enough",
    "a huge header": b"PSTKZSUM" + b"\xff" * 8 + b"{}",
    "no JSON": forged(RIGHT, [0, 1], [0, 0]).replace(b'{"ver', b'["ver'),
    "nested JSON": b"PSTKZSUM" + (60_000).to_bytes(8, "little") + b"[" * 60_000,
    "another version": forged({**RIGHT, "version": 2}, [0, 1], [0, 0]),
    "no shape": forged({"version": 1, "n_chunks": 0}, [], []),
    "countless chunks": forged({**RIGHT, "n_chunks": 1 << 60}, [0, 1], [0, 0]),
    "negative chunks": forged({**RIGHT, "n_chunks": -1}, [], []),
    "chunks that are no number": forged({**RIGHT, "n_chunks": True}, [0], [0]),
    "another array": forged({**RIGHT, "shape": [51, 4]}, [0, 1], [0, 0]),
    "numbers out of order": forged(RIGHT, [1, 0], [0, 0]),
    "a number twice": forged(RIGHT, [1, 1], [0, 0]),
    "a negative number": forged(RIGHT, [-1, 1], [0, 0]),
    "a number beyond the array": forged(RIGHT, [0, 5], [0, 0]),
    "one byte more": forged(RIGHT, [0, 1], [0, 0]) + b"\0",
    "cut": forged(RIGHT, [0, 1], [0, 0])[:-1],
}


@pytest.mark.parametrize("content", FORGED.values(), ids=FORGED)
def test_a_file_that_is_no_valid_index_is_refused_and_named(tmp_path: Path, content: bytes) -> None:
    path = write(tmp_path / "a", "v3 plain")
    (path / SIDECAR).write_bytes(content)
    with pytest.raises((DamageError, SourceError), match=rf"{SIDECAR}.*Run `penstock index` again") as caught:
        ZarrSource(path)
    assert len(str(caught.value)) < 1000
    assert len(verify_store(path)[1]) == 1
    index_store(path)
    assert ZarrSource(path).read(Span(0, 50))["data"].tobytes() == DATA.tobytes()


@given(place=st.integers(0, 200), bits=st.integers(1, 255))
def test_any_changed_byte_of_the_file_is_noticed(
    place: int, bits: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("sums") / "sums"
    Checksums(path, ((50, 4), (10, 4)), np.array([0, 3]), np.array([5, 2**64 - 1], np.uint64)).write()
    content = bytearray(path.read_bytes())
    content[place % len(content)] ^= bits
    path.write_bytes(content)
    with pytest.raises(PenstockError, match="sums"):
        Checksums.read(path, (50, 4), (10, 4))
