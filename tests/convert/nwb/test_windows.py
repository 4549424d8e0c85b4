"""Times and metadata of windows, trials and epochs, and windows around events."""

import json
import pickle

import numpy as np
import pytest
from penstock_nwb_parts import add_behavior, add_lfp, add_units, new_file, one_by_one, open_nwb, save_nwb, series

from penstock.convert.nwb.input import NWBInput, NWBOptions
from penstock.core.errors import OptionError, SourceError


@pytest.fixture
def session(tmp_path):
    """Ten seconds of all modalities, with trials and epochs."""
    rng = np.random.default_rng(9)
    nwb = new_file()
    add_lfp(nwb, np.arange(10_000)[:, np.newaxis] + np.zeros((1, 2)), rate=1000.0)
    add_units(nwb, [np.sort(rng.uniform(0, 10, 300)), [], [5.0]])
    add_behavior(nwb, series("speed", rng.normal(size=500), timestamps=np.sort(rng.uniform(0, 10, 500))))
    nwb.add_trial_column(name="condition", description="c")
    nwb.add_trial_column(name="go", description="time of the cue")
    nwb.add_trial_column(name="rewards", description="times", index=True)
    nwb.add_trial(start_time=0.5, stop_time=2.2, condition="left", go=1.0, rewards=[1.5, 2.0], id=100)
    nwb.add_trial(start_time=2.2, stop_time=4.0, condition="right", go=np.nan, rewards=[3.0], id=101)
    nwb.add_trial(start_time=6.0, stop_time=9.9, condition="left", go=9.75, rewards=[], id=102)
    nwb.add_trial(start_time=4.5, stop_time=5.0, condition="right", go=4.6123, rewards=[4.7], id=103)
    nwb.add_epoch(start_time=0.0, stop_time=5.0, tags=["task", "early"])
    nwb.add_epoch(start_time=5.0, stop_time=10.0, tags=["late"])
    return save_nwb(nwb, tmp_path / "session.nwb")


def test_a_recording_keeps_the_laws_of_recordings(session, all_samples):
    found = all_samples(NWBInput(session, NWBOptions(max_gap_ms=50.0)))
    assert len(found) == 19
    assert list(found[0][0]) == ["spikes", "lfp", "behavior", "behavior_valid"]


def test_samples_say_where_they_come_from(session):
    recording = open_nwb(session)
    ((_, said),) = recording.samples(np.array([3]))
    about = recording.about
    groups = recording.groups
    recording.close()
    assert {name: said[name] for name in list(said)[:6]} == {
        "file": "session.nwb",
        "identifier": "id-1",
        "subject": "mouse-3",
        "session": "session-7",
        "bin_size_ms": 10.0,
        "sampling_rates": {"spikes": 100.0, "lfp": 1000.0, "behavior": 100.0},
    }
    assert (said["start_time"], said["stop_time"]) == (1.5, 2.5)
    assert groups == {"subject": "mouse-3", "session": "session-7"}
    assert about["subject"] == {"subject_id": "mouse-3", "species": "Mus musculus"}
    assert about["session_start_time"] == "2024-05-01T12:00:00+00:00"
    assert about["fields"]["spikes"]["unit_ids"] == [10, 11, 12]
    assert about["fields"]["lfp"]["unit"] == "volts"
    assert about["fields"]["behavior"]["series"][0]["unit"] == "m"
    assert str(session.parent) not in json.dumps([said, about])


def test_without_a_session_id_the_identifier_is_the_session(tmp_path):
    nwb = new_file(session_id=None)
    nwb.add_acquisition(series("eeg", np.arange(200.0), rate=100.0))
    recording = open_nwb(save_nwb(nwb, tmp_path / "a.nwb"), modalities=("eeg",))
    assert recording.groups == {"subject": "mouse-3", "session": "id-1"}
    recording.close()


def test_a_window_belongs_to_the_trial_with_most_of_it(session):
    found = one_by_one(session, overlap=0)
    # seconds 0…9: by hand
    assert [said["trial_id"] for _, said in found] == [100, 100, 101, 101, 103, None, 102, 102, 102, 102]
    assert found[2][1]["trial"] == {
        "start_time": 2.2,
        "stop_time": 4.0,
        "condition": "right",
        "go": None,
        "rewards": [3.0],
    }
    assert found[0][1]["trial"]["rewards"] == [1.5, 2.0]
    assert found[5][1]["trial"] is None
    assert [said["epoch_id"] for _, said in found] == [0] * 5 + [1] * 5
    assert found[0][1]["epoch"]["tags"] == ["task", "early"]


def test_a_file_without_trials_says_that_there_is_none(tmp_path):
    nwb = new_file()
    nwb.add_acquisition(series("eeg", np.arange(200.0), rate=100.0))
    ((_, said), *_) = one_by_one(save_nwb(nwb, tmp_path / "a.nwb"), modalities=("eeg",))
    assert (said["trial_id"], said["trial"]) == (None, None)
    assert "epoch" not in said


def test_windows_around_events_are_cut_to_the_frame(session):
    options = {"align": "trials", "align_event": "go", "pre_ms": 200.0, "post_ms": 300.0}
    recording = open_nwb(session, **options)
    found = list(recording.samples(np.arange(recording.n_samples)))
    assert recording.notes[:2] == [
        "Rows of trials without a go, and so without a window: 1.",
        "Windows around go of trials left out because they exceed the recording: 1.",
    ]
    assert recording.span(np.arange(2)).tolist() == [
        pytest.approx([0.8, 1.3]),
        pytest.approx([4.4123, 4.9123]),
    ]
    recording.close()
    assert [said["align"] for _, said in found] == [
        {"table": "trials", "id": 100, "event_time": 1.0},
        {"table": "trials", "id": 103, "event_time": 4.6123},
    ]
    assert [said["trial_id"] for _, said in found] == [100, 103]
    assert found[0][0]["spikes"].shape == (50, 3)
    assert found[0][0]["lfp"][:, 0].tolist() == list(range(800, 1300))
    assert found[1][0]["lfp"][:, 0].tolist() == list(range(4413, 4913))  # the first sample at or after 4.4123 s


def test_an_aligned_window_is_its_own_trials_though_another_has_more_of_it(session):
    found = one_by_one(session, align="trials", pre_ms=900.0, post_ms=100.0)
    assert [said["trial_id"] for _, said in found] == [101, 103, 102]
    assert [said["start_time"] for _, said in found] == pytest.approx([1.3, 3.6, 5.1])


def test_a_missing_table_or_column_is_named_with_those_that_exist(session):
    with pytest.raises(SourceError, match=r"align must be an interval table .* which has epochs, trials, got 'cues'"):
        open_nwb(session, align="cues")
    with pytest.raises(
        SourceError, match=r"align_event must be a column of times of trials .* start_time, stop_time.* got 'cue'"
    ):
        open_nwb(session, align="trials", align_event="cue")
    with pytest.raises(SourceError, match=r"a column of times .* got 'condition'"):
        open_nwb(session, align="trials", align_event="condition")
    with pytest.raises(
        SourceError, match="At least one window from 0 ms before to 20000 ms after start_time of trials must lie inside"
    ):
        open_nwb(session, align="trials", post_ms=20_000)


def test_any_order_of_numbers_gives_the_same_samples(session):
    recording = open_nwb(session, rate_hz=250.0, overlap=0.9)
    inorder = list(recording.samples(np.arange(recording.n_samples)))
    order = np.random.default_rng(0).permutation(recording.n_samples)
    for number, (fields, said) in zip(order.tolist(), recording.samples(order), strict=True):
        assert said == inorder[number][1]
        for name, value in fields.items():
            assert value.tobytes() == inorder[number][0][name].tobytes()
    recording.close()


def test_a_window_longer_than_the_recording_says_both_lengths(session):
    with pytest.raises(
        SourceError, match=r"lasts 10 s \(from 0 to 10 s\) and a window of 1,001 bins of 10 ms lasts 10.01 s"
    ):
        open_nwb(session, sequence_length=1001)


def test_a_window_as_long_as_the_recording_is_the_only_one(session):
    assert len(one_by_one(session, sequence_length=1000, overlap=0.99)) == 1


@pytest.mark.parametrize(("overlap", "count"), [(0, 10), (0.5, 19), (0.99, 901)])
def test_overlap_decides_how_many_windows_there_are(session, overlap, count):
    recording = open_nwb(session, overlap=overlap)
    assert recording.n_samples == count
    recording.close()


def test_numbers_outside_are_refused(session):
    recording = open_nwb(session)
    with pytest.raises(OptionError, match=r"must be in 0–18, got 3–19"):
        list(recording.samples(np.array([3, 19])))
    recording.close()


def test_an_input_is_a_small_value(session):
    given = NWBInput(session, NWBOptions(unit_filter={"quality": ["good", "mua"]}))
    assert pickle.loads(pickle.dumps(given)) == given
    assert hash(pickle.loads(pickle.dumps(given))) == hash(given)
    assert given.options.unit_filter == (("quality", ("good", "mua")),)
    assert len(pickle.dumps(given)) < 1000


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"overlap": 1}, "overlap must be a number >= 0 and < 1, such as 0.5, got 1"),
        ({"overlap": 1.5}, "overlap must be .* got 1.5"),
        ({"overlap": -0.1}, "overlap must be .* got -0.1"),
        (
            {"modalities": ()},
            r"modalities must name at least one of spikes, lfp, behavior, stimulus, ophys, .* got \(\)",
        ),
        ({"modalities": "lfp"}, r"modalities must be a tuple of strings, such as \('lfp',\), got 'lfp'"),
        ({"modalities": ("lfp", "lfp")}, "must name each modality once"),
        ({"modalities": ("lfp", "LFP")}, "must differ in more than case"),
        ({"modalities": ("behavior", "behavior_valid")}, "must not contain the name of a mask"),
        ({"modalities": ("acquisition/metadata",)}, "'metadata' is reserved"),
        ({"bin_size_ms": 0}, "bin_size_ms must be a number > 0 in milliseconds, such as 10.0, got 0"),
        ({"bin_size_ms": float("nan")}, "bin_size_ms must be .* got nan"),
        ({"sequence_length": 0}, "sequence_length must be an integer >= 1, got 0"),
        ({"sequence_length": 2.5}, "sequence_length must be an integer >= 1, got 2.5"),
        ({"missing": "ignore"}, "missing must be one of 'refuse', 'skip', 'allow', 'error', got 'ignore'"),
        ({"units": "union"}, "units must be one of 'refuse', 'intersect', 'pad', got 'union'"),
        ({"fill": "zero"}, "fill must be a finite number, or None for NaN, got 'zero'"),
        ({"fields": {"wheel": "/"}}, "fields must be names with paths in the file, .* got"),
        ({"fields": ("wheel",)}, "fields must be names with paths in the file, .* got 'wheel'"),
        ({"fields": {"lfp": "acquisition/x"}, "modalities": ("lfp",)}, "lfp is given twice"),
        ({"fields": {"has_x": "acquisition/x", "x": "acquisition/y"}}, "must not contain the name of a mask, has_x"),
        ({"rate_hz": -1}, "rate_hz must be a number > 0 in Hz, .* got -1"),
        ({"max_gap_ms": 0}, "max_gap_ms must be .* got 0"),
        ({"unit_filter": ("quality",)}, "must be pairs of a column and the values"),
        ({"unit_filter": {"quality": ()}}, "must name at least one value of 'quality'"),
        ({"align": ""}, "align must be the name of an interval table, .* got ''"),
        ({"align": "trials", "align_event": ""}, "align_event must be .* got ''"),
        ({"align": "trials", "pre_ms": 0, "post_ms": 4}, "must be at least one bin of 10 ms"),
        ({"pre_ms": "a lot"}, "pre_ms must be a finite number of milliseconds, got 'a lot'"),
    ],
)
def test_invalid_options_are_refused_with_what_is_required(options, message):
    with pytest.raises(OptionError, match=message):
        NWBOptions(**options)
