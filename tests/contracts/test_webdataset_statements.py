"""Seed 004's document: what it says of shards, of workers, of checkpoints, summaries, batches and errors is true."""

import json
import pickle
import re
import tarfile
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from penstock import (
    ResumableWebDatasetLoader,
    ShardedDatasetInfo,
    WebDatasetLoader,
    WebDatasetWriter,
    collate_webdataset,
    create_shards_from_arrays,
    create_webdataset_dataloader,
)
from tests.contracts.documents import MORE_WORKERS, document, members, xs

# -- "Shard Format" ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("array_format", ["npy", "pyd"])
def test_shards_hold_the_members_that_the_document_draws_counted_from_zero(tmp_path: Path, array_format: str) -> None:
    with WebDatasetWriter(tmp_path, shard_size=3, array_format=array_format) as writer:
        for i in range(5):
            writer.write_sample({"spikes": np.full((2, 3), i), "behavior": np.float32(i), "trial": {"n": i}})
    wanted = [
        f"sample_{i:09d}.{member}"
        for i in range(5)
        for member in (f"spikes.{array_format}", f"behavior.{array_format}", "trial.json", "metadata.json")
    ]
    assert members(tmp_path / "shard_000000.tar") == wanted[:12]
    assert members(tmp_path / "shard_000001.tar") == wanted[12:]
    assert json.loads((tmp_path / "dataset_metadata.json").read_bytes())["total_samples"] == 5


def test_a_pyd_member_is_a_pickle_that_anyone_reads(tmp_path: Path) -> None:
    create_shards_from_arrays(tmp_path, {"spikes": np.arange(6.0).reshape(2, 3)}, array_format="pyd")
    with tarfile.open(tmp_path / "shard_000000.tar") as tar:
        content = tar.extractfile("sample_000000001.spikes.pyd").read()
    assert pickle.loads(content).tolist() == [3.0, 4.0, 5.0]


def test_the_metadata_member_says_who_the_sample_is_and_what_the_user_said(tmp_path: Path) -> None:
    with WebDatasetWriter(tmp_path, shard_size=2) as writer:
        for i in range(3):
            writer.write_sample(
                {"x": np.int64(i)}, metadata={"trial_id": i, "condition": "left" if i % 2 == 0 else "right"}
            )
    with tarfile.open(tmp_path / "shard_000001.tar") as tar:
        stored = json.loads(tar.extractfile("sample_000000002.metadata.json").read())
    assert stored == {
        "sample_id": "sample_000000002",
        "modalities": ["x"],
        "shard_idx": 1,
        "sample_idx_in_shard": 0,
        "trial_id": 2,
        "condition": "left",
    }
    samples = list(WebDatasetLoader(tmp_path, shuffle=False))
    assert samples[2]["metadata"] == stored


@pytest.mark.parametrize("compression", ["none", "gz", "bz2", "xz"])
def test_every_compression_of_the_document_keeps_the_name_and_the_samples(tmp_path: Path, compression: str) -> None:
    arrays = {"x": np.arange(7), "y": np.arange(14.0).reshape(7, 2)}
    summary = create_shards_from_arrays(tmp_path, arrays, shard_size=3, compression=compression)
    assert summary["compression"] == compression
    assert sorted(path.name for path in tmp_path.glob("*.tar*") if path.suffix != ".index") == [
        f"shard_{k:06d}.tar" for k in range(3)
    ]
    with tarfile.open(tmp_path / "shard_000000.tar", f"r:{'' if compression == 'none' else compression}") as tar:
        assert len(tar.getnames()) == 9
    found = list(WebDatasetLoader(tmp_path, shuffle=False))
    assert xs(found) == list(range(7))
    assert [sample["y"].tolist() for sample in found] == arrays["y"].tolist()


# -- "Multi-Worker Behavior", through torch's own DataLoader -----------------------------------------------------------


def by_worker(samples: list[dict[str, Any]]) -> dict[str, Any]:
    """Collate: which worker made this batch, of which items, with which shards open."""
    info = torch.utils.data.get_worker_info()
    assert info is not None
    mine = Path(info.dataset.source.manifest.folder)
    opened = [entry.readlink() for entry in Path("/proc/self/fd").iterdir() if entry.exists()]
    return {"worker": info.id, "x": xs(samples), "open": {path.name for path in opened if path.parent == mine}}


@pytest.fixture(scope="module")
def four_workers(sets: Callable[..., Path]) -> dict[str, list[list[dict[str, Any]]]]:
    """Epochs of four workers over eight shards of ten samples: two of one object, and one each of two others."""
    found = {}
    for name, seed in (("first", 42), ("again", 42), ("other seed", 43)):
        loader = torch.utils.data.DataLoader(
            WebDatasetLoader(sets(80, 10), seed=seed), batch_size=3, num_workers=4, collate_fn=by_worker
        )
        found[name] = [list(loader) for _ in range(2 if name == "first" else 1)]
    return found


def worker_items(epoch: list[dict[str, Any]]) -> dict[int, list[int]]:
    items: dict[int, list[int]] = {}
    for batch in epoch:
        items.setdefault(batch["worker"], []).extend(batch["x"])
    return items


@pytest.mark.filterwarnings(MORE_WORKERS)
def test_1_shards_are_divided_among_workers_as_in_the_example(four_workers: Any) -> None:
    text = document("004").read_text()
    promised = {
        int(a): {int(b), int(c)} for a, b, c in re.findall(r"^- Worker (\d): shards (\d), (\d)$", text, re.MULTILINE)
    }
    assert promised == {0: {0, 4}, 1: {1, 5}, 2: {2, 6}, 3: {3, 7}}
    for epoch in four_workers["first"]:
        assert {worker: {x // 10 for x in items} for worker, items in worker_items(epoch).items()} == promised


@pytest.mark.filterwarnings(MORE_WORKERS)
def test_2_each_worker_opens_its_own_shards_and_no_other(four_workers: Any) -> None:
    for batch in four_workers["first"][0]:
        mine = {f"shard_{batch['worker'] + 4 * k:06d}.tar" for k in range(2)}
        found = {name.removesuffix(".index") for name in batch["open"]}  # a shard and its index are open together
        assert {f"shard_{x // 10:06d}.tar" for x in batch["x"]} <= found <= mine


@pytest.mark.filterwarnings(MORE_WORKERS)
def test_3_shuffling_happens_within_each_worker(four_workers: Any) -> None:
    for epoch in four_workers["first"]:
        for worker, items in worker_items(epoch).items():
            stored = [shard * 10 + row for shard in (worker, worker + 4) for row in range(10)]
            assert sorted(items) == stored
            assert items != stored


@pytest.mark.filterwarnings(MORE_WORKERS)
def test_4_no_sample_is_lost_or_comes_twice(four_workers: Any) -> None:
    for epoch in [*four_workers["first"], *four_workers["other seed"]]:
        assert sorted(x for batch in epoch for x in batch["x"]) == list(range(80))


@pytest.mark.filterwarnings(MORE_WORKERS)
def test_5_the_order_is_the_same_for_the_same_seed(four_workers: Any) -> None:
    first, again, other = (four_workers[name] for name in ("first", "again", "other seed"))
    assert worker_items(first[0]) == worker_items(again[0])
    assert worker_items(first[0]) != worker_items(other[0])
    assert worker_items(first[0]) != worker_items(first[1])


# -- "Checkpoint is automatically saved every 1000 samples" ------------------------------------------------------------


def test_a_checkpoint_is_saved_every_thousand_samples_and_at_the_end(sets: Callable[..., Path], tmp_path: Path) -> None:
    path = tmp_path / "checkpoint.json"
    loader = ResumableWebDatasetLoader(sets(2300, 1000), checkpoint_path=path, checkpoint_interval=1000)
    saved = {}
    for count, _ in enumerate(loader, start=1):
        saved[count] = json.loads(path.read_bytes()) if path.exists() else None
    assert {count for count in saved if saved[count] is None} == set(range(1, 1000))
    places = {count: (state["shard_idx"], state["sample_offset"]) for count, state in saved.items() if state}
    assert {places[count] for count in range(1000, 2000)} == {(1, 0)}
    assert {places[count] for count in range(2000, 2301)} == {(2, 0)}
    assert json.loads(path.read_bytes())["epoch"] == 1


def test_a_run_that_was_interrupted_goes_on_at_the_last_checkpoint(sets: Callable[..., Path], tmp_path: Path) -> None:
    path, folder = tmp_path / "checkpoint.json", sets(2300, 1000)
    whole = xs(WebDatasetLoader(folder))
    first = ResumableWebDatasetLoader(folder, checkpoint_path=path, checkpoint_interval=1000)
    assert xs(islice(first, 1700)) == whole[:1700]
    second = ResumableWebDatasetLoader(folder, checkpoint_path=path)
    assert xs(second) == whole[1000:]


# -- summaries, collate, errors ----------------------------------------------------------------------------------------


def test_the_summary_has_the_keys_that_the_document_prints(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arrays = {"spikes": np.zeros((5, 4, 2), np.float32), "behavior": np.zeros((5, 3))}
    written = create_shards_from_arrays(tmp_path, arrays, shard_size=2)
    summary = ShardedDatasetInfo(tmp_path).get_summary()
    promised = {
        "total_samples": 5,
        "total_shards": 3,
        "shard_size": 2,
        "compression": "none",
        "modalities": ["spikes", "behavior"],
    }
    assert promised.items() <= summary.items()
    assert promised.items() <= written.items()
    assert written == json.loads((tmp_path / "dataset_metadata.json").read_bytes())
    ShardedDatasetInfo(tmp_path).print_summary()
    shown = capsys.readouterr().out
    assert all(word in shown for word in ("5 in 3 shards", "spikes", "behavior", "none"))


def test_batches_are_dicts_of_tensors_and_metadata_a_list_of_dicts(sets: Callable[..., Path]) -> None:
    with create_webdataset_dataloader(sets(80, 10), batch_size=32, num_workers=0, shuffle=False) as loader:
        first = next(iter(loader))
    assert list(first) == ["x", "y", "metadata"]
    assert first["x"].tolist() == list(range(32))
    assert tuple(first["y"].shape) == (32, 2)
    assert [about["sample_id"] for about in first["metadata"]] == [f"sample_{i:09d}" for i in range(32)]


def test_collate_stacks_equal_shapes_and_lists_different_ones() -> None:
    samples = [{"x": torch.tensor(i), "r": torch.zeros(i), "metadata": {"n": i}} for i in range(3)]
    batch = collate_webdataset(samples)
    assert batch["x"].tolist() == [0, 1, 2]
    assert [len(value) for value in batch["r"]] == [0, 1, 2]
    assert batch["metadata"] == [{"n": 0}, {"n": 1}, {"n": 2}]


def test_a_folder_without_shards_is_a_value_error_that_says_so(tmp_path: Path) -> None:
    for make in (WebDatasetLoader, create_webdataset_dataloader, ShardedDatasetInfo, ResumableWebDatasetLoader):
        with pytest.raises(ValueError, match="No shards found"):
            make(tmp_path)
        with pytest.raises(ValueError, match="No shards found"):
            make(tmp_path / "nowhere" / "at all")


def test_arrays_of_different_length_are_a_value_error_that_says_so(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="All arrays must have same first dimension"):
        create_shards_from_arrays(tmp_path, {"x": np.zeros(3), "y": np.zeros(4)})
    assert list(tmp_path.iterdir()) == []
