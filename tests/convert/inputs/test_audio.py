"""Windows of audio files: exact to the frame in every format, resampled as the whole would be; damage is found."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy.signal import resample_poly

from penstock.convert.inputs.audio import AudioInput, ClipInput
from penstock.core.errors import MissingDependency, OptionError, ReadError, SourceError
from penstock.source.audio.file import find_audio_files

FORMATS = ["wav", "flac", "ogg", "mp3"]


def sound(n_frames: int, channels: int = 2) -> NDArray[np.float64]:
    walk = np.cumsum(np.random.default_rng(n_frames).normal(size=(n_frames, channels)), axis=0)
    return 0.9 * walk / np.abs(walk).max()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("audio")


@pytest.fixture(scope="module")
def written(folder: Path) -> Callable[..., tuple[Path, NDArray[np.float32]]]:
    def write(name: str, n_frames: int, *, rate: int = 8000, channels: int = 2, **options: Any) -> Any:
        """Write a file; return its path, and what it holds, decoded from beginning to end."""
        (folder / "left ear").mkdir(exist_ok=True)
        path = folder / "left ear" / name
        soundfile.write(path, sound(n_frames, channels), rate, **options)
        whole, _ = soundfile.read(path, dtype="float32", always_2d=True)
        assert whole.shape == (n_frames, channels)
        return path, whole

    return write


# -- which frames ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("extension", FORMATS)
@pytest.mark.parametrize("overlap", [0.0, 0.5, 0.99])
def test_windows_are_exact_to_the_frame(written, all_samples, extension, overlap):
    path, whole = written(f"a.{extension}", 20_123)
    found = all_samples(AudioInput(path, 0.5, overlap))
    starts = range(0, 20_123 - 3999, {0.0: 4000, 0.5: 2000, 0.99: 40}[overlap])
    assert len(found) == len(starts)
    for start, (fields, metadata) in zip(starts, found, strict=True):
        assert fields["audio"].dtype == np.float32
        np.testing.assert_array_equal(fields["audio"], whole[start : start + 4000])
        assert metadata == {
            "file": f"a.{extension}",
            "folder": "left ear",
            "start_time": start / 8000,
            "stop_time": (start + 4000) / 8000,
            "sample_rate_hz": 8000,
        }


@pytest.mark.parametrize("subtype", ["VORBIS", "OPUS"])
def test_windows_of_long_ogg_files_are_exact_in_any_order(written, subtype):
    # Three blocks of 2¹⁷ frames, and a short one at the end, where libsndfile's own seeks go wrong.
    path, whole = written("long.ogg", 395_216, rate=48_000, channels=8, format="OGG", subtype=subtype)
    recording = AudioInput(path, 0.01).open()
    numbers = np.array([820, 3, 600, 822, 819, 0])
    for number, (fields, _) in zip(numbers.tolist(), recording.samples(numbers), strict=True):
        np.testing.assert_array_equal(fields["audio"], whole[480 * number : 480 * (number + 1)])
    recording.close()


@pytest.mark.parametrize("subtype", ["PCM_U8", "PCM_16", "PCM_24", "PCM_32", "FLOAT", "DOUBLE"])
def test_values_of_every_width_become_float32(written, all_samples, subtype):
    path, _ = written("w.wav", 900, rate=900, channels=1, subtype=subtype)
    ((fields, _),) = all_samples(AudioInput(path))
    digits = {"PCM_U8": 1 / 100, "PCM_16": 2**-15}.get(subtype, 2**-22)
    np.testing.assert_allclose(fields["audio"], sound(900, 1), atol=digits)
    recording = AudioInput(path).open()
    assert recording.about["subtype"] == subtype
    assert [note for note in recording.notes if "float32 keeps 24 bits" in note] == list(recording.notes)
    assert bool(recording.notes) == (subtype in ("PCM_32", "DOUBLE"))
    recording.close()


def test_mono_is_the_mean_of_the_channels(written, all_samples):
    path, whole = written("m.wav", 2000, channels=3)
    found = np.concatenate([fields["audio"] for fields, _ in all_samples(AudioInput(path, 0.05, channels="mono"))])
    assert found.shape == (2000, 1)
    np.testing.assert_allclose(found[:, 0], whole.astype(np.float64).mean(axis=1), rtol=0, atol=1e-7)


@pytest.mark.parametrize("extension", FORMATS)
@pytest.mark.parametrize("rate", [16_000, 2_000, 7_350, 11_025.0])
def test_resampled_windows_are_slices_of_the_whole_resampled_file(written, all_samples, extension, rate):
    path, whole = written(f"r.{extension}", 20_001)
    found = all_samples(AudioInput(path, 0.2, 0.5, rate_hz=rate))
    up, down = {16_000: (2, 1), 2_000: (1, 4), 7_350: (147, 160), 11_025.0: (441, 320)}[rate]
    expected = resample_poly(whole.astype(np.float64), up, down, axis=0)
    length = round(0.2 * rate)
    step = max(1, round(length * 0.5))
    assert len(found) == (len(expected) - length) // step + 1
    for number, (fields, metadata) in enumerate(found):
        start = number * step
        assert fields["audio"].shape == (length, 2)
        np.testing.assert_allclose(fields["audio"], expected[start : start + length], rtol=0, atol=1e-6)
        assert metadata["sample_rate_hz"] == rate
        assert metadata["start_time"] == start / rate


@given(
    n_frames=st.integers(1, 4000),
    frames=st.integers(1, 300),
    overlap=st.sampled_from([0.0, 0.5, 0.99]),
    data=st.data(),
)
def test_every_frame_is_in_the_windows_that_hold_it(folder, n_frames, frames, overlap, data):
    path = folder / "count.wav"
    counted = np.arange(n_frames, dtype=np.int16)
    soundfile.write(path, counted, 1000, subtype="PCM_16")
    if n_frames < frames:
        with pytest.raises(SourceError, match=rf"lasts {n_frames / 1000:.6g} s .* and a window {frames / 1000:.6g} s"):
            AudioInput(path, frames / 1000, overlap).open()
        return
    recording = AudioInput(path, frames / 1000, overlap).open()
    step = max(1, round(frames * (1 - overlap)))
    starts = [start for start in range(0, n_frames, step) if start + frames <= n_frames]
    assert recording.n_samples == len(starts)
    numbers = np.array(data.draw(st.lists(st.integers(0, len(starts) - 1), min_size=1, max_size=8)))
    for number, (fields, _) in zip(numbers.tolist(), recording.samples(numbers), strict=True):
        rows = counted[starts[number] : starts[number] + frames]
        np.testing.assert_array_equal(fields["audio"][:, 0] * 2**15, rows)
    np.testing.assert_allclose(recording.span(numbers)[:, 0] * 1000, [starts[number] for number in numbers])
    left_out = n_frames - starts[-1] - frames
    assert [f"{left_out / 1000:.6g} s ({left_out} frames)" in note for note in recording.notes] == [True] * (
        left_out > 0
    )
    recording.close()


def test_about_and_notes_describe_the_file(written):
    path, _ = written("k.flac", 20_000)
    recording = AudioInput(path, 1.0, rate_hz=16_000).open()
    assert recording.about == {
        "format": "audio",
        "container": "FLAC",
        "subtype": "PCM_16",
        "shape": [20_000, 2],
        "dtype": "float32",
        "rate_hz": 8000,
        "window_frames": 16_000,
        "window_rate_hz": 16_000,
    }
    assert recording.notes == ["The last 0.5 s (8000 frames) are left out: too short for a window."]
    assert recording.span(np.array([1])).tolist() == [[1.0, 2.0]]
    recording.close()


# -- whole clips ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("extension", FORMATS)
def test_a_clip_is_the_whole_file_at_its_own_length(written, all_samples, extension):
    for n_frames in (1, 4321, 30_000):
        path, whole = written(f"c{n_frames}.{extension}", n_frames)
        ((fields, metadata),) = all_samples(ClipInput(path))
        np.testing.assert_array_equal(fields["audio"], whole)
        assert metadata == {
            "file": path.name,
            "folder": "left ear",
            "start_time": 0.0,
            "stop_time": n_frames / 8000,
            "sample_rate_hz": 8000,
            "n_frames": n_frames,
        }


def test_clips_of_a_fixed_length_are_cropped_or_padded_at_their_end(written, all_samples):
    short, whole = written("short.wav", 3000)
    ((fields, metadata),) = all_samples(ClipInput(short, clip_seconds=0.5))
    assert (fields["audio"].shape, fields["audio"].dtype, metadata["n_frames"]) == ((4000, 2), np.float32, 3000)
    np.testing.assert_array_equal(fields["audio"][:3000], whole)
    assert not fields["audio"][3000:].any()
    assert metadata["stop_time"] == 3000 / 8000
    long, whole = written("long.wav", 4800)
    ((fields, metadata),) = all_samples(ClipInput(long, clip_seconds=0.5))
    np.testing.assert_array_equal(fields["audio"], whole[:4000])
    recording = ClipInput(long, clip_seconds=0.5).open()
    assert recording.notes == ["The end of the clip is left out: it is longer than clip_seconds."]
    recording.close()


def test_clips_are_resampled_before_they_are_cropped_or_padded(written, all_samples):
    path, whole = written("r.wav", 3000, channels=3)
    resampled = resample_poly(whole.astype(np.float64).mean(axis=1), 1, 2)
    for n_frames in (1000, 2000):
        given = ClipInput(path, clip_seconds=n_frames / 4000, rate_hz=4000, channels="mono")
        ((fields, metadata),) = all_samples(given)
        kept = min(n_frames, 1500)
        assert (fields["audio"].shape, metadata["n_frames"]) == ((n_frames, 1), kept)
        np.testing.assert_allclose(fields["audio"][:kept, 0], resampled[:kept], rtol=0, atol=1e-6)
        assert not fields["audio"][kept:].any()


@pytest.mark.parametrize("make", [AudioInput, ClipInput])
def test_files_shorter_than_the_minimum_have_no_items_and_say_so(written, make):
    for n_frames, count in ((7999, 0), (8000, 1)):
        path, _ = written(f"m{n_frames}.wav", n_frames)
        recording = make(path, min_seconds=1.0).open()
        assert recording.n_samples == count
        assert recording.notes == ([] if count else ["It is shorter than 1.0 s (min_seconds)."])
        recording.close()


# -- what is broken ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("extension", FORMATS)
def test_a_file_cut_anywhere_is_refused(written, tmp_path, extension):
    path, _ = written(f"t.{extension}", 40_000)
    whole = path.read_bytes()
    for cut in [0, 3, 11, 30, 60, *range(100, len(whole), len(whole) // 15), len(whole) - 1]:
        (tmp_path / path.name).write_bytes(whole[:cut])
        with pytest.raises((SourceError, ReadError), match=rf"t\.{extension}"):
            AudioInput(tmp_path / path.name).open()


@pytest.mark.parametrize("extension", ["flac", "ogg"])
def test_damaged_bytes_are_found(written, tmp_path, extension):
    path, _ = written(f"d.{extension}", 40_000)
    whole = bytearray(path.read_bytes())
    whole[len(whole) // 2] ^= 0x10
    (tmp_path / path.name).write_bytes(whole)
    with pytest.raises((SourceError, ReadError), match=rf"d\.{extension}"):
        read_all(tmp_path / path.name)


def test_damaged_bytes_of_an_ogg_file_are_found_when_it_is_opened(written, tmp_path):
    path, _ = written("d.ogg", 40_000)
    whole = path.read_bytes()
    for at in range(1, len(whole), len(whole) // 30):
        damaged = bytearray(whole)
        damaged[at] ^= 0x01
        (tmp_path / "d.ogg").write_bytes(damaged)
        with pytest.raises(SourceError, match=r"d\.ogg"):
            AudioInput(tmp_path / "d.ogg").open()


def read_all(path: Path) -> None:
    recording = AudioInput(path).open()
    try:
        list(recording.samples(np.arange(recording.n_samples)))
    finally:
        recording.close()


@pytest.mark.parametrize("edit", ["RF64", "RIFF", "unknown"])
def test_headers_of_wav_files_are_believed_as_far_as_they_go(written, tmp_path, all_samples, edit):
    path, whole = written("h.wav", 9000, format="RF64" if edit == "RF64" else "WAV", subtype="PCM_16")
    data = bytearray(path.read_bytes())
    if edit == "unknown":  # as a program writes it that does not know how long it will go on
        at = data.index(b"data")
        data[4:8] = data[at + 4 : at + 8] = b"\xff" * 4
    (tmp_path / "h.wav").write_bytes(data)
    found = all_samples(AudioInput(tmp_path / "h.wav", 0.125))
    np.testing.assert_array_equal(np.concatenate([fields["audio"] for fields, _ in found]), whole)
    if edit != "unknown":
        (tmp_path / "h.wav").write_bytes(data[:-1000])
        with pytest.raises(SourceError, match=r"36000 bytes of audio, but has 35000"):
            AudioInput(tmp_path / "h.wav").open()


def test_a_file_that_becomes_shorter_is_an_error_that_names_frames(written, tmp_path):
    path, _ = written("s.wav", 900_000, rate=8000)  # 7 MB: two blocks
    copy = tmp_path / "s.wav"
    copy.write_bytes(path.read_bytes())
    recording = AudioInput(copy).open()
    assert len(list(recording.samples(np.array([0])))) == 1
    with copy.open("r+b") as file:
        file.truncate(1_000_000)
    with pytest.raises(ReadError, match=r"frames \d+–899999 of .*s\.wav"):
        list(recording.samples(np.array([111])))
    recording.close()
    recording = AudioInput(path).open()
    recording.close()
    with pytest.raises(ReadError, match=r"s\.wav"):
        list(recording.samples(np.array([0])))


def test_a_file_that_is_not_audio_is_refused(written, tmp_path):
    with pytest.raises(ReadError, match="Could not open"):
        AudioInput(tmp_path / "none.wav").open()
    with pytest.raises(SourceError, match="must be a regular file"):
        AudioInput(tmp_path).open()
    (tmp_path / "a.wav").write_text("this is text, and long enough for a header of a wav file, is it not?")
    with pytest.raises(SourceError, match="must be a readable audio file"):
        AudioInput(tmp_path / "a.wav").open()
    soundfile.write(tmp_path / "a.aiff", sound(2000), 1000)
    with pytest.raises(SourceError, match="must be a wav, flac, ogg or mp3 file, got AIFF"):
        AudioInput(tmp_path / "a.aiff").open()
    soundfile.write(tmp_path / "b.wav", np.empty((0, 2)), 1000)
    with pytest.raises(SourceError, match="0 frames"):
        AudioInput(tmp_path / "b.wav").open()
    path, _ = written("short.wav", 2000)
    with pytest.raises(SourceError, match=r"at least one frame, but window_seconds=1e-05 has none at 8000 Hz"):
        AudioInput(path, 1e-5).open()


@pytest.mark.parametrize(
    "options",
    [
        *({"window_seconds": value} for value in (0, -1.0, np.nan, np.inf, "1", True)),
        *({"rate_hz": value} for value in (0, -1.0, np.nan, "1")),
        *({"overlap": value} for value in (1, -0.5, 2.0)),
        {"channels": "left"},
        {"min_seconds": 0},
    ],
    ids=str,
)
def test_invalid_options_are_refused_at_once(options):
    with pytest.raises(OptionError, match=f"^{next(iter(options))}( must be |=)"):
        AudioInput(Path("a.wav"), **options)


def test_without_soundfile_the_error_says_what_to_install(written, monkeypatch):
    path, _ = written("x.wav", 2000)
    monkeypatch.setitem(sys.modules, "soundfile", None)
    with pytest.raises(MissingDependency, match=r"pip install 'penstock\[audio\]'"):
        AudioInput(path).open()


# -- folders -----------------------------------------------------------------------------------------------------------


def test_audio_files_of_a_folder_are_found_at_any_depth_and_in_order(tmp_path):
    names = [
        "b/2.WAV",
        "b/10.wav",
        "a.Flac",
        "c/d/e.ogg",
        "c/d.wav/inner.wav",
        "notes.txt",
        "b/.hidden.wav",
        ".x/y.wav",
    ]
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    found = [str(path.relative_to(tmp_path)) for path in find_audio_files(tmp_path)]
    assert found == ["a.Flac", "b/10.wav", "b/2.WAV", "c/d/e.ogg", "c/d.wav/inner.wav"]
    assert find_audio_files(tmp_path / "c" / "d") == [tmp_path / "c" / "d" / "e.ogg"]
    with pytest.raises(SourceError, match="no folder"):
        find_audio_files(tmp_path / "none")
