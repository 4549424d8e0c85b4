"""Recordings of one dataset: unlike units, unlike columns, modalities that some of them lack."""

import json
from dataclasses import replace
from pathlib import Path
from shutil import copy

import numpy as np
import pytest
import torch
from penstock_nwb_parts import add_behavior, add_lfp, add_units, new_file, save_nwb, series

from penstock import TarSource
from penstock.convert.convert import convert
from penstock.convert.engines import LocalEngine
from penstock.convert.formats import ReadOptions
from penstock.convert.nwb.agree import agree
from penstock.convert.nwb.input import NWBInput, NWBOptions
from penstock.convert.plan import Scanner
from penstock.convert.scan import ConvertOptions
from penstock.convert.splits import Split
from penstock.convert.to_shards import convert_to_shards
from penstock.core.errors import ConversionError, OptionError, SourceError
from penstock.recipes.webdataset.loader import create_webdataset_dataloader
from penstock.shard.outputs.write_options import WriteOptions
from penstock.transform.moments import Moments

_ROWS = {"modalities": ("spikes", "behavior"), "sequence_length": 50, "overlap": 0.0}


def _write(path, ids=(), columns=(), *, lfp=None, subject="mouse-3", seconds=1.0):
    """Unit u fires u + 1 times in the first bin of each half second; column c is constant at its own number."""
    nwb = new_file(session_id=path.stem)
    nwb.subject.fields["subject_id"] = subject
    if ids:
        for unit in ids:
            starts = np.arange(0, seconds, 0.5)
            nwb.add_unit(spike_times=np.sort(np.repeat(starts, unit + 1)), id=unit, obs_intervals=[[0.0, seconds]])
    if columns:
        stamps = np.arange(-0.1, seconds + 0.1, 0.01)
        add_behavior(nwb, *(series(f"c{one}", np.full(len(stamps), float(one)), timestamps=stamps) for one in columns))
    if lfp:
        add_lfp(nwb, np.arange(seconds * 100 * lfp).reshape(-1, lfp), rate=100.0)
    return save_nwb(nwb, path)


def _convert(tmp_path, paths, options=None, **changes):
    given = NWBOptions(**(_ROWS | changes))
    return convert([NWBInput(path, given) for path in paths], tmp_path / "out", options)[""]


def _batch(tmp_path):
    with create_webdataset_dataloader(tmp_path / "out", batch_size=100, shuffle=False, num_workers=0) as loader:
        (batch,) = loader
    return batch


@pytest.fixture
def unlike(tmp_path):
    """Units 0, 1, 2 and columns 1, 2; units 1, 2, 5 and columns 2, 3."""
    return [
        _write(tmp_path / "a.nwb", (0, 1, 2), (1, 2)),
        _write(tmp_path / "b.nwb", (1, 2, 5), (2, 3)),
    ]


def test_unlike_units_and_columns_are_refused_with_a_table_of_what_differs(tmp_path, unlike):
    with pytest.raises(SourceError) as caught:
        _convert(tmp_path, unlike)
    path = "processing/behavior/BehavioralTimeSeries"
    assert str(caught.value) == (
        "The recordings of a dataset must have the same units and columns, but these differ:\n"
        f"  a.nwb: spikes: 3 units, 1 of them not in all (0); behavior: 2 columns, 1 of them not in all ({path}/c1)\n"
        f"  b.nwb: spikes: 3 units, 1 of them not in all (5); behavior: 2 columns, 1 of them not in all ({path}/c3)\n"
        "Use units='intersect' to keep what all have, or units='pad' to fill in what some lack. "
        "Units are matched by id, columns by name."
    )
    assert not (tmp_path / "out").exists()


def test_intersect_keeps_the_units_and_columns_that_all_recordings_have(tmp_path, unlike):
    manifest = _convert(tmp_path, unlike, units="intersect")
    batch = _batch(tmp_path)
    assert batch["spikes"][:, 0].tolist() == [[2.0, 3.0]] * 4
    assert batch["behavior"][:, 7].tolist() == [[2.0]] * 4
    assert batch["behavior_valid"].all()
    assert "spikes_valid" not in batch
    conversion = manifest.metadata["conversion"]
    assert conversion["alignment"]["spikes"] == {"how": "intersect", "unit_ids": [1, 2]}
    assert conversion["notes"] == [
        "Units of spikes are matched by id: the 2 that all recordings have; each has 3.",
        "Columns of behavior are matched by name: the 1 that all recordings have; each has 2.",
    ]


@pytest.mark.parametrize("fill", [None, 0.0])
def test_pad_keeps_all_units_and_columns_with_masks(tmp_path, unlike, fill):
    manifest = _convert(tmp_path, unlike, units="pad", fill=fill)
    batch = _batch(tmp_path)
    none = float("nan") if fill is None else fill
    expected = torch.tensor([[1.0, 2.0, 3.0, none]] * 2 + [[none, 2.0, 3.0, 6.0]] * 2)
    torch.testing.assert_close(batch["spikes"][:, 0], expected, rtol=0, atol=0, equal_nan=True)
    assert batch["spikes_valid"].tolist() == [[True, True, True, False]] * 2 + [[False, True, True, True]] * 2
    expected = torch.tensor([[1.0, 2.0, none]] * 2 + [[none, 2.0, 3.0]] * 2)
    torch.testing.assert_close(batch["behavior"][:, 7], expected, rtol=0, atol=0, equal_nan=True)
    assert batch["behavior_valid"][:, 7].tolist() == [[True, True, False]] * 2 + [[False, True, True]] * 2
    assert manifest.metadata["conversion"]["alignment"]["spikes"] == {"how": "pad", "unit_ids": [0, 1, 2, 5]}
    columns = [said["behavior_columns"] for said in batch["metadata"]]
    assert columns == [[f"processing/behavior/BehavioralTimeSeries/c{one}" for one in (1, 2, 3)]] * 4


def test_statistics_leave_out_units_that_are_filled_in(tmp_path, unlike):
    manifest = _convert(tmp_path, unlike, units="pad")
    mean = Moments.over(TarSource(manifest.folder), field="spikes").mean
    np.testing.assert_allclose(mean, [1 / 50, 2 / 50, 3 / 50, 6 / 50])


def test_equal_units_need_nothing_and_another_order_is_put_in_that_of_the_first(tmp_path):
    paths = [_write(tmp_path / "a.nwb", (3, 1)), _write(tmp_path / "b.nwb", (1, 3), subject="mouse-4")]
    manifest = _convert(tmp_path, paths, modalities=("spikes",))
    assert _batch(tmp_path)["spikes"][:, 0].tolist() == [[4.0, 2.0]] * 4
    assert manifest.metadata["conversion"]["notes"] == [
        "Units of spikes are matched by id: the same units in all recordings, put in one order.",
        "Units of 2 subjects have the same ids, and share a column: an id is another neuron in each.",
    ]
    same = [NWBInput(paths[0], NWBOptions(**_ROWS | {"modalities": ("spikes",)}))]
    assert "notes" not in convert(same, tmp_path / "same")[""].metadata["conversion"]


@pytest.mark.parametrize(("subjects", "n_notes"), [(("m1", "m1"), 0), (("m1", "m2"), 1)])
def test_equal_units_of_several_subjects_are_noted(tmp_path, subjects, n_notes):
    paths = [_write(tmp_path / f"{number}.nwb", (0, 1), subject=one) for number, one in enumerate(subjects)]
    manifest = _convert(tmp_path, paths, modalities=("spikes",))
    said = ["Units of 2 subjects have the same ids, and share a column: an id is another neuron in each."]
    assert manifest.metadata["conversion"].get("notes", []) == said[:n_notes]


def test_units_without_one_in_common_and_repeated_ids_are_refused(tmp_path):
    paths = [_write(tmp_path / "a.nwb", (0, 1)), _write(tmp_path / "b.nwb", (2,)), _write(tmp_path / "c.nwb", (4, 4))]
    with pytest.raises(SourceError, match=r"No unit of spikes is in all recordings"):
        _convert(tmp_path, paths[:2], modalities=("spikes",), units="intersect")
    with pytest.raises(SourceError, match=r"must have different ids to be aligned, but some are repeated"):
        _convert(tmp_path, paths[1:], modalities=("spikes",), units="pad")


def test_the_table_of_many_unlike_recordings_has_at_most_20_lines(tmp_path):
    options = NWBOptions(("spikes",), sequence_length=50)
    scan = Scanner(Split())(NWBInput(_write(tmp_path / "a.nwb", (0,)), options))
    scans = [
        replace(
            scan,
            input=NWBInput(tmp_path / f"{number:02d}.nwb", options),
            about={"fields": {"spikes": {"unit_ids": list(range(1 + number // 2))}}},
        )
        for number in range(40)
    ]
    with pytest.raises(SourceError) as caught:
        agree(scans, options)
    lines = str(caught.value).splitlines()
    assert len(lines) <= 20
    assert lines[1] == "  2 recordings (00.nwb, 01.nwb): spikes: 1 unit"
    assert lines[-2] == "  … and 12 recordings that differ from these."


@pytest.fixture
def lacking(tmp_path):
    """All have units; one lacks lfp, the other behavior, the last neither."""
    return [
        _write(tmp_path / "a.nwb", (0, 1), (1,)),
        _write(tmp_path / "b.nwb", (0, 1), (), lfp=2),
        _write(tmp_path / "c.nwb", (0, 1), (1,), lfp=2),
    ]


_ALL = {"modalities": ("spikes", "lfp", "behavior")}


def test_the_error_lists_all_that_is_missing_in_all_files(tmp_path, lacking):
    more = [_write(tmp_path / "d0.nwb", (0,))]
    more += [Path(copy(more[0], tmp_path / f"d{number}.nwb")) for number in range(1, 5)]
    with pytest.raises(ConversionError) as caught:
        _convert(tmp_path, [*lacking, *more], **_ALL)
    text = str(caught.value).replace(f"{tmp_path}/", "")
    lines = text.splitlines()
    assert len(lines) == 5
    assert lines[0] == "7 inputs could not be converted, and nothing was published:"
    assert lines[1].startswith("  a.nwb: no lfp: no ElectricalSeries")
    assert lines[2].startswith("  b.nwb: no behavior: no series in a module")
    assert lines[3].startswith("  5 inputs (d0.nwb, d1.nwb, d2.nwb, …): no lfp: no Elect")
    assert "; no behavior: no series" in lines[3]
    assert len(caught.value.reasons) == 7


def test_skip_leaves_out_what_any_file_lacks_and_gives_what_a_conversion_without_it_gives(tmp_path, lacking):
    manifest = _convert(tmp_path, lacking, missing="skip", **_ALL)
    assert manifest.modalities == ["spikes"]
    assert manifest.metadata["conversion"]["notes"] == [
        "lfp is left out, because it is missing in a.nwb.",
        "behavior is left out, because it is missing in b.nwb.",
    ]
    plain = NWBOptions(**_ROWS | {"modalities": ("spikes",), "missing": "skip"})
    other = convert([NWBInput(path, plain) for path in lacking], tmp_path / "plain")[""]
    assert other.fingerprint == manifest.fingerprint


@pytest.mark.parametrize("split", [Split(), Split((("train", 0.5), ("val", 0.5)))], ids=["whole", "split"])
@pytest.mark.parametrize("lfp", [None, 2], ids=["nobody has lfp", "one has lfp"])
def test_skip_leaves_the_agreement_of_units_on(tmp_path, lfp, split):
    paths = [_write(tmp_path / "a.nwb", (0, 1, 2), lfp=lfp), _write(tmp_path / "b.nwb", (1, 2, 5, 6, 7))]
    with pytest.raises(SourceError, match="must have the same units and columns, but these differ"):
        _convert(tmp_path, paths, missing="skip", **_ALL)
    for units, n_units in (("pad", 6), ("intersect", 2)):
        inputs = [NWBInput(path, NWBOptions(**_ROWS | _ALL, missing="skip", units=units)) for path in paths]
        for manifest in convert(inputs, tmp_path / units, ConvertOptions(split=split)).values():
            assert manifest.fields["spikes"].shape == (50, n_units)
            assert "lfp is left out" in manifest.metadata["conversion"]["notes"][0]


def test_files_without_anything_in_common_are_refused_by_skip(tmp_path):
    paths = [_write(tmp_path / "a.nwb", (), (1,)), _write(tmp_path / "b.nwb", (), (), lfp=2)]
    with pytest.raises(SourceError, match=r"none is in all of them:\n  a.nwb: no lfp\n  b.nwb: no behavior\n"):
        _convert(tmp_path, paths, missing="skip", modalities=("lfp", "behavior"))


@pytest.mark.parametrize("fill", [None, -7.0])
def test_allow_fills_in_what_a_file_lacks_with_a_mask(tmp_path, lacking, fill):
    manifest = _convert(tmp_path, lacking, missing="allow", fill=fill, **_ALL)
    assert manifest.modalities == [
        *("spikes", "has_spikes", "lfp", "has_lfp", "behavior", "behavior_valid", "has_behavior")
    ]
    batch = _batch(tmp_path)
    assert batch["has_spikes"].tolist() == [True] * 6
    assert batch["has_lfp"].tolist() == [False, False, True, True, True, True]
    assert batch["has_behavior"].tolist() == [True, True, False, False, True, True]
    none = torch.full((2, 50, 2), float("nan") if fill is None else fill)
    frames = torch.arange(200.0).reshape(2, 50, 2)
    torch.testing.assert_close(batch["lfp"], torch.cat([none, frames, frames]), rtol=0, atol=0, equal_nan=True)
    assert batch["behavior"].shape == (6, 50, 1)
    assert batch["behavior_valid"][:, 0, 0].tolist() == batch["has_behavior"].tolist()
    assert manifest.metadata["conversion"]["notes"] == [
        "lfp is filled in, and has_lfp is False, in the items of a.nwb.",
        "behavior is filled in, and has_behavior is False, in the items of b.nwb.",
    ]


def test_allow_fills_in_texts_and_whole_numbers_and_a_field_that_nobody_has_stays_out(tmp_path):
    paths = [_write(tmp_path / "a.nwb", (0,)), tmp_path / "b.nwb"]
    nwb = new_file()
    nwb.add_unit(spike_times=[0.0, 0.995], id=0)
    for name in ("choice", "side"):
        nwb.add_trial_column(name, name)
    nwb.add_trial(start_time=0.0, stop_time=1.0, choice=4, side="left")
    save_nwb(nwb, paths[1])
    fields = {name: f"intervals/trials/{name}" for name in ("choice", "side")} | {"laser": "acquisition/laser"}
    _convert(tmp_path, paths, missing="allow", modalities=("spikes",), fields=fields)
    batch = _batch(tmp_path)
    assert batch["choice"].tolist() == [-1, -1, 4]
    assert batch["choice_valid"].tolist() == batch["has_choice"].tolist() == [False, False, True]
    assert batch["side"] == ["", "", "left"]
    assert not any("laser" in name for name in batch)


def test_unlike_units_and_missing_modalities_together_give_the_same_bytes_for_any_workers(tmp_path):
    paths = [
        _write(tmp_path / "a.nwb", (0, 1), (1,), lfp=2),
        _write(tmp_path / "b.nwb", (), (2,), lfp=2),
        _write(tmp_path / "c.nwb", (1, 4)),
    ]
    given = NWBOptions(**_ROWS | _ALL, missing="allow", units="pad")
    inputs = [NWBInput(path, given) for path in paths]
    options = ConvertOptions(WriteOptions(shard_size=2))
    one = convert(inputs, tmp_path / "out", options)[""]
    two = convert(inputs, tmp_path / "two", options, engine=LocalEngine(2))[""]
    assert one.fingerprint == two.fingerprint
    batch = _batch(tmp_path)
    assert {name: tuple(batch[name].shape[1:]) for name in ("spikes", "lfp", "behavior")} == {
        "spikes": (50, 3),
        "lfp": (50, 2),
        "behavior": (50, 2),
    }
    again = convert(inputs, tmp_path / "out", options, existing="resume")[""]
    assert again.fingerprint == one.fingerprint
    other = [NWBInput(path, NWBOptions(**_ROWS | _ALL, missing="allow", units="pad", fill=0.0)) for path in paths]
    with pytest.raises(OptionError, match="Resuming needs the same inputs and options"):
        convert(other, tmp_path / "out", options, existing="resume")


def test_splits_share_the_units_of_all_recordings(tmp_path, unlike):
    split = ConvertOptions(split=Split((("train", 0.5), ("val", 0.5))))
    given = NWBOptions(**_ROWS, units="pad")
    manifests = convert([NWBInput(path, given) for path in unlike], tmp_path / "out", split)
    assert {name: manifest.fields["spikes"].shape for name, manifest in manifests.items()} == {
        "train": (50, 4),
        "val": (50, 4),
    }


def test_series_of_unlike_shapes_are_noted(tmp_path):
    paths = [_write(tmp_path / "a.nwb", lfp=2), _write(tmp_path / "b.nwb", lfp=3)]
    manifest = _convert(tmp_path, paths, modalities=("lfp",))
    assert manifest.metadata["conversion"]["notes"] == [
        "Shapes of lfp differ: 50 × 2 in 1 recording, 50 × 3 in 1 recording. Batches of it are lists, unless they are "
        "padded."
    ]


def test_items_that_are_nan_throughout_are_counted_but_not_those_that_were_filled_in(tmp_path):
    nwb = new_file()
    stamps = np.concatenate([np.arange(0, 1, 0.01), np.arange(2, 3, 0.01)])
    add_behavior(nwb, series("x", stamps, timestamps=stamps))
    add_units(nwb, [[0.0, 2.995]])
    paths = [save_nwb(nwb, tmp_path / "a.nwb"), _write(tmp_path / "b.nwb", (10,))]
    options = ConvertOptions(WriteOptions(shard_size=2))
    manifest = _convert(tmp_path, paths, options, missing="allow")
    batch = _batch(tmp_path)
    empty = torch.isnan(batch["behavior"]).all(dim=(1, 2))
    assert torch.flatten(empty).tolist() == [False, False, True, True, False, True, True]
    assert manifest.metadata["conversion"]["notes"][-1] == "behavior is NaN throughout 2 of 7 items."
    json.dumps(manifest.summary(), allow_nan=False)


def test_what_was_done_is_logged_for_python(tmp_path, unlike, caplog):
    reading = ReadOptions(nwb=NWBOptions(**_ROWS, units="intersect"))
    convert_to_shards(unlike, tmp_path / "out", reading=reading, show_progress=False)
    assert f"{tmp_path / 'out'}: Units of spikes are matched by id: the 2 that all recordings have" in caplog.text
