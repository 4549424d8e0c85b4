"""Every source of a mixture has its weight of every stretch, and its items take turns over all epochs."""

from collections import Counter
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.errors import PlanError, ResumeError
from penstock.core.index import Index
from penstock.plan.balanced import Balanced
from penstock.plan.cursor import Cursor
from penstock.plan.mixed.order import Mixed, MixedPart
from penstock.plan.mixed.schedule import Schedule
from penstock.plan.mixed.weights import MAX_PERIOD, count_weights
from penstock.plan.orders import Sequential, Shuffle, WindowShuffle
from penstock.plan.plan import Plan, Segments

many_weights = st.lists(st.integers(1, 60) | st.integers(1, 900), min_size=1, max_size=9).map(tuple)


def parts_of(*sizes: int, order: Any = None) -> tuple[MixedPart, ...]:
    return tuple(MixedPart(f"s{n}", Index.uniform(size, 3), order or Shuffle()) for n, size in enumerate(sizes))


def index_of(order: Mixed) -> Index:
    return Index.concat([part.index for part in order.parts])


def origins(order: Mixed, items: np.ndarray) -> np.ndarray:
    """Return the source of each item."""
    ends = np.cumsum([len(part.index) for part in order.parts])
    return np.searchsorted(ends, items, side="right")


def stream(order: Mixed, epochs: int, seed: int = 0) -> np.ndarray:
    """Return the items of some epochs, end to end."""
    arrangements = [order.arrange(index_of(order), seed, epoch) for epoch in range(epochs)]
    return np.concatenate([arrangement.items(np.arange(arrangement.length)) for arrangement in arrangements])


def worst_error(sources: np.ndarray, weights: tuple[int, ...]) -> Fraction:
    """Return by how many items the count of any source in any prefix differs from its weight, at most."""
    counts = np.cumsum(sources[:, None] == np.arange(len(weights)), axis=0)
    wanted = np.arange(1, len(sources) + 1)[:, None] * np.array(weights)
    return Fraction(int(np.abs(counts * sum(weights) - wanted).max()), sum(weights))


@st.composite
def mixtures(draw: st.DrawFn) -> Mixed:
    sizes = draw(st.lists(st.integers(1, 20), min_size=1, max_size=4))
    order = st.sampled_from([Shuffle(), Sequential(), WindowShuffle(1)])
    parts = tuple(MixedPart(f"s{n}", Index.uniform(size, 3), draw(order)) for n, size in enumerate(sizes))
    weights = tuple(draw(st.lists(st.integers(1, 9), min_size=len(sizes), max_size=len(sizes))))
    return Mixed(parts, ((0, weights),), draw(st.sampled_from(["first", "all"]) | st.integers(1, 60)))


@given(many_weights, st.integers(0, 3))
def test_every_prefix_has_the_weights_to_within_one_item(weights: tuple[int, ...], periods: int) -> None:
    schedule, period = Schedule([(0, weights)]), sum(weights)
    sources, turns = schedule.locate(np.arange(2 * period))
    assert worst_error(sources, weights) < 1
    far = periods * 10**9 * period + np.arange(period)
    assert schedule.locate(far)[0].tolist() == sources[:period].tolist()
    for source in range(len(weights)):
        places = np.flatnonzero(sources == source)
        assert turns[places].tolist() == list(range(2 * weights[source]))
        assert [schedule.find(source, turn) for turn in range(len(places))] == places.tolist()
    assert schedule.count(period + 1).tolist() == np.bincount(sources[: period + 1], minlength=len(weights)).tolist()


@given(many_weights, many_weights, st.integers(1, 500))
def test_after_a_change_of_weights_every_stretch_from_there_has_the_new_ones(
    before: tuple[int, ...], after: tuple[int, ...], change: int
) -> None:
    size = min(len(before), len(after))
    schedule = Schedule([(0, before[:size]), (change, after[:size])])
    sources, turns = schedule.locate(np.arange(change + 700))
    assert worst_error(sources[:change], before[:size]) < 1
    assert worst_error(sources[change:], after[:size]) < 1
    for source in range(size):
        assert turns[sources == source].tolist() == list(range(int((sources == source).sum())))
    assert schedule.count(change + 5).tolist() == np.bincount(sources[: change + 5], minlength=size).tolist()


@given(mixtures(), st.integers(0, 99))
def test_no_item_comes_again_before_all_others_of_its_source_also_from_epoch_to_epoch(order: Mixed, seed: int) -> None:
    items = stream(order, 3, seed)
    sources, start = origins(order, items), 0
    assert worst_error(sources, order.phases[0][1]) < 1
    for number, part in enumerate(order.parts):
        mine, size = (items[sources == number] - start).tolist(), len(part.index)
        rounds = [mine[begin : begin + size] for begin in range(0, len(mine), size)]
        assert all(sorted(each) == list(range(size)) for each in rounds[:-1])
        assert all(len(set(each)) == len(each) for each in rounds)
        assert order.rounds(3)[part.name] == len(mine) / size
        start += size


@given(mixtures())
def test_an_epoch_is_as_long_as_stop_says(order: Mixed) -> None:
    items, sizes = stream(order, 1), [len(part.index) for part in order.parts]
    assert len(items) == order.length
    longer = Mixed(order.parts, order.phases, stop=order.length + 1)
    seen = np.bincount(origins(order, items), minlength=len(sizes))
    if order.stop == "first":
        assert len(set(items.tolist())) == len(items)
        assert len(set(stream(longer, 1).tolist())) == len(items)
    elif order.stop == "all":
        assert set(items.tolist()) == set(range(sum(sizes)))
        assert (seen == sizes).any()
        assert set(items[:-1].tolist()) != set(items.tolist())
    else:
        assert order.length == order.stop


@given(mixtures(), st.integers(1, 7))
def test_homogeneous_batches_are_full_and_of_one_source_each_with_its_weight(order: Mixed, batch_size: int) -> None:
    stop = order.stop if isinstance(order.stop, str) else order.stop * batch_size
    order = Mixed(order.parts, order.phases, stop, homogeneous=True)
    try:
        plan = Plan(index_of(order), order, batch_size=batch_size, seed=1)
    except PlanError:
        assert stop == "first"
        assert min(len(part.index) for part in order.parts) < batch_size
        return
    draws = [draw for epoch in range(2) for draw in plan.epoch(epoch).draws(range(plan.n_batches))]
    sources = [set(origins(order, draw.items).tolist()) for draw in draws]
    assert all(len(source) == 1 and len(draw) == batch_size for source, draw in zip(sources, draws, strict=True))
    assert worst_error(np.array([source for (source,) in sources]), order.phases[0][1]) < 1
    for number, size in enumerate(len(part.index) for part in order.parts):
        mine = [item for draw in draws for item in draw.items.tolist() if origins(order, np.array([item]))[0] == number]
        assert all(len(set(mine[begin : begin + size])) == len(mine[begin : begin + size]) for begin in [0, size])


@given(mixtures(), st.integers(1, 9), st.integers(1, 9), st.data())
def test_a_plan_resumes_anywhere_with_another_batch_size(order: Mixed, before: int, after: int, data: Any) -> None:
    old, new = (Plan(index_of(order), order, batch_size=size, seed=3) for size in (before, after))
    done = data.draw(st.integers(0, old.n_batches))
    cursor = Cursor.restore(Cursor(1, done).state(old), new)
    rest = new.epoch(1, cursor.origin).draws(range(cursor.batch, new.epoch(1, cursor.origin).n_batches))
    whole = [item for draw in old.epoch(1).draws(range(old.n_batches)) for item in draw.items.tolist()]
    assert [item for draw in rest for item in draw.items.tolist()] == whole[done * before :]


def test_batches_and_steps_that_the_order_depends_on_refuse_another_batch_size() -> None:
    for order in (
        Mixed(parts_of(30, 20), ((0, (1, 1)),), stop=48, homogeneous=True),
        Mixed(parts_of(30, 20), ((0, (1, 1)), (3, (3, 1))), stop=48),
    ):
        state = Cursor(0, 2).state(Plan(index_of(order), order, batch_size=4))
        with pytest.raises(ResumeError, match="the order changed from"):
            Cursor.restore(state, Plan(index_of(order), order, batch_size=8))
    same_items = Mixed(parts_of(30, 20), ((0, (1, 1)), (3, (3, 1))), stop=48, items_per_step=8)
    state = Cursor(0, 2).state(Plan(index_of(same_items), same_items, batch_size=4))
    assert Cursor.restore(state, Plan(index_of(same_items), same_items, batch_size=8)) == Cursor(0, 1)


def test_steps_are_batches_of_the_plan_or_as_many_items_as_given() -> None:
    for given_items, batch_size, change in ((None, 6, 12), (10, 6, 20)):
        order = Mixed(parts_of(90, 90), ((0, (1, 1)), (2, (9, 1))), stop=60, items_per_step=given_items)
        plan = Plan(index_of(order), order, batch_size=batch_size)
        items = np.concatenate([draw.items for draw in plan.epoch(0).draws(range(plan.n_batches))])
        sources = origins(order, items)
        assert worst_error(sources[:change], (1, 1)) < 1
        assert worst_error(sources[change:], (9, 1)) < 1


def test_sources_with_the_same_items_are_shuffled_differently_and_every_round_again() -> None:
    items = stream(Mixed(parts_of(40, 40), ((0, (1, 1)),), stop="all"), 2)
    first, second = (items[origins(Mixed(parts_of(40, 40), ((0, (1, 1)),)), items) == n] for n in (0, 1))
    assert len({tuple(each) for each in (first[:40], first[40:], second[:40] - 40, second[40:] - 40)}) == 4


def test_repeats_within_an_epoch_have_randomness_of_their_own() -> None:
    parts = (*parts_of(3), MixedPart("b", Index.uniform(4), Balanced(["x", "y", "y", "y"])))
    order = Mixed(parts, ((0, (1, 1)),), stop=40)
    plan = Plan(index_of(order), order, batch_size=10)
    paths = Counter(
        draw.seed_path(row) for epoch in (0, 1) for draw in plan.epoch(epoch).draws(range(4)) for row in range(10)
    )
    assert max(paths.values()) == 1
    once = Mixed(parts_of(5, 7), ((0, (5, 7)),))
    assert all(once.arrange(index_of(once), 0, epoch).visits is None for epoch in range(3))


def test_segments_continue_the_mixture_over_the_ends_of_passes() -> None:
    order = Mixed(parts_of(7, 5), ((0, (2, 1)),), stop=11)
    plan = Plan(index_of(order), order, batch_size=4, seed=5, tail="drop")
    segments = Segments(plan, 3)
    found = [item for n in range(5) for draw in segments.epoch(n).draws(range(3)) for item in draw.items.tolist()]
    assert found == stream(order, 6, seed=5)[: len(found)].tolist()


@given(st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=30))
def test_weights_are_fractions_near_what_was_given(weights: list[float]) -> None:
    counts = count_weights(weights)
    assert min(counts) >= 1
    assert sum(counts) <= MAX_PERIOD
    errors = [count / sum(counts) - weight / sum(weights) for count, weight in zip(counts, weights, strict=True)]
    assert max(map(abs, errors)) <= len(weights) / MAX_PERIOD


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=6))
def test_weights_of_a_small_denominator_are_exact(weights: list[int]) -> None:
    counts = count_weights([weight / 7 for weight in weights])
    assert [Fraction(count, sum(counts)) for count in counts] == [Fraction(each, sum(weights)) for each in weights]


def test_a_billion_items_start_and_resume_at_once() -> None:
    order = Mixed(parts_of(600_000_007, 300_000_011, 100_000_007), ((0, (600_000, 300_001, 99_999)),), stop="all")
    order = Mixed(order.parts, ((0, count_weights(order.phases[0][1])),), stop="all")
    index = Index.concat([part.index for part in order.parts], identity="many")
    plan = Plan(index, order, batch_size=32, seed=1)
    last = plan.epoch(5).draw(plan.n_batches - 1).items
    assert len(set(last.tolist())) == len(last)
    assert plan.identity()["data"] == index.digest  # without a visit of all chunks


def test_mixing_says_that_a_mixture_is_mixed_whatever_its_weights() -> None:
    shuffled = Mixed(parts_of(9000, 500), ((0, (1, 4)),), stop=4000)
    in_order = Mixed(parts_of(9000, 500, order=Sequential()), ((0, (1, 4)),), stop=4000)
    apart = Mixed(parts_of(9000, 500), ((0, (1, 4)),), stop=4000, homogeneous=True)
    scores = [Plan(index_of(o), o, batch_size=40, seed=1).mixing().score for o in (shuffled, in_order, apart)]
    assert scores[0] > 0.9
    assert max(scores[1:]) < 0.5


def test_an_index_that_is_not_of_the_mixture_and_orders_that_do_not_fit_are_refused() -> None:
    order = Mixed(parts_of(30, 20), ((0, (1, 1)),))
    with pytest.raises(PlanError, match=r"needs the index of the mixture \(50 items\), got Index\(49 items"):
        Plan(Index.uniform(49), order, batch_size=4)
    with pytest.raises(PlanError, match="Select from the sources before they are mixed"):
        Plan(index_of(order).select(np.arange(50) % 2 == 0), order, batch_size=4)
    wide = Mixed(parts_of(30, 20, order=WindowShuffle(9)), ((0, (1, 1)),))
    with pytest.raises(PlanError, match=r"Source 's1' of the mixture: window must be <= 7"):
        Plan(index_of(wide), wide, batch_size=4)
    with pytest.raises(PlanError, match=r"multiple of batch_size, 8, .* got 20; use 16 or 24"):
        Plan(index_of(order), Mixed(order.parts, order.phases, 20, homogeneous=True), batch_size=8)
    with pytest.raises(PlanError, match=r"'s1' of the mixture has 20 items, too few for a homogeneous batch of 25"):
        Plan(index_of(order), Mixed(order.parts, order.phases, homogeneous=True), batch_size=25)
    with pytest.raises(PlanError, match=r"make a Plan, and ask plan\.order"):
        Mixed(order.parts, order.phases, homogeneous=True).rounds()
