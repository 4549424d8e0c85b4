"""What a file contains: series, tables and images, with their times."""

import numpy as np
import pytest
from penstock_nwb_parts import add_behavior, add_lfp, add_units, new_file, save_nwb, series
from pynwb.base import ImageReferences, Images
from pynwb.event import EventsTable
from pynwb.image import GrayscaleImage, ImageSeries, IndexSeries
from pynwb.misc import AnnotationSeries

from penstock.convert.content import Content
from penstock.convert.nwb.describe import describe_file
from penstock.core.errors import ReadError


def _describe(nwb, tmp_path):
    return {content.path: content for content in describe_file(save_nwb(nwb, tmp_path / "a.nwb"))}


def test_series_have_rates_spans_gaps_and_the_modality_that_takes_them(tmp_path):
    nwb = new_file()
    add_lfp(nwb, np.zeros((2000, 2)), rate=333.3, starting_time=2.0)
    stamps = np.arange(300) * 0.02
    stamps[100:] += 0.5
    stamps[200:] += 0.5
    add_behavior(nwb, series("speed", np.arange(300.0), timestamps=stamps))
    nwb.add_acquisition(series("sync", np.arange(60.0), rate=10.0))
    assert list(_describe(nwb, tmp_path).values()) == [
        Content("acquisition/sync", "TimeSeries", (60,), 10.0, "m", (0.0, 5.9)),
        Content(
            "processing/behavior/BehavioralTimeSeries/speed",
            "TimeSeries",
            (300,),
            50.0,
            "m",
            (0.0, stamps[-1]),
            2,
            modality="behavior",
        ),
        Content(
            "processing/ecephys/LFP/lfp",
            "ElectricalSeries",
            (2000, 2),
            333.3,
            "volts",
            (2.0, 2.0 + 1999 / 333.3),
            modality="lfp",
        ),
    ]


def test_units_and_tables_have_columns_and_the_span_of_their_rows(tmp_path):
    nwb = new_file()
    add_units(nwb, [[0.5, 4.0], [], [0.25, 3.0]], quality=["a", "b", "c"])
    nwb.add_trial_column("choice", "left or right")
    for number in range(3):
        nwb.add_trial(start_time=2.0 * number, stop_time=2.0 * number + 1.5, choice=number)
    licks = EventsTable(name="licks", description="each one")
    for number in range(5):
        licks.add_event(timestamp=1.0 + number)
    nwb.add_events_table(licks)
    found = _describe(nwb, tmp_path)
    units = found["units"]
    assert (units.kind, units.shape, units.span, units.modality) == ("Units", (3,), (0.25, 4.0), "spikes")
    assert sorted(units.columns) == ["quality", "spike_times"]
    assert found["intervals/trials"] == Content(
        "intervals/trials", "TimeIntervals", (3,), span=(0.0, 5.5), columns=("start_time", "stop_time", "choice")
    )
    assert found["events/licks"] == Content(
        "events/licks", "EventsTable", (5,), span=(1.0, 5.0), columns=("timestamp",)
    )


def test_images_movies_and_annotations_are_listed_and_frames_elsewhere_are_a_problem(tmp_path):
    nwb = new_file()
    pictures = [GrayscaleImage(name=f"i{k}", data=np.full((4, 5), k, np.uint8)) for k in range(2)]
    order = ImageReferences(name="order_of_images", data=pictures)
    scenes = Images(name="scenes", images=pictures, order_of_images=order)
    nwb.add_stimulus_template(scenes)
    nwb.add_stimulus(
        IndexSeries(
            name="shown", data=np.array([1, 0], np.uint32), indexed_images=scenes, timestamps=[0.0, 2.0], unit="N/A"
        )
    )
    nwb.add_acquisition(
        ImageSeries(name="cam", external_file=["a.mp4"], format="external", num_samples=9, rate=30.0, unit="n/a")
    )
    with pytest.warns(UserWarning, match="AnnotationSeries is deprecated"):
        nwb.add_acquisition(AnnotationSeries(name="said", data=["hello", "bye"], timestamps=[0.5, 7.0]))
    found = _describe(nwb, tmp_path)
    assert found["stimulus/templates/scenes/i1"] == Content("stimulus/templates/scenes/i1", "GrayscaleImage", (4, 5))
    assert found["stimulus/templates/scenes"].shape == (2,)
    assert (found["stimulus/shown"].span, found["stimulus/shown"].rate_hz) == ((0.0, 2.0), None)
    assert (found["acquisition/said"].span, found["acquisition/said"].n_gaps) == ((0.5, 7.0), 0)
    assert found["acquisition/cam"].problem == "its frames are in other files"
    assert [content.name for content in found.values()] == ["cam", "said", "shown", "scenes", "i0", "i1"]


def test_one_series_with_bad_times_does_not_hide_the_others(tmp_path):
    nwb = new_file()
    nwb.add_acquisition(series("back", np.arange(3.0), timestamps=[0.0, 2.0, 1.0]))
    nwb.add_acquisition(series("fine", np.arange(3.0), rate=1.0))
    found = _describe(nwb, tmp_path)
    assert "must be finite and increase" in found["acquisition/back"].problem
    assert found["acquisition/fine"].problem is None


def test_a_truncated_file_is_an_error(tmp_path):
    path = save_nwb(new_file(), tmp_path / "a.nwb")
    path.write_bytes(path.read_bytes()[:3000])
    with pytest.raises(ReadError, match=r"a\.nwb"):
        describe_file(path)
