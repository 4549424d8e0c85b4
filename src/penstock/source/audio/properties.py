"""Properties of an audio file, and where its frames lie in it."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from penstock.source.audio.file import AudioFile

__all__ = ["FileInfo"]

_Int64s = NDArray[np.int64]

_END_BYTES = 1 << 16  # of both ends of a compressed file: read when it is opened
_SPARE_BYTES = 1 << 16  # before and after frames whose place is estimated, at least


@dataclass(frozen=True, slots=True)
class FileInfo:
    """Properties of a file, which must be unchanged when it is read."""

    path: str
    n_bytes: int
    n_frames: int
    n_channels: int
    rate_hz: float
    seekable: bool
    audio_bytes: tuple[int, int]
    """Where the audio begins and ends in the file."""

    @classmethod
    def read(cls, path: Path) -> "FileInfo":
        """Read the properties of a file, without reading all of it."""
        file = AudioFile(path, whole=False)
        file.close()
        return cls.from_file(str(path), file)

    @classmethod
    def from_file(cls, path: str, file: AudioFile) -> "FileInfo":
        """Return the properties of an open file."""
        return cls(path, file.n_bytes, *file.stored_shape, file.rate_hz, file.seekable, file.audio_bytes)

    @property
    def frame_bytes(self) -> int | None:
        """Bytes of each frame of a wav file; None if frames are compressed."""
        begin, end = self.audio_bytes
        n_bytes, rest = divmod(end - begin, self.n_frames)
        return n_bytes if begin and not rest else None

    def locate(self, starts: _Int64s, stops: _Int64s) -> tuple[_Int64s, _Int64s]:
        """Return the byte ranges that have to be read for frames [start, stop), as far as that is known."""
        first, last = self.audio_bytes
        if not self.seekable:
            return np.zeros(1, np.int64), np.array([self.n_bytes])
        if self.frame_bytes is not None:
            begins, ends = self.locate_exactly(starts, stops)
            return np.append(begins, 0), np.append(ends, first)
        mean_bytes = (last - first) / self.n_frames
        spare = np.maximum(_SPARE_BYTES, ((stops - starts) * mean_bytes).astype(np.int64))
        begins = first + (starts * mean_bytes).astype(np.int64) - spare
        ends = first + (stops * mean_bytes).astype(np.int64) + spare
        return np.append(begins, [0, self.n_bytes - _END_BYTES]), np.append(ends, [_END_BYTES, self.n_bytes])

    def locate_exactly(self, starts: _Int64s, stops: _Int64s) -> tuple[_Int64s, _Int64s]:
        """Return where frames lie that are not compressed."""
        assert self.frame_bytes is not None, "called for such files only"
        first, last = self.audio_bytes
        begins, ends = (np.clip(first + frames * self.frame_bytes, first, last) for frames in (starts, stops))
        return begins, ends
