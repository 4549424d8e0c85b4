"""A draw depends on the plan, the epoch and the batch number, and on nothing that happened before."""

import pickle
from dataclasses import replace
from typing import Any

from hypothesis import example, given
from hypothesis import strategies as st

from penstock.core.index import Index
from penstock.plan.orders import Sequential, WindowShuffle
from penstock.plan.plan import Plan, Segments
from tests.laws.strategies import any_order, draws, every_plan, facts, plans

epochs = st.integers(0, 4)


@given(every_plan(), epochs)
def test_a_fresh_plan_and_a_pickled_one_draw_the_same(plan: Any, number: int) -> None:
    made = [facts(draw) for draw in draws(plan.epoch(number))]
    assert [facts(draw) for draw in draws(replace(plan).epoch(number))] == made
    # Pickled after use, as a loader hands it to its workers: what is cached by then is not sent.
    assert [facts(draw) for draw in draws(pickle.loads(pickle.dumps(plan)).epoch(number))] == made


@given(every_plan(max_items=20), st.randoms(use_true_random=False))
def test_draws_are_the_same_in_any_sequence_of_epochs_and_batches(plan: Any, random: Any) -> None:
    wanted = {(e, n): facts(draw) for e in range(5) for n, draw in enumerate(draws(replace(plan).epoch(e)))}
    asked = list(wanted)
    random.shuffle(asked)
    kept = [plan.epoch(e) for e in range(5)]
    assert {(e, n): facts(kept[e].draw(n)) for e, n in asked} == wanted


@given(every_plan(), epochs, st.integers(0, 10), st.integers(1, 5))
@example(plan=Segments(Plan(Index.uniform(10), Sequential(), batch_size=4), 6), number=0, start=0, step=1)
def test_draws_computed_many_at_a_time_equal_draws_one_at_a_time(plan: Any, number: int, start: int, step: int) -> None:
    epoch = plan.epoch(number)
    batches = range(start, epoch.n_batches, step)
    assert [facts(draw) for draw in epoch.draws(batches)] == [facts(epoch.draw(n)) for n in batches]


def test_draws_of_a_long_epoch_do_not_depend_on_how_many_are_computed_at_a_time() -> None:
    # 400 items x 110 batches are more positions than are worked out at once.
    epoch = Plan(Index.uniform(44_000, 100), WindowShuffle(5), batch_size=400, seed=3, tail="short").epoch(2)
    assert [facts(draw) for draw in draws(epoch)] == [facts(epoch.draw(n)) for n in range(110)]


@given(plans(any_order, min_items=1), st.integers(1, 6))
def test_every_occurrence_in_a_run_has_a_seed_path_of_its_own(plan: Plan, length: int) -> None:
    stream = Segments(replace(plan, tail="drop"), length)
    paths = [draw.seed_path(row) for e in range(6) for draw in draws(stream.epoch(e)) for row in range(len(draw))]
    assert len(set(paths)) == len(paths)


@given(plans(any_order, min_items=1))
def test_every_occurrence_in_an_epoch_has_a_seed_path_of_its_own(plan: Plan) -> None:
    made = [draw for e in range(3) for draw in draws(plan.epoch(e))]
    real = [(draw, row) for draw in made for row in range(len(draw)) if draw.mask is None or draw.mask[row]]
    paths = [draw.seed_path(row) for draw, row in real]
    assert len(set(paths)) == len(paths)
    assert all(path[:2] == (draw.epoch, draw.items[row]) for path, (draw, row) in zip(paths, real, strict=True))
