"""`penstock inspect` of a recording lists what is in it, and prints a command that converts it as it is printed."""

import json
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import zarr
from penstock_nwb_parts import add_behavior, add_lfp, add_units, new_file, save_nwb, series
from penstock_ome_parts import coordinates, write_ome_image, write_plate
from typer.testing import CliRunner

from penstock import TarSource
from penstock.cli import app


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def run(line: str) -> Any:
    return CliRunner().invoke(app, shlex.split(line))


def inspect(where: str) -> dict[str, Any]:
    result = run(f"inspect {shlex.quote(where)} --json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def fields_of_printed_command(where: str) -> dict[str, int]:
    """Run the command that `inspect` prints; return the fields of the dataset, and its number of items."""
    said = run(f"inspect {shlex.quote(where)}").stdout
    command = said.partition("Convert it:\n  ")[2].partition("\n")[0]
    assert command == inspect(where)["command"]
    result = run(command.removeprefix("penstock "))
    assert result.exit_code == 0, result.output
    source = TarSource("shards")
    return {name: len(source.index) for name in source.fields if name != "metadata"}


def save_session(path: str) -> str:
    nwb = new_file()
    add_units(nwb, [[0.1, 2.0], [1.5]])
    add_lfp(nwb, np.arange(6000.0).reshape(3000, 2), rate=1000.0)
    stamps = np.arange(300) * 0.02
    stamps[100:] += 0.5
    add_behavior(nwb, series("speed", np.arange(300.0), timestamps=stamps))
    nwb.add_acquisition(series("sync pulse", np.arange(60.0), rate=20.0))
    return str(save_nwb(nwb, Path(path)))


def test_an_nwb_file_is_listed_with_rates_units_spans_and_gaps() -> None:
    found = inspect(save_session("my session.nwb"))
    about = {one["path"]: (one["kind"], one["shape"], one["rate_hz"], one["n_gaps"]) for one in found["contents"]}
    assert about == {
        "units": ("Units", [2], None, 0),
        "acquisition/sync pulse": ("TimeSeries", [60], 20.0, 0),
        "processing/behavior/BehavioralTimeSeries/speed": ("TimeSeries", [300], 50.0, 1),
        "processing/ecephys/LFP/lfp": ("ElectricalSeries", [3000, 2], 1000.0, 0),
    }
    assert found["further_fields"] == ["--field 'sync_pulse=acquisition/sync pulse'"]
    lines = run("inspect 'my session.nwb'").stdout.splitlines()
    assert lines[0] == "my session.nwb: NWB file, 4 entries"
    assert lines[3].split() == [
        "processing/behavior/BehavioralTimeSeries/speed",
        *("TimeSeries", "(300,)", "50", "Hz", "m", "0–6.48", "s", "1", "gap"),
    ]


def save_short(path: str, rate: float = 100.0) -> str:
    nwb = new_file()
    nwb.add_acquisition(series("wheel", np.arange(50.0), rate=rate))
    return str(save_nwb(nwb, Path(path)))


def save_units(path: str, *, n_lfp: int = 0) -> str:
    """One spike in an observed time of 2 s; series of lfp of which only one can be `lfp`."""
    nwb = new_file()
    add_units(nwb, [[0.1]], obs_intervals=[[[0.0, 2.0]]])
    for number in range(n_lfp):
        add_lfp(nwb, np.arange(400.0).reshape(200, 2), f"volts{number}", rate=100.0)
    return str(save_nwb(nwb, Path(path)))


def save_sound(path: str, seconds: float) -> str:
    soundfile.write(path, np.arange(int(1000 * seconds)) / 4000, 1000, subtype="PCM_16")
    return path


def save_npz(path: str) -> str:
    np.savez_compressed(path, x=np.arange(8.0).reshape(4, 2), y=np.arange(4), z=np.arange(3), rate=np.float64(30))
    return path


def save_zarr(path: str) -> str:
    group = zarr.open_group(path, mode="w")
    group.create_array("traces/v", shape=(6, 2), dtype="f4")[...] = 1 + np.arange(12).reshape(6, 2)
    group.create_array("traces/stimulus", shape=(6,), dtype="f4")[...] = 1 + np.arange(6)
    group.create_array("cells", shape=(2,), dtype="i4")[...] = [5, 6]
    group.create_array("two words", shape=(6, 2), dtype="f4")[...] = 7
    return path


def save_npy(path: str) -> str:
    np.save(path, np.arange(10.0).reshape(5, 2))
    return path


@pytest.mark.parametrize(
    ("save", "path", "fields"),
    [
        (save_session, "a.nwb", {"spikes": 5, "lfp": 5, "behavior": 5, "behavior_valid": 5}),
        (save_short, "short.nwb", {"wheel": 1}),
        (lambda path: save_short(path, 7000.0), "shorter than a bin.nwb", {"wheel": 1}),
        (save_units, "units.nwb", {"spikes": 3}),
        (lambda path: save_units(path, n_lfp=2), "two lfp.nwb", {"spikes": 3, "volts0": 3}),
        (lambda path: save_sound(path, 2.5), "long.wav", {"audio": 2}),
        (lambda path: save_sound(path, 0.5), "a b.flac", {"audio": 1}),
        (save_npy, "rows.npy", {"data": 5}),
        (save_npz, "a.npz", {"x": 4, "y": 4}),
        (save_zarr, "a.zarr", {"v": 6, "stimulus": 6}),
    ],
)
def test_the_printed_command_runs(save: Callable[[str], str], path: str, fields: dict[str, int]) -> None:
    assert fields_of_printed_command(save(path)) == fields


@pytest.mark.parametrize("save", [save_short, save_units])
def test_the_error_of_missing_modalities_has_the_command_that_inspect_prints(save: Callable[[str], str]) -> None:
    command = inspect(save("a b.nwb"))["command"]
    said = run("convert 'a b.nwb' -o out").stderr
    assert f"\n  Convert it: {command}\n" in said
    assert run(command.removeprefix("penstock ")).exit_code == 0
    save("second.nwb")
    one_line = run("convert 'a b.nwb' second.nwb -o out").stderr.splitlines()[1]
    assert ("Name what it has, --modalities spikes," in one_line) == ("--modalities" in command)


def test_what_cannot_become_a_field_is_said() -> None:
    save_npz("a.npz")
    assert "rate cannot become a field: a single value has no rows\n" in run("inspect a.npz").stdout
    zarr.open_group("empty.zarr", mode="w").create_array("x", shape=(0, 3), dtype="f4")
    said = run("inspect empty.zarr").stdout
    assert "x cannot become a field: it is empty\n" in said
    assert "Convert it" not in said


def test_an_image_is_listed_by_its_levels_and_needs_no_conversion() -> None:
    write_ome_image(Path("cell.zarr"), coordinates(4, 8, 8), "zyx")
    found = inspect("cell.zarr")
    assert found["kind"] == "volume"
    assert found["command"] is None
    assert [(one["kind"], one["shape"]) for one in found["contents"]] == [
        ("zyx float32", [4, 8, 8]),
        ("zyx float32", [4, 4, 4]),
    ]
    assert "Volumes are read in place" in run("inspect cell.zarr").stdout
    write_plate(Path("plate.zarr"))
    assert {one["path"].rpartition("/")[0] for one in inspect("plate.zarr")["contents"]} == {
        *("A/1/0", "A/1/1", "B/2/0", "B/2/1")
    }


def test_options_of_a_dataset_are_refused_for_a_recording_and_damage_is_an_error() -> None:
    save_npy("rows.npy")
    result = run("inspect rows.npy --item 3")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "--item, --png and --cache need a dataset, got the recording rows.npy" in result.stderr
    Path("bad.npy").write_bytes(b"no array")
    Path("bad.npz").write_bytes(b"no archive")
    for name in ("bad.npy", "bad.npz"):
        result = run(f"inspect {name}")
        assert result.exit_code == 2
        assert name in result.stderr
