"""Reads one chunk: its bytes, checked, decoded, and copied to where they belong.

A chunk that fills whole rows of the output is read or decompressed straight into them; others go through a scratch
array.
"""

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from penstock.core.errors import DamageError, OptionError, ReadError
from penstock.core.limits import expansion_reason, max_item_bytes
from penstock.core.text import cause
from penstock.source.stored.zarr.metadata import Layout
from penstock.source.stored.zarr.record import ChunkRecord
from penstock.source.stored.zarr.store_folder import Buffers, StoredObject, StoreFolder

__all__ = ["ChunkPlace", "ChunkRead", "ChunkedArray", "check_stored_size"]

ChunkPlace = tuple[str, int, int | None]
"""The key of a file, the offset of a chunk in it, and its size; None: all of the file."""

_SLACK_BYTES = 1 << 16  # several times what compression may add to a chunk
_BUFFERS = Buffers()


class ChunkedArray(Protocol):
    """What a chunk is read of: a `ZarrArray`."""

    @property
    def folder(self) -> StoreFolder:
        """Where the files lie."""
        ...

    @property
    def layout(self) -> Layout:
        """How the array is stored."""
        ...

    @property
    def record(self) -> ChunkRecord:
        """Which chunks must be there."""
        ...

    @property
    def chunk_bytes(self) -> int:
        """Size of a decoded chunk."""
        ...

    def locate_chunk(self, coordinates: tuple[int, ...]) -> ChunkPlace | None:
        """Return where a chunk lies; None if it is not stored."""
        ...


def check_stored_size(file: StoredObject, offset: int, size: int | None, chunk_bytes: int) -> int:
    """Return how many bytes of a file are a chunk; ValueError if they are not there, or too many for `chunk_bytes`."""
    n_bytes = file.n_bytes if size is None else size
    if offset + n_bytes > file.n_bytes:
        raise ValueError(f"it ends at byte {offset + n_bytes} of a file of {file.n_bytes} bytes")
    if n_bytes > 2 * chunk_bytes + _SLACK_BYTES:
        raise ValueError(f"{n_bytes} compressed bytes are too many for {chunk_bytes} bytes")
    return n_bytes


@dataclass(frozen=True, slots=True)
class ChunkRead:
    """A task that reads the selected elements of one chunk."""

    array: ChunkedArray
    coordinates: tuple[int, ...]
    inner: tuple[slice, ...]
    """Selected elements of the chunk."""

    out: NDArray[Any]
    """Output for those elements."""

    def __call__(self) -> int:
        """Read the chunk; return the number of bytes decoded."""
        array, is_there, stored = self.array, False, None
        try:
            stored = array.locate_chunk(self.coordinates)
            is_there = stored is None  # a shard that has no such chunk
            found = None if stored is None else self._read(*stored)
        except FileNotFoundError:
            found = None
        except OSError as error:
            reason = cause(error).rstrip(".")
            raise ReadError(f"Could not read chunk {self.coordinates} of {array.folder}: {reason}.") from error
        except OptionError:  # a store that cannot be opened; it is a ValueError, too
            raise
        except (ValueError, MemoryError) as error:
            if stored is not None and array.folder.remote is not None:  # it may come undamaged the next time
                array.folder.locate_objects([stored[0]]).give_back()
            raise self._damage_error(str(error)) from error
        return self._fill(is_there=is_there) if found is None else found

    def _fill(self, *, is_there: bool) -> int:
        """Fill in for a chunk that is missing; raise DamageError if it must be there."""
        layout, record = self.array.layout, self.array.record
        sizes = layout.shards or layout.chunks
        place = tuple(n * chunk // size for n, chunk, size in zip(self.coordinates, layout.chunks, sizes, strict=True))
        file = f"{self.array.folder}/{layout.keys.key(place)}"
        number = None if is_there else layout.keys.number(place)
        if layout.fill is None:
            raise self._damage_error("it is missing, and the store has no fill value")
        reason = record.refuse_missing(file, number)
        if reason is not None:
            raise self._damage_error(reason)
        if self.out.nbytes > max_item_bytes(0):
            raise self._damage_error(expansion_reason("its fill value", self.out.nbytes, 0))
        self.out[...] = layout.fill
        return 0

    def _read(self, key: str, offset: int, size: int | None) -> int:
        layout, codec, n_bytes = self.array.layout, self.array.layout.codec, self.array.chunk_bytes
        whole_rows = all(
            inner == slice(0, chunk) for inner, chunk in zip(self.inner[1:], layout.chunks[1:], strict=True)
        )
        with self.array.folder.open_object(key, whole=size is None) as file:
            length = check_stored_size(file, offset, size, n_bytes)
            if whole_rows and codec.is_plain and self.out.flags.c_contiguous:
                return self._read_plain(file, offset, length, n_bytes)
            stored = file.read(offset, length)
        body = codec.check_body(stored.data, n_bytes)
        if whole_rows and self.out.nbytes == n_bytes and self.out.flags.c_contiguous and codec.dtype.isnative:
            codec.decode(body, self.out.reshape(-1).view(np.uint8))
        else:
            scratch = _BUFFERS.get("decoded", n_bytes)
            codec.decode(body, scratch)
            self.out[...] = scratch.view(codec.dtype).reshape(layout.chunks)[self.inner]
        return n_bytes

    def _read_plain(self, file: StoredObject, offset: int, length: int, n_bytes: int) -> int:
        """Read rows of an uncompressed chunk straight into the output."""
        if length != n_bytes:
            raise ValueError(f"it must have {n_bytes} bytes, got {length}")
        row_bytes = n_bytes // self.array.layout.chunks[0]
        target = self.out.reshape(-1).view(np.uint8)
        file.read_part((offset, length), self.inner[0].start * row_bytes, target)
        return len(target)

    def _damage_error(self, reason: str) -> DamageError:
        first = self.coordinates[0] * self.array.layout.chunks[0] + self.inner[0].start
        return DamageError(f"chunk {self.coordinates} of {self.array.folder}", first, reason)
