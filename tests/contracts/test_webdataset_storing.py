"""Seed 004: what the origin did wrong where samples are written and stored (SEEDS 004.4), row by row."""

import io
import pickle
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from penstock import (
    DamageError,
    OptionError,
    ShardedDatasetInfo,
    WebDatasetLoader,
    WebDatasetWriter,
    WriteError,
    create_shards_from_arrays,
)
from tests.contracts.documents import members, xs


class Bomb:
    """Unpickling it makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def test_row_6_a_pickle_in_a_shard_does_not_run(tmp_path: Path) -> None:
    from penstock.shard.index_tars import index_archives

    payload, trace = pickle.dumps(Bomb(tmp_path / "ran")), tmp_path / "ran"
    folder = tmp_path / "set"
    folder.mkdir()
    with tarfile.open(folder / "shard_000000.tar", "w") as tar:
        member = tarfile.TarInfo("sample_000000000.x.pyd")
        member.size = len(payload)
        tar.addfile(member, io.BytesIO(payload))
    assert index_archives(folder)[1] == []
    with pytest.raises(DamageError, match=r"item 0 in shard_000000\.tar.*Path.*allow_pickle=True"):
        list(WebDatasetLoader(folder))
    assert not trace.exists()
    list(WebDatasetLoader(folder, allow_pickle=True))
    assert trace.exists()


def test_row_6_nothing_is_written_as_a_pickle_unless_asked_for(tmp_path: Path) -> None:
    with WebDatasetWriter(tmp_path) as writer:
        writer.write_sample({"n": 3, "f": 0.5, "b": True, "a": np.zeros(2), "t": torch.zeros(2), "s": "text", "l": [1]})
    assert not [name for name in members(tmp_path / "shard_000000.tar") if name.endswith((".pyd", ".pkl"))]


@pytest.mark.parametrize("array_format", ["npy", "pyd"])
def test_row_7_a_row_of_a_tensor_does_not_drag_its_storage_along(tmp_path: Path, array_format: str) -> None:
    rows = torch.arange(100_000, dtype=torch.float32).reshape(1000, 100)
    with WebDatasetWriter(tmp_path, array_format=array_format) as writer:
        writer.write_sample({"row": rows[500], "of_array": rows.numpy()[500]})
    with tarfile.open(tmp_path / "shard_000000.tar") as tar:
        sizes = {member.name: member.size for member in tar}
    assert sizes[f"sample_000000000.row.{array_format}"] < 400 + 300
    assert sizes[f"sample_000000000.of_array.{array_format}"] < 400 + 300
    (sample,) = WebDatasetLoader(tmp_path)
    assert sample["row"].tolist() == sample["of_array"].tolist() == rows[500].tolist()


def test_row_8_a_second_writer_in_the_same_folder_is_refused(tmp_path: Path) -> None:
    with WebDatasetWriter(tmp_path) as first:
        first.write_sample({"x": np.int64(1)})
        with pytest.raises(WriteError, match="Another writer"):
            WebDatasetWriter(tmp_path)
        first.write_sample({"x": np.int64(2)})
    assert xs(WebDatasetLoader(tmp_path, shuffle=False)) == [1, 2]


@pytest.mark.filterwarnings("ignore:The data set of .* is replaced")
def test_row_10_rewriting_leaves_no_stale_shard(tmp_path: Path) -> None:
    create_shards_from_arrays(tmp_path, {"x": np.arange(100)}, shard_size=10)
    with pytest.raises(WriteError, match=r"holds a dataset already.*overwrite=True"):
        create_shards_from_arrays(tmp_path, {"x": np.arange(20)}, shard_size=10)
    assert sorted(xs(WebDatasetLoader(tmp_path))) == list(range(100))
    create_shards_from_arrays(tmp_path, {"x": np.arange(20)}, shard_size=10, overwrite=True)
    assert sorted(path.name for path in tmp_path.glob("*.tar")) == ["shard_000000.tar", "shard_000001.tar"]
    assert len(WebDatasetLoader(tmp_path)) == ShardedDatasetInfo(tmp_path).get_summary()["total_samples"] == 20
    assert sorted(xs(WebDatasetLoader(tmp_path))) == list(range(20))


def test_row_10_a_writer_that_fails_leaves_no_data_set_that_looks_whole(tmp_path: Path) -> None:
    def fail() -> None:
        with WebDatasetWriter(tmp_path, shard_size=2) as writer:
            for i in range(5):
                writer.write_sample({"x": np.int64(i)})
            raise RuntimeError("the user's own")

    with pytest.raises(RuntimeError, match="the user's own"):
        fail()
    with pytest.raises(ValueError, match="resume=True"):
        WebDatasetLoader(tmp_path)


def test_row_11_ids_with_dots_and_slashes_stay_apart(tmp_path: Path) -> None:
    ids = ["sub-01.ses-1", "sub-01.ses-2", "sub-01/ses-1", "sub-01%2Eses-1", "ünit"]
    with WebDatasetWriter(tmp_path) as writer:
        for number, name in enumerate(ids):
            writer.write_sample({"x": np.int64(number)}, sample_id=name)
    found = list(WebDatasetLoader(tmp_path, shuffle=False))
    assert xs(found) == [0, 1, 2, 3, 4]
    assert [sample["metadata"]["sample_id"] for sample in found] == ids


@pytest.mark.parametrize("name", ["metadata", "a/b", "", "a\\b", ".hidden"])
def test_row_11_a_field_that_would_collide_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(OptionError, match="field"), WebDatasetWriter(tmp_path) as writer:
        writer.write_sample({name: np.zeros(2)})


def test_row_15_a_modality_that_one_sample_lacks_is_not_written(tmp_path: Path) -> None:
    with WebDatasetWriter(tmp_path) as writer:
        writer.write_sample({"a": np.zeros(2), "b": np.zeros(2)})
        with pytest.raises(OptionError, match=r"lacks \['b'\]"):
            writer.write_sample({"a": np.zeros(2)})


def test_row_17_the_manifest_does_not_grow_with_the_samples_and_can_be_moved(tmp_path: Path) -> None:
    about = {"subject": "mouse 7", "note": "n" * 1000}
    sizes = []
    for n in (10, 400):
        folder = tmp_path / str(n)
        create_shards_from_arrays(folder, {"x": np.arange(n)}, shard_size=n, metadata=about)
        sizes.append((folder / "dataset_metadata.json").stat().st_size)
        assert str(tmp_path) not in (folder / "dataset_metadata.json").read_text()
        assert "subject" not in next(iter(WebDatasetLoader(folder)))["metadata"]
        assert ShardedDatasetInfo(folder).get_summary()["metadata"] == about
    assert sizes[1] - sizes[0] < 50
    (tmp_path / "400").rename(tmp_path / "moved")
    assert sorted(xs(WebDatasetLoader(tmp_path / "moved"))) == list(range(400))
