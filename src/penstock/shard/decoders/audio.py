"""Sounds as torchaudio loads them for the webdataset library: a tensor (channels, frames) of float32, and the rate."""

import io
from typing import TYPE_CHECKING

from penstock.core.errors import MissingDependency
from penstock.core.limits import check_expansion

if TYPE_CHECKING:
    import torch

__all__ = ["AUDIO", "decode_audio"]

AUDIO = ("wav", "flac", "ogg", "opus", "mp3", "aif", "aiff")
"""Extensions of sounds that libsndfile reads."""


def decode_audio(payload: bytes) -> "tuple[torch.Tensor, int]":
    """Return the samples, from -1 to 1, and their rate in Hz; raise ValueError if they would take too much memory."""
    try:
        import soundfile  # type: ignore[import-untyped]  # noqa: PLC0415
    except ImportError as error:
        raise MissingDependency("soundfile", "audio", "Decoding audio") from error
    try:
        file = soundfile.SoundFile(io.BytesIO(payload))
    except soundfile.LibsndfileError as error:
        raise ValueError(f"it is not valid audio: {error.error_string}") from error
    with file:
        n_frames, n_channels = int(file.frames), int(file.channels)
        if n_frames < 0:
            raise ValueError(f"it declares {n_frames} frames")
        sound = f"its sound of {n_frames:,} frames and {n_channels} channels"
        check_expansion(sound, n_frames * n_channels * 4, len(payload), error=ValueError)
        frames = file.read(n_frames, dtype="float32", always_2d=True)
        if len(frames) < n_frames and file.format != "MP3":  # which declares an estimate
            raise ValueError(f"it should have {n_frames} frames, but has {len(frames)}")
        import torch  # noqa: PLC0415

        return torch.from_numpy(frames.T.copy()), int(file.samplerate)
