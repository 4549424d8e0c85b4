"""The lengths of the items of a source: read once, and kept with their sort in a file that is mapped from then on.

The file holds, after a header with a checksum, the different lengths and their counts (64-bit), the length of every
item and the items sorted by length (32-bit). It is written aside and renamed: it is there whole, or not at all.
"""

import hashlib
import io
import os
import struct
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numpy.typing import ArrayLike, NDArray

from penstock.core.errors import ReadError, SourceError, WriteError
from penstock.core.lengths import Lengths, LengthTable
from penstock.core.protocols import Source
from penstock.core.text import cause, did_you_mean
from penstock.core.types import UNNAMED, Span
from penstock.files.durable import create_aside, remove_asides, sync, write_all
from penstock.files.kinds import local_path
from penstock.files.locks import FolderLock
from penstock.files.regular import open_input
from penstock.source.native import copy_rows, is_compiled
from penstock.source.wrapper import call_axis_lengths

__all__ = ["has_varying_arrays", "item_lengths"]

_HEADER = struct.Struct("<16sQQQ16s")
"""Magic, version, items, different lengths, checksum of the rest."""

_MAGIC, _VERSION = b"PENSTOCK-LENGTHS", 1
_ITEMS_AT_ONCE, _NUMBERS_AT_ONCE = 4096, 1 << 16
_READ_BYTES = 1 << 20


def item_lengths(source: Source, by: str | ArrayLike, *, cache: str | os.PathLike[str] | None = None) -> Lengths:
    """Return the length of every item of a source, for `Bucketed`, `TokenBudget` and `Packed`.

    Parameters
    ----------
    by
        Name of a field: the length of its first axis, or of a string; of a field of single integers, their values. Or
        the lengths themselves, one integer for each item. A field whose lengths differ is read whole, once;
        1-D arrays in shards of Penstock are not, because their side indexes tell.
    cache
        A folder of this machine, in which the lengths and their sort are kept: they are mapped from there the next
        time. None: both are in memory, 8 bytes an item. Of a `DatasetSource`, whose content has no fingerprint, only
        the sort is kept.

    Examples
    --------
    >>> from penstock import ArraySource
    >>> source = ArraySource({"x": np.arange(4), "n_frames": np.array([3, 1, 2, 1])})
    >>> item_lengths(source, by="n_frames").values.tolist()
    [3, 1, 2, 1]
    """
    folder = None if cache is None else local_path(cache)
    if not isinstance(by, str):
        return _keep(_check_count(Lengths(by), source), folder)
    if UNNAMED in source.fields:
        return _keep(_measure(source, by), folder)
    field = source.fields.get(by)
    if field is None:
        near = did_you_mean(by, source.fields)
        raise SourceError(f"by must be a field of {source!r} ({', '.join(source.fields)}), got {by!r}.{near}")
    if field.shape:
        return Lengths(np.broadcast_to(np.uint32(field.shape[0]), len(source.index)))
    if folder is None:
        return _measure(source, by)
    # The fingerprint of the source stands for its content, so nothing is read if the file is there.
    digest = hashlib.blake2b(repr((source.index.content_digest, by)).encode(), digest_size=8).hexdigest()
    path = folder / f"lengths-{digest}.bin"
    return _open_if_whole(path, len(source.index)) or _write(_measure(source, by), path)


def has_varying_arrays(source: Source, name: str) -> bool:
    """Return whether a field has an array for each item, which varies in length: not numbers, and not text."""
    is_unnamed = UNNAMED in source.fields  # items are objects, perhaps mappings with the field
    stored = UNNAMED if is_unnamed else name
    field = source.fields.get(stored)
    if field is None or field.shape is not None or not len(source.index):
        return False
    narrow: Source = source.with_fields([stored]) if hasattr(source, "with_fields") else source
    first = narrow.take(np.zeros(1, np.int64))[stored][0]
    if is_unnamed:
        first = first.get(name) if isinstance(first, Mapping) else None
    return not isinstance(first, str | bytes) and np.ndim(first) > 0


def _keep(lengths: Lengths, folder: Path | None) -> Lengths:
    """Return lengths whose sort is kept in a folder, under the hash of all lengths."""
    if folder is None:
        return lengths
    path = folder / f"lengths-{lengths.digest}.bin"
    return _open_if_whole(path, len(lengths)) or _write(lengths, path)


def _check_count(lengths: Lengths, source: Source) -> Lengths:
    if len(lengths) != len(source.index):
        raise SourceError(f"by must have one length for each of the {len(source.index)} items, got {len(lengths)}.")
    return lengths


# -- from a source -----------------------------------------------------------------------------------------------------


def _measure(source: Source, by: str) -> Lengths:
    """Return the lengths of a field: as the source knows them, or by reading it in all items."""
    known = call_axis_lengths(source, by) if by in source.fields else None
    if known is not None:
        return Lengths(known)
    choose = getattr(source, "with_fields", None) if by in source.fields else None
    only: Source = source if choose is None else choose([by])
    found = np.empty(len(source.index), np.uint32)
    is_number = by in source.fields and source.fields[by].shape == ()
    at_once = _NUMBERS_AT_ONCE if is_number else _ITEMS_AT_ONCE
    for begin in range(0, len(found), at_once):
        span = Span(begin, min(begin + at_once, len(found)))
        block = only.read(span)
        column = block[by] if by in block else [_find_value(item, by, source) for item in block[UNNAMED]]
        found[span.start : span.stop] = _column_lengths(column, by, span.start)
    return Lengths(found)


def _find_value(item: Any, by: str, source: Source) -> Any:
    try:
        return item[by]
    except (LookupError, TypeError) as error:
        raise SourceError(f"by must be a field of the items of {source!r}, got {by!r}: {cause(error)}") from error


def _column_lengths(column: Any, by: str, first: int) -> Any:
    """Return the lengths of consecutive items, the first of which is item `first`."""
    if isinstance(column, np.ndarray) and column.ndim == 1 and column.dtype.kind in "iu":
        return _check_numbers(column, by, first)
    lengths = []
    for item, value in enumerate(column, first):
        if isinstance(value, int | np.integer) and not isinstance(value, bool):
            lengths.append(int(_check_numbers(np.array([value]), by, item)[0]))
        elif isinstance(value, float | bool | np.floating | np.bool_) or not hasattr(value, "__len__"):
            raise SourceError(
                f"Field {by!r} must have an axis or be an integer to be a length, got {type(value).__name__} in item "
                f"{item}."
            )
        else:
            lengths.append(len(value))
    return lengths


def _check_numbers(numbers: NDArray[Any], by: str, first: int) -> NDArray[Any]:
    wrong = np.flatnonzero((numbers < 0) | (numbers >= 1 << 32))
    if len(wrong):
        place = int(wrong[0])
        raise SourceError(f"A length must be >= 0 and < 2^32, got {numbers[place]} in {by!r} of item {first + place}.")
    return numbers


# -- from a file -------------------------------------------------------------------------------------------------------


def _open_if_whole(path: Path, n_items: int) -> Lengths | None:
    """Return the lengths of a file; None if it is not there, or damaged."""
    with suppress(OSError, ValueError):
        found = _open(path)
        return found if len(found) == n_items else None
    return None


def _open(path: Path) -> Lengths:
    """Map a file; raise OSError or ValueError if it is not there, or damaged."""
    with open_input(path) as file:
        header = file.read(_HEADER.size)
        if len(header) < _HEADER.size:
            raise ValueError(f"{path} ends in its header")
        magic, version, n_items, n_values, checksum = _HEADER.unpack(header)
        n_bytes = os.fstat(file.fileno()).st_size - _HEADER.size
        if (magic, version, n_bytes) != (_MAGIC, _VERSION, 16 * n_values + 8 * n_items):
            raise ValueError(f"{path} is truncated, or of another version")
        table = file.read(16 * n_values)
        # Read, not mapped: a file that becomes shorter now is an error, and not the end of the process.
        digest, found = _hash_rest(file, table, 4 * n_items)
        if found != checksum:
            raise ValueError(f"{path} does not match its checksum")
        whole = np.memmap(file, np.uint8, mode="r")
    content = whole[_HEADER.size + 16 * n_values :]
    values, counts = np.frombuffer(table, "<i8").reshape(2, n_values)
    of_items, sort = content.view("<u4").reshape(2, n_items)
    table_of = LengthTable(values, counts)
    how: dict[str, Any] = {"open_again": (_open, (path,)), "gather": _MappedNumbers(path, whole)}
    return Lengths.from_parts(of_items, sort, table_of, digest=digest, **how)


def _hash_rest(file: io.FileIO, table: bytes, n_bytes: int) -> tuple[str, bytes]:
    """Return the hash of the lengths, which are the next bytes of a file, and that of all, the table before them."""
    whole, of_items = xxhash.xxh3_128(table), xxhash.xxh3_64()
    while block := file.read(min(_READ_BYTES, n_bytes) or _READ_BYTES):
        whole.update(block)
        if n_bytes:
            of_items.update(block)
            n_bytes -= len(block)
    return of_items.hexdigest(), whole.digest()


@dataclass(frozen=True, slots=True)
class _MappedNumbers:
    """Reads numbers of a mapped file."""

    path: Path
    whole: NDArray[np.uint8]
    """All bytes of the file, mapped."""

    def __call__(self, numbers: NDArray[np.uint32], places: NDArray[np.int64]) -> NDArray[np.uint32]:
        """Return numbers of an array in the map; raise ReadError if they are no longer in the file."""
        found = np.empty(places.shape, np.uint32)
        if self._copy(numbers, 4 * places.reshape(-1), found.reshape(-1)) < found.size:
            raise ReadError(
                f"Could not read {self.path}: it was truncated since it was opened, or the disk failed. Delete it, and "
                "the lengths are read again; then resume from a saved state."
            )
        return found

    def _copy(self, numbers: NDArray[np.uint32], begins: NDArray[np.int64], out: NDArray[np.uint32]) -> int:
        if is_compiled():
            return copy_rows(numbers, begins, out)
        with open_input(self.path) as file:  # without the C part, the map of a truncated file would end the process
            offset = numbers.ctypes.data - self.whole.ctypes.data
            return copy_rows(numbers, begins, out, file=file.fileno(), offset=offset)


def _write(lengths: Lengths, path: Path) -> Lengths:
    """Write a file and map it; keep the lengths in memory if another process writes there now."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = FolderLock(path.parent)
    except OSError as error:
        if not path.parent.is_dir():
            raise WriteError(f"Could not create the folder {path.parent}: {cause(error)}") from error
        return lengths
    try:
        remove_asides(path.parent, {path.name})
        _write_parts(lengths, path)
        return _open(path)
    except (OSError, ValueError) as error:
        raise WriteError(f"Could not write {path}: {cause(error)}") from error
    finally:
        lock.release()


def _write_parts(lengths: Lengths, path: Path) -> None:
    table = lengths.table
    arrays: list[NDArray[Any]] = [
        *(np.ascontiguousarray(array, "<i8") for array in (table.values, table.counts)),
        *(np.ascontiguousarray(array, "<u4") for array in (lengths.values, lengths.sort)),
    ]
    parts = [array.view(np.uint8).data for array in arrays if len(array)]
    checksum = xxhash.xxh3_128()
    for part in parts:
        checksum.update(part)
    header = _HEADER.pack(_MAGIC, _VERSION, len(lengths), len(table.values), checksum.digest())
    handle, aside = create_aside(path)
    try:
        with os.fdopen(handle, "wb"):
            for part in (memoryview(header), *parts):
                write_all(handle, part)
            os.fsync(handle)
        aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)
    sync(path.parent)
