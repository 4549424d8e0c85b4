"""Figures of waiting: exact where they are counted, within 1 % where they are binned, bounded whatever happens."""

import math
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.observe.durations import Durations, LoopTimes, Pace, Trace

seconds = st.one_of(st.floats(2e-9, 1e5), st.sampled_from([0.08, 0.5, 1.0, 1e-6]))


def make_durations(values: list[float]) -> Durations:
    durations = Durations()
    for value in values:
        durations.add(value)
    return durations


@given(values=st.lists(seconds, min_size=1, max_size=200), share=st.floats(0, 1))
def test_quantiles_are_within_one_percent_of_the_sorted_list(values: list[float], share: float) -> None:
    found = make_durations(values).quantile(share)
    exact = float(np.quantile(values, share, method="inverted_cdf"))
    assert found == pytest.approx(exact, rel=0.01)


@given(values=st.lists(seconds, min_size=1, max_size=200))
def test_count_mean_deviation_and_extremes_are_those_of_numpy(values: list[float]) -> None:
    found = make_durations(values)
    assert (found.count, found.min, found.max) == (len(values), min(values), max(values))
    assert found.quantile(1.0) == max(values)
    assert found.total == pytest.approx(sum(values), rel=1e-12)
    assert found.mean == pytest.approx(np.mean(values), rel=1e-12)
    assert found.std == pytest.approx(np.std(values), rel=1e-6, abs=1e-9 * max(values))


def test_a_long_run_of_equal_durations_has_no_deviation_and_one_quantile() -> None:
    found = make_durations([1e5 + 0.08] * 5000)
    assert found.std == pytest.approx(0, abs=1e-9)
    assert found.quantile(0.01) == found.quantile(0.99) == 1e5 + 0.08


def test_durations_beyond_the_bins_are_counted_at_the_ends() -> None:
    found = make_durations([0.0, -1e-7, 1e-12, 1e9])
    assert (found.count, found.min, found.max) == (4, 0.0, 1e9)
    assert 0 <= found.quantile(0.5) <= 1e-8
    assert found.quantile(1.0) == 1e9
    assert found.histogram(1.5)[1].sum() == 4


def test_without_durations_figures_are_nan() -> None:
    found = Durations()
    assert math.isnan(found.mean)
    assert math.isnan(found.std)
    assert math.isnan(found.quantile(0.5))
    assert found.histogram(1.1)[1].tolist() == []


@given(values=st.lists(st.floats(1e-6, 10), min_size=1, max_size=100), factor=st.floats(1.001, 3))
def test_every_duration_is_in_its_bin_of_the_histogram(values: list[float], factor: float) -> None:
    edges, counts = make_durations(values).histogram(factor)
    assert counts.sum() == len(values)
    assert len(edges) == len(counts) + 1
    below = np.array([np.sum(np.array(values) < edge * (1 + 1e-9)) for edge in edges])
    above = np.array([np.sum(np.array(values) < edge * (1 - 1e-9)) for edge in edges])
    running = np.concatenate([[0], np.cumsum(counts)])
    assert (above <= running).all()  # values on an edge may count on either side of it
    assert (running <= below).all()


def test_two_histograms_share_their_grid() -> None:
    one, two = make_durations([0.01, 0.02]).histogram(1.08)[0], make_durations([0.015, 0.4]).histogram(1.08)[0]
    common = one[(one >= two[0] * 0.999) & (one <= two[-1])]
    assert len(common) > 2
    assert np.isclose(common[:, None], two[None], rtol=1e-9).any(axis=1).all()


@given(values=st.lists(st.floats(0, 1e3), min_size=1, max_size=300), half=st.integers(1, 20))
def test_a_trace_is_bounded_and_loses_neither_sum_nor_peak(values: list[float], half: int) -> None:
    trace, most = Trace(max_points=2 * half), 2 * half
    for time, value in enumerate(values):
        trace.add(time, value)
    each = 1
    while len(values) > most * each:
        each *= 2
    groups = [range(start, min(start + each, len(values))) for start in range(0, len(values), each)]
    assert trace.counts.tolist() == [len(group) for group in groups]
    assert trace.times == pytest.approx([np.mean(group) for group in groups])
    assert trace.means == pytest.approx([np.mean([values[n] for n in group]) for group in groups], abs=1e-9)
    assert trace.peaks.tolist() == [max(values[n] for n in group) for group in groups]


def test_a_trace_with_an_odd_bound_keeps_one_more() -> None:
    trace = Trace(max_points=3)
    for time in range(4):
        trace.add(time, time)
    assert trace.times.tolist() == [0, 1, 2, 3]


def test_the_slope_is_the_least_squares_line_through_the_kept_points() -> None:
    rng = np.random.default_rng(3)
    times = np.cumsum(rng.random(1000))
    values = 7.0 - 0.25 * times + rng.normal(size=1000)
    exact, merged = Trace(max_points=2000), Trace(max_points=64)
    for time, value in zip(times, values, strict=True):
        exact.add(time, value)
        merged.add(time, value)
    assert exact.slope() == pytest.approx(np.polyfit(times, values, 1)[0], rel=1e-9)
    late = times >= times[500]
    assert exact.slope(times[500]) == pytest.approx(np.polyfit(times[late], values[late], 1)[0], rel=1e-9)
    weighted = np.polyfit(merged.times, merged.means, 1, w=np.sqrt(merged.counts))[0]
    assert merged.slope() == pytest.approx(weighted, rel=1e-9)
    assert merged.slope() == pytest.approx(-0.25, abs=0.01)


def test_two_points_or_a_single_moment_have_no_slope() -> None:
    trace = Trace()
    trace.add(0, 1)
    trace.add(1, 5)
    assert math.isnan(trace.slope())
    still = Trace()
    for _ in range(5):
        still.add(2.0, 3.0)
    assert math.isnan(still.slope())
    assert math.isnan(Trace().slope())


steps = st.lists(
    st.lists(st.tuples(st.floats(0.001, 2), st.floats(0.001, 2), st.integers(0, 9)), max_size=6), max_size=5
)


@given(epochs=steps, warmup=st.integers(0, 8), broken=st.booleans())
def test_the_steady_state_is_all_but_startups_and_warm_up(
    epochs: list[list[tuple[float, float, int]]], warmup: int, broken: bool
) -> None:
    waits, number = LoopTimes(warmup), 0
    starts, wait, step, total = [], [], [], 0.0
    pairs: list[tuple[float, float, int]] = []
    for epoch in epochs:
        for place, (waited, trained, items) in enumerate(epoch):
            number += 1
            steady = place > 0 and number > warmup
            assert waits.add_batch(waited, first=place == 0, items=items, nbytes=8 * items) == steady
            total += waited
            starts += [waited] if place == 0 else []
            wait += [waited] if steady else []
            if broken and place == len(epoch) - 1:
                continue  # the consumer left in the middle of its step
            assert waits.add_step(trained) == steady
            total += trained
            step += [trained] if steady else []
            pairs += [(waited, trained, items)] if steady else []
    assert (waits.batches, waits.epochs) == (number, sum(bool(epoch) for epoch in epochs))
    assert waits.items == sum(items for epoch in epochs for _, _, items in epoch)
    assert (waits.startup.count, waits.wait.count, waits.step.count) == (len(starts), len(wait), len(step))
    assert waits.startup.total == pytest.approx(sum(starts))
    assert waits.wait.total == pytest.approx(sum(wait))
    assert waits.total_seconds == pytest.approx(total)
    assert waits.pace.batches == len(pairs)
    assert waits.pace.seconds == pytest.approx(sum(waited + trained for waited, trained, _ in pairs))
    assert waits.pace[3:] == (sum(items for *_, items in pairs), 8 * sum(items for *_, items in pairs))
    if pairs:
        share = sum(waited for waited, _, _ in pairs) / sum(waited + trained for waited, trained, _ in pairs)
        assert waits.pace.wait_fraction == pytest.approx(share)


def test_the_end_of_an_epoch_counts_as_startup_time() -> None:
    waits = LoopTimes(0)
    waits.add_batch(1.0, first=True, items=0, nbytes=0)
    waits.add_step(6.0)
    waits.add_epoch_end(3.0)
    assert waits.startup_fraction == pytest.approx(0.4)
    assert (waits.shutdown.count, waits.shutdown.total) == (1, 3.0)


def test_a_pace_since_another_is_their_difference() -> None:
    earlier, later = Pace(2, 1.0, 3.0, 8, 80), Pace(5, 2.5, 4.5, 20, 200)
    between = later.since(earlier)
    assert between == Pace(3, 1.5, 1.5, 12, 120)
    assert (between.wait_fraction, between.per_second(between.items)) == (0.5, 4.0)
    assert math.isnan(Pace().wait_fraction)
    assert math.isnan(Pace().per_second(3))


def test_memory_does_not_grow_with_the_number_of_values() -> None:
    durations = make_durations([0.1])
    before = sys.getsizeof(durations._bins)
    for number in range(5000):
        durations.add(1.001 ** (number % 3000) * 1e-6)
    assert sys.getsizeof(durations._bins) == before < 32_000
