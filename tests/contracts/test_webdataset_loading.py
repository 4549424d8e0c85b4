"""Seed 004: what the origin did wrong where samples are loaded, batched and resumed (SEEDS 004.4), row by row."""

import json
import logging
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from penstock_test_parts import own_threads, run_isolated

import penstock
from penstock import (
    OptionError,
    ResumableWebDatasetLoader,
    ResumeError,
    WebDatasetLoader,
    collate_webdataset,
    create_shards_from_arrays,
    create_webdataset_dataloader,
)
from tests.contracts.documents import MORE_WORKERS, batch_xs, xs


@pytest.mark.parametrize("num_workers", [0, 2])
def test_row_1_every_epoch_of_one_object_delivers_everything(sets: Callable[..., Path], num_workers: int) -> None:
    loader = torch.utils.data.DataLoader(
        WebDatasetLoader(sets(50, 10)),
        batch_size=None,
        num_workers=num_workers,
        persistent_workers=num_workers > 0,
    )
    for _ in range(3):
        assert sorted(xs(loader)) == list(range(50))


@pytest.mark.parametrize("k", [1, 100, 1000, 1499])
def test_row_2_resuming_a_shuffled_epoch_loses_nothing(sets: Callable[..., Path], k: int) -> None:
    folder = sets(1500, 500)
    loader = WebDatasetLoader(folder, buffer_size=1000)
    samples = iter(loader)
    first = xs(islice(samples, k))
    state = json.loads(json.dumps(loader.get_state()))
    assert (state["shard_idx"], state["sample_offset"]) == divmod(k, 500)
    again = WebDatasetLoader(folder, buffer_size=1000)
    again.set_state(state)
    rest = xs(again)
    assert sorted(first + rest) == list(range(1500))
    assert first + rest == xs(WebDatasetLoader(folder, buffer_size=1000))


def test_row_3_resuming_with_workers_delivers_what_was_left(sets: Callable[..., Path]) -> None:
    def loader(workers: int) -> Any:
        return create_webdataset_dataloader(sets(100, 20), batch_size=10, num_workers=workers)

    with loader(2) as first:
        batches = iter(first)
        seen = batch_xs(islice(batches, 3))
        state = json.loads(json.dumps(first.state_dict()))
    with loader(3) as second:
        second.load_state_dict(state)
        rest = batch_xs(second)
    assert sorted(x for batch in seen + rest for x in batch) == list(range(100))
    assert len(rest) == 7


def test_row_3_the_main_process_does_not_pretend_to_know_what_torchs_workers_delivered(
    sets: Callable[..., Path], tmp_path: Path
) -> None:
    dataset = WebDatasetLoader(sets(50, 10))
    assert len(xs(torch.utils.data.DataLoader(dataset, batch_size=None, num_workers=2))) == 50
    with pytest.raises(penstock.LoaderError, match="create_webdataset_dataloader"):
        dataset.get_state()
    path = tmp_path / "checkpoint.json"
    resumable = ResumableWebDatasetLoader(sets(50, 10), checkpoint_path=path, checkpoint_interval=5)
    kept = []

    def error_in_workers() -> str:
        loader = iter(torch.utils.data.DataLoader(resumable, batch_size=None, num_workers=2))
        kept.append(loader)  # torch waits ten seconds for workers that raised; run_isolated() does not
        try:
            return f"delivered {len(list(loader))}"
        except penstock.LoaderError as error:
            return str(error)

    assert "cannot save" in run_isolated(error_in_workers)
    assert not path.exists()


def test_row_4_every_epoch_has_an_order_of_its_own(sets: Callable[..., Path]) -> None:
    loader = WebDatasetLoader(sets(50, 10))
    assert len({tuple(xs(loader)) for _ in range(4)}) == 4
    # And it is not the neighbour's: seed 42 in epoch 1 is not seed 43 in epoch 0.
    epochs = {
        (seed, epoch): tuple(xs(made))
        for seed in (42, 43)
        for made in [WebDatasetLoader(sets(50, 10), seed=seed)]
        for epoch in range(2)
    }
    assert len(set(epochs.values())) == 4


@pytest.mark.parametrize("num_workers", [0, 2])
def test_row_5_without_shuffle_samples_come_in_storage_order(sets: Callable[..., Path], num_workers: int) -> None:
    assert xs(WebDatasetLoader(sets(100, 20), shuffle=False)) == list(range(100))
    with create_webdataset_dataloader(sets(100, 20), num_workers=num_workers, shuffle=False) as loader:
        for _ in range(2):
            assert [x for batch in batch_xs(loader) for x in batch] == list(range(100))


def bytes_read() -> int:
    (line,) = [line for line in Path("/proc/self/io").read_text().splitlines() if line.startswith("rchar")]
    return int(line.split()[1])


def test_row_12_one_sample_does_not_read_the_whole_shard(tmp_path: Path) -> None:
    create_shards_from_arrays(
        tmp_path, {"x": np.arange(200), "big": np.zeros((200, 10_000), np.float32)}, shard_size=200
    )
    loader = WebDatasetLoader(tmp_path)
    samples = iter(loader)
    before = bytes_read()
    next(samples)
    assert bytes_read() - before < 4_000_000  # of 8 MB; some neighbours may be read ahead
    loader.close()


@pytest.mark.parametrize(
    ("n", "batch_size", "num_workers", "drop_last"),
    [(100, 16, 2, False), (70, 32, 4, False), (70, 32, 0, True), (33, 1, 2, False)],
)
def test_row_13_lengths_are_exact(
    sets: Callable[..., Path], n: int, batch_size: int, num_workers: int, drop_last: bool
) -> None:
    folder = sets(n, 15)
    with create_webdataset_dataloader(
        folder, batch_size=batch_size, num_workers=num_workers, drop_last=drop_last
    ) as loader:
        for _ in range(2):
            assert len(loader) == len(list(loader)) == (n // batch_size if drop_last else -(-n // batch_size))
    dataset = WebDatasetLoader(folder)
    assert len(dataset) == len(list(dataset)) == n


@pytest.mark.parametrize("num_workers", [0, 2])
def test_row_14_ranks_share_the_samples(
    sets: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, num_workers: int
) -> None:
    ranks = []
    for rank in range(4):
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("WORLD_SIZE", "4")
        with create_webdataset_dataloader(sets(80, 10), batch_size=5, num_workers=num_workers) as loader:
            ranks.append(batch_xs(loader))
    assert [len(batches) for batches in ranks] == [4] * 4
    assert sorted(x for batches in ranks for batch in batches for x in batch) == list(range(80))


@pytest.mark.filterwarnings(MORE_WORKERS)
@pytest.mark.parametrize("compression", ["none", "gz"])
def test_row_14_more_workers_than_shards_are_no_matter(sets: Callable[..., Path], compression: str) -> None:
    folder = sets(20, 10, compression=compression)
    with create_webdataset_dataloader(folder, batch_size=3, num_workers=4) as loader:
        assert sorted(x for batch in batch_xs(loader) for x in batch) == list(range(20))
    torchs = torch.utils.data.DataLoader(WebDatasetLoader(folder), batch_size=None, num_workers=4)
    for _ in range(2):
        assert sorted(xs(torchs)) == list(range(20))


def test_row_15_a_modality_that_one_sample_lacks_is_an_error() -> None:
    with pytest.raises(OptionError, match=r"samples 0 and 1, which differ in \['b'\]"):
        collate_webdataset([{"a": torch.zeros(2), "b": torch.zeros(2)}, {"a": torch.zeros(2)}])


def test_row_15_strings_are_lists_and_fields_keep_their_order() -> None:
    samples = [{"z": "left", "a": 1, "m": None}, {"z": "right", "a": 2, "m": None}]
    batch = collate_webdataset(samples)
    assert list(batch) == ["z", "a", "m"]
    assert (batch["z"], batch["a"].tolist(), batch["m"]) == (["left", "right"], [1, 2], [None, None])


def test_row_16_a_saved_sample_is_one_that_was_handed_out(sets: Callable[..., Path], tmp_path: Path) -> None:
    path, folder = tmp_path / "checkpoint.json", sets(50, 10)
    whole = xs(WebDatasetLoader(folder))
    loader = ResumableWebDatasetLoader(folder, checkpoint_path=path, checkpoint_interval=10)
    samples = iter(loader)
    seen = xs(islice(samples, 10))
    # The tenth sample was handed out, the eleventh was not asked for.
    assert path.exists()
    assert xs(ResumableWebDatasetLoader(folder, checkpoint_path=path)) == whole[10:]
    assert seen == whole[:10]


def test_row_16_a_checkpoint_says_whose_it_is(sets: Callable[..., Path], tmp_path: Path) -> None:
    path = tmp_path / "checkpoint.json"
    loader = ResumableWebDatasetLoader(sets(50, 10), checkpoint_path=path, checkpoint_interval=7)
    list(islice(loader, 7))
    saved = json.loads(path.read_bytes())
    assert {"version", "epoch", "batch", "plan"} <= set(saved)
    assert saved["plan"]["seed"] == 42
    with pytest.raises(ResumeError, match="seed changed from 42 to 7"):
        ResumableWebDatasetLoader(sets(50, 10), checkpoint_path=path, seed=7)
    with pytest.raises(ResumeError, match="data"):
        ResumableWebDatasetLoader(sets(50, 25), checkpoint_path=path)


def test_row_16_after_a_finished_run_a_new_one_is_whole(sets: Callable[..., Path], tmp_path: Path) -> None:
    path = tmp_path / "checkpoint.json"
    for _ in range(2):
        loader = ResumableWebDatasetLoader(sets(50, 10), checkpoint_path=path, checkpoint_interval=7)
        assert sorted(xs(loader)) == list(range(50))


def test_row_18_pinning_on_a_machine_without_a_gpu_is_silent(
    sets: Callable[..., Path], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING), create_webdataset_dataloader(sets(50, 10), pin_memory=True) as loader:
        assert len(batch_xs(loader)) == 2
    assert caplog.records == []


def test_row_18_max_workers_are_threads_that_read_ahead(sets: Callable[..., Path]) -> None:
    alone, ahead = WebDatasetLoader(sets(50, 10)), WebDatasetLoader(sets(50, 10), max_workers=2)
    before = len(own_threads())
    samples = iter(alone)
    next(samples)
    assert len(own_threads()) == before
    samples = iter(ahead)
    next(samples)
    assert len(own_threads()) >= before + 2
    samples.close()
    assert xs(alone) == xs(ahead)  # the second epoch of both
    alone.close()
    ahead.close()
