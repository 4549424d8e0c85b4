"""Times at which nothing was observed: `obs_intervals` of units and `invalid_times` of the file."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from penstock_cases import few_cases
from penstock_nwb_parts import add_behavior, add_lfp, add_units, new_file, one_by_one, open_nwb, save_nwb, series
from typer.testing import CliRunner

from penstock.cli import app
from penstock.convert.convert import convert
from penstock.convert.nwb.input import NWBInput, NWBOptions
from penstock.convert.scan import ConvertOptions
from penstock.convert.splits import Split
from penstock.convert.to_shards import convert_to_shards
from penstock.core.errors import OptionError, SourceError
from penstock.recipes.webdataset.loader import create_webdataset_dataloader

_ROWS = {"modalities": ("spikes",), "overlap": 0.0}
_NAN = float("nan")


def _write(path, observed=(), invalid=(), *, seconds=10, lfp=False):
    """Unit u has 10 * u + k + 1 spikes in second k; lfp counts milliseconds, behavior hundredths of a second."""
    nwb = new_file(session_id=path.stem)
    trains = [
        np.concatenate([k + np.linspace(0.1, 0.8, 10 * unit + k + 1) for k in range(seconds)])
        for unit in range(max(len(observed), 2) if observed is not None else 0)
    ]
    add_units(nwb, trains, **({"obs_intervals": observed} if observed else {}))
    for start, stop in invalid:
        nwb.add_invalid_time_interval(start_time=start, stop_time=stop)
    if lfp:
        add_lfp(nwb, np.arange(1000.0 * seconds)[:, np.newaxis], rate=1000.0)
        add_behavior(nwb, series("x", np.arange(100.0 * seconds), rate=100.0))
    return save_nwb(nwb, path)


_LOST = [[[0.0, 10.0]], [[0.0, 4.0], [6.5, 8.0], [8.0, 10.0]]]
"""The second unit is lost from 4 to 6.5 s."""


@pytest.mark.parametrize(
    ("options", "seconds", "second_unit", "note"),
    [
        ({}, [0, 1, 2, 3, 4, 7, 8, 9], [11, 12, 13, 14, _NAN, 18, 19, 20], "NaN, and False in spikes_valid,"),
        ({"fill": 0.0}, [0, 1, 2, 3, 4, 7, 8, 9], [11, 12, 13, 14, 0, 18, 19, 20], "0, and False in spikes_valid,"),
        ({"unobserved": "drop"}, [0, 1, 2, 3, 7, 8, 9], [11, 12, 13, 14, 18, 19, 20], None),
        ({"unobserved": "keep"}, list(range(10)), list(range(11, 21)), "counted"),
    ],
)
def test_units_and_windows_that_were_not_observed(tmp_path, options, seconds, second_unit, note):
    path = _write(tmp_path / "a.nwb", _LOST, [(5.9, 6.2), (6.1, 7.0)])
    found = one_by_one(path, **_ROWS, **options)
    assert [said["start_time"] for _, said in found] == pytest.approx(seconds)
    counts = [fields["spikes"].sum(axis=0).tolist() for fields, _ in found]
    np.testing.assert_array_equal(counts, np.stack([np.array(seconds) + 1, second_unit], axis=1))
    masked = options.get("unobserved", "mask") == "mask"
    assert [fields["spikes_valid"].tolist() for fields, _ in found if masked] == [
        [True, second != 4] for second in seconds if masked
    ]
    notes = open_nwb(path, **_ROWS, **options).notes
    kept = options.get("unobserved") == "keep"
    assert notes[0] == f"Windows {'that' if kept else 'left out because they'} overlap invalid_times" + (
        ", and are kept: 2." if kept else ": 2."
    )
    assert notes[1] == (
        "Windows left out because units were not observed throughout (obs_intervals): 1."
        if note is None
        else f"Units are {note} in windows in which they were not observed throughout (obs_intervals): "
        f"{'3 of 10' if kept else '1 of 8'}."
    )


_slots = st.lists(st.tuples(st.integers(0, 40), st.integers(1, 25)), min_size=1, max_size=4)


@few_cases
@given(units=st.lists(_slots, min_size=1, max_size=3), invalid=_slots, start=st.sampled_from([0.0, 0.3, 1.7e9]))
def test_a_window_is_observed_if_each_of_its_moments_is(tmp_path_factory, units, invalid, start):
    """Intervals are of whole tenths of a second, so that many of their ends are those of windows."""

    def mark(pairs):
        slots = np.zeros(80, np.bool_)
        for begin, length in pairs:
            slots[begin : begin + length] = True
        return slots

    def to_seconds(pairs):
        return [[start + begin / 10, start + (begin + length) / 10] for begin, length in pairs]

    everywhere = [(0, 80)]  # of a unit that is always observed, so that the recording has a known range
    path = _write(
        tmp_path_factory.mktemp("law") / "a.nwb",
        [to_seconds(pairs) for pairs in [everywhere, *units]],
        to_seconds(invalid),
    )
    observed = np.stack([mark(pairs) for pairs in [everywhere, *units]], axis=1)
    begins = [at for at in range(0, 71, 5) if not mark(invalid)[at : at + 10].any()]
    options = {"modalities": ("spikes",), "bin_size_ms": 100.0, "sequence_length": 10, "units": "pad"}
    if not begins:
        with pytest.raises(SourceError, match=r"All windows are left out because they overlap invalid_times"):
            open_nwb(path, **options)
        return
    found = one_by_one(path, **options)
    assert [said["start_time"] for _, said in found] == [pytest.approx(start + at / 10, abs=1e-6) for at in begins]
    for (fields, _), at in zip(found, begins, strict=True):
        valid = observed[at : at + 10].all(axis=0)
        assert fields["spikes_valid"].tolist() == valid.tolist()
        assert np.isnan(fields["spikes"]).all(axis=0).tolist() == (~valid).tolist()
        assert np.isfinite(fields["spikes"][:, valid]).all()


def test_windows_of_all_fields_and_around_events_are_left_out_within_invalid_times(tmp_path):
    path = _write(tmp_path / "a.nwb", (), [(2.0, 3.0)], lfp=True)
    options = {"modalities": ("spikes", "lfp", "behavior")}
    found = one_by_one(path, overlap=0.5, **options)
    begins = [at / 2 for at in range(19) if not 1 < at / 2 < 3]  # 1–2 s and 3–4 s only touch it
    assert [said["start_time"] for _, said in found] == begins
    for (fields, _), begin in zip(found, begins, strict=True):
        assert fields["lfp"][[0, -1], 0].tolist() == [1000 * begin, 1000 * begin + 999]
        assert fields["behavior"][0, 0] == 100 * begin + 0.5
    around = one_by_one(path, align="invalid_times", pre_ms=1000.0, post_ms=0.0, **options)
    assert [said["start_time"] for _, said in around] == [1.0]
    with pytest.raises(SourceError, match=r"All windows are left out because they .* unobserved='keep'\."):
        open_nwb(path, align="invalid_times", **options)
    assert len(one_by_one(path, align="invalid_times", unobserved="keep", **options)) == 1


def test_windows_in_which_no_unit_was_observed_are_left_out(tmp_path):
    path = _write(tmp_path / "a.nwb", [[[0.0, 3.0], [5.0, 10.0]], [[0.0, 3.5], [6.0, 10.0]]])
    found = one_by_one(path, **_ROWS)
    assert [said["start_time"] for _, said in found] == [0.0, 1.0, 2.0, 5.0, 6.0, 7.0, 8.0, 9.0]
    note = "Windows left out because no unit was observed throughout (obs_intervals): 2."
    assert note in open_nwb(path, **_ROWS).notes
    other = _write(tmp_path / "b.nwb", [[[0.0, 3.0], [5.0, 10.0]], np.empty((0, 2))])  # nothing is known of the second
    assert [bool(fields["spikes_valid"][0]) for fields, _ in one_by_one(other, **_ROWS)] == [True] * 3 + [False] * 2 + [
        True
    ] * 5


@pytest.mark.parametrize("options", [{}, {"units": "pad", "fill": 0.0}, {"missing": "allow"}])
def test_recordings_with_and_without_unobserved_units_have_the_same_fields(tmp_path, options):
    paths = [_write(tmp_path / "a.nwb", (), seconds=2), _write(tmp_path / "b.nwb", [[[0.0, 2.0]], [[0.0, 1.0]]])]
    if "missing" in options:
        paths.append(_write(tmp_path / "c.nwb", None, seconds=2, lfp=True))
    options = _ROWS | options | ({"modalities": ("spikes", "lfp")} if "missing" in options else {})
    options["sequence_length"] = 80
    manifest = convert([NWBInput(path, NWBOptions(**options)) for path in paths], tmp_path / "out")[""]
    assert manifest.modalities[:2] == ["spikes", "spikes_valid"]
    with create_webdataset_dataloader(tmp_path / "out", batch_size=9, shuffle=False, num_workers=0) as loader:
        (batch,) = loader
    absent = [[False, False]] * 2 if "missing" in options else []
    valid = [[True, True]] * 3 + [[True, False]] + absent
    assert batch["spikes_valid"].tolist() == valid
    fill = 0.0 if "fill" in options else _NAN
    filled = batch["spikes"].transpose(1, 2)[~batch["spikes_valid"]]
    torch.testing.assert_close(filled, torch.full_like(filled, fill), equal_nan=True)


def test_an_unknown_choice_is_refused():
    with pytest.raises(OptionError, match="unobserved must be one of 'mask', 'drop', 'keep', got 'skip'"):
        NWBOptions(unobserved="skip")


def test_what_was_not_observed_is_said_of_the_inputs_of_every_part(tmp_path, caplog):
    paths = [_write(tmp_path / f"{name}.nwb", _LOST, [(5.9, 7.0)]) for name in "ab"]
    inputs = [NWBInput(path, NWBOptions(**_ROWS)) for path in paths]
    split = Split((("train", 0.5), ("val", 0.5)), group_by="file")
    convert_to_shards(inputs, tmp_path / "out", options=ConvertOptions(split=split), show_progress=False)
    options = ["--modalities", "spikes", "--overlap", "0", "--split", "train=0.5,val=0.5", "--group-by", "file"]
    done = CliRunner().invoke(app, ["convert", *map(str, paths), "-o", str(tmp_path / "again"), *options])
    for said in (caplog.text, done.stderr):
        assert "2 inputs (a.nwb, b.nwb): Windows left out because they overlap invalid_times: 2." in said
        assert "2 inputs (a.nwb, b.nwb): Units are NaN, and False in spikes_valid, in windows" in said
