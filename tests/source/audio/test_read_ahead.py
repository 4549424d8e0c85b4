"""Reading ahead from audio files, and giving their pages back."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
from penstock_hint_checks import (
    Range,
    check_given_back,
    check_kept,
    check_read_ahead,
    check_something_missing,
    wait_for,
)
from penstock_page_cache import cached_pages
from penstock_special_files import plant

from penstock import ReadError
from penstock.source.audio.source import AudioSource

_RATE, _WINDOW, _WINDOWS = 16_000, 1 << 15, 160
_BYTES = 4 * _WINDOW  # of a window of two channels of 16 bits: 20 MB in all
_HEADER = 44
_ITEMS = np.array([1, 0, 159, 1])


@pytest.fixture(scope="module")
def frames() -> np.ndarray:
    """Noise, which does not compress."""
    return np.random.default_rng(0).integers(-(2**15), 2**15, (_WINDOW * _WINDOWS, 2), np.int16)


def open_source(path: Path, **options: Any) -> AudioSource:
    return AudioSource([path], window_frames=_WINDOW, channels="keep", **options)


def windows(path: Path, items: Any) -> list[Range]:
    return [(path, _HEADER + item * _BYTES, _HEADER + (item + 1) * _BYTES) for item in items]


def test_the_frames_of_a_wav_file_are_read_ahead_and_given_back(tmp_path: Path, frames: np.ndarray) -> None:
    path = tmp_path / "a.wav"
    soundfile.write(path, frames, _RATE)
    source = open_source(path)
    before = source.take(_ITEMS)["audio"]
    check_read_ahead(tmp_path, lambda: source.prepare(_ITEMS), windows(path, [0, 1, 159]))
    assert (source.take(_ITEMS)["audio"] == before).all()
    assert wait_for(lambda: source.prepare(_ITEMS) == 0)
    check_given_back(lambda: source.release(_ITEMS), windows(path, [0, 1, 159]))
    assert (source.take(_ITEMS)["audio"] == before).all()
    assert source.stored_bytes == path.stat().st_size


def test_resampling_needs_frames_beside_a_window(tmp_path: Path, frames: np.ndarray) -> None:
    path = tmp_path / "a.wav"
    soundfile.write(path, frames, _RATE)
    source = open_source(path, rate_hz=_RATE // 2)  # half as many windows, of twice the bytes
    begin = _HEADER + 2 * _BYTES
    wanted = [(path, begin - 4 * 10, begin + 2 * _BYTES + 4 * 10)]
    check_read_ahead(tmp_path, lambda: source.prepare(np.array([1])), wanted)
    check_given_back(lambda: source.release(np.array([1])), [(path, begin + 4096, begin + 2 * _BYTES - 4096)])
    beside = [(path, _HEADER, begin), (path, begin, begin + 1)]
    check_kept(lambda: source.take(np.arange(2)), lambda: source.release(np.array([1])), beside)


def test_a_part_of_a_flac_file_is_read_ahead(tmp_path: Path, frames: np.ndarray) -> None:
    path = tmp_path / "a.flac"
    soundfile.write(path, frames, _RATE)
    source = open_source(path)
    n_bytes = path.stat().st_size
    window = n_bytes // _WINDOWS
    ends = [(path, 0, 1), (path, n_bytes - 1, n_bytes)]
    items = np.array([40, 41])
    check_read_ahead(tmp_path, lambda: source.prepare(items), [(path, 39 * window, 43 * window), *ends])
    found = source.take(items)["audio"]
    assert (found[0] * 2**15 == frames[40 * _WINDOW : 41 * _WINDOW]).all()
    # Where they lie is not known exactly.
    check_kept(lambda: source.take(items), lambda: source.release(items), [(path, 41 * window, 41 * window + 1)])
    everything = np.arange(_WINDOWS)
    check_given_back(lambda: source.release(everything), [(path, 0, n_bytes)])
    assert (source.take(items)["audio"] == found).all()


@pytest.mark.parametrize("suffix", ["ogg", "mp3"])
def test_files_that_are_decoded_from_their_beginning_are_read_whole(
    tmp_path: Path, frames: np.ndarray, suffix: str
) -> None:
    paths = [tmp_path / f"{name}.{suffix}" for name in "ab"]
    for path in paths:
        soundfile.write(path, frames[: 4 * _WINDOW], _RATE)
    source = AudioSource(paths, window_frames=_WINDOW)
    last = int(source.index.locate(np.array([len(source.index) - 1]))[0][0])
    assert last == 1
    check_read_ahead(tmp_path, lambda: source.prepare(np.array([0])), [(paths[0], 0, paths[0].stat().st_size)])
    assert not cached_pages(paths[1]).any()


def test_thousands_of_files_are_not_all_opened(tmp_path: Path, frames: np.ndarray, monkeypatch: Any) -> None:
    for number in range(3):
        soundfile.write(tmp_path / f"{number}.wav", frames[:100], _RATE)
    source = AudioSource([tmp_path / f"{number % 3}.wav" for number in range(600)])
    opened = []
    real = os.open
    monkeypatch.setattr(os, "open", lambda path, *rest: (opened.append(path), real(path, *rest))[1])
    source.prepare(np.arange(600))
    assert 0 < len(opened) <= 512


def truncate(path: Path) -> None:
    os.truncate(path, 1000)


def replace(path: Path) -> None:
    path.with_suffix(".other").write_bytes(b"RIFF" + bytes(5000))
    path.with_suffix(".other").replace(path)


@pytest.mark.parametrize("fault", [truncate, Path.unlink, replace])
@pytest.mark.parametrize("suffix", ["wav", "flac", "ogg"])
def test_a_file_that_changes_raises_what_it_did_before_when_it_is_read(
    tmp_path: Path, frames: np.ndarray, suffix: str, fault: Callable[[Path], None]
) -> None:
    messages = []
    for is_prepared in (False, True):
        path = tmp_path / f"a.{suffix}"
        soundfile.write(path, frames[: 2 * _WINDOW], _RATE)
        source = open_source(path)
        fault(path)
        if is_prepared:
            assert source.prepare(np.array([0, 1])) >= 0
            source.release(np.array([0, 1]))
        with pytest.raises(ReadError) as caught:
            source.take(np.array([0, 1]))
        messages.append(str(caught.value))
    assert messages[0] == messages[1]


def test_a_fifo_in_place_of_a_file_does_not_block(tmp_path: Path, frames: np.ndarray) -> None:
    path = tmp_path / "a.wav"
    soundfile.write(path, frames[:_WINDOW], _RATE)
    source = open_source(path)
    with plant("fifo", path):
        assert source.prepare(np.array([0])) == 0
        source.release(np.array([0]))


def test_a_compressed_wav_file_is_estimated(tmp_path: Path, frames: np.ndarray) -> None:
    path = tmp_path / "a.wav"
    soundfile.write(path, frames[: 20 * _WINDOW + 77], _RATE, subtype="MS_ADPCM")
    source = open_source(path)
    before = source.take(np.array([10]))["audio"]
    check_something_missing(tmp_path, lambda: source.prepare(np.array([10])))
    source.release(np.array([10]))
    assert all((a == b).all() for a, b in zip(source.take(np.array([10]))["audio"], before, strict=True))
