"""`.npz` archives: every array is a field. Uncompressed members are read in place; compressed ones are unpacked once.

A compressed member can only be read from its beginning, so it is copied to an unnamed temporary file when the archive
is opened. No member is ever unpickled.
"""

import io
import lzma
import shutil
import struct
import tempfile
import zipfile
import zlib
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from penstock.convert.inputs.arrays import HEAD_BYTES, Column, RowRecording, check_rows, cut_windows, npy_column
from penstock.convert.inputs.protocol import input_place
from penstock.core.errors import OptionError, ReadError, SourceError, WriteError
from penstock.core.text import cause
from penstock.files.byte_files import ByteFile, count_bytes, open_bytes, read_range
from penstock.files.regular import open_input
from penstock.files.spans.options import RemoteOptions
from penstock.files.stores.url import Url
from penstock.shard.codec import NpyHeader, parse_npy_header
from penstock.shard.names import check_fields

__all__ = ["NpzInput", "check_lengths", "list_headers", "normalize_fields"]

_COPY_BYTES = 1 << 20
_LOCAL = struct.Struct("<4s5H3L2H")  # signature, …, flags, method, …, lengths of name and extra
_ENCRYPTED = 0x1
_METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)  # bzip2 and xz inflate a block at once, whatever its size
_BROKEN = (zipfile.BadZipFile, zlib.error, lzma.LZMAError, EOFError, NotImplementedError, RuntimeError, ValueError)


@dataclass(frozen=True, slots=True)
class NpzInput:
    """An `.npz` archive whose arrays have the same length. An item is the same row, or window of rows, of each.

    Members written by `np.savez` are read in place. Their checksum is not compared, because that would take reading
    whole members. Members written by `np.savez_compressed` are unpacked to a temporary file each time the archive is
    opened, and their checksum is compared. Memory use is small in both cases; the temporary file is as large as the
    arrays.

    Parameters
    ----------
    fields
        The arrays to convert; None for all.
    sequence_length
        Rows per window; None for single rows.
    overlap
        The fraction of a window that the next one repeats.
    scratch
        The folder of temporary files; None for the folder of the system, which may be in memory.
    """

    path: Path | Url
    fields: tuple[str, ...] | None = None
    sequence_length: int | None = None
    overlap: float = 0.0
    scratch: Path | None = field(default=None, repr=False, compare=False)  # does not change what is read
    remote: RemoteOptions | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "path", input_place(self.path))
        object.__setattr__(self, "scratch", None if self.scratch is None else Path(self.scratch))
        check_rows(self.sequence_length, self.overlap)
        object.__setattr__(self, "fields", normalize_fields(self.fields))

    def open(self) -> RowRecording:
        """Open the archive and unpack compressed members."""
        with ExitStack() as stack:
            file = stack.enter_context(open_bytes(self.path, self.remote))
            try:
                with zipfile.ZipFile(file) as archive:
                    members, notes = _list_members(archive, self.path)
                    wanted = _select_fields(members, self.fields, self.path)
                    columns = {name: self._column(file, archive, members[name], stack) for name in wanted}
                    notes += [
                        f"The array {name!r} is left out: it is not among the fields."
                        for name in members
                        if name not in wanted
                    ]
            except (*_BROKEN, struct.error, OverflowError) as error:
                if isinstance(error, SourceError):
                    raise
                raise SourceError(f"{self.path} is not an .npz archive, or it is damaged: {error}.") from error
            except (ReadError, WriteError):
                raise
            except OSError as error:
                raise ReadError(f"Could not read {self.path}: {cause(error)}.") from error
            check_lengths({name: column.shape for name, column in columns.items()}, 0, self.path)
            windows = cut_windows(columns, self.sequence_length, self.overlap, self.path)
            return RowRecording(
                self.path,
                columns,
                windows,
                about={"format": "npz"},
                notes=notes,
                release=stack.pop_all().close,
            )

    def _column(self, file: ByteFile, archive: zipfile.ZipFile, member: zipfile.ZipInfo, stack: ExitStack) -> Column:
        what = f"{member.filename} in {self.path}"
        if member.flag_bits & _ENCRYPTED:
            raise SourceError(f"Members must not be encrypted, but {what} is. Save it without a password.")
        if member.compress_type == zipfile.ZIP_STORED:
            return npy_column(file, _data_offset(file, member, what), member.file_size, what)
        unpacked = stack.enter_context(_unpack_to_temporary(archive, member, self.scratch, what))
        return npy_column(unpacked, 0, member.file_size, what)


def list_headers(path: Path) -> dict[str, NpyHeader | str]:
    """Return the header of each array of an archive; in place of one that cannot be read, the reason."""
    found: dict[str, NpyHeader | str] = {}
    with open_input(path) as file:
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


def normalize_fields(fields: tuple[str, ...] | None) -> tuple[str, ...] | None:
    """Return the names of fields as a tuple, or raise OptionError if they cannot be used."""
    if fields is None:
        return None
    if isinstance(fields, str) or not fields:
        raise OptionError(
            f"fields must be a tuple of one or more names, such as ('lfp',), or None for all, got {fields!r}."
        )
    if len(set(fields)) < len(fields):
        raise OptionError(f"fields must name each array once, got {tuple(fields)!r}.")
    check_fields(fields, "metadata")
    return tuple(fields)


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
