"""Audio files, cut into windows that are exact to the frame, resampled where that is asked for.

What libsndfile 1.2 decodes after a seek in an ogg file is not what it decodes on the way there: some hundred frames are
off. And it takes a truncated wav or ogg file for a short one. So an ogg file is always decoded from its beginning, and
files are looked through before they are believed.
"""

import math
import os
import struct
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from penstock.convert.arrays import checked_numbers, opened
from penstock.convert.blocks import BlockReader
from penstock.convert.inputs import Sample
from penstock.convert.resample import Resampler
from penstock.convert.windows import Windows, checked_overlap
from penstock.core.errors import MissingDependency, OptionError, PenstockError, ReadError, SourceError

__all__ = ["EXTENSIONS", "AudioInput", "audio_files"]

EXTENSIONS = (".flac", ".ogg", ".wav")
"""What audio files are called, in any case."""

_FORMATS = ("FLAC", "OGG", "RF64", "WAV", "WAVEX")
_MORE_DIGITS = ("PCM_32", "DOUBLE")  # than float32 has
_CHUNK_FRAMES = 1 << 14
_MOST_FRAMES = 1 << 48  # beyond, libsndfile does not know
_UNKNOWN = 0xFFFFFFFF  # a size that was not known when the header was written
_REVERSED = bytes(int(f"{byte:08b}"[::-1], 2) for byte in range(256))


def audio_files(folder: Path) -> list[Path]:
    """Return the wav, flac and ogg files of a folder and of those within it, sorted; hidden ones are left out."""
    if not folder.is_dir():
        raise SourceError(f"{folder} is no folder; give one that holds wav, flac or ogg files.")
    found = [
        path
        for path in folder.rglob("*")
        if path.suffix.lower() in EXTENSIONS
        and path.is_file()
        and not any(part.startswith(".") for part in path.relative_to(folder).parts)
    ]
    return sorted(found)


@dataclass(frozen=True, slots=True)
class AudioInput:
    """A wav, flac or ogg file, cut into windows of `round(window_seconds * rate)` frames; never loaded whole.

    The field is called `audio`: float32 of shape (frames, channels), integers scaled to -1 … 1. Windows of a resampled
    file are what cutting the whole resampled file gives.

    Parameters
    ----------
    overlap
        The share of a window that the next one repeats.
    rate_hz
        The sampling rate of the windows; None for that of the file.
    channels
        `"mono"` gives the mean of all channels, as one.
    """

    path: Path
    window_seconds: float = 1.0
    overlap: float = 0.0
    rate_hz: float | None = None
    channels: Literal["keep", "mono"] = "keep"

    def __post_init__(self) -> None:
        object.__setattr__(self, "path", Path(self.path))
        checked_overlap(self.overlap)
        _check_positive("window_seconds", self.window_seconds, "seconds, such as 1.0")
        if self.rate_hz is not None:
            _check_positive("rate_hz", self.rate_hz, "frames per second, such as 16000, or None for the file's own")
        if self.channels not in ("keep", "mono"):
            raise OptionError(f"channels={self.channels!r}; use 'keep' or 'mono'.")

    def open(self) -> "_AudioRecording":
        """Open the file, and look whether all of it is there."""
        frames = _Frames(self.path, mono=self.channels == "mono")
        try:
            return _AudioRecording(self, frames)
        except BaseException:
            frames.close()
            raise


class _AudioRecording:
    """An audio file that is open: a `Recording`."""

    def __init__(self, given: AudioInput, frames: "_Frames") -> None:
        self._path, self._frames = given.path, frames
        n_frames, rate_in = len(frames), frames.rate_hz
        read = BlockReader(frames).rows
        self._read: Callable[[int, int], NDArray[Any]] = read
        self._rate, total = rate_in, n_frames
        if given.rate_hz is not None and given.rate_hz != rate_in:
            resampler = Resampler(rate_in, given.rate_hz)
            # What comes out, to the last digit: times are counted in its frames.
            self._rate = float(Fraction(rate_in) * resampler.up / resampler.down)
            total = resampler.n_out(n_frames)
            self._read = lambda start, stop: resampler.rows(read, n_frames, start, stop)
        length = round(given.window_seconds * self._rate)
        if not length:
            raise SourceError(
                f"A window of {given.window_seconds} s has no frame at {self._rate:.10g} Hz; use a longer "
                "window_seconds."
            )
        self._cut = Windows(total, length, given.overlap)
        if not self._cut.count:
            raise SourceError(
                f"{given.path} lasts {n_frames / rate_in:.6g} s ({n_frames} frames at {rate_in:.10g} Hz), and a window "
                f"{given.window_seconds:.6g} s ({length} frames at {self._rate:.10g} Hz); use a shorter window_seconds."
            )
        self.n_samples = self._cut.count
        self.about: Mapping[str, Any] = {
            "format": "audio",
            "container": frames.container,
            "subtype": frames.subtype,
            "shape": list(frames.stored_shape),
            "dtype": "float32",
            "rate_hz": rate_in,
            "window_frames": length,
            "window_rate_hz": self._rate,
        }
        self.groups: Mapping[str, str] = {}
        self.notes: Sequence[str] = [*self._remarks()]

    def _remarks(self) -> Iterator[str]:
        left_out = self._cut.left_out
        if left_out:
            seconds = left_out / self._rate
            yield f"The last {seconds:.6g} s ({left_out} frames) are left out: the file does not end with a window."
        if self._frames.subtype in _MORE_DIGITS:
            yield f"The file holds {self._frames.subtype}; float32 keeps 24 bits of each value."

    def span(self, numbers: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return begin and end of each window, in seconds."""
        starts = self._cut.starts(checked_numbers(numbers, self.n_samples, self._path))
        return np.stack([starts, starts + self._cut.length], axis=1) / self._rate

    def samples(self, numbers: NDArray[np.int64]) -> Iterator[Sample]:
        """Yield windows, in the order of `numbers`; in a long ogg file, each step back starts from its beginning."""
        for start in self._cut.starts(checked_numbers(numbers, self.n_samples, self._path)).tolist():
            stop = start + self._cut.length
            window = np.ascontiguousarray(self._read(start, stop), np.float32)
            yield (
                {"audio": window},
                {
                    "file": self._path.name,
                    "folder": self._path.absolute().parent.name,
                    "start_time": start / self._rate,
                    "stop_time": stop / self._rate,
                    "sample_rate_hz": self._rate,
                },
            )

    def close(self) -> None:
        """Let go of the file; nothing happens the second time."""
        self._frames.close()


class _Frames:
    """The frames of an audio file as an array of shape (frames, channels); for `BlockReader`."""

    dtype = np.dtype(np.float32)

    def __init__(self, path: Path, *, mono: bool) -> None:
        try:
            import soundfile  # type: ignore[import-untyped]  # noqa: PLC0415  # it has no types
        except (ImportError, OSError) as error:  # OSError: its libsndfile is missing
            raise MissingDependency("soundfile", "audio", "Reading audio") from error
        _look_through(path)
        self._path, self._mono, self._failure = path, mono, soundfile.SoundFileError
        self._new: Callable[[], Any] = lambda: soundfile.SoundFile(path)
        try:
            self._file = self._new()
        except (soundfile.SoundFileError, OSError, TypeError) as error:
            raise SourceError(f"{path} is no audio file that can be read: {_words(error)}.") from error
        self.container, self.subtype = str(self._file.format), str(self._file.subtype)
        self.rate_hz = float(self._file.samplerate)
        self.stored_shape = (int(self._file.frames), int(self._file.channels))
        self.shape = (self.stored_shape[0], 1 if mono else self.stored_shape[1])
        self.chunks = (_CHUNK_FRAMES,)
        try:
            self._check()
        except BaseException:
            self.close()
            raise

    def __len__(self) -> int:
        return self.shape[0]

    def _check(self) -> None:
        n_frames, n_channels = self.stored_shape
        if self.container not in _FORMATS:
            raise SourceError(f"{self._path} is a {self.container} file; convert it to wav, flac or ogg.")
        if not 0 < n_frames < _MOST_FRAMES or not n_channels or self.rate_hz < 1:
            raise SourceError(
                f"{self._path} says that it has {n_frames} frames of {n_channels} channels at {self.rate_hz:.10g} Hz; "
                "it is empty, or its length was never filled in. Encode it again."
            )
        if self.container == "FLAC":  # which says how long it is, and does not mind if it is not
            self._decoded(n_frames - 1, n_frames)

    def __getitem__(self, frames: slice) -> NDArray[np.float32]:
        found = self._decoded(frames.start, frames.stop)
        if self._mono and found.shape[1] > 1:
            return np.asarray(found.mean(axis=1, keepdims=True, dtype=np.float64), np.float32)
        return found

    def _decoded(self, start: int, stop: int) -> NDArray[np.float32]:
        where = f"frames {start}–{stop - 1} of {self._path}"
        try:
            self._go_to(start)
            found: NDArray[np.float32] = self._file.read(stop - start, dtype="float32", always_2d=True)
        except PenstockError:
            raise
        except (self._failure, OSError, ValueError) as error:
            raise ReadError(f"Could not read {where}: {_words(error)}.") from error
        if len(found) < stop - start:
            raise ReadError(f"Could not read {where}: {len(found)} frames are there; it is damaged or truncated.")
        return found

    def _go_to(self, frame: int) -> None:
        if self._file.tell() == frame:
            return
        if self.container != "OGG":
            self._file.seek(frame)
            return
        if self._file.tell() > frame:
            self._file.close()
            self._file = self._new()
        while (left := frame - self._file.tell()) > 0:
            if not len(self._file.read(min(left, 1 << 16), dtype="float32")):
                raise ReadError(f"Could not read frame {frame} of {self._path}: it ends before; it is damaged.")

    def close(self) -> None:
        self._file.close()


def _check_positive(name: str, value: Any, what: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise OptionError(f"{name}={value!r}; use a positive number of {what}.")


def _words(error: Exception) -> str:
    """Return what libsndfile says, which is nothing for some of its errors."""
    said = getattr(error, "error_string", "") or (f"libsndfile error {error.code}" if hasattr(error, "code") else "")
    return str(said or error).rstrip(". ")


def _look_through(path: Path) -> None:
    """Raise SourceError where a wav or ogg file is not all there: libsndfile reads what is left without a word."""
    with opened(path) as file:
        size = os.fstat(file.fileno()).st_size
        head = os.pread(file.fileno(), 12, 0)
        try:
            if head[:4] in (b"RIFF", b"RIFX", b"RF64") and head[8:] == b"WAVE":
                _check_riff(file.fileno(), size, ">" if head[:4] == b"RIFX" else "<")
            elif head[:4] == b"OggS":
                _check_ogg(file.fileno(), size)
        except ValueError as error:
            raise SourceError(f"{path} is damaged or truncated: {error}.") from error
        except OSError as error:
            raise ReadError(f"Could not read {path}: {error}.") from error


def _check_riff(file: int, size: int, order: str) -> None:
    at, long_size = 12, _UNKNOWN
    while len(head := os.pread(file, 8, at)) == 8:
        name, n_bytes = head[:4], struct.unpack(f"{order}L", head[4:])[0]
        if name == b"ds64":
            long_size = int.from_bytes(os.pread(file, 8, at + 16), "little")
        if name == b"data":
            n_bytes = long_size if n_bytes == _UNKNOWN else n_bytes
            if n_bytes != _UNKNOWN and at + 8 + n_bytes > size:
                raise ValueError(f"it should have {n_bytes} bytes of audio, and {size - at - 8} are there")
            return
        at += 8 + n_bytes + n_bytes % 2
    raise ValueError("it has no audio")


def _check_ogg(file: int, size: int) -> None:
    """Raise ValueError where pages are missing or are not what their checksums say."""
    at, number, stream, last = 0, 0, b"", False
    while at < size:
        head = os.pread(file, 27 + 255, at)
        if len(head) < 27 or head[:4] != b"OggS" or last:
            raise ValueError(f"no page of its stream begins at byte {at}")
        n_segments = head[26]
        n_bytes = 27 + n_segments + sum(head[27 : 27 + n_segments])
        page = os.pread(file, n_bytes, at)
        if len(page) < n_bytes:
            raise ValueError(f"the page at byte {at} ends {n_bytes - len(page)} bytes too early")
        if _ogg_checksum(page[:22] + bytes(4) + page[26:]) != int.from_bytes(page[22:26], "little"):
            raise ValueError(f"the page at byte {at} does not match its checksum")
        if int.from_bytes(page[18:22], "little") != number or (stream and page[14:18] != stream):
            raise ValueError(f"the page at byte {at} is not the next one of the same stream")
        at, number, stream, last = at + n_bytes, number + 1, page[14:18], bool(page[5] & 4)
    if not last:
        raise ValueError("its last page is missing")


def _ogg_checksum(page: bytes) -> int:
    """Return the CRC-32 of a page: zlib's, with the bits the other way round, and nothing inverted."""
    register = zlib.crc32(page.translate(_REVERSED), _UNKNOWN) ^ _UNKNOWN
    return int(f"{register:032b}"[::-1], 2)
