"""A run resumed with other workers, executors, ranks or batch size equals the run that never stopped."""

import json
from contextlib import ExitStack
from dataclasses import replace
from itertools import chain, islice
from typing import Any

import pytest
import torch
from hypothesis import given, reject, settings
from hypothesis import strategies as st
from penstock_test_parts import planned_items, to_plain, worlds

from penstock import Loader, Plan, PlanError, Shuffle, WindowShuffle
from tests.laws.loaders import EXECUTORS, SOURCE, epochs_of, make_loader


def advance(loaders: list[Loader], steps: int) -> list[tuple[int, int]]:
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
                loaders = [stack.enter_context(make_loader(plan, executor, world=world)) for world in worlds(size)]
                if state is not None:
                    for loader in loaders:
                        loader.load_state_dict(state)
                found += advance(loaders, steps)
                states = [loader.state_dict() for loader in loaders]
            assert all(other == states[0] for other in states)
            state = json.loads(json.dumps(states[0]))
    except PlanError:
        assert tail == "short"
        reject()
    with make_loader(plan) as loader:
        whole = advance([loader], 1 + sum(size * steps for size, _, steps in changes))
    assert found == whole[: len(found)]
    last = [real_items(plan, state["epoch"], batch) for batch in range(state["batch"])]
    assert len(found) == state["epoch"] * 46 + sum(last)


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize(("before", "after"), [(4, 8), (4, 3), (6, 4), (5, 46), (7, 100)])
def test_another_batch_size_resumes_at_the_next_item(executor: str, before: int, after: int) -> None:
    plan = Plan(SOURCE.index, Shuffle(), batch_size=before, tail="short", seed=8)
    other = replace(plan, batch_size=after)
    items = [item for batch in chain(planned_items(plan, 0), planned_items(plan, 1)) for item in batch]
    for done in range(plan.n_batches + 1):
        with make_loader(plan) as first, make_loader(other, executor) as second:
            found = [to_plain(batch) for batch in islice(first, done)]
            second.load_state_dict(json.loads(json.dumps(first.state_dict())))
            rest = epochs_of(second, until=2)
        assert [x for batch in found + rest for x in batch["x"]] == items
        # All but the last of the first epoch and the last of the second are full.
        assert [len(batch["x"]) for batch in rest].count(after) >= len(rest) - 2
