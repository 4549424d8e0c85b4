"""`penstock convert` on clips of different lengths: whole clips, a fixed length, and short clips that are skipped."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
from typer.testing import CliRunner

from penstock import TarSource
from penstock.cli import app

LENGTHS = {"ann_yes_0": 700, "ann_no_0": 40, "bob_yes_0": 1300, "bob_no_0": 900, "cat_yes_0": 30, "cat_no_0": 1000}


@pytest.fixture
def clips(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Clips at 1000 Hz; value = 1000 x clip + frame, in steps of 16-bit integers."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "clips").mkdir()
    for number, (name, n_frames) in enumerate(sorted(LENGTHS.items())):
        frames = (1000 * number + np.arange(n_frames)).astype(np.int16)
        soundfile.write(tmp_path / "clips" / f"{name}.wav", frames, 1000, subtype="PCM_16")
    return tmp_path


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["convert", *arguments])


def items(folder: Path) -> list[tuple[str, list[int]]]:
    """Return the file of each item, and its frames as integers."""
    source = TarSource(folder)
    block = source.take(np.arange(len(source.index)))
    source.close()
    frames = [np.rint(audio[:, 0] * 2**15).astype(int).tolist() for audio in block["audio"]]
    return [(about["file"], found) for about, found in zip(block["metadata"], frames, strict=True)]


def test_whole_clips_keep_their_own_lengths(clips: Path) -> None:
    done = run("clips", "-o", "out", "--clips")
    assert done.exit_code == 0, done.output
    expected = [
        (f"{name}.wav", list(range(1000 * number, 1000 * number + n_frames)))
        for number, (name, n_frames) in enumerate(sorted(LENGTHS.items()))
    ]
    assert items(clips / "out") == expected


def test_short_clips_are_skipped_and_counted_and_the_others_cropped_or_padded(clips: Path) -> None:
    done = run("clips", "-o", "out", "--clips", "--clip-seconds", "0.95", "--min-seconds", "0.05")
    assert done.exit_code == 0, done.output
    assert "4 items in 1 shard" in done.output
    skipped = "Skipped 2 inputs (ann_no_0.wav, cat_yes_0.wav): It is shorter than 0.05 s (--min-seconds)."
    assert skipped in done.output
    assert "Converted 4 of 6 inputs" in done.output
    assert items(clips / "out") == [
        ("ann_yes_0.wav", [*range(1000, 1700), *[0] * 250]),
        ("bob_no_0.wav", [*range(2000, 2900), *[0] * 50]),
        ("bob_yes_0.wav", [*range(3000, 3950)]),
        ("cat_no_0.wav", [*range(4000, 4950)]),
    ]


def test_a_minimum_skips_files_that_are_shorter_than_a_window(clips: Path) -> None:
    assert run("clips", "-o", "out", "--window-seconds", "0.7").exit_code == 1
    done = run("clips", "-o", "out", "--window-seconds", "0.7", "--min-seconds", "0.7", "--split", "a=0.5,b=0.5")
    assert done.exit_code == 0, done.output
    found = items(clips / "out" / "a") + items(clips / "out" / "b")
    assert sorted(found) == [
        (f"{name}.wav", list(range(1000 * number, 1000 * number + 700)))
        for number, (name, n_frames) in enumerate(sorted(LENGTHS.items()))
        if n_frames >= 700
    ]


def test_a_minimum_that_skips_everything_is_an_error(clips: Path) -> None:
    done = run("clips", "-o", "out", "--clips", "--min-seconds", "9")
    assert done.exit_code == 2
    assert "At least one input must have items" in done.output
    assert not (clips / "out").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--clips", "--window-seconds", "2"], "--window-seconds applies only to windows of audio inputs"),
        (
            ["--clips", "--overlap", "0.5"],
            "--overlap applies only to NWB or npy or npz or zarr or windows of audio inputs",
        ),
        (["--clip-seconds", "2"], "--clip-seconds needs --clips, got --clip-seconds 2.0"),
    ],
)
def test_options_that_contradict_each_other_are_refused(clips: Path, options: list[str], message: str) -> None:
    done = run("clips", "-o", "out", *options)
    assert done.exit_code == 2
    assert message in done.output


def test_options_of_audio_are_refused_for_other_inputs(clips: Path) -> None:
    np.save(clips / "rows.npy", np.arange(4))
    done = run("rows.npy", "-o", "out", "--min-seconds", "2")
    assert done.exit_code == 2
    assert "--min-seconds applies only to audio inputs, and there are none" in done.output
