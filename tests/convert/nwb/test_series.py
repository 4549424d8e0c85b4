"""Continuous series: values in their unit, frames, gaps, resampling; compared with independent computations."""

import math
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from penstock_nwb_parts import add_lfp, add_units, new_file, one_by_one, open_nwb, save_nwb, series
from pynwb.ecephys import LFP
from scipy import signal

from penstock.convert.nwb import file as nwb_file
from penstock.convert.nwb import series as nwb_series
from penstock.convert.nwb import times as nwb_times
from penstock.core.errors import OptionError, SourceError


def _ramp(n, channels=3):
    """Each value is its row plus a thousand times its column."""
    return np.arange(n)[:, np.newaxis] + 1000 * np.arange(channels)


@pytest.mark.parametrize("rate", ["1000", "1250", "333", "30", "2441.40625", "101.7"])
@pytest.mark.parametrize("start", ["0", "0.4", "17.003"])
def test_a_window_has_the_first_samples_at_or_after_its_start(tmp_path, rate, start):
    n = int(4 * float(rate))
    nwb = new_file()
    add_lfp(nwb, _ramp(n).astype(np.int16), rate=float(rate), starting_time=float(start))
    path = save_nwb(nwb, tmp_path / "a.nwb")
    found = one_by_one(path, modalities=("lfp",), bin_size_ms=10.0, sequence_length=37, overlap=0.5)
    rows = math.floor(Fraction("0.37") * Fraction(rate))
    assert len(found) == (math.floor(n / Fraction(rate) / Fraction("0.01")) - 37) // 18 + 1
    for number, (fields, said) in enumerate(found):
        begin = number * 18 * Fraction("0.01")  # after the first sample
        first = math.ceil(begin * Fraction(rate))
        assert said["start_time"] == pytest.approx(float(Fraction(start) + begin))
        np.testing.assert_array_equal(fields["lfp"], _ramp(n)[first : first + rows])
        assert fields["lfp"].dtype == np.float32


def test_conversion_channel_conversion_and_offset_are_applied(tmp_path):
    data = np.random.default_rng(1).integers(-3000, 3000, (200, 3)).astype(np.int16)
    nwb = new_file()
    add_lfp(nwb, data, rate=100.0, conversion=2.5e-3, offset=0.25, channel_conversion=[1.0, 2.0, 0.5])
    found = one_by_one(save_nwb(nwb, tmp_path / "a.nwb"), modalities=("lfp",), overlap=0)
    for number, (fields, _) in enumerate(found):
        for row in range(100):
            for channel, factor in enumerate((1.0, 2.0, 0.5)):
                expected = int(data[number * 100 + row, channel]) * 2.5e-3 * factor + 0.25
                assert fields["lfp"][row, channel] == pytest.approx(expected, rel=1e-6)


def test_spikes_and_samples_are_on_one_clock(tmp_path):
    # A pulse in the LFP and a spike at the same times: they are in the same bins.
    pulses = [0.505, 1.25, 1.999, 2.4]
    data = np.zeros((3000, 1))
    start = 0.2
    data[[round((t - start) * 1000) for t in pulses], 0] = 1
    nwb = new_file()
    add_lfp(nwb, data, rate=1000.0, starting_time=start)
    add_units(nwb, [[t + 1e-7 for t in pulses]])
    found = one_by_one(save_nwb(nwb, tmp_path / "a.nwb"), modalities=("lfp", "spikes"), sequence_length=50, overlap=0.5)
    total = 0
    for fields, _ in found:
        pulses_in_bins = fields["lfp"].reshape(50, 10).sum(axis=1)
        np.testing.assert_array_equal(fields["spikes"][:, 0], pulses_in_bins)
        total += int(pulses_in_bins.sum())
    assert total == 8  # each pulse is in two windows


def test_the_range_is_what_all_series_share(tmp_path):
    nwb = new_file()
    add_lfp(nwb, _ramp(900, 1), rate=100.0)
    nwb.add_acquisition(series("eeg", np.arange(4000.0), rate=500.0, starting_time=1.003))
    path = save_nwb(nwb, tmp_path / "a.nwb")
    recording = open_nwb(path, modalities=("lfp", "eeg"), sequence_length=200, overlap=0)
    assert recording.span(np.arange(3)).round(6).tolist() == [[1.003, 3.003], [3.003, 5.003], [5.003, 7.003]]
    assert recording.n_samples == 3
    assert recording.notes == ["The last 1.997 s are in no window."]
    (fields, said), *_ = recording.samples(np.array([1]))
    recording.close()
    assert fields["lfp"][:, 0].tolist() == list(range(301, 501))  # the first sample after 3.003 s is at 3.01 s
    assert fields["eeg"].shape == (1000, 1)
    assert fields["eeg"][:, 0].tolist() == list(range(1000, 2000))
    assert said["sampling_rates"] == {"lfp": 100.0, "eeg": 500.0}


def test_series_that_share_no_time_are_named_with_their_ranges(tmp_path):
    nwb = new_file()
    add_lfp(nwb, _ramp(100, 1), rate=100.0)
    nwb.add_acquisition(series("eeg", np.arange(400.0), rate=100.0, starting_time=5.0))
    with pytest.raises(SourceError, match=r"LFP/lfp from 0 to 1 s, acquisition/eeg from 5 to 9 s"):
        open_nwb(save_nwb(nwb, tmp_path / "a.nwb"), modalities=("lfp", "eeg"))


def test_a_window_with_a_gap_is_left_out_and_counted(tmp_path, monkeypatch):
    monkeypatch.setattr(nwb_times, "_COARSE", 16)
    monkeypatch.setattr(nwb_times, "_READ_STAMPS", 64)
    # 100 Hz from 0 to 3 s and from 5.5 to 10 s
    stamps = np.concatenate([np.arange(300) * 0.01, 5.5 + np.arange(450) * 0.01])
    nwb = new_file()
    add_lfp(nwb, _ramp(750, 2), timestamps=stamps)
    add_units(nwb, [[0.5, 4.0, 9.5]])
    path = save_nwb(nwb, tmp_path / "a.nwb")
    recording = open_nwb(path, modalities=("lfp", "spikes"), overlap=0.5)
    found = list(recording.samples(np.arange(recording.n_samples)))
    starts = [0.0, 0.5, 1.0, 1.5, 2.0, 5.5, 6.0, 6.5, 7.0, 7.5, 8.0, 8.5, 9.0]
    assert recording.span(np.arange(recording.n_samples))[:, 0].tolist() == pytest.approx(starts)
    assert recording.notes == ["Windows left out because they overlap a gap in processing/ecephys/LFP/lfp: 6."]
    recording.close()
    for (fields, _), start in zip(found, starts, strict=True):
        first = round(start * 100) if start < 3 else 300 + round((start - 5.5) * 100)
        np.testing.assert_array_equal(fields["lfp"], _ramp(750, 2)[first : first + 100])


def _continuous(stamps, seconds, rate_hz=None):
    """A series whose values are its frame numbers, without a file."""
    data = np.arange(len(stamps), dtype=np.float64)
    held = SimpleNamespace(data=data, timestamps=stamps, rate=None, conversion=1.0, offset=0.0, unit="V")
    entry = nwb_file.Entry("acquisition/x", frozenset(["TimeSeries"]), frozenset(), held)
    return nwb_series.Continuous("x", nwb_series.Series(entry, Path("x.nwb")), seconds, rate_hz)


@given(
    parts=st.lists(st.tuples(st.integers(1, 60), st.floats(0.01, 1.0)), min_size=1, max_size=5),
    jitter=st.sampled_from([0.0, 1e-4, 1e-3]),
    seconds=st.sampled_from([0.05, 0.1, 0.137]),
    seed=st.integers(0, 99),
)
def test_kept_windows_have_all_frames_and_windows_left_out_do_not(parts, jitter, seconds, seed):
    # Parts of samples every 10 ms, with pauses between them.
    rng = np.random.default_rng(seed)
    stamps, at = [], 3.0
    for n, pause in parts:
        stamps += [at + k * 0.01 for k in range(n)]
        at = stamps[-1] + 0.01 + pause
    stamps = np.array(stamps) + rng.uniform(0, jitter, len(stamps))
    intervals = np.diff(stamps)
    assume(len(stamps) > 20)
    assume(np.median(intervals) < 0.012)
    one = _continuous(stamps, seconds)
    begins = 3.0 + np.arange(int((stamps[-1] - 3.0) / 0.005)) * 0.005
    windows = np.stack([begins, begins + seconds], axis=1)
    period = (intervals[intervals <= 1.5 * np.median(intervals)]).mean()
    gaps = [i for i in range(len(intervals)) if intervals[i] > 1.5 * np.median(intervals)]
    n = one.n_rows
    assert n == int(seconds / period + 0.1)
    near = 1e-6 * period
    for (begin, end), kept in zip(windows.tolist(), one.is_whole(windows).tolist(), strict=True):
        first = sum(t < begin - near for t in stamps)
        in_gap = any(begin < stamps[i + 1] - near and end > stamps[i] + period + near for i in gaps)
        crosses = any(first <= i < first + n - 1 for i in gaps) or first + n > len(stamps)
        outside = begin < stamps[0] - near or end > stamps[-1] + period + near
        assert kept == (not in_gap and not crosses and not outside)
        if kept:
            assert one.rows(begin, end)[:, 0].tolist() == list(range(first, first + n))


def test_timestamps_that_shake_give_the_samples_after_the_start(tmp_path):
    rng = np.random.default_rng(2)
    stamps = 3 + np.arange(2000) * 0.001 + rng.uniform(0, 2e-4, 2000)
    nwb = new_file()
    add_lfp(nwb, _ramp(2000, 1), timestamps=stamps)
    recording = open_nwb(save_nwb(nwb, tmp_path / "a.nwb"), modalities=("lfp",), sequence_length=50, overlap=0)
    for fields, said in recording.samples(np.arange(recording.n_samples)):
        first = sum(t < said["start_time"] - 1e-9 for t in stamps)
        assert fields["lfp"][:, 0].tolist() == list(range(first, first + 500))
    assert recording.n_samples == 4
    recording.close()


@pytest.mark.parametrize("rate_out", [100.0, 300.0, 2000.0])
def test_a_resampled_window_is_the_slice_of_the_resampled_recording(tmp_path, rate_out, monkeypatch):
    monkeypatch.setattr(nwb_series, "_INPUT_VALUES", 1000)
    data = np.random.default_rng(4).integers(-500, 500, (5000, 2)).astype(np.int16)
    nwb = new_file()
    add_lfp(nwb, data, rate=1000.0, starting_time=2.0, conversion=1e-3, offset=1.0)
    recording = open_nwb(save_nwb(nwb, tmp_path / "a.nwb"), modalities=("lfp",), rate_hz=rate_out, overlap=0.5)
    ratio = Fraction(rate_out) / 1000
    whole = signal.resample_poly(data * 1e-3 + 1.0, ratio.numerator, ratio.denominator, axis=0)
    order = np.array([3, 0, 8, 1, 2, 3])
    for number, (fields, _) in zip(order.tolist(), recording.samples(order), strict=True):
        first = round(number * 0.5 * rate_out)
        np.testing.assert_allclose(fields["lfp"], whole[first : first + round(rate_out)], atol=1e-6)
    assert recording.n_samples == 9
    assert recording.about["fields"]["lfp"]["own_rate_hz"] == 1000.0
    recording.close()


def test_parts_between_gaps_are_resampled_each_by_itself(tmp_path):
    data = np.random.default_rng(4).normal(size=(4000, 1))
    stamps = np.concatenate([np.arange(2500) * 0.001, 10 + np.arange(1500) * 0.001])
    nwb = new_file()
    add_lfp(nwb, data, timestamps=stamps)
    found = one_by_one(save_nwb(nwb, tmp_path / "a.nwb"), modalities=("lfp",), rate_hz=250.0, overlap=0)
    parts = signal.resample_poly(data[:2500], 1, 4, axis=0), signal.resample_poly(data[2500:], 1, 4, axis=0)
    assert [said["start_time"] for _, said in found] == pytest.approx([0.0, 1.0, 10.0])
    for (fields, _), expected in zip(found, (parts[0][:250], parts[0][250:500], parts[1][:250]), strict=True):
        np.testing.assert_allclose(fields["lfp"], expected, atol=1e-6)


def test_a_series_is_named_by_its_name_or_its_path(tmp_path):
    nwb = new_file()
    add_lfp(nwb, _ramp(200, 2), name="ElectricalSeries", place="acquisition", rate=100.0)
    add_lfp(nwb, _ramp(200, 2) * 2, name="lfp", rate=100.0)
    path = save_nwb(nwb, tmp_path / "a.nwb")
    for modality in ("ElectricalSeries", "acquisition/ElectricalSeries"):
        fields, _ = one_by_one(path, modalities=(modality, "lfp"))[0]
        np.testing.assert_array_equal(fields["ElectricalSeries"], _ramp(200, 2)[:100])
        np.testing.assert_array_equal(fields["lfp"], _ramp(200, 2)[:100] * 2)
    fields, _ = one_by_one(path, modalities=("processing/ecephys/LFP/lfp",))[0]
    np.testing.assert_array_equal(fields["lfp"], _ramp(200, 2)[:100] * 2)


def test_without_a_container_the_name_tells_the_lfp(tmp_path):
    nwb = new_file()
    add_lfp(nwb, _ramp(200, 2), name="probe0_LFP", place="acquisition", rate=100.0)
    add_lfp(nwb, _ramp(200, 2), name="raw", place="acquisition", rate=100.0)
    recording = open_nwb(save_nwb(nwb, tmp_path / "a.nwb"), modalities=("lfp",))
    assert recording.about["fields"]["lfp"]["path"] == "acquisition/probe0_LFP"
    assert recording.about["fields"]["lfp"]["areas"] == ["CA1", "V1"]
    recording.close()


def test_an_lfp_that_is_linked_from_acquisition_is_one_series(tmp_path):
    nwb = new_file()
    add_lfp(nwb, _ramp(200, 2), name="raw", place="acquisition", rate=100.0)
    lfp = LFP()
    nwb.create_processing_module(name="ecephys", description="voltages").add(lfp)
    lfp.add_electrical_series(nwb.acquisition["raw"])
    recording = open_nwb(save_nwb(nwb, tmp_path / "a.nwb"), modalities=("lfp",))
    assert recording.about["fields"]["lfp"]["path"] == "processing/ecephys/LFP/raw"
    recording.close()


def test_times_that_count_from_1970_lose_no_window(tmp_path):
    nwb = new_file()
    add_lfp(nwb, _ramp(12_500, 1), rate=1250.0, starting_time=1.7e9)
    found = one_by_one(save_nwb(nwb, tmp_path / "a.nwb"), modalities=("lfp",))
    assert len(found) == 19
    for number, (fields, _) in enumerate(found):
        assert fields["lfp"][:, 0].tolist() == list(range(number * 625, number * 625 + 1250))


def test_several_lfps_are_listed(tmp_path):
    nwb = new_file()
    add_lfp(nwb, _ramp(200, 2), name="a", rate=100.0)
    add_lfp(nwb, _ramp(200, 2), name="b", rate=100.0)
    with pytest.raises(
        SourceError, match=r"2 series that match 'lfp': processing/ecephys/LFP/a, processing/ecephys/LFP/b\. Use"
    ):
        open_nwb(save_nwb(nwb, tmp_path / "a.nwb"), modalities=("lfp",), missing="skip")


def test_paths_with_the_same_last_part_become_fields_of_their_whole_paths(tmp_path):
    nwb = new_file()
    add_lfp(nwb, _ramp(200, 2), name="x", place="A", rate=100.0)
    add_lfp(nwb, _ramp(200, 2), name="x", place="B", rate=100.0)
    modalities = ("processing/ecephys/A/x", "processing/ecephys/B/x")
    fields, _ = one_by_one(save_nwb(nwb, tmp_path / "a.nwb"), modalities=modalities)[0]
    assert list(fields) == ["processing_ecephys_A_x", "processing_ecephys_B_x"]


def test_a_series_without_a_regular_rate_is_not_continuous(tmp_path):
    nwb = new_file()
    nwb.add_acquisition(series("licks", np.arange(60.0), timestamps=np.cumsum([0.1, 0.1, 10.0] * 20)))
    with pytest.raises(SourceError, match=r"All windows .* overlap a gap in acquisition/licks.*read it as behavior"):
        open_nwb(save_nwb(nwb, tmp_path / "a.nwb"), modalities=("licks",))


def test_a_window_without_a_frame_is_refused(tmp_path):
    nwb = new_file()
    nwb.add_acquisition(series("slow", np.arange(40.0), rate=0.5))
    with pytest.raises(SourceError, match=r"1 s have none of acquisition/slow at 0.5 Hz"):
        open_nwb(save_nwb(nwb, tmp_path / "a.nwb"), modalities=("slow",))


def test_timestamps_that_go_back_are_named(tmp_path):
    stamps = np.arange(300) * 0.01
    stamps[200:] -= 0.5
    nwb = new_file()
    add_lfp(nwb, _ramp(300, 2), timestamps=stamps)
    with pytest.raises(
        SourceError,
        match=r"Timestamps must .* those of processing/ecephys/LFP/lfp .* after frame 199, which is at 1.99",
    ):
        open_nwb(save_nwb(nwb, tmp_path / "a.nwb"), modalities=("lfp",))


def test_a_rate_that_no_ratio_fits_is_refused(tmp_path):
    nwb = new_file()
    add_lfp(nwb, _ramp(300, 2), rate=100.0)
    with pytest.raises(OptionError, match="ratio of integers <= 10000, got 100 Hz"):
        open_nwb(save_nwb(nwb, tmp_path / "a.nwb"), modalities=("lfp",), rate_hz=1e-4 * math.pi)
