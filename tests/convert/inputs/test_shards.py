"""Shards as an input, to change the shard size, shuffle items, or replace pickles."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from penstock_convert_parts import tree

from penstock import TarSource
from penstock.convert.convert import convert
from penstock.convert.inputs.source import ShardsInput
from penstock.convert.scan import ConvertOptions
from penstock.core.errors import ConversionError, ReadError
from penstock.shard.manifest import Manifest
from penstock.shard.outputs.write_options import WriteOptions
from penstock.shard.writer import ShardWriter

OWN = ("sample_id", "modalities", "shard_idx", "sample_idx_in_shard", "original_id")


def sample(number: int) -> dict[str, Any]:
    return {
        "fixed": np.array([[number, 0.5], [-number, 1]], np.float32),
        "ragged": np.arange(number % 4, dtype=np.int16),
        "scalar": np.float64(number / 3),
        "text": f"sample {number} ü",
        "about": {"number": number, "list": [number, None]},
    }


def write(folder: Path, n_samples: int = 70, **options: Any) -> Path:
    writer = ShardWriter(folder, WriteOptions(**{"shard_size": 9, **options}))
    for number in range(n_samples):
        writer.write(sample(number), f"trial-{number}", {"trial": number, "condition": "left", "shard": "mine"})
    writer.commit()
    return folder


def read_items(folder: Path, order: Any = None) -> list[Any]:
    """Return the items of a dataset, with the metadata of users."""
    source = TarSource(folder)
    n_items = len(source.index)
    block = source.take(np.arange(n_items) if order is None else np.asarray(order))
    source.close()
    found = []
    for row in range(len(block["fixed"])):
        about = {name: value for name, value in block["metadata"][row].items() if name not in OWN}
        fields = {name: block[name][row] for name in block if name != "metadata"}
        kept = {name: (v.dtype, v.shape, v.tolist()) if isinstance(v, np.ndarray) else v for name, v in fields.items()}
        found.append((kept, about))
    return found


def test_ids_of_users_are_kept_even_if_converted_twice(tmp_path: Path) -> None:
    folder = write(tmp_path / "0", n_samples=12)
    for turn in range(2):
        convert([ShardsInput(folder)], tmp_path / f"{turn + 1}", ConvertOptions(WriteOptions(5)))
        folder = tmp_path / f"{turn + 1}"
    block = TarSource(folder).take(np.arange(12))
    assert [about["sample_id"] for about in block["metadata"]] == [f"trial-{int(x[0, 0])}" for x in block["fixed"]]
    assert "original_id" not in block["metadata"][0]


@pytest.mark.parametrize("compression", ["none", "gz"])
def test_values_and_metadata_of_users_stay_the_same(compression: Any, tmp_path: Path) -> None:
    before = write(tmp_path / "before", compression=compression)
    convert([ShardsInput(before)], tmp_path / "after", ConvertOptions(WriteOptions(16)))
    assert read_items(tmp_path / "after") == read_items(before)
    manifest = Manifest.read(tmp_path / "after" / "dataset_metadata.json")
    assert [shard.n_items for shard in manifest.shards] == [16, 16, 16, 16, 6]
    old = Manifest.read(before / "dataset_metadata.json")
    assert {name: info.field() for name, info in manifest.fields.items()} == {
        name: info.field() for name, info in old.fields.items()
    }


def test_values_are_those_that_were_written(tmp_path: Path) -> None:
    before = write(tmp_path / "before", 5)
    convert([ShardsInput(before)], tmp_path / "after", ConvertOptions(WriteOptions(2)))
    for number, (kept, about) in enumerate(read_items(tmp_path / "after")):
        expected = sample(number)
        assert kept["fixed"][2] == expected["fixed"].tolist()
        assert kept["ragged"] == (np.dtype(np.int16), (number % 4,), list(range(number % 4)))
        assert float(kept["scalar"]) == expected["scalar"]
        assert kept["text"] == expected["text"]
        assert kept["about"] == expected["about"]
        assert about == {"trial": number, "condition": "left", "shard": "mine"}


def test_shards_of_the_same_samples_cut_in_another_way_end_in_the_same_bytes(tmp_path: Path) -> None:
    for size in (3, 50):
        (tmp_path / str(size)).mkdir()
        given = ShardsInput(write(tmp_path / str(size) / "before", shard_size=size))
        convert([given], tmp_path / str(size) / "after", ConvertOptions(WriteOptions(16)))
    trees = [tree(tmp_path / str(size) / "after") for size in (3, 50)]
    shards = [{name: content for name, content in found.items() if "shard" in name} for found in trees]
    assert shards[0] == shards[1]
    assert len(shards[0]) == 10


def test_pickles_become_arrays_that_need_no_trust(tmp_path: Path) -> None:
    before = tmp_path / "before"
    writer = ShardWriter(before, WriteOptions(4, array_format="pyd"))
    for number in range(10):
        writer.write({"x": np.array([number, -number], np.int32)}, None, {"number": number})
    writer.commit()
    assert Manifest.read(before / "dataset_metadata.json").fields["x"].suffix == "x.pyd"
    manifest = convert([ShardsInput(before)], tmp_path / "after", ConvertOptions(WriteOptions(5)))[""]
    assert manifest.fields["x"].suffix == "x.npy"
    assert manifest.array_format == "npy"
    source = TarSource(tmp_path / "after")
    block = source.take(np.arange(10))
    source.close()
    assert block["x"].dtype == np.int32
    assert block["x"].tolist() == [[number, -number] for number in range(10)]
    assert [entry["number"] for entry in block["metadata"]] == list(range(10))
    assert not any(name.endswith(".pyd") for name in tree(tmp_path / "after"))


def test_any_samples_are_given_in_any_order(tmp_path: Path) -> None:
    recording = ShardsInput(write(tmp_path / "before")).open()
    order = np.random.default_rng(1).permutation(70)
    found = [about["trial"] for _, about in recording.samples(order)]
    assert found == order.tolist()
    assert recording.span(np.array([3, 5])).tolist() == [[3, 4], [5, 6]]
    recording.close()


def test_a_damaged_shard_is_an_input_that_cannot_be_read(tmp_path: Path) -> None:
    before = write(tmp_path / "before")
    path = before / "shard_000003.tar"
    content = bytearray(path.read_bytes())
    content[700] ^= 1
    path.write_bytes(content)
    with pytest.raises(ConversionError, match=r"shard_000003\.tar") as caught:
        convert([ShardsInput(before)], tmp_path / "after", ConvertOptions(WriteOptions(16)))
    assert caught.value.reasons.keys() == {str(before)}
    assert isinstance(caught.value.__cause__, ReadError)


def test_a_folder_without_shards_is_told_apart(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConversionError, match="empty"):
        convert([ShardsInput(tmp_path / "empty")], tmp_path / "after")
    assert not (tmp_path / "after").exists()
