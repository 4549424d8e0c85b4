"""Shards that are open for reading: a file and its side index, checked against the manifest, kept while they are used.

Nothing here looks into the map of a shard: a shard that shrinks under it would kill the process. Items are copied out
of the map by `native`, which comes back with what there was; that is an error like any other.
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
from penstock.source.native import Mapped

__all__ = ["OpenShard", "OpenShards"]

_MOST_FILES, _ROOMY = 1024, 512
_DECOMPRESSED_BYTES = 512 << 20  # of decompressed shards that are kept; at least one is
_PIECE_BYTES = 1 << 20
_NOT_THE_SHARDS_FAULT = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EINTR)


class OpenShard:
    """One shard: its handle, which closes when the last reader lets go of it, and its columns."""

    __slots__ = ("_mapped", "columns", "content", "handle", "memory_bytes", "name", "number", "row", "used")

    def __init__(self, manifest: Manifest, number: int, columns: Mapping[str, Column]) -> None:
        entry = manifest.shards[number]
        self.handle = -1
        self.name, self.number, self.columns, self.used = entry.name, number, columns, 0
        self.memory_bytes = 0 if entry.compression == "none" else entry.tar_bytes
        try:
            # Without waiting: a pipe in the place of a shard would wait for ever.
            flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK
            self.handle = os.open(manifest.folder / entry.name, flags)
        except OSError as error:
            if error.errno in _NOT_THE_SHARDS_FAULT:
                raise
            raise DamageError(entry.name, None, f"the shard cannot be opened: {error}") from error
        found = os.fstat(self.handle)
        if not stat.S_ISREG(found.st_mode):
            raise DamageError(entry.name, None, "it is no regular file")
        self.content = (found.st_dev, found.st_ino, found.st_ctime_ns)
        _check_size(entry, found.st_size)
        if entry.compression != "none":
            compressed, self.handle = self.handle, _decompressed(self.handle, entry)
            os.close(compressed)  # what is in memory does not change
            found = os.fstat(self.handle)
        self._mapped = Mapped(self.handle, found.st_size)
        # As `native` takes it.
        self.row = (self.handle, self._mapped.address, found.st_size, found.st_ctime_ns)

    def __del__(self) -> None:
        if self.handle >= 0:
            os.close(self.handle)


class OpenShards:
    """Opens shards when they are needed and keeps the most recently used ones.

    1. Two threads need one shard: one opens it, the other waits.
    2. A shard that is dropped while a thread reads from it: its file stays open until the thread is done.
    3. More shards than a process may open files: a quarter of the limit is kept open, and each thread asks for an
       eighth at a time.
    """

    def __init__(self, manifest: Manifest, suffixes: Collection[str], on_change: Callable[[int], None]) -> None:
        self._manifest, self._suffixes, self._on_change = manifest, frozenset(suffixes), on_change
        # Which file each shard was when it was last open, so that another one in its place is noticed.
        self._seen: dict[int, tuple[int, int, int]] = {}
        # Side indexes are read and checked once; what is kept of them is what the wanted fields need.
        self._columns: dict[int, Mapping[str, Column]] = {}
        self._lock = threading.Lock()
        self._open: dict[int, OpenShard] = {}
        self._opening: dict[int, threading.Lock] = {}
        self._uses = itertools.count()
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        self._capacity = max(4, min(_MOST_FILES, limit // 4 if limit >= _ROOMY else limit // 8))
        self.at_once = max(4, min(_MOST_FILES, limit // 8))
        """How many shards one thread may ask for at a time."""

    def get(self, numbers: Iterable[int]) -> list[OpenShard]:
        """Return some shards, open; no more than `at_once`."""
        held, now = self._open, next(self._uses)
        found = []
        for number in numbers:
            shard = held.get(number)
            if shard is None:
                shard = self._opened(number)
            shard.used = now
            found.append(shard)
        return found

    def drop(self, numbers: Iterable[int]) -> None:
        """Forget some shards, so that they are opened and checked anew."""
        with self._lock:
            for number in numbers:
                self._open.pop(number, None)
                self._columns.pop(number, None)

    def _opened(self, number: int) -> OpenShard:
        with self._lock:
            turn = self._opening.setdefault(number, threading.Lock())
        with turn:
            shard = self._open.get(number)
            if shard is None:
                shard = self._made(number)
                if self._seen.setdefault(number, shard.content) != shard.content:
                    self._seen[number] = shard.content
                    self._on_change(number)
                with self._lock:
                    self._make_room(shard.memory_bytes)
                    self._open[number] = shard
                    self._opening.pop(number, None)
        return shard

    def _made(self, number: int) -> OpenShard:
        try:
            return OpenShard(self._manifest, number, self._columns_of(number))
        except OSError as error:
            if error.errno not in _NOT_THE_SHARDS_FAULT:
                raise
        with self._lock:
            self._open.clear()  # those that no thread is reading from are closed
        try:
            return OpenShard(self._manifest, number, self._columns_of(number))
        except OSError as error:
            if error.errno not in _NOT_THE_SHARDS_FAULT:
                raise
            name = self._manifest.shards[number].name
            raise ReadError(f"Could not open {name}: {error}; raise the limit of open files (ulimit -n).") from error

    def _columns_of(self, number: int) -> Mapping[str, Column]:
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


def _decompressed(file: int, entry: ShardEntry) -> int:
    """Return a handle to the decompressed archive, in memory that has no name."""
    limit = max_decompressed_bytes(entry.stored_bytes)
    if entry.tar_bytes > limit:
        raise DamageError(
            entry.name, None, f"it would decompress to {entry.tar_bytes} bytes; at most {limit} are taken"
        )
    handle = os.memfd_create("penstock-shard", os.MFD_CLOEXEC)
    try:
        with open(file, "rb", closefd=False) as compressed:
            _copy(compressed, handle, entry)
    except BaseException as error:
        os.close(handle)
        if isinstance(error, OSError) and not isinstance(error, ReadError) and error.errno not in _NOT_THE_SHARDS_FAULT:
            raise ReadError(f"Could not decompress {entry.name}: {error}") from error
        raise
    return handle


def _copy(compressed: BinaryIO, handle: int, entry: ShardEntry) -> None:
    compressed.seek(0)
    stream = DecompressedStream(compressed, entry.compression, entry.name, entry.tar_bytes)
    total = 0
    while piece := stream.read(_PIECE_BYTES):
        total += os.write(handle, piece)
    if total != entry.tar_bytes:
        raise DamageError(entry.name, None, f"it decompresses to {total} bytes, but {entry.tar_bytes} were written")
