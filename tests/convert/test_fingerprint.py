"""Fingerprints and stamps tell inputs apart, and notice changes."""

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.convert.fingerprint import fingerprint, read_stamp
from penstock.core.errors import SourceError

MB = 1 << 20


@given(content=st.binary(min_size=1, max_size=200), data=st.data())
def test_a_small_file_has_another_fingerprint_whichever_byte_is_changed(
    content: bytes, data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.getbasetemp() / "small.bin"
    path.write_bytes(content)
    before = fingerprint(path)
    at = data.draw(st.integers(0, len(content) - 1))
    path.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
    assert fingerprint(path) != before
    path.write_bytes(content)
    assert fingerprint(path) == before
    path.write_bytes(content + b"\0")
    assert fingerprint(path) != before


def test_the_fingerprint_is_of_the_content_not_of_the_name_or_the_time(tmp_path: Path) -> None:
    for name in ("a.npy", "b.npy"):
        (tmp_path / name).write_bytes(b"the same")
    os.utime(tmp_path / "b.npy", ns=(1, 1))
    assert fingerprint(tmp_path / "a.npy") == fingerprint(tmp_path / "b.npy")


@pytest.fixture
def large(tmp_path: Path) -> Path:
    """A sparse file of 1 GB."""
    path = tmp_path / "large.bin"
    with path.open("wb") as file:
        file.truncate(1_000 * MB)
    return path


@pytest.mark.parametrize("at", [0, MB - 1, 999 * MB, 1_000 * MB - 1])
def test_of_a_large_file_the_first_and_the_last_megabyte_are_looked_at(large: Path, at: int) -> None:
    before = fingerprint(large)
    with large.open("r+b") as file:
        file.seek(at)
        file.write(b"x")
    assert fingerprint(large) != before


def test_of_a_large_file_no_gap_is_longer_than_a_64th(large: Path) -> None:
    before = fingerprint(large)
    with large.open("r+b") as file:
        file.seek(500 * MB)
        file.write(b"x" * (1_000 * MB // 63))
    assert fingerprint(large) != before


def test_a_large_file_that_grows_by_a_byte_has_another_fingerprint(large: Path) -> None:
    before = fingerprint(large)
    os.truncate(large, 1_000 * MB + 1)
    assert fingerprint(large) != before


@pytest.mark.parametrize("n_bytes", [63 * MB + 1, 64 * MB])
def test_up_to_64_megabytes_every_byte_counts(tmp_path: Path, n_bytes: int) -> None:
    path = tmp_path / "middle.bin"
    with path.open("wb") as file:
        file.truncate(n_bytes)
    before = fingerprint(path)
    for at in (0, 31 * MB + 5, 32 * MB - 1, n_bytes - 1):
        with path.open("r+b") as file:
            file.seek(at)
            file.write(b"x")
        assert fingerprint(path) != before, at
        before = fingerprint(path)


@pytest.fixture
def store(tmp_path: Path) -> Path:
    folder = tmp_path / "store.zarr"
    (folder / "lfp" / "c").mkdir(parents=True)
    (folder / "zarr.json").write_text("{}")
    (folder / "lfp" / "zarr.json").write_text('{"shape": [3]}')
    (folder / "lfp" / "c" / "0").write_bytes(b"123")
    return folder


def test_of_a_folder_what_describes_it_counts_at_any_depth(store: Path) -> None:
    before = fingerprint(store), read_stamp(store)
    (store / "lfp" / "zarr.json").write_text('{"shape": [4]}')
    os.utime(store / "lfp" / "zarr.json", ns=(1, 1))
    assert fingerprint(store) != before[0]
    assert read_stamp(store) != before[1]


def test_of_a_folder_another_array_counts(store: Path) -> None:
    before = fingerprint(store)
    (store / "spikes").mkdir()
    (store / "spikes" / ".zarray").write_text("{}")
    assert fingerprint(store) != before


def test_of_a_folder_it_counts_where_a_description_lies(store: Path) -> None:
    before = fingerprint(store)
    (store / "lfp").rename(store / "emg")
    assert fingerprint(store) != before


def test_of_a_store_the_stamp_tells_of_values_that_change_and_the_fingerprint_does_not(store: Path) -> None:
    before, values = (fingerprint(store), read_stamp(store)), store / "lfp" / "c" / "0"
    values.write_bytes(b"124")
    os.utime(values, ns=(1, 1))
    assert fingerprint(store) == before[0]
    assert read_stamp(store).unread != before[1].unread
    (store / "lfp" / "c" / "1").write_bytes(b"")
    assert read_stamp(store).unread != before[1].unread


@pytest.mark.parametrize(("n_bytes", "is_noted"), [(64 * MB, False), (64 * MB + 1, True)])
def test_the_time_of_what_is_read_wholly_does_not_count_when_resuming(
    tmp_path: Path, n_bytes: int, is_noted: bool
) -> None:
    path = tmp_path / "a.bin"
    with path.open("wb") as file:
        file.truncate(n_bytes)
    before = read_stamp(path)
    os.utime(path, ns=(1, 1))
    after = read_stamp(path)
    assert after.times != before.times
    assert (after.unread != before.unread) == is_noted


def test_of_a_folder_that_is_no_store_every_file_counts(tmp_path: Path) -> None:
    (tmp_path / "node").mkdir()
    (tmp_path / "structure.oebin").write_text("{}")
    (tmp_path / "node" / "continuous.dat").write_bytes(b"123")
    before = fingerprint(tmp_path)
    (tmp_path / "node" / "continuous.dat").write_bytes(b"124")
    assert fingerprint(tmp_path) != before


def test_the_stamp_tells_of_appending_and_of_writing_in_place(tmp_path: Path) -> None:
    path = tmp_path / "a.bin"
    path.write_bytes(b"1234")
    os.utime(path, ns=(1, 1))
    first = read_stamp(path)
    assert read_stamp(path) == first
    with path.open("ab") as file:
        file.write(b"5")
    os.utime(path, ns=(1, 1))
    assert read_stamp(path) != first
    path.write_bytes(b"5678")
    os.utime(path, ns=(1, 2))
    assert read_stamp(path) != first


@pytest.mark.parametrize("look", [read_stamp, fingerprint])
def test_a_missing_file_is_named(look: object, tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=r"Could not read .*gone\.npy: .*No such file"):
        look(tmp_path / "gone.npy")  # type: ignore[operator]
