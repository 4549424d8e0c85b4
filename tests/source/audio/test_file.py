"""One audio file: what is found out by looking at its ends, and what only by reading it.

How frames are cut and resampled, and damage found when a file is opened: tests/convert/inputs/test_audio.py.
"""

from pathlib import Path

import numpy as np
import pytest
import soundfile

from penstock.core.errors import ReadError, SourceError
from penstock.core.types import Span
from penstock.source import chunked_rows
from penstock.source.audio import file as audio_file
from penstock.source.audio import source as audio
from penstock.source.audio.file import AudioFile
from penstock.source.audio.source import AudioSource


def noise(path: Path, n_frames: int) -> Path:
    soundfile.write(path, np.random.default_rng(1).normal(size=n_frames) / 8, 8000)
    return path


@pytest.mark.parametrize("extension", ["wav", "flac", "ogg", "mp3"])
def test_a_file_has_its_size_and_whether_it_is_seekable(tmp_path, extension):
    path = noise(tmp_path / f"a.{extension}", 3000)
    for whole in (True, False):
        file = AudioFile(path, whole=whole)
        assert (file.n_bytes, len(file), file.stored_shape) == (path.stat().st_size, 3000, (3000, 1))
        assert file.seekable == (extension not in ("ogg", "mp3"))
        assert file[5:5].shape == (0, 1)
        file.close()


def test_checking_the_last_page_finds_every_truncation_of_an_ogg_file_but_no_damage_within(tmp_path):
    whole = noise(tmp_path / "a.ogg", 20_000).read_bytes()
    for cut in range(200, len(whole), len(whole) // 60):
        (tmp_path / "b.ogg").write_bytes(whole[:cut])
        with pytest.raises(SourceError, match=r"b\.ogg is damaged or truncated: its last page is missing or damaged"):
            AudioFile(tmp_path / "b.ogg", whole=False)
    damaged = bytearray(whole)
    damaged[len(whole) // 2] ^= 1
    (tmp_path / "b.ogg").write_bytes(damaged)
    AudioFile(tmp_path / "b.ogg", whole=False).close()
    with pytest.raises(SourceError, match=r"b\.ogg is damaged .* does not match its checksum"):
        AudioFile(tmp_path / "b.ogg")


def page(payload: bytes, *, last: bool) -> bytes:
    """A page of an ogg stream, with the checksum computed bit by bit."""
    head = b"OggS" + bytes([0, 4 if last else 0]) + bytes(8) + b"ABCD" + bytes(4)
    rest = bytes([1, len(payload)]) + payload
    register = 0
    for byte in head + bytes(4) + rest:
        register ^= byte << 24
        for _ in range(8):
            register = (register << 1 ^ (0x104C11DB7 if register & 1 << 31 else 0)) & 0xFFFFFFFF
    return head + register.to_bytes(4, "little") + rest


@pytest.mark.parametrize("payload", [b"sound", b"OggS", b"soundOggS\x00\x04", page(b"OggS", last=True)[:-1]])
def test_a_page_that_contains_the_magic_bytes_of_a_page_is_one_page(tmp_path, payload):
    (tmp_path / "a.ogg").write_bytes(page(b"first", last=False) + page(payload, last=True))
    with (tmp_path / "a.ogg").open("rb") as file:
        audio_file._check_ogg_end(file, (tmp_path / "a.ogg").stat().st_size)
    (tmp_path / "a.ogg").write_bytes(page(b"first", last=False) + page(payload, last=False))
    with (tmp_path / "a.ogg").open("rb") as file:
        with pytest.raises(ValueError, match="last page"):
            audio_file._check_ogg_end(file, (tmp_path / "a.ogg").stat().st_size)


@pytest.mark.parametrize("extension", ["flac", "ogg"])
def test_damage_in_the_middle_is_a_read_error_that_names_the_file(tmp_path, extension):
    soundfile.write(tmp_path / f"a.{extension}", np.arange(40) / 80, 8000)
    whole = bytearray(noise(tmp_path / f"b.{extension}", 40_000).read_bytes())
    whole[len(whole) // 2] ^= 0x10
    (tmp_path / f"b.{extension}").write_bytes(whole)
    source = AudioSource(tmp_path, window_frames=4000)
    assert len(source.take(np.array([0]))["audio"][0]) == 40
    with pytest.raises(ReadError, match=rf"b\.{extension}"):
        source.read(Span(0, len(source.index)))
    assert len(source.take(np.array([0]))["audio"][0]) == 40


@pytest.mark.parametrize("rate", [None, 12_000])
def test_windows_of_a_long_ogg_file_are_exact_in_any_order(tmp_path, monkeypatch, rate):
    path = noise(tmp_path / "a.ogg", 100_000)
    whole = AudioSource(path, rate_hz=rate).take(np.array([0]))["audio"][0]
    if rate is None:
        np.testing.assert_array_equal(whole, soundfile.read(path, dtype="float32", always_2d=True)[0])
    monkeypatch.setattr(chunked_rows, "_GROUP_BYTES", 1 << 16)
    monkeypatch.setattr(audio, "_CACHE_BYTES", 1 << 17)
    source = AudioSource(path, window_frames=1000, rate_hz=rate)
    for item in [99, 3, 50, 51, 17, 98, 0, 16]:
        found = source.take(np.array([item]))["audio"][0]
        np.testing.assert_array_equal(found, whole[1000 * item : 1000 * (item + 1)])
    source.close()


@pytest.mark.parametrize("extension", ["wav", "flac"])
def test_windows_that_are_found_by_seeking_are_exact_in_any_order(tmp_path, extension):
    path = noise(tmp_path / f"a.{extension}", 60_001)  # fifteen frames of flac
    whole, _ = soundfile.read(path, dtype="float32", always_2d=True)
    source = AudioSource(path, window_frames=777)
    for item in np.random.default_rng(2).permutation(len(source.index)).tolist():
        found = source.take(np.array([item]))["audio"][0]
        np.testing.assert_array_equal(found, whole[777 * item : 777 * (item + 1)])
    source.close()
