"""Shards in the layout "columns": damage is named with its item, its neighbours survive, and no index leads astray."""

import os
import random
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash
from penstock_test_shards import (
    ALL,
    N_ITEMS,
    SECOND,
    attempt,
    damage_of,
    facts,
    flip,
    item,
    mix_shards,
    write_items,
)

from penstock import TarSource
from penstock.shard.columns.row_index import RowIndex
from penstock.shard.manifest import MANIFEST, Manifest
from penstock.shard.side_index import index_name
from tests.suites.damage import owners

SOAK = os.environ.get("PENSTOCK_TESTS") == "soak"
EXTREME = (-(1 << 63), -(1 << 62), -512, -1, 0, 1, 511, 1 << 31, 1 << 62, (1 << 63) - 1)


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("originals")
    write_items(folder / "set", layout="columns")
    write_items(folder / "samples")
    shutil.copytree(folder / "set", folder / "mixed")
    mix_shards(folder / "mixed", folder / "samples")
    write_items(folder / "gz", layout="columns", compression="gz")
    return folder


@pytest.fixture
def folder(original: Path, tmp_path: Path) -> Path:
    shutil.copytree(original / "set", tmp_path / "set")
    return tmp_path / "set"


@pytest.mark.parametrize("fields", [None, ["x"]])
def test_a_flipped_bit_in_any_byte_is_named_with_its_item_or_makes_no_difference(
    fields: list[str] | None, folder: Path
) -> None:
    path, source = folder / SECOND, TarSource(folder, fields=fields)
    whole, own = (
        path.read_bytes(),
        owners(folder, ("x.npy", "y.npy", "metadata.json") if fields is None else ("x.npy",)),
    )
    assert len(own) == (2 * (16 + 8) + 4 if fields is None else 2 * 16)
    for place in range(len(whole)):
        if place not in own and not SOAK and place % 89:
            continue
        for bit in range(8) if SOAK and place in own else (place % 8,):
            flip(path, place, bit)
            found, error = attempt(lambda: source.take(np.array([1, 3, 2])))
            if place in own:
                assert error is not None, f"bit {bit} of byte {place}"
                assert (error.shard, error.item) == (SECOND, own[place])
                survivor = source.take(np.array([5 - own[place]]))
                assert survivor["x"][0].tobytes() == item(5 - own[place])["x"].tobytes()
            else:
                assert error is None, f"bit {bit} of byte {place}"
                assert found["x"][:, 0].tolist() == [1, 3, 2]
            flip(path, place, bit)
    assert source.take(ALL)["x"][:, 0].tolist() == list(range(N_ITEMS))


@pytest.mark.parametrize("fields", [None, ["x"]])
@pytest.mark.parametrize("verify", ["first", "always"])
def test_a_shard_that_is_written_to_or_truncated_after_it_was_read(
    fields: list[str] | None, verify: Any, folder: Path
) -> None:
    path, source = folder / SECOND, TarSource(folder, fields=fields, verify=verify)
    (place,) = [place for place, owner in owners(folder, ("x.npy",)).items() if owner == 3][:1]
    for _ in range(2):
        assert source.take(ALL)["x"][:, 0].tolist() == list(range(N_ITEMS))
    flip(path, place)
    assert damage_of(source).item == 3
    assert source.take(np.array([2, 0]))["x"][:, 0].tolist() == [2, 0]
    flip(path, place)
    assert source.take(ALL)["x"][:, 0].tolist() == list(range(N_ITEMS))
    os.truncate(path, 512)
    assert damage_of(source).shard == SECOND
    assert source.take(np.array([5, 0]))["x"][:, 0].tolist() == [5, 0]


@pytest.mark.parametrize("kind", ["set", "mixed", "gz"])
def test_metadata_keys_and_lengths_are_those_of_the_layout_of_samples(kind: str, original: Path) -> None:
    found, expected = TarSource(original / kind), TarSource(original / "samples")
    assert list(found.take(ALL)["metadata"]) == list(expected.take(ALL)["metadata"])
    assert [found.key_of(n) for n in range(N_ITEMS)] == [expected.key_of(n) for n in range(N_ITEMS)]
    lengths = found.axis_lengths("y")
    assert lengths is not None
    assert lengths.tolist() == [n % 3 for n in range(N_ITEMS)]
    for verify in ("first", "always", "never"):
        assert facts(TarSource(original / kind, verify=verify).take(ALL[::-1])) == list(range(N_ITEMS))[::-1]


@pytest.mark.parametrize("verify", ["first", "never"])
def test_a_forged_side_index_is_refused_or_leads_to_right_items(verify: Any, folder: Path) -> None:
    """Give random numbers of the index other values, with right checksums of the whole; nothing else may be read."""
    rng, index = random.Random(verify), RowIndex.from_bytes((folder / index_name(SECOND)).read_bytes(), SECOND)
    manifest, refused = Manifest.read(folder / MANIFEST), 0
    for _ in range(3000 if SOAK else 70):
        stored = forge(index, rng).to_bytes()
        (folder / index_name(SECOND)).write_bytes(stored)
        digest = xxhash.xxh3_128_hexdigest(stored)
        shards = tuple(replace(entry, digest=digest) if entry.name == SECOND else entry for entry in manifest.shards)
        (folder / MANIFEST).write_bytes(replace(manifest, shards=shards).to_bytes())
        for fields in (None, ["x"], ["y", "__key__"]):
            found, error = attempt(lambda fields=fields: TarSource(folder, fields=fields, verify=verify).take(ALL))
            refused += error is not None
            if error is not None:
                assert error.shard in (SECOND, index_name(SECOND))
            elif verify == "first" and "x" in found:
                assert found["x"][:, 0].tolist() == list(range(N_ITEMS))
    assert refused > 20


def forge(index: RowIndex, rng: random.Random) -> RowIndex:
    """Return an index with one or two other numbers."""
    for _ in range(rng.choice((1, 1, 2))):
        number = rng.randrange(len(index.columns))
        column = index.columns[number]
        name = rng.choice(("begins", "sizes", "starts", "bounds"))
        array = getattr(index if name in ("starts", "bounds") else column, name)
        if array is None:
            continue
        array = array.copy()
        place = rng.randrange(len(array))
        near = min(max(int(array[place]) + rng.choice((-64, -8, -1, 1, 8, 64)), EXTREME[0]), EXTREME[-1])
        array[place] = rng.choice((*EXTREME, near, near))
        if name in ("starts", "bounds"):
            index = replace(index, **{name: array})
        else:
            columns = list(index.columns)
            columns[number] = replace(column, **{name: array})
            index = replace(index, columns=tuple(columns))
    return index


@pytest.mark.parametrize("verify", ["first", "always"])
def test_a_side_index_that_is_rewritten_after_it_was_checked_leads_to_no_other_item(verify: Any, folder: Path) -> None:
    path, source = folder / index_name(SECOND), TarSource(folder, verify=verify)
    whole = path.read_bytes()
    assert facts(source.take(ALL)) == list(range(N_ITEMS))
    for place in range(0, len(whole), 1 if SOAK else 29):
        with path.open("r+b") as file:
            os.pwrite(file.fileno(), bytes([whole[place] ^ 2]), place)
            found, error = attempt(lambda: facts(source.take(ALL)))
            assert error is not None or found == list(range(N_ITEMS)), f"byte {place}"
            os.pwrite(file.fileno(), whole[place : place + 1], place)
    assert facts(source.take(ALL)) == list(range(N_ITEMS))
