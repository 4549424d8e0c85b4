"""One global order, whatever the number of workers and ranks."""

import os
from collections.abc import Callable
from contextlib import ExitStack
from datetime import timedelta
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, reject
from hypothesis import strategies as st
from penstock_test_parts import delivered_items, numbered_source, planned_items, run_side_by_side, worlds

from penstock import (
    Balanced,
    Index,
    Loader,
    Plan,
    PlanError,
    RandomChunks,
    RunOptions,
    Segments,
    Sequential,
    Shuffle,
    TokenBudget,
    WindowShuffle,
    World,
)
from penstock.plan import Subset
from penstock.plan.mixed.order import Mixed, MixedPart
from tests.laws.shards import LAYOUTS, make_source

SOURCES = {(n, chunk): numbered_source(n, chunk) for n in (7, 24, 41, 60) for chunk in (1, 4, 10)}
THREADS = RunOptions(executor="threads")
FORK = RunOptions(executor="processes", start_method="fork")
SPAWN = RunOptions(executor="processes", start_method="spawn")


def real(batch: dict[str, Any]) -> list[int]:
    """Return the items of a batch that are not padding."""
    return batch["x"][batch["mask"]].tolist() if "mask" in batch else batch["x"].tolist()


def plan_batches(plan: Plan, epoch: int) -> list[list[int]]:
    """Return the same from the plan."""
    draws = [plan.epoch(epoch).draw(n) for n in range(plan.epoch(epoch).n_batches)]
    return [(draw.items if draw.mask is None else draw.items[draw.mask]).tolist() for draw in draws]


def check_order(plan: Plan, size: int, made: Callable[[World], Loader], epochs: int = 2) -> None:
    """Check that the ranks together make the plan's batches in the plan's order, in equally many steps."""
    with ExitStack() as stack:
        loaders = [stack.enter_context(made(world)) for world in worlds(size)]
        for epoch in range(epochs):
            lengths = [len(loader) for loader in loaders]
            ranks = [[real(batch) for batch in loader] for loader in loaders]
            assert [len(rank) for rank in ranks] == lengths == [lengths[0]] * size
            wanted = plan_batches(plan, epoch)
            full = len(wanted) // size * size
            left = [item for batch in wanted[full:] for item in batch]
            if plan.tail == "short" and 0 < len(left) < size:  # too few for all ranks: the round before takes them
                full = max(0, full - size)
                left = [item for batch in wanted[full:] for item in batch]
            is_left_out = plan.tail == "drop" or (plan.tail == "short" and len(left) < size)
            steps = [batch for step in zip(*ranks, strict=True) for batch in step]
            assert steps[:full] == wanted[:full]
            assert [item for batch in steps[full:] for item in batch] == ([] if is_left_out else left)


@st.composite
def mixtures(draw: st.DrawFn, n: int) -> Mixed:
    """Mixtures of two sources, some of one source per batch, some with weights by step."""
    first = draw(st.integers(1, n - 1))
    parts = tuple(MixedPart(f"s{size}", Index.uniform(size, 3), Shuffle()) for size in (first, n - first))
    weights = st.tuples(st.integers(1, 5), st.integers(1, 5))
    if draw(st.booleans()):
        return Mixed(parts, ((0, draw(weights)),), "all", homogeneous=draw(st.booleans()))
    return Mixed(parts, ((0, draw(weights)), (draw(st.integers(1, 9)), draw(weights))), draw(st.integers(1, 60)))


@st.composite
def plans(draw: st.DrawFn) -> tuple[Any, Plan]:
    if draw(st.integers(0, 2)):
        source: Any = SOURCES[draw(st.sampled_from(sorted(SOURCES)))]
    else:
        source = make_source(draw(st.sampled_from(LAYOUTS)), draw(st.sampled_from([7, 41])), 10, ["x"])
    index, n = source.index, len(source.index)
    if draw(st.booleans()):
        seed = draw(st.integers(0, 99))
        chosen = np.random.default_rng(seed).random(n) < 0.7
        index = index.select(chosen | (np.arange(n) == 0))
    order = draw(
        st.one_of(
            st.sampled_from(
                [Sequential(), Shuffle(), Subset(max(1, len(index) // 2)), Balanced(np.arange(len(index)) % 3)]
            ),
            st.builds(
                WindowShuffle,
                st.integers(1, index.n_chunks),
                permute_chunks=st.booleans(),
                permute_items=st.booleans(),
                held=st.booleans(),
            ),
            st.builds(RandomChunks, st.integers(1, 9), count=st.integers(1, 9), shuffle=st.booleans()),
        )
    )
    if draw(st.integers(0, 4)) == 0:
        index, order = source.index, draw(mixtures(n))
    plan: Plan = Plan(
        index,
        order,
        batch_size=draw(st.integers(1, 9)),
        seed=draw(st.integers(0, 2**32)),
        lanes=draw(st.integers(1, 4)),
        tail=draw(st.sampled_from(["drop", "short", "pad"])),
    )
    return source, Segments(plan, draw(st.integers(1, 7))) if draw(st.integers(0, 3)) == 0 else plan


@given(plans(), st.integers(1, 4), st.integers(0, 4))
def test_the_order_depends_neither_on_workers_nor_on_ranks(case: tuple[Any, Any], size: int, workers: int) -> None:
    source, plan = case
    options = THREADS if workers else RunOptions()
    try:
        check_order(plan, size, lambda world: Loader(source, plan, num_workers=workers, world=world, options=options))
    except PlanError:
        # Fewer items than ranks are refused, rather than leave a rank without a batch; of segments, in the last one.
        assert plan.tail == "short"
        last = plan.epoch(plan.epochs_per_pass - 1)
        assert sum(len(draw) for draw in last.draws(range(last.n_batches))) < size
        reject()


PARTS = (MixedPart("a", Index.uniform(11, 4), Shuffle()), MixedPart("b", Index.uniform(30, 4), Shuffle()))
ONE_EACH = Mixed(PARTS, ((0, (2, 1)),), "all", homogeneous=True)
LENGTHS = [1 + item * 7 % 13 for item in range(41)]
PLANS: dict[str, Any] = {
    "sequential, drop": Plan(SOURCES[41, 4].index, Sequential(), batch_size=4, tail="drop"),
    "shuffle, short": Plan(SOURCES[41, 4].index, Shuffle(), batch_size=3, tail="short", seed=1),
    "shuffle, pad, lanes": Plan(SOURCES[41, 4].index, Shuffle(), batch_size=6, lanes=4, tail="pad", seed=2),
    "windows, pad, lanes": Plan(SOURCES[41, 4].index, WindowShuffle(3), batch_size=5, lanes=4, tail="pad", seed=3),
    "windows, drop": Plan(SOURCES[41, 4].index, WindowShuffle(4), batch_size=3, seed=4, tail="drop"),
    "mixture": Plan(SOURCES[41, 4].index, Mixed(PARTS, ((0, (2, 1)),), "all"), batch_size=5, seed=6, tail="short"),
    "mixture, a source each": Plan(SOURCES[41, 4].index, ONE_EACH, batch_size=4, seed=7, tail="drop"),
    "token budget": TokenBudget(SOURCES[41, 4].index, LENGTHS, 40, seed=8, tail="drop"),
    "segments of windows": Segments(
        Plan(SOURCES[41, 4].index, WindowShuffle(2), batch_size=4, lanes=2, seed=5, tail="drop"), 5
    ),
}


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("workers", [0, 1, 2, 3, 4])
def test_workers_0_to_4_and_ranks_1_to_4_give_one_order(workers: int, size: int, plan: Any) -> None:
    options = THREADS if workers else RunOptions()
    check_order(
        plan, size, lambda world: Loader(SOURCES[41, 4], plan, num_workers=workers, world=world, options=options)
    )


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
@pytest.mark.parametrize(("workers", "size"), [(1, 1), (2, 2)])
def test_worker_processes_give_the_same_order(workers: int, size: int, plan: Any) -> None:
    check_order(plan, size, lambda world: Loader(SOURCES[41, 4], plan, num_workers=workers, world=world, options=FORK))


def test_spawned_worker_processes_give_the_same_order() -> None:
    plan = PLANS["windows, pad, lanes"]
    check_order(
        plan, 1, lambda world: Loader(SOURCES[41, 4], plan, num_workers=2, world=world, options=SPAWN), epochs=1
    )


def test_fewer_batches_than_ranks_leave_no_rank_waiting() -> None:
    source = numbered_source(5)
    padded = Plan(source.index, Shuffle(), batch_size=4, tail="pad")
    check_order(padded, 4, lambda world: Loader(source, padded, world=world))
    dropped = Plan(source.index, Shuffle(), batch_size=4, tail="drop")
    check_order(dropped, 4, lambda world: Loader(source, dropped, world=world))


def test_a_last_round_with_fewer_items_than_ranks_is_shared_together_with_the_one_before() -> None:
    source = numbered_source(9)
    plan = Plan(source.index, Sequential(), batch_size=4)  # 4 + 4 + 1: the last one is for two ranks
    ranks = [delivered_items(Loader(source, plan, world=world)) for world in worlds(2)]
    assert ranks == [[[0, 1, 2, 3]], [[4, 5, 6, 7, 8]]]


def test_fewer_items_than_ranks_are_refused_on_construction() -> None:
    source = numbered_source(2)
    with pytest.raises(PlanError, match="an item for each of the 3 ranks, got 2"):
        Loader(source, Plan(source.index, Shuffle(), batch_size=4), world=World(0, 3))
    source = numbered_source(5)
    with pytest.raises(PlanError, match="The last 1 of 5 batches must have an item for each of the 2 ranks"):
        Loader(source, TokenBudget(source.index, [4] * 5, max_tokens=4), world=World(0, 2))


# -- real ranks --------------------------------------------------------------------------------------------------------


def rank(store: str, number: int) -> dict[str, Any]:
    """Return the number of steps, the batches and the state, by tail, of one of two ranks."""
    # RANK in the environment says something else: the process group is what counts.
    os.environ.update(RANK="5", WORLD_SIZE="9")
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=number, world_size=2, timeout=timedelta(seconds=300)
    )
    source, found = numbered_source(43, chunk=5), {}
    for tail in ("pad", "short", "drop"):
        plan = Plan(source.index, WindowShuffle(3), batch_size=4, lanes=2, tail=tail, seed=6)
        with Loader(source, plan, num_workers=1, options=THREADS) as loader:
            batches = []
            for batch in loader:
                # A rank with another number of steps would leave the other one waiting here.
                dist.all_reduce(torch.ones(1))
                batches.append(real(batch))
            found[tail] = (len(loader), batches, loader.state_dict())
    dist.barrier()
    dist.destroy_process_group()
    return found


def test_two_gloo_ranks_see_all_items_once_in_equally_many_steps(tmp_path: Path) -> None:
    source = numbered_source(43, chunk=5)  # 10 batches of 4 and one of 3: neither batches nor items divide
    store = str(tmp_path / "store")
    found = run_side_by_side((rank, store, 0), (rank, store, 1))
    for tail in ("pad", "short", "drop"):
        plan = Plan(source.index, WindowShuffle(3), batch_size=4, lanes=2, tail=tail, seed=6)
        (length, left, state), (other_length, right, other_state) = (one[tail] for one in found)
        assert len(left) == len(right) == length == other_length == (5 if tail == "drop" else 6)
        assert state == other_state
        assert [batch for pair in zip(left[:5], right[:5], strict=True) for batch in pair] == planned_items(plan)[:10]
        items = [item for batches in (left, right) for batch in batches for item in batch]
        assert len(items) == len(set(items))
        assert sorted(items) == (
            sorted(chain.from_iterable(planned_items(plan)[:10])) if tail == "drop" else list(range(43))
        )
