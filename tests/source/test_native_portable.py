"""Without the C part: the same bytes, the same errors, and it is said once."""

import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import penstock_test_shards
import pyarrow as pa
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st
from penstock_native import needs_c, use_numpy
from penstock_source_suite import Case, ShortSuite
from penstock_test_shards import (
    ALL,
    Kind,
    Sample,
    Truth,
    attempt,
    facts,
    flip_member,
    in_columns,
    read_quarantine,
    uniform,
    write,
)
from pyarrow import feather

from penstock import ArraySource, OptionError, PenstockError, ReadError, Source, Span, TableSource, TarSource
from penstock.source import native
from penstock.source.native import ExpectedChecksums, FileMap, StoredItems, compiled, copy_items

folder, originals = penstock_test_shards.folder, penstock_test_shards.originals
PAGE = os.sysconf("SC_PAGE_SIZE")

# -- which one -------------------------------------------------------------------------------------------------------


def choose(monkeypatch: pytest.MonkeyPatch, wanted: str | None, library: Callable[[], Any]) -> str | None:
    """Settle it again, as a new process does."""
    monkeypatch.setattr(compiled, "library", library)
    if wanted is None:
        monkeypatch.delenv("PENSTOCK_NATIVE", raising=False)
    else:
        monkeypatch.setenv("PENSTOCK_NATIVE", wanted)
    return native.find_obstacle.__wrapped__()


def missing() -> Any:
    return compiled.open_library(Path("/nowhere/libnative.so"))


def stale() -> Any:
    raise PenstockError("native.c has changed since it was compiled.")


@pytest.mark.parametrize("wanted", [None, "", "1"])
def test_the_c_part_is_used_if_it_is_there(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, wanted: str | None
) -> None:
    assert choose(monkeypatch, wanted, lambda: None) is None
    assert not caplog.records


def test_numpy_is_used_if_the_c_part_is_missing_and_that_is_said(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    found = choose(monkeypatch, None, missing)
    assert found is not None
    (said,) = caplog.records
    assert (said.name, said.levelno) == ("penstock", logging.WARNING)
    assert "Items are read with NumPy" in said.message
    assert found in said.message
    assert "it was not compiled when Penstock was installed" in found
    assert "pip install" in found


def test_numpy_is_used_if_it_is_asked_for_whatever_is_there(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    for library in (missing, stale, lambda: None):
        assert "PENSTOCK_NATIVE" in str(choose(monkeypatch, "0", library))
    assert [record.levelno for record in caplog.records] == [logging.INFO] * 3


def test_what_cannot_be_chosen_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(PenstockError, match="Could not load"):
        choose(monkeypatch, "1", missing)
    for wanted in (None, "1"):
        with pytest.raises(PenstockError, match="has changed since it was compiled"):
            choose(monkeypatch, wanted, stale)
    with pytest.raises(OptionError, match=r"PENSTOCK_NATIVE must be 0 .* or 1 .* got 'yes'"):
        choose(monkeypatch, "yes", missing)


# -- the same as in C --------------------------------------------------------------------------------------------------


@st.composite
def extents(draw: st.DrawFn) -> list[tuple[int, int, int, int]]:
    """Members one after the other, with bytes before and after their data, or without any."""
    members, end = [], 0
    for _ in range(draw(st.integers(1, 3))):
        head, size, after = (draw(st.sampled_from([0, 1, 8, 64, 512, 3000])) for _ in range(3))
        members.append((end, end + head, size, end + head + size + after))
        end = members[-1][3]
    return members


@needs_c
@given(data=st.data(), members=extents(), one_each=st.booleans())
def test_both_copy_the_same_bytes_and_stop_at_the_same_item(
    tmp_path_factory: pytest.TempPathFactory,
    data: st.DataObject,
    members: list[tuple[int, int, int, int]],
    one_each: bool,
) -> None:
    path = tmp_path_factory.mktemp("stored") / "a"
    n_items, n_bytes = data.draw(st.integers(1, 12)), 6 * PAGE
    content = np.random.default_rng(n_items).integers(0, 256, n_bytes).astype(np.uint8)
    path.write_bytes(content.tobytes())
    if one_each:
        members = [members[data.draw(st.integers(0, len(members) - 1))] for _ in range(n_items)]
    begins = np.array(data.draw(st.lists(st.integers(-5, n_bytes), min_size=n_items, max_size=n_items)))
    targets = [np.zeros(sum(member[2] for member in members), np.uint8)]
    places = np.cumsum([0, *(member[2] for member in members[:-1])])
    if not one_each:
        targets = [np.zeros((n_items, member[2]), np.uint8) for member in members]
        places = np.array(data.draw(st.permutations(range(n_items))))
    sums = np.zeros((len(targets), n_items), np.uint64)
    for item, begin in enumerate(begins.tolist()):
        for number, (low, _, _, high) in enumerate(members[item : item + 1] if one_each else members):
            sums[number, item] = xxhash.xxh3_64_intdigest(content[max(0, begin) :][low:high].tobytes())
    broken = data.draw(st.lists(st.integers(0, sums.size - 1), max_size=2))
    sums.reshape(-1)[broken] ^= np.uint64(1 << data.draw(st.integers(0, 63)))
    unverified = np.array(data.draw(st.lists(st.booleans(), min_size=n_items, max_size=n_items)))
    expected = ExpectedChecksums(unverified, sums, data.draw(st.sampled_from([4, 8])))
    file = os.open(path, os.O_RDONLY)
    mapped = FileMap(file, n_bytes)
    # The rest of the last page of a map reads as zeros, so that files end with a page here.
    os.truncate(path, data.draw(st.sampled_from([n_bytes, n_bytes, 3 * PAGE, 0])))

    def copy() -> tuple[int, int, list[bytes]]:
        for target in targets:
            target[...] = 0
        found = copy_items(
            StoredItems(np.array([[file, mapped.address, n_bytes, 0]]), np.zeros(n_items, np.int64), begins),
            np.array(members),
            targets=targets,
            places=places,
            expected=expected,
            one_each=one_each,
        )
        rows: list[bytes] = []
        for item in range(found[0]):
            first = int(places[item])
            rows += (
                [targets[0][first : first + members[item][2]].tobytes()]
                if one_each
                else [target[first].tobytes() for target in targets]
            )
        return *found, rows

    in_c = copy()
    with use_numpy():
        assert copy() == in_c
    os.close(file)


# -- sources -----------------------------------------------------------------------------------------------------------


def _fixed(folder: Path, offset: int) -> tuple[Truth, int, Sample]:
    return write(folder, uniform(offset)), 23, {}


def _varying(folder: Path, offset: int) -> tuple[Truth, int, Sample]:
    samples = [{"x": np.int32(i + offset), "v": np.arange(i % 4, dtype=np.float32) + i + offset} for i in range(23)]
    return write(folder, samples), 23, {}


def _compressed(folder: Path, offset: int) -> tuple[Truth, int, Sample]:
    return write(folder, uniform(offset, 9), compression="gz"), 9, {}


KINDS: dict[str, Kind] = {
    "fixed": _fixed,
    "varying": _varying,
    "compressed": _compressed,
    "fixed, in columns": in_columns(_fixed),
    "varying, in columns": in_columns(_varying),
}
cases = penstock_test_shards.cases


class TestShards(ShortSuite):
    """Shards are read as by C."""

    @pytest.fixture(params=KINDS)
    def case(self, request: pytest.FixtureRequest, cases: Callable[[str], Case]) -> Any:
        with use_numpy():
            yield cases(request.param)


def damage(folder: Path, how: str) -> None:
    shard = sorted(folder.glob("*.tar"))[1]
    if how == "flipped":
        flip_member(folder, "sample_000000002.x.npy")
    elif how == "truncated":
        os.truncate(shard, shard.stat().st_size - 1024)
    elif how == "replaced":
        shutil.copy(sorted(folder.glob("*.tar"))[2], shard)
    elif how == "index":
        index = next(iter(sorted(folder.glob("*1.tar.*"))), None) or sorted(folder.glob("*000001*"))[-1]
        os.truncate(index, index.stat().st_size - 8)
    else:
        shard.unlink()


def read_damaged(folder: Path, *, opened: bool, how: str, **options: Any) -> tuple[Any, str, Any]:
    """Return items, error and quarantine of a dataset that is damaged before or after it is read."""
    source = TarSource(folder, verify="always", **options)
    if opened:
        assert facts(source.take(ALL)) == ALL.tolist()
    damage(folder, how)
    found, error = attempt(lambda: facts(source.take(ALL)))
    return found, str(error).replace(str(folder), "FOLDER"), read_quarantine(folder)


@needs_c
@pytest.mark.parametrize("how", ["flipped", "truncated", "replaced", "index", "gone"])
@pytest.mark.parametrize("opened", [False, True])
def test_damage_is_the_same_error_as_in_c(originals: Path, tmp_path: Path, how: str, opened: bool) -> None:
    for name in ("c", "numpy"):
        shutil.copytree(originals / "none", tmp_path / name)
    in_c = read_damaged(tmp_path / "c", opened=opened, how=how)
    with use_numpy():
        assert read_damaged(tmp_path / "numpy", opened=opened, how=how) == in_c


def test_a_shard_that_shrinks_between_two_reads_of_a_batch_is_an_error(folder: Path) -> None:
    with use_numpy():
        source = TarSource(folder, verify="never")
        assert facts(source.take(ALL)) == ALL.tolist()
        os.truncate(sorted(folder.glob("*.tar"))[1], 0)
        with pytest.raises(ReadError, match="shard_000001"):
            source.take(ALL)


def test_an_array_in_a_file_is_read_and_its_truncation_is_an_error(tmp_path: Path) -> None:
    path, whole = tmp_path / "a.npy", np.arange(40 * 512, dtype=np.int32).reshape(40, 512)
    np.save(path, whole)
    with use_numpy():
        source = ArraySource({"x": np.load(path, mmap_mode="r")[1:]})
        assert source.take(np.array([38, 0, 7]))["x"].tobytes() == whole[[39, 1, 8]].tobytes()
        assert source.read(Span(2, 30))["x"].tobytes() == whole[3:31].tobytes()
        os.truncate(path, 20_000)
        assert source.take(np.array([0, 7]))["x"].tobytes() == whole[[1, 8]].tobytes()
        with pytest.raises(ReadError, match=r"item 38 .*a\.npy was truncated"):
            source.take(np.array([0, 38]))


def test_an_array_whose_file_has_another_name_now_is_read_from_its_map(tmp_path: Path) -> None:
    path = tmp_path / "a.npy"
    np.save(path, np.arange(10))
    with use_numpy():
        source = ArraySource({"x": np.load(path, mmap_mode="r")})
        np.save(tmp_path / "b.npy", np.arange(100, 110))
        (tmp_path / "b.npy").replace(path)
        assert source.take(np.array([3, 9]))["x"].tolist() == [3, 9]


def _write_stream(table: pa.Table, path: Path) -> None:
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, table.schema) as writer:
        writer.write_table(table, max_chunksize=100)


def _write_feather(table: pa.Table, path: Path) -> None:
    feather.write_feather(table, path, compression="uncompressed", chunksize=100)


@pytest.mark.parametrize("write_table", [_write_stream, _write_feather])
@pytest.mark.parametrize("text", ["plain", "dictionary"])
def test_tables_are_read_and_their_truncation_is_an_error(
    tmp_path: Path, write_table: Callable[[pa.Table, Path], None], text: str
) -> None:
    path, names = tmp_path / "a.arrow", pa.array([f"n{i % 7}" for i in range(1000)])
    columns = {"x": np.arange(1000), "b": np.arange(1000) % 3 == 0}
    write_table(pa.table({**columns, "t": names.dictionary_encode() if text == "dictionary" else names}), path)
    items = np.array([999, 0, 501, 501, 100])
    in_c = TableSource(path).take(items)
    with use_numpy():
        source: Source = TableSource(path)
        found = source.take(items)
        assert {name: found[name].tolist() for name in found} == {name: in_c[name].tolist() for name in in_c}
        assert source.read(Span(150, 350))["x"].tolist() == list(range(150, 350))
        os.truncate(path, 2000)
        with pytest.raises(ReadError, match=r"a\.arrow"):
            source.take(np.array([400]))
