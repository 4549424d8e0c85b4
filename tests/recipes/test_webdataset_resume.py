"""Stopping after any sample and going on: nothing lost, nothing twice, whoever read before and whoever reads now."""

import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "run" / "parts"))

from penstock_test_parts import ended, isolated

from penstock import (
    Loader,
    LoaderError,
    OptionError,
    ResumableWebDatasetLoader,
    ResumeError,
    RunOptions,
    WebDatasetLoader,
    create_shards_from_arrays,
    create_webdataset_dataloader,
)

N, SHARD = 13, 4  # three shards of 4 and one of 1

# What the order depends on: a window of runs, all samples at once, shards only, storage order.
ORDERS: dict[str, dict[str, Any]] = {
    "window": {"buffer_size": 4},
    "all": {"buffer_size": 1000},
    "shards": {"shuffle": False, "shuffle_shards": True},
    "storage": {"shuffle": False},
}


@pytest.fixture(scope="module")
def sets(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    made: dict[Any, Path] = {}

    def written(n: int = N, shard_size: int = SHARD, offset: int = 0, **options: Any) -> Path:
        key = (n, shard_size, offset, tuple(options.items()))
        if key not in made:
            made[key] = tmp_path_factory.mktemp("set")
            create_shards_from_arrays(made[key], {"x": np.arange(n) + offset}, shard_size=shard_size, **options)
        return made[key]

    return written


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)


def xs(samples: Any) -> list[int]:
    return [int(sample["x"]) for sample in samples]


def flat(batches: Any) -> list[int]:
    return [x for batch in batches for x in batch["x"].tolist()]


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
    with pytest.raises(LoaderError, match="iterate anew"):
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


# -- the checkpoint file -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("max_workers", [None, 2])
@pytest.mark.parametrize("order", ["window", "all"])
def test_a_loader_that_is_made_again_goes_on_after_every_k(
    sets: Callable[..., Path], tmp_path: Path, order: str, max_workers: int | None
) -> None:
    whole = xs(WebDatasetLoader(sets(), **ORDERS[order]))
    for k in range(1, N + 1):
        path = tmp_path / f"{k}.json"
        first = ResumableWebDatasetLoader(sets(), path, 1, max_workers=max_workers, **ORDERS[order])
        samples = iter(first)
        assert xs(islice(samples, k)) == whole[:k]
        first.close()
        second = ResumableWebDatasetLoader(sets(), path, 1, **ORDERS[order])
        assert xs(second) == whole[k:]
        second.close()


@pytest.mark.parametrize("interval", [1, 3, 5, 13, 14])
def test_checkpoints_are_saved_when_they_are_due_and_at_the_end(
    sets: Callable[..., Path], tmp_path: Path, interval: int
) -> None:
    path = tmp_path / "c.json"
    loader = ResumableWebDatasetLoader(sets(), path, interval)
    places = [json.loads(path.read_bytes())["batch"] if path.exists() else 0 for _ in loader]
    assert places == [k // interval * interval for k in range(1, N + 1)]
    state = json.loads(path.read_bytes())
    assert (state["epoch"], state["batch"]) == (1, 0)


def test_the_interval_goes_on_counting_after_a_resume(sets: Callable[..., Path], tmp_path: Path) -> None:
    path = tmp_path / "c.json"
    first = ResumableWebDatasetLoader(sets(), path, 5)
    list(islice(first, 7))
    second = ResumableWebDatasetLoader(sets(), path, 5)
    assert {json.loads(path.read_bytes())["batch"] for _ in second} == {5, 10}


def test_several_epochs_are_counted(sets: Callable[..., Path], tmp_path: Path) -> None:
    path = tmp_path / "c.json"
    whole = WebDatasetLoader(sets())
    epochs = [xs(whole) for _ in range(3)]
    loader = ResumableWebDatasetLoader(sets(), path, 4)
    assert [xs(loader), xs(islice(loader, 9))] == [epochs[0], epochs[1][:9]]
    again = ResumableWebDatasetLoader(sets(), path, 4)
    assert [xs(again), xs(again)] == [epochs[1][8:], epochs[2]]


def test_the_checkpoint_holds_the_seeds_two_keys_and_where_exactly(sets: Callable[..., Path], tmp_path: Path) -> None:
    path = tmp_path / "deep" / "er" / "c.json"
    list(islice(ResumableWebDatasetLoader(sets(), path, 6), 6))
    state = json.loads(path.read_bytes())
    assert {"shard_idx": 1, "sample_offset": 2, "epoch": 0, "batch": 6}.items() <= state.items()
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize("content", [b"", b"{", b"\x00\x01", b'{"shard_idx": 0, "sample_off'], ids=repr)
def test_a_checkpoint_that_is_damaged_is_named_with_what_to_do(
    sets: Callable[..., Path], tmp_path: Path, content: bytes
) -> None:
    path = tmp_path / "c.json"
    path.write_bytes(content)
    with pytest.raises(ResumeError, match=r"c\.json cannot be read.*Remove it"):
        ResumableWebDatasetLoader(sets(), path)
    assert path.read_bytes() == content


@pytest.mark.parametrize(
    "content", [b"[]", b"3", b"null", b'{"model": "weights"}', b'{"shard_idx": 9, "sample_offset": 0}']
)
def test_a_checkpoint_of_something_else_is_refused(sets: Callable[..., Path], tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "c.json"
    path.write_bytes(content)
    with pytest.raises(ResumeError) as caught:
        ResumableWebDatasetLoader(sets(), path)
    assert "c.json" in f"{caught.value} {getattr(caught.value, '__notes__', '')}"
    assert path.read_bytes() == content


def test_a_checkpoint_of_another_seed_or_set_is_refused(sets: Callable[..., Path], tmp_path: Path) -> None:
    path = tmp_path / "c.json"
    list(islice(ResumableWebDatasetLoader(sets(), path, 3), 3))
    for folder, options, message in (
        (sets(), {"seed": 1}, "seed changed from 42 to 1"),
        (sets(offset=1), {}, "the data"),
        (sets(), {"buffer_size": 4}, "order"),
    ):
        with pytest.raises(ResumeError, match=message) as caught:
            ResumableWebDatasetLoader(folder, path, **options)
        assert any("c.json" in note for note in caught.value.__notes__)


def test_a_checkpoint_of_the_origin_is_resumed(sets: Callable[..., Path], tmp_path: Path) -> None:
    path = tmp_path / "c.json"
    path.write_text('{"shard_idx": 1, "sample_offset": 2}')
    assert xs(ResumableWebDatasetLoader(sets(), path)) == xs(WebDatasetLoader(sets()))[6:]


def test_without_a_file_nothing_is_saved(
    sets: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    loader = ResumableWebDatasetLoader(sets(), checkpoint_interval=1)
    assert sorted(xs(loader)) == list(range(N))
    assert list(tmp_path.iterdir()) == []
    for use in (loader.save_checkpoint, loader.load_checkpoint):
        with pytest.raises(OptionError, match="checkpoint_path"):
            use()


@pytest.mark.parametrize("interval", [0, -1, 1.5])
def test_an_interval_that_cannot_be_is_refused(sets: Callable[..., Path], tmp_path: Path, interval: Any) -> None:
    with pytest.raises(OptionError, match="checkpoint_interval="):
        ResumableWebDatasetLoader(sets(), tmp_path / "c.json", interval)


def test_saving_and_loading_by_hand(sets: Callable[..., Path], tmp_path: Path) -> None:
    loader = ResumableWebDatasetLoader(sets(), tmp_path / "c.json")
    samples = iter(loader)
    list(islice(samples, 6))
    loader.save_checkpoint()
    rest = xs(samples)
    loader.save_checkpoint()
    again = ResumableWebDatasetLoader(sets(), tmp_path / "c.json")
    assert xs(again) != rest
    samples = iter(loader)
    list(islice(samples, 2))
    loader.load_checkpoint()
    assert len(xs(loader)) == N


def test_a_reader_of_the_file_never_sees_half_of_it(sets: Callable[..., Path], tmp_path: Path) -> None:
    path, done, torn = tmp_path / "c.json", threading.Event(), []

    def look() -> None:
        while not done.is_set():
            if path.exists():
                content = path.read_bytes()
                try:
                    json.loads(content)
                except ValueError:
                    torn.append(content)

    looking = threading.Thread(target=look)
    looking.start()
    loader = ResumableWebDatasetLoader(sets(), path, 1)
    for _ in range(5):
        list(loader)
    done.set()
    looking.join()
    assert torn == []


def test_resuming_in_torchs_worker_processes_is_refused(sets: Callable[..., Path], tmp_path: Path) -> None:
    dataset, kept = ResumableWebDatasetLoader(sets(), tmp_path / "c.json", 1), []

    def error_in_workers() -> str:
        batches = iter(torch.utils.data.DataLoader(dataset, batch_size=None, num_workers=1))
        kept.append(batches)  # torch waits for workers that raised; isolated() does not
        try:
            return f"delivered {len(list(batches))}"
        except LoaderError as error:
            return str(error)

    assert "create_webdataset_dataloader() and its state_dict()" in isolated(error_in_workers)
    assert not (tmp_path / "c.json").exists()


def test_without_a_file_torchs_worker_processes_are_fine(sets: Callable[..., Path]) -> None:
    dataset = ResumableWebDatasetLoader(sets())
    assert sorted(xs(torch.utils.data.DataLoader(dataset, batch_size=None, num_workers=2))) == list(range(N))


def test_an_unknown_keyword_is_a_type_error(sets: Callable[..., Path]) -> None:
    with pytest.raises(TypeError, match="suffle"):
        ResumableWebDatasetLoader(sets(), suffle=True)


def training(folder: Path, checkpoint: Path, log: Path, stop: int) -> None:
    loader = ResumableWebDatasetLoader(folder, checkpoint, 2)
    with log.open("a", buffering=1) as out:
        for count, sample in enumerate(loader, start=1):
            out.write(f"{int(sample['x'])}\n")
            if count == stop:
                os.kill(os.getpid(), signal.SIGKILL)


def test_a_training_that_is_killed_again_and_again_sees_every_sample(sets: Callable[..., Path], tmp_path: Path) -> None:
    log, checkpoint = tmp_path / "log", tmp_path / "checkpoint.json"
    for stop in (5, 4, 0):  # killed after the fifth sample, saved after the fourth; and so on
        assert ended(training, sets(), checkpoint, log, stop) == (-signal.SIGKILL if stop else 0)
    whole = xs(WebDatasetLoader(sets()))
    assert list(map(int, log.read_text().split())) == [*whole[:5], *whole[4:8], *whole[8:]]
