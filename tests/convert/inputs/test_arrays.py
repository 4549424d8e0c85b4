"""Rows of .npy and .npz files: which ones, in which window. Arrays without rows and truncated files are refused."""

import os
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock.convert.inputs.arrays import NpyInput, NpzInput
from penstock.core.errors import OptionError, ReadError, SourceError


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("arrays")


def save(path: Path, array: Any) -> Path:
    np.save(path, array)
    return path


# -- which rows --------------------------------------------------------------------------------------------------------


def test_each_row_is_a_sample_that_knows_its_place(tmp_path, numbered, all_samples):
    array = numbered((50, 3, 2), np.float32)
    found = all_samples(NpyInput(save(tmp_path / "a.npy", array)))
    for row, (fields, metadata) in enumerate(found):
        assert list(fields) == ["data"]
        assert fields["data"].dtype == np.float32
        np.testing.assert_array_equal(fields["data"], array[row])
        assert metadata == {"file": "a.npy", "row": row}


def test_rows_of_one_value_are_arrays_without_axes(tmp_path, numbered, all_samples):
    found = all_samples(NpyInput(save(tmp_path / "a.npy", numbered((7,), np.int16))))
    assert [(fields["data"].shape, int(fields["data"])) for fields, _ in found] == [((), row) for row in range(7)]


def windows_by_hand(total: int, length: int, overlap: float) -> list[list[int]]:
    """The rows of each window, computed row by row without the code under test."""
    step = max(1, round(length * (1 - overlap)))
    found, start = [], 0
    while start + length <= total:
        found.append(list(range(start, start + length)))
        start += step
    return found


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(
    total=st.integers(1, 120),
    length=st.integers(1, 40),
    overlap=st.sampled_from([0.0, 0.5, 0.99, 0.3]),
    width=st.sampled_from([1, 3, 50_000]),
    fortran=st.booleans(),
    data=st.data(),
)
def test_every_row_is_in_the_windows_that_hold_it(folder, numbered, *, total, length, overlap, width, fortran, data):
    width = width if total < 20 and not fortran else min(width, 3)  # a wide row: windows are read one by one
    array = numbered((total, width), np.float32)
    path = save(folder / "w.npy", np.asfortranarray(array) if fortran else array)
    expected = windows_by_hand(total, length, overlap)
    if not expected:
        with pytest.raises(SourceError, match=f"sequence_length must be at most {total}, .*, got {length}"):
            NpyInput(path, length, overlap).open()
        return
    recording = NpyInput(path, length, overlap).open()
    try:
        assert recording.n_samples == len(expected)
        numbers = data.draw(st.lists(st.integers(0, len(expected) - 1), max_size=12) | st.just(range(len(expected))))
        numbers = np.array(numbers, np.int64)
        for number, (fields, metadata) in zip(numbers.tolist(), recording.samples(numbers), strict=True):
            rows = expected[number]
            np.testing.assert_array_equal(fields["data"], array[rows])
            assert metadata == {"file": "w.npy", "start_row": rows[0], "stop_row": rows[-1] + 1}
        wanted = [(expected[number][0], expected[number][-1] + 1) for number in numbers]
        assert recording.span(numbers).tolist() == [list(map(float, pair)) for pair in wanted]
        left_out = total - 1 - expected[-1][-1]
        assert bool(recording.notes) == (left_out > 0)
        assert all(str(left_out) in note or left_out == 1 for note in recording.notes)
    finally:
        recording.close()


def test_samples_can_be_kept_and_changed_without_changing_others(tmp_path, numbered):
    recording = NpyInput(save(tmp_path / "a.npy", numbered((20, 2))), 4, 0.5).open()
    first, *rest = [fields["data"] for fields, _ in recording.samples(np.arange(recording.n_samples))]
    first[:] = -1
    assert min(window.min() for window in rest) == 4.0
    recording.close()


STRUCTURED = np.dtype([("time", ">f8"), ("unit", "<i4"), ("name", "<U3")])


@pytest.mark.parametrize(
    "array",
    [
        np.arange(24, dtype=">f8").reshape(6, 4),
        np.asfortranarray(np.arange(24, dtype=">i4").reshape(6, 4)),
        np.arange(48, dtype="<u2").reshape(6, 4, 2).transpose(0, 2, 1),
        np.asfortranarray(np.arange(120).reshape(6, 5, 4)),
        np.asfortranarray(np.arange(4).reshape(1, 4)),
        np.arange(6) % 2 == 0,
        np.linspace(0, 1, 12).reshape(6, 2).astype(np.complex64),
        np.array(["left", "é", ""]),
        np.array(["2026-01-02", "NaT"], "datetime64[ns]"),
        np.array([(0.5, 7, "ab"), (np.nan, -1, "é")], STRUCTURED),
        np.array([[np.nan, np.inf, -0.0]], np.float16),
    ],
    ids=lambda array: f"{array.dtype}{array.shape}"[:30],
)
@pytest.mark.parametrize("archive", ["npy", "npz", "packed"])
def test_values_keep_their_dtype_in_native_byte_order(tmp_path, all_samples, array, archive):
    if archive == "npy":
        given_input: Any = NpyInput(save(tmp_path / "a.npy", array))
    else:
        (np.savez if archive == "npz" else np.savez_compressed)(tmp_path / "a.npz", data=array)
        given_input = NpzInput(tmp_path / "a.npz")
    found = [fields["data"] for fields, _ in all_samples(given_input)]
    assert {row.dtype for row in found} == {array.dtype.newbyteorder("=")}
    expected = np.ascontiguousarray(array, array.dtype.newbyteorder("="))
    assert [row.tobytes() for row in found] == [expected[row, ...].tobytes() for row in range(len(expected))]
    assert all(row.flags.c_contiguous for row in found)


# -- what cannot be ----------------------------------------------------------------------------------------------------


def test_a_file_that_becomes_shorter_is_an_error_that_names_rows_and_file(tmp_path, numbered):
    path = save(tmp_path / "a.npy", numbered((100, 8)))
    recording = NpyInput(path, 10).open()
    os.truncate(path, path.stat().st_size - 8 * 64 * 5)
    assert len(list(recording.samples(np.arange(6)))) == 6
    with pytest.raises(ReadError, match=r"rows 90–99 of .*a\.npy: the file ends at byte .* too early"):
        list(recording.samples(np.array([9])))
    recording.close()
    with pytest.raises(SourceError, match=r"a\.npy: .* needs 6400 bytes"):  # opened again
        list(recording.samples(np.array([0])))


def test_a_short_file_in_columns_is_an_error_too(tmp_path, numbered):
    path = save(tmp_path / "a.npy", np.asfortranarray(numbered((100, 8))))
    recording = NpyInput(path, 10).open()
    os.truncate(path, 2000)
    with pytest.raises(ReadError, match=r"rows 0–99 of .*a\.npy: the file ends"):
        list(recording.samples(np.array([0])))
    recording.close()


def test_items_out_of_range_are_refused(tmp_path, numbered):
    recording = NpyInput(save(tmp_path / "a.npy", numbered((5, 2)))).open()
    for numbers in ([5], [-1], [0, 99]):
        with pytest.raises(ReadError, match=r"a\.npy: it has items 0–4"):
            list(recording.samples(np.array(numbers)))
    assert list(recording.samples(np.array([], np.int64))) == []
    recording.close()


@pytest.mark.parametrize("cut", [0, 4, 20, 127, 128, 1000, -1])
def test_a_truncated_file_is_refused_when_it_is_opened(tmp_path, numbered, cut):
    path = save(tmp_path / "a.npy", numbered((100, 8)))
    path.write_bytes(path.read_bytes()[:cut])
    with pytest.raises(SourceError, match=r"Could not read .*a\.npy"):
        NpyInput(path).open()


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (np.array([{"a": 1}], object), "Python objects"),
        (np.array(3.0), "a single value"),
        (np.empty((0, 4)), r"must not be empty, but .* has shape \(0, 4\)"),
        (np.empty((3, 0)), "empty"),
        (np.zeros((2, 100, 100), order="F"), r"np\.save\(new_path, np\.ascontiguousarray"),
    ],
)
def test_arrays_that_have_no_rows_are_refused(tmp_path, array, message):
    np.save(tmp_path / "a.npy", array, allow_pickle=True)
    with pytest.raises(SourceError, match=message):
        NpyInput(tmp_path / "a.npy").open()
    np.savez(tmp_path / "a.npz", x=array)
    with pytest.raises(SourceError, match=r"x\.npy in .*a\.npz"):
        NpzInput(tmp_path / "a.npz").open()


def test_a_path_that_is_not_a_file_cannot_be_opened(tmp_path):
    for kind in (NpyInput, NpzInput):
        with pytest.raises(ReadError, match="Could not open"):
            kind(tmp_path / "none.npy").open()
        with pytest.raises(SourceError, match="must be a regular file"):
            kind(tmp_path).open()
        os.mkfifo(tmp_path / f"{kind.__name__}.pipe")
        with pytest.raises(SourceError, match="must be a regular file"):
            kind(tmp_path / f"{kind.__name__}.pipe").open()


@pytest.mark.parametrize("options", [{"sequence_length": 0}, {"sequence_length": 2.5}, {"sequence_length": True}])
@pytest.mark.parametrize("kind", [NpyInput, NpzInput])
def test_lengths_that_cannot_be_are_refused_at_once(kind, options):
    with pytest.raises(OptionError, match="sequence_length must be an integer >= 1, got "):
        kind("a.npy", **options)


@pytest.mark.parametrize("overlap", [1, 1.0, -0.1, np.nan, "half", True])
def test_invalid_overlaps_are_refused_at_once(overlap):
    with pytest.raises(OptionError, match="overlap must be a number >= 0 and < 1"):
        NpyInput(Path("a.npy"), 5, overlap)


def test_an_overlap_of_single_rows_is_refused():
    with pytest.raises(OptionError, match="give sequence_length"):
        NpyInput(Path("a.npy"), overlap=0.5)


def test_a_failed_opening_leaves_no_file_open(tmp_path, numbered):
    path, damaged = save(tmp_path / "a.npy", numbered((5, 2))), tmp_path / "a.npz"
    damaged.write_bytes(b"PK\x03\x04 and nothing more")
    before = len([*Path("/proc/self/fd").iterdir()])
    for _ in range(5):
        with pytest.raises(SourceError):
            NpyInput(path, 6).open()
        with pytest.raises(SourceError):
            NpzInput(damaged).open()
    assert len([*Path("/proc/self/fd").iterdir()]) == before


# -- memory ------------------------------------------------------------------------------------------------------------


def test_one_window_of_a_large_file_takes_little_memory(tmp_path):
    path = tmp_path / "large.npy"
    with path.open("wb") as file:
        np.lib.format.write_array_header_1_0(file, {"descr": "<f8", "fortran_order": False, "shape": (250_000, 100)})
        file.truncate(file.tell() + 250_000 * 100 * 8)
    tracemalloc.start()
    recording = NpyInput(path, 1000, 0.5).open()
    ((fields, _),) = recording.samples(np.array([200]))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    recording.close()
    assert fields["data"].shape == (1000, 100)
    assert peak < 20e6
