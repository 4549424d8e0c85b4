"""Resuming after any sample: nothing lost, nothing repeated, with any readers before and after."""

import json
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import penstock_test_shards
import pytest
import torch
from penstock_test_shards import ORDERS, flat, xs

from penstock import Loader, LoaderError, ResumeError, RunOptions, create_webdataset_dataloader
from penstock.recipes.webdataset import WebDatasetLoader

N, SHARD = 13, 4  # three shards of 4 and one of 1
no_launcher, sets = penstock_test_shards.no_launcher, penstock_test_shards.sets


def saved(state: Any) -> Any:
    """Return a state as it comes back from a file."""
    return json.loads(json.dumps(state))


# -- get_state and set_state -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("order", "compression", "before", "after"),
    [
        *((order, compression, None, None) for order in ORDERS for compression in ("none", "gz")),
        ("window", "none", None, 2),
        ("window", "gz", 2, None),
        ("all", "none", 2, 3),
    ],
)
def test_after_every_k_samples_the_rest_is_what_was_left(
    sets: Callable[..., Path], order: str, compression: str, before: int | None, after: int | None
) -> None:
    folder, options = sets(compression=compression), ORDERS[order]
    whole = WebDatasetLoader(folder, **options)
    epochs = [xs(whole) for _ in range(2)]
    for k in range(N + 1):
        first = WebDatasetLoader(folder, max_workers=before, **options)
        samples = iter(first)
        assert xs(islice(samples, k)) == epochs[0][:k]
        state = saved(first.get_state())
        first.close()
        assert {
            "shard_idx": min(k // SHARD, 3),
            "sample_offset": k - SHARD * min(k // SHARD, 3),
        }.items() <= state.items()
        second = WebDatasetLoader(folder, max_workers=after, **options)
        second.set_state(state)
        assert xs(second) == epochs[0][k:]
        assert xs(second) == epochs[1]
        second.close()


def test_after_the_last_sample_was_asked_for_the_state_is_the_next_epochs(sets: Callable[..., Path]) -> None:
    loader = WebDatasetLoader(sets())
    epochs = [xs(loader) for _ in range(2)]
    state = loader.get_state()
    assert (state["epoch"], state["shard_idx"], state["sample_offset"]) == (2, 0, 0)
    again = WebDatasetLoader(sets())
    again.set_state(state)
    third = xs(again)
    assert sorted(third) == list(range(N))
    assert third not in epochs


@pytest.mark.parametrize("k", range(N + 1))
def test_the_same_object_can_be_sent_back(sets: Callable[..., Path], k: int) -> None:
    loader = WebDatasetLoader(sets())
    samples = iter(loader)
    list(islice(samples, k))
    state = loader.get_state()
    rest = xs(samples)
    loader.set_state(state)
    assert xs(loader) == rest


def test_an_iteration_that_set_state_ended_says_so(sets: Callable[..., Path]) -> None:
    loader = WebDatasetLoader(sets())
    samples = iter(loader)
    next(samples)
    loader.set_state(loader.get_state())
    with pytest.raises(LoaderError, match="during this iteration"):
        next(samples)


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


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"seed": 7}, "seed changed from 42 to 7"),
        ({"buffer_size": 4}, "order"),
        ({"shuffle": False}, "order"),
        ({"shard_pattern": "shard_00000[01].tar"}, "number of items|data"),
    ],
    ids=["seed", "buffer_size", "shuffle", "shard_pattern"],
)
def test_a_state_of_another_order_is_refused_with_the_difference(
    sets: Callable[..., Path], other: dict[str, Any], message: str
) -> None:
    loader = WebDatasetLoader(sets())
    samples = iter(loader)
    next(samples)
    with pytest.raises(ResumeError, match=message):
        WebDatasetLoader(sets(), **other).set_state(loader.get_state())


def test_a_state_of_other_data_is_refused(sets: Callable[..., Path]) -> None:
    loader = WebDatasetLoader(sets())
    samples = iter(loader)
    next(samples)
    for other in (sets(offset=1), sets(shard_size=5), sets(n=14)):
        with pytest.raises(ResumeError, match="another plan"):
            WebDatasetLoader(other).set_state(loader.get_state())


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


# -- Loader.state_dict, with changed workers ---------------------------------------------------------------------------

EXECUTORS = {
    "inline": (0, RunOptions()),
    "threads": (2, RunOptions(executor="threads")),
    "processes": (2, RunOptions(executor="processes", start_method="fork", persistent=True)),
}


@pytest.fixture(scope="module")
def loaders(sets: Callable[..., Path]) -> Iterator[Callable[[str, str], Loader]]:
    """Return loaders that are made once, for each order and executor: starting processes is the slowest part."""
    made: dict[tuple[str, str], Loader] = {}

    def loader(order: str, executor: str) -> Loader:
        if (order, executor) not in made:
            dataset, (workers, options) = WebDatasetLoader(sets(), **ORDERS[order]), EXECUTORS[executor]
            plan = dataset.plan(2)
            made[order, executor] = Loader(dataset.source, plan, num_workers=workers, options=options)
        return made[order, executor]

    yield loader
    for each in made.values():
        each.close()


@pytest.mark.parametrize("order", ["window", "all"])
@pytest.mark.parametrize("before", EXECUTORS)
@pytest.mark.parametrize("after", EXECUTORS)
def test_after_every_k_batches_other_workers_give_what_was_left(
    sets: Callable[..., Path], loaders: Callable[[str, str], Loader], order: str, before: str, after: str
) -> None:
    whole = WebDatasetLoader(sets(), **ORDERS[order])
    epochs = [xs(whole) for _ in range(2)]
    first, second = loaders(order, before), loaders(order, after)
    for epoch in range(2):
        for k in range(8):
            first.load_state_dict({**first.state_dict(), "epoch": epoch, "batch": 0, "origin": 0})
            batches = iter(first)
            seen = flat(islice(batches, k))
            state = saved(first.state_dict())
            del batches
            second.load_state_dict(state)
            rest = flat(second)
            # After the seventh of seven batches, nothing is left of this epoch.
            assert seen + rest == epochs[epoch]


@pytest.mark.parametrize("k", range(8))
def test_the_seeds_function_goes_on_where_another_batch_size_stopped(sets: Callable[..., Path], k: int) -> None:
    def loader(batch_size: int, num_workers: int) -> Loader:
        return create_webdataset_dataloader(sets(), batch_size=batch_size, num_workers=num_workers)

    with loader(2, 0) as first:
        batches = iter(first)
        seen = flat(islice(batches, k))
        state = saved(first.state_dict())
    with loader(5, 2) as second:
        second.load_state_dict(state)
        assert seen + flat(second) == xs(WebDatasetLoader(sets()))


@pytest.mark.parametrize(("size", "then"), [(2, 1), (1, 2), (2, 3), (3, 2)])
def test_a_state_goes_on_with_another_number_of_ranks(
    sets: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, size: int, then: int
) -> None:
    folder = sets(36, 8)

    def ranks(count: int) -> list[Loader]:
        made = []
        for rank in range(count):
            monkeypatch.setenv("RANK", str(rank))
            monkeypatch.setenv("WORLD_SIZE", str(count))
            made.append(create_webdataset_dataloader(folder, batch_size=3, num_workers=0))
        return made

    for k in range(36 // 3 // size + 1):
        first = ranks(size)
        seen = [x for loader in first for x in flat(islice(loader, k))]
        states = [loader.state_dict() for loader in first]
        assert states == states[:1] * size
        second = ranks(then)
        for loader in second:
            loader.load_state_dict(saved(states[0]))
        rests = [list(loader) for loader in second]
        assert [len(rest) for rest in rests] == [-(-(36 // 3 - k * size) // then)] * then
        assert sorted(seen + [x for rest in rests for x in flat(rest)]) == list(range(36))
