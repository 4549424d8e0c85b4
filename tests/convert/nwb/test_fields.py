"""Fields that are named by their path: series, tables, columns of tables, images."""

import json

import h5py
import numpy as np
import pytest
from penstock_nwb_parts import add_behavior, add_lfp, add_units, new_file, one_by_one, open_nwb, save_nwb, series
from pynwb.base import ImageReferences, Images
from pynwb.event import EventsTable
from pynwb.image import GrayscaleImage, ImageSeries, IndexSeries, RGBImage
from pynwb.misc import AnnotationSeries, IntervalSeries

from penstock.convert.content import Content
from penstock.convert.convert import convert
from penstock.convert.nwb.describe import describe_file
from penstock.convert.nwb.input import NWBInput, NWBOptions
from penstock.core.errors import SourceError


@pytest.fixture
def session(tmp_path):
    """Six seconds: a laser at an odd rate, a wheel with a gap, trials of one second every other second, licks."""
    nwb = new_file()
    add_units(nwb, [[0.0, 5.995]])
    nwb.add_acquisition(series("laser", np.arange(2000.0), rate=333.3))
    stamps = np.arange(121) * 0.05
    stamps = np.delete(stamps, slice(40, 60))  # from 2 to 3 s
    nwb.add_acquisition(series("wheel", stamps * 10, timestamps=stamps))
    for name in ("choice", "side", "contrast", "rewarded", "position"):
        nwb.add_trial_column(name, name)
    for number in range(3):
        nwb.add_trial(
            start_time=2.0 * number,
            stop_time=2.0 * number + 1,
            choice=number + 5,
            side=("left", "right", "left")[number],
            contrast=(0.25, np.nan, 1.0)[number],
            rewarded=number == 1,
            position=[0.0, 1.0],
        )
    licks = EventsTable(name="licks", description="each one")
    licks.add_column("volume", "in microlitres")
    licks.add_column("spout", "which")
    for time, volume in ((0.5, 1.0), (0.505, 2.0), (0.25, 3.0), (4.0, 4.0)):
        licks.add_event(timestamp=time, volume=volume, spout="a")
    nwb.add_events_table(licks)
    return save_nwb(nwb, tmp_path / "a.nwb")


def _fields(path, *names, **options):
    found = one_by_one(path, **({"modalities": ("spikes",), "overlap": 0} | options))
    return [[fields[name] for fields, _ in found] for name in names]


def test_fields_alone_are_all_that_is_read(session):
    ((fields, said), *_) = one_by_one(session, fields={"pulse": "acquisition/laser"})
    assert list(fields) == ["pulse"]
    assert said["sampling_rates"] == {"pulse": 333.3}
    assert NWBOptions(fields={"pulse": "acquisition/laser"}).modalities == ()
    assert NWBOptions().modalities == ("spikes", "lfp", "behavior")


def test_a_series_with_a_rate_keeps_it_and_one_with_timestamps_is_interpolated_with_a_mask(session):
    options = {"pulse": "acquisition/laser", "turn": "wheel"}
    pulse, turn, valid = _fields(session, "pulse", "turn", "turn_valid", fields=options)
    assert [int(window[0, 0]) for window in pulse] == [0, 334, 667, 1000, 1334, 1667]
    assert {window.shape for window in pulse} == {(333, 1)}
    centres = [number + (np.arange(100) + 0.5) / 100 for number in range(6)]
    for number, window in enumerate(turn):
        inside = (centres[number] <= 1.95) | (centres[number] >= 3)
        assert valid[number][:, 0].tolist() == inside.tolist()
        np.testing.assert_allclose(window[inside, 0], centres[number][inside] * 10, rtol=1e-5)


def test_a_series_may_have_another_path_in_another_file(tmp_path):
    paths = []
    for number, place in enumerate(("acquisition", "behavior")):
        nwb = new_file()
        wheel = series("wheel", np.arange(201.0) + number, timestamps=np.arange(201) / 100)
        nwb.add_acquisition(wheel) if place == "acquisition" else add_behavior(nwb, wheel)
        paths.append(save_nwb(nwb, tmp_path / f"{place}.nwb"))
    inputs = [NWBInput(path, NWBOptions(fields={"turn": "wheel"}, overlap=0)) for path in paths]
    manifest = convert(inputs, tmp_path / "out")[""]
    assert (manifest.n_items, manifest.fields["turn"].shape) == (4, (100, 1))
    assert "notes" not in manifest.metadata["conversion"]


def test_a_table_of_intervals_gives_the_id_of_each_bin(session):
    (trial,) = _fields(session, "trial", fields={"trial": "intervals/trials"})
    assert [(window.dtype.name, set(window.tolist())) for window in trial] == [
        ("int64", {number}) for number in (0, -1, 1, -1, 2)
    ]
    (half,) = _fields(session, "trial", fields={"trial": "intervals/trials"}, sequence_length=150)
    assert half[0].tolist() == [0] * 100 + [-1] * 50
    assert half[1].tolist() == [-1] * 50 + [1] * 100


def test_a_column_of_intervals_gives_the_value_of_the_row_with_a_mask(session):
    table = "intervals/trials"
    named = {name: f"{table}/{name}" for name in ("choice", "side", "contrast", "rewarded")}
    found = [fields for fields, _ in one_by_one(session, modalities=("spikes",), overlap=0, fields=named)]
    assert [fields["choice"].tolist() for fields in found] == [5, -1, 6, -1, 7]
    assert [fields["side"] for fields in found] == ["left", "", "right", "", "left"]
    assert [bool(fields["side_valid"]) for fields in found] == [True, False, True, False, True]
    assert [bool(fields["rewarded"]) for fields in found] == [False, False, True, False, False]
    assert [bool(fields["contrast_valid"]) for fields in found] == [True, False, False, False, True]
    assert found[0]["contrast"] == 0.25
    assert np.isnan([found[1]["contrast"], found[2]["contrast"]]).all()
    assert (found[0]["choice"].dtype, found[0]["contrast"].dtype) == (np.int64, np.float32)


def test_windows_around_trials_have_the_values_of_their_own_trial(session):
    found = one_by_one(
        session,
        modalities=("spikes",),
        fields={"choice": "intervals/trials/choice"},
        align="trials",
        align_event="stop_time",
        post_ms=1000.0,
    )
    assert [fields["choice"].tolist() for fields, _ in found] == [5, 6]


def test_a_table_of_events_gives_counts_and_its_columns_the_last_value_of_each_bin(session):
    named = {"licks": "events/licks", "volume": "events/licks/volume"}
    licks, volume, valid = _fields(session, "licks", "volume", "volume_valid", fields=named)
    assert [np.flatnonzero(window).tolist() for window in licks] == [[25, 50], [], [], [], [0]]
    assert licks[0][[25, 50]].tolist() == [1.0, 2.0]
    assert volume[0][[25, 50]].tolist() == [3.0, 2.0]
    assert volume[4][0] == 4.0
    assert [window.sum() for window in valid] == [2, 0, 0, 0, 1]
    assert np.isnan(volume[1]).all()


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("events/licks/spout", "must be a column of one number per event, but spout"),
        ("intervals/trials/position", "must be a column of one number or text per row, but position is not"),
        ("intervals/trials/colour", "has no x: intervals/trials has the columns start_time, stop_time, choice"),
        ("acquisition/gone", r"nothing has that name or path.*intervals/trials \(TimeIntervals, 3 rows\)"),
        ("units", "are read with modalities="),
    ],
)
def test_what_cannot_be_a_field_is_refused_with_the_reason(session, path, message):
    with pytest.raises(SourceError, match=message):
        open_nwb(session, fields={"x": path})


def test_an_image_is_the_one_that_is_shown_at_the_event_or_in_the_middle(tmp_path):
    nwb = new_file()
    pictures = [GrayscaleImage(name=f"i{k}", data=np.arange(20, dtype=np.uint8).reshape(4, 5) + k) for k in range(3)]
    backwards = ImageReferences(name="order_of_images", data=pictures[::-1])
    scenes = Images(name="scenes", images=pictures, order_of_images=backwards)
    nwb.add_stimulus_template(scenes)
    shown = np.array([2, 0, 1], np.uint32)
    nwb.add_stimulus(
        IndexSeries(name="shown", data=shown, indexed_images=scenes, timestamps=[1.0, 2.0, 4.0], unit="N/A")
    )
    nwb.add_acquisition(
        Images(name="rig", images=[RGBImage(name="top", data=np.arange(27, dtype=np.uint8).reshape(3, 3, 3))])
    )
    add_lfp(nwb, np.zeros((600, 1)), rate=100.0)
    for number in range(3):
        nwb.add_trial(start_time=2.0 * number, stop_time=2.0 * number + 1)
    path = save_nwb(nwb, tmp_path / "a.nwb")
    named = {"scene": "stimulus/presentation/shown", "rig": "acquisition/rig/top"}
    scene, valid, rig = _fields(path, "scene", "scene_valid", "rig", modalities=("lfp",), fields=named)
    assert [int(image[0, 0]) for image in scene] == [0, 0, 2, 2, 1, 1]  # the number of the image; 0 if none is shown
    assert [bool(one) for one in valid] == [False, True, True, True, True, True]
    assert not scene[0].any()
    assert (scene[1].dtype, scene[1].shape) == (np.uint8, (4, 5))
    assert all(image.ravel().tolist() == list(range(27)) for image in rig)
    (scene,) = _fields(path, "scene", modalities=("lfp",), fields=named, align="trials", pre_ms=500.0, post_ms=500.0)
    assert [int(image[0, 0]) for image in scene] == [2, 1]


def test_frames_of_a_film_keep_their_type_and_frames_elsewhere_are_missing(tmp_path):
    nwb = new_file()
    film = np.arange(60 * 4 * 5).reshape(60, 4, 5).astype(np.uint8)
    nwb.add_acquisition(ImageSeries(name="cam", data=film, rate=30.0, unit="n/a"))
    nwb.add_acquisition(
        ImageSeries(name="far", external_file=["a.mp4"], format="external", num_samples=60, rate=30.0, unit="n/a")
    )
    path = save_nwb(nwb, tmp_path / "a.nwb")
    first, second = _fields(path, "cam", modalities=(), fields={"cam": "acquisition/cam"})[0]
    assert first.dtype == np.uint8
    assert np.concatenate([first, second]).tobytes() == film.tobytes()
    with pytest.raises(SourceError, match="the frames of acquisition/far are in other files"):
        open_nwb(path, fields={"far": "acquisition/far"})


def test_annotations_are_counted(tmp_path):
    nwb = new_file()
    with pytest.warns(UserWarning, match="AnnotationSeries is deprecated"):
        nwb.add_acquisition(AnnotationSeries(name="said", data=["a", "b", "c"], timestamps=[0.5, 0.505, 1.5]))
    add_behavior(nwb, series("x", np.arange(200.0), rate=100.0))
    path = save_nwb(nwb, tmp_path / "a.nwb")
    (said,) = _fields(path, "said", modalities=("behavior",), fields={"said": "acquisition/said"})
    assert [np.flatnonzero(window).tolist() for window in said] == [[50], [50]]
    assert said[0][50] == 2


def test_frames_whose_timestamps_repeat_and_go_back_are_counted_as_events(tmp_path):
    nwb = new_file()
    stamps = [0.5, 0.5, 0.505, 1.5, 0.25, 1.5]
    nwb.add_acquisition(series("ttl", np.arange(6.0), timestamps=stamps))
    nwb.add_acquisition(series("x", np.arange(200.0), rate=100.0))
    path = save_nwb(nwb, tmp_path / "a.nwb")
    with pytest.raises(SourceError, match="To count its frames as events, name acquisition/ttl/timestamps as a field"):
        open_nwb(path, modalities=("x",), fields={"ttl": "acquisition/ttl"})
    (ttl,) = _fields(path, "ttl", modalities=("x",), fields={"ttl": "acquisition/ttl/timestamps"})
    counts = [{int(at): float(window[at]) for at in np.flatnonzero(window)} for window in ttl]
    assert counts == [{25: 1.0, 50: 3.0}, {50: 2.0}]
    with pytest.raises(SourceError, match="no y: acquisition/x has a rate, and no timestamps"):
        open_nwb(path, modalities=("x",), fields={"y": "acquisition/x/timestamps"})


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_an_interval_series_gives_the_number_of_the_interval_of_each_bin(tmp_path):
    nwb = new_file()
    marks = IntervalSeries(name="marks", data=np.int8([1, 2, -1, -2, 1]), timestamps=[0.25, 0.5, 0.75, 1.0, 1.5])
    nwb.add_acquisition(marks)
    add_behavior(nwb, series("x", np.arange(200.0), rate=100.0))
    path = save_nwb(nwb, tmp_path / "a.nwb")
    (found,) = _fields(path, "marks", modalities=("behavior",), fields={"marks": "acquisition/marks"})
    assert found[0].tolist() == [-1] * 25 + [1] * 25 + [2] * 50
    assert found[1].tolist() == [-1] * 50 + [1] * 50


def test_a_series_of_acquisition_that_is_no_behavior_is_noted_unless_it_is_named(tmp_path):
    nwb = new_file()
    nwb.add_acquisition(series("wheel", np.arange(200.0), rate=100.0))
    add_behavior(nwb, series("x", np.arange(200.0), rate=100.0))
    path = save_nwb(nwb, tmp_path / "a.nwb")
    note = "acquisition/wheel is not part of behavior; name it as a field to convert it."
    assert open_nwb(path, modalities=("behavior",)).notes == [note]
    assert open_nwb(path, modalities=("behavior",), fields={"w": "acquisition/wheel"}).notes == []


_NDX_EVENTS = {
    "groups": [
        {
            "neurodata_type_def": "Events",
            "neurodata_type_inc": "NWBDataInterface",
            "doc": "as in the extension ndx-events",
            "datasets": [{"name": "timestamps", "dtype": "float32", "dims": ["n"], "shape": [None], "doc": "when"}],
            "attributes": [{"name": "description", "dtype": "text", "doc": "what"}],
        }
    ]
}


def test_events_of_an_extension_are_counted_and_described(tmp_path):
    nwb = new_file()
    add_behavior(nwb, series("x", np.arange(200.0), rate=100.0))
    path = save_nwb(nwb, tmp_path / "a.nwb")
    # Written as the extension writes it, without installing it.
    namespace = {
        "namespaces": [
            {
                "name": "ndx-events",
                "version": "0.2.0",
                "doc": "events",
                "author": ["x"],
                "contact": ["x"],
                "schema": [{"namespace": "core", "neurodata_types": ["NWBDataInterface"]}, {"source": "events"}],
            }
        ]
    }
    with h5py.File(path, "r+") as file:
        specification = file.require_group("specifications/ndx-events/0.2.0")
        specification["namespace"] = json.dumps(namespace)
        specification["events"] = json.dumps(_NDX_EVENTS)
        group = file.create_group("acquisition/ttl")
        group.attrs.update(
            {"namespace": "ndx-events", "neurodata_type": "Events", "object_id": "1", "description": "pulses"}
        )
        group["timestamps"] = np.float32([0.25, 0.5, 1.5])
    (found,) = _fields(path, "ttl", modalities=("behavior",), fields={"ttl": "acquisition/ttl"})
    assert [np.flatnonzero(window).tolist() for window in found] == [[25, 50], [50]]
    assert Content("acquisition/ttl", "Events", (3,), span=(0.25, 1.5)) in describe_file(path)


def test_two_words_for_one_option_have_one_identity(session):
    assert repr(NWBOptions(missing="error")) == repr(NWBOptions(missing="refuse"))
    assert repr(NWBInput(session)) == f"NWBInput(path={session!r}, options={NWBOptions()!r})"
