"""A loader that is moved with `set_epoch` or `skip`, or asked with `at`, keeps to the plan's batches."""

from itertools import islice
from typing import Any

import pytest
from penstock_test_parts import CountingSource, delivered_items, planned_items, state_at, to_plain

from penstock import Loader, OptionError, Plan, PlanError, Shuffle, World
from tests.laws.loaders import EPOCHS, EXECUTORS, MOVES, PLANS, SOURCE, make_loader


class TestSetEpoch:
    def test_a_state_loaded_for_the_middle_of_that_epoch_is_kept(self) -> None:
        with make_loader(MOVES) as loader:
            loader.load_state_dict(state_at(loader, 2, 3))
            loader.set_epoch(2)
            assert delivered_items(loader) == planned_items(MOVES, 2)[3:]

    def test_the_usual_loop_over_epochs_gives_each_of_them(self) -> None:
        with make_loader(MOVES, "three threads") as loader:
            for epoch in range(3):
                loader.set_epoch(epoch)
                assert delivered_items(loader) == planned_items(MOVES, epoch)

    def test_the_usual_loop_resumed_in_the_middle_gives_the_rest(self) -> None:
        with make_loader(MOVES, "three threads") as loader:
            loader.load_state_dict(state_at(loader, 1, 5))
            found = []
            for epoch in range(1, 3):
                loader.set_epoch(epoch)
                found += delivered_items(loader)
        assert found == planned_items(MOVES, 1)[5:] + planned_items(MOVES, 2)


class TestSkip:
    @pytest.mark.parametrize("executor", EXECUTORS)
    def test_before_an_iteration_it_begins_further_on(self, executor: str) -> None:
        with make_loader(MOVES, executor) as loader:
            loader.skip(3)
            assert (loader.remaining, loader.state_dict()["batch"]) == (4, 3)
            assert delivered_items(loader) == planned_items(MOVES)[3:]
            assert delivered_items(loader) == planned_items(MOVES, 1)

    @pytest.mark.parametrize("executor", EXECUTORS)
    @pytest.mark.parametrize("n", [0, 1, 3, 5])
    def test_in_the_middle_the_same_iteration_continues_further_on(self, executor: str, n: int) -> None:
        with make_loader(MOVES, executor) as loader:
            batches = iter(loader)
            first = delivered_items(islice(batches, 2))
            loader.skip(n)
            assert loader.state_dict()["batch"] == 2 + n
            assert first + delivered_items(batches) == planned_items(MOVES)[:2] + planned_items(MOVES)[2 + n :]
            assert next(batches, "end") == "end"
            assert delivered_items(loader) == planned_items(MOVES, 1)

    def test_in_the_middle_of_a_loop(self) -> None:
        found = []
        with make_loader(MOVES, "three threads") as loader:
            for batch in loader:
                found.append(batch["x"].tolist())
                if len(found) == 2:
                    loader.skip(3)
        assert found == planned_items(MOVES)[:2] + planned_items(MOVES)[5:]

    @pytest.mark.parametrize(("n", "epoch", "batch"), [(8, 1, 1), (14, 2, 0), (25, 3, 4)])
    def test_before_an_iteration_it_reaches_into_later_epochs(self, n: int, epoch: int, batch: int) -> None:
        with make_loader(MOVES) as loader:
            loader.skip(n)
            found = delivered_items(loader) or delivered_items(loader)  # nothing is left at the end of an epoch
        assert found == planned_items(MOVES, epoch)[batch:]

    def test_skipping_is_counted_in_steps_of_this_rank(self) -> None:
        plan = Plan(SOURCE.index, Shuffle(), batch_size=4, tail="drop")
        with Loader(SOURCE, plan, world=World(1, 2)) as loader:
            loader.skip(2)
            assert delivered_items(loader) == planned_items(plan)[5:10:2]

    def test_skipping_is_the_same_as_delivering(self) -> None:
        for plan in PLANS.values():
            with make_loader(plan) as skipped, make_loader(plan) as walked:
                skipped.skip(2)
                list(islice(walked, 2))
                assert skipped.state_dict() == walked.state_dict()

    def test_nothing_is_read(self) -> None:
        source = CountingSource(SOURCE)
        with Loader(source, Plan(source.index, Shuffle(), batch_size=4, tail="drop")) as loader:
            loader.skip(1_000_003)
            assert (source.spans, source.taken) == ([], [])
            assert loader.epoch == 1_000_003 // 11

    def test_too_far_in_the_middle_is_refused_with_both_numbers(self) -> None:
        with make_loader(MOVES) as loader:
            batches = iter(loader)
            next(batches)
            with pytest.raises(OptionError, match=r"n <= 6, the batches left in this epoch, got 7"):
                loader.skip(7)
            assert delivered_items(batches) == planned_items(MOVES)[1:]

    def test_going_back_is_refused(self) -> None:
        with make_loader(MOVES) as loader, pytest.raises(OptionError, match="n >= 0, got -1"):
            loader.skip(-1)


class TestAt:
    @pytest.mark.parametrize("name", PLANS)
    def test_it_is_the_batch_that_iterating_gives(self, uninterrupted: dict[str, list[Any]], name: str) -> None:
        with make_loader(PLANS[name], "three threads") as loader:
            found = [
                to_plain(loader.at(epoch, batch))
                for epoch in range(EPOCHS)
                for batch in range(PLANS[name].epoch(epoch).n_batches)
            ]
        assert found == uninterrupted[name]

    def test_it_does_not_move_the_loader(self) -> None:
        found = []
        with make_loader(MOVES, "three threads") as loader:
            for batch in loader:
                before = loader.state_dict()
                loader.at(2, 6)
                loader.at(0, 0)
                assert loader.state_dict() == before
                found.append(batch["x"].tolist())
        assert found == planned_items(MOVES)

    def test_batches_are_counted_over_all_ranks(self) -> None:
        with Loader(SOURCE, Plan(SOURCE.index, Shuffle(), batch_size=4, tail="drop"), world=World(1, 2)) as loader:
            assert loader.at(0, 0)["x"].tolist() == planned_items(loader.plan)[0]

    def test_a_batch_that_is_not_there_is_refused(self) -> None:
        with make_loader(MOVES) as loader, pytest.raises(PlanError, match=r"batch must be >= 0 and < 7, .*, got 7"):
            loader.at(1, 7)
