"""What a process keeps of the shards that it reads: little memory, checks that are made once."""

import gc
import os
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from penstock_test_parts import run_isolated
from penstock_test_shards import uniform, write

from penstock import ArraySource, Concat, DamageError, TarSource, Zip, create_shards_from_arrays
from penstock.shard.places import open_dataset
from penstock.source.combine import Numbered
from penstock.source.select.selectable import Take
from penstock.source.tar import open_shards
from penstock.source.tar.open_shards import SideIndexFile
from penstock.source.tar.verified import VerifiedItems

# -- verified items ----------------------------------------------------------------------------------------------------


@given(
    sizes=st.lists(st.integers(1, 20), min_size=1, max_size=5),
    steps=st.lists(st.tuples(st.sampled_from(["mark", "forget"]), st.integers(0, 99)), max_size=20),
)
def test_verified_items_are_those_marked_since_their_shard_was_forgotten(
    sizes: list[int], steps: list[tuple[str, int]]
) -> None:
    verified, model = VerifiedItems(np.array(sizes)), set[tuple[int, int]]()
    every = [(shard, row) for shard, size in enumerate(sizes) for row in range(size)]
    for step, number in steps:
        if step == "forget":
            verified.forget(number % len(sizes))
            model -= {(number % len(sizes), row) for row in range(20)}
        else:
            some = [every[(number * 7 + n * n) % len(every)] for n in range(5)]  # with repeats
            verified.mark(*np.array(some).T, as_of=verified.changes)
            model |= set(some)
        unverified = verified.find_unverified(*np.array(every).T)
        assert {item for item, is_new in zip(every, unverified, strict=True) if not is_new} == model


def test_items_are_not_marked_if_a_shard_has_changed_meanwhile() -> None:
    verified = VerifiedItems(np.array([9]))
    before = verified.changes
    verified.forget(0)
    verified.mark(np.array([0]), np.array([8]), as_of=before)
    assert verified.find_unverified(np.array([0]), np.array([8])).all()


# -- memory ------------------------------------------------------------------------------------------------------------


def test_reading_everything_keeps_no_more_memory_than_the_source_says(tmp_path: Path) -> None:
    n_items, n_shards = 60_000, 20
    create_shards_from_arrays(tmp_path, {"x": np.arange(n_items)}, n_items // n_shards, show_progress=False)
    TarSource(tmp_path, fields=["x"]).take(np.arange(9))  # modules, and what they keep once
    source = TarSource(tmp_path, fields=["x"])
    assert source.memory_bytes < n_items * 8 // 3, "less than the checksums of all items"
    order = np.random.default_rng(0).permutation(n_items).reshape(-1, 100)
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        for items in order:
            assert source.take(items)["x"].tolist() == items.tolist()
        gc.collect()
        kept = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert kept < source.memory_bytes


def test_the_memory_of_compressed_shards_is_counted(tmp_path: Path) -> None:
    write(tmp_path / "plain", uniform(0))
    write(tmp_path / "gz", uniform(0), compression="gz")
    plain, compressed = TarSource(tmp_path / "plain"), TarSource(tmp_path / "gz")
    archives = sum(shard.tar_bytes for shard in compressed.manifest.shards)
    assert archives <= compressed.memory_bytes <= archives + plain.memory_bytes


def test_combined_sources_keep_what_their_parts_keep(tmp_path: Path) -> None:
    write(tmp_path / "set", uniform(0))
    source = TarSource(tmp_path / "set", fields=["x"])
    other = ArraySource({"z": np.zeros(len(source.index))})
    assert Concat([source, source]).memory_bytes == 2 * source.memory_bytes
    for combined in (Zip([source, other]), Numbered(source), Take(source, [3, 1])):
        assert combined.memory_bytes == source.memory_bytes


# -- side indexes ------------------------------------------------------------------------------------------------------


def test_a_side_index_is_checked_once_unless_its_file_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(open_shards, "_MAX_OPEN_SHARDS", 4)  # so that shards are closed and opened again
    write(tmp_path, uniform(0))
    read: list[int] = []
    real = SideIndexFile.read
    monkeypatch.setattr(SideIndexFile, "read", lambda self: (read.append(1), real(self))[1])
    source = TarSource(tmp_path)
    rng = np.random.default_rng(0)

    def read_all() -> None:
        for item in rng.permutation(23):
            assert source.take(np.array([item]))["x"].tolist() == [item]

    read_all()
    read_all()
    assert len(read) == 6, "one for each shard"
    index = tmp_path / "shard_000002.tar.index"
    index.write_bytes(index.read_bytes())
    read_all()
    read_all()
    assert len(read) == 7


def read_after_truncation(folder: Path, n_bytes: int) -> tuple[str, int | None, str]:
    source = TarSource(folder)
    source.take(np.arange(4))
    os.truncate(folder / "shard_000000.tar.index", n_bytes)
    try:
        source.take(np.arange(4, 8))
    except DamageError as error:
        return error.shard, error.item, error.reason
    return "", None, "nothing was noticed"


def test_a_side_index_that_is_truncated_while_it_is_mapped_is_an_error_with_the_item(tmp_path: Path) -> None:
    write(tmp_path, uniform(0, 600), shard_size=600)
    size = (tmp_path / "shard_000000.tar.index").stat().st_size
    assert size > 3 * 4096
    assert run_isolated(read_after_truncation, tmp_path, 0) == ("shard_000000.tar", 4, "its side index was truncated")


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir], ids=["pipe", "folder"])
def test_something_else_in_place_of_a_side_index_is_an_error(make: object, tmp_path: Path) -> None:
    write(tmp_path, uniform(0))
    index = tmp_path / "shard_000001.tar.index"
    index.unlink()
    make(index)  # type: ignore[operator]
    with pytest.raises(DamageError, match=r"item 4 in shard_000001\.tar: its side index .*"):
        TarSource(tmp_path).take(np.array([4]))


def test_a_missing_shard_of_very_many_is_an_error_when_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, uniform(0))
    (tmp_path / "shard_000001.tar").unlink()
    with pytest.raises(DamageError, match=r"shard_000001\.tar: the shard is missing"):
        TarSource(tmp_path)
    monkeypatch.setattr(open_dataset, "_LISTED_SHARDS", 5)
    source = TarSource(tmp_path)
    assert source.take(np.array([0, 22]))["x"].tolist() == [0, 22]
    with pytest.raises(DamageError, match=r"item 5 in shard_000001\.tar: the shard could not be opened"):
        source.take(np.array([0, 5]))
