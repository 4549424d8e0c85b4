"""mp3 files: exact frames although libsndfile cannot seek, exact lengths although it may guess, and no lost ends."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
from numpy.typing import NDArray

from penstock.core.errors import SourceError
from penstock.source.audio.file import AudioFile
from penstock.source.audio.mp3 import count_frames

ID3V2 = b"ID3\x04\x00\x00\x00\x00\x02\x01" + b"x" * 257  # seven bits of each byte of the size count
ID3V1 = b"TAG" + b"y" * 125


def write(path: Path, n_frames: int, *, rate: int = 16_000, channels: int = 1, **options: Any) -> NDArray[np.float32]:
    """Write noise of changing loudness, which needs more bits at some times than at others; return what is decoded."""
    rng = np.random.default_rng(n_frames)
    loud = np.abs(np.sin(np.arange(n_frames) / 9000))[:, np.newaxis]
    soundfile.write(path, rng.normal(size=(n_frames, channels)) / 8 * loud, rate, **options)
    return read(path)


def read(path: Path) -> NDArray[np.float32]:
    return soundfile.read(path, dtype="float32", always_2d=True)[0]


def frame_starts(content: bytes) -> list[int]:
    """Return where the frames of a file of constant bit rate begin, and where the last one ends."""
    found = [0]
    while (at := content.find(content[:2], found[-1] + 40)) >= 0:
        found.append(at)
    return [*found, len(content)]


@pytest.mark.parametrize(("rate", "channels"), [(16_000, 1), (44_100, 2), (8000, 1)])
def test_slices_in_any_order_are_those_of_the_whole_file(tmp_path: Path, rate: int, channels: int) -> None:
    whole = write(tmp_path / "a.mp3", 100_000, rate=rate, channels=channels)
    file = AudioFile(tmp_path / "a.mp3")
    assert (file.container, file.seekable, file.stored_shape) == ("MP3", False, (100_000, channels))
    for start in (50_000, 0, 99_000, 98_999, 50_000, 1151):
        np.testing.assert_array_equal(file[start : start + 1000], whole[start : start + 1000])
    np.testing.assert_array_equal(file[0:100_000], whole)
    file.close()


@pytest.mark.parametrize("whole", [True, False])
def test_a_file_cut_at_the_border_of_a_frame_is_truncated_too(tmp_path: Path, whole: bool) -> None:
    write(tmp_path / "a.mp3", 80_000, rate=44_100, bitrate_mode="CONSTANT", compression_level=0.1)
    content = (tmp_path / "a.mp3").read_bytes()
    starts = frame_starts(content)
    assert len(starts) > 60
    for cut in starts[3:-3:7]:
        (tmp_path / "b.mp3").write_bytes(content[:cut])
        with pytest.raises(SourceError, match=r"b\.mp3 is damaged or truncated: it should have 80000 frames, but has"):
            AudioFile(tmp_path / "b.mp3", whole=whole)


def test_a_file_without_a_header_has_the_frames_that_can_be_decoded(tmp_path: Path) -> None:
    write(tmp_path / "a.mp3", 80_000, rate=44_100, bitrate_mode="CONSTANT", compression_level=0.1)
    content = (tmp_path / "a.mp3").read_bytes()
    (tmp_path / "b.mp3").write_bytes(ID3V2 + content[frame_starts(content)[1] :])
    whole = read(tmp_path / "b.mp3")
    assert soundfile.info(tmp_path / "b.mp3").frames > len(whole) > 80_000  # libsndfile counts the tag as audio
    file = AudioFile(tmp_path / "b.mp3")
    assert len(file) == len(whole)
    np.testing.assert_array_equal(file[0 : len(whole)], whole)
    file.close()


def test_a_file_of_varying_bit_rate_without_a_header_is_refused_because_its_end_is_out_of_reach(tmp_path: Path) -> None:
    write(tmp_path / "a.mp3", 400_000, bitrate_mode="VARIABLE")
    content = (tmp_path / "a.mp3").read_bytes()
    # The first frame is the header; a frame that is as large as the loudest comes first.
    at = content.find(content[:2], 40)
    n_frames = count_frames(content).n_audio_frames
    starts = [at]
    while (found := content.find(content[:2], starts[-1] + 40)) >= 0:
        starts.append(found)
    sizes = np.diff(starts)
    largest = int(np.argmax(sizes))
    (tmp_path / "b.mp3").write_bytes(content[starts[largest] : starts[largest + 1]] + content[at:])
    if soundfile.info(tmp_path / "b.mp3").frames > n_frames * 0.9:
        pytest.fail("the test file must make libsndfile guess too few frames")
    with pytest.raises(SourceError, match="its bit rate varies, and it has no Xing header"):
        AudioFile(tmp_path / "b.mp3")


def test_tags_before_and_after_the_frames_are_no_audio(tmp_path: Path) -> None:
    whole = write(tmp_path / "a.mp3", 20_000)
    content = (tmp_path / "a.mp3").read_bytes()
    (tmp_path / "b.mp3").write_bytes(ID3V2 + content + ID3V1)
    file = AudioFile(tmp_path / "b.mp3")
    np.testing.assert_array_equal(file[0:20_000], whole)
    file.close()
    assert count_frames(ID3V2 + content + ID3V1) == count_frames(content)


def test_bytes_between_frames_that_are_no_frame_are_damage(tmp_path: Path) -> None:
    write(tmp_path / "a.mp3", 80_000, rate=44_100, bitrate_mode="CONSTANT", compression_level=0.1)
    content = (tmp_path / "a.mp3").read_bytes()
    starts = frame_starts(content)
    damaged = content[: starts[9]] + b"\0\0" + content[starts[9] + 2 :]
    (tmp_path / "b.mp3").write_bytes(damaged)
    with pytest.raises(SourceError, match=rf"no frame of layer III begins at byte {starts[9]}"):
        AudioFile(tmp_path / "b.mp3")
