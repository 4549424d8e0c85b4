"""Missing modalities, and files that are truncated, locked, damaged or of another kind."""

import subprocess
import sys
import warnings

import h5py
import numpy as np
import pytest
from hdmf.backends.hdf5.h5_utils import H5DataIO
from penstock_nwb_parts import add_behavior, add_lfp, add_units, new_file, open_nwb, save_nwb, series
from pynwb.behavior import SpatialSeries

from penstock.convert.nwb import file as nwb_file
from penstock.core.errors import MissingDependency, ReadError, SourceError


def _small(path):
    nwb = new_file()
    add_units(nwb, [[0.1, 1.9], []])
    add_behavior(nwb, series("speed", np.arange(30.0), timestamps=np.arange(30) * 0.1))
    nwb.add_acquisition(series("eeg", np.zeros((250, 3)), rate=100.0))
    return save_nwb(nwb, path)


def test_a_missing_modality_is_an_error_that_lists_what_there_is(tmp_path):
    path = _small(tmp_path / "a.nwb")
    with pytest.raises(SourceError) as caught:
        open_nwb(path)
    assert str(caught.value) == (
        f"{path} has no lfp: no ElectricalSeries lies in an LFP container or has 'lfp' in its name. It has "
        "acquisition/eeg (TimeSeries, 250 × 3, 100 Hz); processing/behavior/BehavioralTimeSeries/speed (TimeSeries, "
        "30, timestamps); 2 units. Name what it has, modalities=('spikes', 'behavior'), or use missing='skip' or "
        f"missing='allow' if other recordings have more.\n  Convert it: penstock convert {path} --output shards "
        "--modalities spikes,behavior"
    )


def test_a_missing_modality_can_be_skipped_with_a_note(tmp_path):
    recording = open_nwb(_small(tmp_path / "a.nwb"), missing="skip")
    assert recording.notes[0] == "No lfp: no ElectricalSeries lies in an LFP container or has 'lfp' in its name."
    ((fields, said),) = recording.samples(np.array([0]))
    assert list(fields) == ["spikes", "behavior", "behavior_valid"]
    assert list(said["sampling_rates"]) == ["spikes", "behavior"]
    recording.close()


def test_a_file_that_lacks_all_of_them_is_an_error_all_the_same(tmp_path):
    with pytest.raises(SourceError, match=r"no lfp: .*; no ophys: .*\. It has acquisition/eeg.*Name what it has"):
        open_nwb(_small(tmp_path / "a.nwb"), modalities=("lfp", "ophys"), missing="skip")


@pytest.mark.parametrize(
    ("modality", "reason"),
    [
        ("stimulus", "no numeric series in stimulus"),
        ("ophys", "no RoiResponseSeries in DfOverF or Fluorescence"),
        ("emg", "none of the kinds spikes, lfp, behavior, stimulus, ophys, and nothing has that name or path"),
        ("acquisition/emg", "nothing has that name or path"),
    ],
)
def test_every_modality_says_what_was_searched_for(tmp_path, modality, reason):
    with pytest.raises(SourceError, match=f"has no {modality}: .*{reason}"):
        open_nwb(_small(tmp_path / "a.nwb"), modalities=(modality,))


def test_a_path_that_does_not_exist_is_named(tmp_path):
    with pytest.raises(SourceError, match=r"No such file or folder: .*gone\.nwb"):
        open_nwb(tmp_path / "gone.nwb")


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 a zip", b"x" * 5000])
def test_a_file_that_is_not_hdf5_is_named(tmp_path, content):
    path = tmp_path / "a.nwb"
    path.write_bytes(content)
    with pytest.raises(SourceError, match=r"must be HDF5 .* but .*a\.nwb begins with"):
        open_nwb(path)


def test_an_hdf5_file_that_is_not_nwb_is_named(tmp_path):
    path = tmp_path / "a.nwb"
    with h5py.File(path, "w") as file:
        file["x"] = np.arange(3)
    with pytest.raises(SourceError, match=r"Could not read .*a\.nwb as NWB"):
        open_nwb(path)


def test_a_truncated_file_is_named_wherever_it_ends(tmp_path):
    whole = _small(tmp_path / "whole.nwb").read_bytes()
    path = tmp_path / "a.nwb"
    for share in (0.05, 0.3, 0.6, 0.9, 0.999):
        path.write_bytes(whole[: int(len(whole) * share)])
        with pytest.raises(ReadError, match=r"a\.nwb.*truncated"):
            open_nwb(path)


def test_a_file_that_another_process_writes_to_is_refused_and_can_be_read_afterwards(tmp_path):
    path = _small(tmp_path / "a.nwb")
    code = (
        "import h5py, sys\n"
        "with h5py.File(sys.argv[1], 'r+') as file:\n"
        "    print('open', flush=True)\n"
        "    sys.stdin.readline()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as writer:
        assert writer.stdout.readline() == "open\n"
        with pytest.raises(
            ReadError,
            match=r"Could not open .*a\.nwb: another process is writing to it.*lock.*Wait until the file is closed",
        ):
            open_nwb(path, modalities=("eeg",))
        writer.communicate("\n")
    open_nwb(path, modalities=("eeg",)).close()


def test_a_damaged_chunk_names_the_series_and_the_time(tmp_path):
    nwb = new_file()
    data = np.random.default_rng(0).integers(-99, 99, (1000, 2)).astype(np.int16)
    add_lfp(nwb, H5DataIO(data=data, chunks=(100, 2), compression="gzip"), rate=100.0)
    path = save_nwb(nwb, tmp_path / "a.nwb")
    with h5py.File(path) as file:
        chunk = file["processing/ecephys/LFP/lfp/data"].id.get_chunk_info(7)
    with path.open("r+b") as stream:
        stream.seek(chunk.byte_offset + 10)
        stream.write(b"\xff" * 40)
    recording = open_nwb(path, modalities=("lfp",), overlap=0)
    with pytest.raises(ReadError, match=r"processing/ecephys/LFP/lfp of .*a\.nwb, from \d\.000 to \d\.000 s: "):
        list(recording.samples(np.arange(10)))
    recording.close()


def test_nothing_warns_while_a_file_of_another_version_and_shape_is_read(tmp_path):
    nwb = new_file()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # five columns, where NWB 2.5 allows three
        add_behavior(nwb, SpatialSeries(name="pose", data=np.zeros((200, 5)), rate=100.0, reference_frame="arena"))
        path = save_nwb(nwb, tmp_path / "a.nwb")
    with h5py.File(path, "r+") as file:
        (version,) = file["specifications/core"]
        file["specifications/core"].move(version, "99.0.0")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        open_nwb(path, modalities=("behavior",)).close()


def test_a_file_is_closed_where_opening_fails(tmp_path):
    path = _small(tmp_path / "a.nwb")
    with pytest.raises(SourceError):
        open_nwb(path)
    with h5py.File(path, "r+"):
        pass  # HDF5 refuses this while the file is open for reading


def test_reading_after_the_file_was_closed_is_a_read_error(tmp_path):
    recording = open_nwb(_small(tmp_path / "a.nwb"), modalities=("eeg",))
    recording.close()
    with pytest.raises(ReadError, match=r"acquisition/eeg of .*a\.nwb, from 0.000 to 1.000 s"):
        list(recording.samples(np.array([0])))


@pytest.mark.parametrize(
    ("package", "is_folder", "message"),
    [
        ("pynwb", False, r"Reading NWB files needs pynwb; install it with: pip install 'penstock\[nwb\]'"),
        ("hdmf_zarr", True, r"zarr folders needs hdmf-zarr; install it with: pip install 'penstock\[nwb-zarr\]'"),
    ],
)
def test_a_package_that_is_not_installed_is_named(tmp_path, monkeypatch, package, is_folder, message):
    path = tmp_path / "a.nwb"
    if is_folder:
        path.mkdir()
    else:
        path.write_bytes(b"")
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingDependency, match=message):
        nwb_file.open_nwb(path)
