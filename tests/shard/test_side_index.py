"""The side index: comes back as it was, is refused where a single bit of it changed, and is never trusted blindly."""

import json
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
from penstock.core.errors import DamageError, PenstockError
from penstock.shard.codec import NpyHeader
from penstock.shard.manifest import MANIFEST
from penstock.shard.parse_values import parse_dtype, parse_int
from penstock.shard.side_index import MISSING, Numbers, SideIndex, SideIndexBuilder, index_name
from penstock.shard.verify import verify_shards
from tests.shard.samples import reseal, write

dtypes = st.sampled_from(
    [np.dtype(kind) for kind in ("<f4", ">i8", "?", "<U3", "<M8[ns]")] + [np.dtype([("a", "<i4"), ("b", "<f8", (2,))])]
)


@st.composite
def side_indexes(draw: st.DrawFn) -> SideIndex:
    """Regular and irregular items, with members that some lack, arrays of one or of several shapes."""
    builder = SideIndexBuilder()
    at = 0
    uniform = draw(st.booleans())
    for number in range(draw(st.integers(1, 6))):
        builder.begin_item(b"key%d" % number)
        for suffix in draw(st.just(["x.npy", "note.txt"]) if uniform else st.permutations(["x.npy", "note.txt", "é"])):
            if not uniform and draw(st.booleans()):
                continue
            dtype, count = (np.dtype("<f4"), 150) if uniform else (draw(dtypes), draw(st.integers(0, 40)))
            size = 64 + count * dtype.itemsize
            npy = NpyHeader(dtype, (count,), fortran_order=False, data_offset=64) if suffix == "x.npy" else None
            builder.add(suffix, (at, at + 512, size), draw(st.integers(0, 2**64 - 1)), npy)
            at += 512 + -(-size // 512) * 512
    return builder.build(at + 1024)


def facts(side_index: SideIndex) -> dict[str, Any]:
    rows = np.arange(side_index.n_items)
    return {
        "items": side_index.n_items,
        "bytes": side_index.tar_bytes,
        "keys": side_index.keys.tolist(),
        "columns": [
            (
                c.suffix,
                c.begins.at(rows).tolist(),
                c.offsets.at(rows).tolist(),
                c.sizes.at(rows).tolist(),
                c.checksums.tolist(),
                c.dtype,
                c.shape,
                c.data_offset,
            )
            for c in side_index.columns
        ],
    }


@given(side_indexes())
def test_an_index_comes_back_as_it_was(side_index: SideIndex) -> None:
    stored = side_index.to_bytes()
    found = SideIndex.from_bytes(stored, "a.index")
    assert facts(found) == facts(side_index)
    assert found.to_bytes() == stored


@given(
    st.lists(st.integers(-(2**62), 2**62), min_size=1, max_size=8)
    | st.builds(lambda a, b, n: [a + b * i for i in range(n)], st.integers(0, 9), st.integers(-9, 9), st.integers(1, 9))
)
def test_numbers_equal_the_values_they_were_made_from(values: list[int]) -> None:
    numbers = Numbers.from_values(values)
    assert numbers.at(np.arange(len(values))).tolist() == values


def test_items_of_one_shape_take_two_numbers_for_an_array() -> None:
    def size(n_items: int) -> int:
        builder = SideIndexBuilder()
        header = NpyHeader(np.dtype("<f4"), (8,), fortran_order=False, data_offset=64)
        for number in range(n_items):
            builder.begin_item(b"%d" % number)
            builder.add("x.npy", (1024 * number, 1024 * number + 512, 96), number, header)
        return len(builder.build(1024 * n_items + 1024).to_bytes())

    assert size(1010) - size(1000) <= 10 * 16 + 8  # a key and a checksum each


def test_an_item_without_a_member_is_marked() -> None:
    builder = SideIndexBuilder()
    for number, suffixes in enumerate((["a"], ["a", "b"], ["a"])):
        builder.begin_item(b"%d" % number)
        for suffix in suffixes:
            builder.add(suffix, (number * 2048, number * 2048 + 512, 5), 7, None)
    columns = {column.suffix: column for column in builder.build(10_000).columns}
    assert columns["b"].begins.at(np.arange(3)).tolist() == [MISSING, 2048, MISSING]


def test_the_index_lies_beside_the_shard() -> None:
    assert index_name("shard_000001.tar") == "shard_000001.tar.index"


# -- damage ------------------------------------------------------------------------------------------------------------


def small() -> bytes:
    builder = SideIndexBuilder()
    header = NpyHeader(np.dtype("<f4"), (8,), fortran_order=False, data_offset=64)
    for number in range(2):
        builder.begin_item(b"%d" % number)
        builder.add("x.npy", (1024 * number, 1024 * number + 512, 96), number, header)
    return builder.build(3072).to_bytes()


def test_every_flipped_bit_is_refused() -> None:
    stored = small()
    for bit in range(8 * len(stored)):
        damaged = bytearray(stored)
        damaged[bit // 8] ^= 1 << bit % 8
        with pytest.raises(DamageError, match=r"a\.index"):
            SideIndex.from_bytes(bytes(damaged), "a.index")


def test_every_shortened_or_lengthened_index_is_refused() -> None:
    stored = small()
    for length in range(len(stored)):
        with pytest.raises(DamageError, match=r"a\.index"):
            SideIndex.from_bytes(stored[:length], "a.index")
    with pytest.raises(DamageError, match="checksum"):
        SideIndex.from_bytes(stored + b"\0", "a.index")


# -- hostile, with a checksum that matches -----------------------------------------------------------------------------


def sealed(stored: bytes, change: Callable[[dict[str, Any]], Any], cut: int = 0) -> bytes:
    """Return an index with another header, and a checksum that matches."""
    length = int.from_bytes(stored[16:24], "little")
    head = json.loads(stored[24 : 24 + length])
    changed = change(head)
    text = (changed if isinstance(changed, bytes) else json.dumps(head).encode()).ljust(8)
    text += b" " * (-len(text) % 8)
    body = stored[:16] + len(text).to_bytes(8, "little") + text + stored[24 + length : -16 - cut]
    return body + xxhash.xxh3_128_digest(body)


def of_column(**values: Any) -> Callable[[dict[str, Any]], None]:
    return lambda head: head["columns"][0].update(values)


def of_head(**values: Any) -> Callable[[dict[str, Any]], None]:
    return lambda head: head.update(values)


HOSTILE: dict[str, Callable[[dict[str, Any]], Any]] = {
    "more items than numbers": of_head(items=3),
    "billions of items": of_head(items=2**40),
    "less than no items": of_head(items=-1),
    "far less than no items": of_head(items=-(2**40)),
    "a fraction of an item": of_head(items=1.5),
    "items as text": of_head(items="2"),
    "no columns": of_head(columns=None),
    "columns as text": of_head(columns="abc"),
    "archive of no size": of_head(tar_bytes=0),
    "archive of a text": of_head(tar_bytes="large"),
    "begins below zero": of_column(begins=[-5, 1024]),
    "begins beyond the end": of_column(begins=[10**7, 1024], offsets=[10**7 + 512, 1024]),
    "begins after the payload": of_column(begins=[1024, 0]),
    "steps that overflow": of_column(begins=[0, 2**63], offsets=[512, 2**63]),
    "steps that wrap around": of_column(begins=[0, 2**62], offsets=[512, 2**62]),
    "a first number of many digits": of_column(offsets=[10**30, 1024]),
    "sizes below zero": of_column(sizes=[-1, 0]),
    "sizes beyond the end": of_column(sizes=[10**9, 0]),
    "sizes that wrap around": of_column(sizes=[2**63 - 1, 0]),
    "numbers as text": of_column(sizes=["a", "b"]),
    "one number": of_column(sizes=[1]),
    "infinite": of_column(sizes=[float("inf"), 0]),
    "suffix of another type": of_column(suffix=7),
    "objects": of_column(dtype="'|O'"),
    "objects in a field": of_column(dtype="[('a', '|O')]"),
    "dtype that is no text": of_column(dtype=7),
    "dtype that is code": of_column(dtype="__import__('os')"),
    "dtype of endless depth": of_column(dtype="[" * 5000),
    "dtype of endless length": of_column(dtype="-" * 100_000 + "1"),
    "unknown dtype": of_column(dtype="'zz'"),
    "shape that is no list": of_column(shape=7),
    "shape of text": of_column(shape="ab"),
    "shape below zero": of_column(shape=[-8]),
    "shape larger than the payload": of_column(shape=[2**40]),
    "shape smaller than the payload": of_column(shape=[4]),
    "data before the payload": of_column(data_offset=-64),
    "data after the payload": of_column(data_offset=4096),
    "data offset as text": of_column(data_offset="64"),
    "no header": lambda _: b"",
    "a list": lambda _: b"[]",
    "no JSON": lambda _: b"{",
    "endless depth": lambda _: b"[" * 200_000,
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_hostile_index_is_refused(kind: str) -> None:
    with pytest.raises(DamageError, match=r"a\.index"):
        SideIndex.from_bytes(sealed(small(), HOSTILE[kind]), "a.index")


def test_integers_have_64_bits_and_descriptions_of_dtypes_16_384_letters() -> None:
    assert [parse_int(value) for value in (-(2**63), 2**63 - 1)] == [-(2**63), 2**63 - 1]
    assert parse_int(3, 3) == 3
    for wrong in ((2**63,), (-(2**63) - 1,), (2, 3)):
        with pytest.raises(ValueError, match="must be a 64-bit integer"):
            parse_int(*wrong)
    assert parse_dtype("'<f4'".ljust(16_384)) == np.dtype("<f4")
    with pytest.raises(ValueError, match="invalid dtype"):
        parse_dtype("'<f4'".ljust(16_385))


def test_a_header_longer_than_the_index_is_refused() -> None:
    stored = small()
    body = stored[:16] + (2**63 - 1).to_bytes(8, "little") + stored[24:-16]
    with pytest.raises(DamageError, match=r"a\.index"):
        SideIndex.from_bytes(body + xxhash.xxh3_128_digest(body), "a.index")


def test_the_resealed_index_is_valid() -> None:
    assert SideIndex.from_bytes(sealed(small(), lambda _: None), "a.index").n_items == 2


def plant(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Put a hostile index into a dataset, and a manifest that lists it."""
    path = folder / "shard_000000.tar.index"
    path.write_bytes(sealed(path.read_bytes(), change))
    digest = xxhash.xxh3_128_hexdigest(path.read_bytes())
    reseal(folder / MANIFEST, lambda stored: stored["shards"][0].update(index_digest=digest))


def planted(change: dict[str, Any], column: int) -> Callable[[dict[str, Any]], Any]:
    def apply(head: dict[str, Any]) -> None:
        head.update({name: value for name, value in change.items() if name == "tar_bytes"})
        head["columns"][column].update({name: value for name, value in change.items() if name != "tar_bytes"})

    return apply


def outcome_of_reading(folder: Path) -> str:
    try:
        source = TarSource(folder)
        found = [source.take(np.array([item]))["x"].tolist() for item in range(3)]
        found.append(source.take(np.arange(3))["x"].tolist())
    except PenstockError:
        return "refused"
    exact = [[[0, 0]], [[1, -1]], [[2, -2]], [[0, 0], [1, -1], [2, -2]]]
    return "exact" if found == exact else f"wrong: {found}"


# The members of the first column are x.npy, (2,) of int32: 8 bytes after a header of 128; of the second, note.txt.
@pytest.mark.parametrize(
    ("change", "column"),
    [
        ({"tar_bytes": 2**50, "sizes": [2**45, 0]}, 1),
        ({"tar_bytes": 2**50, "sizes": [2**45, 0]}, 0),
        ({"shape": [2**40]}, 0),
        ({"shape": [1]}, 0),
        ({"shape": [3]}, 0),
        ({"data_offset": 0, "shape": [34]}, 0),
        ({"data_offset": -8, "shape": [36]}, 0),
        ({"dtype": "'<i8'"}, 0),
        ({"dtype": "'|O'"}, 0),
        ({"sizes": [10**6, 0], "tar_bytes": 10**9}, 1),
    ],
    ids=str,
)
def test_a_hostile_index_takes_no_memory_and_gives_no_wrong_items(
    change: dict[str, Any], column: int, tmp_path: Path
) -> None:
    write(tmp_path, 3, compression="none")
    plant(tmp_path, planted(change, column))
    assert run_isolated(outcome_of_reading, tmp_path) in ("refused", "exact")


@pytest.mark.parametrize(
    ("shape", "dtype", "data_offset"),
    [
        ([1], "<i4", 128),
        ([3], "<i4", 128),
        ([2], "<i2", 128),
        ([2], "<i8", 128),
        ([2**40], "<i4", 128),
        ([2], "<i4", 127),
    ],
    ids=str,
)
def test_an_index_and_a_manifest_with_the_same_lie_give_no_wrong_items(
    shape: list[int], dtype: str, data_offset: int, tmp_path: Path
) -> None:
    write(tmp_path, 3)
    plant(tmp_path, planted({"shape": shape, "dtype": repr(dtype), "data_offset": data_offset}, 0))
    reseal(tmp_path / MANIFEST, lambda stored: stored["fields"]["x"].update(shape=shape, dtype=repr(dtype)))
    assert run_isolated(outcome_of_reading, tmp_path) in ("refused", "exact")


def damaged_shards(folder: Path) -> set[str]:
    try:
        return {problem.shard for problem in verify_shards(folder)[1]}
    except DamageError as error:
        return {error.shard}


@pytest.mark.parametrize("compression", ["none", "gz"])
def test_members_that_overlap_are_found_by_verify(compression: str, tmp_path: Path) -> None:
    write(tmp_path, 3, compression=compression)
    plant(tmp_path, planted({"begins": [0, 0], "offsets": [512, 0]}, 1))
    assert run_isolated(damaged_shards, tmp_path) == {"shard_000000.tar"}


def test_members_that_overlap_are_reported_with_their_item(tmp_path: Path) -> None:
    # Metadata of item 1, moved into its array.
    write(tmp_path, 3)
    plant(tmp_path, planted({"begins": [2048, 1536], "offsets": [2560, 1536]}, 2))
    assert [(problem.item, problem.reason) for problem in verify_shards(tmp_path)[1]] == [
        (1, "the side index has overlapping members")
    ]
