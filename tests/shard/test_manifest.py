"""The manifest: the only commit point. It comes back as it was, or it is refused."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from penstock_test_parts import run_isolated

from penstock import TarSource
from penstock.core.errors import DamageError, PenstockError, SourceError
from penstock.shard.manifest import MANIFEST, FieldInfo, Manifest, ShardEntry, manifest_path
from tests.shard.samples import reseal, write

text = st.text(st.characters(codec="utf-8"), max_size=8)
plain = st.text(st.characters(codec="utf-8", exclude_characters="/\0"), min_size=1, max_size=12).filter(
    lambda s: s not in (".", "..")
)
infos = st.builds(
    FieldInfo,
    plain,
    st.none() | st.sampled_from([np.dtype("<f4"), np.dtype(">i8"), np.dtype([("a", "<U3"), ("b", "<f8", (2,))])]),
    st.none() | st.lists(st.integers(0, 5), max_size=3).map(tuple),
)


@st.composite
def entries(draw: st.DrawFn) -> ShardEntry:
    items, blocks = draw(st.integers(1, 2**20)), draw(st.integers(8, 2**10))
    compression = draw(st.sampled_from(["none", "gz", "bz2", "xz"]))
    tar_bytes = 512 * blocks * items if compression == "none" else 512 * blocks * min(items, 2**9)
    stored_bytes = tar_bytes if compression == "none" else draw(st.integers(1, tar_bytes))
    return ShardEntry(draw(plain), min(items, tar_bytes // 512), tar_bytes, stored_bytes, draw(text), compression)


@given(
    st.dictionaries(text, infos, min_size=1, max_size=4),
    st.lists(entries(), min_size=1, max_size=4),
    st.none() | st.integers(1, 9),
    st.dictionaries(text, text | st.integers() | st.none()),
)
def test_a_manifest_comes_back_as_it_was(
    tmp_path_factory: pytest.TempPathFactory, fields: Any, shards: Any, shard_size: Any, metadata: Any
) -> None:
    path = tmp_path_factory.mktemp("set") / MANIFEST
    manifest = Manifest(path.parent, fields, tuple(shards), shard_size, "npy", metadata)
    path.write_bytes(manifest.to_bytes())
    found = Manifest.read(path)
    assert found == manifest
    assert found.fingerprint == manifest.fingerprint
    assert found.to_bytes() == manifest.to_bytes()


def test_the_manifest_lists_totals_fields_and_shards(tmp_path: Path) -> None:
    write(tmp_path, 7, metadata={"lab": "é"})
    stored = json.loads((tmp_path / MANIFEST).read_text())
    known = {
        name: stored[name]
        for name in ("total_samples", "total_shards", "shard_size", "modalities", "metadata", "compression")
    }
    assert known == {
        "total_samples": 7,
        "total_shards": 3,
        "shard_size": 3,
        "modalities": ["x", "note"],
        "metadata": {"lab": "é"},
        "compression": "none",
    }
    assert [(shard["shard_name"], shard["num_samples"]) for shard in stored["shards"]] == [
        ("shard_000000.tar", 3),
        ("shard_000001.tar", 3),
        ("shard_000002.tar", 1),
    ]


def test_a_manifest_whose_keys_another_program_sorted_is_the_same(tmp_path: Path) -> None:
    manifest = write(tmp_path, 7, metadata={"rate": 2.5, "lab": "left"})
    stored = json.loads((tmp_path / MANIFEST).read_text())
    assert list(stored) != sorted(stored)
    (tmp_path / MANIFEST).write_text(json.dumps(stored, sort_keys=True))
    assert Manifest.read(tmp_path / MANIFEST) == manifest


def test_the_fingerprint_depends_on_the_items_and_not_on_the_folder(tmp_path: Path) -> None:
    one, other = write(tmp_path / "one"), write(tmp_path / "other")
    assert one.fingerprint == other.fingerprint
    longer = write(tmp_path / "longer", 8)
    changed = write(tmp_path / "changed", make=lambda n: {"x": np.array([n, n], np.int32), "note": f"n{n}"})
    assert len({one.fingerprint, longer.fingerprint, changed.fingerprint}) == 3


# -- damage ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def stored(tmp_path: Path) -> tuple[Path, bytes]:
    path = tmp_path / MANIFEST
    shards = (ShardEntry("a.tar", 3, 4096, 4096, "00ff"), ShardEntry("b.tar", 2, 3072, 999, "ff00", "gz"))
    fields = {"x": FieldInfo("x.npy", np.dtype("<f4"), (2,)), "metadata": FieldInfo("metadata.json", None, None)}
    return path, Manifest(tmp_path, fields, shards, 3, "npy", {"lab": "left", "rate": 2.5}).to_bytes()


def test_a_flipped_bit_in_any_byte_is_refused(stored: tuple[Path, bytes]) -> None:
    path, content = stored
    for place in range(2 * len(content)):
        damaged = bytearray(content)
        # One bit of every byte, a different one from byte to byte, and the bit between lower and upper case.
        damaged[place // 2] ^= 1 << (5 if place % 2 else 3 * place // 2 % 8)
        path.write_bytes(damaged)
        with pytest.raises((DamageError, SourceError), match=MANIFEST):
            Manifest.read(path)


def test_every_shortened_manifest_is_refused(stored: tuple[Path, bytes]) -> None:
    path, content = stored
    for length in range(len(content) - 1):  # without the last byte, which ends the line, nothing is missing
        path.write_bytes(content[:length])
        with pytest.raises(DamageError, match="truncated"):
            Manifest.read(path)


@pytest.mark.parametrize(
    "content",
    [b"", b"[]", b"null", b"7", b'"text"', b"{}", b'{"total_samples": 7, "shards": []}', b"\xff\xfe", b"[" * 100_000],
)
def test_files_that_are_not_manifests_are_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / MANIFEST).write_bytes(content)
    with pytest.raises((DamageError, SourceError), match=MANIFEST):
        Manifest.read(tmp_path / MANIFEST)


def test_another_programs_manifest_is_refused_with_a_hint(tmp_path: Path) -> None:
    (tmp_path / MANIFEST).write_text('{"total_samples": 7}')
    with pytest.raises(SourceError, match="penstock index"):
        TarSource(tmp_path)


def test_a_manifest_of_another_version_is_refused(tmp_path: Path) -> None:
    write(tmp_path)
    reseal(tmp_path / MANIFEST, lambda stored: stored.update(version=2))
    with pytest.raises(SourceError, match="must be 1, got 2"):
        TarSource(tmp_path)


@pytest.mark.parametrize(
    ("prepare", "match"),
    [
        (lambda folder: None, "neither a manifest"),
        (lambda folder: (folder / "a.tar").write_bytes(b""), "penstock index"),
        (lambda folder: (folder / ".writing").mkdir(), "resume=True"),
        (lambda folder: folder.rmdir(), "the folder .* does not exist"),
    ],
    ids=["nothing", "archives", "unfinished", "no folder"],
)
def test_without_a_manifest_there_is_no_dataset(prepare: Callable[[Path], Any], match: str, tmp_path: Path) -> None:
    folder = tmp_path / "set"
    folder.mkdir()
    prepare(folder)
    with pytest.raises(SourceError, match=match):
        TarSource(folder / MANIFEST if not folder.exists() else folder)


# -- hostile, with a checksum that matches -----------------------------------------------------------------------------


def of_shard(**values: Any) -> Callable[[dict[str, Any]], None]:
    return lambda stored: stored["shards"][0].update(values)


def of_field(**values: Any) -> Callable[[dict[str, Any]], None]:
    return lambda stored: stored["fields"]["x"].update(values)


HOSTILE: dict[str, Callable[[dict[str, Any]], Any]] = {
    **{
        f"named {name!r}": of_shard(shard_name=name)
        for name in ("../a.tar", "/etc/passwd", "a/b.tar", "..", ".", "", "a\0b", 7, None)
    },
    "unknown compression": of_shard(compression="zip"),
    "compression of another type": of_shard(compression=[]),
    "less than no items": of_shard(num_samples=-3),
    "no items": of_shard(num_samples=0),
    "too many items": of_shard(num_samples=2**40),
    "absurdly many items": of_shard(num_samples=10**30),
    "infinitely many items": of_shard(num_samples=float("inf")),
    "no number of items": of_shard(num_samples=float("nan")),
    "no bytes": of_shard(stored_bytes=-1),
    "archive of less than nothing": of_shard(tar_bytes=-1),
    "endless archive": of_shard(tar_bytes=2**62),
    "no shards": lambda stored: stored.update(shards=None),
    "shards by name": lambda stored: stored.update(shards={"a": 1}),
    "an empty shard": lambda stored: stored["shards"].insert(0, {}),
    "no fields": lambda stored: stored.update(fields=None),
    "fields as a list": lambda stored: stored.update(fields=[]),
    "objects": of_field(dtype="'|O'"),
    "objects of a fixed shape": of_field(dtype="'|O'", shape=[]),
    "dtype that is code": of_field(dtype="__import__('os')"),
    "dtype of endless depth": of_field(dtype="(" * 5000),
    "dtype of endless length": of_field(dtype="-" * 100_000 + "1"),
    "unknown dtype": of_field(dtype="'zz'"),
    "shape below zero": of_field(shape=[-2]),
    "shape of terabytes": of_field(shape=[2**40]),
    "shape beyond all memory": of_field(shape=[2**62, 2**62]),
    "shape of fractions": of_field(shape=[1.5]),
    "shape of text": of_field(shape="ab"),
    "shape of a number": of_field(shape=7),
    "another shape": of_field(shape=[3]),
    "another dtype": of_field(dtype="'<f4'"),
    "a smaller dtype": of_field(dtype="'<i2'"),
    "no suffix": of_field(suffix=None),
    "a suffix that is not there": of_field(suffix="y.npy"),
    "metadata that are none": lambda stored: stored.update(metadata=7),
    "no metadata": lambda stored: stored.pop("metadata"),
}


def outcome(folder: Path) -> str:
    try:
        source = TarSource(folder)
        found = [source.take(np.array([item]))["x"] for item in (2, 0, 1)]
        source.manifest.summary()
    except PenstockError:
        return "refused"
    exact = all(array.dtype == np.int32 for array in found) and np.concatenate(found).tolist() == [
        [2, -2],
        [0, 0],
        [1, -1],
    ]
    return "exact" if exact else f"wrong: {found}"


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_hostile_manifest_is_refused_or_makes_no_difference(kind: str, tmp_path: Path) -> None:
    write(tmp_path, 3)
    reseal(tmp_path / MANIFEST, HOSTILE[kind])
    assert run_isolated(outcome, tmp_path) in ("refused", "exact")


# -- the largest claims that are believed ------------------------------------------------------------------------------


def read_claims(folder: Path, change: Callable[[dict[str, Any]], Any]) -> Manifest:
    shards = (ShardEntry("a.tar", 3, 4096, 4096, "00"), ShardEntry("b.tar", 2, 3072, 999, "ff", "gz"))
    manifest = Manifest(folder, {"x": FieldInfo("x.npy", np.dtype("<i4"), (2,))}, shards, 3, "npy", {})
    (folder / MANIFEST).write_bytes(manifest.to_bytes())
    reseal(folder / MANIFEST, change)
    return Manifest.read(folder / MANIFEST)


@pytest.mark.parametrize(
    ("claim", "more"),
    [
        (of_field(shape=[1024]), of_field(shape=[1025])),  # as large as the largest shard
        (of_shard(num_samples=8), of_shard(num_samples=9)),  # a tar block each
        (of_shard(num_samples=1), of_shard(num_samples=0)),
        (
            of_shard(compression="gz", stored_bytes=1, tar_bytes=1 << 30),
            of_shard(compression="gz", stored_bytes=1, tar_bytes=(1 << 30) + 1),
        ),
        (
            of_shard(compression="gz", stored_bytes=1 << 30, tar_bytes=100 << 30),
            of_shard(compression="gz", stored_bytes=1 << 30, tar_bytes=(100 << 30) + 1),
        ),
        (
            of_shard(compression="gz", stored_bytes=2**63 - 1, tar_bytes=2**63 - 1),
            of_shard(compression="gz", stored_bytes=2**63, tar_bytes=2**63 - 1),
        ),
        (of_shard(), of_shard(stored_bytes=4095)),
        (of_shard(), of_shard(stored_bytes=4097)),
        (of_field(dtype="'<i4'".ljust(1 << 14)), of_field(dtype="'<i4'".ljust((1 << 14) + 1))),
    ],
)
def test_a_claim_at_the_bound_is_believed_and_one_beyond_it_refused(
    claim: Callable[[dict[str, Any]], Any], more: Callable[[dict[str, Any]], Any], tmp_path: Path
) -> None:
    assert [shard.name for shard in read_claims(tmp_path, claim).shards] == ["a.tar", "b.tar"]
    with pytest.raises(DamageError, match="the manifest is malformed"):
        read_claims(tmp_path, more)


@pytest.mark.parametrize("part", ["shards", "fields"])
def test_a_manifest_without_shards_or_fields_is_refused(part: str, tmp_path: Path) -> None:
    with pytest.raises(DamageError, match="it must have shards, fields and metadata"):
        read_claims(tmp_path, lambda stored: stored.update({"fields": {}, part: type(stored[part])()}))


# -- files -------------------------------------------------------------------------------------------------------------


def test_a_manifest_lies_in_the_folder_or_beside_the_pattern(tmp_path: Path) -> None:
    assert manifest_path(tmp_path) == tmp_path / MANIFEST
    assert manifest_path(str(tmp_path / MANIFEST)) == tmp_path / MANIFEST
    assert manifest_path(tmp_path / "train-{0..9}.tar") == tmp_path / "train-{0..9}.tar.metadata.json"
