"""A run that is stopped or killed anywhere and resumed equals the run that never stopped, bit for bit.

A state is small and plain, belongs to its plan and its data, and costs the same anywhere in very long data.
"""

import io
import json
import os
import resource
import signal
import time
from itertools import chain, islice, repeat
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from penstock_test_parts import (
    delivered_items,
    exit_code,
    numbered_source,
    planned_items,
    run_isolated,
    state_at,
    to_plain,
    with_noise,
)

from penstock import (
    Field,
    Index,
    Loader,
    LoaderError,
    OptionError,
    Plan,
    ResumeError,
    RunOptions,
    Segments,
    Sequential,
    Shuffle,
)
from tests.laws.loaders import EPOCHS, FORK, MOVES, PLANS, SOURCE, THREADS, epochs_of, make_loader


@pytest.mark.parametrize("name", PLANS)
@pytest.mark.parametrize(("before", "after"), [("inline", "three threads"), ("three threads", "inline")])
def test_resuming_after_every_single_batch_gives_the_rest(
    uninterrupted: dict[str, list[Any]], name: str, before: str, after: str
) -> None:
    whole, plan, stops = uninterrupted[name], PLANS[name], 0
    with make_loader(plan, before) as first:
        states = [first.state_dict()]
        while first.epoch < EPOCHS:
            states.extend(first.state_dict() for _ in first)
            stops += 1
    assert (stops, len(states)) == (EPOCHS, len(whole) + 1)
    for done, state in enumerate(states):
        with make_loader(plan, after) as second:
            second.load_state_dict(json.loads(json.dumps(state)))
            assert second.state_dict() == state
            assert epochs_of(second) == whole[done:], f"after {done} batches"


def test_a_state_from_the_end_of_an_epoch_resumes_with_the_next(uninterrupted: dict[str, list[Any]]) -> None:
    plan = PLANS["shuffle, short"]
    with make_loader(plan) as first:
        list(first)
        state = first.state_dict()
    assert (state["epoch"], state["batch"]) == (1, 0)
    with make_loader(plan) as second:
        second.load_state_dict(state)
        assert [to_plain(batch) for batch in second] == uninterrupted["shuffle, short"][7:14]


def test_loading_a_state_is_idempotent_also_in_a_used_loader(uninterrupted: dict[str, list[Any]]) -> None:
    plan = PLANS["shuffle, short"]
    with make_loader(plan, "one thread") as first, make_loader(plan, "three threads") as second:
        list(islice(first, 3))
        state = first.state_dict()
        list(islice(second, 5))
        for _ in range(2):
            second.load_state_dict(state)
            second.load_state_dict(state)
            assert epochs_of(second) == uninterrupted["shuffle, short"][3:]


def test_a_state_is_small_plain_json_and_survives_torch_save() -> None:
    for plan in PLANS.values():
        with make_loader(plan) as loader:
            list(islice(loader, 2))
            state = loader.state_dict()
        assert len(json.dumps(state)) < 1000
        assert json.loads(json.dumps(state)) == state
        saved = io.BytesIO()
        torch.save({"loader": state, "weights": torch.ones(3)}, saved)
        saved.seek(0)
        with make_loader(plan) as again:
            again.load_state_dict(torch.load(saved)["loader"])
            assert again.state_dict() == state


def test_taking_the_state_changes_nothing(uninterrupted: dict[str, list[Any]]) -> None:
    plan, found = PLANS["shuffle, drop"], []
    with make_loader(plan, "three threads") as loader:
        while loader.epoch < EPOCHS:
            for batch in loader:
                loader.state_dict()
                found.append(to_plain(batch))
                loader.state_dict()
    assert found == uninterrupted["shuffle, drop"]


def test_loading_a_state_in_the_middle_of_an_iteration_ends_that_iteration() -> None:
    with make_loader(PLANS["shuffle, short"]) as loader:
        batches = iter(loader)
        next(batches)
        loader.load_state_dict(state_at(loader, 0, 4))
        with pytest.raises(LoaderError, match="load_state_dict"):
            next(batches)
        assert delivered_items(loader) == planned_items(loader.plan)[4:]


# -- a killed process --------------------------------------------------------------------------------------------------

KILLED = {
    "inline": (3, 0, RunOptions()),
    "threads": (7, 2, THREADS),
    "fork": (10, 2, FORK),
}  # in the middle, at the end and in the next epoch


def train_until_killed(folder: Path, executor: str) -> None:
    """Log batches and save states until it is time to die."""
    stop, workers, options = KILLED[executor]
    loader = Loader(SOURCE, PLANS["shuffle, short"], transform=with_noise, num_workers=workers, options=options)
    with (folder / "log").open("w") as log:
        for count, batch in enumerate(chain.from_iterable(repeat(loader)), start=1):
            log.write(json.dumps(to_plain(batch)) + "\n")
            log.flush()
            (folder / "state.new").write_text(json.dumps(loader.state_dict()))
            (folder / "state.new").replace(folder / "state")
            if count == stop:
                os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("executor", KILLED)
def test_a_killed_process_is_resumed_exactly(
    uninterrupted: dict[str, list[Any]], tmp_path: Path, executor: str
) -> None:
    assert exit_code(train_until_killed, tmp_path, executor) == -signal.SIGKILL
    logged = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
    assert len(logged) == KILLED[executor][0]
    with make_loader(PLANS["shuffle, short"], "three threads") as loader:
        loader.load_state_dict(json.loads((tmp_path / "state").read_text()))
        assert logged + epochs_of(loader) == uninterrupted["shuffle, short"]


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
    with make_loader(other) as first, make_loader(MOVES) as second:
        list(islice(first, 2))
        list(islice(second, 1))
        with pytest.raises(ResumeError, match=words):
            second.load_state_dict(first.state_dict())
        assert second.state_dict()["batch"] == 1


def test_a_state_of_other_data_is_refused() -> None:
    other = numbered_source(47)
    with make_loader(Plan(other.index, Shuffle(), batch_size=7, tail="short", seed=1), source=other) as first:
        state = first.state_dict()
    with make_loader(MOVES) as loader, pytest.raises(ResumeError, match="number of items changed from 47 to 46"):
        loader.load_state_dict(state)


def test_a_plan_over_other_data_is_refused_when_the_loader_is_made() -> None:
    with pytest.raises(OptionError, match="must be over"):
        Loader(numbered_source(47), MOVES)


# -- very long data ----------------------------------------------------------------------------------------------------


class Endless:
    """A billion items, made on demand."""

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
        loader.load_state_dict(state_at(loader, 0, batch))
        found = next(iter(loader))["x"].tolist()
        return found, 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)


def test_worker_processes_do_not_get_a_list_of_all_batches() -> None:
    plan = Plan(Endless.index, Shuffle(), batch_size=64)
    batch = plan.n_batches - 4_000_000  # of fifteen million; a list of as many tickets would take half a gigabyte
    found, n_bytes = run_isolated(most_bytes_until_the_first_batch, batch)
    assert found == plan.epoch(0).draw(batch).items.tolist()
    assert n_bytes < 50_000_000


def test_resuming_far_into_a_billion_items_costs_as_much_as_at_item_ten() -> None:
    source = Endless()
    plan = Plan(source.index, Shuffle(), batch_size=32)
    for batch in (10, plan.n_batches - 2):
        with Loader(source, plan) as loader:
            state = state_at(loader, 7, batch)
            began = time.perf_counter()
            loader.load_state_dict(state)
            found = next(iter(loader))["x"].tolist()
            took = time.perf_counter() - began
        assert found == plan.epoch(7).draw(batch).items.tolist()
        assert took < 1  # measured: about 20 ms; a walk over the order would take minutes
