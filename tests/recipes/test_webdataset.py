"""Seed 004's loaders: every sample once per epoch, in an order that seed and epoch decide, whoever reads them."""

import json
import pickle
import sys
import tarfile
from collections.abc import Callable
from datetime import timedelta
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[1] / "run" / "parts"))

from penstock_test_parts import Surroundings, isolated, plain, side_by_side

from penstock import (
    DamageError,
    Loader,
    LoaderError,
    OptionError,
    PlanError,
    RunOptions,
    SourceError,
    WebDatasetLoader,
    create_shards_from_arrays,
    create_webdataset_dataloader,
)

MORE_WORKERS = "ignore:This DataLoader will create 3 worker processes"

N, SHARD = 41, 8  # five shards of 8 and one of 1


@pytest.fixture(scope="module")
def sets(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Return a function that writes a data set of n samples once: x is i, y is (i, i + 1/4)."""
    made: dict[Any, Path] = {}

    def written(n: int = N, shard_size: int = SHARD, **options: Any) -> Path:
        key = (n, shard_size, tuple(options.items()))
        if key not in made:
            made[key] = tmp_path_factory.mktemp("set")
            create_shards_from_arrays(made[key], arrays(n), shard_size=shard_size, **options)
        return made[key]

    return written


def arrays(n: int) -> dict[str, np.ndarray]:
    x = np.arange(n)
    return {"x": x, "y": np.stack([x, x + 0.25], axis=1).astype(np.float32)}


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)


def xs(samples: Any) -> list[int]:
    return [int(sample["x"]) for sample in samples]


def flat(batches: Any) -> list[int]:
    return [x for batch in batches for x in batch["x"].tolist()]


def flip(folder: Path, member: str, from_end: int = 1) -> Path:
    """Change one byte of a member's data; return the shard."""
    for shard in sorted(folder.glob("*.tar")):
        with tarfile.open(shard) as tar:
            places = {entry.name: entry.offset_data + entry.size - from_end for entry in tar}
        if member in places:
            with shard.open("r+b") as file:
                file.seek(places[member])
                byte = file.read(1)[0]
                file.seek(places[member])
                file.write(bytes([byte ^ 0xFF]))
            return shard
    raise AssertionError(f"{member} is in no shard")


# -- epochs of one object ----------------------------------------------------------------------------------------------

TORCH = {
    "no workers": {"num_workers": 0},
    "2 persistent workers": {"num_workers": 2, "persistent_workers": True},
    "3 workers per epoch": {"num_workers": 3},
}
OURS = {
    "no workers": (0, RunOptions()),
    "2 threads": (2, RunOptions(executor="threads")),
    "2 persistent processes": (2, RunOptions(executor="processes", start_method="fork", persistent=True)),
    "3 processes per epoch": (3, RunOptions(executor="processes", start_method="fork")),
}


def ours(folder: Path, kind: str, batch_size: int = 4, **options: Any) -> Loader:
    """Return the loader of `create_webdataset_dataloader`, run by an executor of our choice."""
    dataset, (workers, run) = WebDatasetLoader(folder, **options), OURS[kind]
    return Loader(dataset.source, dataset.plan(batch_size), num_workers=workers, options=run)


@pytest.mark.filterwarnings(MORE_WORKERS)
@pytest.mark.parametrize("compression", ["none", "gz"])
@pytest.mark.parametrize("kind", TORCH)
def test_three_epochs_through_torchs_loader_have_all_samples_each_in_an_order_of_its_own(
    sets: Callable[..., Path], kind: str, compression: str
) -> None:
    def epochs(seed: int) -> list[list[int]]:
        dataset = WebDatasetLoader(sets(compression=compression), seed=seed, buffer_size=16)
        loader = torch.utils.data.DataLoader(dataset, batch_size=None, **TORCH[kind])
        return [xs(loader) for _ in range(3)]

    first = epochs(1)
    assert [sorted(epoch) for epoch in first] == [list(range(N))] * 3
    assert len({tuple(epoch) for epoch in first}) == 3
    assert epochs(1) == first
    assert epochs(2)[0] != first[0]


@pytest.mark.parametrize("compression", ["none", "gz"])
@pytest.mark.parametrize("kind", OURS)
def test_three_epochs_through_our_loader_are_the_same_for_any_workers(
    sets: Callable[..., Path], kind: str, compression: str
) -> None:
    folder = sets(compression=compression)
    alone = WebDatasetLoader(folder, seed=1, buffer_size=16)
    wanted = [xs(alone) for _ in range(3)]
    with ours(folder, kind, seed=1, buffer_size=16) as loader:
        found = [flat(loader) for _ in range(3)]
    assert found == wanted
    assert [sorted(epoch) for epoch in found] == [list(range(N))] * 3
    assert len({tuple(epoch) for epoch in found}) == 3


@pytest.mark.parametrize("num_workers", [0, 2, 3])
def test_three_epochs_of_the_seeds_own_function(sets: Callable[..., Path], num_workers: int) -> None:
    found = {}
    for seed in (1, 2):
        with create_webdataset_dataloader(sets(), batch_size=4, num_workers=num_workers, seed=seed) as loader:
            found[seed] = [flat(loader) for _ in range(3)]
    assert all(sorted(epoch) == list(range(N)) for epochs in found.values() for epoch in epochs)
    assert len({tuple(epoch) for epochs in found.values() for epoch in epochs}) == 6
    with create_webdataset_dataloader(sets(), batch_size=4, num_workers=0, seed=1) as loader:
        assert [flat(loader) for _ in range(3)] == found[1]


def test_an_epoch_that_was_left_early_is_followed_by_a_whole_one(sets: Callable[..., Path]) -> None:
    loader = WebDatasetLoader(sets())
    for _ in range(2):
        list(islice(loader, 7))
    assert sorted(xs(loader)) == list(range(N))


@pytest.mark.parametrize("persistent", [False, True], ids=["per epoch", "persistent"])
def test_an_epoch_of_torchs_workers_that_was_left_early_is_followed_by_a_whole_one(
    sets: Callable[..., Path], persistent: bool
) -> None:
    loader = torch.utils.data.DataLoader(
        WebDatasetLoader(sets()), batch_size=None, num_workers=2, persistent_workers=persistent
    )
    list(islice(loader, 5))
    assert sorted(xs(loader)) == sorted(xs(loader)) == list(range(N))


def test_samples_are_tensors_and_metadata_each_of_its_own_item(sets: Callable[..., Path]) -> None:
    for sample in WebDatasetLoader(sets()):
        item = int(sample["x"])
        assert list(sample) == ["x", "y", "metadata"]
        assert (sample["x"].dtype, tuple(sample["x"].shape)) == (torch.int64, ())
        assert sample["y"].tolist() == [item, item + 0.25]
        assert sample["metadata"]["sample_id"] == f"sample_{item:09d}"
        assert (sample["metadata"]["shard_idx"], sample["metadata"]["sample_idx_in_shard"]) == divmod(item, SHARD)


def test_samples_that_are_kept_and_changed_stay_apart(sets: Callable[..., Path]) -> None:
    kept = list(WebDatasetLoader(sets(), fields=["x", "y"]))
    order = xs(kept)
    for sample in kept:
        sample["y"] += 1000
    assert [sample["y"].tolist() for sample in kept] == [[1000 + x, 1000.25 + x] for x in order]


def test_a_loader_goes_to_workers_that_are_spawned(sets: Callable[..., Path]) -> None:
    def epoch_of(dataset: WebDatasetLoader, method: str) -> list[int]:
        return xs(torch.utils.data.DataLoader(dataset, None, num_workers=1, multiprocessing_context=method))

    one, other = WebDatasetLoader(sets(), seed=1), WebDatasetLoader(sets(), seed=1)
    # The worker that is spawned learns that there was an epoch before it.
    epochs = [epoch_of(one, "fork"), epoch_of(one, "spawn")]
    assert epochs == [epoch_of(other, "fork"), epoch_of(other, "fork")]
    assert epochs[0] != epochs[1]


@pytest.mark.parametrize("k", [0, 1, 20, N])
def test_a_pickled_loader_goes_on_where_it_stood(sets: Callable[..., Path], k: int) -> None:
    loader = WebDatasetLoader(sets())
    samples = iter(loader)
    seen = xs(islice(samples, k))
    again = pickle.loads(pickle.dumps(loader))
    assert seen + xs(again) == xs(WebDatasetLoader(sets()))
    assert seen + xs(samples) == xs(WebDatasetLoader(sets()))


def test_a_loader_that_stands_in_the_middle_is_not_shared_out_to_torchs_workers(sets: Callable[..., Path]) -> None:
    loader = WebDatasetLoader(sets())
    samples = iter(loader)
    next(samples)
    kept = []

    def error_in_workers() -> str:
        batches = iter(torch.utils.data.DataLoader(loader, batch_size=None, num_workers=1))
        kept.append(batches)  # torch waits for workers that raised; isolated() does not
        try:
            return f"delivered {len(list(batches))}"
        except LoaderError as error:
            return str(error)

    assert "middle of an epoch" in isolated(error_in_workers)


# -- the shuffle's reach -----------------------------------------------------------------------------------------------


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


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"buffer_size": 0}, "buffer_size=0"),
        ({"max_workers": -1}, "max_workers=-1"),
        ({"max_workers": 1.5}, "max_workers=1.5"),
    ],
)
def test_a_number_that_cannot_be_is_refused(sets: Callable[..., Path], options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        WebDatasetLoader(sets(), **options)


@pytest.mark.parametrize("make", [WebDatasetLoader, create_webdataset_dataloader])
def test_an_unknown_keyword_is_a_type_error_that_names_it(sets: Callable[..., Path], make: Any) -> None:
    with pytest.raises(TypeError, match="suffle"):
        make(sets(), suffle=True)


# -- what is read ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["no workers", "2 threads", "2 persistent processes"])
@pytest.mark.parametrize("compression", ["gz", "bz2", "xz"])
def test_a_compressed_set_gives_what_a_plain_one_gives(sets: Callable[..., Path], compression: str, kind: str) -> None:
    def samples(folder: Path) -> dict[int, Any]:
        with ours(folder, kind, shuffle=True) as loader:
            found = {}
            for batch in loader:
                for row, x in enumerate(batch["x"].tolist()):
                    found[x] = (batch["y"][row].tolist(), batch["metadata"][row])
            return found

    assert samples(sets(compression=compression)) == samples(sets())


def test_a_field_that_is_not_asked_for_may_be_damaged(tmp_path: Path) -> None:
    create_shards_from_arrays(tmp_path, arrays(12), shard_size=5)
    flip(tmp_path, "sample_000000007.y.npy")
    flip(tmp_path, "sample_000000003.metadata.json")
    assert sorted(xs(WebDatasetLoader(tmp_path, fields=["x"], verify="always"))) == list(range(12))
    with create_webdataset_dataloader(tmp_path, num_workers=0, fields=["x"]) as loader:
        assert [list(batch) for batch in loader] == [["x"]]
    for fields, item in ((["x", "y"], 7), (["metadata"], 3)):
        with pytest.raises(DamageError, match=f"item {item} in shard_00000{item // 5}.tar"):
            list(WebDatasetLoader(tmp_path, fields=fields))


def test_a_field_that_does_not_exist_is_refused_with_those_that_do(sets: Callable[..., Path]) -> None:
    with pytest.raises(SourceError, match=r"no field 'z'; the data set has \['x', 'y', 'metadata'\]"):
        create_webdataset_dataloader(sets(), fields=["z"])


@pytest.mark.parametrize("kind", ["no workers", "2 threads"])
def test_what_is_not_decoded_is_the_stored_bytes(sets: Callable[..., Path], kind: str) -> None:
    folder = sets()
    with tarfile.open(folder / "shard_000000.tar") as tar:
        stored = {member.name.partition(".")[2]: tar.extractfile(member).read() for member in tar.getmembers()[:3]}
    with ours(folder, kind, shuffle=False, decode=False) as loader:
        batch = next(iter(loader))
    assert {name: values[0] for name, values in batch.items()} == {
        "x": stored["x.npy"],
        "y": stored["y.npy"],
        "metadata": stored["metadata.json"],
    }
    sample = next(iter(WebDatasetLoader(folder, shuffle=False, decode=False)))
    assert json.loads(sample["metadata"])["sample_id"] == "sample_000000000"


def test_a_pattern_takes_some_shards(sets: Callable[..., Path]) -> None:
    for pattern, shards in (("shard_*.tar", range(6)), ("shard_00000[13].tar", (1, 3)), ("shard_000005.tar", (5,))):
        loader = WebDatasetLoader(sets(), shard_pattern=pattern)
        wanted = [x for x in range(N) if x // SHARD in shards]
        assert len(loader) == len(wanted)
        assert sorted(xs(loader)) == sorted(xs(loader)) == wanted
        with create_webdataset_dataloader(sets(), batch_size=4, num_workers=2, shard_pattern=pattern) as batches:
            assert len(batches) == -(-len(wanted) // 4)
            assert sorted(flat(batches)) == wanted
    with pytest.raises(ValueError, match=r"No shards found that match 'train_\*\.tar'"):
        WebDatasetLoader(sets(), shard_pattern="train_*.tar")


def test_a_pattern_keeps_the_reach_of_the_shuffle(sets: Callable[..., Path]) -> None:
    loader = WebDatasetLoader(
        sets(2000, 500), shard_pattern="shard_000001.tar", shuffle_shards=False, buffer_size=64, fields=["x"]
    )
    order = xs(loader)
    assert sorted(order) == list(range(500, 1000))
    assert displacement([x - 500 for x in order]) < 128


@pytest.mark.parametrize("max_workers", [0, 1, 3])
def test_max_workers_do_not_change_what_is_delivered(sets: Callable[..., Path], max_workers: int) -> None:
    loader = WebDatasetLoader(sets(), max_workers=max_workers)
    alone = WebDatasetLoader(sets())
    for _ in range(2):
        assert [plain(sample) for sample in loader] == [plain(sample) for sample in alone]
    loader.close()


def test_a_short_last_batch_is_kept_or_dropped(sets: Callable[..., Path]) -> None:
    for drop_last, sizes in ((False, [16, 16, 9]), (True, [16, 16])):
        with create_webdataset_dataloader(sets(), batch_size=16, num_workers=0, drop_last=drop_last) as loader:
            assert [len(batch["x"]) for batch in loader] == sizes
            assert len(loader) == len(sizes)


def test_prefetch_factor_bounds_what_is_made_ahead(sets: Callable[..., Path]) -> None:
    with pytest.raises(OptionError, match="prefetch=0"):
        create_webdataset_dataloader(sets(), prefetch_factor=0)
    with create_webdataset_dataloader(sets(), batch_size=4, num_workers=2, prefetch_factor=1) as loader:
        assert sorted(flat(loader)) == list(range(N))


# -- several ranks -----------------------------------------------------------------------------------------------------


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


def test_a_last_step_that_ranks_cannot_share_is_refused_or_dropped(
    sets: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    on_rank(monkeypatch, 0, 2)
    with pytest.raises(PlanError, match="1 items for the last step of 2 ranks"):
        create_webdataset_dataloader(sets(41), batch_size=4, num_workers=0)
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
        "gloo", init_method=f"file://{store}", rank=rank, world_size=2, timeout=timedelta(seconds=30)
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
    left, right = side_by_side((gloo_rank, store, 0, folder), (gloo_rank, store, 1, folder))
    assert left["states"] == right["states"]
    assert len(left["batches"]) == len(right["batches"]) == 12
    for epoch in (slice(0, 6), slice(6, 12)):
        assert sorted(x for rank in (left, right) for batch in rank["batches"][epoch] for x in batch) == list(range(48))
    assert len(left["samples"]) == len(right["samples"]) == 24
    assert sorted(left["samples"] + right["samples"]) == list(range(48))


# -- damage, through the whole stack -----------------------------------------------------------------------------------


@pytest.fixture
def damaged(tmp_path: Path) -> Path:
    """41 samples of which 13 is bad in x and 30 in y."""
    folder = tmp_path / "damaged"
    create_shards_from_arrays(folder, arrays(N), shard_size=SHARD)
    flip(folder, "sample_000000013.x.npy")
    flip(folder, "sample_000000030.y.npy")
    return folder


def batches_of(loader: Loader) -> list[Any]:
    with loader:
        return [plain(batch) for batch in loader]


@pytest.mark.parametrize("kind", OURS)
def test_damage_is_an_error_that_names_shard_and_item_whoever_reads(damaged: Path, kind: str) -> None:
    with ours(damaged, kind, shuffle=False) as loader:
        seen = []
        with pytest.raises(DamageError, match=r"item 13 in shard_000001\.tar.*checksum") as caught:
            seen.extend(batch["x"].tolist() for batch in loader)
    assert (caught.value.shard, caught.value.item) == ("shard_000001.tar", 13)
    assert seen == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]


@pytest.mark.parametrize("kind", OURS)
def test_a_substitute_keeps_shape_and_order_whoever_reads(sets: Callable[..., Path], damaged: Path, kind: str) -> None:
    healthy = batches_of(ours(sets(), kind, seed=3))
    found = batches_of(ours(damaged, kind, seed=3, on_error="substitute"))
    assert [len(batch["x"]) for batch in found] == [len(batch["x"]) for batch in healthy]
    substitutes = {}
    for batch, wanted in zip(found, healthy, strict=True):
        for row, item in enumerate(wanted["x"]):
            x = batch["x"][row]
            assert batch["y"][row] == [x, x + 0.25]
            assert batch["metadata"][row]["sample_id"] == f"sample_{x:09d}"
            if x != item:
                substitutes[item] = x
    assert set(substitutes) == {13, 30}
    assert not set(substitutes.values()) & {13, 30}
    # The same for everyone: a reader on its own, later, finds the same substitutes.
    again = WebDatasetLoader(damaged, on_error="substitute", shuffle=False)
    assert {item: x for item, x in enumerate(xs(again)) if item != x} == substitutes
    entries = [json.loads(line) for line in (damaged / "quarantine.jsonl").read_text().splitlines()]
    assert {(entry["item"], entry["shard"]) for entry in entries} == {
        (13, "shard_000001.tar"),
        (30, "shard_000003.tar"),
    }
    assert all("checksum" in entry["reason"] for entry in entries)


def test_substitutes_reach_torchs_workers(damaged: Path) -> None:
    dataset = WebDatasetLoader(damaged, on_error="substitute")
    found = [xs(torch.utils.data.DataLoader(dataset, batch_size=None, num_workers=2)) for _ in range(2)]
    alone = dict(enumerate(xs(WebDatasetLoader(damaged, on_error="substitute", shuffle=False))))
    assert [sorted(epoch) for epoch in found] == [sorted(alone.values())] * 2


@pytest.mark.parametrize("k", range(11))
def test_resuming_is_exact_among_substitutes(damaged: Path, k: int) -> None:
    def loader() -> Loader:
        return create_webdataset_dataloader(damaged, batch_size=4, num_workers=0, on_error="substitute")

    whole = batches_of(loader())
    first = loader()
    seen = [plain(batch) for batch in islice(first, k)]
    state = first.state_dict()
    first.close()
    second = loader()
    second.load_state_dict(state)
    assert seen + batches_of(second) == whole


def test_more_bad_items_than_allowed_are_an_error(damaged: Path) -> None:
    with pytest.raises(DamageError, match=r"more than max_bad_items=1 items are bad"):
        list(WebDatasetLoader(damaged, on_error="substitute", max_bad_items=1))
    assert len(list(WebDatasetLoader(damaged, on_error="substitute", max_bad_items=2))) == N


def test_the_quarantine_can_lie_elsewhere(damaged: Path, tmp_path: Path) -> None:
    path = tmp_path / "bad items.jsonl"
    list(WebDatasetLoader(damaged, on_error="substitute", quarantine=path))
    assert not (damaged / "quarantine.jsonl").exists()
    assert {json.loads(line)["item"] for line in path.read_text().splitlines()} == {13, 30}


def test_an_item_that_is_not_read_is_not_bad(damaged: Path) -> None:
    list(WebDatasetLoader(damaged, on_error="substitute", fields=["y"]))
    assert [json.loads(line)["item"] for line in (damaged / "quarantine.jsonl").read_text().splitlines()] == [30]


def test_closing_ends_threads_and_lets_go_of_files(sets: Callable[..., Path]) -> None:
    before = Surroundings.now()
    loader = WebDatasetLoader(sets(), max_workers=2)
    list(islice(loader, 3))
    loader.close()
    del loader
    before.check()
