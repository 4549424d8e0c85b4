"""Open shards: file, map and side index, checked against the manifest.

Python never reads from the map of a shard or of a side index: if the file shrank, that would kill the process. `native`
copies from the maps, and returns how much it could copy.
"""

import errno
import os
import resource
import struct
from collections.abc import Callable, Collection
from typing import BinaryIO, NamedTuple

from penstock.core.errors import DamageError, ReadError
from penstock.files.durable import write_all
from penstock.files.regular import open_descriptor
from penstock.files.unnamed import open_unnamed
from penstock.shard.compression import DecompressedStream, max_decompressed_bytes
from penstock.shard.side_index import MISSING, SideIndexHead, index_name, parse_head
from penstock.shard.table import ShardEntry
from penstock.source.native import FileMap
from penstock.source.tar.layout import Extent
from penstock.source.tar.ready.parts import Part
from penstock.source.tar.row_places import RowPlaces

__all__ = [
    "NO_COLUMN",
    "NO_PLACES",
    "RESOURCE_ERRORS",
    "IndexPlaces",
    "OpenShard",
    "SideIndexFile",
    "check_size",
    "file_limits",
    "pack_row",
]

_MAX_OPEN_SHARDS, _ROOMY_LIMIT = 1024, 256
_WRITE_BYTES = 1 << 20
_HEAD_BYTES = 4096  # of a side index: usually the whole head
RESOURCE_ERRORS = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EINTR)
"""Errors of this process, not of the file."""

_ROW, _COLUMN = struct.Struct("=4q"), struct.Struct("=10q")
NO_COLUMN = _COLUMN.pack(*(MISSING, 0, 0) * 3, 0)
"""A column of `OpenShard.columns` if no item has the member."""


def file_limits() -> tuple[int, int]:
    """Return how many shards, of two files each, stay open, and how many a thread may request at a time."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2
    capacity = max(4, min(_MAX_OPEN_SHARDS, limit // 4 if limit >= _ROOMY_LIMIT else limit // 8))
    return capacity, max(4, min(_MAX_OPEN_SHARDS, limit // 8))


def pack_row(file: int, address: int, n_bytes: int, changed_ns: int) -> bytes:
    """Return a row of `StoredItems.shards`, packed."""
    return _ROW.pack(file, address, n_bytes, changed_ns)


class IndexPlaces(NamedTuple):
    """Where the numbers about items begin in a side index, for some fields and a layout."""

    row: bytes
    """For each extent of the layout, the place of its begins; for each member of those, that of its checksums."""

    keys_at: int
    """Where the hashes of the keys begin."""

    all_columns: list[bytes]
    """For each suffix, whether it is read or not: the same as in `columns`."""

    columns: dict[str, bytes]
    """For each suffix in no extent: the places of its begins, offsets and sizes, and of its checksums."""

    @classmethod
    def of(cls, head: SideIndexHead, suffixes: Collection[str], layout: tuple[Extent, ...]) -> "IndexPlaces":
        """Return the places that the head of a side index gives."""
        columns = {column.suffix: column for column in head.columns if column.suffix in suffixes}
        begins = [number for extent in layout for number in columns[extent.suffixes[0]].begins]
        checksums = [columns[suffix].checksums_at for extent in layout for suffix in extent.suffixes]
        all_columns = [
            _COLUMN.pack(*column.begins, *column.offsets, *column.sizes, column.checksums_at) for column in head.columns
        ]
        in_extents = {suffix for extent in layout for suffix in extent.suffixes}
        return cls(
            struct.pack(f"={len(begins) + len(checksums)}q", *begins, *checksums),
            head.keys_at,
            all_columns,
            {
                column.suffix: packed
                for column, packed in zip(head.columns, all_columns, strict=True)
                if column.suffix in columns and column.suffix not in in_extents
            },
        )


NO_PLACES = IndexPlaces(b"", 0, [], {})
"""Those of a shard in the layout "columns"."""


class OpenShard:
    """One open shard and its side index; the files are closed when the last reader drops its reference."""

    __slots__ = (
        "_index", "_index_handle", "_map", "changed_ns", "handle", "identity", "index_row", "layout", "name", "number",
        "part", "places", "rows", "table_row",
    )  # fmt: skip

    @property
    def origin(self) -> int:
        """Byte of the archive where the map begins."""
        return 0

    def __init__(self, folder: str, number: int, entry: ShardEntry, *, is_dense: bool) -> None:
        self.handle, self._index_handle, self.name, self.number = -1, -1, entry.name, number
        self.part: Part | None = None
        """How the shard is read, by `ready`; None if its items differ in what they have."""
        try:
            self.handle, found = open_descriptor(f"{folder}/{entry.name}")
        except OSError as error:
            if error.errno in RESOURCE_ERRORS:
                raise
            raise DamageError(entry.name, None, f"the shard could not be opened: {error}") from error
        self.identity = _identity(found)
        self.changed_ns = found.st_ctime_ns
        """When the shard or its side index was last written to."""
        check_size(entry, found.st_size)
        if entry.compression != "none":
            compressed, self.handle = self.handle, _decompress(self.handle, entry)
            os.close(compressed)  # the copy in memory cannot change
            found = os.fstat(self.handle)
        self._map = FileMap(self.handle, found.st_size, is_dense=is_dense)
        self.table_row = pack_row(self.handle, self._map.address, found.st_size, found.st_ctime_ns)
        """A row of `StoredItems.shards`, packed."""

    def add_index(self, index: "SideIndexFile", suffixes: Collection[str], layout: tuple[Extent, ...] | None) -> None:
        """Add the side index, for these fields and this layout; it must not be used by others afterwards."""
        self._index, self._index_handle, self.layout = index.map, index.release(), layout
        self.changed_ns = max(self.changed_ns, index.changed_ns)
        self.index_row = pack_row(self._index_handle, index.map.address, index.map.n_bytes, index.changed_ns)
        """The same for the side index."""
        self.places = NO_PLACES if layout is None else IndexPlaces.of(index.head, suffixes, layout)
        self.rows = index.rows

    def find_end(self) -> int:
        """Return the size of the file now."""
        return os.fstat(self.handle).st_size

    def __del__(self, close: Callable[[int], None] = os.close) -> None:  # `os` is gone late at the exit
        for handle in (self.handle, self._index_handle):
            if handle >= 0:
                close(handle)


class SideIndexFile:
    """An open side index: read to check it, then mapped, so that it takes no memory of this process."""

    def __init__(self, folder: str, entry: ShardEntry) -> None:
        name = index_name(entry.name)
        try:
            self._handle, found = open_descriptor(f"{folder}/{name}")
        except OSError as error:
            if error.errno in RESOURCE_ERRORS:
                raise
            raise DamageError(entry.name, None, f"its side index {name} cannot be read: {error}") from error
        self._n_bytes, self.identity, self.changed_ns = found.st_size, _identity(found), found.st_ctime_ns
        self.rows: RowPlaces | None = None
        """What the layout "columns" has instead of `head`."""

    def release(self) -> int:
        """Return the file, which stays open."""
        handle, self._handle = self._handle, -1
        return handle

    def __enter__(self) -> "SideIndexFile":
        return self

    def __exit__(self, *_: object) -> None:
        if self._handle >= 0:
            os.close(self._handle)

    def read(self) -> bytes:
        """Return the whole content."""
        with open(self._handle, "rb", buffering=0, closefd=False) as file:
            return file.readall()

    def map_file(self, content: bytes | None) -> None:
        """Map the file and parse its head; `content` is the whole file, None if it was checked before."""
        self.map = FileMap(self._handle, self._n_bytes)
        if self.rows is not None:
            return
        if content is None:
            content = os.pread(self._handle, _HEAD_BYTES, 0)
            n_bytes = 24 + int.from_bytes(content[16:24], "little")
            if n_bytes > _HEAD_BYTES:
                content = os.pread(self._handle, n_bytes, 0)
        self.head: SideIndexHead = parse_head(content)


def _identity(found: os.stat_result) -> int:
    """Return a number that differs if a file was replaced or written to; never 0."""
    return hash((found.st_dev, found.st_ino, found.st_ctime_ns, found.st_size)) or 1


def check_size(entry: ShardEntry, size: int) -> None:
    """Raise DamageError if a shard has another size than in the manifest."""
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
    handle = open_unnamed()
    try:
        with open(file, "rb", closefd=False) as compressed:
            _write_decompressed(compressed, handle, entry)
    except BaseException as error:
        os.close(handle)
        if isinstance(error, OSError) and not isinstance(error, ReadError) and error.errno not in RESOURCE_ERRORS:
            raise ReadError(f"Could not decompress {entry.name}: {error}") from error
        raise
    return handle


def _write_decompressed(compressed: BinaryIO, handle: int, entry: ShardEntry) -> None:
    compressed.seek(0)
    stream = DecompressedStream(compressed, entry.compression, entry.name, entry.tar_bytes)
    total = 0
    while content := stream.read(_WRITE_BYTES):
        write_all(handle, memoryview(content))
        total += len(content)
    if total != entry.tar_bytes:
        raise DamageError(entry.name, None, f"it decompresses to {total} bytes, but {entry.tar_bytes} were written")
