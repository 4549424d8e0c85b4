"""Open shards: file, map and side index, checked against the manifest; the most recently used ones are cached.

Python never reads from the map of a shard: if the file shrank, that would kill the process. `native` copies items from
the map, and returns how many it could copy.
"""

import errno
import itertools
import os
import resource
import stat
import threading
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from typing import BinaryIO

from penstock.core.errors import DamageError, ReadError
from penstock.shard.compression import DecompressedStream, max_decompressed_bytes
from penstock.shard.manifest import Manifest, ShardEntry
from penstock.shard.side_index import Column
from penstock.source.native import FileMap

__all__ = ["OpenShard", "OpenShardCache"]

_MAX_OPEN_FILES, _ROOMY_LIMIT = 1024, 512
_DECOMPRESSED_BYTES = 512 << 20  # decompressed shards in the cache; at least one shard
_WRITE_BYTES = 1 << 20
_RESOURCE_ERRORS = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EINTR)


class OpenShard:
    """One open shard and its columns; the file is closed when the last reader drops its reference."""

    __slots__ = ("_map", "columns", "content", "handle", "memory_bytes", "name", "number", "table_row", "used")

    def __init__(self, manifest: Manifest, number: int, columns: Mapping[str, Column]) -> None:
        entry = manifest.shards[number]
        self.handle = -1
        self.name, self.number, self.columns, self.used = entry.name, number, columns, 0
        self.memory_bytes = 0 if entry.compression == "none" else entry.tar_bytes
        try:
            # O_NONBLOCK: opening a named pipe in place of a shard would block forever.
            flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK
            self.handle = os.open(manifest.folder / entry.name, flags)
        except OSError as error:
            if error.errno in _RESOURCE_ERRORS:
                raise
            raise DamageError(entry.name, None, f"the shard could not be opened: {error}") from error
        found = os.fstat(self.handle)
        if not stat.S_ISREG(found.st_mode):
            raise DamageError(entry.name, None, "it is not a regular file")
        self.content = (found.st_dev, found.st_ino, found.st_ctime_ns)
        _check_size(entry, found.st_size)
        if entry.compression != "none":
            compressed, self.handle = self.handle, _decompress(self.handle, entry)
            os.close(compressed)  # the copy in memory cannot change
            found = os.fstat(self.handle)
        self._map = FileMap(self.handle, found.st_size)
        # A row of `StoredItems.shards`.
        self.table_row = (self.handle, self._map.address, found.st_size, found.st_ctime_ns)

    def __del__(self) -> None:
        if self.handle >= 0:
            os.close(self.handle)


class OpenShardCache:
    """Opens shards on demand and keeps the most recently used ones.

    1. Two threads need the same shard: one opens it, the other waits.
    2. A shard is dropped while a thread reads from it: its file stays open until the thread is done.
    3. More shards than a process may open files: up to a quarter of the limit stays open, and each thread requests up
       to an eighth at a time.
    """

    def __init__(self, manifest: Manifest, suffixes: Collection[str], on_change: Callable[[int], None]) -> None:
        self._manifest, self._suffixes, self._on_change = manifest, frozenset(suffixes), on_change
        # Identity of each shard's file when it was last opened, to notice that it was replaced.
        self._seen: dict[int, tuple[int, int, int]] = {}
        # Side indexes are read and checked once; only the columns of the requested fields are kept.
        self._columns: dict[int, Mapping[str, Column]] = {}
        self._lock = threading.Lock()
        self._open: dict[int, OpenShard] = {}
        self._opening: dict[int, threading.Lock] = {}
        self._uses = itertools.count()
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        self._capacity = max(4, min(_MAX_OPEN_FILES, limit // 4 if limit >= _ROOMY_LIMIT else limit // 8))
        self.at_once = max(4, min(_MAX_OPEN_FILES, limit // 8))
        """Maximum number of shards that one thread may request at a time."""

    def get(self, numbers: Iterable[int]) -> list[OpenShard]:
        """Return open shards; at most `at_once`."""
        held, now = self._open, next(self._uses)
        found = []
        for number in numbers:
            shard = held.get(number)
            if shard is None:
                shard = self._open_once(number)
            shard.used = now
            found.append(shard)
        return found

    def drop(self, numbers: Iterable[int]) -> None:
        """Drop shards, so that they are opened and checked again."""
        with self._lock:
            for number in numbers:
                self._open.pop(number, None)
                self._columns.pop(number, None)

    def _open_once(self, number: int) -> OpenShard:
        with self._lock:
            turn = self._opening.setdefault(number, threading.Lock())
        with turn:
            shard = self._open.get(number)
            if shard is None:
                shard = self._open_shard(number)
                if self._seen.setdefault(number, shard.content) != shard.content:
                    self._seen[number] = shard.content
                    self._on_change(number)
                with self._lock:
                    self._make_room(shard.memory_bytes)
                    self._open[number] = shard
                    self._opening.pop(number, None)
        return shard

    def _open_shard(self, number: int) -> OpenShard:
        try:
            return OpenShard(self._manifest, number, self._read_columns(number))
        except OSError as error:
            if error.errno not in _RESOURCE_ERRORS:
                raise
        with self._lock:
            self._open.clear()  # closes the shards that no thread is reading from
        try:
            return OpenShard(self._manifest, number, self._read_columns(number))
        except OSError as error:
            if error.errno not in _RESOURCE_ERRORS:
                raise
            name = self._manifest.shards[number].name
            raise ReadError(f"Could not open {name}: {error}. Raise the limit of open files (ulimit -n).") from error

    def _read_columns(self, number: int) -> Mapping[str, Column]:
        columns = self._columns.get(number)
        if columns is None:
            side_index = self._manifest.side_index(number)
            columns = {
                column.suffix: replace(column, checksums=column.checksums.copy())
                for column in side_index.columns
                if column.suffix in self._suffixes
            }
            self._columns[number] = columns
        return columns

    def _make_room(self, needed_bytes: int) -> None:
        held = needed_bytes + sum(shard.memory_bytes for shard in self._open.values())
        if len(self._open) < self._capacity and held <= _DECOMPRESSED_BYTES:
            return
        for number in sorted(self._open, key=lambda number: self._open[number].used):
            if len(self._open) < self._capacity and held <= _DECOMPRESSED_BYTES:
                return
            held -= self._open.pop(number).memory_bytes


def _check_size(entry: ShardEntry, size: int) -> None:
    if size != entry.stored_bytes:
        what = "truncated" if size < entry.stored_bytes else "longer than it was written"
        raise DamageError(entry.name, None, f"{what}: {size} bytes, but {entry.stored_bytes} were written")


def _decompress(file: int, entry: ShardEntry) -> int:
    """Return a descriptor of the decompressed archive, an anonymous file in memory."""
    limit = max_decompressed_bytes(entry.stored_bytes)
    if entry.tar_bytes > limit:
        raise DamageError(
            entry.name, None, f"it would decompress to {entry.tar_bytes} bytes; at most {limit} are allowed"
        )
    handle = os.memfd_create("penstock-shard", os.MFD_CLOEXEC)
    try:
        with open(file, "rb", closefd=False) as compressed:
            _write_decompressed(compressed, handle, entry)
    except BaseException as error:
        os.close(handle)
        if isinstance(error, OSError) and not isinstance(error, ReadError) and error.errno not in _RESOURCE_ERRORS:
            raise ReadError(f"Could not decompress {entry.name}: {error}") from error
        raise
    return handle


def _write_decompressed(compressed: BinaryIO, handle: int, entry: ShardEntry) -> None:
    compressed.seek(0)
    stream = DecompressedStream(compressed, entry.compression, entry.name, entry.tar_bytes)
    total = 0
    while content := stream.read(_WRITE_BYTES):
        total += os.write(handle, content)
    if total != entry.tar_bytes:
        raise DamageError(entry.name, None, f"it decompresses to {total} bytes, but {entry.tar_bytes} were written")
