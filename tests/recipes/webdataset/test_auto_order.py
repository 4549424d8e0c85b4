"""`order="auto"`: chosen by the storage, recorded in the state, and resumed in the same order on any other storage."""

import json
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from itertools import islice
from pathlib import Path
from typing import Any

import penstock_test_shards
import pytest
import torch.distributed as dist
from penstock_loader_suite import LoaderCase, LoaderSuite, split_items
from penstock_test_parts import run_side_by_side
from penstock_test_shards import flat

from penstock import Loader, OptionError, ResumeError, Shuffle, WindowShuffle, create_webdataset_dataloader
from penstock.observe.storage.device import Device
from penstock.observe.storage.measure import StorageSpeed
from penstock.recipes.webdataset import auto_order

N, SHARD = 200, 50
no_launcher, sets = penstock_test_shards.no_launcher, penstock_test_shards.sets

FAST = StorageSpeed(Device("ext4", "/fast", False), 1000, 1e9, 900_000, 990_000)
SLOW = StorageSpeed(Device("xfs", "/slow", True), 1000, 1e6, 100, 200)  # a seek takes as long as 4 kB in sequence
UNKNOWN = StorageSpeed(Device("ext4", "/cached"), 1000, unknown="in memory: what was tried is in the page cache")


@contextmanager
def measured(speed: StorageSpeed | None) -> Iterator[None]:
    """Make every storage this fast; None: a measurement is a failure."""

    def answer(*_: Any) -> StorageSpeed:
        assert speed is not None, "nothing was to be measured"
        return speed

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(auto_order, "measure_storage", answer)
        yield


def create(folder: Path, **options: Any) -> Loader:
    return create_webdataset_dataloader(folder, **{"batch_size": 8, "num_workers": 0, "order": "auto", **options})


def make(folder: Path, speed: StorageSpeed, **options: Any) -> Loader:
    """Return a loader whose order was chosen for a storage of this speed."""
    with measured(speed):
        loader = create(folder, **options)
        assert loader.plan
    return loader


def resume(folder: Path, state: Any, **options: Any) -> list[int]:
    """Return the rest of an epoch where no storage may be measured."""
    with measured(None), create(folder, **options) as loader:
        loader.load_state_dict(json.loads(json.dumps(state)))
        return flat(loader)


def test_fast_random_reads_give_a_full_shuffle_and_slow_ones_windows(sets: Callable[..., Path]) -> None:
    fast, slow, unknown = (make(sets(), speed) for speed in (FAST, SLOW, UNKNOWN))
    assert fast.plan.order == Shuffle()  # type: ignore[attr-defined]
    assert isinstance(slow.plan.order, WindowShuffle)  # type: ignore[attr-defined]
    assert slow.plan.order.held  # type: ignore[attr-defined]
    assert slow.plan.index.n_chunks > 4
    assert sorted(flat(fast)) == sorted(flat(slow)) == list(range(N))
    with create_webdataset_dataloader(sets(), batch_size=8, num_workers=0, buffer_size=100) as default:
        assert flat(make(sets(), UNKNOWN, buffer_size=100)) == flat(default)
    assert sorted(flat(unknown)) == list(range(N))


@pytest.mark.parametrize(
    "workers",
    [{"num_workers": 0}, {"num_workers": 2}, {"num_workers": 2, "multiprocessing_context": "fork"}],
    ids=["none", "chosen", "processes"],
)
@pytest.mark.parametrize("first", [FAST, SLOW, UNKNOWN], ids=["fast", "slow", "unknown"])
def test_a_state_is_resumed_in_its_order_and_nothing_is_measured(
    sets: Callable[..., Path], first: StorageSpeed, workers: dict[str, Any]
) -> None:
    with make(sets(), first, **workers) as loader:
        batches = iter(loader)
        head = flat(islice(batches, 3))
        state = loader.state_dict()
        rest = flat(batches)
    assert sorted(head + rest) == list(range(N))
    assert set(state["chosen_order"]) == {"window", "chunk_items", "held"}
    assert resume(sets(), state) == resume(sets(), state, **workers) == rest
    other = make(sets(), SLOW if first is FAST else FAST)
    other.load_state_dict(state)  # after another order was chosen
    assert flat(other) == rest


def test_the_choice_and_its_reason_are_logged(sets: Callable[..., Path], caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "penstock"):
        state = make(sets(), SLOW).state_dict()
        resume(sets(), state)
    chose, resumed = (record.message for record in caplog.records if "order='auto'" in record.message)
    order = state["plan"]["order"]
    assert chose.startswith(f"order='auto' chose {order} with chunk_items=")
    assert "Storage: /slow (xfs): 1 MB/s in sequence; random reads of 1 kB: 100/s one at a time" in chose
    assert resumed.startswith(f"order='auto' resumes with {order} over chunks of ")


def test_an_order_that_was_given_refuses_a_state_of_another_one(sets: Callable[..., Path]) -> None:
    state = make(sets(), FAST).state_dict()
    with (
        create_webdataset_dataloader(sets(), batch_size=8, num_workers=0, buffer_size=64) as given,
        pytest.raises(ResumeError, match=r"the order changed from 'Shuffle\(\)' to 'WindowShuffle\(window=1\)'"),
    ):
        given.load_state_dict(state)
    loader = make(sets(), FAST)
    before = loader.state_dict()
    with pytest.raises(ResumeError, match="the order changed"):
        loader.load_state_dict(create_webdataset_dataloader(sets(), 8, 0, buffer_size=64).state_dict())
    with pytest.raises(ResumeError, match="the number of items changed from 60 to 200"):
        loader.load_state_dict(make(sets(60), SLOW).state_dict())
    assert loader.state_dict() == before  # nothing of these states was taken


@pytest.mark.parametrize(
    "damaged",
    [
        *(None, 3, {}, {"window": 0, "chunk_items": 4, "held": True}),
        *({"window": 1 << 70, "chunk_items": 4, "held": True}, {"window": 2, "chunk_items": "4", "held": True}),
    ],
)
def test_a_damaged_record_is_refused(sets: Callable[..., Path], damaged: Any) -> None:
    state = make(sets(), SLOW).state_dict()
    with pytest.raises(ResumeError, match="This state is damaged"):
        resume(sets(), {**state, "chosen_order": damaged})
    with pytest.raises(ResumeError, match="another dataset: window must be <= 4"):
        resume(sets(), {**state, "chosen_order": {"window": 9, "chunk_items": 1000, "held": True}})


def test_real_storage_is_measured_and_a_closed_loader_has_its_state(sets: Callable[..., Path]) -> None:
    loader = create_webdataset_dataloader(sets(), batch_size=8, num_workers=0, order="auto")
    loader.set_epoch(3)
    loader.close()
    state = loader.state_dict()
    assert (state["epoch"], state["batch"]) == (3, 0)
    assert sorted(resume(sets(), state)) == list(range(N))
    with create_webdataset_dataloader(sets(), batch_size=8, num_workers=0, order="auto") as loader:
        loader.skip(2)
        assert loader.remaining == len(loader) - 2
        assert loader.at(0, 0)["x"].shape == (8,)
        assert len(flat(loader)) == N - 16


def test_a_plan_of_the_user_replaces_the_choice(sets: Callable[..., Path]) -> None:
    loader = make(sets(), FAST)
    with create_webdataset_dataloader(sets(), batch_size=8, num_workers=0, shuffle=False) as other:
        loader.set_plan(other.plan)
    assert flat(loader) == list(range(N))
    assert "chosen_order" not in loader.state_dict()


def test_compressed_shards_and_a_pattern_are_chosen_for(sets: Callable[..., Path]) -> None:
    packed = make(sets(compression="gz"), FAST)
    assert repr(packed.plan.order) == "WindowShuffle(window=4)"  # type: ignore[attr-defined]
    assert sorted(flat(packed)) == list(range(N))
    some = make(sets(), SLOW, shard_pattern="shard_00000[12].tar")
    state = some.state_dict()
    assert sorted(flat(some)) == list(range(50, 150))
    assert resume(sets(), state, shard_pattern="shard_00000[12].tar") == flat(
        make(sets(), SLOW, shard_pattern="shard_00000[12].tar")
    )


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"order": "best"}, "order must be None or 'auto', got 'best'"),
        ({"shuffle": False}, "got shuffle=False and shuffle_shards=False"),
        ({"shuffle_shards": False}, "got shuffle=True and shuffle_shards=False"),
    ],
)
def test_options_that_leave_nothing_to_choose_are_refused(
    sets: Callable[..., Path], options: dict[str, Any], said: str
) -> None:
    with pytest.raises(OptionError, match=said):
        create_webdataset_dataloader(sets(), **{"order": "auto", **options})


# -- ranks -------------------------------------------------------------------------------------------------------------


def test_ranks_that_cannot_agree_are_refused(sets: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(
        OptionError, match=r"order='auto' with 2 ranks needs torch\.distributed.*\.init_process_group\(\)"
    ):
        create_webdataset_dataloader(sets(), order="auto", num_workers=0)


def gloo_rank(store: str, rank: int, folder: Path) -> dict[str, Any]:
    """Return what one of two ranks with disks of different speeds sees, and what it says if rank 0 fails."""
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=2, timeout=timedelta(seconds=300)
    )
    loader = make(folder, [SLOW, FAST][rank])
    batches = iter(loader)
    found = {"head": flat(islice(batches, 2)), "state": loader.state_dict(), "rest": flat(batches)}
    found["resumed"] = resumed_on_rank(folder, found["state"], rank)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(auto_order, "this_machine", None)
        try:
            create_webdataset_dataloader(folder, order="auto", num_workers=0)
        except TypeError as error:
            found["error"] = str(error)
    dist.barrier()
    dist.destroy_process_group()
    return found


def resumed_on_rank(folder: Path, state: Any, rank: int) -> list[int]:
    loader = make(folder, [FAST, SLOW][rank])
    loader.load_state_dict(state)
    return flat(loader)


def test_all_ranks_have_the_order_that_rank_0_chose(sets: Callable[..., Path], tmp_path: Path) -> None:
    folder, store = sets(), str(tmp_path / "store")
    left, right = run_side_by_side((gloo_rank, store, 0, folder), (gloo_rank, store, 1, folder))
    assert left["state"] == right["state"]
    assert left["state"]["plan"]["order"].startswith("WindowShuffle")
    assert sorted(left["head"] + left["rest"] + right["head"] + right["rest"]) == list(range(N))
    for rank in (left, right):
        assert rank["resumed"] == rank["rest"]
        assert "not callable" in rank["error"]


class TestAutoOrder(LoaderSuite):
    @pytest.fixture(params=[FAST, SLOW], ids=["fast", "slow"])
    def case(self, request: pytest.FixtureRequest, sets: Callable[..., Path]) -> Iterator[LoaderCase]:
        folder = sets(24, 8)

        def make(*, data: Path = folder, **options: Any) -> Loader:
            return create(data, **{"batch_size": 2, **options})

        case = LoaderCase(
            make,
            {
                "the seed changed from 7 to 42": {"seed": 7},
                "the order changed": {"order": None, "shuffle": False},
                "the data .* changed": {"data": sets(24, 8, offset=1)},
            },
            ({"num_workers": 2, "prefetch_factor": 3},),
            batch_size="any",
            epoch=lambda loader: (split_items({"x": batch["x"]}) for batch in loader),
            set_epoch=Loader.set_epoch,
            damageable=("version", "epoch", "batch", "origin", "plan"),
        )
        with measured(request.param):
            yield case
