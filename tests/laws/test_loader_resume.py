"""A run that was stopped anywhere and goes on anywhere else is the run that never stopped, bit for bit."""

import io
import json
import os
import resource
import signal
import sys
import time
from contextlib import ExitStack
from dataclasses import replace
from itertools import chain, islice, repeat
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from hypothesis import given, reject, settings
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parents[1] / "run" / "parts"))
from penstock_test_parts import (
    CountingSource,
    at_batch,
    delivered,
    ended,
    isolated,
    numbered,
    plain,
    planned,
    with_noise,
    worlds,
)

from penstock import (
    Field,
    Index,
    Loader,
    LoaderError,
    OptionError,
    Plan,
    PlanError,
    ResumeError,
    RunOptions,
    Segments,
    Sequential,
    Shuffle,
    Source,
    WindowShuffle,
    World,
)

SOURCE = numbered(46, chunk=4)
THREADS = RunOptions(executor="threads")
FORK = RunOptions(executor="processes", start_method="fork")
EXECUTORS = {
    "inline": (0, RunOptions()),
    "one thread": (1, RunOptions(executor="threads", prefetch=3)),
    "three threads": (3, THREADS),
}
PLANS: dict[str, Any] = {
    "shuffle, short": Plan(SOURCE.index, Shuffle(), batch_size=7, tail="short", seed=1),
    "shuffle, drop": Plan(SOURCE.index, Shuffle(), batch_size=7, seed=2),
    "windows, pad, lanes": Plan(SOURCE.index, WindowShuffle(3), batch_size=8, lanes=3, tail="pad", seed=3),
    "cycling segments": Segments(Plan(SOURCE.index, WindowShuffle(2), batch_size=5, lanes=2, seed=4), 4),
    "segments of a pass": Segments(Plan(SOURCE.index, Shuffle(), batch_size=5, tail="short", seed=5), 4),
}
EPOCHS = 3


def made(plan: Any, executor: str = "inline", source: Source = SOURCE, **others: Any) -> Loader:
    workers, options = EXECUTORS[executor]
    return Loader(source, plan, transform=with_noise, num_workers=workers, **{"options": options, **others})


def epochs_of(loader: Loader, until: int = EPOCHS) -> list[Any]:
    """Return every batch from where the loader stands to the end of epoch `until` - 1, with its random bits."""
    found = []
    while loader.epoch < until:
        found += [plain(batch) for batch in loader]
    return found


@pytest.fixture(scope="module")
def uninterrupted() -> dict[str, list[Any]]:
    return {name: epochs_of(made(plan)) for name, plan in PLANS.items()}


@pytest.mark.parametrize("name", PLANS)
@pytest.mark.parametrize(("before", "after"), [("inline", "three threads"), ("three threads", "inline")])
def test_resuming_after_every_single_batch_gives_the_rest(
    uninterrupted: dict[str, list[Any]], name: str, before: str, after: str
) -> None:
    whole, plan, stops = uninterrupted[name], PLANS[name], 0
    with made(plan, before) as first:
        states = [first.state_dict()]
        while first.epoch < EPOCHS:
            states.extend(first.state_dict() for _ in first)
            stops += 1
    assert (stops, len(states)) == (EPOCHS, len(whole) + 1)
    for done, state in enumerate(states):
        with made(plan, after) as second:
            second.load_state_dict(json.loads(json.dumps(state)))
            assert second.state_dict() == state
            assert epochs_of(second) == whole[done:], f"after {done} batches"


def test_a_state_from_the_end_of_an_epoch_goes_on_with_the_next(uninterrupted: dict[str, list[Any]]) -> None:
    plan = PLANS["shuffle, short"]
    with made(plan) as first:
        list(first)
        state = first.state_dict()
    assert (state["epoch"], state["batch"]) == (1, 0)
    with made(plan) as second:
        second.load_state_dict(state)
        assert [plain(batch) for batch in second] == uninterrupted["shuffle, short"][7:14]


def test_loading_a_state_twice_or_into_a_used_loader_is_the_same_as_once(uninterrupted: dict[str, list[Any]]) -> None:
    plan = PLANS["shuffle, short"]
    with made(plan, "one thread") as first, made(plan, "three threads") as second:
        list(islice(first, 3))
        state = first.state_dict()
        list(islice(second, 5))
        for _ in range(2):
            second.load_state_dict(state)
            second.load_state_dict(state)
            assert epochs_of(second) == uninterrupted["shuffle, short"][3:]


def test_a_state_is_small_plain_json_and_survives_torch_save() -> None:
    for plan in PLANS.values():
        with made(plan) as loader:
            list(islice(loader, 2))
            state = loader.state_dict()
        assert len(json.dumps(state)) < 1000
        assert json.loads(json.dumps(state)) == state
        saved = io.BytesIO()
        torch.save({"loader": state, "weights": torch.ones(3)}, saved)
        saved.seek(0)
        with made(plan) as again:
            again.load_state_dict(torch.load(saved)["loader"])
            assert again.state_dict() == state


def test_taking_the_state_changes_nothing(uninterrupted: dict[str, list[Any]]) -> None:
    plan, found = PLANS["shuffle, drop"], []
    with made(plan, "three threads") as loader:
        while loader.epoch < EPOCHS:
            for batch in loader:
                loader.state_dict()
                found.append(plain(batch))
                loader.state_dict()
    assert found == uninterrupted["shuffle, drop"]


def test_loading_a_state_in_the_middle_of_an_iteration_ends_that_iteration() -> None:
    with made(PLANS["shuffle, short"]) as loader:
        batches = iter(loader)
        next(batches)
        loader.load_state_dict(at_batch(loader, 0, 4))
        with pytest.raises(LoaderError, match="load_state_dict"):
            next(batches)
        assert delivered(loader) == planned(loader.plan)[4:]


# -- other workers, executors and ranks --------------------------------------------------------------------------------


def advanced(loaders: list[Loader], steps: int) -> list[tuple[int, int]]:
    """Go `steps` steps on every rank, through ends of epochs; return the items in global order, with their bits."""
    found: list[tuple[int, int]] = []
    while steps:
        for step in zip(*(iter(loader) for loader in loaders), strict=True):
            for batch in step:
                kept = batch["mask"] if "mask" in batch else torch.ones(len(batch["x"]), dtype=torch.bool)
                found += zip(batch["x"][kept].tolist(), batch["noise"][kept].tolist(), strict=True)
            steps -= 1
            if not steps:
                break
    return found


def real_items(plan: Plan, epoch: int, batch: int) -> int:
    draw = plan.epoch(epoch).draw(batch)
    return len(draw) if draw.mask is None else int(draw.mask.sum())


stages = st.lists(
    st.tuples(st.integers(1, 4), st.sampled_from(sorted(EXECUTORS)), st.integers(0, 7)), min_size=3, max_size=4
)


@settings(max_examples=settings.default.max_examples // 2)  # each is four runs of up to four ranks
@given(stages, st.sampled_from(["short", "pad"]), st.integers(1, 3), st.integers(2, 6), st.integers(0, 1000))
def test_stopping_three_times_with_other_ranks_and_workers_is_one_run(
    changes: list[tuple[int, str, int]], tail: Any, lanes: int, batch_size: int, seed: int
) -> None:
    plan = Plan(SOURCE.index, WindowShuffle(3), batch_size=batch_size, seed=seed, lanes=lanes, tail=tail)
    found: list[tuple[int, int]] = []
    state: dict[str, Any] | None = None
    try:
        for size, executor, steps in changes:
            with ExitStack() as stack:
                loaders = [stack.enter_context(made(plan, executor, world=world)) for world in worlds(size)]
                if state is not None:
                    for loader in loaders:
                        loader.load_state_dict(state)
                found += advanced(loaders, steps)
                states = [loader.state_dict() for loader in loaders]
            assert all(other == states[0] for other in states)
            state = json.loads(json.dumps(states[0]))
    except PlanError:
        assert tail == "short"
        reject()
    with made(plan) as loader:
        whole = advanced([loader], 1 + sum(size * steps for size, _, steps in changes))
    assert found == whole[: len(found)]
    last = [real_items(plan, state["epoch"], batch) for batch in range(state["batch"])]
    assert len(found) == state["epoch"] * 46 + sum(last)


@pytest.mark.parametrize("name", PLANS)
def test_stopping_in_threads_processes_and_inline_in_turn_is_one_run(
    uninterrupted: dict[str, list[Any]], name: str
) -> None:
    state, found = None, []
    for turn, others in enumerate(
        [
            {"num_workers": 2, "options": THREADS},
            {"num_workers": 2, "options": FORK},
            {},
            {"num_workers": 1, "options": FORK},
        ]
    ):
        with Loader(SOURCE, PLANS[name], transform=with_noise, **others) as loader:
            if state is not None:
                loader.load_state_dict(state)
            while loader.epoch < EPOCHS:
                batches = islice(loader, 3) if turn < 3 else loader
                found += [plain(batch) for batch in batches]
                state = loader.state_dict()
                if turn < 3:
                    break
    assert found == uninterrupted[name]


def test_fewer_ranks_go_on_where_more_ranks_were_stopped() -> None:
    plan = Plan(SOURCE.index, Shuffle(), batch_size=4, seed=9)  # 11 batches
    with ExitStack() as stack:
        four = [stack.enter_context(Loader(SOURCE, plan, world=world)) for world in worlds(4)]
        first = [batch for step in zip(*(islice(loader, 1) for loader in four), strict=True) for batch in step]
        states = [loader.state_dict() for loader in four]
    assert delivered(first) == planned(plan)[:4]
    assert {state["batch"] for state in states} == {4}
    with ExitStack() as stack:
        two = [stack.enter_context(Loader(SOURCE, plan, world=world)) for world in worlds(2)]
        for loader, state in zip(two, states, strict=False):
            loader.load_state_dict(state)
        assert [loader.remaining for loader in two] == [3, 3]
        assert [len(loader) for loader in two] == [5, 5]
        rest = [batch for step in zip(*two, strict=True) for batch in step]
    assert delivered(rest) == planned(plan)[4:10]


# -- another batch size ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize(("before", "after"), [(4, 8), (4, 3), (6, 4), (5, 46), (7, 100)])
def test_another_batch_size_goes_on_at_the_very_next_item(executor: str, before: int, after: int) -> None:
    plan = Plan(SOURCE.index, Shuffle(), batch_size=before, tail="short", seed=8)
    other = replace(plan, batch_size=after)
    items = [item for batch in chain(planned(plan, 0), planned(plan, 1)) for item in batch]
    for done in range(plan.n_batches + 1):
        with made(plan) as first, made(other, executor) as second:
            found = [plain(batch) for batch in islice(first, done)]
            second.load_state_dict(json.loads(json.dumps(first.state_dict())))
            rest = epochs_of(second, until=2)
        assert [x for batch in found + rest for x in batch["x"]] == items
        # All but the last of the first epoch and the last of the second are full.
        assert [len(batch["x"]) for batch in rest].count(after) >= len(rest) - 2


def test_random_bits_of_items_do_not_change_with_the_batch_size() -> None:
    plan = Plan(SOURCE.index, Shuffle(), batch_size=4, tail="short", seed=8)
    with made(plan) as first, made(replace(plan, batch_size=9)) as second:
        found = [plain(batch) for batch in islice(first, 5)]
        second.load_state_dict(first.state_dict())
        found += [plain(batch) for batch in second]
    with made(plan) as whole:
        wanted = [plain(batch) for batch in whole]

    def bits(batches: list[Any]) -> list[tuple[int, int]]:
        return [pair for batch in batches for pair in zip(batch["x"], batch["noise"], strict=True)]

    assert bits(found) == bits(wanted)


# -- a killed process --------------------------------------------------------------------------------------------------

KILLED = {
    "inline": (3, 0, RunOptions()),
    "threads": (7, 2, THREADS),
    "fork": (10, 2, FORK),
}  # in the middle, at the end and in the next epoch


def killed(folder: Path, executor: str) -> None:
    """Log batches and save states until it is time to die."""
    stop, workers, options = KILLED[executor]
    loader = Loader(SOURCE, PLANS["shuffle, short"], transform=with_noise, num_workers=workers, options=options)
    with (folder / "log").open("w") as log:
        for count, batch in enumerate(chain.from_iterable(repeat(loader)), start=1):
            log.write(json.dumps(plain(batch)) + "\n")
            log.flush()
            (folder / "state.new").write_text(json.dumps(loader.state_dict()))
            (folder / "state.new").replace(folder / "state")
            if count == stop:
                os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("executor", KILLED)
def test_a_killed_process_is_resumed_exactly(
    uninterrupted: dict[str, list[Any]], tmp_path: Path, executor: str
) -> None:
    assert ended(killed, tmp_path, executor) == -signal.SIGKILL
    logged = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
    assert len(logged) == KILLED[executor][0]
    with made(PLANS["shuffle, short"], "three threads") as loader:
        loader.load_state_dict(json.loads((tmp_path / "state").read_text()))
        assert logged + epochs_of(loader) == uninterrupted["shuffle, short"]


# -- moving about ------------------------------------------------------------------------------------------------------

MOVES = Plan(SOURCE.index, Shuffle(), batch_size=7, tail="short", seed=1)  # 7 batches


class TestSetEpoch:
    def test_a_state_loaded_for_the_middle_of_that_epoch_is_kept(self) -> None:
        with made(MOVES) as loader:
            loader.load_state_dict(at_batch(loader, 2, 3))
            loader.set_epoch(2)
            assert delivered(loader) == planned(MOVES, 2)[3:]

    def test_another_epoch_begins_at_its_head(self) -> None:
        with made(MOVES) as loader:
            loader.load_state_dict(at_batch(loader, 2, 3))
            loader.set_epoch(5)
            assert delivered(loader) == planned(MOVES, 5)

    def test_the_usual_loop_over_epochs_gives_each_of_them(self) -> None:
        with made(MOVES, "three threads") as loader:
            for epoch in range(3):
                loader.set_epoch(epoch)
                assert delivered(loader) == planned(MOVES, epoch)

    def test_the_usual_loop_resumed_in_the_middle_gives_the_rest(self) -> None:
        with made(MOVES, "three threads") as loader:
            loader.load_state_dict(at_batch(loader, 1, 5))
            found = []
            for epoch in range(1, 3):
                loader.set_epoch(epoch)
                found += delivered(loader)
        assert found == planned(MOVES, 1)[5:] + planned(MOVES, 2)

    def test_an_epoch_that_was_begun_starts_anew(self) -> None:
        with made(MOVES) as loader:
            list(islice(loader, 3))
            loader.set_epoch(0)
            assert delivered(loader) == planned(MOVES, 0)

    def test_a_negative_epoch_is_refused(self) -> None:
        with made(MOVES) as loader, pytest.raises(OptionError, match=r"set_epoch\(-1\)"):
            loader.set_epoch(-1)


class TestSkip:
    @pytest.mark.parametrize("executor", EXECUTORS)
    def test_before_an_iteration_it_begins_further_on(self, executor: str) -> None:
        with made(MOVES, executor) as loader:
            loader.skip(3)
            assert (loader.remaining, loader.state_dict()["batch"]) == (4, 3)
            assert delivered(loader) == planned(MOVES)[3:]
            assert delivered(loader) == planned(MOVES, 1)

    @pytest.mark.parametrize("executor", EXECUTORS)
    @pytest.mark.parametrize("n", [0, 1, 3, 5])
    def test_in_the_middle_the_same_iteration_goes_on_further_on(self, executor: str, n: int) -> None:
        with made(MOVES, executor) as loader:
            batches = iter(loader)
            first = delivered(islice(batches, 2))
            loader.skip(n)
            assert loader.state_dict()["batch"] == 2 + n
            assert first + delivered(batches) == planned(MOVES)[:2] + planned(MOVES)[2 + n :]
            assert next(batches, "end") == "end"
            assert delivered(loader) == planned(MOVES, 1)

    def test_in_the_middle_of_a_loop(self) -> None:
        found = []
        with made(MOVES, "three threads") as loader:
            for batch in loader:
                found.append(batch["x"].tolist())
                if len(found) == 2:
                    loader.skip(3)
        assert found == planned(MOVES)[:2] + planned(MOVES)[5:]

    @pytest.mark.parametrize(("n", "epoch", "batch"), [(8, 1, 1), (14, 2, 0), (25, 3, 4)])
    def test_before_an_iteration_it_reaches_into_later_epochs(self, n: int, epoch: int, batch: int) -> None:
        with made(MOVES) as loader:
            loader.skip(n)
            found = delivered(loader) or delivered(loader)  # at the very end of an epoch nothing is left of it
        assert found == planned(MOVES, epoch)[batch:]

    def test_skipping_is_counted_in_steps_of_this_rank(self) -> None:
        plan = Plan(SOURCE.index, Shuffle(), batch_size=4)
        with Loader(SOURCE, plan, world=World(1, 2)) as loader:
            loader.skip(2)
            assert delivered(loader) == planned(plan)[5:10:2]

    def test_skipping_is_the_same_as_delivering(self) -> None:
        for plan in PLANS.values():
            with made(plan) as skipped, made(plan) as walked:
                skipped.skip(2)
                list(islice(walked, 2))
                assert skipped.state_dict() == walked.state_dict()

    def test_nothing_is_read(self) -> None:
        source = CountingSource(SOURCE)
        with Loader(source, Plan(source.index, Shuffle(), batch_size=4)) as loader:
            loader.skip(1_000_003)
            assert (source.spans, source.taken) == ([], [])
            assert loader.epoch == 1_000_003 // 11

    def test_too_far_in_the_middle_is_refused_with_both_numbers(self) -> None:
        with made(MOVES) as loader:
            batches = iter(loader)
            next(batches)
            with pytest.raises(OptionError, match=r"skip\(7\), but 6 batches are left"):
                loader.skip(7)
            assert delivered(batches) == planned(MOVES)[1:]

    def test_going_back_is_refused(self) -> None:
        with made(MOVES) as loader, pytest.raises(OptionError, match=r"skip\(-1\)"):
            loader.skip(-1)


class TestAt:
    @pytest.mark.parametrize("name", PLANS)
    def test_it_is_the_batch_that_iterating_gives(self, uninterrupted: dict[str, list[Any]], name: str) -> None:
        with made(PLANS[name], "three threads") as loader:
            found = [
                plain(loader.at(epoch, batch))
                for epoch in range(EPOCHS)
                for batch in range(PLANS[name].epoch(epoch).n_batches)
            ]
        assert found == uninterrupted[name]

    def test_it_does_not_move_the_loader(self) -> None:
        found = []
        with made(MOVES, "three threads") as loader:
            for batch in loader:
                before = loader.state_dict()
                loader.at(2, 6)
                loader.at(0, 0)
                assert loader.state_dict() == before
                found.append(batch["x"].tolist())
        assert found == planned(MOVES)

    def test_batches_are_counted_over_all_ranks(self) -> None:
        with Loader(SOURCE, Plan(SOURCE.index, Shuffle(), batch_size=4), world=World(1, 2)) as loader:
            assert loader.at(0, 0)["x"].tolist() == planned(loader.plan)[0]

    def test_a_batch_that_is_not_there_is_refused(self) -> None:
        with made(MOVES) as loader, pytest.raises(PlanError, match="Batch 7 is not in epoch 1"):
            loader.at(1, 7)


class TestRemaining:
    def test_it_counts_down_and_starts_again(self) -> None:
        with made(MOVES) as loader:
            assert loader.remaining == 7
            counts = [loader.remaining for _ in loader]
            assert counts == [6, 5, 4, 3, 2, 1, 0]
            assert loader.remaining == 7

    def test_it_is_what_a_resumed_loader_gives(self) -> None:
        for plan in PLANS.values():
            for batch in range(plan.epoch(1).n_batches + 1):
                with made(plan) as loader:
                    loader.load_state_dict(at_batch(loader, 1, batch))
                    assert loader.remaining == sum(1 for _ in loader)

    def test_len_is_the_length_of_a_whole_epoch_wherever_the_loader_stands(self) -> None:
        with made(MOVES) as loader:
            assert {len(loader) for _ in loader} == {7}
            loader.load_state_dict(at_batch(loader, 3, 5))
            assert len(loader) == 7


# -- states from elsewhere ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (Plan(SOURCE.index, Shuffle(), batch_size=7, tail="short", seed=2), "the seed changed from 2 to 1"),
        (Plan(SOURCE.index, Sequential(), batch_size=7, tail="short", seed=1), "the order changed"),
        (Plan(SOURCE.index, Shuffle(), batch_size=7, tail="pad", seed=1), "the tail changed"),
        (Segments(MOVES, 3), "the segment length"),
    ],
    ids=["seed", "order", "tail", "segments"],
)
def test_a_state_of_another_plan_is_refused_and_changes_nothing(other: Any, words: str) -> None:
    with made(other) as first, made(MOVES) as second:
        list(islice(first, 2))
        list(islice(second, 1))
        with pytest.raises(ResumeError, match=words):
            second.load_state_dict(first.state_dict())
        assert second.state_dict()["batch"] == 1


def test_a_state_of_other_data_is_refused() -> None:
    other = numbered(47)
    with made(Plan(other.index, Shuffle(), batch_size=7, tail="short", seed=1), source=other) as first:
        state = first.state_dict()
    with made(MOVES) as loader, pytest.raises(ResumeError, match="number of items changed from 47 to 46"):
        loader.load_state_dict(state)


def test_a_plan_over_other_data_is_refused_when_the_loader_is_made() -> None:
    with pytest.raises(OptionError, match="made over"):
        Loader(numbered(47), MOVES)


# -- very long data ----------------------------------------------------------------------------------------------------


class Endless:
    """A thousand million items that are made when they are asked for."""

    index = Index.uniform(10**9, chunk=1000, identity="endless")
    fields: ClassVar = {"x": Field(np.dtype(np.int64), ())}

    def read(self, span: Any, out: Any = None) -> Any:
        return self.take(np.arange(span.start, span.stop), out)

    def take(self, items: Any, out: Any = None) -> Any:
        if out is None:
            return {"x": items.copy()}
        out["x"][...] = items
        return out

    def close(self) -> None:
        pass


def most_bytes_until_the_first_batch(batch: int) -> tuple[list[int], int]:
    source = Endless()
    plan = Plan(source.index, Shuffle(), batch_size=64)
    with Loader(source, plan, num_workers=1, options=FORK) as loader:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        loader.load_state_dict(at_batch(loader, 0, batch))
        found = next(iter(loader))["x"].tolist()
        return found, 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)


def test_worker_processes_are_not_handed_a_list_of_all_the_batches_to_come() -> None:
    plan = Plan(Endless.index, Shuffle(), batch_size=64)
    batch = plan.n_batches - 4_000_000  # of fifteen million; a list of as many tickets would take half a gigabyte
    found, n_bytes = isolated(most_bytes_until_the_first_batch, batch)
    assert found == plan.epoch(0).draw(batch).items.tolist()
    assert n_bytes < 50_000_000


def test_resuming_far_into_a_thousand_million_items_costs_what_resuming_at_ten_does() -> None:
    source = Endless()
    plan = Plan(source.index, Shuffle(), batch_size=32)
    for batch in (10, plan.n_batches - 2):
        with Loader(source, plan) as loader:
            state = at_batch(loader, 7, batch)
            began = time.perf_counter()
            loader.load_state_dict(state)
            found = next(iter(loader))["x"].tolist()
            took = time.perf_counter() - began
        assert found == plan.epoch(7).draw(batch).items.tolist()
        assert took < 1  # measured: about 20 ms; a walk over the order would take minutes
