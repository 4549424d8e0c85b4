"""Ranks share the samples of WebDataset loaders equally and without overlap, in equally many steps."""

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import penstock_test_shards
import pytest
import torch
import torch.distributed as dist
from penstock_test_parts import run_side_by_side
from penstock_test_shards import xs

from penstock import create_webdataset_dataloader
from penstock.recipes.webdataset import WebDatasetLoader

N, SHARD = 41, 8  # five shards of 8 and one of 1
no_launcher, sets = penstock_test_shards.no_launcher, penstock_test_shards.sets


def on_rank(monkeypatch: pytest.MonkeyPatch, rank: int, size: int) -> None:
    monkeypatch.setenv("RANK", str(rank))
    monkeypatch.setenv("WORLD_SIZE", str(size))


@pytest.mark.parametrize("size", [2, 3, 5])
def test_ranks_share_samples_equally_and_without_overlap(
    sets: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    whole = WebDatasetLoader(sets())
    orders = [xs(whole) for _ in range(2)]
    found = []
    for rank in range(size):
        on_rank(monkeypatch, rank, size)
        loader = WebDatasetLoader(sets())
        found.append([xs(loader) for _ in range(2)])
        assert len(loader) == len(found[-1][0])
    steps = N // size
    for epoch in range(2):
        assert [len(rank[epoch]) for rank in found] == [steps] * size
        together = [x for step in zip(*(rank[epoch] for rank in found), strict=True) for x in step]
        assert together == orders[epoch][: steps * size]


def on_all_ranks(monkeypatch: pytest.MonkeyPatch, size: int, folder: Path, **options: Any) -> list[list[list[int]]]:
    """Return the batches of one epoch, by rank."""
    found = []
    for rank in range(size):
        on_rank(monkeypatch, rank, size)
        with create_webdataset_dataloader(folder, batch_size=4, **options) as loader:
            found.append([batch["x"].tolist() for batch in loader])
            assert len(loader) == len(found[-1])
    return found


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_ranks_share_batches_equally_and_without_overlap(
    sets: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, size: int, num_workers: int
) -> None:
    found = on_all_ranks(monkeypatch, size, sets(48), num_workers=num_workers)
    assert [len(batches) for batches in found] == [12 // size] * size
    assert sorted(x for batches in found for batch in batches for x in batch) == list(range(48))


@pytest.mark.parametrize("shuffle", [False, True], ids=["stored", "shuffled"])
@pytest.mark.parametrize("n", [42, 45, 47])
def test_a_last_round_that_does_not_divide_is_shared_out(
    sets: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, n: int, shuffle: bool
) -> None:
    found = on_all_ranks(monkeypatch, 2, sets(n), num_workers=0, shuffle=shuffle)
    assert [len(batches) for batches in found] == [6, 6]
    assert sorted(x for batches in found for batch in batches for x in batch) == list(range(n))


def test_a_last_item_that_ranks_cannot_share_goes_with_the_step_before_or_is_dropped(
    sets: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = on_all_ranks(monkeypatch, 2, sets(41), num_workers=0)
    assert [[len(batch) for batch in batches] for batches in found] == [[4] * 5, [4] * 4 + [5]]
    assert sorted(x for batches in found for batch in batches for x in batch) == list(range(41))
    found = on_all_ranks(monkeypatch, 2, sets(41), num_workers=0, drop_last=True)
    assert [len(batches) for batches in found] == [5, 5]
    assert len({x for batches in found for batch in batches for x in batch}) == 40


def test_ranks_with_torchs_workers_share_samples_equally_and_without_overlap(
    sets: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for rank in range(2):
        on_rank(monkeypatch, rank, 2)
        loader = torch.utils.data.DataLoader(WebDatasetLoader(sets(48, 8)), batch_size=None, num_workers=2)
        found.append([xs(loader) for _ in range(2)])
    for epoch in range(2):
        assert [len(rank[epoch]) for rank in found] == [24, 24]
        assert sorted(found[0][epoch] + found[1][epoch]) == list(range(48))


def gloo_rank(store: str, rank: int, folder: Path) -> dict[str, Any]:
    """Return what one of two ranks sees in two epochs of batches and one of samples, and where it stands."""
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=2, timeout=timedelta(seconds=300)
    )
    found: dict[str, Any] = {"batches": [], "samples": []}
    with create_webdataset_dataloader(folder, batch_size=4, num_workers=2) as loader:
        for _ in range(2):
            for batch in loader:
                dist.all_reduce(torch.ones(1))  # a rank with another number of steps would leave the other one waiting
                found["batches"].append(batch["x"].tolist())
    dataset = WebDatasetLoader(folder)
    for sample in dataset:
        dist.all_reduce(torch.ones(1))
        found["samples"].append(int(sample["x"]))
    found["states"] = [loader.state_dict(), dataset.get_state()]
    dist.barrier()
    dist.destroy_process_group()
    return found


def test_two_gloo_ranks_see_all_samples_once_in_equally_many_steps(sets: Callable[..., Path], tmp_path: Path) -> None:
    folder, store = sets(48, 10), str(tmp_path / "store")
    left, right = run_side_by_side((gloo_rank, store, 0, folder), (gloo_rank, store, 1, folder))
    assert left["states"] == right["states"]
    assert len(left["batches"]) == len(right["batches"]) == 12
    for epoch in (slice(0, 6), slice(6, 12)):
        assert sorted(x for rank in (left, right) for batch in rank["batches"][epoch] for x in batch) == list(range(48))
    assert len(left["samples"]) == len(right["samples"]) == 24
    assert sorted(left["samples"] + right["samples"]) == list(range(48))
