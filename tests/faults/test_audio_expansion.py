"""Sounds that expand when they are read: a low rate that is resampled, a length that lies."""

import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
from penstock_test_parts import run_isolated

from penstock.convert.inputs.audio import AudioInput, ClipInput
from penstock.core.errors import PenstockError, SourceError
from penstock.source.audio.source import AudioSource


def slow(path: Path, n_frames: int = 150_000) -> Path:
    """Write 16-bit frames at 1 Hz: 300 kB that are 2.4 GB at 4 kHz."""
    soundfile.write(path, np.arange(n_frames, dtype=np.int16), 1, subtype="PCM_16")
    return path


OPENERS: dict[str, Callable[[Path], Any]] = {
    "source of whole files": lambda path: AudioSource([path], rate_hz=4000),
    "source of windows": lambda path: AudioSource([path], rate_hz=4000, window_frames=300_000_000),
    "clip": lambda path: ClipInput(path, rate_hz=4000).open(),
    "clip of a length": lambda path: ClipInput(path, rate_hz=4000, clip_seconds=100_000).open(),
    "windows": lambda path: AudioInput(path, rate_hz=4000, window_seconds=100_000).open(),
}


def cost(kind: str, path: Path) -> tuple[str, int]:
    """Return what came of it, and by how many megabytes the process has grown at most."""
    resource.setrlimit(resource.RLIMIT_AS, (12 << 30, 12 << 30))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    try:
        OPENERS[kind](path)
        outcome = "opened"
    except SourceError as error:
        outcome = str(error)
    return outcome, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) >> 10


@pytest.mark.parametrize("kind", OPENERS)
def test_a_low_rate_that_is_resampled_is_refused_before_it_takes_memory(kind: str, tmp_path: Path) -> None:
    path = slow(tmp_path / "slow.wav")
    outcome, megabytes = run_isolated(cost, kind, path)
    assert f"An item of {path} with " in outcome
    assert "PENSTOCK_MAX_ITEM_BYTES" in outcome
    assert megabytes < 50


def test_windows_of_the_same_file_are_read(tmp_path: Path) -> None:
    source = AudioSource([slow(tmp_path / "slow.wav")], rate_hz=4000, window_frames=8000)
    assert len(source.index) == 75_000
    window = source.take(np.array([500]))["audio"][0, ::4000, 0]
    assert (window * 2**15).round(1).tolist() == pytest.approx([1000, 1001], rel=0.01)


def test_the_limit_can_be_raised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = slow(tmp_path / "slow.wav", 100)
    size = 100 * 4000 * 4
    monkeypatch.setenv("PENSTOCK_MAX_ITEM_BYTES", str(size - 1))
    with pytest.raises(SourceError, match=f"would take {size:,} bytes of memory, but may take at most {size - 1:,}"):
        AudioSource([path], rate_hz=4000)
    monkeypatch.setenv("PENSTOCK_MAX_ITEM_BYTES", str(size))
    assert AudioSource([path], rate_hz=4000).take(np.array([0]))["audio"].shape == (1, 400_000, 1)


def test_a_flac_file_that_declares_too_many_frames_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.flac"
    soundfile.write(path, np.arange(2000, dtype=np.int16), 8000)
    stored = bytearray(path.read_bytes())
    stored[21] |= 0x0F
    stored[22:26] = b"\xff" * 4
    path.write_bytes(stored)
    for open_file in (lambda: AudioSource([path]), lambda: ClipInput(path).open()):
        with pytest.raises(PenstockError, match=r"a\.flac"):
            open_file()


def test_an_ogg_file_whose_last_page_lies_is_as_long_as_its_sound(tmp_path: Path) -> None:
    path = tmp_path / "a.ogg"
    soundfile.write(path, np.sin(np.arange(20_000) / 20), 8000)
    stored = bytearray(path.read_bytes())
    at = stored.rindex(b"OggS")
    stored[at + 6 : at + 14] = (1 << 40).to_bytes(8, "little")  # the number of frames up to here
    stored[at + 22 : at + 26] = bytes(4)
    stored[at + 22 : at + 26] = ogg_checksum(bytes(stored[at:])).to_bytes(4, "little")
    path.write_bytes(stored)
    assert AudioSource([path]).take(np.array([0]))["audio"].shape[1] < 21_000


def ogg_checksum(page: bytes) -> int:
    found = 0
    for byte in page:
        found ^= byte << 24
        for _ in range(8):
            found = (found << 1) ^ (0x04C11DB7 if found & 0x80000000 else 0)
        found &= 0xFFFFFFFF
    return found
