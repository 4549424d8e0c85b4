"""A run resumed again and again with other workers, executors and ranks equals the run that never stopped."""

import json
from contextlib import ExitStack
from typing import Any

import torch
from hypothesis import given, reject
from hypothesis import strategies as st
from penstock_cases import few_cases
from penstock_test_parts import worlds

from penstock import Loader, Plan, WindowShuffle
from tests.laws.loaders import EXECUTORS, SOURCE, make_loader


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


@few_cases  # each is four runs of up to four ranks
@given(stages, st.sampled_from(["short", "pad"]), st.integers(1, 3), st.integers(2, 6), st.integers(0, 1000))
def test_stopping_three_times_with_other_ranks_and_workers_is_one_run(
    changes: list[tuple[int, str, int]], tail: Any, lanes: int, batch_size: int, seed: int
) -> None:
    plan = Plan(SOURCE.index, WindowShuffle(3), batch_size=batch_size, seed=seed, lanes=lanes, tail=tail)
    found: list[tuple[int, int]] = []
    state: dict[str, Any] | None = None
    for size, executor, steps in changes:
        with ExitStack() as stack:
            loaders = [stack.enter_context(make_loader(plan, executor, world=world)) for world in worlds(size)]
            if state is not None:
                for loader in loaders:
                    loader.load_state_dict(state)
                if tail == "short" and loaders[0].position.share().left_out:
                    reject()  # fewer items are left in the epoch than there are ranks
            found += advance(loaders, steps)
            states = [loader.state_dict() for loader in loaders]
        assert all(other == states[0] for other in states)
        state = json.loads(json.dumps(states[0]))
    with make_loader(plan) as loader:
        whole = advance([loader], 1 + 2 * sum(size * steps for size, _, steps in changes))
    assert found == whole[: len(found)]
    last = [real_items(plan, state["epoch"], batch) for batch in range(state["batch"])]
    assert len(found) == state["epoch"] * 46 + sum(last)
