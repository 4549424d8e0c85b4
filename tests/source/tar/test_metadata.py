"""Metadata of open shards in the layout "columns": the same as in the other layout, however they are read."""

import pickle
from pathlib import Path

import numpy as np
import pytest

from penstock import TarSource
from penstock.core.errors import DamageError
from penstock.core.metadata.records import Records
from penstock.recipes.webdataset import WebDatasetWriter
from penstock.source import native

N_ITEMS = 50


def write(folder: Path, layout: str, metadata=lambda number: {"trial": 3 * number, "gain": number / 4}) -> TarSource:
    with WebDatasetWriter(folder, shard_size=20, layout=layout) as writer:
        for number in range(N_ITEMS):
            sample = {"x": np.arange(4, dtype=np.float32) + number, "y": np.int64(number)}
            writer.write_sample(sample, metadata=metadata(number))
    return TarSource(folder)


def reads_by_c(source: TarSource) -> bool:
    engine = source._process_engine()
    items = np.arange(N_ITEMS)
    return engine.take(items, None, {name: field.blank(N_ITEMS) for name, field in source.fields.items()})


METADATA = {
    "numbers": lambda number: {"trial": 3 * number, "gain": number / 4, "good": number % 2 == 0},
    "none": lambda _: None,
    "text": lambda number: {"file": f"Ü-{number}" * (number % 4), "trial": number, "note": "x"},
    "JSON": lambda number: {"trial": number, "list": [number, None], "file": str(number)},
}


@pytest.mark.parametrize("kind", METADATA)
@pytest.mark.parametrize("verify", ["first", "always", "never"])
def test_metadata_of_open_shards_are_read_at_once_and_are_those_of_the_other_layout(tmp_path, kind, verify):
    samples = write(tmp_path / "samples", "samples", METADATA[kind])
    write(tmp_path / "columns", "columns", METADATA[kind])
    source = TarSource(tmp_path / "columns", verify=verify)
    items = np.array([49, 0, 20, 19, 21, 7])
    expected = samples.take(items)
    for _ in range(3):
        found = source.take(items)
        assert list(found["metadata"]) == list(expected["metadata"])
        assert found["metadata"][2] == expected["metadata"][2]
        np.testing.assert_array_equal(found["x"], expected["x"])
        source.take(np.arange(N_ITEMS))
    assert reads_by_c(source) == native.is_compiled()
    assert reads_by_c(samples) == native.is_compiled()


def test_metadata_get_into_the_rows_that_are_asked_for(tmp_path):
    source = write(tmp_path, "columns")
    source.take(np.arange(N_ITEMS))
    out = {name: field.blank(9) for name, field in source.fields.items()}
    source.fill(np.array([30, 4]), np.array([7, 1]), out)
    assert [None if one is None else one["trial"] for one in out["metadata"]] == [*[None, 12], *[None] * 5, 90, None]
    assert out["y"][[7, 1]].tolist() == [30, 4]


def test_columns_make_no_dicts_and_keep_their_type(tmp_path):
    source = write(tmp_path, "columns")
    source.take(np.arange(N_ITEMS))
    records = source.take(np.array([3, 40]))["metadata"]
    assert isinstance(records, Records)
    columns = records.columns("trial", "gain", "sample_id", "shard_idx")
    assert {name: (column.dtype.kind, column.tolist()) for name, column in columns.items()} == {
        "trial": ("i", [9, 120]),
        "gain": ("f", [0.75, 10.0]),
        "sample_id": ("O", ["sample_000000003", "sample_000000040"]),
        "shard_idx": ("i", [0, 2]),
    }


@pytest.mark.parametrize(
    "metadata",
    [
        lambda number: {"trial": number} if number % 3 else {"other": number},
        lambda number: {"trial": number if number < 20 else str(number)},
        lambda number: {"trial": number, "gain": number / 2} if number < 40 else {"trial": number},
    ],
    ids=["names that differ", "types that differ between shards", "a column that some shards lack"],
)
def test_other_metadata_are_read_as_well(tmp_path, metadata):
    samples = write(tmp_path / "samples", "samples", metadata)
    source = write(tmp_path / "columns", "columns", metadata)
    items = np.array([45, 3, 22, 4, 21])
    for _ in range(3):
        assert list(source.take(items)["metadata"]) == list(samples.take(items)["metadata"])


def test_ids_that_are_not_automatic_are_read_as_well(tmp_path):
    with WebDatasetWriter(tmp_path, shard_size=20, layout="columns") as writer:
        for number in range(N_ITEMS):
            writer.write_sample({"y": np.int64(number)}, sample_id=f"rat {number}", metadata={"trial": number})
    source = TarSource(tmp_path)
    for _ in range(3):
        assert [one["sample_id"] for one in source.take(np.array([30, 2]))["metadata"]] == ["rat 30", "rat 2"]
        source.take(np.arange(N_ITEMS))
    assert reads_by_c(source) == native.is_compiled()


def test_a_damaged_number_is_named_and_its_neighbours_survive(tmp_path):
    write(tmp_path, "columns")
    shard = tmp_path / "shard_000001.tar"
    content = bytearray(shard.read_bytes())
    at = content.index(np.array([3 * 25, 3 * 26], "<i8").tobytes())
    content[at] ^= 1
    shard.write_bytes(content)
    source = TarSource(tmp_path)
    for _ in range(2):
        with pytest.raises(DamageError) as caught:
            source.take(np.array([24, 25, 26]))
        assert (caught.value.shard, caught.value.item) == ("shard_000001.tar", 25)
        assert [one["trial"] for one in source.take(np.array([24, 26]))["metadata"]] == [72, 78]


@pytest.mark.parametrize("layout", ["samples", "columns"])
def test_a_damaged_text_is_named_and_its_neighbours_survive(tmp_path, layout):
    write(tmp_path, layout, lambda number: {"file": f"session {number}.h5", "list": [number]}).close()
    shard = tmp_path / "shard_000001.tar"
    content = bytearray(shard.read_bytes())
    content[content.index(b"session 25.h5") + 3] ^= 1
    source = TarSource(tmp_path)
    source.take(np.arange(20))
    shard.write_bytes(content)
    for _ in range(2):
        with pytest.raises(DamageError) as caught:
            source.take(np.array([24, 25, 26]))
        assert (caught.value.shard, caught.value.item) == ("shard_000001.tar", 25)
        assert [one["file"] for one in source.take(np.array([24, 26]))["metadata"]] == [
            "session 24.h5",
            "session 26.h5",
        ]


def test_metadata_kept_from_a_batch_refer_to_no_other_items(tmp_path):
    source = write(tmp_path, "columns", lambda number: {"file": "x" * 1000})
    source.take(np.arange(N_ITEMS))
    kept = source.take(np.arange(N_ITEMS))["metadata"]
    assert len(pickle.dumps(kept[np.array([3])])) < 3000
    assert kept[np.array([3])].compact().nbytes < 3000
