"""Arrays in zarr stores on a local disk, chunk by chunk.

Each chunk is a file, or a stretch of a shard file. It is read, or decompressed, straight into its rows of the
destination where it fills whole rows, and through a scratch array where it does not. Files are opened for each read:
there is nothing to share between threads, and nothing to go wrong in a fork.
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

from penstock.core.errors import DamageError, ReadError, SourceError
from penstock.source.stored.zarr.codec import Codec, UnsupportedStoreError, codec_v2, codec_v3

__all__ = ["Selection", "ZarrArray", "open_zarr", "read_into"]

_MOST_INDEXES = 256  # of shard files that are kept
_SAMPLED_FILES = 16
_SMALL_BYTES = 1 << 24  # a buffer of up to this size is kept for smaller chunks, too
_EMPTY = (1 << 64) - 1
_SLACK_BYTES = 1 << 16  # what compressing may add to a chunk, several times over

Selection = tuple[tuple[int, int], ...]
"""Begin and end on each axis but the first."""


@dataclass(frozen=True)
class ZarrArray:
    """Where an array lies and how it is stored; picklable."""

    path: Path
    shape: tuple[int, ...]
    chunks: tuple[int, ...]
    codec: Codec
    separator: str
    prefix: str
    fill: Any
    """None: a chunk that is missing is an error."""

    shards: tuple[int, ...] | None = None
    """The shape of shard files; None where each chunk is a file."""

    index_at_end: bool = True
    metadata: str = "zarr.json"
    """The name of the file that says all this."""

    stamp: tuple[int, int] = (0, 0)
    """Size and time of that file."""

    _indexes: dict[Path, tuple[int, NDArray[np.uint64]]] = field(default_factory=dict, compare=False, repr=False)

    @property
    def dtype(self) -> np.dtype[Any]:
        """Of the numbers as they are given."""
        return self.codec.dtype.newbyteorder("=")

    @property
    def chunk_rows(self) -> int:
        """Rows that are stored together."""
        return self.chunks[0]

    @property
    def chunk_shape(self) -> tuple[int, ...]:
        """What is decoded together, also where several chunks share a file."""
        return self.chunks

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_indexes": {}}

    def check_unchanged(self) -> None:
        """Raise ReadError where somebody has changed the array since it was opened: its rows are not those any more."""
        try:
            found = (self.path / self.metadata).stat()
        except OSError as error:
            raise ReadError(f"The array {self.path} is gone: {error}.") from error
        if (found.st_size, found.st_mtime_ns) == self.stamp:
            return
        try:
            now = open_zarr(self.path)
        except (SourceError, UnsupportedStoreError) as error:
            raise ReadError(f"The array {self.path} has changed since it was opened: {error}") from error
        # As text: a fill value may be NaN, which is unequal to itself.
        if repr(replace(now, stamp=self.stamp)) != repr(self):
            raise ReadError(
                f"The array {self.path} has changed since it was opened: {self.shape} in chunks of {self.chunks} then, "
                f"{now.shape} in chunks of {now.chunks} now."
            )

    def close(self) -> None:
        """Forget the tables of shards; no file stays open."""
        self._indexes.clear()

    def sampled(self) -> bytes:
        """Return the size and the beginning of some chunk files."""
        sizes = self.shards or self.chunks
        rows = -(-self.shape[0] // sizes[0])
        found = []
        for row in range(0, rows, 1 + rows // _SAMPLED_FILES):
            path = self.path / self._key((row, *(0 for _ in sizes[1:])))
            try:
                with path.open("rb") as file:
                    found.append(b"%d " % os.fstat(file.fileno()).st_size + file.read(1024))
            except OSError:
                found.append(b"missing ")
        return b"".join(found)

    def tasks(self, start: int, stop: int, selection: Selection, out: NDArray[Any]) -> Iterator[Callable[[], int]]:
        """Yield what has to be done to read rows into `out`; each call returns the bytes that it decoded.

        `out` has the rows, then the axes of `selection`, all of them.
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

    def stored_chunk(self, coordinates: tuple[int, ...]) -> tuple[str | Path, int, int | None] | None:
        """Return the file of a chunk, where it begins, and its length if that is known; None where there is none."""
        if self.shards is None:
            return f"{self.path}/{self._key(coordinates)}", 0, None
        per_shard = [shard // chunk for shard, chunk in zip(self.shards, self.chunks, strict=True)]
        shard = tuple(number // per for number, per in zip(coordinates, per_shard, strict=True))
        path = self.path / self._key(shard)
        index = self._index(path, tuple(per_shard))
        if index is None:
            return path, 0, None
        place = tuple(number % per for number, per in zip(coordinates, per_shard, strict=True))
        offset, size = (int(value) for value in index[place])
        return None if offset == size == _EMPTY else (path, offset, size)

    def _key(self, coordinates: tuple[int, ...]) -> str:
        return self.prefix + self.separator.join(map(str, coordinates))

    def _index(self, path: Path, per_shard: tuple[int, ...]) -> NDArray[np.uint64] | None:
        """Return the table at the end, or the beginning, of a shard file; None where there is no such file."""
        size = 16 * math.prod(per_shard) + 4
        try:
            with path.open("rb") as file:
                status = os.fstat(file.fileno())
                kept = self._indexes.get(path)
                if kept is not None and kept[0] == status.st_mtime_ns:
                    return kept[1]
                if status.st_size < size:
                    raise ValueError(f"the shard {path.name} has {status.st_size} bytes, its table alone {size}")
                file.seek(status.st_size - size if self.index_at_end else 0)
                stored = file.read(size)
        except FileNotFoundError:
            return None
        try:
            table = Codec(np.dtype("<u8"), None, checksum=True).body(memoryview(stored), size - 4)
        except ValueError as error:
            raise ValueError(f"the table of the shard {path.name}: {error}") from error
        index = np.frombuffer(table, "<u8").reshape(*per_shard, 2)
        if len(self._indexes) >= _MOST_INDEXES:
            self._indexes.clear()
        self._indexes[path] = (status.st_mtime_ns, index)
        return index


def read_into(handle: int, buffer: NDArray[np.uint8], offset: int) -> int:
    """Read until `buffer` is full or the file ends; the system gives 2 GB at most at a time, or fewer."""
    found = 0
    while found < len(buffer):
        more = os.preadv(handle, [buffer[found:].data], offset + found)
        if not more:
            break
        found += more
    return found


class _Buffers(threading.local):
    """Memory of one thread for the bytes of a chunk; fresh memory costs more than what is done with it."""

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
    """Reads what is wanted of one chunk."""

    array: ZarrArray
    coordinates: tuple[int, ...]
    inner: tuple[slice, ...]
    """What is wanted of it."""

    out: NDArray[Any]
    """Where that goes."""

    def __call__(self) -> int:
        array = self.array
        try:
            stored = array.stored_chunk(self.coordinates)
            found = None if stored is None else self._read(*stored)
        except FileNotFoundError:
            found = None
        except OSError as error:
            raise ReadError(f"Chunk {self.coordinates} of {array.path} cannot be read: {error}.") from error
        except (ValueError, MemoryError) as error:
            raise self._damaged(str(error)) from error
        if found is not None:
            return found
        if array.fill is None:
            raise self._damaged("it is missing, and the store does not say what a missing chunk holds")
        self.out[...] = array.fill
        return 0

    def _read(self, path: str | Path, offset: int, size: int | None) -> int:
        array = self.array
        n_bytes = math.prod(array.chunks) * array.codec.dtype.itemsize
        whole_rows = all(
            piece == slice(0, chunk) for piece, chunk in zip(self.inner[1:], array.chunks[1:], strict=True)
        )
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            there = os.fstat(handle).st_size
            length = there if size is None else size
            if offset + length > there:
                raise ValueError(f"bytes {offset} to {offset + length} of a file of {there}")
            if whole_rows and array.codec.plain and self.out.flags.c_contiguous:
                return self._read_plain(handle, offset, length, n_bytes)
            if length > 2 * n_bytes + _SLACK_BYTES:
                raise ValueError(f"{length} bytes, too many for {n_bytes} that are compressed")
            stored = _BUFFERS.get("stored", length)
            found = read_into(handle, stored, offset)
        finally:
            os.close(handle)
        if found != length:
            raise ValueError(f"{found} of {length} bytes are there")
        body = array.codec.body(stored.data, n_bytes)
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
        """Read rows that are stored as they are given."""
        if length != n_bytes:
            raise ValueError(f"{length} bytes, but {n_bytes} are expected")
        row_bytes = n_bytes // self.array.chunks[0]
        wanted = self.out.reshape(-1).view(np.uint8)
        found = read_into(handle, wanted, offset + self.inner[0].start * row_bytes)
        if found != len(wanted):
            raise ValueError(f"{found} of {len(wanted)} bytes are there")
        return found

    def _damaged(self, reason: str) -> DamageError:
        first = self.coordinates[0] * self.array.chunks[0] + self.inner[0].start
        return DamageError(f"chunk {self.coordinates} of {self.array.path}", first, reason)


def open_zarr(path: Path) -> ZarrArray:
    """Return an array of zarr v2 or v3; raise UnsupportedStoreError for what is left to zarr-python."""
    for name, parse in (("zarr.json", _parsed_v3), (".zarray", _parsed_v2)):
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
            raise SourceError(f"{file} is no valid description of a zarr array: {error!r}.") from error
    raise SourceError(f"There is no zarr array in {path}: it has neither zarr.json nor .zarray.")


def _parsed_v2(path: Path, content: Mapping[str, Any], stamp: tuple[int, int]) -> ZarrArray:
    codec = codec_v2(content)
    shape, chunks = _sizes(content["shape"]), _sizes(content["chunks"])
    _check_shape(shape, chunks)
    fill = _fill(content.get("fill_value"), codec.dtype)
    separator = _separator(content.get("dimension_separator", "."))
    return ZarrArray(path, shape, chunks, codec, separator, "", fill, metadata=".zarray", stamp=stamp)


def _parsed_v3(path: Path, content: Mapping[str, Any], stamp: tuple[int, int]) -> ZarrArray:
    if content.get("node_type") != "array":
        raise SourceError(f"{path} is a zarr {content.get('node_type')}, not an array; name an array in it.")
    if content["chunk_grid"]["name"] != "regular" or not isinstance(content["data_type"], str):
        raise UnsupportedStoreError(f"chunk grid {content['chunk_grid']['name']}, data type {content['data_type']}")
    shape, chunks = _sizes(content["shape"]), _sizes(content["chunk_grid"]["configuration"]["chunk_shape"])
    encoding = content["chunk_key_encoding"]
    default = encoding["name"] == "default"
    if encoding["name"] not in ("default", "v2") or content.get("storage_transformers"):
        raise UnsupportedStoreError(f"chunk key encoding {encoding['name']}, or storage transformers")
    separator = _separator(encoding.get("configuration", {}).get("separator", "/" if default else "."))
    codecs, shards, at_end = content["codecs"], None, True
    if codecs[0]["name"] == "sharding_indexed":
        sharding = codecs[0]["configuration"]
        _check_index_codecs(sharding["index_codecs"], len(codecs))
        shards, chunks = chunks, _sizes(sharding["chunk_shape"])
        codecs, at_end = sharding["codecs"], sharding.get("index_location", "end") == "end"
        _check_shape(shape, shards)
        if any(shard % chunk for shard, chunk in zip(shards, chunks, strict=True)):
            raise ValueError(f"chunks of {chunks} do not fill shards of {shards}")
    codec = codec_v3(content["data_type"], codecs)
    _check_shape(shape, chunks)
    return ZarrArray(
        path,
        shape,
        chunks,
        codec,
        separator,
        f"c{separator}" if default else "",
        _fill(content["fill_value"], codec.dtype),
        shards,
        at_end,
        stamp=stamp,
    )


def _check_index_codecs(codecs: Any, n_codecs: int) -> None:
    names = [codec["name"] for codec in codecs]
    if names != ["bytes", "crc32c"] or codecs[0].get("configuration", {}).get("endian") != "little" or n_codecs > 1:
        raise UnsupportedStoreError(f"index codecs {names}")


def _separator(given: Any) -> str:
    if given not in (".", "/"):
        raise ValueError(f"{given!r} cannot separate numbers of chunks")
    return str(given)


def _sizes(given: Any) -> tuple[int, ...]:
    if not isinstance(given, list) or any(type(n) is not int or not 0 <= n < 1 << 63 for n in given):
        raise ValueError(f"{given!r} are no sizes")
    return tuple(given)


def _check_shape(shape: tuple[int, ...], chunks: tuple[int, ...]) -> None:
    # The last: bytes of an item are counted in 64 bits, and the widest numbers have 16 bytes.
    if not shape or len(shape) != len(chunks) or 0 in chunks or math.prod(n or 1 for n in shape) >= 1 << 59:
        raise ValueError(f"an array of shape {shape} cannot have chunks of {chunks}")


def _fill(value: Any, dtype: np.dtype[Any]) -> Any:
    """Return what a missing chunk holds; None where the store does not say."""
    if value is None:
        return None
    if isinstance(value, str) and value not in ("NaN", "Infinity", "-Infinity"):
        raise UnsupportedStoreError(f"fill value {value!r}")
    if isinstance(value, list):
        raise UnsupportedStoreError(f"fill value {value!r}")
    return dtype.newbyteorder("=").type(value)
