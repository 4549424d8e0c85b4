"""Properties of an audio file."""

from dataclasses import dataclass
from pathlib import Path

from penstock.source.audio.file import AudioFile

__all__ = ["FileInfo"]


@dataclass(frozen=True, slots=True)
class FileInfo:
    """Properties of a file, which must be unchanged when it is read."""

    path: str
    n_bytes: int
    n_frames: int
    n_channels: int
    rate_hz: float
    seekable: bool

    @classmethod
    def read(cls, path: Path) -> "FileInfo":
        """Read the properties of a file, without reading all of it."""
        file = AudioFile(path, whole=False)
        file.close()
        return cls.from_file(str(path), file)

    @classmethod
    def from_file(cls, path: str, file: AudioFile) -> "FileInfo":
        """Return the properties of an open file."""
        return cls(path, file.n_bytes, *file.stored_shape, file.rate_hz, file.seekable)
