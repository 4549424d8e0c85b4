"""The reach of the shuffle of WebDataset loaders: buffer_size samples, over shards or within them."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import penstock_test_shards
import pytest
from penstock_test_shards import OURS, flat, ours, xs

from penstock.recipes.webdataset import WebDatasetLoader

N, SHARD = 41, 8  # five shards of 8 and one of 1
no_launcher, sets = penstock_test_shards.no_launcher, penstock_test_shards.sets


def displacement(order: list[int]) -> int:
    """Return how far a sample is delivered from where it is stored, at the most."""
    return int(np.abs(np.array(order) - np.arange(len(order))).max())


@pytest.mark.parametrize("buffer_size", [64, 200, 640])
def test_buffer_size_bounds_how_far_samples_move(sets: Callable[..., Path], buffer_size: int) -> None:
    loader = WebDatasetLoader(sets(2000, 500), shuffle_shards=False, buffer_size=buffer_size, fields=["x"])
    order = xs(loader)
    assert sorted(order) == list(range(2000))
    assert 0.5 * buffer_size < displacement(order) < 1.25 * buffer_size


def test_a_buffer_of_all_samples_gives_any_order(sets: Callable[..., Path]) -> None:
    loader = WebDatasetLoader(sets(2000, 500), buffer_size=2000, fields=["x"])
    assert loader.plan(32).mixing().score > 0.85
    assert displacement(xs(loader)) > 1500


def test_a_larger_buffer_mixes_better(sets: Callable[..., Path]) -> None:
    folder = sets(2000, 500)
    scores = [WebDatasetLoader(folder, buffer_size=size).plan(32).mixing().score for size in (1, 256, 1000, 2000)]
    assert scores == sorted(scores)
    assert scores[0] < 0.2
    assert scores[-1] > 0.85


def test_what_is_delivered_together_comes_from_about_as_many_neighbours(sets: Callable[..., Path]) -> None:
    order = np.array(xs(WebDatasetLoader(sets(2000, 500), buffer_size=250, fields=["x"])))
    for start in range(0, 2000, 250):
        # Runs of 62 or 63: a buffer of 250 holds four of them, and reaches into the next at most.
        assert len(np.unique(order[start : start + 250] // 62.5)) <= 9


def test_without_shuffled_shards_they_follow_each_other(sets: Callable[..., Path]) -> None:
    order = xs(WebDatasetLoader(sets(400, 100), buffer_size=100, shuffle_shards=False, fields=["x"]))
    assert sorted(order[:100]) == list(range(100))
    assert order[:100] != list(range(100))
    shuffled = xs(WebDatasetLoader(sets(400, 100), buffer_size=100, fields=["x"]))
    assert sorted(shuffled[:100]) != list(range(100))


def test_only_the_shards_can_be_shuffled(sets: Callable[..., Path]) -> None:
    loader = WebDatasetLoader(sets(), shuffle=False, shuffle_shards=True)
    orders = [xs(loader) for _ in range(3)]
    for order in orders:
        shards = [order[start] // SHARD for start in range(N) if order[start] % SHARD == 0]
        assert order == [x for shard in shards for x in range(shard * SHARD, min(N, (shard + 1) * SHARD))]
        assert sorted(shards) == list(range(6))
    assert len({tuple(order) for order in orders}) == 3


@pytest.mark.parametrize("compression", ["none", "gz"])
@pytest.mark.parametrize("kind", OURS)
def test_without_shuffle_storage_order_is_kept_by_any_workers(
    sets: Callable[..., Path], kind: str, compression: str
) -> None:
    with ours(sets(compression=compression), kind, shuffle=False) as loader:
        for _ in range(2):
            assert flat(loader) == list(range(N))


def test_a_pattern_keeps_the_reach_of_the_shuffle(sets: Callable[..., Path]) -> None:
    loader = WebDatasetLoader(
        sets(2000, 500), shard_pattern="shard_000001.tar", shuffle_shards=False, buffer_size=64, fields=["x"]
    )
    order = xs(loader)
    assert sorted(order) == list(range(500, 1000))
    assert displacement([x - 500 for x in order]) < 128
