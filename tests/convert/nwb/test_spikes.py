"""Spikes: each in one bin, units in the order of the table, filters, and recordings that are too long for memory."""

import re
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from penstock_cases import few_cases
from penstock_nwb_parts import add_behavior, add_units, electrodes, new_file, one_by_one, open_nwb, save_nwb, series
from pynwb.misc import Units

from penstock.convert.nwb import spikes as nwb_spikes
from penstock.core.errors import SourceError


def _count(trains, edges):
    """Counts by comparing every spike with every bin."""
    return [[sum(a <= t < b for t in train) for train in trains] for a, b in pairwise(edges)]


def _make_observed(start, stop, n):
    return [[[float(start), float(stop)]]] * n


def test_a_spike_on_an_edge_is_in_the_bin_that_begins_there(tmp_path):
    nwb = new_file()
    trains = [[0.0, 0.01, 0.0199, 0.02, 0.0999999, 0.1], [], [0.05, 0.05, 0.15]]
    add_units(nwb, trains, obs_intervals=_make_observed(0, 0.2, 3))
    found = one_by_one(save_nwb(nwb, tmp_path / "a.nwb"), modalities=("spikes",), sequence_length=10, overlap=0)
    assert len(found) == 2
    first = np.zeros((10, 3))
    first[[0, 1, 2, 9], 0] = [1, 2, 1, 1]
    first[5, 2] = 2
    second = np.zeros((10, 3))
    second[0, 0] = 1
    second[5, 2] = 1
    for (fields, _), expected in zip(found, (first, second), strict=True):
        assert fields["spikes"].dtype == np.float32
        np.testing.assert_array_equal(fields["spikes"], expected)


@few_cases
@given(
    trains=st.lists(st.lists(st.integers(0, 4000), max_size=30), min_size=1, max_size=4),
    length=st.sampled_from([1, 3, 10]),
    bin_ms=st.sampled_from([1.0, 3.7, 10.0]),
    start=st.sampled_from([0.0, 0.3, 1234.5]),
)
def test_windows_side_by_side_count_every_spike_once(tmp_path_factory, trains, length, bin_ms, start):
    # Times are multiples of a tenth of a millisecond, so that many fall on edges.
    seconds = [[start + t * 1e-4 for t in sorted(train)] for train in trains]
    nwb = new_file()
    add_units(nwb, seconds, obs_intervals=_make_observed(start, start + 0.4, len(trains)))
    path = save_nwb(nwb, tmp_path_factory.mktemp("law") / "a.nwb")
    found = one_by_one(path, modalities=("spikes",), sequence_length=length, overlap=0, bin_size_ms=bin_ms)
    bin_s = bin_ms / 1000
    for number, (fields, said) in enumerate(found):
        edges = [start + k * bin_s for k in range(number * length, (number + 1) * length + 1)]
        assert (said["start_time"], said["stop_time"]) == (edges[0], edges[-1])
        assert fields["spikes"].tolist() == _count(seconds, edges)
    end = start + len(found) * length * bin_s
    total = sum(fields["spikes"].sum(axis=0) for fields, _ in found)
    assert total.tolist() == [sum(start <= t < end for t in train) for train in seconds]


@pytest.mark.parametrize(("overlap", "step"), [(0, 100), (0.5, 50), (0.99, 1)])
def test_windows_overlap_by_whole_bins_and_agree_where_they_do(tmp_path, overlap, step):
    rng = np.random.default_rng(3)
    trains = [np.sort(rng.uniform(0, 3, 400)), np.sort(rng.uniform(0, 3, 50))]
    nwb = new_file()
    add_units(nwb, trains, obs_intervals=_make_observed(0, 3, 2))
    found = one_by_one(save_nwb(nwb, tmp_path / "a.nwb"), modalities=("spikes",), overlap=overlap)
    assert len(found) == 200 // step + 1
    whole = np.array(_count(trains, [k * 0.01 for k in range(301)]))
    for number, (fields, _) in enumerate(found):
        np.testing.assert_array_equal(fields["spikes"], whole[number * step : number * step + 100])


def test_without_observation_the_range_is_that_of_spikes_and_behavior_together(tmp_path):
    nwb = new_file()
    add_units(nwb, [[2.0, 2.5], []])
    add_behavior(nwb, series("speed", np.arange(30.0), timestamps=np.arange(30) * 0.1 + 1.0))
    recording = open_nwb(
        save_nwb(nwb, tmp_path / "a.nwb"), modalities=("spikes", "behavior"), sequence_length=29, overlap=0
    )
    # behavior from 1.0 to 3.9 s: 290 bins
    assert recording.n_samples == 10
    assert recording.span(np.array([0, 9])).tolist() == [[1.0, 1.29], [1.0 + 261 * 0.01, 1.0 + 290 * 0.01]]
    recording.close()


def test_units_that_do_not_fire_at_all_say_that_nothing_tells_the_length(tmp_path):
    nwb = new_file()
    add_units(nwb, [[], []])
    with pytest.raises(SourceError, match="no spikes and nothing else"):
        open_nwb(save_nwb(nwb, tmp_path / "a.nwb"), modalities=("spikes",))


def test_unsorted_spike_times_are_sorted(tmp_path):
    nwb = new_file()
    add_units(nwb, [[0.15, 0.01, 0.07]], obs_intervals=_make_observed(0, 0.2, 1))
    ((fields, _),) = one_by_one(
        save_nwb(nwb, tmp_path / "a.nwb"), modalities=("spikes",), sequence_length=20, overlap=0
    )
    assert np.flatnonzero(fields["spikes"][:, 0]).tolist() == [1, 7, 15]


def _make_filtered(tmp_path):
    nwb = new_file()
    electrodes(nwb, ["CA1", "CA3", "V1"])
    trains = [[0.0], [0.01], [0.02], [0.03]]
    add_units(
        nwb,
        trains,
        quality=["good", "noise", "good", "good"],
        depth=[1.0, 2.0, 3.0, 1.0],
        electrodes=[[0], [1], [1, 2], [2]],
        obs_intervals=_make_observed(0, 0.1, 4),
    )
    return save_nwb(nwb, tmp_path / "a.nwb")


@pytest.mark.parametrize(
    ("unit_filter", "kept"),
    [
        ({}, [0, 1, 2, 3]),
        ({"quality": "good"}, [0, 2, 3]),
        ((("location", ("CA3",)),), [1, 2]),
        ({"area": ["V1", "CA1"]}, [0, 2, 3]),
        ({"quality": ("good",), "area": "CA3"}, [2]),
        ({"depth": "1"}, [0, 3]),
        ({"id": (13, 11)}, [1, 3]),
        ({"depth": (2, 3.0)}, [1, 2]),
    ],
)
def test_filters_keep_columns_in_the_order_of_the_table(tmp_path, unit_filter, kept):
    path = _make_filtered(tmp_path)
    options = {"modalities": ("spikes",), "sequence_length": 10, "overlap": 0, "unit_filter": unit_filter}
    recording = open_nwb(path, **options)
    about = recording.about["fields"]["spikes"]
    ((fields, _),) = recording.samples(np.arange(1))
    recording.close()
    assert about["unit_ids"] == [10 + unit for unit in kept]
    assert about["areas"] == [["CA1", "CA3", "CA3, V1", "V1"][unit] for unit in kept]
    expected = np.zeros((10, len(kept)))
    expected[kept, np.arange(len(kept))] = 1  # unit n fires in bin n
    np.testing.assert_array_equal(fields["spikes"], expected)


def test_a_filter_that_keeps_nothing_says_which_values_there_are(tmp_path):
    with pytest.raises(SourceError, match=r"no unit passes .*quality is one of good, noise"):
        open_nwb(_make_filtered(tmp_path), modalities=("spikes",), unit_filter={"quality": "great"})


def test_a_filter_of_an_unknown_column_says_which_there_are(tmp_path):
    with pytest.raises(
        SourceError, match=r"unit_filter must use columns .* quality.*electrodes have location.* got 'snr'"
    ):
        open_nwb(_make_filtered(tmp_path), modalities=("spikes",), unit_filter={"snr": 3})


def test_a_file_without_units_lacks_spikes(tmp_path):
    nwb = new_file()
    add_behavior(nwb, series("speed", np.arange(300.0), rate=100.0))
    path = save_nwb(nwb, tmp_path / "a.nwb")
    with pytest.raises(SourceError, match="has no spikes: there are no units"):
        open_nwb(path, modalities=("spikes", "behavior"))
    recording = open_nwb(path, modalities=("spikes", "behavior"), missing="skip")
    assert recording.notes[0] == "No spikes: there are no units."
    ((fields, _), *_) = recording.samples(np.arange(1))
    assert list(fields) == ["behavior", "behavior_valid"]
    recording.close()


def test_an_empty_units_table_is_named_as_such(tmp_path):
    nwb = new_file()
    nwb.units = Units(name="units", description="none")
    with pytest.raises(SourceError, match="the units table is empty"):
        open_nwb(save_nwb(nwb, tmp_path / "a.nwb"), modalities=("spikes",))


def test_spikes_outside_of_the_windows_are_counted_in_a_note(tmp_path):
    nwb = new_file()
    add_units(nwb, [[-1.0, 0.05, 0.5, 9.0]], obs_intervals=_make_observed(0, 1.005, 1))
    recording = open_nwb(save_nwb(nwb, tmp_path / "a.nwb"), modalities=("spikes",))
    assert recording.notes == ["The last 0.005 s are in no window.", "2 of 4 spikes lie before 0 s or after 1 s."]
    recording.close()


@pytest.fixture
def small_memory(monkeypatch):
    monkeypatch.setattr(nwb_spikes, "IN_MEMORY", 100)
    monkeypatch.setattr(nwb_spikes, "_COARSE", 16)
    monkeypatch.setattr(nwb_spikes, "_READ_SPIKES", 64)
    monkeypatch.setattr(nwb_spikes, "_RANGE_SPIKES", 300)


def test_a_recording_too_long_for_memory_gives_the_same_counts(tmp_path, small_memory, monkeypatch):
    rng = np.random.default_rng(8)
    trains = [np.sort(rng.uniform(0, 20, size).round(2)) for size in (700, 0, 1, 64, 16, 333)]
    nwb = new_file()
    add_units(nwb, trains, quality=["good", "good", "good", "bad", "good", "good"])
    path = save_nwb(nwb, tmp_path / "a.nwb")
    options = {"modalities": ("spikes",), "overlap": 0.7, "sequence_length": 50, "unit_filter": {"quality": "good"}}
    recording = open_nwb(path, **options)
    start = min(train.min() for train in trains if len(train))
    kept = [trains[unit] for unit in (0, 1, 2, 4, 5)]
    order = np.concatenate([np.arange(recording.n_samples), rng.permutation(recording.n_samples)])
    for number, (fields, _) in zip(order.tolist(), recording.samples(order), strict=True):
        edges = [start + k * 0.01 for k in range(number * 15, number * 15 + 51)]
        assert fields["spikes"].tolist() == _count(kept, edges)
    notes = recording.notes
    recording.close()
    monkeypatch.setattr(nwb_spikes, "IN_MEMORY", 10_000)
    held = open_nwb(path, **options)
    assert held.notes == notes
    held.close()


def test_spikes_out_of_order_in_a_long_recording_are_an_error_that_names_the_unit(tmp_path, small_memory):
    nwb = new_file()
    times = np.arange(100) * 0.01
    add_units(nwb, [times, times, np.concatenate([times[:70], times[:30]])])
    with pytest.raises(SourceError, match=re.escape("unit 12") + r".*out of order near 0.69 s"):
        open_nwb(save_nwb(nwb, tmp_path / "a.nwb"), modalities=("spikes",))
