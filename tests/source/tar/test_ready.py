"""Fields of varying shape in shards that are open: read a batch at a time, and the same as one by one."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock import TarSource
from penstock.core.errors import DamageError
from penstock.recipes.webdataset import WebDatasetWriter
from penstock.source import native

N_ITEMS = 50
LAYOUTS = ["samples", "columns"]
FIELDS = {
    "tokens": lambda n: np.arange(n % 7, dtype=np.int32) + n,
    "points": lambda n: np.arange(3 * (n % 5), dtype=">f8").reshape(-1, 3) + n,
    "image by session": lambda n: np.full((9, 30 + n // 20), n, np.int16),  # one shape in each shard
    "any shape": lambda n: np.full((n % 2 + 1, n % 3 + 1), n, np.float32),
    "scalar or not": lambda n: np.full((1,) * (n % 2), n),
    "text": lambda n: f"Ü{n}" * (n % 3),
    "bytes": lambda n: bytes([n]) * (n % 4),
    "list": lambda n: [n, {"a": n / 2}],
    "empty": lambda n: np.empty((n // 20, 0), np.float32),
}


def write(folder: Path, layout: Any, field: Any) -> TarSource:
    with WebDatasetWriter(folder, shard_size=20, layout=layout) as writer:
        for number in range(N_ITEMS):
            sample = {"x": np.arange(4, dtype=np.float32) + number, "varying": field(number)}
            writer.write_sample(sample, metadata={"trial": number, "file": f"rat {number}"})
    return TarSource(folder)


def reads_at_once(source: TarSource) -> bool:
    items = np.arange(N_ITEMS)
    block = {name: field.blank(N_ITEMS) for name, field in source.fields.items()}
    return source._process_engine().take(items, None, block)


def plain(value: Any) -> Any:
    return (value.dtype.str, value.shape, value.tolist()) if isinstance(value, np.ndarray) else value


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", FIELDS)
def test_values_are_those_that_were_written_and_have_memory_of_their_own(tmp_path, layout, name):
    source, items = write(tmp_path, layout, FIELDS[name]), np.array([49, 0, 20, 19, 21, 7, 7])
    one_by_one = [plain(source.take(np.array([item]))["varying"][0]) for item in items]
    source.take(np.arange(N_ITEMS))
    for _ in range(2):
        block = source.take(items)
        assert [plain(value) for value in block["varying"]] == one_by_one
        assert block["x"][:, 0].tolist() == items.tolist()
        assert [one["file"] for one in block["metadata"]] == [f"rat {item}" for item in items]
        for value, item in zip(block["varying"], items.tolist(), strict=True):
            wanted = FIELDS[name](item)
            if isinstance(wanted, np.ndarray):
                assert plain(value) == plain(wanted.astype(wanted.dtype.newbyteorder("=")))
                assert value.flags.writeable
                assert value.base is None or value.base.nbytes == value.nbytes
            else:
                assert value == wanted
    if name not in ("scalar or not", "any shape", "empty"):  # in several forms, or with short checksums
        assert reads_at_once(source) == native.is_compiled()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_fields_without_any_of_fixed_shape_are_read_at_once(tmp_path, layout):
    write(tmp_path, layout, FIELDS["tokens"]).close()
    source = TarSource(tmp_path, fields=["varying"])
    source.take(np.arange(N_ITEMS))
    assert reads_at_once(source) == native.is_compiled()
    assert [value.tolist() for value in source.take(np.array([13, 48]))["varying"]] == [
        [13, 14, 15, 16, 17, 18],
        [48, 49, 50, 51, 52, 53],
    ]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_damage_that_comes_later_is_found(tmp_path, layout):
    source = write(tmp_path, layout, FIELDS["points"])
    source.take(np.arange(N_ITEMS))
    assert reads_at_once(source) == native.is_compiled()
    shard = tmp_path / "shard_000001.tar"
    content = bytearray(shard.read_bytes())
    content[content.index(FIELDS["points"](24).tobytes())] ^= 1
    shard.write_bytes(content)
    with pytest.raises(DamageError) as caught:
        source.take(np.array([23, 24]))
    assert (caught.value.shard, caught.value.item) == ("shard_000001.tar", 24)
    assert source.take(np.array([23]))["varying"][0][0, 0] == 23


def test_items_are_verified_once_and_not_before_all_their_fields_are(tmp_path):
    source = write(tmp_path, "columns", FIELDS["points"])
    shard = tmp_path / "shard_000001.tar"
    content = bytearray(shard.read_bytes())
    content[content.index(FIELDS["points"](24).tobytes())] ^= 1
    shard.write_bytes(content)
    source.take(np.array([21, 0, 41]))  # opens all shards
    assert source._process_engine().take(np.array([22]), None, blank(source, 1)) == native.is_compiled()
    for _ in range(2):
        assert not source._process_engine().take(np.array([23, 24]), None, blank(source, 2))


def test_a_shard_that_is_substituted_has_its_metadata_parsed(tmp_path):
    write(tmp_path, "columns", FIELDS["tokens"]).close()
    source = TarSource(tmp_path, on_error="substitute")
    source.take(np.arange(N_ITEMS))
    assert source.take(np.array([8]))["metadata"][0]["trial"] == 8
    assert source.quarantine is not None
    assert not source.quarantine.exists()


def blank(source: TarSource, n_items: int) -> dict[str, Any]:
    return {name: field.blank(n_items) for name, field in source.fields.items()}
