"""Zarr stores of both versions, read along any axis: which values, each chunk once, and what is broken."""

import itertools
import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
import zarr.storage

from penstock.convert.inputs.zarr import ZarrInput, _CheckedArray
from penstock.core.errors import MissingDependency, OptionError, ReadError, SourceError

pytestmark = pytest.mark.filterwarnings("ignore::zarr.errors.ZarrUserWarning", "ignore:.*specification:FutureWarning")

KINDS: dict[str, dict[str, Any]] = {
    "v2": {"zarr_format": 2},
    "v2 plain": {"zarr_format": 2, "compressors": None},
    "v3": {"zarr_format": 3},
    "v3 plain": {"zarr_format": 3, "compressors": None},
    "v3 blosc": {"zarr_format": 3, "compressors": zarr.codecs.BloscCodec(cname="lz4")},
    "v3 gzip": {"zarr_format": 3, "compressors": zarr.codecs.GzipCodec()},
}


def store_array(path: Any, array: Any, chunks: tuple[int, ...], **options: Any) -> Any:
    made = zarr.create_array(path, shape=array.shape, dtype=array.dtype, chunks=chunks, **options)
    made[...] = array
    return path


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def chunk_files(folder: Path) -> list[Path]:
    return [
        path
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name[0] != "." and ".json" not in path.name
    ]


# -- which values ------------------------------------------------------------------------------------------------------


SHARDED = {f"{kind} sharded": options | {"shards": (14, 10, 12)} for kind, options in KINDS.items() if "v3" in kind}


@pytest.mark.parametrize("kind", [*KINDS, *SHARDED])
@pytest.mark.parametrize("axis", [0, 1, 2])
def test_windows_along_any_axis_are_those_of_the_array(tmp_path, numbered, all_samples, kind, axis):
    array = numbered((30, 24, 26), np.int32)
    path = store_array(tmp_path / "a.zarr", array, (7, 5, 6), **(KINDS | SHARDED)[kind])
    before = files_of(path)
    found = all_samples(ZarrInput(path, axis=axis, sequence_length=8, overlap=0.5))
    assert files_of(path) == before
    turned = np.moveaxis(array, axis, 0)
    starts = range(0, turned.shape[0] - 7, 4)
    assert len(found) == len(starts)
    for start, (fields, metadata) in zip(starts, found, strict=True):
        np.testing.assert_array_equal(fields["data"], turned[start : start + 8])
        assert fields["data"].flags.c_contiguous
        assert metadata == {"file": "a.zarr", "start_row": start, "stop_row": start + 8}


@pytest.mark.parametrize("version", [2, 3])
@pytest.mark.parametrize("dtype", [">f4", "<i8", ">u2", "bool", "complex64", "f2"])
def test_rows_keep_their_dtype_in_the_order_of_the_machine(tmp_path, numbered, all_samples, version, dtype):
    array = numbered((11, 4), dtype)
    found = all_samples(ZarrInput(store_array(tmp_path / "a", array, (3, 4), zarr_format=version)))
    assert {fields["data"].dtype for fields, _ in found} == {np.dtype(dtype).newbyteorder("=")}
    for row, (fields, metadata) in enumerate(found):
        np.testing.assert_array_equal(fields["data"], array[row])
        assert metadata == {"file": "a", "row": row}


@pytest.mark.parametrize("version", [2, 3])
def test_arrays_of_a_group_are_fields_of_the_same_rows(tmp_path, numbered, all_samples, version):
    root = zarr.create_group(tmp_path / "g", zarr_format=version)
    lfp, label = numbered((4, 40), np.float32), numbered((2, 40), np.int16) + 500
    root.create_array("lfp", data=lfp, chunks=(4, 9))
    root.create_array("label", data=label, chunks=(1, 40))
    root.create_group("inner").create_array("x", data=numbered((5,)))
    given = ZarrInput(tmp_path / "g", axis=1, sequence_length=10)
    for start, (fields, _) in zip(range(0, 40, 10), all_samples(given), strict=True):
        assert list(fields) == ["label", "lfp"]
        np.testing.assert_array_equal(fields["lfp"], lfp[:, start : start + 10].T)
        np.testing.assert_array_equal(fields["label"], label[:, start : start + 10].T)
    recording = given.open()
    assert recording.about["zarr_format"] == version
    assert recording.about["fields"]["lfp"] == {"shape": [40, 4], "dtype": "float32"}
    assert any("group 'inner' is left out" in note for note in recording.notes)
    recording.close()
    (inner, *_) = all_samples(ZarrInput(tmp_path / "g" / "inner"))
    assert list(inner[0]) == ["x"]


def test_consolidated_stores_and_zip_files_are_read(tmp_path, numbered, all_samples):
    root = zarr.create_group(tmp_path / "g", zarr_format=2)
    root.create_array("x", data=numbered((10, 2)), chunks=(4, 2))
    zarr.consolidate_metadata(tmp_path / "g")
    assert len(all_samples(ZarrInput(tmp_path / "g"))) == 10
    with zarr.storage.ZipStore(tmp_path / "a.zip", mode="w") as store:
        store_array(store, numbered((10, 2)), (4, 2))
    found = all_samples(ZarrInput(tmp_path / "a.zip"))
    np.testing.assert_array_equal(np.stack([fields["data"] for fields, _ in found]), numbered((10, 2)))


@pytest.mark.parametrize("axis", [0, 1])
def test_each_chunk_is_decoded_once_in_sequential_order(tmp_path, numbered, monkeypatch, axis):
    array = numbered((24, 300_000), np.float32)  # chunks of 4.8 MB
    turned, chunks = (array, (4, 300_000)) if axis == 0 else (array.T, (300_000, 4))
    path = store_array(tmp_path / "a", turned, chunks, compressors=None)
    recording = ZarrInput(path, axis=axis, sequence_length=6, overlap=0.5).open()
    asked = []
    plain = _CheckedArray.__getitem__
    monkeypatch.setattr(_CheckedArray, "__getitem__", lambda self, key: asked.append(key[axis]) or plain(self, key))
    for number, (fields, _) in enumerate(recording.samples(np.arange(recording.n_samples))):
        np.testing.assert_array_equal(fields["data"], array[3 * number : 3 * number + 6])
    recording.close()
    assert [(rows.start, rows.stop) for rows in asked] == list(itertools.pairwise(range(0, 25, 4)))


# -- what is broken ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_a_truncated_chunk_names_store_array_and_rows(tmp_path, numbered, kind):
    array = np.random.default_rng(0).normal(size=(32, 40_000))  # 1.28 MB per chunk, three to a block
    store_array(tmp_path / "a.zarr", array, (4, 40_000), **KINDS[kind])
    victim = chunk_files(tmp_path / "a.zarr")[4]
    os.truncate(victim, victim.stat().st_size // 2)
    recording = ZarrInput(tmp_path / "a.zarr", sequence_length=4).open()
    for number in (0, 1, 2):
        ((fields, _),) = recording.samples(np.array([number]))
        np.testing.assert_array_equal(fields["data"], array[4 * number : 4 * number + 4])
    with pytest.raises(ReadError, match=r"rows 12–23 of the array 'data' of .*a\.zarr: "):
        list(recording.samples(np.array([4])))
    recording.close()


@pytest.mark.parametrize("kind", KINDS)
def test_a_chunk_that_is_lost_after_opening_is_an_error(tmp_path, numbered, kind):
    store_array(tmp_path / "a.zarr", numbered((32, 3)), (4, 3), **KINDS[kind])
    recording = ZarrInput(tmp_path / "a.zarr").open()
    chunk_files(tmp_path / "a.zarr")[4].unlink()
    with pytest.raises(ReadError, match=r"rows 0–31 of the array 'data' of .*a\.zarr: .*chunk.*missing"):
        list(recording.samples(np.array([17])))
    recording.close()


def test_a_truncated_shard_names_store_array_and_rows(tmp_path, numbered):
    store_array(tmp_path / "a.zarr", numbered((32, 3)), (4, 3), shards=(16, 3))
    for victim in chunk_files(tmp_path / "a.zarr"):
        os.truncate(victim, victim.stat().st_size - 5)
    recording = ZarrInput(tmp_path / "a.zarr").open()
    with pytest.raises(ReadError, match=r"rows 0–31 of the array 'data' of .*a\.zarr: "):
        list(recording.samples(np.array([4])))
    recording.close()


def test_missing_chunks_are_noted(tmp_path, numbered):
    array = zarr.create_array(tmp_path / "a", shape=(40, 2), chunks=(4, 2), dtype="f4", fill_value=-7)
    array[:20] = numbered((20, 2))
    recording = ZarrInput(tmp_path / "a").open()
    assert recording.notes == [
        "5 of 10 chunks of the array 'data' are not stored; missing chunks read as the fill value, -7.0."
    ]
    ((fields, _),) = recording.samples(np.array([39]))
    assert fields["data"].tolist() == [-7, -7]
    recording.close()


def test_a_path_that_is_not_a_store_is_refused(tmp_path, numbered):
    with pytest.raises(ReadError, match="no such file or folder"):
        ZarrInput(tmp_path / "none").open()
    with pytest.raises(SourceError, match=r"Could not open .* as a zarr store"):
        ZarrInput(tmp_path).open()
    assert not list(tmp_path.iterdir())
    np.save(tmp_path / "a.npy", numbered((3,)))
    with pytest.raises(SourceError, match=r"Could not open .* as a zarr store"):
        ZarrInput(tmp_path / "a.npy").open()


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"zarr_format": 3, "node_type": "array"}'])
def test_malformed_metadata_is_refused(tmp_path, text):
    (tmp_path / "zarr.json").write_text(text)
    with pytest.raises(SourceError, match=r"as a zarr store|has no arrays"):
        ZarrInput(tmp_path).open()


def test_an_unknown_codec_is_refused(tmp_path, numbered):
    store_array(tmp_path / "a", numbered((4,)), (2,))
    document = json.loads((tmp_path / "a" / "zarr.json").read_text())
    document["codecs"] = [{"name": "bytes", "configuration": {"endian": "little"}}, {"name": "nonesuch"}]
    (tmp_path / "a" / "zarr.json").write_text(json.dumps(document))
    with pytest.raises(SourceError, match=r"Could not open .* as a zarr store.*nonesuch"):
        ZarrInput(tmp_path / "a").open()


@pytest.mark.parametrize(("version", "name"), [(2, ".zarray"), (3, "zarr.json")])
def test_an_array_of_a_group_without_metadata_is_noted_or_refused(tmp_path, numbered, version, name):
    root = zarr.create_group(tmp_path / "g", zarr_format=version)
    for array in "ab":
        root.create_array(array, data=numbered((4,)))
    metadata = tmp_path / "g" / "b" / name
    os.truncate(metadata, 30)
    with pytest.raises(SourceError, match="Could not list the arrays"):
        ZarrInput(tmp_path / "g").open()
    metadata.unlink()
    (tmp_path / "g" / "b" / ".zattrs").unlink(missing_ok=True)
    recording = ZarrInput(tmp_path / "g").open()
    assert list(recording.about["fields"]) == ["a"]
    assert [note for note in recording.notes if "Object at b is not recognized" in note]
    recording.close()


def test_arrays_that_do_not_fit_are_listed_with_their_shapes(tmp_path, numbered):
    root = zarr.create_group(tmp_path / "g")
    for name, shape in (("a", (10, 4)), ("b", (12, 4)), ("c", (4,)), ("d", ())):
        root.create_array(name, data=numbered(shape) if shape else np.array(1.0))
    with pytest.raises(SourceError, match=r"a \(10, 4\), b \(12, 4\), c \(4,\), d \(\)\. Name the .* fields=\('a',\)"):
        ZarrInput(tmp_path / "g").open()
    with pytest.raises(SourceError, match=r"along axis 1, .* differ: a \(10, 4\), c \(4,\)\."):
        ZarrInput(tmp_path / "g", ("a", "c"), axis=1).open()
    recording = ZarrInput(tmp_path / "g", ("b", "a"), axis=1).open()
    assert recording.n_samples == 4
    assert list(recording.about["fields"]) == ["b", "a"]
    assert [note for note in recording.notes if "'c'" in note]
    recording.close()
    with pytest.raises(SourceError, match=r"has no z. Its arrays are: a, b, c, d"):
        ZarrInput(tmp_path / "g", ("a", "z")).open()


def test_arrays_without_rows_are_refused(tmp_path, numbered):
    zarr.create_array(tmp_path / "empty", shape=(0, 3), dtype="f4")
    with pytest.raises(SourceError, match="empty"):
        ZarrInput(tmp_path / "empty").open()
    zarr.create_array(tmp_path / "single", shape=(), dtype="f4")
    with pytest.raises(SourceError, match="axis 0"):
        ZarrInput(tmp_path / "single").open()
    zarr.create_group(tmp_path / "group").create_group("inner")
    with pytest.raises(SourceError, match=r"has no arrays\. Its groups are: inner"):
        ZarrInput(tmp_path / "group").open()
    with pytest.raises(SourceError, match=r"fields must be left out .* got \('x',\)"):
        ZarrInput(store_array(tmp_path / "a", numbered((4,)), (2,)), ("x",)).open()
    with pytest.raises(SourceError, match=r"sequence_length must be at most 4, .* got 5"):
        ZarrInput(tmp_path / "a", sequence_length=5).open()


def test_strings_of_any_length_are_refused(tmp_path):
    array = zarr.create_array(tmp_path / "a", shape=(3,), dtype=str)
    array[:] = np.array(["a", "bcd", ""])
    with pytest.raises(SourceError, match="values of fixed size, but"):
        ZarrInput(tmp_path / "a").open()


@pytest.mark.parametrize("options", [{"axis": -1}, {"axis": 0.5}, {"fields": "lfp"}, {"sequence_length": 0}])
def test_invalid_options_are_refused_at_once(options):
    with pytest.raises(OptionError, match=f"^{next(iter(options))} must be "):
        ZarrInput(Path("a.zarr"), **options)


def test_without_zarr_the_error_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "zarr", None)
    with pytest.raises(MissingDependency, match=r"pip install 'penstock\[zarr\]'"):
        ZarrInput(tmp_path).open()
