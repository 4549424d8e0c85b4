"""Stored damage in any bit and any file: the right error with shard and item, or an exact substitute, never silence."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import penstock_test_shards
import pytest
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
)

from penstock import TarSource
from penstock.core.errors import DamageError

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


# -- files -------------------------------------------------------------------------------------------------------------


def lengths(total: int) -> list[int]:
    return sorted({*range(0, total, 512), 1, 100, 513, 1023, 1025, 3000, total - 1, total - 513})


def test_a_shard_that_goes_missing_later_is_named(folder: Path) -> None:
    source = TarSource(folder)
    (folder / SECOND).unlink()
    assert (damage_of(source).shard, damage_of(source).item) == (SECOND, 2)
    assert facts(source.take(np.array([0, 5]))) == [0, 5]
