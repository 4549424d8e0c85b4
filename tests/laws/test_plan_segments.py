"""Segments cut the endless stream of passes: no item is favoured, none is lost."""

from collections import Counter
from dataclasses import replace

from hypothesis import assume, given
from hypothesis import strategies as st

from penstock.plan.plan import Plan, Segments
from tests.laws.strategies import all_items, any_order, batches, delivered, draws, facts, partitioning_order, plans

lengths = st.integers(1, 9)


@given(plans(tails=("drop",), min_items=1, max_items=40), lengths, st.integers(0, 12))
def test_visit_counts_of_a_cycling_stream_differ_by_at_most_one_after_every_batch(
    plan: Plan, length: int, segments: int
) -> None:
    visits = Counter(dict.fromkeys(all_items(plan.index), 0))
    for number in range(segments):
        for batch in batches(Segments(plan, length).epoch(number)):
            visits.update(batch)
            assert max(visits.values()) - min(visits.values()) <= 1
    assert sorted(visits) == all_items(plan.index)
    assert visits.total() == segments * length * plan.batch_size


@given(plans(any_order, tails=("drop",), min_items=1, max_lanes=1, max_items=40), lengths)
def test_a_cycling_stream_is_the_passes_end_to_end(plan: Plan, length: int) -> None:
    assume(plan.length)
    stream = Segments(plan, length)
    streamed = [(path[0], item) for e in range(5) for path, item in _paths(stream, e)]
    whole = replace(plan, tail="short")
    passes = -(-len(streamed) // plan.length)
    wanted = [(e, item) for e in range(passes) for item in delivered(draws(whole.epoch(e)))]
    assert streamed == wanted[: len(streamed)]


def _paths(stream: Segments, number: int) -> list[tuple[tuple[int, ...], int]]:
    return [
        (draw.seed_path(row), int(draw.items[row])) for draw in draws(stream.epoch(number)) for row in range(len(draw))
    ]


@given(plans(tails=("drop",), min_items=1), lengths, st.integers(0, 1000))
def test_every_cycling_segment_has_its_length_in_full_batches(plan: Plan, length: int, number: int) -> None:
    epoch = Segments(plan, length).epoch(number)
    assert [len(batch) for batch in batches(epoch)] == [plan.batch_size] * length


@given(plans(any_order, tails=("short", "pad"), max_items=40), lengths, st.integers(0, 3))
def test_segments_of_short_and_pad_are_the_batches_of_a_pass_cut_into_runs(
    plan: Plan, length: int, number: int
) -> None:
    stream = Segments(plan, length)
    per_pass = max(1, -(-plan.n_batches // length))
    assert stream.segments_per_pass == per_pass
    of_pass = [stream.epoch(number * per_pass + k) for k in range(per_pass)]
    lengths_made = [epoch.n_batches for epoch in of_pass]
    assert lengths_made[:-1] == [length] * (per_pass - 1)
    assert sum(lengths_made) == plan.n_batches
    made = [(d.items.tolist(), _mask(d)) for epoch in of_pass for d in epoch.draws(range(epoch.n_batches))]
    assert made == [(d.items.tolist(), _mask(d)) for d in draws(plan.epoch(number))]


def _mask(draw) -> list[bool] | None:
    return None if draw.mask is None else draw.mask.tolist()


@given(plans(tails=("short", "pad"), max_items=40), lengths, st.integers(0, 3))
def test_segments_of_short_and_pad_partition_every_pass(plan: Plan, length: int, number: int) -> None:
    stream = Segments(plan, length)
    per_pass = int(stream.segments_per_pass)
    of_pass = [draw for k in range(per_pass) for draw in draws(stream.epoch(number * per_pass + k))]
    assert sorted(delivered(of_pass)) == all_items(plan.index)


@given(plans(partitioning_order, max_items=40), lengths, st.integers(0, 5), st.data())
def test_a_segment_resumes_at_any_batch(plan: Plan, length: int, number: int, data: st.DataObject) -> None:
    whole = [facts(draw) for draw in draws(Segments(plan, length).epoch(number))]
    start = data.draw(st.integers(0, len(whole)))
    assert [facts(draw) for draw in draws(Segments(replace(plan), length).epoch(number), start)] == whole[start:]
