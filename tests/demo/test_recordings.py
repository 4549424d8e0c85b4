"""The recordings of the demo: real NWB files, reproducible, with movement that spikes predict."""

from dataclasses import replace
from pathlib import Path

import h5py
import numpy as np
import pynwb
import pytest

from penstock.demo import recordings as demo_recordings
from penstock.demo import training as demo_training
from penstock.demo.task import FULL, QUICK

_SCALE = replace(QUICK, subjects=2, sessions=2, seconds=20, units=24, channels=3)


@pytest.fixture(scope="module")
def recordings(tmp_path_factory):
    folder = tmp_path_factory.mktemp("recordings")
    made = demo_recordings.list_sessions(folder, _SCALE, seed=5)
    for session in made:
        assert demo_recordings.write_recording(session) == session.path.stat().st_size
    return made


def _content(path: Path):
    with h5py.File(path) as file:
        units, lfp = file["units"], file["processing/ecephys/LFP/lfp/data"]
        trains = np.split(units["spike_times"][:], units["spike_times_index"][:-1])
        joystick = file["processing/behavior/Position/joystick/data"]
        return trains, lfp[:], float(lfp.attrs["conversion"]), joystick[:]


def test_there_is_a_file_for_each_session_of_each_subject(recordings):
    names = ["sub-sim-01_ses-1.nwb", "sub-sim-01_ses-2.nwb", "sub-sim-02_ses-1.nwb", "sub-sim-02_ses-2.nwb"]
    assert [session.path.name for session in recordings] == names


def test_a_recording_says_what_it_is(recordings):
    with pynwb.NWBHDF5IO(recordings[3].path, "r") as io:
        file = io.read()
        assert (file.subject.subject_id, file.session_id) == ("sim-02", "sim-02-2")
        assert "imulated" in file.session_description
        assert set(file.electrodes["location"][:]) == {"M1"}
        assert file.units["electrodes"][4].index.tolist() == [1]
        assert file.processing["behavior"]["Position"]["joystick"].unit == "meters"
    assert pynwb.validate(path=recordings[3].path) == []


def test_spikes_volts_and_movement_have_sizes_that_could_be_measured(recordings):
    trains, bits, conversion, joystick = _content(recordings[0].path)
    assert len(trains) == 24
    assert all((np.diff(train) >= 0).all() and train[0] >= 0 and train[-1] < 20 for train in trains)
    assert 2 < np.mean([len(train) for train in trains]) / 20 < 30
    assert max(np.histogram(train, np.linspace(0, 20, 201))[0].max() for train in trains) < 35  # in 100 ms
    assert (bits.shape, bits.dtype) == ((20_000, 3), np.int16)
    assert 2e-5 < (bits * conversion).std() < 5e-4
    assert joystick.shape == (2000, 2)
    assert 0.005 < joystick.std() < 0.1


def test_the_same_seed_gives_the_same_recording_and_another_one_another(recordings, tmp_path):
    again, other = (demo_recordings.list_sessions(tmp_path / str(seed), _SCALE, seed)[1] for seed in (5, 6))
    for session in (again, other):
        session.path.parent.mkdir()
        demo_recordings.write_recording(session)
    first, same, differing = (_content(session.path) for session in (recordings[1], again, other))
    for left, right in zip((*first[0], *first[1:]), (*same[0], *same[1:]), strict=True):
        assert np.array_equal(left, right)
    assert not np.array_equal(first[3], differing[3])
    assert not np.array_equal(first[3], _content(recordings[0].path)[3])


def test_spikes_of_one_subject_tell_of_the_movement_of_another(recordings):
    """A linear decoder by least squares, of one subject's counts, on the other subject: what is shared is enough."""

    def counted(session):
        trains, _, _, joystick = _content(session.path)
        counts = np.stack([np.histogram(train, np.linspace(0, 20, 81))[0] for train in trains], axis=1)
        return (counts - counts.mean(0)) / counts.std(0), joystick.reshape(80, 25, 2).mean(axis=1)

    pairs = [counted(session) for session in recordings]
    weights = np.linalg.lstsq(
        np.concatenate([pairs[0][0], pairs[1][0]]), np.concatenate([pairs[0][1], pairs[1][1]]), rcond=None
    )[0]
    for counts, joystick in pairs[2:]:
        assert demo_training.r2_score((counts @ weights)[None], joystick[None]) > 0.3


def test_explained_variance_is_that_of_a_naive_loop():
    rng = np.random.default_rng(3)
    moved, predicted = rng.standard_normal((2, 5, 7, 2))
    error = spread = 0.0
    for axis in range(2):
        mean = sum(moved[i, j, axis] for i in range(5) for j in range(7)) / 35
        for i in range(5):
            for j in range(7):
                error += (moved[i, j, axis] - predicted[i, j, axis]) ** 2
                spread += (moved[i, j, axis] - mean) ** 2
    assert demo_training.r2_score(predicted, moved) == pytest.approx(1 - error / spread)
    assert demo_training.r2_score(moved, moved) == 1
    means = np.broadcast_to(moved.mean(axis=(0, 1)), moved.shape)
    assert demo_training.r2_score(means, moved) == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize("scale", [FULL, QUICK])
def test_the_kill_comes_in_the_middle_of_an_epoch_and_between_two_checkpoints(scale):
    # Windows of 1 s that overlap by half, of two thirds of the subjects or what whole subjects allow.
    windows = (2 * scale.seconds - 1) * scale.sessions * round(0.67 * scale.subjects)
    batches = -(-windows // scale.batch_size)
    saved = int(0.7 * scale.epochs * batches) // scale.checkpoint_steps * scale.checkpoint_steps
    assert 0 < scale.lost_steps < scale.checkpoint_steps - 1
    assert 5 < (saved + scale.lost_steps) % batches < batches - 5
    assert saved + scale.checkpoint_steps < scale.epochs * batches
