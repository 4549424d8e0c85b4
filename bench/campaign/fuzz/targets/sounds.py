"""Audio files, as windows are read of them, and the frames of mp3 files."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import scipy.signal  # noqa: F401  # resampling imports it, which would be traced

from bench.campaign.fuzz.structures import mutate_chunk
from bench.campaign.fuzz.target import Run, Target, WrongValueError, read_file
from bench.campaign.fuzz.targets.decoders import sounds
from penstock.core.errors import OptionError, ReadError, SourceError
from penstock.source.audio.file import AudioFile, AudioTrack
from penstock.source.audio.mp3 import count_frames

__all__ = ["SOUNDS"]


def _read_sound(path: Path) -> None:
    for mono, rate in ((False, None), (True, 8000.0)):
        file = AudioFile(path, mono=mono)
        try:
            track = AudioTrack(file, rate)
            frames = track.frames(0, min(200, track.n_frames))
            track.frames(max(0, track.n_frames - 50), track.n_frames)
            if len(frames) != min(200, track.n_frames) or not frames.dtype == np.float32:
                raise WrongValueError(f"{len(frames)} frames of {track.n_frames}")
        finally:
            file.close()


def _prepare_mp3(_: Path) -> Run:
    def run(content: bytes) -> None:
        count_frames(content)

    return run


def _mp3s() -> Sequence[bytes]:
    found = next(sound for sound in sounds() if sound[:3] == b"ID3" or sound[:1] == b"\xff")
    return [found, b"ID3\x04\0\0\0\0\0\0" + found]


SOUNDS = (
    Target(
        "sound-file",
        read_file("x.wav", _read_sound),
        sounds,
        (SourceError, ReadError, OptionError),  # a rate that cannot be resampled to the one that is asked for
        (mutate_chunk,),
        (b"data", b"OggS"),
        weight=0.6,
    ),
    Target("mp3", _prepare_mp3, _mp3s, (ValueError,), (), (b"ID3", b"\xff\xfb\x90\x44", b"Xing", b"TAG")),
)
