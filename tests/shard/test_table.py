"""The shard table: what it says equals the manifest, or it is ignored."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st
from penstock_test_parts import run_isolated

from penstock import TarSource
from penstock.shard import manifest as manifest_module
from penstock.shard import table as table_module
from penstock.shard.manifest import MANIFEST, FieldInfo, Manifest
from penstock.shard.table import ShardEntry, ShardTable, read_table, table_path
from tests.shard.samples import contents, write
from tests.shard.test_manifest import entries, infos, text

N_SHARDS = 1000
FIELDS = {"x": FieldInfo("x.npy", np.dtype("<f4"), (2,))}


def make_entry(number: int) -> ShardEntry:
    return ShardEntry(f"é{number}.tar", 1 + number % 7, 4096 + 512 * number, 4096 + 512 * number, f"{number:032x}")


def make_manifest(folder: Path, n_shards: int = N_SHARDS) -> Manifest:
    return Manifest(folder, FIELDS, tuple(make_entry(number) for number in range(n_shards)), 7, "npy", {"lab": "left"})


def store(manifest: Manifest, table: bytes | None = None) -> Path:
    """Write a manifest and its table, or another table; return the path of the manifest."""
    path, stored = manifest.folder / MANIFEST, manifest.to_bytes()
    path.write_bytes(stored)
    content = manifest.table_bytes(stored) if table is None else table
    assert content is not None
    table_path(path).write_bytes(content)
    return path


@pytest.fixture
def n_parsed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One element for each shard that is parsed from JSON."""
    found: list[int] = []
    real = manifest_module._parse_shard
    monkeypatch.setattr(manifest_module, "_parse_shard", lambda entry: (found.append(1), real(entry))[1])
    return found


def test_a_large_manifest_is_read_from_its_table(tmp_path: Path, n_parsed: list[int]) -> None:
    manifest = make_manifest(tmp_path)
    found = Manifest.read(store(manifest))
    assert found == manifest
    assert found.to_bytes() == manifest.to_bytes()
    assert n_parsed == []


def test_a_small_manifest_has_no_table(tmp_path: Path) -> None:
    assert make_manifest(tmp_path, N_SHARDS - 1).table_bytes(b"") is None


@given(
    st.dictionaries(text, infos, min_size=1, max_size=4),
    st.lists(entries(), min_size=1, max_size=4),
    st.none() | st.integers(1, 9),
    st.dictionaries(text, text | st.integers() | st.none()),
)
def test_a_table_says_what_the_manifest_says(
    tmp_path_factory: pytest.TempPathFactory, fields: Any, shards: Any, shard_size: Any, metadata: Any
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(manifest_module, "_TABLE_FROM", 1)
        manifest = Manifest(tmp_path_factory.mktemp("set"), fields, shards, shard_size, "npy", metadata)
        path = store(manifest)
        found = Manifest.read(path)
        assert found == manifest
        assert found.fingerprint == xxhash.xxh3_128_hexdigest("\n".join(entry.digest for entry in shards).encode())
        table_path(path).unlink()
        assert Manifest.read(path).to_bytes() == found.to_bytes()


def test_a_table_is_a_sequence_of_entries() -> None:
    listed = [make_entry(number) for number in range(9)]
    table = ShardTable.from_entries(listed)
    assert list(table) == listed
    assert [table[number] for number in range(-9, 9)] == listed + listed
    assert table[2:-1:3] == tuple(listed[2:-1:3])
    assert table == tuple(listed) == table
    assert table != tuple(listed[:-1])
    assert ShardTable.from_entries(listed[::-1]) != table
    assert hash(ShardTable.from_entries(tuple(listed))) == hash(table)
    assert listed[3] in table
    assert table.index(listed[4]) == 4
    with pytest.raises(IndexError):
        table[9]


# -- tables that are ignored -------------------------------------------------------------------------------------------


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, bytes]:
    monkeypatch.setattr(manifest_module, "_TABLE_FROM", 1)
    path = store(make_manifest(tmp_path, 3))
    return path, table_path(path).read_bytes()


def test_a_table_with_a_flipped_bit_is_ignored(small: tuple[Path, bytes]) -> None:
    path, content = small
    assert read_table(path) is not None
    # Every bit, or, in `make test`, a bit of every byte and each time another one.
    for place in range(0, 8 * len(content), 9 if os.environ.get("PENSTOCK_TESTS", "fast") == "fast" else 1):
        damaged = bytearray(content)
        damaged[place // 8] ^= 1 << place % 8
        table_path(path).write_bytes(damaged)
        assert read_table(path) is None, place
    assert Manifest.read(path) == make_manifest(path.parent, 3)


def test_a_truncated_or_longer_table_is_ignored(small: tuple[Path, bytes]) -> None:
    path, content = small
    for damaged in (*(content[:length] for length in range(len(content))), content + b"\0"):
        table_path(path).write_bytes(damaged)
        assert read_table(path) is None, len(damaged)


def test_the_table_of_another_manifest_is_ignored(small: tuple[Path, bytes]) -> None:
    path, content = small
    path.write_bytes(make_manifest(path.parent, 4).to_bytes())
    assert len(Manifest.read(path).shards) == 4
    # One that differs only in what has no column in the table.
    changed = Manifest(path.parent, FIELDS, make_manifest(path.parent, 3).shards, 7, "npy", {"lab": "right"})
    path.write_bytes(changed.to_bytes())
    assert Manifest.read(path).metadata == {"lab": "right"}
    assert table_path(path).read_bytes() == content, "reading changes nothing"


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir], ids=["pipe", "folder"])
def test_something_else_in_place_of_a_table_is_ignored(small: tuple[Path, bytes], make: Callable[[Path], None]) -> None:
    path, _ = small
    table_path(path).unlink()
    make(table_path(path))
    assert run_isolated(lambda path: len(Manifest.read(path).shards), path) == 3


def test_a_table_larger_than_the_manifest_is_not_read(
    small: tuple[Path, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, _ = small
    with table_path(path).open("r+b") as file:
        file.truncate(1 << 40)
    monkeypatch.setattr(table_module.os, "read", lambda *_: pytest.fail("the table was read"))
    assert len(Manifest.read(path).shards) == 3


HOSTILE: dict[str, dict[str, Any]] = {
    **{f"named {name!r}": {"name": name} for name in ("../a.tar", "/etc/passwd", "a/b.tar", "..", ".", "", "a\0b")},
    "no items": {"n_items": 0},
    "less than no items": {"n_items": -3},
    "too many items": {"n_items": 9},
    "absurdly many items": {"n_items": 2**63 - 1},
    "archive of less than nothing": {"tar_bytes": -1},
    "endless archive": {"tar_bytes": 2**62},
    "no bytes": {"stored_bytes": -1},
    "other bytes than its archive": {"stored_bytes": 4095},
    "a bomb": {"compression": "gz", "stored_bytes": 1, "tar_bytes": (1 << 30) + 1},
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_forged_table_is_ignored(kind: str, tmp_path: Path) -> None:
    manifest = make_manifest(tmp_path, 3)
    values = {"name": "a.tar", "n_items": 1, "tar_bytes": 4096, "stored_bytes": 4096, "digest": "", **HOSTILE[kind]}
    forged = ShardTable.from_entries([make_entry(0), ShardEntry(**values), make_entry(2)])
    path = store(manifest, forged.to_bytes(json.dumps(manifest._head()).encode(), manifest.to_bytes()))
    assert Manifest.read(path) == manifest


def seal(content: bytes) -> bytes:
    return content + xxhash.xxh3_128_digest(content)


@pytest.mark.parametrize(
    ("at", "values"),
    [
        (-16 - 96 - 11 * 3 - 3, b"\x04"),  # the compression of the first shard
        (-16 - 96 - 11 * 3 - 3 - 24, (-1).to_bytes(8, "little", signed=True)),  # where the first digest ends
        (-16 - 96 - 11 * 3 - 3 - 48, (1).to_bytes(8, "little")),  # where the first name ends: in a character
        (-16 - 96 - 11 * 3 - 3 - 48, (2**40).to_bytes(8, "little")),
        (-16 - 96 - 1, b"\xff"),  # the end of the last name
        (16, (2**61).to_bytes(8, "little")),  # the number of shards
        (16, (0).to_bytes(8, "little")),
        (24, (2**63).to_bytes(8, "little")),  # the length of the head
    ],
)
def test_a_forged_column_is_ignored(at: int, values: bytes, tmp_path: Path) -> None:
    listed = [ShardEntry(f"é{n}_____.tar"[:10], 1, 4096, 4096, f"{n:032x}") for n in range(3)]
    assert {len(entry.name.encode()) for entry in listed} == {11}
    manifest = Manifest(tmp_path, FIELDS, listed, 7, "npy", {})
    stored = manifest.to_bytes()
    content = bytearray(manifest.table.to_bytes(json.dumps(manifest._head()).encode(), stored))
    assert read_table(store(manifest, bytes(content))) is not None
    at %= len(content)
    content[at : at + len(values)] = values
    path = store(manifest, seal(bytes(content[:-16])))
    assert read_table(path) is None
    assert Manifest.read(path) == manifest


@pytest.mark.parametrize(
    "head", [b"", b"{", b"[" * 100_000, b"7", b"{}", b'{"format": "penstock-shards", "version": 2}', b"\xff"]
)
def test_a_forged_head_is_ignored(head: bytes, tmp_path: Path) -> None:
    manifest = make_manifest(tmp_path, 900)
    path = store(manifest, manifest.table.to_bytes(head, manifest.to_bytes()))
    assert Manifest.read(path) == manifest


def test_a_source_reads_the_same_with_a_table_and_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manifest_module, "_TABLE_FROM", 1)
    path = store(write(tmp_path))
    before = contents(tmp_path)
    with_table = TarSource(tmp_path)
    table_path(path).unlink()
    without = TarSource(tmp_path)
    assert with_table.index.digest == without.index.digest
    for source in (with_table, without):
        assert source.take(np.array([6, 0, 3]))["x"].tolist() == [[6, -6], [0, 0], [3, -3]]
    assert contents(tmp_path) == {name: content for name, content in before.items() if name != table_path(path).name}
