"""Which file a table was read from: one that is written to or replaced afterwards is noticed."""

import os
from dataclasses import dataclass
from pathlib import Path

from penstock.core.errors import ReadError
from penstock.core.text import cause
from penstock.files.regular import open_input

__all__ = ["FileStamp"]

_SAMPLES, _SAMPLE_BYTES, _END_BYTES = 16, 1024, 1 << 14  # the end has the footer, with the places of all columns


@dataclass(frozen=True, slots=True)
class FileStamp:
    """A file as it was when the source was made."""

    path: str
    n_bytes: int
    time_ns: int

    @classmethod
    def read(cls, path: Path) -> "FileStamp":
        """Return the stamp of a regular file; raise SourceError or ReadError if there is none."""
        with open_input(path) as file:
            status = os.fstat(file.fileno())
        return cls(str(path), status.st_size, status.st_mtime_ns)

    def check(self) -> None:
        """Raise ReadError if the file is gone, or another one now."""
        try:
            found = os.stat(self.path)  # noqa: PTH116  # once per read: a Path takes twice as long
        except OSError as error:
            raise ReadError(f"Could not read {self.path}: {cause(error)}.") from error
        if (found.st_size, found.st_mtime_ns) != (self.n_bytes, self.time_ns):
            raise ReadError(
                f"{self.path} has changed since the source was made: {self.n_bytes:,} bytes then, {found.st_size:,} "
                "now. Make the source again."
            )

    def sample(self) -> bytes:
        """Return some bytes of the file: at regular distances, and its end."""
        with open_input(self.path) as file:
            places = range(0, self.n_bytes, 1 + self.n_bytes // _SAMPLES)
            found = [os.pread(file.fileno(), _SAMPLE_BYTES, place) for place in places]
            found.append(os.pread(file.fileno(), _END_BYTES, max(0, self.n_bytes - _END_BYTES)))
        return b"".join(found)
