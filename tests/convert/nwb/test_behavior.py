"""Behavior, stimulus and ophys: interpolated at the bins, with a mask; compared with independent computations."""

import numpy as np
import pytest
from penstock_nwb_parts import add_behavior, add_lfp, add_units, new_file, one_by_one, open_nwb, save_nwb, series
from pynwb import TimeSeries
from pynwb.behavior import EyeTracking, SpatialSeries
from pynwb.image import ImageSeries
from pynwb.misc import AnnotationSeries
from pynwb.ophys import DfOverF, ImageSegmentation, OpticalChannel, RoiResponseSeries

from penstock.convert.nwb import times as nwb_times
from penstock.core.errors import SourceError


def _interpolate(stamps, values, times, widest):
    """One column, computed by hand; None for a missing value."""
    found = []
    for time in times:
        before = [i for i, t in enumerate(stamps) if t <= time + 1e-9]
        after = [i for i, t in enumerate(stamps) if t >= time - 1e-9]
        if not before or not after:
            found.append(None)
            continue
        a, b = before[-1], after[0]
        if stamps[b] - stamps[a] > widest + 1e-9 or np.isnan(values[a]) or np.isnan(values[b]):
            found.append(None)
            continue
        share = 0 if b <= a else (time - stamps[a]) / (stamps[b] - stamps[a])
        found.append(values[a] + share * (values[b] - values[a]))
    return found


def _agrees(column, valid, expected):
    assert valid.tolist() == [value is not None for value in expected]
    assert np.isnan(column[~valid]).all()
    np.testing.assert_allclose(column[valid], [value for value in expected if value is not None], rtol=1e-5, atol=1e-5)


@pytest.fixture
def small_index(monkeypatch):
    monkeypatch.setattr(nwb_times, "_COARSE", 16)
    monkeypatch.setattr(nwb_times, "_READ_STAMPS", 64)


def test_irregular_timestamps_and_gaps_are_interpolated_and_masked(tmp_path, small_index):
    rng = np.random.default_rng(6)
    stamps = np.cumsum(rng.uniform(0.02, 0.06, 200))
    stamps[90:] += 1.0
    stamps[140:] += 0.05
    values = rng.normal(size=(200, 2))
    values[30, 1] = np.nan
    nwb = new_file()
    position = SpatialSeries(
        name="pos", data=values, timestamps=stamps, reference_frame="arena", conversion=2.0, offset=1.0, unit="m"
    )
    add_behavior(nwb, position)
    add_units(nwb, [[0.0, 10.5]])
    path = save_nwb(nwb, tmp_path / "a.nwb")
    found = one_by_one(path, modalities=("behavior", "spikes"), sequence_length=70, overlap=0.3)
    widest = 2.5 * float(np.median(np.diff(stamps)))
    assert len(found) == 21
    for number, (fields, said) in enumerate(found):
        assert list(fields) == ["behavior", "behavior_valid", "spikes"]
        assert (fields["behavior"].dtype, fields["behavior_valid"].dtype) == (np.float32, np.bool_)
        times = [(number * 49 + k + 0.5) * 0.01 for k in range(70)]
        for column in range(2):
            expected = _interpolate(stamps, values[:, column] * 2.0 + 1.0, times, widest)
            _agrees(fields["behavior"][:, column], fields["behavior_valid"][:, column], expected)
        assert said["behavior_columns"] == [
            "processing/behavior/Position/pos[0]",
            "processing/behavior/Position/pos[1]",
        ]


@pytest.mark.parametrize("rate", [7.3, 100.0, 1000.0])
@pytest.mark.parametrize("start", [0.0, 0.255])
def test_a_rate_and_a_starting_time_place_the_samples(tmp_path, rate, start):
    values = np.random.default_rng(7).normal(size=int(3 * rate))
    nwb = new_file()
    add_behavior(nwb, series("speed", values, rate=rate, starting_time=start))
    add_lfp(nwb, np.zeros((400, 1)), rate=100.0)
    found = one_by_one(save_nwb(nwb, tmp_path / "a.nwb"), modalities=("lfp", "behavior"), overlap=0)
    assert len(found) == 4
    stamps = [start + i / rate for i in range(len(values))]
    for number, (fields, _) in enumerate(found):
        times = [(number * 100 + k + 0.5) * 0.01 for k in range(100)]
        expected = _interpolate(stamps, values, times, np.inf)
        _agrees(fields["behavior"][:, 0], fields["behavior_valid"][:, 0], expected)


def test_a_given_widest_gap_holds_for_every_series(tmp_path):
    nwb = new_file()
    add_behavior(nwb, series("slow", np.arange(10.0), rate=5.0), series("fast", np.arange(100.0), rate=50.0))
    path = save_nwb(nwb, tmp_path / "a.nwb")
    ((fields, _), *_) = one_by_one(path, modalities=("behavior",), max_gap_ms=100.0)
    fast, slow = fields["behavior_valid"].T
    assert fast.all()
    assert not slow.any()
    ((fields, _), *_) = one_by_one(path, modalities=("behavior",), max_gap_ms=200.0)
    assert fields["behavior_valid"].all()


def test_a_bin_on_a_sample_has_its_value_whatever_is_around(tmp_path):
    nwb = new_file()
    values = np.array([1.0, np.nan, 3.0, np.nan])
    add_behavior(nwb, series("x", values, timestamps=[0.005, 0.105, 0.205, 0.305]))
    add_lfp(nwb, np.zeros((40, 1)), rate=100.0)
    path = save_nwb(nwb, tmp_path / "a.nwb")
    ((fields, _),) = one_by_one(path, modalities=("behavior", "lfp"), sequence_length=40)
    assert np.flatnonzero(fields["behavior_valid"][:, 0]).tolist() == [0, 20]
    assert fields["behavior"][[0, 20], 0].tolist() == [1.0, 3.0]


def test_series_lie_side_by_side_in_the_order_of_their_paths(tmp_path):
    nwb = new_file()
    add_behavior(
        nwb,
        series("b", np.full(200, 2.0), rate=100.0),
        SpatialSeries(name="a", data=np.full((200, 2), [3.0, 4.0]), rate=100.0, reference_frame="arena"),
        TimeSeries(name="notes", data=["x"] * 200, rate=100.0, unit="n/a"),
    )
    gaze = SpatialSeries(name="gaze", data=np.full((200, 2), [5.0, 6.0]), rate=100.0, reference_frame="screen")
    nwb.add_acquisition(EyeTracking(spatial_series=gaze))
    nwb.add_acquisition(series("wheel", np.full(200, 1.0), rate=100.0))
    nwb.add_acquisition(ImageSeries(name="video", data=np.zeros((200, 2, 2), np.uint8), rate=100.0, unit="n/a"))
    with pytest.warns(UserWarning, match="AnnotationSeries is deprecated"):
        nwb.add_acquisition(AnnotationSeries(name="said", data=["hello"], timestamps=[0.5]))
    add_lfp(nwb, np.zeros((200, 1)), name="raw", place="acquisition", rate=100.0)
    recording = open_nwb(save_nwb(nwb, tmp_path / "a.nwb"), modalities=("behavior",), sequence_length=50)
    ((fields, _),) = recording.samples(np.arange(1))
    columns = [
        "acquisition/EyeTracking/gaze[0]",
        "acquisition/EyeTracking/gaze[1]",
        "processing/behavior/BehavioralTimeSeries/b",
        "processing/behavior/Position/a[0]",
        "processing/behavior/Position/a[1]",
    ]
    assert recording.about["behavior_columns"] == columns
    assert fields["behavior"][0].tolist() == [5, 6, 2, 3, 4]
    assert recording.notes[0].startswith("processing/behavior/BehavioralTimeSeries/notes holds no numbers")
    recording.close()


def test_timestamps_shared_with_another_series_are_read_through(tmp_path):
    nwb = new_file()
    first = series("first", np.arange(50.0), timestamps=np.arange(50) * 0.05)
    add_behavior(nwb, first, series("second", np.arange(50.0) * 10, timestamps=first))
    ((fields, _), *_) = one_by_one(save_nwb(nwb, tmp_path / "a.nwb"), modalities=("behavior",))
    np.testing.assert_allclose(fields["behavior"][:, 1], (np.arange(100) + 0.5) * 2, rtol=1e-5)
    np.testing.assert_allclose(fields["behavior"][:, 0], (np.arange(100) + 0.5) / 5, rtol=1e-5)


def test_data_and_timestamps_of_different_lengths_are_named(tmp_path):
    import h5py

    nwb = new_file()
    add_behavior(nwb, series("x", np.arange(50.0), timestamps=np.arange(50) * 0.05))
    path = save_nwb(nwb, tmp_path / "a.nwb")
    with h5py.File(path, "r+") as file:
        group = file["processing/behavior/BehavioralTimeSeries/x"]
        attributes = dict(group["timestamps"].attrs)
        del group["timestamps"]
        group["timestamps"] = np.arange(40) * 0.05
        group["timestamps"].attrs.update(attributes)
    with pytest.raises(SourceError, match=r"shape \(50,\), one per frame, .*/x in .* have \(40,\)"):
        open_nwb(path, modalities=("behavior",))


def test_stimulus_is_a_modality(tmp_path):
    nwb = new_file()
    nwb.add_stimulus(series("sound", np.arange(300.0), rate=100.0))
    add_units(nwb, [[0.5]])
    ((fields, said), *_) = one_by_one(save_nwb(nwb, tmp_path / "a.nwb"), modalities=("spikes", "stimulus"))
    np.testing.assert_allclose(fields["stimulus"][:, 0], np.arange(100) + 0.5, rtol=1e-5)
    assert fields["stimulus_valid"].all()
    assert said["stimulus_columns"] == ["stimulus/sound"]


def test_responses_of_regions_are_a_modality(tmp_path):
    nwb = new_file()
    device = nwb.create_device(name="scope")
    channel = OpticalChannel(name="green", description="g", emission_lambda=510.0)
    plane = nwb.create_imaging_plane(
        name="plane",
        optical_channel=channel,
        description="p",
        device=device,
        excitation_lambda=900.0,
        indicator="GCaMP",
        location="V1",
    )
    module = nwb.create_processing_module(name="ophys", description="imaging")
    segmentation = ImageSegmentation()
    module.add(segmentation)
    cells = segmentation.create_plane_segmentation(name="cells", description="c", imaging_plane=plane)
    for _ in range(3):
        cells.add_roi(image_mask=np.ones((2, 2)))
    rois = cells.create_roi_table_region(description="all", region=[0, 1, 2])
    data = np.arange(90.0).reshape(30, 3)
    traces = DfOverF()
    module.add(traces)
    traces.add_roi_response_series(RoiResponseSeries(name="dff", data=data, rois=rois, unit="n/a", rate=30.0))
    recording = open_nwb(save_nwb(nwb, tmp_path / "a.nwb"), modalities=("ophys",), sequence_length=50, overlap=0)
    ((fields, said),) = recording.samples(np.array([0]))
    times = (np.arange(50) + 0.5) * 0.01
    np.testing.assert_allclose(fields["ophys"], times[:, np.newaxis] * 30 * 3 + np.arange(3), rtol=1e-5)
    assert "ophys_columns" not in said
    assert recording.about["ophys_columns"] == [f"processing/ophys/DfOverF/dff[{roi}]" for roi in range(3)]
    recording.close()
