"""Arrays whose rows, or windows of rows, become items: `.npy` files and `.npz` archives, read by `NumpySource`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from penstock.convert.inputs.protocol import input_place
from penstock.convert.inputs.source import SourceRecording
from penstock.convert.windows import Windows, check_overlap
from penstock.core.checks import check_integer
from penstock.core.errors import OptionError, SourceError
from penstock.core.protocols import Source
from penstock.files.spans.options import RemoteOptions
from penstock.files.stores.url import Url
from penstock.shard.names import check_fields
from penstock.source.numpy_files import NumpySource
from penstock.source.windowed import Windowed

__all__ = ["NpyInput", "NpzInput", "check_rows", "normalize_fields", "record_rows"]


@dataclass(frozen=True, slots=True)
class NpyInput:
    """A `.npy` file: each row along the first axis, or each window of rows, is an item. The field is called `data`.

    Values keep their dtype, in native byte order. Arrays of Python objects are refused.

    Parameters
    ----------
    sequence_length
        Rows per window; None for single rows.
    overlap
        The fraction of a window that the next one repeats.
    """

    path: Path | Url
    sequence_length: int | None = None
    overlap: float = 0.0
    remote: RemoteOptions | None = field(default=None, repr=False, compare=False)  # does not change what is read

    def __post_init__(self) -> None:
        object.__setattr__(self, "path", input_place(self.path))
        check_rows(self.sequence_length, self.overlap)

    def open(self) -> SourceRecording:
        """Open the file and read its header."""
        source = NumpySource(self.path, **_options_of(self.remote))
        return record_rows(source, self, {"format": "npy"})


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

    def open(self) -> SourceRecording:
        """Open the archive and unpack compressed members."""
        source = NumpySource(self.path, self.fields, scratch=self.scratch, **_options_of(self.remote))
        return record_rows(source, self, {"format": "npz"}, source.notes)


def check_rows(sequence_length: int | None, overlap: float) -> None:
    """Raise OptionError if rows cannot be cut like this."""
    check_overlap(overlap)
    if sequence_length is not None:
        check_integer("sequence_length", sequence_length, at_least=1)
    elif overlap:
        raise OptionError(
            f"overlap must be 0 without sequence_length, got {overlap!r}. Single rows cannot overlap; give "
            "sequence_length too."
        )


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


def _options_of(remote: RemoteOptions | None) -> dict[str, Any]:
    if remote is None:
        return {}
    kept = {"cache": remote.cache, "cache_bytes": remote.cache_bytes} if remote.cache is not None else {}
    return {"store": remote.store, **kept}


def record_rows(source: Source, given: Any, about: Mapping[str, Any], notes: Sequence[str] = ()) -> SourceRecording:
    """Return the recording of the rows of a source, or of windows of them, as the options of an input say."""
    path, sequence_length = given.path, given.sequence_length
    try:
        check_fields(source.fields, "metadata")
    except OptionError as error:
        source.close()
        raise SourceError(f"Could not convert {path}: {error}") from error
    n_rows = len(source.index)
    fields = {
        name: {"shape": [n_rows, *(each.shape or ())], "dtype": str(each.dtype)} for name, each in source.fields.items()
    }
    about = {**about, "fields": fields}
    if sequence_length is None:
        return SourceRecording(source, about, file=path.name, notes=notes)
    if n_rows < sequence_length:
        source.close()
        raise SourceError(
            f"sequence_length must be at most {n_rows}, the number of rows of {path}, got {sequence_length}."
        )
    windows = Windows(n_rows, sequence_length, given.overlap)
    if windows.left_out:
        which = "row is" if windows.left_out == 1 else f"{windows.left_out} rows are"
        notes = [*notes, f"The last {which} left out: the {n_rows} rows do not end with a whole window."]
    return SourceRecording(Windowed(source, sequence_length, windows.step), about, file=path.name, notes=notes)
