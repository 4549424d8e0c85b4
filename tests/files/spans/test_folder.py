"""A cache folder: spans are there whole or not at all, and never take more bytes than they may."""

import os
import shutil
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock import OptionError
from penstock.files.spans.folder import CacheFolder, measure_folder
from penstock.files.spans.span import WHOLE, Span, StoredSpan

_TRAILER_BYTES = 16


def _span(number: int, n_bytes: int = 100, version: str = "v1") -> StoredSpan:
    return StoredSpan.of("s3://bucket/a.tar", version, Span("a.tar", number * n_bytes, (number + 1) * n_bytes))


def _content(number: int, n_bytes: int = 100) -> np.ndarray:
    return np.arange(number * n_bytes, (number + 1) * n_bytes).astype(np.uint8)


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*-*") if path.is_file() and path.suffix != ".json")


def test_what_was_added_is_read_by_another_instance(tmp_path: Path) -> None:
    assert CacheFolder(tmp_path / "c", 10_000).add(_span(3), _content(3))
    other = CacheFolder(tmp_path / "c", 10_000)
    assert other.find(_span(3))
    assert not other.find(_span(4))
    assert not other.find(_span(3, version="v2"))
    np.testing.assert_array_equal(other.read(_span(3)), _content(3))
    assert other.read(_span(4)) is None


def test_a_whole_object_has_the_size_that_was_written(tmp_path: Path) -> None:
    cache, whole = CacheFolder(tmp_path / "c", 10_000), StoredSpan.of("s3://b/x", "v", Span("x", 0, WHOLE))
    for content in (_content(1, 77), np.empty(0, np.uint8)):
        shutil.rmtree(tmp_path / "c" / whole.object, ignore_errors=True)
        assert cache.add(whole, content)
        np.testing.assert_array_equal(cache.read(whole), content)


@pytest.mark.parametrize("damage", ["flip", "flip the checksum", "truncate", "lengthen", "empty", "folder", "fifo"])
def test_a_damaged_file_is_not_there_and_can_be_written_again(tmp_path: Path, damage: str) -> None:
    cache = CacheFolder(tmp_path / "c", 10_000)
    cache.add(_span(1), _content(1))
    (path,) = _files(tmp_path / "c")
    content = bytearray(path.read_bytes())
    if damage.startswith("flip"):
        content[50 if damage == "flip" else -1] ^= 4
    changed = {"truncate": content[:-20], "lengthen": content + b"x", "empty": bytearray()}.get(damage, content)
    path.unlink()
    if damage == "folder":
        path.mkdir()
    elif damage == "fifo":
        os.mkfifo(path)
    else:
        path.write_bytes(changed)
    assert cache.read(_span(1)) is None
    if damage not in ("folder", "fifo"):
        assert cache.add(_span(1), _content(1))
        np.testing.assert_array_equal(cache.read(_span(1)), _content(1))


@settings(deadline=None)
@given(st.data())
def test_the_bound_holds_and_what_is_there_is_right(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("cache") / "c"
    max_bytes = data.draw(st.integers(100, 1500))
    caches = [CacheFolder(folder, max_bytes) for _ in range(2)]
    for _ in range(data.draw(st.integers(1, 30))):
        cache = caches[data.draw(st.integers(0, 1))]
        number, what = data.draw(st.integers(0, 12)), data.draw(st.sampled_from(["add", "read", "age", "delete"]))
        if what == "add":
            is_there = cache.add(_span(number), _content(number))
            assert is_there == cache.find(_span(number))
        elif what == "age" and _files(folder):
            os.utime(_files(folder)[-1], (1e9, 1e9))  # used by an earlier run
        elif what == "delete" and _files(folder):
            _files(folder)[0].unlink()
        found = cache.read(_span(number))
        assert found is None or bytes(found) == bytes(_content(number))
        assert measure_folder(folder) <= max_bytes
    shutil.rmtree(folder)


def test_a_worker_that_starts_later_keeps_what_its_run_has_used(tmp_path: Path) -> None:
    room, began = 2 * (100 + _TRAILER_BYTES), time.time_ns() - 10**9  # clocks of files are coarser
    earlier = CacheFolder(tmp_path / "c", room, began)
    for number in range(2):
        assert earlier.add(_span(number), _content(number))
    while time.time_ns() <= _files(tmp_path / "c")[-1].stat().st_mtime_ns:
        pass
    assert not CacheFolder(tmp_path / "c", room, began).add(_span(2), _content(2))


def test_what_earlier_runs_left_goes_before_what_is_needed_now(tmp_path: Path) -> None:
    room = 3 * (100 + _TRAILER_BYTES)
    before = CacheFolder(tmp_path / "c", room)
    for number in range(3):
        before.add(_span(number), _content(number))
    while time.time_ns() <= _files(tmp_path / "c")[-1].stat().st_mtime_ns:
        pass
    now = CacheFolder(tmp_path / "c", room)
    assert now.find(_span(2))  # needed soon
    assert now.add(_span(7), _content(7))
    assert now.add(_span(8), _content(8))
    assert [now.find(_span(number)) for number in (0, 1, 2, 7, 8)] == [False, False, True, True, True]


def test_a_deleted_folder_and_a_deleted_ledger_are_made_again(tmp_path: Path) -> None:
    cache = CacheFolder(tmp_path / "c", 10_000)
    cache.add(_span(0), _content(0))
    shutil.rmtree(tmp_path / "c")
    assert cache.read(_span(0)) is None
    assert not cache.find(_span(0))
    assert cache.add(_span(0), _content(0))
    (tmp_path / "c" / "ledger").unlink()
    assert cache.add(_span(1), _content(1))
    np.testing.assert_array_equal(CacheFolder(tmp_path / "c", 10_000).read(_span(1)), _content(1))


def test_bytes_of_a_killed_writer_count_until_they_are_removed(tmp_path: Path) -> None:
    room = 2 * (100 + _TRAILER_BYTES)
    cache = CacheFolder(tmp_path / "c", room)
    cache.add(_span(0), _content(0))
    (path,) = _files(tmp_path / "c")
    aside = path.with_name(f".{path.name}.0123456789abcdef.aside")
    aside.write_bytes(bytes(100 + _TRAILER_BYTES))
    (tmp_path / "c" / "ledger").write_bytes(b"")  # killed while it was written
    assert not CacheFolder(tmp_path / "c", room).add(_span(1), _content(1)) or not cache.find(_span(0))
    os.utime(aside, (1e9, 1e9))
    (tmp_path / "c" / "ledger").write_bytes(b"")
    assert CacheFolder(tmp_path / "c", room).add(_span(2), _content(2))
    assert not aside.exists()
    assert measure_folder(tmp_path / "c") <= room


def test_a_claim_holds_against_others_until_it_is_given_up_or_too_old(tmp_path: Path) -> None:
    ours, theirs = CacheFolder(tmp_path / "c", 1000), CacheFolder(tmp_path / "c", 1000)
    assert ours.claim(_span(0))
    assert not theirs.claim(_span(0))
    assert theirs.claim(_span(1))
    ours.disclaim(_span(0))
    assert theirs.claim(_span(0))
    for path in _files(tmp_path / "c"):  # its owner was killed
        os.utime(path, (1e9, 1e9))
    assert ours.claim(_span(0))
    assert not theirs.claim(_span(0))


def test_claims_take_no_bytes_and_those_of_the_dead_are_removed_for_room(tmp_path: Path) -> None:
    cache = CacheFolder(tmp_path / "c", 100 + _TRAILER_BYTES)
    assert cache.claim(_span(0))
    assert cache.claim(_span(1))
    os.utime(next(path for path in _files(tmp_path / "c") if path.name.startswith("0-")), (1e9, 1e9))
    assert cache.add(_span(2), _content(2))
    assert not cache.add(_span(3), _content(3))
    assert [path.name for path in _files(tmp_path / "c")] == ["100-200.claim", "200-300"]


def test_what_cannot_be_claimed_is_downloaded(tmp_path: Path) -> None:
    cache = CacheFolder(tmp_path / "c", 1000)
    shutil.rmtree(tmp_path / "c")
    assert cache.claim(_span(0))  # the folder is made again
    shutil.rmtree(tmp_path / "c")
    (tmp_path / "c").write_bytes(b"a file")
    assert cache.claim(_span(0))
    assert cache.claim(_span(0))


def test_a_folder_with_something_else_in_it_is_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("mine")
    with pytest.raises(OptionError, match=r"cache must be an empty folder.*thesis\.tex"):
        CacheFolder(tmp_path, 1000)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]
    with pytest.raises(OptionError, match="cache must be a folder that can be written to"):
        CacheFolder(tmp_path / "thesis.tex", 1000)
