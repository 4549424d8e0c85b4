"""Stored damage in any bit and any file: the right error with shard and item, or an exact substitute, never silence."""

import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import penstock_test_shards
import pytest
from penstock_test_parts import run_isolated
from penstock_test_shards import (
    ALL,
    ITEM_BYTES,
    N_ITEMS,
    SECOND,
    SHARD_SIZE,
    attempt,
    damage_of,
    facts,
    flip,
    read_quarantine,
    write_items,
)

from penstock import TarSource
from penstock.core.errors import DamageError
from penstock.shard.manifest import MANIFEST
from penstock.shard.verify import verify_shards

SOAK = os.environ.get("PENSTOCK_TESTS") == "soak"
originals = penstock_test_shards.originals
folder = penstock_test_shards.folder
packed = penstock_test_shards.packed


# -- bits --------------------------------------------------------------------------------------------------------------


def test_a_flipped_bit_in_any_byte_of_any_member_is_named_with_its_item(folder: Path) -> None:
    path, source = folder / SECOND, TarSource(folder)
    whole = path.read_bytes()
    assert len(whole) == SHARD_SIZE * ITEM_BYTES + 1024
    found = (SECOND, -1)
    for place in range(SHARD_SIZE * ITEM_BYTES):
        for bit in range(8) if SOAK or place % 97 == 0 else (place % 8,):
            flip(path, place, bit)
            if place % 97 == 0:
                source.close()  # otherwise, it is still open, and was never read without an error
            try:
                source.take(np.array([2, 3]))
            except DamageError as error:
                found = (error.shard, error.item or -1)
            assert found == (SECOND, 2 + place // ITEM_BYTES), f"bit {bit} of byte {place}"
            flip(path, place, bit)
            found = (SECOND, -1)
    assert path.read_bytes() == whole
    source.close()
    assert facts(source.take(ALL)) == list(range(N_ITEMS))


def test_a_flipped_bit_is_found_for_any_fields_and_only_in_its_item(folder: Path) -> None:
    source = TarSource(folder, fields=["x"])
    flip(folder / SECOND, ITEM_BYTES + 700)  # item 3, its x
    for items in ([3], [3, 3], [5, 3, 0], [0, 1, 2, 3, 4, 5], [2, 3] * 40):
        assert damage_of(source, items).item == 3
    assert source.take(np.array([0, 1, 2, 4, 5]))["x"][:, 0].tolist() == [0, 1, 2, 4, 5]
    assert TarSource(folder, fields=["y", "metadata"]).take(ALL)["metadata"][3]["number"] == 3


def test_a_flipped_bit_in_any_byte_gives_the_healthy_items_and_the_same_substitute_each_time(folder: Path) -> None:
    path = folder / SECOND
    substitutes: dict[int, set[int]] = {2: set(), 3: set()}
    for place in range(0, SHARD_SIZE * ITEM_BYTES, 1 if SOAK else 23):
        flip(path, place, place % 8)
        bad = 2 + place // ITEM_BYTES
        found = facts(TarSource(folder, on_error="substitute").take(ALL))
        substitutes[bad].add(found[bad])
        assert found[bad] != bad
        assert [found[n] for n in range(N_ITEMS) if n != bad] == [n for n in range(N_ITEMS) if n != bad]
        assert read_quarantine(folder) == [(bad, SECOND)]
        (folder / "quarantine.jsonl").unlink()
        flip(path, place, place % 8)
    assert all(len(found) == 1 for found in substitutes.values())
    assert facts(TarSource(folder, on_error="substitute").take(ALL)) == list(range(N_ITEMS))
    assert read_quarantine(folder) == []


@pytest.mark.parametrize("verify", ["first", "always"])
def test_damage_is_found_in_every_epoch(verify: Any, folder: Path) -> None:
    source = TarSource(folder, verify=verify)
    flip(folder / SECOND, 600)
    for _ in range(3):
        assert damage_of(source).item == 2
        assert facts(source.take(np.array([3, 5]))) == [3, 5]


def test_any_damaged_byte_of_a_compressed_shard_is_named_or_makes_no_difference(packed: Path) -> None:
    path, source = packed / SECOND, TarSource(packed)
    for place in range(path.stat().st_size):
        for bit in range(8) if SOAK else (place % 8,):
            flip(path, place, bit)
            source.close()
            found, error = attempt(lambda: facts(source.take(ALL)))
            if error is None:
                assert found == list(range(N_ITEMS)), f"bit {bit} of byte {place}"
            else:
                assert (error.shard, error.item in (2, 3)) == (SECOND, True), f"bit {bit} of byte {place}"
            flip(path, place, bit)


def test_a_damaged_compressed_shard_is_substituted_item_by_item(packed: Path) -> None:
    flip(packed / SECOND, packed.joinpath(SECOND).stat().st_size // 2)
    found = facts(TarSource(packed, on_error="substitute").take(ALL))
    assert [found[n] for n in (0, 1, 4, 5)] == [0, 1, 4, 5]
    assert not {2, 3} & set(found)
    assert sorted(read_quarantine(packed)) == [(2, SECOND), (3, SECOND)]


@pytest.mark.parametrize("place", [0, 20, 100, -1, -10])
def test_a_damaged_index_is_named(place: int, folder: Path) -> None:
    size = (folder / f"{SECOND}.index").stat().st_size
    flip(folder / f"{SECOND}.index", place % size)
    error = damage_of(TarSource(folder))
    assert error.shard.startswith(SECOND)
    assert error.item == 2
    assert facts(TarSource(folder).take(np.array([0, 1, 4, 5]))) == [0, 1, 4, 5]


# -- files -------------------------------------------------------------------------------------------------------------


def lengths(total: int) -> list[int]:
    return sorted({*range(0, total, 512), 1, 100, 513, 1023, 1025, 3000, total - 1, total - 513})


def test_a_shard_truncated_anywhere_is_named(folder: Path) -> None:
    path, source = folder / SECOND, TarSource(folder)
    whole = path.read_bytes()
    for length in lengths(len(whole)):
        path.write_bytes(whole[:length])
        source.close()
        error = damage_of(source)
        assert (error.shard, error.item) == (SECOND, 2), f"{length} bytes"
        assert error.reason == f"truncated: {length} bytes, but {len(whole)} were written"
        found = facts(TarSource(folder, on_error="substitute").take(ALL))
        assert [found[n] for n in (0, 1, 4, 5)] == [0, 1, 4, 5]
        assert not {2, 3} & set(found)


def test_a_compressed_shard_truncated_anywhere_is_named(packed: Path) -> None:
    path, source = packed / SECOND, TarSource(packed)
    whole = path.read_bytes()
    for length in range(0, len(whole), 13):
        path.write_bytes(whole[:length])
        source.close()
        error = damage_of(source)
        assert (error.shard, error.item) == (SECOND, 2), f"{length} bytes"


def test_a_shard_that_grew_is_named(folder: Path) -> None:
    with (folder / SECOND).open("ab") as file:
        file.write(bytes(512))
    assert (damage_of(TarSource(folder)).shard, damage_of(TarSource(folder)).item) == (SECOND, 2)


def test_a_missing_shard_is_named_before_anything_is_read(folder: Path) -> None:
    (folder / SECOND).unlink()
    with pytest.raises(DamageError, match="is missing") as caught:
        TarSource(folder)
    assert caught.value.shard == SECOND


def test_a_shard_that_goes_missing_later_is_named(folder: Path) -> None:
    source = TarSource(folder)
    (folder / SECOND).unlink()
    assert (damage_of(source).shard, damage_of(source).item) == (SECOND, 2)
    assert facts(source.take(np.array([0, 5]))) == [0, 5]


def test_a_missing_index_is_named(folder: Path) -> None:
    (folder / f"{SECOND}.index").unlink()
    error = damage_of(TarSource(folder))
    assert (error.shard, error.item) == (SECOND, 2)


def reading_a_pipe(folder: Path) -> str:
    (folder / SECOND).unlink()
    os.mkfifo(folder / SECOND)
    try:
        TarSource(folder).take(ALL)
    except DamageError as error:
        return error.shard
    return "read"


def test_a_pipe_in_place_of_a_shard_does_not_hang(folder: Path) -> None:
    assert run_isolated(reading_a_pipe, folder) == SECOND


def swap(folder: Path, name: str, other: str) -> None:
    (folder / name).rename(folder / "aside")
    (folder / other).rename(folder / name)
    (folder / "aside").rename(folder / other)


@pytest.mark.parametrize("kind", ["none", "gz", "xz"])
@pytest.mark.parametrize("suffixes", [("",), (".index",), ("", ".index")], ids=["shards", "indexes", "both"])
def test_two_shards_that_were_swapped_are_named(
    kind: str, suffixes: tuple[str, ...], originals: Path, tmp_path: Path
) -> None:
    shutil.copytree(originals / kind, tmp_path / "set")
    folder = tmp_path / "set"
    for suffix in suffixes:
        swap(folder, f"{SECOND}{suffix}", f"shard_000002.tar{suffix}")
    source = TarSource(folder)
    for name, numbers in ((SECOND, (2, 3)), ("shard_000002.tar", (4, 5))):
        for number in numbers:
            error = damage_of(source, [number])
            assert error.shard.startswith(name)
            assert error.item == number
    assert facts(source.take(np.array([1, 0]))) == [1, 0]


@pytest.mark.parametrize("suffixes", [("",), ("", ".index")], ids=["shard", "with its index"])
def test_a_shard_of_another_dataset_is_named(suffixes: tuple[str, ...], folder: Path, originals: Path) -> None:
    for suffix in suffixes:
        shutil.copyfile(originals / "other" / f"{SECOND}{suffix}", folder / f"{SECOND}{suffix}")
    source = TarSource(folder)
    assert (damage_of(source, [3]).shard.startswith(SECOND), damage_of(source, [3]).item) == (True, 3)
    found = facts(TarSource(folder, on_error="substitute").take(ALL))
    assert not {2, 3} & set(found)


def test_a_manifest_older_than_its_shards_is_noticed(folder: Path, originals: Path) -> None:
    manifest = (folder / MANIFEST).read_bytes()
    write_items(folder, salt=100, overwrite=True)
    (folder / MANIFEST).write_bytes(manifest)
    source = TarSource(folder)
    for number in range(N_ITEMS):
        error = damage_of(source, [number])
        assert (error.shard.startswith(f"shard_{number // 2:06d}.tar"), error.item) == (True, number)


@pytest.mark.parametrize("length", [0, 1, 100, -2])
def test_a_truncated_manifest_is_refused(length: int, folder: Path) -> None:
    path = folder / MANIFEST
    path.write_bytes(path.read_bytes()[:length])
    with pytest.raises(DamageError, match=MANIFEST):
        TarSource(folder)


def test_verify_and_reading_report_the_same_damage(folder: Path) -> None:
    flip(folder / SECOND, 5)
    (folder / "shard_000002.tar").write_bytes(b"")
    found = {(problem.shard, problem.item) for problem in verify_shards(folder)[1]}
    assert (SECOND, 2) in found
    assert {shard for shard, _ in found} == {SECOND, "shard_000002.tar"}
