"""Rows of `.npy` files and of the arrays of `.npz` archives, at a path or a URL.

Files are not memory-mapped: a mapped file that becomes shorter would end the process with SIGBUS, while a short read is
an error that can be reported. Members that are stored are read in place. A compressed member can only be read from its
beginning, so it is copied to an unnamed temporary file when the archive is opened. No member is ever unpickled.
"""

import hashlib
import io
import lzma
import math
import os
import shutil
import struct
import tempfile
import threading
import weakref
import zipfile
import zlib
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.core.errors import ReadError, SourceError, WriteError
from penstock.core.text import cause
from penstock.core.types import Block, Span
from penstock.files.byte_files import ByteFile, count_bytes, open_bytes, read_at, read_range
from penstock.files.spans.options import RemoteOptions
from penstock.files.stores.options import StoreOptions
from penstock.files.stores.url import Url, is_url, parse_place
from penstock.shard.codec import NpyHeader, parse_npy_header
from penstock.source.chunked_rows import ChunkedRowReader
from penstock.source.rows import Column, RowsSource
from penstock.source.select.selectable import Selectable

__all__ = ["HEAD_BYTES", "NumpySource", "check_lengths", "list_headers"]

_Int64s = NDArray[np.int64]

HEAD_BYTES = 1 << 16  # the longest .npy header that the codec accepts
_MOST_COLUMNS = 4096  # of an array in Fortran order: each costs one call per read
_COPY_BYTES = 1 << 20
_LOCAL = struct.Struct("<4s5H3L2H")  # signature, …, flags, method, …, lengths of name and extra
_ENCRYPTED = 0x1
_METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)  # bzip2 and xz inflate a block at once, whatever its size
_BROKEN = (zipfile.BadZipFile, zlib.error, lzma.LZMAError, EOFError, NotImplementedError, RuntimeError, ValueError)


class NumpySource(Selectable):
    """Items are the rows of a `.npy` file, as the field `data`, or of arrays of one length in an `.npz` archive.

    Values keep their dtype, in native byte order. Arrays of Python objects are refused. Members written by `np.savez`
    are read in place; their checksum is not compared, because that would take reading whole members. Members written by
    `np.savez_compressed` are unpacked to a temporary file by each process, and their checksum is compared.

    1. The file is truncated or damaged: SourceError when it is opened, ReadError later.
    2. It is replaced by one with other arrays while it is in use: ReadError. At a URL, its version is pinned.
    3. A fork at any time is safe: each process opens the file for itself.

    Parameters
    ----------
    path
        A file or a URL.
    fields
        The arrays of an archive to read; None for all.
    scratch
        The folder of temporary files; None for the folder of the system, which may be in memory.
    store, cache, cache_bytes
        Of a URL, as for `ZarrSource`.

    Examples
    --------
    >>> folder = tempfile.mkdtemp()
    >>> np.savez(f"{folder}/day.npz", x=np.arange(6).reshape(3, 2), label=np.array(["a", "b", "a"]))
    >>> source = NumpySource(f"{folder}/day.npz")
    >>> {name: values.tolist() for name, values in source.take(np.array([2, 0])).items()}
    {'x': [[4, 5], [0, 1]], 'label': ['a', 'a']}
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | Url,
        fields: Sequence[str] | None = None,
        *,
        scratch: str | os.PathLike[str] | None = None,
        store: StoreOptions | None = None,
        cache: str | os.PathLike[str] | None = None,
        cache_bytes: int | None = None,
    ) -> None:
        self.path: Path | Url = parse_place(path) if isinstance(path, Url) or is_url(path) else Path(path)
        self._remote = RemoteOptions.parse(self.path, store, cache, cache_bytes)
        self._names = None if fields is None else tuple(fields)
        self._scratch = None if scratch is None else Path(scratch)
        self.notes: list[str] = []
        """What is left out and why, for a person to read."""

        self._opened: tuple[int, RowsSource] | None = None
        self._lock = threading.Lock()
        rows = self._open(first=True)
        self._opened = os.getpid(), rows
        self.fields, self.index = rows.fields, rows.index

    def __repr__(self) -> str:
        return f"NumpySource({str(self.path)!r}, {len(self.index)} items of {', '.join(self.fields)})"

    def places(self, items: _Int64s) -> dict[str, _Int64s]:
        """Return where items lie: their rows."""
        return {"row": np.asarray(items, np.int64)}

    def read(self, span: Span, out: Block | None = None) -> Block:
        """Return consecutive items."""
        with self._lock:
            return self._rows().read(span, out)

    def take(self, items: _Int64s, out: Block | None = None) -> Block:
        """Return any items, in the given order; rows that follow each other are one read."""
        with self._lock:
            return self._rows().take(items, out)

    def close(self) -> None:
        """Close the file; the next read opens it again."""
        opened, self._opened = self._opened, None
        if opened is not None and opened[0] == os.getpid():
            opened[1].close()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_opened": None, "_lock": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _lock=threading.Lock())

    def _rows(self) -> RowsSource:
        """Return the rows that this process has open."""
        if self._opened is None or self._opened[0] != os.getpid():
            self._opened = os.getpid(), self._open(first=False)
        return self._opened[1]

    def _open(self, *, first: bool) -> RowsSource:
        notes: list[str] = []
        with ExitStack() as stack:
            file = stack.enter_context(open_bytes(self.path, self._remote))
            size, digest = count_bytes(file), hashlib.blake2b(digest_size=16)
            head = read_range(file, 6, 0)
            if head[:2] == b"PK" or (head != b"\x93NUMPY" and self.path.name.lower().endswith(".npz")):
                columns = self._read_archive(file, stack, notes, digest)
            elif self._names not in (None, ("data",)):
                raise SourceError(
                    f"fields must be left out for {self.path}, a single array, whose field is 'data', got "
                    f"{self._names!r}."
                )
            else:
                columns = {"data": _npy_column(file, 0, size, str(self.path))}
                for at in range(0, size, 1 + size // 16):
                    digest.update(read_range(file, 1024, at))
            digest.update(repr([(name, one.dtype.str, one.shape) for name, one in columns.items()]).encode())
            check_lengths({name: column.shape for name, column in columns.items()}, 0, self.path)
            if not first and digest.hexdigest() != self.index.identity:
                raise ReadError(f"{self.path} has changed since it was opened. Open it again.")
            self.notes = notes
            rows = RowsSource(columns, str(self.path), stack.pop_all().close, identity=digest.hexdigest())
            weakref.finalize(self, rows.close)
            return rows

    def _read_archive(self, file: ByteFile, stack: ExitStack, notes: list[str], digest: Any) -> dict[str, Column]:
        try:
            with zipfile.ZipFile(file) as archive:
                members, more = _list_members(archive, self.path)
                wanted = _select_fields(members, self._names, self.path)
                columns = {name: self._column(file, archive, members[name], stack) for name in wanted}
                left = (name for name in members if name not in wanted)
                notes += [*more, *(f"The array {name!r} is left out: it is not among the fields." for name in left)]
                digest.update(repr([(name, members[name].CRC) for name in wanted]).encode())
                return columns
        except (SourceError, ReadError, WriteError):
            raise
        except (*_BROKEN, struct.error, OverflowError) as error:
            raise SourceError(f"{self.path} is not an .npz archive, or it is damaged: {error}.") from error
        except OSError as error:
            raise ReadError(f"Could not read {self.path}: {cause(error)}.") from error

    def _column(self, file: ByteFile, archive: zipfile.ZipFile, member: zipfile.ZipInfo, stack: ExitStack) -> Column:
        what = f"{member.filename} in {self.path}"
        if member.flag_bits & _ENCRYPTED:
            raise SourceError(f"Members must not be encrypted, but {what} is. Save it without a password.")
        if member.compress_type == zipfile.ZIP_STORED:
            return _npy_column(file, _data_offset(file, member, what), member.file_size, what)
        unpacked = stack.enter_context(_unpack_to_temporary(archive, member, self._scratch, what))
        return _npy_column(unpacked, 0, member.file_size, what)


def list_headers(path: Path) -> dict[str, NpyHeader | str]:
    """Return the header of each array of an archive; in place of one that cannot be read, the reason."""
    found: dict[str, NpyHeader | str] = {}
    with open_bytes(path) as file:
        try:
            with zipfile.ZipFile(file) as archive:
                for name, member in _list_members(archive, path)[0].items():
                    try:
                        with archive.open(member) as stream:
                            found[name] = parse_npy_header(stream.read(HEAD_BYTES), member.file_size)
                    except (*_BROKEN, OSError) as error:
                        found[name] = str(error)
        except (*_BROKEN, struct.error, OverflowError, OSError) as error:
            if isinstance(error, SourceError):
                raise
            raise SourceError(f"{path} is not an .npz archive, or it is damaged: {error}.") from error
    return found


def check_lengths(shapes: dict[str, tuple[int, ...]], axis: int, path: Path | Url) -> None:
    """Raise SourceError if arrays differ in length along `axis`."""
    lengths = {shape[axis] if len(shape) > axis else None for shape in shapes.values()}
    if len(lengths) > 1 or None in lengths:
        shown = ", ".join(f"{name} {shape}" for name, shape in shapes.items())
        raise SourceError(
            f"Arrays must have the same length along axis {axis}, but those of {path} differ: {shown}. Name the arrays "
            f"that belong together, such as fields=({next(iter(shapes))!r},)."
        )


def _list_members(archive: zipfile.ZipFile, path: Path | Url) -> tuple[dict[str, zipfile.ZipInfo], list[str]]:
    """Return the arrays of an archive by name, and notes on its other members."""
    members: dict[str, zipfile.ZipInfo] = {}
    notes = []
    for member in archive.infolist():
        name = member.filename
        if "/" in name or "\\" in name or ".." in name or "\0" in member.orig_filename:
            raise SourceError(
                f"Names of members must not contain a slash or '..', but {path} has {name!r}. Save it under another "
                "name."
            )
        if member.compress_type not in _METHODS:
            raise SourceError(
                f"Members must be stored or deflated, but {name!r} in {path} is not. Save it with np.savez or "
                "np.savez_compressed."
            )
        if not name.endswith(".npy"):
            notes.append(f"The member {name!r} is left out: it is not an array.")
        elif members.setdefault(name.removesuffix(".npy"), member) is not member:
            raise SourceError(
                f"Every array must be in the archive once, but {path} has {name!r} twice. Save the archive again."
            )
    return members, notes


def _select_fields(
    members: dict[str, zipfile.ZipInfo], fields: tuple[str, ...] | None, path: Path | Url
) -> tuple[str, ...]:
    has = ", ".join(members) or "none"
    if not members or not set(fields or ()) <= set(members):
        missing = [name for name in fields or () if name not in members]
        which = f"{', '.join(missing)}. Its arrays are: {has}" if missing and members else "arrays"
        raise SourceError(f"{path} has no {which}.")
    return tuple(members) if fields is None else fields


def _data_offset(file: ByteFile, member: zipfile.ZipInfo, what: str) -> int:
    """Return the offset of the data of an uncompressed member, from its local header."""
    head = read_range(file, _LOCAL.size, member.header_offset)
    if len(head) < _LOCAL.size:
        raise SourceError(f"{what} lies beyond the end of the file. The archive is truncated.")
    signature, _, flags, method, *_, name_bytes, extra_bytes = _LOCAL.unpack(head)
    begin: int = member.header_offset + _LOCAL.size + name_bytes + extra_bytes
    raw = read_range(file, name_bytes, member.header_offset + _LOCAL.size)
    name = raw.decode("utf-8" if flags & 0x800 else "cp437", errors="replace")
    if signature != b"PK\x03\x04" or method != zipfile.ZIP_STORED or name != member.orig_filename:
        raise SourceError(f"{what} is damaged: the header at byte {member.header_offset} belongs to something else.")
    if member.compress_size != member.file_size or begin + member.file_size > count_bytes(file):
        raise SourceError(f"{what} is damaged: fewer than its {member.file_size} bytes are in the file.")
    return begin


def _unpack_to_temporary(
    archive: zipfile.ZipFile, member: zipfile.ZipInfo, scratch: Path | None, what: str
) -> io.FileIO:
    """Return an unnamed file with the content of a compressed member, whose checksum is correct."""
    folder = Path(tempfile.gettempdir()) if scratch is None else scratch
    try:
        free = shutil.disk_usage(folder).free
        if member.file_size > free:
            raise WriteError(
                f"{what} needs {member.file_size} bytes to be unpacked, but {folder} has only {free} left. Give "
                "another folder as scratch, or save the archive with np.savez, which needs no unpacking."
            )
        unpacked = tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115  # the caller closes it
    except OSError as error:
        if isinstance(error, WriteError):
            raise
        raise WriteError(f"Could not make a temporary file in {folder} for {what}: {cause(error)}.") from error
    try:
        _copy_member(archive, member, unpacked, f"{what} to {folder}")
    except BaseException:
        unpacked.close()
        raise
    return unpacked


def _copy_member(archive: zipfile.ZipFile, member: zipfile.ZipInfo, out: io.FileIO, what: str) -> None:
    n_bytes = 0
    with archive.open(member) as packed:
        while content := packed.read(_COPY_BYTES):  # compares the checksum at the end
            n_bytes += len(content)
            view = memoryview(content)
            while view:
                try:
                    view = view[out.write(view) :]
                except OSError as error:
                    raise WriteError(f"Could not unpack {what}: {cause(error)}.") from error
    if n_bytes != member.file_size:
        raise SourceError(f"Could not unpack {what}: it has {n_bytes} bytes instead of {member.file_size}.")


def _npy_column(file: ByteFile, begin: int, size: int, what: str) -> Column:
    """Return the array whose `.npy` starts at byte `begin` and has `size` bytes; `what` names it in errors."""
    head = _read(file, bytearray(min(size, HEAD_BYTES)), begin, f"the header of {what}")
    try:
        header = parse_npy_header(bytes(head), size)
    except ValueError as error:
        raise SourceError(f"Could not read {what}: {error}.") from error
    if not header.shape:
        raise SourceError(f"An array must have one dimension or more, but {what} is a single value, which has no rows.")
    n_columns = math.prod(header.shape[1:])
    if not header.shape[0] * n_columns * header.dtype.itemsize:
        raise SourceError(f"An array must not be empty, but {what} has shape {header.shape}.")
    dtype, at = header.dtype.newbyteorder("="), begin + header.data_offset
    if not header.fortran_order or sum(length > 1 for length in header.shape) <= 1:  # both orders are the same
        return Column(header.shape, dtype, _RowMajor(file, header.shape, header.dtype, at, what).rows)
    if n_columns > _MOST_COLUMNS:
        raise SourceError(
            f"An array in Fortran order must have at most {_MOST_COLUMNS} values per row, but {what} has {n_columns}: "
            "they lie far apart, and each would be read separately. Save it in C order: np.save(new_path, "
            "np.ascontiguousarray(np.load(path, mmap_mode='r')))."
        )
    columns = _ColumnMajor(file, header.shape, header.dtype, at=at, what=what)
    return Column(header.shape, dtype, ChunkedRowReader(columns).rows)


class _RowMajor:
    """An array in C order: consecutive rows are one read."""

    def __init__(self, file: ByteFile, shape: tuple[int, ...], dtype: np.dtype[Any], at: int, what: str) -> None:
        self._file, self._shape, self._dtype, self._at, self._what = file, shape, dtype, at, what
        self._row_bytes = dtype.itemsize * math.prod(shape[1:])

    def rows(self, start: int, stop: int) -> NDArray[Any]:
        out = np.empty((stop - start, *self._shape[1:]), self._dtype)
        where = f"rows {start}–{stop - 1} of {self._what}"
        _read(self._file, out.reshape(-1).view(np.uint8), self._at + start * self._row_bytes, where)
        return out.astype(self._dtype.newbyteorder("="), copy=False)


class _ColumnMajor:
    """An array in Fortran order, for `ChunkedRowReader`: one read per value of a row, so many rows at once."""

    chunks = (1,)

    def __init__(self, file: ByteFile, shape: tuple[int, ...], dtype: np.dtype[Any], *, at: int, what: str) -> None:
        self._file, self._stored, self._at, self._what = file, dtype, at, what
        self.shape, self.dtype = shape, dtype.newbyteorder("=")

    def __getitem__(self, rows: slice) -> NDArray[Any]:
        n_rows, size = self.shape[0], self._stored.itemsize
        # columns: (values of a row, rows), as they are stored
        columns = np.empty((math.prod(self.shape[1:]), rows.stop - rows.start), self._stored)
        for number, column in enumerate(columns):
            where = f"rows {rows.start}–{rows.stop - 1} of {self._what}"
            _read(self._file, column.view(np.uint8), self._at + (number * n_rows + rows.start) * size, where)
        # The axes are stored in reverse order.
        turned = columns.reshape(*self.shape[:0:-1], rows.stop - rows.start).T
        return np.ascontiguousarray(turned, self.dtype)


def _read(file: ByteFile, out: Any, begin: int, where: str) -> Any:
    """Fill `out` with the bytes at `begin` and return it."""
    view = memoryview(out)
    done = 0
    while done < len(view):
        try:
            n_bytes = read_at(file, begin + done, view[done:])
        except ReadError:
            raise
        except (OSError, ValueError) as error:  # a closed file is a ValueError
            raise ReadError(f"Could not read {where}: {cause(error)}.") from error
        if not n_bytes:
            raise ReadError(
                f"Could not read {where}: the file ends at byte {begin + done}, {len(view) - done} bytes too early. It "
                "was truncated after it was opened."
            )
        done += n_bytes
    return out
