"""`.npz` archives: every array is a field. What is stored plainly is read in place; what is compressed, unpacked once.

A compressed member can only be read from its beginning, so it goes to an unnamed temporary file, piece by piece, when
the archive is opened. No member is ever unpickled.
"""

import io
import lzma
import os
import shutil
import struct
import tempfile
import zipfile
import zlib
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from penstock.convert.inputs.arrays import Column, RowRecording, check_rows, npy_column, windows_of
from penstock.core.errors import OptionError, ReadError, SourceError, WriteError
from penstock.files.kinds import opened
from penstock.shard.names import check_fields

__all__ = ["NpzInput", "check_lengths", "checked_fields"]

_PIECE_BYTES = 1 << 20
_LOCAL = struct.Struct("<4s5H3L2H")  # signature, …, flags, method, …, lengths of name and extra
_ENCRYPTED = 0x1
_BROKEN = (zipfile.BadZipFile, zlib.error, lzma.LZMAError, EOFError, NotImplementedError, RuntimeError, ValueError)


@dataclass(frozen=True, slots=True)
class NpzInput:
    """An `.npz` archive: its arrays have one length, and a sample is the same row, or window of rows, of each.

    Members that `np.savez` stored are read in place, without their checksum: that would take reading all of them.
    Members that `np.savez_compressed` wrote are unpacked to a temporary file each time the archive is opened, and their
    checksum is compared. Memory stays small in both cases; the temporary file is as large as the arrays.

    Parameters
    ----------
    fields
        The arrays to convert; None for all.
    sequence_length
        Rows of a window; None for single rows.
    overlap
        The share of a window that the next one repeats.
    scratch
        The folder of temporary files; None for the system's, which may lie in memory.
    """

    path: Path
    fields: tuple[str, ...] | None = None
    sequence_length: int | None = None
    overlap: float = 0.0
    scratch: Path | None = field(default=None, repr=False, compare=False)  # changes nothing of what is read

    def __post_init__(self) -> None:
        object.__setattr__(self, "path", Path(self.path))
        object.__setattr__(self, "scratch", None if self.scratch is None else Path(self.scratch))
        check_rows(self.sequence_length, self.overlap)
        object.__setattr__(self, "fields", checked_fields(self.fields))

    def open(self) -> RowRecording:
        """Open the archive; unpack what is compressed."""
        with ExitStack() as stack:
            file = stack.enter_context(opened(self.path))
            try:
                with zipfile.ZipFile(file) as archive:
                    members, notes = _members(archive, self.path)
                    wanted = _wanted(members, self.fields, self.path)
                    columns = {name: self._column(file, archive, members[name], stack) for name in wanted}
                    notes += [
                        f"The array {name!r} is left out: it is not among the fields."
                        for name in members
                        if name not in wanted
                    ]
            except (*_BROKEN, struct.error, OverflowError) as error:
                if isinstance(error, SourceError):
                    raise
                raise SourceError(f"{self.path} is no undamaged .npz: {error}.") from error
            except (ReadError, WriteError):
                raise
            except OSError as error:
                raise ReadError(f"Could not read {self.path}: {error}.") from error
            check_lengths({name: column.shape for name, column in columns.items()}, 0, self.path)
            cut = windows_of(columns, self.sequence_length, self.overlap, self.path)
            return RowRecording(
                self.path,
                columns,
                cut,
                about={"format": "npz"},
                notes=notes,
                release=stack.pop_all().close,
            )

    def _column(self, file: io.FileIO, archive: zipfile.ZipFile, member: zipfile.ZipInfo, stack: ExitStack) -> Column:
        what = f"{member.filename} in {self.path}"
        if member.flag_bits & _ENCRYPTED:
            raise SourceError(f"{what} is encrypted; save it without a password.")
        if member.compress_type == zipfile.ZIP_STORED:
            return npy_column(file, _data_offset(file, member, what), member.file_size, what)
        unpacked = stack.enter_context(_unpacked(archive, member, self.scratch, what))
        return npy_column(unpacked, 0, member.file_size, what)


def checked_fields(fields: tuple[str, ...] | None) -> tuple[str, ...] | None:
    """Return the names of fields as a tuple, or say why they cannot be ones."""
    if fields is None:
        return None
    if isinstance(fields, str) or not fields:
        raise OptionError(f"fields={fields!r}; give a tuple of one name or more, such as ('lfp',), or None for all.")
    if len(set(fields)) < len(fields):
        raise OptionError(f"fields={tuple(fields)!r} has a name twice; give each once.")
    check_fields(fields, "metadata")
    return tuple(fields)


def check_lengths(shapes: dict[str, tuple[int, ...]], axis: int, path: Path) -> None:
    """Raise SourceError where arrays cannot be cut together along `axis`."""
    lengths = {shape[axis] if len(shape) > axis else None for shape in shapes.values()}
    if len(lengths) > 1 or None in lengths:
        listed = ", ".join(f"{name} {shape}" for name, shape in shapes.items())
        raise SourceError(
            f"The arrays of {path} differ in length along axis {axis}: {listed}. Name those that belong together, for "
            f"example fields=({next(iter(shapes))!r},)."
        )


def _members(archive: zipfile.ZipFile, path: Path) -> tuple[dict[str, zipfile.ZipInfo], list[str]]:
    """Return the arrays of an archive by name, and what it has besides."""
    members: dict[str, zipfile.ZipInfo] = {}
    notes = []
    for member in archive.infolist():
        name = member.filename
        if "/" in name or "\\" in name or ".." in name or "\0" in member.orig_filename:
            raise SourceError(f"The member {name!r} of {path} has a slash or '..' in its name; save it without.")
        if not name.endswith(".npy"):
            notes.append(f"The member {name!r} is left out: it is no array.")
        elif members.setdefault(name.removesuffix(".npy"), member) is not member:
            raise SourceError(f"{path} has two members {name!r}; which one is meant cannot be known.")
    return members, notes


def _wanted(members: dict[str, zipfile.ZipInfo], fields: tuple[str, ...] | None, path: Path) -> tuple[str, ...]:
    has = ", ".join(members) or "none"
    if not members or not set(fields or ()) <= set(members):
        missing = [name for name in fields or () if name not in members]
        raise SourceError(f"{path} lacks {', '.join(missing) or 'arrays'}; its arrays are: {has}.")
    return tuple(members) if fields is None else fields


def _data_offset(file: io.FileIO, member: zipfile.ZipInfo, what: str) -> int:
    """Return where the data of a stored member begin: its own header says it, the central directory does not."""
    head = os.pread(file.fileno(), _LOCAL.size, member.header_offset)
    if len(head) < _LOCAL.size:
        raise SourceError(f"{what} lies beyond the end of the file: the archive is truncated.")
    signature, _, flags, method, *_, name_bytes, extra_bytes = _LOCAL.unpack(head)
    begin: int = member.header_offset + _LOCAL.size + name_bytes + extra_bytes
    raw = os.pread(file.fileno(), name_bytes, member.header_offset + _LOCAL.size)
    name = raw.decode("utf-8" if flags & 0x800 else "cp437", errors="replace")
    if signature != b"PK\x03\x04" or method != zipfile.ZIP_STORED or name != member.orig_filename:
        raise SourceError(f"{what} is damaged: its header at byte {member.header_offset} is that of something else.")
    if member.compress_size != member.file_size or begin + member.file_size > os.fstat(file.fileno()).st_size:
        raise SourceError(f"{what} is damaged: it has {member.file_size} bytes, and fewer are there.")
    return begin


def _unpacked(archive: zipfile.ZipFile, member: zipfile.ZipInfo, scratch: Path | None, what: str) -> io.FileIO:
    """Return an unnamed file of the bytes of a compressed member, whose checksum is right."""
    folder = Path(tempfile.gettempdir()) if scratch is None else scratch
    try:
        free = shutil.disk_usage(folder).free
        if member.file_size > free:
            raise WriteError(
                f"{what} unpacks to {member.file_size} bytes, and {folder} has {free} left; give another folder as "
                "scratch, or save the archive with np.savez, which needs no unpacking."
            )
        unpacked = tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115  # whoever asked closes it
    except OSError as error:
        if isinstance(error, WriteError):
            raise
        raise WriteError(f"Could not make a temporary file in {folder} for {what}: {error}.") from error
    try:
        _unpack(archive, member, unpacked, f"{what} to {folder}")
    except BaseException:
        unpacked.close()
        raise
    return unpacked


def _unpack(archive: zipfile.ZipFile, member: zipfile.ZipInfo, out: io.FileIO, what: str) -> None:
    n_bytes = 0
    with archive.open(member) as packed:
        while piece := packed.read(_PIECE_BYTES):  # at the end, compares the checksum
            n_bytes += len(piece)
            view = memoryview(piece)
            while view:
                try:
                    view = view[out.write(view) :]
                except OSError as error:
                    raise WriteError(f"Could not unpack {what}: {error}.") from error
    if n_bytes != member.file_size:
        raise SourceError(f"Could not unpack {what}: it has {n_bytes} bytes instead of {member.file_size}.")
