"""Zarr arrays on a local disk, read chunk by chunk.

A chunk is a file, or a byte range of a shard file. A chunk that fills whole rows of the output is read or decompressed
straight into them; others go through a scratch array. Files are opened for each read, so threads share nothing and a
fork is safe.
"""

import itertools
import json
import math
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.core.cache import SharedCache
from penstock.core.errors import DamageError, ReadError, SourceError
from penstock.core.text import cause
from penstock.source.stored.zarr.codec import Codec, UnsupportedStoreError, codec_v2, codec_v3

__all__ = ["Selection", "ZarrArray", "open_zarr", "read_into"]

_MAX_SHARD_INDEXES, _INDEX_BYTES = 256, 64 << 20  # in the cache
_HASHED_FILES = 16
_SMALL_BYTES = 1 << 24  # a buffer of up to this size is kept for smaller chunks, too
_EMPTY = (1 << 64) - 1
_SLACK_BYTES = 1 << 16  # several times what compression may add to a chunk

Selection = tuple[tuple[int, int], ...]
"""Start and stop on each axis after the first."""


@dataclass(frozen=True)
class ZarrArray:
    """Location and storage format of an array; picklable."""

    path: Path
    shape: tuple[int, ...]
    chunks: tuple[int, ...]
    codec: Codec
    separator: str
    prefix: str
    fill: Any
    """Fill value of missing chunks; None: a missing chunk is an error."""

    shards: tuple[int, ...] | None = None
    """Shape of the shard files; None if each chunk is a file."""

    index_at_end: bool = True
    metadata: str = "zarr.json"
    """Name of the metadata file."""

    stamp: tuple[int, int] = (0, 0)
    """Size and modification time of the metadata file."""

    _indexes: SharedCache[NDArray[np.uint64]] = field(
        default_factory=lambda: SharedCache(_INDEX_BYTES, _MAX_SHARD_INDEXES), compare=False, repr=False
    )
    """By path and modification time; each process has its own."""

    @property
    def dtype(self) -> np.dtype[Any]:
        """Dtype of the rows as read, in native byte order."""
        return self.codec.dtype.newbyteorder("=")

    @property
    def chunk_rows(self) -> int:
        """Rows per chunk."""
        return self.chunks[0]

    @property
    def chunk_shape(self) -> tuple[int, ...]:
        """Shape of a chunk, which is decoded as a whole, also if several chunks share a file."""
        return self.chunks

    def check_unchanged(self) -> None:
        """Raise ReadError if the metadata of the array have changed since it was opened."""
        try:
            found = (self.path / self.metadata).stat()
        except OSError as error:
            raise ReadError(f"The array {self.path} is gone: {cause(error)}.") from error
        if (found.st_size, found.st_mtime_ns) == self.stamp:
            return
        try:
            now = open_zarr(self.path)
        except (SourceError, UnsupportedStoreError) as error:
            raise ReadError(f"The array {self.path} has changed since it was opened: {error}") from error
        # Compare repr: a fill value may be NaN, which is unequal to itself.
        if repr(replace(now, stamp=self.stamp)) != repr(self):
            raise ReadError(
                f"The array {self.path} has changed since it was opened: {self.shape} in chunks of {self.chunks} then, "
                f"{now.shape} in chunks of {now.chunks} now."
            )

    def close(self) -> None:
        """Drop the cached shard indexes; no file stays open."""
        self._indexes.clear()

    def fingerprint_bytes(self) -> bytes:
        """Return the size and the beginning of some chunk files."""
        sizes = self.shards or self.chunks
        rows = -(-self.shape[0] // sizes[0])
        found = []
        for row in range(0, rows, 1 + rows // _HASHED_FILES):
            path = self.path / self._chunk_key((row, *(0 for _ in sizes[1:])))
            try:
                with path.open("rb") as file:
                    found.append(b"%d " % os.fstat(file.fileno()).st_size + file.read(1024))
            except OSError:
                found.append(b"missing ")
        return b"".join(found)

    def tasks(self, start: int, stop: int, selection: Selection, out: NDArray[Any]) -> Iterator[Callable[[], int]]:
        """Yield tasks that together read rows [start, stop) into `out`; each returns the number of bytes decoded.

        `out` has rows on axis 0, then all axes of `selection`.
        """
        bounds = ((start, stop), *selection)
        grid = [
            range(low // size, -(-high // size)) if high > low else range(0)
            for (low, high), size in zip(bounds, self.chunks, strict=True)
        ]
        for coordinates in itertools.product(*grid):
            corner = [number * size for number, size in zip(coordinates, self.chunks, strict=True)]
            inner, outer = [], []
            for (low, high), begin, size in zip(bounds, corner, self.chunks, strict=True):
                first, last = max(low, begin), min(high, begin + size)
                inner.append(slice(first - begin, last - begin))
                outer.append(slice(first - low, last - low))
            yield _ChunkRead(self, coordinates, tuple(inner), out[tuple(outer)])

    def locate_chunk(self, coordinates: tuple[int, ...]) -> tuple[str | Path, int, int | None] | None:
        """Return file, offset and size (None if unknown) of a chunk; None if the chunk is not stored."""
        if self.shards is None:
            return f"{self.path}/{self._chunk_key(coordinates)}", 0, None
        per_shard = [shard // chunk for shard, chunk in zip(self.shards, self.chunks, strict=True)]
        shard = tuple(number // per for number, per in zip(coordinates, per_shard, strict=True))
        path = self.path / self._chunk_key(shard)
        index = self._read_shard_index(path, tuple(per_shard))
        if index is None:
            return path, 0, None
        place = tuple(number % per for number, per in zip(coordinates, per_shard, strict=True))
        offset, size = (int(value) for value in index[place])
        return None if offset == size == _EMPTY else (path, offset, size)

    def _chunk_key(self, coordinates: tuple[int, ...]) -> str:
        return self.prefix + self.separator.join(map(str, coordinates))

    def _read_shard_index(self, path: Path, per_shard: tuple[int, ...]) -> NDArray[np.uint64] | None:
        """Return the index at the end or beginning of a shard file: offset and size of each chunk; None if no file."""
        size = 16 * math.prod(per_shard) + 4
        try:
            with path.open("rb") as file:
                status = os.fstat(file.fileno())
                if status.st_size < size:
                    raise ValueError(
                        f"the shard {path.name} has {status.st_size} bytes, but its index alone has {size}"
                    )
                at = status.st_size - size if self.index_at_end else 0
                return self._indexes.get(
                    (str(path), status.st_mtime_ns),
                    lambda: _parse_shard_index(path.name, os.pread(file.fileno(), size, at), per_shard),
                    size,
                )
        except FileNotFoundError:
            return None


def _parse_shard_index(name: str, stored: bytes, per_shard: tuple[int, ...]) -> NDArray[np.uint64]:
    size = 16 * math.prod(per_shard) + 4
    if len(stored) < size:
        raise ValueError(f"the shard {name} became shorter while it was read")
    try:
        table = Codec(np.dtype("<u8"), None, checksum=True).check_body(memoryview(stored), size - 4)
    except ValueError as error:
        raise ValueError(f"the index of the shard {name}: {error}") from error
    return np.frombuffer(table, "<u8").reshape(*per_shard, 2)


def read_into(handle: int, buffer: NDArray[np.uint8], offset: int) -> int:
    """Read until `buffer` is full or the file ends; return the bytes read. One system call reads at most 2 GB."""
    found = 0
    while found < len(buffer):
        more = os.preadv(handle, [buffer[found:].data], offset + found)
        if not more:
            break
        found += more
    return found


class _Buffers(threading.local):
    """Reusable buffers of one thread for the bytes of a chunk; new memory would cost more than decoding into it."""

    def __init__(self) -> None:
        self._held: dict[str, NDArray[np.uint8]] = {}

    def get(self, use: str, n_bytes: int) -> NDArray[np.uint8]:
        held = self._held.get(use)
        if held is None or not n_bytes <= len(held) <= max(4 * n_bytes, _SMALL_BYTES):
            held = self._held[use] = np.empty(max(n_bytes, 1), np.uint8)
        return held[:n_bytes]


_BUFFERS = _Buffers()


@dataclass(frozen=True, slots=True)
class _ChunkRead:
    """A task that reads the selected elements of one chunk."""

    array: ZarrArray
    coordinates: tuple[int, ...]
    inner: tuple[slice, ...]
    """Selected elements of the chunk."""

    out: NDArray[Any]
    """Output for those elements."""

    def __call__(self) -> int:
        array = self.array
        try:
            stored = array.locate_chunk(self.coordinates)
            found = None if stored is None else self._read(*stored)
        except FileNotFoundError:
            found = None
        except OSError as error:
            raise ReadError(f"Could not read chunk {self.coordinates} of {array.path}: {cause(error)}.") from error
        except (ValueError, MemoryError) as error:
            raise self._damage_error(str(error)) from error
        if found is not None:
            return found
        if array.fill is None:
            raise self._damage_error("it is missing, and the store has no fill value")
        self.out[...] = array.fill
        return 0

    def _read(self, path: str | Path, offset: int, size: int | None) -> int:
        array = self.array
        n_bytes = math.prod(array.chunks) * array.codec.dtype.itemsize
        whole_rows = all(
            inner == slice(0, chunk) for inner, chunk in zip(self.inner[1:], array.chunks[1:], strict=True)
        )
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            file_bytes = os.fstat(handle).st_size
            length = file_bytes if size is None else size
            if offset + length > file_bytes:
                raise ValueError(f"it ends at byte {offset + length} of a file of {file_bytes} bytes")
            if whole_rows and array.codec.is_plain and self.out.flags.c_contiguous:
                return self._read_plain(handle, offset, length, n_bytes)
            if length > 2 * n_bytes + _SLACK_BYTES:
                raise ValueError(f"{length} compressed bytes are too many for {n_bytes} bytes")
            stored = _BUFFERS.get("stored", length)
            found = read_into(handle, stored, offset)
        finally:
            os.close(handle)
        if found != length:
            raise ValueError(f"it is truncated: {found} of {length} bytes are there")
        body = array.codec.check_body(stored.data, n_bytes)
        direct = (
            whole_rows and self.out.nbytes == n_bytes and self.out.flags.c_contiguous and array.codec.dtype.isnative
        )
        if direct:
            array.codec.decode(body, self.out.reshape(-1).view(np.uint8))
        else:
            scratch = _BUFFERS.get("decoded", n_bytes)
            array.codec.decode(body, scratch)
            self.out[...] = scratch.view(array.codec.dtype).reshape(array.chunks)[self.inner]
        return n_bytes

    def _read_plain(self, handle: int, offset: int, length: int, n_bytes: int) -> int:
        """Read rows of an uncompressed chunk straight into the output."""
        if length != n_bytes:
            raise ValueError(f"it must have {n_bytes} bytes, got {length}")
        row_bytes = n_bytes // self.array.chunks[0]
        target = self.out.reshape(-1).view(np.uint8)
        found = read_into(handle, target, offset + self.inner[0].start * row_bytes)
        if found != len(target):
            raise ValueError(f"it is truncated: {found} of {len(target)} bytes are there")
        return found

    def _damage_error(self, reason: str) -> DamageError:
        first = self.coordinates[0] * self.array.chunks[0] + self.inner[0].start
        return DamageError(f"chunk {self.coordinates} of {self.array.path}", first, reason)


def open_zarr(path: Path) -> ZarrArray:
    """Open a zarr v2 or v3 array; raise UnsupportedStoreError if it has to be read by zarr-python."""
    for name, parse in (("zarr.json", _parse_v3), (".zarray", _parse_v2)):
        file = path / name
        try:
            status = file.stat()
            content = json.loads(file.read_bytes())
            return parse(path, content, (status.st_size, status.st_mtime_ns))
        except (FileNotFoundError, NotADirectoryError):
            continue
        except (UnsupportedStoreError, SourceError):
            raise
        except (OSError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError) as error:
            raise SourceError(f"{file} must hold the metadata of a zarr array: {error!r}.") from error
    raise SourceError(f"No zarr array in {path}: it has neither zarr.json nor .zarray.")


def _parse_v2(path: Path, content: Mapping[str, Any], stamp: tuple[int, int]) -> ZarrArray:
    codec = codec_v2(content)
    shape, chunks = _parse_sizes(content["shape"]), _parse_sizes(content["chunks"])
    _check_shape(shape, chunks)
    fill = _parse_fill_value(content.get("fill_value"), codec.dtype)
    separator = _parse_separator(content.get("dimension_separator", "."))
    return ZarrArray(path, shape, chunks, codec, separator, "", fill, metadata=".zarray", stamp=stamp)


def _parse_v3(path: Path, content: Mapping[str, Any], stamp: tuple[int, int]) -> ZarrArray:
    if content.get("node_type") != "array":
        raise SourceError(f"{path} must be a zarr array, got a {content.get('node_type')}; name an array in it.")
    if content["chunk_grid"]["name"] != "regular" or not isinstance(content["data_type"], str):
        raise UnsupportedStoreError(f"chunk grid {content['chunk_grid']['name']}, data type {content['data_type']}")
    shape, chunks = _parse_sizes(content["shape"]), _parse_sizes(content["chunk_grid"]["configuration"]["chunk_shape"])
    encoding = content["chunk_key_encoding"]
    default = encoding["name"] == "default"
    if encoding["name"] not in ("default", "v2") or content.get("storage_transformers"):
        raise UnsupportedStoreError(f"chunk key encoding {encoding['name']}, or storage transformers")
    separator = _parse_separator(encoding.get("configuration", {}).get("separator", "/" if default else "."))
    codecs, shards, at_end = content["codecs"], None, True
    if codecs[0]["name"] == "sharding_indexed":
        sharding = codecs[0]["configuration"]
        _check_index_codecs(sharding["index_codecs"], len(codecs))
        shards, chunks = chunks, _parse_sizes(sharding["chunk_shape"])
        codecs, at_end = sharding["codecs"], sharding.get("index_location", "end") == "end"
        _check_shape(shape, shards)
        if any(shard % chunk for shard, chunk in zip(shards, chunks, strict=True)):
            raise ValueError(f"shards of {shards} must be multiples of the chunks of {chunks}")
    codec = codec_v3(content["data_type"], codecs)
    _check_shape(shape, chunks)
    return ZarrArray(
        path,
        shape,
        chunks,
        codec,
        separator,
        f"c{separator}" if default else "",
        _parse_fill_value(content["fill_value"], codec.dtype),
        shards,
        at_end,
        stamp=stamp,
    )


def _check_index_codecs(codecs: Any, n_codecs: int) -> None:
    names = [codec["name"] for codec in codecs]
    if names != ["bytes", "crc32c"] or codecs[0].get("configuration", {}).get("endian") != "little" or n_codecs > 1:
        raise UnsupportedStoreError(f"index codecs {names}")


def _parse_separator(given: Any) -> str:
    if given not in (".", "/"):
        raise ValueError(f"the separator of chunk keys must be '.' or '/', got {given!r}")
    return str(given)


def _parse_sizes(given: Any) -> tuple[int, ...]:
    if not isinstance(given, list) or any(type(n) is not int or not 0 <= n < 1 << 63 for n in given):
        raise ValueError(f"sizes must be a list of integers >= 0, got {given!r}")
    return tuple(given)


def _check_shape(shape: tuple[int, ...], chunks: tuple[int, ...]) -> None:
    # 1 << 59: sizes in bytes are 64-bit integers, and the widest dtype has 16 bytes.
    if not shape or len(shape) != len(chunks) or 0 in chunks or math.prod(n or 1 for n in shape) >= 1 << 59:
        raise ValueError(f"chunks of {chunks} do not fit an array of shape {shape}")


def _parse_fill_value(value: Any, dtype: np.dtype[Any]) -> Any:
    """Return the value of missing chunks; None if the store has no fill value."""
    if value is None:
        return None
    if isinstance(value, str) and value not in ("NaN", "Infinity", "-Infinity"):
        raise UnsupportedStoreError(f"fill value {value!r}")
    if isinstance(value, list):
        raise UnsupportedStoreError(f"fill value {value!r}")
    return dtype.newbyteorder("=").type(value)
