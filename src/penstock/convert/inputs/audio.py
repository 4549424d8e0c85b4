"""Audio files, cut into windows that are exact to the frame or kept as whole clips, and resampled if asked for."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.convert.inputs.protocol import Sample, check_numbers, folder_name, input_place
from penstock.convert.windows import Windows, check_overlap
from penstock.core.errors import SourceError
from penstock.files.spans.options import RemoteOptions
from penstock.files.stores.url import Url
from penstock.source.audio.file import AudioFile, AudioTrack, Channels, check_audio_options, check_positive

__all__ = ["AudioInput", "ClipInput"]

_MORE_DIGITS = ("PCM_32", "DOUBLE")  # formats with more digits than float32


@dataclass(frozen=True, slots=True)
class AudioInput:
    """A wav, flac, ogg or mp3 file, cut into windows of `round(window_seconds * rate)` frames. Never loaded whole.

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
    min_seconds
        A file shorter than this has no items and is skipped; None: a file shorter than a window is an error.
    """

    path: Path | Url
    window_seconds: float = 1.0
    overlap: float = 0.0
    rate_hz: float | None = None
    channels: Channels = "keep"
    min_seconds: float | None = None
    remote: RemoteOptions | None = field(default=None, repr=False, compare=False)  # does not change what is read

    def __post_init__(self) -> None:
        object.__setattr__(self, "path", input_place(self.path))
        check_overlap(self.overlap)
        check_positive("window_seconds", self.window_seconds, "seconds, such as 1.0")
        check_audio_options(self.rate_hz, self.channels)
        _check_seconds("min_seconds", self.min_seconds)

    def open(self) -> "_AudioRecording":
        """Open the file and check that it is complete."""
        with _open_track(self.path, self.remote, self.rate_hz, self.channels) as track:
            windows = self._cut(track)
            track.check_item(windows.length)
            return _AudioRecording(track, windows, self.path, self.min_seconds, is_clip=False)

    def _cut(self, track: AudioTrack) -> Windows:
        if _is_short(track, self.min_seconds):
            return Windows(0, 1)
        n_frames, rate_in = len(track.file), track.file.rate_hz
        length = _n_frames("window_seconds", self.window_seconds, track, "window")
        windows = Windows(track.n_frames, length, self.overlap)
        if not windows.count:
            raise SourceError(
                f"A recording must be at least one window long, but {self.path} lasts {n_frames / rate_in:.6g} s "
                f"({n_frames} frames at {rate_in:.10g} Hz) and a window {self.window_seconds:.6g} s ({length} frames "
                f"at {track.rate_hz:.10g} Hz). Use shorter windows (window_seconds), skip short files (min_seconds), "
                "or convert whole clips (clips=True)."
            )
        return windows


@dataclass(frozen=True, slots=True)
class ClipInput:
    """A wav, flac, ogg or mp3 file that is one item: the whole clip, or the clip at a fixed length.

    The field is called `audio`, as in `AudioInput`. The metadata say how many frames of it are audio (`n_frames`); the
    others are zeros.

    Parameters
    ----------
    clip_seconds
        The length of the item: longer clips lose their end, and shorter ones get zeros at the end. None: each clip
        keeps its own length.
    min_seconds
        A clip shorter than this has no items and is skipped.
    rate_hz, channels
        As for `AudioInput`.
    """

    path: Path | Url
    clip_seconds: float | None = None
    min_seconds: float | None = None
    rate_hz: float | None = None
    channels: Channels = "keep"
    remote: RemoteOptions | None = field(default=None, repr=False, compare=False)  # does not change what is read

    def __post_init__(self) -> None:
        object.__setattr__(self, "path", input_place(self.path))
        check_audio_options(self.rate_hz, self.channels)
        _check_seconds("clip_seconds", self.clip_seconds)
        _check_seconds("min_seconds", self.min_seconds)

    def open(self) -> "_AudioRecording":
        """Open the file and check that it is complete."""
        with _open_track(self.path, self.remote, self.rate_hz, self.channels) as track:
            length = track.n_frames
            if self.clip_seconds is not None:
                length = _n_frames("clip_seconds", self.clip_seconds, track, "clip")
            track.check_item(min(length, track.n_frames))
            # As long as the item: what is missing in the file is filled with zeros.
            windows = Windows(0 if _is_short(track, self.min_seconds) else length, length)
            return _AudioRecording(track, windows, self.path, self.min_seconds, is_clip=True)


@contextmanager
def _open_track(
    path: Path | Url, remote: RemoteOptions | None, rate_hz: float | None, channels: Channels
) -> Iterator[AudioTrack]:
    """Open a file; it is closed if the block raises."""
    file = AudioFile(path, mono=channels == "mono", remote=remote)
    try:
        yield AudioTrack(file, rate_hz)
    except BaseException:
        file.close()
        raise


def _check_seconds(name: str, seconds: float | None) -> None:
    if seconds is not None:
        check_positive(name, seconds, "seconds, such as 0.5, or None")


def _is_short(track: AudioTrack, min_seconds: float | None) -> bool:
    return min_seconds is not None and len(track.file) / track.file.rate_hz < min_seconds


def _n_frames(name: str, seconds: float, track: AudioTrack, what: str) -> int:
    """Return the number of frames of an item."""
    length = round(seconds * track.rate_hz)
    if not length:
        raise SourceError(
            f"A {what} must have at least one frame, but {name}={seconds} has none at {track.rate_hz:.10g} Hz. Use "
            f"longer {what}s."
        )
    return length


class _AudioRecording:
    """The `Recording` of an open audio file."""

    def __init__(
        self, track: AudioTrack, windows: Windows, path: Path | Url, min_seconds: float | None, *, is_clip: bool
    ) -> None:
        self._path, self._track, self._windows, self._rate = path, track, windows, track.rate_hz
        self._is_clip = is_clip
        self.n_samples = windows.count
        self.about: Mapping[str, Any] = {
            "format": "audio",
            "container": track.file.container,
            "subtype": track.file.subtype,
            "shape": list(track.file.stored_shape),
            "dtype": "float32",
            "rate_hz": track.file.rate_hz,
            "window_frames": windows.length,
            "window_rate_hz": self._rate,
        }
        self.groups: Mapping[str, str] = {}
        self.notes: Sequence[str] = (
            [*self._make_notes()] if self.n_samples else [f"It is shorter than {min_seconds} s (min_seconds)."]
        )

    def _make_notes(self) -> Iterator[str]:
        left_out = self._track.n_frames - (self._windows.total - self._windows.left_out)
        if left_out > 0 and self._is_clip:  # the same text for all clips, of which there may be thousands
            yield "The end of the clip is left out: it is longer than clip_seconds."
        elif left_out > 0:
            seconds = left_out / self._rate
            yield f"The last {seconds:.6g} s ({left_out} frames) are left out: too short for a window."
        if self._track.file.subtype in _MORE_DIGITS:
            yield f"The file holds {self._track.file.subtype}; float32 keeps 24 bits of each value."

    def span(self, numbers: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return the begin and end of each window, in seconds."""
        starts = self._windows.starts(check_numbers(numbers, self.n_samples, self._path))
        return np.stack([starts, starts + self._windows.length], axis=1) / self._rate

    def samples(self, numbers: NDArray[np.int64]) -> Iterator[Sample]:
        """Yield windows in the order of `numbers`. In ogg and mp3 files, each step back decodes from the beginning."""
        for start in self._windows.starts(check_numbers(numbers, self.n_samples, self._path)).tolist():
            stop = min(start + self._windows.length, self._track.n_frames)
            audio, missing = self._track.frames(start, stop), self._windows.length - (stop - start)
            metadata = {
                "file": self._path.name,
                "folder": folder_name(self._path),
                "start_time": start / self._rate,
                "stop_time": stop / self._rate,
                "sample_rate_hz": self._rate,
            }
            if self._is_clip:
                metadata["n_frames"] = stop - start
            yield {"audio": np.pad(audio, [(0, missing), (0, 0)]) if missing else audio}, metadata

    def close(self) -> None:
        """Close the file; idempotent."""
        self._track.close()
