"""WebDataset loaders: every sample once per epoch, in an order that depends on seed and epoch only."""

import json
import logging
import tarfile
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import penstock_test_shards
import pytest
import torch
from penstock_test_parts import Surroundings, positions
from penstock_test_shards import OURS, error_in_torchs_worker, flat, flip_member, ours, xs

from penstock import DamageError, OptionError, SourceError, create_shards_from_arrays, create_webdataset_dataloader
from penstock.recipes.webdataset import WebDatasetLoader

MORE_WORKERS = "ignore:This DataLoader will create 3 worker processes"
N, SHARD = 41, 8  # five shards of 8 and one of 1
no_launcher, sets = penstock_test_shards.no_launcher, penstock_test_shards.sets


# -- epochs of one object ----------------------------------------------------------------------------------------------

TORCH = {
    "no workers": {"num_workers": 0},
    "2 persistent workers": {"num_workers": 2, "persistent_workers": True},
    "3 workers per epoch": {"num_workers": 3},
}


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


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
def test_a_worker_of_torch_that_has_no_shard_says_nothing(
    sets: Callable[..., Path], capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("penstock"), "handlers", [logging.StreamHandler()])  # of the workers, too
    loader = WebDatasetLoader(sets(), seed=1)
    n_workers = len(loader.source.manifest.shards) + 1
    assert sorted(xs(torch.utils.data.DataLoader(loader, None, num_workers=n_workers))) == list(range(N))
    assert "no batches" not in capfd.readouterr().err


def test_a_loader_that_stands_in_the_middle_is_not_shared_out_to_torchs_workers(sets: Callable[..., Path]) -> None:
    loader = WebDatasetLoader(sets())
    samples = iter(loader)
    next(samples)
    assert "must be at the start of an epoch" in error_in_torchs_worker(loader)


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
    create_shards_from_arrays(tmp_path, positions(12), shard_size=5)
    flip_member(tmp_path, "sample_000000007.y.npy")
    flip_member(tmp_path, "sample_000000003.metadata.json")
    assert sorted(xs(WebDatasetLoader(tmp_path, fields=["x"], verify="always"))) == list(range(12))
    with create_webdataset_dataloader(tmp_path, num_workers=0, fields=["x"]) as loader:
        assert [list(batch) for batch in loader] == [["x"]]
    for fields, item in ((["x", "y"], 7), (["metadata"], 3)):
        with pytest.raises(DamageError, match=f"item {item} in shard_00000{item // 5}.tar"):
            list(WebDatasetLoader(tmp_path, fields=fields))


def test_a_field_that_does_not_exist_is_refused_with_those_that_do(sets: Callable[..., Path]) -> None:
    with pytest.raises(SourceError, match=r"fields must be names of \['x', 'y', 'metadata'\], got 'z'"):
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


def test_a_short_last_batch_is_kept_or_dropped(sets: Callable[..., Path]) -> None:
    for drop_last, sizes in ((False, [16, 16, 9]), (True, [16, 16])):
        with create_webdataset_dataloader(sets(), batch_size=16, num_workers=0, drop_last=drop_last) as loader:
            assert [len(batch["x"]) for batch in loader] == sizes
            assert len(loader) == len(sizes)


def test_prefetch_factor_bounds_what_is_made_ahead(sets: Callable[..., Path]) -> None:
    with pytest.raises(OptionError, match="prefetch_factor must be an integer >= 1, got 0"):
        create_webdataset_dataloader(sets(), prefetch_factor=0)
    with create_webdataset_dataloader(sets(), batch_size=4, num_workers=2, prefetch_factor=1) as loader:
        assert sorted(flat(loader)) == list(range(N))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"buffer_size": 0}, "buffer_size must be an integer >= 1, got 0"),
        ({"max_workers": -1}, "max_workers must be an integer >= 0, got -1"),
        ({"max_workers": 1.5}, "max_workers must be an integer >= 0, got 1.5"),
    ],
)
def test_a_number_that_cannot_be_is_refused(sets: Callable[..., Path], options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        WebDatasetLoader(sets(), **options)


@pytest.mark.parametrize("make", [WebDatasetLoader, create_webdataset_dataloader])
def test_an_unknown_option_is_named_with_the_nearest(sets: Callable[..., Path], make: Any) -> None:
    with pytest.raises(OptionError, match=r"got suffle\. Did you mean 'shuffle'\?"):
        make(sets(), suffle=True)
    with pytest.raises(OptionError, match=r"got max_bad_itmes\. Did you mean 'max_bad_items'\?"):
        make(sets(), max_bad_itmes=3)
    if make is create_webdataset_dataloader:
        with pytest.raises(OptionError, match=r"got prefetch_facotr\. Did you mean 'prefetch_factor'\?"):
            make(sets(), prefetch_facotr=3)


def test_closing_ends_threads_and_lets_go_of_files(sets: Callable[..., Path]) -> None:
    before = Surroundings.now()
    loader = WebDatasetLoader(sets(), max_workers=2)
    list(islice(loader, 3))
    loader.close()
    del loader
    before.check()
