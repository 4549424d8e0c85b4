"""A packed shard: plain `.npy` members in a plain tar, and a side index that says where every row lies."""

import io
import json
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash
from numpy.typing import NDArray

from penstock.core.errors import DamageError, OptionError
from penstock.shard.codec import encode, json_bytes
from penstock.shard.columns import packed_shard
from penstock.shard.columns.packed_shard import PackedShard
from penstock.shard.columns.read_index import parse_index
from penstock.shard.columns.row_index import RowIndex, metadata_name
from penstock.shard.names import member_suffix
from penstock.shard.shard_file import FileSink
from tests.shard.columns.unpack import read_rows


def pack(
    folder: Path,
    samples: list[dict[str, Any]],
    metadata: list[dict[str, Any]] | None = None,
    first: int = 0,
    **ids: str,
) -> RowIndex:
    """Write one shard, and return its side index as it is stored."""
    with PackedShard(FileSink(folder, "s.tar"), "none", first) as shard:
        for number, sample in enumerate(samples):
            payloads = {name: encode(name, value) for name, value in sample.items()}
            suffixes = [member_suffix(name, payload.extension) for name, payload in payloads.items()]
            about = json_bytes({} if metadata is None else metadata[number], "metadata")
            shard.add(ids.get(f"id{number}"), suffixes, list(payloads.values()), about)
        entry, index = shard.close()
    stored = (folder / "s.tar.index").read_bytes()
    assert entry.n_items == len(samples)
    assert entry.tar_bytes == entry.stored_bytes == (folder / "s.tar").stat().st_size
    parsed = parse_index(stored, "s.tar")
    assert isinstance(parsed, RowIndex)
    assert parsed.to_bytes() == stored == index.to_bytes()
    return parsed


def members(path: Path) -> dict[str, NDArray[Any]]:
    """Return what `np.load` makes of each member."""
    with tarfile.open(path) as archive:
        return {one.name: np.load(io.BytesIO(archive.extractfile(one).read())) for one in archive}  # type: ignore[union-attr]


def rows_of(index: RowIndex, path: Path, member: str) -> list[bytes | None]:
    """Return the bytes of each item's row, read from its place, after a look at its checksum."""
    return read_rows(index, path.read_bytes(), next(one for one in index.columns if one.member == member))


def test_fields_of_one_shape_are_one_array_per_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_shard, "BLOCK_ROWS", 4)
    data = np.arange(10 * 6, dtype=">f4").reshape(10, 2, 3)
    index = pack(tmp_path, [{"x": data[row], "label": row} for row in range(10)])
    found = members(tmp_path / "s.tar")
    assert list(found) == [f"block_00000{block}.{name}.npy" for block in range(3) for name in ("x", "label")]
    assert np.array_equal(np.concatenate([found[f"block_00000{block}.x.npy"] for block in range(3)]), data)
    assert index.starts.tolist() == [0, 4, 8, 10]
    assert rows_of(index, tmp_path / "s.tar", "x.npy") == [row.tobytes() for row in data]
    assert rows_of(index, tmp_path / "s.tar", "label.npy") == [np.int64(row).tobytes() for row in range(10)]
    assert [(one.suffix, one.shape) for one in index.stored_fields] == [
        ("x.npy", (2, 3)),
        ("label.npy", ()),
        ("metadata.json", None),
    ]
    assert [column.checksums.dtype.itemsize for column in index.columns] == [4, 4]


def test_arrays_are_stored_as_samples_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_shard, "_BLOCK_BYTES", 1000)
    x, y = np.arange(3000.0).reshape(100, 30)[:, ::2], np.arange(100)
    one, other = tmp_path / "one", tmp_path / "other"
    one.mkdir(), other.mkdir()
    pack(one, [{"x": x[row], "y": y[row]} for row in range(100)])
    with PackedShard(FileSink(other, "s.tar"), "none") as shard:
        for start, stop in ((0, 3), (3, 4), (4, 97), (97, 100)):
            shard.add_rows({"x.npy": x[start:stop], "y.npy": y[start:stop]})
        shard.close()
    for name in ("s.tar", "s.tar.index"):
        assert (one / name).read_bytes() == (other / name).read_bytes()


def test_large_items_are_blocks_of_their_own(tmp_path: Path) -> None:
    x = np.arange(5 * (1 << 15), dtype=np.float32).reshape(5, -1)
    samples = [{"x": x[row], "y": x[row, :3]} for row in range(5)]
    index = pack(tmp_path, [{"x": x[0, :4], "y": x[0, :3]}, *samples])
    # The first one is small, and shares a block with others; its field has offsets from then on.
    assert index.starts.tolist() == [0, 6]
    assert pack(tmp_path, samples).starts.tolist() == [0, 1, 2, 3, 4, 5]
    found = members(tmp_path / "s.tar")
    assert list(found) == [f"block_00000{row}.{name}.npy" for row in range(5) for name in ("x", "y")]
    assert all(np.array_equal(found[f"block_00000{row}.x.npy"], x[row : row + 1]) for row in range(5))
    assert pack(tmp_path, samples, [{"trial": row} for row in range(5)]).starts.tolist() == [0, 5]
    many = [{f"field{number}": x[row, number::8] for number in range(8)} for row in range(5)]
    assert pack(tmp_path, many).starts.tolist() == [0, 5]


def test_large_items_are_those_of_the_moment_they_were_added(tmp_path: Path) -> None:
    x = np.zeros((2, 1 << 15), np.float32)
    with PackedShard(FileSink(tmp_path, "s.tar"), "none") as shard:
        for number in range(3):
            x[:] = number
            shard.add(None, ["x.npy"], [encode("x", x[0])], b"{}")
            shard.add_rows({"x.npy": x})
        _, index = shard.close()
    rows = rows_of(index, tmp_path / "s.tar", "x.npy")
    assert [set(np.frombuffer(row or b"", np.float32)) for row in rows] == [{n} for n in (0, 1, 2) for _ in range(3)]


def test_a_first_axis_that_varies_has_offsets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_shard, "BLOCK_ROWS", 3)
    lengths = [2, 2, 2, 5, 0, 1, 2, 2, 2]  # the first block has one shape
    data = [np.full((length, 2), row, np.int16) for row, length in enumerate(lengths)]
    index = pack(tmp_path, [{"x": one} for one in data])
    found = members(tmp_path / "s.tar")
    assert found["block_000000.x.npy"].shape == (3, 2, 2)
    assert found["block_000001.x.npy"].shape == (6, 2)
    assert found["block_000001.__offsets.x.npy"].tolist() == [0, 5, 5, 6]
    assert rows_of(index, tmp_path / "s.tar", "x.npy") == [one.tobytes() for one in data]
    assert [(one.kind, one.shape) for one in index.columns] == [("ragged", (2,))]
    assert index.stored_fields[0] == ("x.npy", np.dtype(np.int16), None)


def test_arrays_of_which_more_varies_are_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_shard, "BLOCK_ROWS", 2)
    data = [np.ones((2, 3)), np.ones((2, 3)), np.ones((3, 2)), np.ones(4), np.ones((2, 3))]
    index = pack(tmp_path, [{"x": one} for one in data])
    assert rows_of(index, tmp_path / "s.tar", "x.npy") == [data[0].tobytes(), data[1].tobytes(), None, None, None]
    files = rows_of(index, tmp_path / "s.tar", "x.npy.npy")
    assert files[:2] == [None, None]
    for stored, array in zip(files[2:], data[2:], strict=True):
        assert np.array_equal(np.load(io.BytesIO(stored or b"")), array)
    assert index.stored_fields[0] == ("x.npy", np.dtype(np.float64), None)


def test_texts_and_bytes_are_one_payload_with_offsets(tmp_path: Path) -> None:
    samples = [{"caption": "äb" * row, "png": bytes([row]) * row, "tags": [row]} for row in range(4)]
    index = pack(tmp_path, samples)
    found = members(tmp_path / "s.tar")
    assert found["block_000000.caption.txt.npy"].tobytes().decode() == "äb" * 6
    assert found["block_000000.__offsets.caption.txt.npy"].tolist() == [0, 0, 3, 9, 18]
    assert rows_of(index, tmp_path / "s.tar", "png.npy") == [sample["png"] for sample in samples]
    assert [one.suffix for one in index.stored_fields] == ["caption.txt", "png", "tags.json", "metadata.json"]


def test_metadata_are_columns_where_types_agree(tmp_path: Path) -> None:
    metadata = [
        {"n": 1, "f": 0.5, "ok": True, "s": "a", "mixed": 1, "a/b": 1, "big": 2**70, "N": 2},
        {"n": -2, "f": 1e300, "ok": False, "s": "ü", "mixed": 1.0, "a/b": 1, "big": 2**70, "N": 3, "only": [None]},
    ]
    index = pack(tmp_path, [{"x": 0}, {"x": 1}], metadata)
    found = members(tmp_path / "s.tar")
    assert found["block_000000.__metadata.n.npy"].tolist() == [1, -2]
    assert found["block_000000.__metadata.f.npy"].tolist() == [0.5, 1e300]
    assert found["block_000000.__metadata.ok.npy"].tolist() == [True, False]
    assert found["block_000000.__metadata.s.txt.npy"].tobytes().decode() == "aü"
    rest = rows_of(index, tmp_path / "s.tar", "__metadata.json.npy")
    assert [json.loads(one or b"") for one in rest] == [
        {name: value for name, value in one.items() if name not in ("n", "f", "ok", "s")} for one in metadata
    ]
    named = [metadata_name(column) for column in index.columns if column.suffix == "metadata.json"]
    assert named == ["n", "f", "ok", "s", None]


def test_ids_are_stored_where_they_are_not_automatic(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_shard, "BLOCK_ROWS", 2)
    index = pack(tmp_path, [{"x": row} for row in range(6)], first=7, id2="sub-1/a.b")
    ids = rows_of(index, tmp_path / "s.tar", "__key.txt.npy")
    assert ids == [None, None, b"sub-1/a.b", b"sample_000000010", None, None]
    keys = [f"sample_{7 + row:09d}" for row in range(6)]
    keys[2] = "sub-1%2Fa%2Eb"
    assert index.keys.tolist() == [xxhash.xxh3_64_intdigest(key.encode()) for key in keys]


def test_fields_whose_members_would_share_a_name_are_refused(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=r"'lfp.txt' and 'lfp.txt.npy' would both have the name 'lfp.txt.npy'"):
        pack(tmp_path, [{"lfp": "text", "lfp.txt": np.ones(3)}])


def test_no_bit_of_a_side_index_changes_unnoticed(tmp_path: Path) -> None:
    pack(tmp_path, [{"x": np.arange(row), "y": row} for row in range(3)], [{"n": 1}] * 3)
    stored = (tmp_path / "s.tar.index").read_bytes()
    for bit in range(0, 8 * len(stored), 7):
        changed = bytearray(stored)
        changed[bit // 8] ^= 1 << bit % 8
        with pytest.raises(DamageError):
            parse_index(bytes(changed), "s.tar")


def test_a_forged_side_index_is_refused(tmp_path: Path) -> None:
    """Numbers of all kinds in place of each integer, under a valid checksum: DamageError, or an index within bounds."""
    index = pack(tmp_path, [{"x": np.arange(row % 3), "y": row} for row in range(5)], [{"n": 1}] * 5)
    stored = (tmp_path / "s.tar.index").read_bytes()[:-16]
    end = 24 + int.from_bytes(stored[16:24], "little")
    for at in range(end, len(stored) - 7, 8):
        for value in (-(2**63), -2, -1, 0, 1, 511, index.tar_bytes, 2**62, 2**63 - 1):
            forged = stored[:at] + value.to_bytes(8, "little", signed=True) + stored[at + 8 :]
            try:
                found = parse_index(forged + xxhash.xxh3_128_digest(forged), "s.tar")
            except DamageError:
                continue
            assert isinstance(found, RowIndex)
            for column in found.columns:
                begins, sizes = column.places(np.arange(found.n_items), found.starts)
                assert ((begins + sizes <= found.tar_bytes) & (begins >= -1)).all()
