"""Audio files, cut into windows that are exact to the frame, and resampled if asked for."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.convert.inputs.arrays import check_numbers
from penstock.convert.inputs.protocol import Sample
from penstock.convert.windows import Windows, check_overlap
from penstock.core.errors import SourceError
from penstock.source.audio.file import AudioFile, AudioTrack, Channels, check_audio_options, check_positive

__all__ = ["AudioInput"]

_MORE_DIGITS = ("PCM_32", "DOUBLE")  # formats with more digits than float32


@dataclass(frozen=True, slots=True)
class AudioInput:
    """A wav, flac or ogg file, cut into windows of `round(window_seconds * rate)` frames. It is never loaded whole.

    The field is called `audio`: float32 of shape (frames, channels), with integers scaled to -1 … 1. Windows of a
    resampled file are the same as windows cut from the whole resampled file.

    Parameters
    ----------
    overlap
        The fraction of a window that the next one repeats.
    rate_hz
        The sampling rate of the windows; None for the rate of the file.
    channels
        `"keep"` all channels, or `"mono"`: their mean as one channel.
    """

    path: Path
    window_seconds: float = 1.0
    overlap: float = 0.0
    rate_hz: float | None = None
    channels: Channels = "keep"

    def __post_init__(self) -> None:
        object.__setattr__(self, "path", Path(self.path))
        check_overlap(self.overlap)
        check_positive("window_seconds", self.window_seconds, "seconds, such as 1.0")
        check_audio_options(self.rate_hz, self.channels)

    def open(self) -> "_AudioRecording":
        """Open the file and check that it is complete."""
        file = AudioFile(self.path, mono=self.channels == "mono")
        try:
            return _AudioRecording(self, AudioTrack(file, self.rate_hz))
        except BaseException:
            file.close()
            raise


class _AudioRecording:
    """The `Recording` of an open audio file."""

    def __init__(self, given: AudioInput, track: AudioTrack) -> None:
        self._path, self._track, self._rate = given.path, track, track.rate_hz
        n_frames, rate_in = len(track.file), track.file.rate_hz
        length = round(given.window_seconds * self._rate)
        if not length:
            raise SourceError(
                f"A window must have at least one frame, but window_seconds={given.window_seconds} has none at "
                f"{self._rate:.10g} Hz. Use longer windows."
            )
        self._windows = Windows(track.n_frames, length, given.overlap)
        if not self._windows.count:
            raise SourceError(
                f"A recording must be at least one window long, but {given.path} lasts {n_frames / rate_in:.6g} s "
                f"({n_frames} frames at {rate_in:.10g} Hz) and a window {given.window_seconds:.6g} s ({length} frames "
                f"at {self._rate:.10g} Hz). Use shorter windows (window_seconds)."
            )
        self.n_samples = self._windows.count
        self.about: Mapping[str, Any] = {
            "format": "audio",
            "container": track.file.container,
            "subtype": track.file.subtype,
            "shape": list(track.file.stored_shape),
            "dtype": "float32",
            "rate_hz": rate_in,
            "window_frames": length,
            "window_rate_hz": self._rate,
        }
        self.groups: Mapping[str, str] = {}
        self.notes: Sequence[str] = [*self._make_notes()]

    def _make_notes(self) -> Iterator[str]:
        left_out = self._windows.left_out
        if left_out:
            seconds = left_out / self._rate
            yield f"The last {seconds:.6g} s ({left_out} frames) are left out: too short for a window."
        if self._track.file.subtype in _MORE_DIGITS:
            yield f"The file holds {self._track.file.subtype}; float32 keeps 24 bits of each value."

    def span(self, numbers: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return the begin and end of each window, in seconds."""
        starts = self._windows.starts(check_numbers(numbers, self.n_samples, self._path))
        return np.stack([starts, starts + self._windows.length], axis=1) / self._rate

    def samples(self, numbers: NDArray[np.int64]) -> Iterator[Sample]:
        """Yield windows in the order of `numbers`. In a long ogg file, each step back decodes from its beginning."""
        for start in self._windows.starts(check_numbers(numbers, self.n_samples, self._path)).tolist():
            stop = start + self._windows.length
            yield (
                {"audio": self._track.frames(start, stop)},
                {
                    "file": self._path.name,
                    "folder": self._path.absolute().parent.name,
                    "start_time": start / self._rate,
                    "stop_time": stop / self._rate,
                    "sample_rate_hz": self._rate,
                },
            )

    def close(self) -> None:
        """Close the file; idempotent."""
        self._track.close()
