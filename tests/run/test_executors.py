"""What every executor does: the same batches, the same errors, the same end."""

import multiprocessing as mp
import os
import threading
import time
import traceback
from collections.abc import Iterator
from itertools import islice
from typing import Any

import pytest
import torch
from penstock_test_parts import (
    CountingSource,
    Mishap,
    MishapAt,
    MishapSource,
    MixedSource,
    Surroundings,
    delivered_items,
    numbered_source,
    planned_items,
    run_isolated,
    state_at,
)

from penstock import Loader, LoaderError, Order, Plan, RunOptions, Sequential, Shuffle, Timings, WindowShuffle

PLAN = Plan(numbered_source(23).index, Shuffle(), batch_size=4, seed=7, tail="short")  # 5 batches of 4, one of 3
# Windows of two chunks of 4 items: most batches reach into two of them.
MIXED_PLAN = Plan(MixedSource(23).index, WindowShuffle(2), batch_size=5, seed=7, tail="pad")
# Batches of 4: item 13 is in batch 3, item 22 in batch 5, item 33 in batch 8.
FAULTY_PLAN = Plan(MishapSource(40, bad=13).index, Sequential(), batch_size=4)
MISHAPS = MishapAt(in_transform=22, in_collate=33)


@pytest.fixture(scope="module", autouse=True)
def warm_forkserver() -> None:
    """Import torch once in the server that workers are forked from, and not in every worker."""
    mp.set_forkserver_preload(["penstock.feed.loader"])


@pytest.fixture(scope="class")
def shared(request: pytest.FixtureRequest) -> Iterator[Loader]:
    """One loader per executor: starting worker processes is the slowest part of these tests."""
    with request.cls.make_loader(numbered_source(23), PLAN, observer=Timings()) as loader:
        yield loader


@pytest.fixture(scope="class")
def shared_faulty(request: pytest.FixtureRequest) -> Iterator[Loader]:
    source = MishapSource(40, bad=13)
    with request.cls.make_loader(source, FAULTY_PLAN, transform=MISHAPS, collate=MISHAPS.collate) as loader:
        yield loader


@pytest.fixture
def loader(shared: Loader) -> Loader:
    shared.load_state_dict(state_at(shared, 0, 0))
    return shared


@pytest.fixture
def faulty(shared_faulty: Loader) -> Loader:
    shared_faulty.load_state_dict(state_at(shared_faulty, 0, 0))
    return shared_faulty


class ExecutorSuite:
    num_workers = 0
    options = RunOptions()
    in_this_process: bool | None = True
    """Where batches are made; None where it is decided by timing."""

    @classmethod
    def make_loader(cls, source, plan, **others) -> Loader:
        return Loader(source, plan, num_workers=cls.num_workers, options=cls.options, **others)

    def test_batches_are_those_of_the_plan_in_its_order_for_three_epochs(self, loader: Loader) -> None:
        for epoch in range(3):
            assert delivered_items(loader) == planned_items(PLAN, epoch)

    def test_every_field_arrives_bit_for_bit(self, loader: Loader) -> None:
        for batch in loader:
            assert list(batch) == ["x", "y"]
            assert batch["y"].tolist() == [[item, item + 0.25] for item in batch["x"].tolist()]

    def test_objects_arrive_beside_arrays_each_with_its_own_item(self) -> None:
        with self.make_loader(MixedSource(23), MIXED_PLAN) as loader:
            for epoch in range(2):
                batches = list(loader)
                assert delivered_items(batches) == planned_items(MIXED_PLAN, epoch)
                for batch in batches:
                    assert list(batch) == ["x", "note", "mask"]
                    assert batch["note"] == [{"item": item} for item in batch["x"].tolist()]
            assert batches[-1]["mask"].tolist() == [True, True, True, False, False]

    def test_the_state_counts_what_was_delivered_and_not_what_was_made_ahead(self, loader: Loader) -> None:
        def place() -> tuple[int, int]:
            state = loader.state_dict()
            return state["epoch"], state["batch"]

        batches = iter(loader)
        assert place() == (0, 0)
        for done in range(1, 7):
            next(batches)
            assert (place(), loader.remaining) == ((0, done), 6 - done)
        assert next(batches, "end") == "end"
        assert (place(), loader.remaining) == ((1, 0), 6)

    def test_a_finished_iteration_stays_finished(self, loader: Loader) -> None:
        batches = iter(loader)
        assert len(list(batches)) == 6
        assert [next(batches, "end") for _ in range(3)] == ["end"] * 3
        assert loader.epoch == 1

    def test_iterating_a_loader_twice_at_once_is_refused(self, loader: Loader) -> None:
        with pytest.raises(LoaderError, match="second Loader"):
            list(zip(loader, loader, strict=True))

    def test_an_iteration_replaced_by_another_says_so(self, loader: Loader) -> None:
        first = iter(loader)
        next(first)
        second = iter(loader)
        with pytest.raises(LoaderError, match="another iteration"):
            next(first)
        assert delivered_items(second) == planned_items(PLAN, 1)
        with pytest.raises(LoaderError):
            next(first)

    def test_the_observer_receives_every_batch_and_byte(self, loader: Loader) -> None:
        timings: Timings = loader._record.__self__
        timings.stages.clear()
        batches = list(loader)
        n_bytes = sum(tensor.nbytes for batch in batches for tensor in batch.values())
        assert timings.stages["wait"].calls == 6
        assert 1 <= timings.stages["collate"].calls <= 6  # small batches are made many at a time
        assert timings.stages["read"].nbytes == n_bytes == 23 * 16

    @pytest.mark.parametrize(
        ("where", "item", "start", "bad"),
        [("source", 13, 1, 3), ("transform", 22, 4, 5), ("collate", 33, 6, 8), ("source", 13, 3, 3)],
    )
    def test_an_error_arrives_in_place_of_its_batch_after_those_before_it(
        self, faulty: Loader, where: str, item: int, start: int, bad: int
    ) -> None:
        faulty.load_state_dict(state_at(faulty, 0, start))
        batches, found = iter(faulty), []
        with pytest.raises(Mishap) as caught:
            found.extend(batch["x"].tolist() for batch in batches)
        arrived = time.monotonic()
        error = caught.value
        assert found == planned_items(FAULTY_PLAN)[start:bad]
        assert (error.where, error.item) == (where, item)
        assert arrived - error.when < 60
        assert "mishap_in_the_users_code" in "".join(traceback.format_exception(error))
        notes = "\n".join(error.__notes__)
        assert f"batch {bad}" in notes
        assert str(item) in notes
        assert [next(batches, "end") for _ in range(2)] == ["end", "end"]
        assert (faulty.state_dict()["epoch"], faulty.state_dict()["batch"]) == (0, bad)

    def test_a_loader_can_resume_behind_the_bad_batch(self, faulty: Loader) -> None:
        with pytest.raises(Mishap):
            list(faulty)
        faulty.load_state_dict(state_at(faulty, 0, 6))
        assert delivered_items(islice(faulty, 2)) == planned_items(FAULTY_PLAN)[6:8]

    def test_batches_are_made_by_the_chosen_executor(self, faulty: Loader) -> None:
        pids = {batch["pid"] for batch in islice(faulty, 3)}
        if self.in_this_process is not None:
            assert (pids == {os.getpid()}, os.getpid() in pids) == (self.in_this_process, self.in_this_process)


class TestInline(ExecutorSuite):
    pass


class TestOneThread(ExecutorSuite):
    num_workers = 1
    options = RunOptions(executor="threads")


class TestTwoThreads(ExecutorSuite):
    num_workers = 2
    options = RunOptions(executor="threads", prefetch=1)


class TestFourThreads(ExecutorSuite):
    num_workers = 4
    options = RunOptions(executor="threads", prefetch=3)


class TestAuto(ExecutorSuite):
    num_workers = 2
    in_this_process = None


class TestFork(ExecutorSuite):
    num_workers = 2
    in_this_process = False
    options = RunOptions(executor="processes", start_method="fork")


class TestPersistentFork(ExecutorSuite):
    num_workers = 2
    in_this_process = False
    options = RunOptions(executor="processes", start_method="fork", persistent=True, prefetch=1)


class TestForkserver(ExecutorSuite):
    num_workers = 1
    in_this_process = False
    options = RunOptions(executor="processes", start_method="forkserver", persistent=True)


class TestSpawn(ExecutorSuite):
    num_workers = 1
    in_this_process = False
    options = RunOptions(executor="processes", start_method="spawn", persistent=True)


OPTIONS = {
    "inline": (0, RunOptions()),
    "threads": (2, RunOptions(executor="threads")),
    "fork": (2, RunOptions(executor="processes", start_method="fork")),
}


@pytest.mark.parametrize("order", [Sequential(), Shuffle(), WindowShuffle(3), WindowShuffle(3, held=False)], ids=repr)
@pytest.mark.parametrize("kind", OPTIONS)
@pytest.mark.parametrize("by_item", [False, True], ids=["as read", "item by item"])
def test_objects_beside_arrays_follow_any_order(order: Order, kind: str, by_item: bool) -> None:
    source, (workers, options) = MixedSource(23), OPTIONS[kind]
    plan = Plan(source.index, order, batch_size=5, seed=2, tail="short")
    collate = list_notes if by_item else None
    with Loader(source, plan, collate=collate, num_workers=workers, options=options) as loader:
        for batch, items in zip(loader, planned_items(plan), strict=True):
            assert batch["x"].tolist() == items
            assert batch["note"] == [{"item": item} for item in items]


def list_notes(items: list[Any]) -> dict[str, Any]:
    return {"x": torch.tensor([int(item["x"]) for item in items]), "note": [item["note"] for item in items]}


@pytest.mark.parametrize("kind", OPTIONS)
def test_arrays_beside_objects_can_be_changed_and_kept(kind: str) -> None:
    source, (workers, options) = MixedSource(23), OPTIONS[kind]
    plan = Plan(source.index, WindowShuffle(2), batch_size=4, seed=2, tail="short")
    with Loader(source, plan, num_workers=workers, options=options) as loader:
        kept = []
        for batch in loader:
            batch["x"] += 100
            kept.append(batch)
        assert delivered_items(kept) == [[item + 100 for item in items] for items in planned_items(plan)]
        assert delivered_items(loader) == planned_items(plan, 1)


@pytest.mark.parametrize(("typical_bytes", "batches_read"), [(None, [1] * 6), (50, [1, 2, 3]), (260_000, [1, 2, 2, 1])])
def test_batches_of_objects_are_read_many_at_a_time_if_their_size_is_known_and_small(
    typical_bytes: int | None, batches_read: list[int]
) -> None:
    source = CountingSource(MixedSource(23, typical_bytes))
    plan = Plan(source.index, Shuffle(), batch_size=4, seed=2, tail="short")
    with Loader(source, plan) as loader:
        batches = list(loader)
    assert delivered_items(batches) == planned_items(plan)
    assert [[note["item"] for note in batch["note"]] for batch in batches] == planned_items(plan)
    assert [-(-len(items) // 4) for items in source.taken] == batches_read


def test_more_worker_processes_than_cores_start_without_a_warning() -> None:
    workers = (os.cpu_count() or 1) + 1
    options = RunOptions(executor="processes", start_method="fork")
    with Loader(numbered_source(23), PLAN, num_workers=workers, options=options) as loader:
        assert delivered_items(loader) == planned_items(PLAN)


# -- Ctrl-C ------------------------------------------------------------------------------------------------------------


def interrupt(num_workers: int, options: RunOptions) -> int:
    """Press Ctrl-C while the loader waits for a batch; return how many batches came before it."""
    before = Surroundings.now()
    release = threading.Event()
    main = os.getpid()

    def slow(item, rng):
        if item["x"] == 8:
            os.kill(main, 2)
            release.wait(1)
        return item

    count = 0
    source = numbered_source(40)
    plan = Plan(source.index, Sequential(), batch_size=4)
    loader = Loader(source, plan, transform=slow, num_workers=num_workers, options=options)
    try:
        for batch in loader:
            count += 1
            del batch  # a batch that is kept keeps its shared memory
    except KeyboardInterrupt:
        release.set()
    else:
        raise AssertionError("the interrupt was swallowed")
    place = loader.state_dict()
    assert (place["epoch"], place["batch"]) == (0, count)
    loader.close()
    before.check()
    return count


@pytest.mark.parametrize(
    ("num_workers", "options"),
    [
        (0, RunOptions()),
        (2, RunOptions(executor="threads")),
        (2, RunOptions(executor="processes", start_method="fork")),
        (1, RunOptions(executor="processes", start_method="fork", persistent=True)),
    ],
    ids=["inline", "threads", "fork", "persistent"],
)
def test_ctrl_c_while_waiting_arrives_and_leaves_nothing_behind(num_workers: int, options: RunOptions) -> None:
    # Item 8 is in batch 2; threads and processes may be interrupted earlier, while the two before it are waited for.
    assert run_isolated(interrupt, num_workers, options) <= 2
