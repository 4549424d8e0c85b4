"""Checksums of the chunks of a zarr array, in a file beside them that `penstock index` writes.

magic (8 bytes), size of the header (8 bytes, little-endian)
header: JSON with the version, the shape of the array and of a chunk, and how many chunks are stored
numbers of the stored chunks, ascending, then their checksums (XXH3-64 of the stored bytes): 8 bytes each
checksum of all before (8 bytes)
"""

import json
import math
import os
import time
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import xxhash
from numpy.typing import NDArray

from penstock.core.errors import DamageError, PenstockError, SourceError
from penstock.core.text import cause
from penstock.files.durable import write_aside
from penstock.files.regular import SETTLED_NS, open_regular

__all__ = ["SIDECAR", "Checksums", "file_mark"]

SIDECAR = ".penstock-checksums"
"""Name of the file in the folder of an array."""

_MAGIC = b"PSTKZSUM"
_VERSION = 1
_MAX_HEADER_BYTES = 1 << 16
_AGAIN = "Run `penstock index` again, or remove the file to read the array without its checksums"

_Sizes = tuple[int, ...]


def file_mark(status: os.stat_result) -> int:
    """Return a number that differs if a file is written to; 0 if it was just written to.

    The next write could then get the same time, because the clocks of file systems tick coarsely. The time of the last
    change of the file's status counts: programs can set that of its content.
    """
    if time.time_ns() - status.st_ctime_ns <= SETTLED_NS:
        return 0
    return hash((status.st_ctime_ns, status.st_size, status.st_ino)) & 0x7FFF_FFFF_FFFF_FFFF | 1


class Checksums:
    """Expected checksums of the chunks of an array; each chunk is verified once in a process. Picklable.

    Parameters
    ----------
    path
        The file they come from, or its URL.
    shape, chunks
        Shape of the array and of a chunk.
    numbers, sums
        Numbers of the stored chunks, ascending and counted with the last axis fastest, and their checksums.
    changed_ns
        When the file was written.
    """

    def __init__(
        self,
        path: Path | str,
        grid: tuple[_Sizes, _Sizes],
        numbers: NDArray[np.int64],
        sums: NDArray[np.uint64],
        changed_ns: int = 0,
    ) -> None:
        self.path, self._grid, self._changed_ns = path, grid, changed_ns
        self.numbers, self.sums = numbers, sums
        # The mark of the file with which each chunk was verified; 0: not yet. Zero pages take no memory.
        self._verified = np.zeros(len(numbers), np.int64)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_verified": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._verified = np.zeros(len(self.numbers), np.int64)

    def __len__(self) -> int:
        return len(self.numbers)

    def __contains__(self, chunk: int) -> bool:
        return self._place(chunk) is not None

    def _place(self, chunk: int) -> int | None:
        place = int(np.searchsorted(self.numbers, chunk))
        return place if place < len(self.numbers) and int(self.numbers[place]) == chunk else None

    def is_verified(self, chunk: int, mark: int) -> bool:
        """Return whether a chunk was verified since its file was last written to; see `file_mark`."""
        place = self._place(chunk)
        return place is not None and mark != 0 and int(self._verified[place]) == mark

    def were_verified(self, chunks: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return which chunks were verified in this process, whether or not their files were written to since."""
        if not len(self.numbers):
            return np.zeros(len(chunks), np.bool_)
        places = np.minimum(np.searchsorted(self.numbers, chunks), len(self.numbers) - 1)
        verified: NDArray[np.bool_] = (self.numbers[places] == chunks) & (self._verified[places] != 0)
        return verified

    def verify(self, chunk: int, content: memoryview | bytes, mark: int, changed_ns: int) -> None:
        """Raise ValueError if the stored bytes of a chunk differ from those that were indexed.

        Parameters
        ----------
        mark, changed_ns
            `file_mark` and modification time of its file.
        """
        place = self._place(chunk)
        if place is not None and xxhash.xxh3_64_intdigest(content) == int(self.sums[place]):
            self._verified[place] = mark
            return
        if place is None:
            reason = f"it has no checksum in {self.path}: it was written after `penstock index`"
        elif changed_ns > self._changed_ns:
            reason = f"its bytes do not match its checksum in {self.path}: it was changed after `penstock index`"
        else:
            raise ValueError(f"its bytes do not match its checksum in {self.path}. Restore it from a copy")
        raise ValueError(f"{reason}. If that was on purpose, run `penstock index` again")

    # -- the file ------------------------------------------------------------------------------------------------------

    def write(self) -> None:
        """Write the file, so that it is complete or as it was before."""
        header = json.dumps(
            {"version": _VERSION, "shape": self._grid[0], "chunks": self._grid[1], "n_chunks": len(self.numbers)}
        ).encode()
        content = b"".join(
            (
                _MAGIC,
                len(header).to_bytes(8, "little"),
                header,
                self.numbers.astype("<i8").tobytes(),
                self.sums.astype("<u8").tobytes(),
            )
        )
        write_aside(Path(self.path), content + xxhash.xxh3_64_intdigest(content).to_bytes(8, "little"))

    @classmethod
    def read(cls, path: Path, shape: _Sizes, chunks: _Sizes) -> "Checksums | None":
        """Return the checksums of an array with these shapes; None if there is no file."""
        try:
            with open_regular(path) as file:
                status = os.fstat(file.fileno())
                return cls.parse(path, file, (status.st_size, status.st_mtime_ns), (shape, chunks))
        except (FileNotFoundError, NotADirectoryError):
            return None
        except PenstockError:
            raise
        except OSError as error:
            raise DamageError(str(path), None, f"{cause(error)}. {_AGAIN}.") from error

    @classmethod
    def parse(
        cls, path: Path | str, file: BinaryIO, stamp: tuple[int, int], grid_of_array: tuple[_Sizes, _Sizes]
    ) -> "Checksums":
        """Return the checksums in an open file.

        Parameters
        ----------
        stamp
            Size of the file, and when it was written.
        grid_of_array
            Shape of the array and of a chunk, which those in the file must equal.
        """
        shape, chunks = grid_of_array
        try:
            head, n_chunks, grid = _read_head(file, stamp[0])
            body = file.read(16 * n_chunks + 8)
        except ValueError as error:
            raise DamageError(str(path), None, f"{error}. {_AGAIN}.") from error
        if grid != (list(shape), list(chunks)):
            raise SourceError(
                f"{path} must have the checksums of an array of shape {shape} in chunks of {chunks}, but has those of "
                f"{str(grid[0])[:80]} in chunks of {str(grid[1])[:80]}: the array was changed after `penstock index`. "
                f"{_AGAIN}."
            )
        if xxhash.xxh3_64_intdigest(head + body[:-8]).to_bytes(8, "little") != body[-8:]:
            raise DamageError(str(path), None, f"its own checksum does not match. {_AGAIN}.")
        numbers = np.frombuffer(body, "<i8", n_chunks).astype(np.int64)
        n_grid = math.prod(-(-size // chunk) for size, chunk in zip(shape, chunks, strict=True))
        if n_chunks and (numbers[0] < 0 or int(numbers[-1]) >= n_grid or (np.diff(numbers) <= 0).any()):
            raise DamageError(str(path), None, f"its chunks are not in order, or not in the array. {_AGAIN}.")
        sums = np.frombuffer(body, "<u8", n_chunks, 8 * n_chunks).astype(np.uint64)
        return cls(path, (shape, chunks), numbers, sums, stamp[1])


def _read_head(file: BinaryIO, n_bytes: int) -> tuple[bytes, int, tuple[Any, Any]]:
    """Return all before the numbers, their count, and the shapes of the array and of a chunk; ValueError if invalid."""
    head = file.read(16)
    n_header = int.from_bytes(head[8:], "little")
    if head[:8] != _MAGIC or len(head) < 16 or n_header > _MAX_HEADER_BYTES:
        raise ValueError("it does not begin as such a file does")
    content = file.read(n_header)
    try:
        header = json.loads(content)
        version, n_chunks, grid = header["version"], header["n_chunks"], (header["shape"], header["chunks"])
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        raise ValueError(f"its header is invalid ({type(error).__name__})") from error
    if version != _VERSION or type(n_chunks) is not int or n_chunks < 0:
        raise ValueError(f"version {str(version)[:20]} with {str(n_chunks)[:20]} chunks is unknown")
    if n_bytes != 16 + n_header + 16 * n_chunks + 8:  # so that no more is allocated than the file has
        raise ValueError(f"{str(n_chunks)[:20]} checksums do not make {n_bytes} bytes")
    return head + content, n_chunks, grid
