"""What a loader refuses and warns about when it is made, and how it ends; the laws say what it yields."""

import logging
import os
from typing import Any

import numpy as np
import pytest
import torch
from penstock_test_parts import delivered_items, numbered_source, planned_items, with_noise

from penstock import (
    ArraySource,
    DatasetSource,
    Index,
    Loader,
    LoaderError,
    OptionError,
    Plan,
    ResumeError,
    RunOptions,
    Sequential,
    Shuffle,
    Timings,
    WindowShuffle,
    World,
)
from penstock.plan import Listed

SOURCE = numbered_source(24)
PLAN = Plan(SOURCE.index, Sequential(), batch_size=4)


# -- plan and source ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("index", [Index.uniform(25), Index.uniform(23), Index.uniform(24, identity="other")], ids=str)
def test_a_plan_over_another_index_is_refused(index: Index) -> None:
    with pytest.raises(OptionError, match="The plan must be over the index of its source") as caught:
        Loader(SOURCE, Plan(index, Sequential(), batch_size=4))
    assert ("with other content" in str(caught.value)) == (len(index) == 24)


def test_a_plan_over_a_selection_of_the_index_is_accepted() -> None:
    plan = Plan(SOURCE.index.select(range(0, 24, 2)), Sequential(), batch_size=4)
    with Loader(SOURCE, plan) as loader:
        assert delivered_items(loader) == [[0, 2, 4, 6], [8, 10, 12, 14], [16, 18, 20, 22]]


def test_anything_but_a_plan_is_refused() -> None:
    plan: Any = "plan"
    with pytest.raises(OptionError, match="plan must be a Plan, got str"):
        Loader(SOURCE, plan)


def test_a_mask_beside_a_field_of_that_name_is_refused() -> None:
    source = ArraySource({"mask": np.arange(6)})
    with pytest.raises(OptionError, match=r"tail='pad' adds a field 'mask', but .* already has one"):
        Loader(source, Plan(source.index, Sequential(), batch_size=4, tail="pad"))
    with Loader(source, Plan(source.index, Sequential(), batch_size=4)) as loader:
        assert [batch["mask"].tolist() for batch in loader] == [[0, 1, 2, 3], [4, 5]]


# -- warnings ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("size", "tail", "messages"),
    [
        (1, "drop", []),
        (2, "drop", []),
        (
            4,
            "drop",
            [
                "2 of 6 batches per epoch are left out, because 4 ranks cannot share them equally. "
                "Use tail='short' or tail='pad' to leave out none."
            ],
        ),
        (4, "pad", []),
        (4, "short", []),
        (7, "drop", ["The epochs of this loader have no batches: 24 items, batch_size=4, tail='drop', 7 ranks."]),
    ],
)
def test_batches_that_no_rank_makes_are_warned_of(
    size: int, tail: Any, messages: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "penstock"):
        Loader(SOURCE, Plan(SOURCE.index, Sequential(), batch_size=4, tail=tail), world=World(0, size)).close()
    assert caplog.messages == messages


def test_items_that_fill_no_batch_are_delivered_unless_they_are_dropped_which_is_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    source = numbered_source(10)
    with caplog.at_level(logging.INFO, "penstock"):
        with Loader(source, Plan(source.index, Sequential(), batch_size=4)) as loader:
            assert delivered_items(loader) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
        assert caplog.messages == []
        Loader(source, Plan(source.index, Sequential(), batch_size=4, tail="drop")).close()
    assert caplog.messages == ["tail='drop' leaves out 2 of 10 items per epoch, which do not fill a batch."]


def test_a_resume_with_more_ranks_than_items_that_are_left_says_what_it_leaves_out(
    caplog: pytest.LogCaptureFixture,
) -> None:
    source = numbered_source(10)
    plan = Plan(source.index, Sequential(), batch_size=4)
    with Loader(source, plan) as loader:
        loader.skip(2)
        state = loader.state_dict()
    with Loader(source, plan, world=World(1, 3)) as loader, caplog.at_level(logging.INFO, "penstock"):
        loader.load_state_dict(state)
        assert delivered_items(loader) == []
        (message,) = caplog.messages
        assert message.startswith("Epoch 0 ends without its 1 last batch: there are too few items for 3 ranks")
        assert delivered_items(loader) == [[4, 5, 6, 7]]


def test_an_epoch_that_was_left_is_reported_once_with_the_way_to_resume_it(caplog: pytest.LogCaptureFixture) -> None:
    source = numbered_source(24)
    plan = Plan(source.index, Sequential(), batch_size=4)
    with Loader(source, plan) as loader:
        for left in (True, False):
            assert next(iter(loader))["x"].tolist() == [0, 1, 2, 3]
            if left:
                loader.load_state_dict(loader.state_dict())
                assert next(iter(loader))["x"].tolist() == [4, 5, 6, 7]
                assert not caplog.records
                loader.set_epoch(0)
        for epoch in (1, 2):
            next(iter(loader))
            assert loader.epoch == epoch
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert "Epoch 0 was left after 1 of 6 batches: the other 5 are left behind, and epoch 1 begins" in caplog.text


# -- memory ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("executor", "workers", "ranks", "lanes", "windows"),
    [
        # A rank visits its part of the lanes, and a worker process its part of those.
        ("auto", 0, 1, 4, 6),
        ("auto", 0, 2, 4, 4),
        ("auto", 0, 3, 4, 4),
        ("threads", 3, 1, 4, 12),
        ("threads", 3, 2, 4, 6),
        ("processes", 2, 1, 5, 10),
        ("processes", 2, 2, 5, 8),
    ],
)
def test_windows_are_held_for_the_lanes_that_a_process_visits(
    executor: Any, workers: int, ranks: int, lanes: int, windows: int
) -> None:
    source = ArraySource({"x": np.broadcast_to(np.float32(0), (400, 250_000))}, chunk_items=5)
    plan = Plan(source.index, WindowShuffle(3), batch_size=4, lanes=lanes)
    options = RunOptions(executor=executor, prefetch=2)
    with Loader(source, plan, num_workers=workers, world=World(0, ranks), options=options) as loader:
        assert loader.memory_estimate().windows_held == windows


def double(item: Any, rng: Any) -> Any:
    return {"x": 2 * item["x"]}


def stack_items(items: list[Any]) -> Any:
    return {"x": torch.stack([torch.as_tensor(item["x"]) for item in items])}


@pytest.mark.parametrize(
    ("source", "options", "start_method", "executor"),
    [
        (SOURCE, {}, "fork", "threads"),
        (SOURCE, {"transform": double}, "fork", "processes"),
        (SOURCE, {"collate": stack_items}, "fork", "processes"),
        (DatasetSource([1, 2, 3]), {}, "fork", "processes"),
        (SOURCE, {"transform": double}, "spawn", "processes"),
        (SOURCE, {"transform": lambda item, rng: item}, "fork", "processes"),
        (SOURCE, {"transform": lambda item, rng: item}, "spawn", "threads"),
    ],
)
def test_auto_is_threads_unless_python_makes_each_item(
    source: Any, options: Any, start_method: Any, executor: str, caplog: pytest.LogCaptureFixture
) -> None:
    plan = Plan(source.index, Sequential(), batch_size=2)
    caplog.set_level("INFO", "penstock")
    with Loader(source, plan, num_workers=2, options=RunOptions(start_method=start_method), **options) as loader:
        assert repr(loader).endswith(f"executor={executor!r})")
    assert f"executor='auto' is {executor!r}, because" in caplog.text


# -- moving and ending -------------------------------------------------------------------------------------------------


def test_skipping_all_that_is_left_ends_the_epoch_and_not_the_next_one() -> None:
    with Loader(SOURCE, PLAN) as loader:
        loader.skip(6)
        assert (loader.epoch, loader.remaining, loader.state_dict()["batch"]) == (0, 0, 6)
        loader.skip(1)
        assert (loader.epoch, loader.remaining) == (1, 5)


def test_skipping_past_an_epoch_into_one_without_batches_is_refused() -> None:
    source = numbered_source(3)
    with Loader(source, Plan(source.index, Sequential(), batch_size=4, tail="drop")) as loader:
        loader.skip(0)
        with pytest.raises(OptionError, match=r"skip\(1\) goes past the last batch: epoch 1 has no batches"):
            loader.skip(1)


def test_the_first_epoch_can_be_set_and_is_begun_again_after_it_was_left() -> None:
    with Loader(SOURCE, PLAN) as loader:
        next(iter(loader))
        loader.set_epoch(0)
        assert delivered_items(loader) == planned_items(PLAN)


def test_a_closed_loader_refuses_to_iterate_and_keeps_its_state() -> None:
    loader = Loader(SOURCE, PLAN)
    batches = iter(loader)
    next(batches)
    loader.close()
    loader.close()
    assert loader.state_dict()["batch"] == 1
    for use in (lambda: iter(loader), lambda: loader.at(0, 0), loader.__enter__):
        with pytest.raises(LoaderError, match=r"This loader is closed\. To resume, make a new one"):
            use()
    with pytest.raises(LoaderError, match="This iteration has ended: the loader was closed"):
        next(batches)


# -- another plan ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("workers", "options"),
    [(0, RunOptions()), (2, RunOptions(executor="threads")), (1, RunOptions(executor="processes", persistent=True))],
    ids=["inline", "threads", "processes"],
)
def test_another_plan_is_taken_between_epochs_and_workers_keep_running(workers: int, options: RunOptions) -> None:
    source = numbered_source(24, chunk=4)
    orders = (Sequential(), Listed([5, 3, 5, 1, 0]), WindowShuffle(2), WindowShuffle(3))
    plans = [Plan(source.index, order, batch_size=3, seed=seed) for seed, order in enumerate(orders)]
    plans.insert(1, Plan(source.index, Listed([9, 8, 7, 6]), batch_size=2))
    found, pids = [], []
    with Loader(source, plans[0], transform=add_pid, num_workers=workers, options=options) as loader:
        for plan in plans:
            loader.set_plan(plan)
            assert loader.plan is plan
            batches = list(loader)
            found.append(delivered_items(batches))
            pids.append({pid for batch in batches for pid in batch["pid"].tolist()})
    assert found == [planned_items(plan, epoch) for epoch, plan in enumerate(plans)]
    assert len(pids[0]) == 1
    assert pids[0] == pids[1]  # the others have other seeds


def add_pid(item: Any, rng: Any) -> Any:
    return {**item, "pid": np.int64(os.getpid())}


@pytest.mark.parametrize(("taken", "epoch"), [(0, 0), (1, 1), (6, 1), (7, 1)])
def test_another_plan_starts_with_the_epoch_after_the_one_that_was_begun(taken: int, epoch: int) -> None:
    other = Plan(SOURCE.index, Shuffle(), batch_size=3)
    with Loader(SOURCE, PLAN) as loader:
        batches = iter(loader)
        for _ in range(taken):  # six batches; asking for the seventh ends the epoch
            next(batches, None)
        loader.set_plan(other)
        assert (loader.epoch, loader.remaining) == (epoch, 8)
        assert loader.state_dict() == {"version": 1, "epoch": epoch, "batch": 0, "origin": 0, "plan": other.identity()}
        assert delivered_items(loader) == planned_items(other, epoch)


def test_another_plan_ends_the_iteration_and_the_states_of_the_one_before() -> None:
    with Loader(SOURCE, PLAN) as loader:
        batches = iter(loader)
        next(batches)
        state = loader.state_dict()
        loader.set_plan(Plan(SOURCE.index, Shuffle(), batch_size=3))
        with pytest.raises(LoaderError, match=r"set_plan\(\) was called"):
            next(batches)
        with pytest.raises(ResumeError, match="the order changed"):
            loader.load_state_dict(state)


def test_a_plan_over_another_index_is_refused_and_changes_nothing() -> None:
    loader = Loader(SOURCE, PLAN)
    batches = iter(loader)
    next(batches)
    with pytest.raises(OptionError, match="The plan must be over the index of its source"):
        loader.set_plan(Plan(Index.uniform(25), Sequential(), batch_size=4))
    assert delivered_items(batches) == planned_items(PLAN)[1:]
    loader.close()
    with pytest.raises(LoaderError, match="This loader is closed"):
        loader.set_plan(PLAN)


def test_a_plan_that_needs_more_memory_than_allowed_is_refused_and_changes_nothing() -> None:
    options = RunOptions(memory_bytes=Loader(SOURCE, PLAN).memory_estimate().host_bytes)
    with Loader(SOURCE, PLAN, options=options) as loader:
        next(iter(loader))
        state = loader.state_dict()
        with pytest.raises(OptionError, match=r"options\.memory_bytes allows"):
            loader.set_plan(Plan(SOURCE.index, Sequential(), batch_size=24))
        assert loader.state_dict() == state
        loader.load_state_dict(state)
        assert delivered_items(loader) == planned_items(PLAN)[1:]


# -- items by number, leaving an epoch, another device -----------------------------------------------------------------


def test_items_by_number_are_transformed_as_in_the_current_epoch_and_do_not_move_the_loader() -> None:
    plan = Plan(SOURCE.index, Shuffle(), batch_size=4, seed=3)
    with Loader(SOURCE, plan, transform=with_noise) as loader:
        for _ in range(2):
            state, items = loader.state_dict(), loader.plan.epoch(loader.epoch).draw(2).items
            chosen, wanted = loader.take(items[[3, 0]]), loader.at(loader.epoch, 2)
            assert chosen["x"].tolist() == items[[3, 0]].tolist()
            assert all(torch.equal(chosen[name], wanted[name][[3, 0]]) for name in wanted)
            assert (loader.take(int(items[0]))["x"].tolist(), loader.state_dict()) == ([items[0]], state)
            loader.set_epoch(loader.epoch + 1)
        for wrong in ([], [[1]], [0.5], "1"):
            with pytest.raises(OptionError, match=r"items must be an item number, or a list of one or more, got "):
                loader.take(wrong)  # type: ignore[arg-type]
        with pytest.raises(IndexError, match="must be from 0 to 23, got 24"):
            loader.take([3, 24])


@pytest.mark.parametrize(("taken", "epoch"), [(0, 0), (1, 1), (6, 1), (7, 1)])
def test_an_epoch_of_which_something_was_delivered_can_be_left(taken: int, epoch: int) -> None:
    with Loader(SOURCE, PLAN) as loader:
        batches = iter(loader)
        for _ in range(taken):
            next(batches, None)
        loader.leave_epoch()
        assert (loader.epoch, loader.remaining) == (epoch, 6)
        assert len(list(loader)) == 6


def test_a_loader_resumes_on_another_device_and_the_one_before_is_closed() -> None:
    loader = Loader(SOURCE, PLAN, observer=Timings())
    next(iter(loader))
    with loader.run_on("meta") as other:
        assert [batch["x"].device.type for batch in other] == ["meta"] * 5
        assert other.observer is loader.observer
    with pytest.raises(LoaderError, match="This loader is closed"):
        iter(loader)
