"""Damaged, wrong or hostile metadata raise an error that names the file, and nothing is allocated."""

import json
import tempfile
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from hypothesis import given
from hypothesis import strategies as st

from penstock import PenstockError, ReadError, SourceError, Span
from penstock.source.stored.source import ZarrSource

DATA = np.arange(1, 41, dtype="i4").reshape(10, 4)
FILES = {2: ".zarray", 3: "zarr.json"}


def write(path: Path, version: int, **options: Any) -> Path:
    """Write an array; return its metadata file."""
    options = {"zarr_format": version, "chunks": (4, 4), "fill_value": 0, **options}
    zarr.create_array(path, shape=DATA.shape, dtype=DATA.dtype, **options)[...] = DATA
    return path / FILES[version]


def refused(file: Path) -> str:
    """Check that opening an array fails with an error that names it, using little memory; return the message."""
    tracemalloc.start()
    try:
        with pytest.raises(SourceError, match=rf"{file.parent.name}") as caught:
            ZarrSource(file.parent)
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()
    return str(caught.value)


# -- no description at all ---------------------------------------------------------------------------------------------

CONTENTS: dict[str, bytes] = {
    "empty": b"",
    "no JSON": b"chunks: 4",
    "no text": b"\xff\xfe\x00\x01" * 9,
    "a list": b"[]",
    "a number": b"3",
    "null": b"null",
    "nothing in it": b"{}",
    "very deep": b"[" * 200_000,
    "a number of many digits": b'{"shape": [' + b"9" * 6000 + b"]}",
}


@pytest.mark.parametrize("content", CONTENTS.values(), ids=CONTENTS)
@pytest.mark.parametrize("version", FILES)
def test_content_that_is_not_metadata_is_refused(tmp_path: Path, version: int, content: bytes) -> None:
    file = write(tmp_path / "a", version)
    file.write_bytes(content)
    with pytest.raises(
        SourceError, match=rf"a/{file.name} must hold the metadata of a zarr array|must be a zarr array"
    ):
        ZarrSource(tmp_path, ["a"])


@pytest.mark.parametrize("version", FILES)
def test_metadata_truncated_anywhere_are_refused(tmp_path: Path, version: int) -> None:
    file = write(tmp_path / "a", version)
    whole = file.read_bytes().rstrip()
    for size in range(0, len(whole), 13):
        file.write_bytes(whole[:size])
        with pytest.raises(SourceError, match=rf"a/{file.name} must hold the metadata"):
            ZarrSource(tmp_path, ["a"])
    file.write_bytes(whole)
    assert ZarrSource(tmp_path, ["a"]).read(Span(0, 10))["a"].tobytes() == DATA.tobytes()


# -- wrong values ------------------------------------------------------------------------------------------------------

Change = Callable[[dict[str, Any]], Any]


def set_at(*keys: Any) -> Change:
    """Return a function that sets the value at a path of keys."""
    *path, last, value = keys

    def change(content: Any) -> None:
        for key in path:
            content = content[key]
        content[last] = value

    return change


WRONG_2: dict[str, Change] = {
    "shape of text": set_at("shape", ["10", "4"]),
    "shape that is a number": set_at("shape", 10),
    "shape with a fraction": set_at("shape", [10.0, 4]),
    "shape with truth": set_at("shape", [True, 4]),
    "negative shape": set_at("shape", [-10, 4]),
    "shape beyond all numbers": set_at("shape", [10**30, 4]),
    "shape of more numbers than there are": set_at("shape", [1 << 31, 1 << 31]),
    "no shape": lambda content: content.pop("shape"),
    "no axes": lambda content: content.update(shape=[], chunks=[]),
    "another number of axes": set_at("chunks", [4]),
    "chunks of 0": set_at("chunks", [0, 4]),
    "negative chunks": set_at("chunks", [4, -4]),
    "no chunks": lambda content: content.pop("chunks"),
    "null chunks": set_at("chunks", None),
    "unknown type": set_at("dtype", "<q7"),
    "no type": lambda content: content.pop("dtype"),
    "compressor of text": set_at("compressor", "zstd"),
    "compressor without name": set_at("compressor", {"level": 3}),
    "separator of text": set_at("dimension_separator", "../"),
    "separator that is a number": set_at("dimension_separator", 5),
    "fill value of a list": set_at("fill_value", {}),
    "fill value that does not fit": set_at("fill_value", 1 << 80),
}
_SHARDS = ("codecs", 0, "configuration")
WRONG_3: dict[str, Change] = {
    "shape of text": set_at("shape", ["10", "4"]),
    "shape beyond all numbers": set_at("shape", [1 << 63, 4]),
    "another number of axes": set_at("shape", [10]),
    "shards of 0": set_at("chunk_grid", "configuration", "chunk_shape", [0, 4]),
    "chunks of 0 in shards": set_at(*_SHARDS, "chunk_shape", [0, 4]),
    "chunks that do not fill shards": set_at(*_SHARDS, "chunk_shape", [3, 4]),
    "chunks of other axes than shards": set_at(*_SHARDS, "chunk_shape", [4]),
    "no grid": lambda content: content.pop("chunk_grid"),
    "grid of text": set_at("chunk_grid", "regular"),
    "no codecs": set_at("codecs", []),
    "codecs of text": set_at("codecs", ["zstd"]),
    "no codecs in shards": set_at(*_SHARDS, "codecs", []),
    "byte order of its own": set_at(*_SHARDS, "codecs", 0, "configuration", "endian", "middle"),
    "separator of its own": set_at("chunk_key_encoding", "configuration", "separator", "/../"),
    "no fill value": lambda content: content.pop("fill_value"),
    "fill value that does not fit": set_at("fill_value", 1 << 80),
    "no type": lambda content: content.pop("data_type"),
    "unknown type": set_at("data_type", "int7"),
}


@pytest.mark.parametrize(
    ("version", "change"),
    [(2, change) for change in WRONG_2.values()] + [(3, change) for change in WRONG_3.values()],
    ids=[f"v2 {name}" for name in WRONG_2] + [f"v3 {name}" for name in WRONG_3],
)
def test_metadata_with_wrong_values_are_refused(tmp_path: Path, version: int, change: Change) -> None:
    file = write(tmp_path / "array_a", version, **({"shards": (8, 4)} if version == 3 else {}))
    content = json.loads(file.read_bytes())
    change(content)
    file.write_text(json.dumps(content))
    assert "array_a" in refused(file)


@pytest.mark.parametrize("version", FILES)
def test_metadata_that_become_wrong_while_the_array_is_open_are_a_read_error(tmp_path: Path, version: int) -> None:
    file = write(tmp_path / "a", version)
    source = ZarrSource(tmp_path / "a")
    for content in (b"", b"{}", b'{"shape": 3'):
        file.write_bytes(content)
        with pytest.raises(
            ReadError, match=r"The array .*/a has changed since it was opened: .*must hold the metadata|must be a"
        ):
            source.read(Span(0, 2))


def values() -> st.SearchStrategy[Any]:
    leaves = st.none() | st.booleans() | st.integers(-5, 1 << 70) | st.floats() | st.text(max_size=4)
    return (
        leaves
        | st.lists(leaves, max_size=3)
        | st.dictionaries(st.sampled_from(["name", "id", "x"]), leaves, max_size=2)
    )


@given(version=st.sampled_from([2, 3]), sharded=st.booleans(), choice=st.data())
def test_any_wrong_value_is_refused_or_read_as_zarr_python_reads_it(
    version: int, sharded: bool, choice: st.DataObject
) -> None:
    """For any value of one entry: the rows as zarr-python reads them, or an error of ours."""
    with tempfile.TemporaryDirectory() as folder:
        file = write(Path(folder) / "a", version, **({"shards": (8, 4)} if version == 3 and sharded else {}))
        content = json.loads(file.read_bytes())
        node: Any = content
        while True:
            keys = list(node) if isinstance(node, dict) else list(range(len(node)))
            key = choice.draw(st.sampled_from(keys))
            if isinstance(node[key], dict | list) and node[key] and choice.draw(st.booleans()):
                node = node[key]
                continue
            node[key] = choice.draw(values())
            break
        file.write_text(json.dumps(content))
        try:
            source = ZarrSource(folder, ["a"], threads=1)
            if source.fields["a"].item_bytes > 1 << 20:
                return
            n = min(12, len(source.index)) if source.index.n_chunks < 1 << 40 else 12
            found = source.read(Span(0, n))["a"]
        except PenstockError:
            return
        try:
            wanted = zarr.open_array(file.parent, mode="r")[:n]
        except Exception:  # it is stricter than we are about what does not matter to us
            wanted = DATA[:n]
        assert found.tobytes() == wanted.tobytes()


# -- huge sizes --------------------------------------------------------------------------------------------------------

HUGE = {
    "rows": ([1 << 50, 4], [4, 4]),
    "rows of a chunk": ([1 << 50, 4], [1 << 50, 4]),
    "columns of a chunk": ([10, 4], [4, 1 << 60]),
    "all of a chunk": ([1 << 40, 4], [1 << 62, 1 << 62]),
}


@pytest.mark.parametrize(("shape", "chunks"), HUGE.values(), ids=HUGE)
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("version", FILES)
def test_huge_sizes_are_opened_without_allocation_and_read_as_damage(
    tmp_path: Path, version: int, packed: bool, shape: list[int], chunks: list[int]
) -> None:
    file = write(tmp_path / "a", version, compressors="auto" if packed else None)
    content = json.loads(file.read_bytes())
    content["shape"] = shape
    if version == 2:
        content["chunks"] = chunks
    else:
        content["chunk_grid"]["configuration"]["chunk_shape"] = chunks
    file.write_text(json.dumps(content))
    tracemalloc.start()
    try:
        source = ZarrSource(tmp_path, {"a": ("a", slice(0, 4))}, threads=1)
        if chunks == [4, 4]:
            assert source.read(Span(0, 10))["a"].tobytes() == DATA.tobytes()
            assert not source.read(Span(1 << 49, (1 << 49) + 5))["a"].any()
        else:
            with pytest.raises(ReadError, match=r"chunk \(0, 0\) of .*/a"):
                source.read(Span(0, 2))
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()


def test_a_shard_of_countless_chunks_takes_no_memory(tmp_path: Path) -> None:
    file = write(tmp_path / "a", 3, shards=(8, 4))
    content = json.loads(file.read_bytes())
    content["shape"][0] = content["chunk_grid"]["configuration"]["chunk_shape"][0] = 1 << 40
    file.write_text(json.dumps(content))
    source = ZarrSource(tmp_path / "a", threads=1)
    tracemalloc.start()
    try:
        with pytest.raises(
            ReadError, match=r"chunk \(0, 0\) of .*/a: the shard 0 has \d+ bytes, but its index alone has \d+"
        ):
            source.read(Span(0, 2))
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()


def test_unreadable_metadata_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a" / "zarr.json").mkdir(parents=True)
    with pytest.raises(SourceError, match=r"zarr\.json must hold the metadata .*directory"):
        ZarrSource(tmp_path, ["a"])
