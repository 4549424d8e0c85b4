"""Archives of arrays (.npz): their fields; hostile, damaged and too large archives are refused."""

import io
import tracemalloc
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.convert.inputs.arrays import NpzInput
from penstock.core.errors import OptionError, SourceError, WriteError


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
@pytest.mark.parametrize("length", [None, 8])
def test_arrays_of_an_archive_are_fields_of_the_same_rows(tmp_path, numbered, all_samples, save, length):
    left, right = numbered((50, 3), np.float32), np.asfortranarray(numbered((50, 2, 2), np.int32) + 1000)
    save(tmp_path / "a.npz", left=left, right=right, label=numbered((50,), np.uint8))
    found = all_samples(NpzInput(tmp_path / "a.npz", None, length, 0.5 if length else 0.0))
    starts = range(50) if length is None else range(0, 43, 4)
    assert len(found) == len(starts)
    for start, (fields, metadata) in zip(starts, found, strict=True):
        place: Any = start if length is None else slice(start, start + length)
        assert list(fields) == ["left", "right", "label"]
        np.testing.assert_array_equal(fields["left"], left[place])
        np.testing.assert_array_equal(fields["right"], right[place])
        np.testing.assert_array_equal(fields["label"], np.arange(50)[place])
        expected = {"row": start} if length is None else {"start_row": start, "stop_row": start + length}
        assert metadata == {"file": "a.npz", **expected}


def test_fields_that_are_named_are_the_ones_converted(tmp_path, numbered, all_samples):
    np.savez(tmp_path / "a.npz", x=numbered((5, 2)), rate=np.array(30_000.0), y=numbered((5,)))
    with pytest.raises(SourceError, match=r"x \(5, 2\), rate \(\), y \(5,\)\. Name those|rate\.npy .* single value"):
        NpzInput(tmp_path / "a.npz").open()
    assert [list(fields) for fields, _ in all_samples(NpzInput(tmp_path / "a.npz", ("y", "x")))] == [["y", "x"]] * 5
    recording = NpzInput(tmp_path / "a.npz", ("y", "x")).open()
    assert recording.notes == ["The array 'rate' is left out: it is not among the fields."]
    recording.close()
    with pytest.raises(SourceError, match=r"has no z. Its arrays are: x, rate, y"):
        NpzInput(tmp_path / "a.npz", ("x", "z")).open()


def test_arrays_of_different_lengths_are_listed(tmp_path, numbered):
    np.savez(tmp_path / "a.npz", x=numbered((5, 2)), y=numbered((6,)))
    with pytest.raises(SourceError, match=r"same length .* x \(5, 2\), y \(6,\)\. Name the .* fields=\('x',\)"):
        NpzInput(tmp_path / "a.npz").open()


@pytest.mark.parametrize("fields", ["x", (), ("x", "x"), ("a/b",), ("metadata",), (3,)])
def test_names_that_cannot_be_fields_are_refused_at_once(fields):
    with pytest.raises(OptionError):
        NpzInput(Path("a.npz"), fields)


def npy_bytes(array: Any) -> bytes:
    out = io.BytesIO()
    np.save(out, array)
    return out.getvalue()


@pytest.mark.parametrize(
    "name", ["a/b.npy", "../b.npy", "/b.npy", "a\\b.npy", "..npy", "metadata.npy", ".npy", "../b.txt"]
)
def test_hostile_names_are_refused(tmp_path, name):
    with zipfile.ZipFile(tmp_path / "a.npz", "w") as archive:
        archive.writestr("x.npy", npy_bytes(np.arange(3)))
        archive.writestr(name, npy_bytes(np.arange(3)))
    with pytest.raises(SourceError):
        NpzInput(tmp_path / "a.npz").open()


def test_a_member_that_is_not_an_array_is_left_out_with_a_note(tmp_path):
    with zipfile.ZipFile(tmp_path / "a.npz", "w") as archive:
        archive.writestr("readme.txt", "hello")
        archive.writestr("x.npy", npy_bytes(np.arange(3)))
    recording = NpzInput(tmp_path / "a.npz").open()
    assert list(recording.about["fields"]) == ["x"]
    assert recording.notes == ["The member 'readme.txt' is left out: it is not an array."]
    recording.close()


def test_an_archive_without_arrays_or_with_duplicates_is_refused(tmp_path):
    with zipfile.ZipFile(tmp_path / "a.npz", "w"):
        pass
    with pytest.raises(SourceError, match="has no arrays"):
        NpzInput(tmp_path / "a.npz").open()
    with zipfile.ZipFile(tmp_path / "b.npz", "w") as archive:
        archive.writestr("x.npy", npy_bytes(np.arange(3)))
        with pytest.warns(UserWarning, match="Duplicate"):
            archive.writestr("x.npy", npy_bytes(np.arange(3)))
    with pytest.raises(SourceError, match=r"has 'x\.npy' twice"):
        NpzInput(tmp_path / "b.npz").open()


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_an_archive_cut_anywhere_is_refused(tmp_path, numbered, save):
    save(tmp_path / "a.npz", x=numbered((300, 7)), y=numbered((300,)))
    whole = (tmp_path / "a.npz").read_bytes()
    for cut in [0, 1, 30, *range(100, len(whole), len(whole) // 20), len(whole) - 1]:
        (tmp_path / "b.npz").write_bytes(whole[:cut])
        with pytest.raises(SourceError, match=r"b\.npz"):
            NpzInput(tmp_path / "b.npz").open()


def test_a_damaged_byte_in_a_compressed_member_is_found(tmp_path):
    array = np.random.default_rng(0).integers(0, 100, (2000, 3))
    np.savez_compressed(tmp_path / "a.npz", x=array)
    whole = bytearray((tmp_path / "a.npz").read_bytes())
    end_of_data = whole.index(b"PK\x01\x02")
    refused = 0
    for at in range(60, end_of_data - 20, end_of_data // 25):
        damaged = whole.copy()
        damaged[at] ^= 0x10
        (tmp_path / "b.npz").write_bytes(damaged)
        try:
            recording = NpzInput(tmp_path / "b.npz").open()
        except SourceError:
            refused += 1
            continue
        # Bits that say nothing, such as padding of the header, may differ.
        found = np.stack([fields["x"] for fields, _ in recording.samples(np.arange(2000))])
        recording.close()
        np.testing.assert_array_equal(found, array)
    assert refused >= 20


def test_a_local_header_of_something_else_is_refused(tmp_path, numbered):
    np.savez(tmp_path / "a.npz", x=numbered((30, 7)))
    whole = bytearray((tmp_path / "a.npz").read_bytes())
    for at in (0, 8, 30):  # signature, method, name
        damaged = whole.copy()
        damaged[at] ^= 0x08
        (tmp_path / "b.npz").write_bytes(damaged)
        with pytest.raises(SourceError, match="damaged"):
            NpzInput(tmp_path / "b.npz").open()


def test_a_directory_that_contradicts_itself_is_refused(tmp_path, numbered):
    np.savez(tmp_path / "a.npz", x=numbered((30, 7)))
    whole = bytearray((tmp_path / "a.npz").read_bytes())
    at = whole.index(b"PK\x01\x02") + 20  # the size of the member in the archive
    whole[at] ^= 0x01
    (tmp_path / "a.npz").write_bytes(whole)
    with pytest.raises(SourceError, match="damaged"):
        NpzInput(tmp_path / "a.npz").open()


def test_unpacking_uses_the_scratch_folder_and_leaves_nothing_behind(tmp_path, numbered):
    np.savez_compressed(tmp_path / "a.npz", x=numbered((30, 7)))
    scratch = tmp_path / "scratch"
    with pytest.raises(WriteError, match=r"temporary file in .*scratch"):
        NpzInput(tmp_path / "a.npz", scratch=scratch).open()
    scratch.mkdir()
    recording = NpzInput(tmp_path / "a.npz", scratch=scratch).open()
    assert list(scratch.iterdir()) == []
    ((fields, _),) = recording.samples(np.array([29]))
    np.testing.assert_array_equal(fields["x"], np.arange(203, 210))
    recording.close()
    assert repr(NpzInput(tmp_path / "a.npz", scratch=scratch)) == repr(NpzInput(tmp_path / "a.npz"))


def test_an_array_that_does_not_fit_into_the_scratch_folder_is_refused(tmp_path, numbered, monkeypatch):
    np.savez_compressed(tmp_path / "a.npz", x=numbered((3000, 7)))
    monkeypatch.setattr("shutil.disk_usage", lambda folder: type("Usage", (), {"free": 10_000})())
    with pytest.raises(WriteError, match=r"needs \d+ bytes to be unpacked, but .* has only 10000 left"):
        NpzInput(tmp_path / "a.npz").open()


def test_unpacking_takes_little_memory(tmp_path):
    np.savez_compressed(tmp_path / "a.npz", x=np.zeros((4_000_000,)), y=np.zeros((4_000_000, 2), np.uint8))
    tracemalloc.start()
    recording = NpzInput(tmp_path / "a.npz", None, 1000).open()
    list(recording.samples(np.array([200])))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    recording.close()
    assert peak < 10e6


@pytest.mark.parametrize("method", [zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_members_that_inflate_a_block_at_once_are_refused(tmp_path: Path, method: int) -> None:
    out = io.BytesIO()
    np.save(out, np.arange(10))
    with zipfile.ZipFile(tmp_path / "a.npz", "w", method) as archive:
        archive.writestr("x.npy", out.getvalue())
    with pytest.raises(SourceError, match=r"Members must be stored or deflated, but 'x\.npy' in .*a\.npz is not"):
        NpzInput(tmp_path / "a.npz").open()
