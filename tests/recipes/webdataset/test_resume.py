"""Resuming after any sample: nothing lost, nothing repeated, with any readers before and after."""

import json
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import penstock_test_shards
import pytest
import torch
from penstock_test_shards import xs

from penstock import LoaderError, ResumeError
from penstock.recipes.webdataset import WebDatasetLoader

N, SHARD = 13, 4  # three shards of 4 and one of 1
no_launcher, sets = penstock_test_shards.no_launcher, penstock_test_shards.sets


def saved(state: Any) -> Any:
    """Return a state as it comes back from a file."""
    return json.loads(json.dumps(state))


# -- get_state and set_state -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("k", range(N + 1))
def test_a_state_names_the_shard_and_the_sample(sets: Callable[..., Path], k: int) -> None:
    loader = WebDatasetLoader(sets())
    samples = iter(loader)
    list(islice(samples, k))
    place = {"shard_idx": min(k // SHARD, 3), "sample_offset": k - SHARD * min(k // SHARD, 3)}
    assert place.items() <= loader.get_state().items()


@pytest.mark.parametrize("k", range(N + 1))
def test_a_state_of_two_bare_keys_as_older_files_have_it_is_taken(sets: Callable[..., Path], k: int) -> None:
    loader = WebDatasetLoader(sets())
    loader.set_state({"shard_idx": min(k // SHARD, 3), "sample_offset": k - SHARD * min(k // SHARD, 3)})
    assert xs(loader) == xs(WebDatasetLoader(sets()))[k:]


@pytest.mark.parametrize(
    "state",
    [
        {},
        [],
        "shard 0",
        None,
        {"shard_idx": 0},
        {"sample_offset": 3},
        {"shard_idx": 4, "sample_offset": 0},
        {"shard_idx": -1, "sample_offset": 0},
        {"shard_idx": 0, "sample_offset": 5},
        {"shard_idx": 0, "sample_offset": -1},
        {"shard_idx": "0", "sample_offset": 1},
        {"shard_idx": 0.0, "sample_offset": 1},
        {"shard_idx": 0, "sample_offset": None},
    ],
    ids=str,
)
def test_what_is_no_state_is_refused_and_changes_nothing(sets: Callable[..., Path], state: Any) -> None:
    loader = WebDatasetLoader(sets())
    with pytest.raises(ResumeError):
        loader.set_state(state)
    assert xs(loader) == xs(WebDatasetLoader(sets()))


def test_a_state_does_not_depend_on_which_fields_are_read(sets: Callable[..., Path]) -> None:
    loader = WebDatasetLoader(sets())
    samples = iter(loader)
    list(islice(samples, 5))
    again = WebDatasetLoader(sets(), fields=["x"])
    again.set_state(loader.get_state())
    assert xs(again) == xs(samples)


def test_under_torchs_workers_the_state_is_refused_rather_than_wrong(sets: Callable[..., Path]) -> None:
    dataset = WebDatasetLoader(sets())
    assert sorted(xs(torch.utils.data.DataLoader(dataset, batch_size=None, num_workers=2))) == list(range(N))
    with pytest.raises(LoaderError, match=r"create_webdataset_dataloader.*num_workers=0"):
        dataset.get_state()


def test_under_torchs_loader_without_workers_the_state_counts_samples(sets: Callable[..., Path]) -> None:
    dataset = WebDatasetLoader(sets())
    batches = iter(torch.utils.data.DataLoader(dataset, batch_size=3, collate_fn=xs))
    seen = [next(batches), next(batches)]
    again = WebDatasetLoader(sets())
    again.set_state(saved(dataset.get_state()))
    assert [x for batch in seen for x in batch] + xs(again) == xs(WebDatasetLoader(sets()))
