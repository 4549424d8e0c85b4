"""Side indexes with right checksums that point anywhere: DamageError that names shard and item, whoever notices.

Python checks a side index before it is used; with that check switched off, the C part must refuse the same by itself.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from penstock_guarded_maps import GuardedMap, guarded_array

import penstock as ps
from penstock.core.errors import DamageError
from penstock.files.regular import read_regular
from penstock.files.spans.remote_folder import RemoteFolder
from penstock.shard.manifest import MANIFEST, Manifest, manifest_path
from penstock.shard.shard_file import make_entry
from penstock.shard.side_index import Column, Numbers, SideIndex, _parse_head, index_name
from penstock.source.tar import open_shards

N = 4
Forge = Callable[[Column, int], dict[str, Numbers]]

# Where the members lie, given the true column and the size of the archive.
FORGED: dict[str, Forge] = {
    "a member of 8 bytes at the start": lambda column, size: at(column, 0, 0, 8),
    "a member of 63 bytes at the start": lambda column, size: at(column, 0, 1, 62),
    "a member of 64 bytes at the start": lambda column, size: at(column, 0, 0, 64),
    "a member of 240 bytes at the start": lambda column, size: at(column, 0, 40, 200),
    "no bytes at the start": lambda column, size: at(column, 0, 0, 0),
    "no bytes at the end": lambda column, size: at(column, size, size, 0),
    "a member of 8 bytes at the end": lambda column, size: at(column, size - 8, size - 8, 8),
    "a member of 512 bytes that ends beyond the end": lambda column, size: at(column, size - 511, size - 10, 11),
    "before the start": lambda column, size: at(column, -512, 0, 136),
    "far before the start": lambda column, size: at(column, -(1 << 62), -(1 << 62) + 512, 136),
    "beyond the end": lambda column, size: at(column, size - 512, size, 136),
    "far beyond the end": lambda column, size: at(column, 1 << 62, (1 << 62) + 512, 136),
    "at the largest number": lambda column, size: at(column, (1 << 63) - 1024, (1 << 63) - 512, 136),
    "of a negative size": lambda column, size: at(column, 0, 512, -136),
    "of the largest size": lambda column, size: at(column, 0, 512, (1 << 63) - 1024),
    "data before the header": lambda column, size: at(column, 1024, 512, 136),
    "a step that overflows": lambda column, size: {
        "begins": Numbers(0, 1 << 61),
        "offsets": Numbers(512, 1 << 61),
        "sizes": column.sizes,
    },
}


def at(column: Column, begin: int, offset: int, size: int) -> dict[str, Numbers]:
    """Return the places of a column whose items all lie at one place."""
    del column
    return {"begins": Numbers(begin, 0), "offsets": Numbers(offset, 0), "sizes": Numbers(size, 0)}


def spread(places: dict[str, Numbers]) -> dict[str, Numbers]:
    """Return the same numbers one by one, as they are stored for members of varying size; the first item is true."""
    rows = np.arange(N)
    with np.errstate(over="ignore"):
        return {name: Numbers(0, 0, numbers.at(rows)) for name, numbers in places.items()}


def forge(folder: Path, places: dict[str, Numbers]) -> str:
    """Give the members of x other places, with the checksums that belong to them; return the name of the shard."""
    manifest = Manifest.read(manifest_path(folder))
    entry = manifest.shards[0]
    side_index = SideIndex.from_bytes(read_regular(folder / index_name(entry.name)), entry.name)
    columns = tuple(replace(column, **places) if column.suffix == "x.npy" else column for column in side_index.columns)
    forged = replace(side_index, columns=columns)
    stored = forged.to_bytes()
    (folder / index_name(entry.name)).write_bytes(stored)
    shards = (make_entry(folder / entry.name, forged, stored, "none"),)
    (folder / MANIFEST).write_bytes(replace(manifest, shards=shards).to_bytes())
    return entry.name


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    """Four items in one shard; x is the number of the item."""
    ps.create_shards_from_arrays(tmp_path / "shards", {"x": np.arange(N)}, shard_size=N)
    return tmp_path / "shards"


def read_all(place: Path | str, verify: Any) -> Any:
    return ps.TarSource(place, fields=("x",), verify=verify).take(np.arange(N))


@pytest.fixture(params=["folder", "URL"])
def place(request: pytest.FixtureRequest, shards: Path, monkeypatch: pytest.MonkeyPatch) -> Path | str:
    """The dataset, by its path or its URL; reading a byte outside of what was mapped or fetched ends the process."""
    if request.param == "folder":
        monkeypatch.setattr(open_shards, "FileMap", GuardedMap)
        return shards
    get, maps = RemoteFolder.get, []

    def get_guarded(self: RemoteFolder, spans: Any) -> list[Any]:
        found = []
        for content in get(self, spans):
            guarded, whole = guarded_array(len(content))
            guarded[:] = content
            found.append(guarded)
            maps.append(whole)
        return found

    monkeypatch.setattr(RemoteFolder, "get", get_guarded)
    return f"file://{shards}"


@pytest.mark.parametrize("is_spread", [False, True], ids=["regular", "varying"])
@pytest.mark.parametrize("what", FORGED)
def test_python_refuses_a_forged_side_index(what: str, is_spread: bool, shards: Path, place: Path | str) -> None:
    column, size = column_of(shards)
    places = FORGED[what](column, size)
    name = forge(shards, spread(places) if is_spread else places)
    for verify in ("first", "never"):
        with pytest.raises(DamageError, match=rf"item 0 in {name}.*'x\.npy'"):
            read_all(place, verify)


# For sizes that vary, Python makes a target first, and there is none of these sizes.
BEFORE_C = [(what, True) for what in ("of a negative size", "of the largest size")]


@pytest.mark.parametrize("verify", ["first", "never"])
@pytest.mark.parametrize(
    ("what", "is_spread"),
    [case for what in FORGED for case in ((what, False), (what, True)) if case not in BEFORE_C],
)
def test_the_c_part_refuses_it_without_the_check_of_python(
    what: str, is_spread: bool, verify: str, *, shards: Path, place: Path | str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Column, "validate", lambda *_: None)
    _parse_head.cache_clear()
    column, size = column_of(shards)
    places = FORGED[what](column, size)
    name = forge(shards, spread(places) if is_spread else places)
    damage = None
    try:
        found = read_all(place, verify)
    except DamageError as error:
        damage = error
    _parse_head.cache_clear()
    if damage is None:  # without verification, bytes inside of the shard may be taken for those of an item
        assert verify == "never"
        assert len(found["x"]) == N
    else:
        assert damage.shard == name
        assert damage.item in range(N)


def test_keys_are_not_read_from_anywhere(shards: Path, place: Path | str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Column, "validate", lambda *_: None)
    column, size = column_of(shards)
    for places in (at(column, -512, 0, 136), at(column, size - 8, size + 504, 136), at(column, 0, size + 1, 136)):
        _parse_head.cache_clear()
        name = forge(shards, places)
        with pytest.raises(DamageError, match=f"item 2 in {name}"):
            ps.TarSource(place, fields=("x",)).key_of(2)
    _parse_head.cache_clear()


def column_of(folder: Path) -> tuple[Column, int]:
    """Return the column of x, and the size of the archive."""
    manifest = Manifest.read(manifest_path(folder))
    name = manifest.shards[0].name
    side_index = SideIndex.from_bytes(read_regular(folder / index_name(name)), name)
    return next(column for column in side_index.columns if column.suffix == "x.npy"), side_index.tar_bytes
