"""Zarr stores of version 2 and 3: an array, or the arrays of a group, cut along an axis and read chunk by chunk."""

import warnings
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from penstock.convert.inputs.arrays import check_rows, normalize_fields, record_rows
from penstock.convert.inputs.protocol import input_place
from penstock.convert.inputs.source import SourceRecording
from penstock.core.checks import check_integer
from penstock.core.errors import MissingDependency, ReadError, SourceError
from penstock.core.text import count
from penstock.files.regular import check_regular, check_tree
from penstock.files.spans.options import RemoteOptions
from penstock.files.spans.remote_folder import RemoteFolder
from penstock.files.stores.url import Url
from penstock.source.checks import allocate
from penstock.source.chunked_rows import ChunkedRowReader
from penstock.source.numpy_files import check_lengths
from penstock.source.rows import Column, RowsSource
from penstock.source.stored.open_array import open_array
from penstock.source.stored.zarr.array import ZarrArray
from penstock.source.stored.zarr.group import find_arrays
from penstock.source.stored.zarr.store_folder import LocalFolder, StoreFolder, UrlFolder
from penstock.source.stored.zarr.zarr_python import ZarrPythonArray, open_with_zarr

__all__ = ["ZarrInput", "list_arrays"]

_MOST_CHUNKS = 100_000  # checked for existence: takes some seconds at most


@dataclass(frozen=True, slots=True)
class ZarrInput:
    """A zarr store in a folder, at a URL or in a zip file of this machine. It is never written to.

    An array becomes the field `data`. The arrays of a group become fields under their own names. To convert a group
    within the store, give its folder.

    A chunk that was not stored when the store was opened reads as the array's fill value: zarr does not distinguish
    lost chunks from chunks that were never written. `notes` says how many there are. A chunk that is lost later, is
    truncated or differs from the checksum of its codec is an error. At a URL, so is one that is replaced, and any
    missing chunk of an array with more chunks than can be asked for.

    Parameters
    ----------
    fields
        The arrays of a group to convert; None for all. They must have the same length along `axis`.
    axis
        The axis along which items lie; it becomes the first axis.
    sequence_length
        Rows per window; None for single rows.
    overlap
        The fraction of a window that the next one repeats.
    """

    path: Path | Url
    fields: tuple[str, ...] | None = None
    axis: int = 0
    sequence_length: int | None = None
    overlap: float = 0.0
    remote: RemoteOptions | None = field(default=None, repr=False, compare=False)  # does not change what is read

    is_folder: ClassVar[bool] = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "path", input_place(self.path))
        object.__setattr__(self, "fields", normalize_fields(self.fields))
        check_integer("axis", self.axis, at_least=0)
        check_rows(self.sequence_length, self.overlap)

    def open(self) -> SourceRecording:
        """Open the store and read the metadata of its arrays."""
        notes: list[str] = []
        with ExitStack() as stack:
            if isinstance(self.path, Url):
                store = self._open_url(self.path)
                stack.callback(store.remote.close)
                arrays, folders = self._select_remote(store)
            else:
                node = _open_store(self.path, stack)
                arrays, notes = _select_arrays(node, self.fields, self.path)
                folders = _local_folders(self.path, arrays)
            check_lengths({name: tuple(array.shape) for name, array in arrays.items()}, self.axis, self.path)
            columns = {}
            for name, array in arrays.items():
                self._check_array(name, array)
                is_plain = name in folders and np.dtype(array.dtype).kind in "biufc"
                stored = _CheckedArray(folders[name]) if is_plain else array
                reader = ChunkedRowReader(_AxisFirst(array, stored, self.axis, f"the array {name!r} of {self.path}"))
                columns[name] = Column(reader.shape, reader.dtype, reader.rows)
                notes = [*notes, *_note_missing_chunks(name, array, stored)]
            zarr_format = int(next(iter(arrays.values())).metadata.zarr_format)
            about = {"format": "zarr", "zarr_format": zarr_format, "axis": self.axis}
            source = RowsSource(columns, str(self.path), stack.pop_all().close)
            return record_rows(source, self, about, notes)

    def list_folders(self) -> list[Url]:
        """Return the URLs of a store and of its arrays, whose metadata say whether it has changed."""
        assert isinstance(self.path, Url), "a folder of this machine is searched"
        store = self._open_url(self.path)
        try:
            return [self.path, *(self.path / name for name in self._name_arrays(store) or ())]
        finally:
            store.remote.close()

    def _open_url(self, url: Url) -> UrlFolder:
        if PurePosixPath(url.name).suffix.lower() == ".zip":
            raise SourceError(
                f"A zarr store in a zip file must be on this machine, got the URL {url}. Copy it, or unpack it there: "
                "a folder of zarr is read from a URL."
            )
        return UrlFolder(RemoteFolder(url, self.remote or RemoteOptions()), is_listed=True)

    def _name_arrays(self, store: UrlFolder) -> list[str] | None:
        """Return the names of the arrays to convert; None if the URL is that of a single array."""
        try:
            found = find_arrays(store)
        except SourceError:  # the server does not list them
            if self.fields is None:
                raise
            return list(self.fields)
        if found is None or self.fields is None:
            return found
        missing = [name for name in self.fields if name not in found]
        if missing:
            raise SourceError(f"{self.path} has no {', '.join(missing)}. Its arrays are: {', '.join(found)}.")
        return list(self.fields)

    def _select_remote(self, store: UrlFolder) -> tuple[dict[str, Any], Mapping[str, StoreFolder]]:
        """Return the arrays to convert, by field, and their folders."""
        names = self._name_arrays(store)
        if names is None:
            _check_single(self.fields, self.path)
        folders = {"data": store} if names is None else {name: store / name for name in names}
        return {name: open_with_zarr(folder) for name, folder in folders.items()}, folders

    def _check_array(self, name: str, array: Any) -> None:
        dtype = np.dtype(array.dtype)
        if dtype.hasobject or dtype.kind == "T":
            raise SourceError(
                f"Arrays must hold values of fixed size, but {name!r} of {self.path} holds {dtype}. Store it as "
                "numbers or as strings of fixed width."
            )
        if not array.size:
            raise SourceError(f"Arrays must not be empty, but {name!r} of {self.path} has shape {tuple(array.shape)}.")


class _CheckedArray:
    """Numbers in a folder or at a URL, read as `ZarrSource` does: every chunk is checked before it is decompressed.

    Decompressors believe what a damaged chunk says about its length, and read on behind its end. Chunks that were
    stored when the array was opened must be there.
    """

    def __init__(self, folder: StoreFolder) -> None:
        found = open_array(folder).record_chunks(None)
        assert isinstance(found, ZarrArray | ZarrPythonArray), "zarr-python has opened it, too"
        self._stored = found

    @property
    def is_remote(self) -> bool:
        """Whether it is at a URL."""
        return self._stored.remote is not None

    @property
    def missing(self) -> tuple[int, int] | None:
        """How many chunk files are missing, and of how many; None if that is not known."""
        keys = self._stored.layout.keys if isinstance(self._stored, ZarrArray) else self._stored.keys
        stored = self._stored.record.stored
        if stored is None or keys is None:
            return None
        return keys.n_files - (keys.n_files if stored.numbers is None else len(stored.numbers)), keys.n_files

    def __getitem__(self, selection: tuple[slice, ...]) -> NDArray[Any]:
        bounds = self._bounds(selection)
        out = allocate(tuple(stop - start for start, stop in bounds), self._stored.dtype, "rows of a zarr array")
        if self.is_remote:  # all chunks at once
            self._stored.locate_rows(np.arange(*bounds[0]), tuple(bounds[1:])).read_ahead()
        for task in self._stored.tasks(*bounds[0], tuple(bounds[1:]), out):
            task()
        return out

    def _bounds(self, selection: tuple[slice, ...]) -> list[tuple[int, int]]:
        shape = self._stored.shape
        whole = (slice(None),) * (len(shape) - len(selection))
        return [part.indices(size)[:2] for part, size in zip(selection + whole, shape, strict=True)]


class _AxisFirst:
    """A zarr array with one axis moved to the front, in native byte order, for `ChunkedRowReader`.

    Parameters
    ----------
    array
        The array, for its metadata.
    stored
        What its values are read from.
    """

    def __init__(self, array: Any, stored: Any, axis: int, what: str) -> None:
        self._stored, self._axis, self._what = stored, axis, what
        self.dtype = np.dtype(array.dtype).newbyteorder("=")
        self.shape = (array.shape[axis], *array.shape[:axis], *array.shape[axis + 1 :])
        # In a zarr shard, its inner chunks are decoded.
        self.chunks = (array.chunks[axis],)

    def __getitem__(self, rows: slice) -> NDArray[Any]:
        try:
            found = self._stored[(*(slice(None),) * self._axis, rows)]
        except Exception as error:  # every codec raises its own errors
            raise ReadError(
                f"Could not read rows {rows.start}–{rows.stop - 1} of {self._what}: {type(error).__name__}: {error}"
            ) from error
        return np.ascontiguousarray(np.moveaxis(found, self._axis, 0), self.dtype)


def _local_folders(path: Path, arrays: Mapping[str, Any]) -> Mapping[str, StoreFolder]:
    return {name: LocalFolder(path / array.path) for name, array in arrays.items()} if path.is_dir() else {}


def list_arrays(path: Path) -> list[tuple[str, Any]]:
    """Return the arrays of a store, also in groups of groups, by their paths; the path of a single array is empty."""
    with ExitStack() as stack:
        node = _open_store(path, stack)
        return [("", node)] if hasattr(node, "shape") else list(_walk_group(node, path, ""))


def _walk_group(group: Any, path: Path, prefix: str) -> Iterator[tuple[str, Any]]:
    arrays, groups, _ = _list_group(group, path)
    for name, array in arrays.items():
        yield f"{prefix}{name}", array
    for name in groups:
        yield from _walk_group(group[name], path, f"{prefix}{name}/")


def _open_store(path: Path, stack: ExitStack) -> Any:
    """Return the array or group at the root of a store."""
    try:
        import zarr  # noqa: PLC0415
        import zarr.storage  # noqa: PLC0415
    except ImportError as error:
        raise MissingDependency("zarr", "zarr", "Reading zarr stores") from error
    if not path.exists():
        raise ReadError(f"Could not open {path}: no such file or folder.")
    try:
        if path.is_dir():
            check_tree(path)
            return zarr.open(zarr.storage.LocalStore(path, read_only=True), mode="r")
        check_regular(path)
        store = zarr.storage.ZipStore(path, mode="r")
        node = zarr.open(store, mode="r")
    except Exception as error:  # a malformed store can make zarr raise anything
        raise SourceError(f"Could not open {path} as a zarr store: {type(error).__name__}: {error}") from error
    stack.callback(store.close)
    return node


def _select_arrays(node: Any, fields: tuple[str, ...] | None, path: Path) -> tuple[dict[str, Any], list[str]]:
    """Return the arrays to convert, by field, and notes on what is left out."""
    if hasattr(node, "shape"):
        _check_single(fields, path)
        return {"data": node}, []
    found, groups, remarks = _list_group(node, path)
    missing = [name for name in fields or () if name not in found]
    if missing or not found:
        has = ", ".join(found) or "none"
        inner = f" Its groups are: {', '.join(groups)}. Give the folder of one to convert it." if groups else ""
        which = f"{', '.join(missing)}. Its arrays are: {has}" if missing and found else "arrays"
        raise SourceError(f"{path} has no {which}.{inner}")
    notes = [*remarks, *(f"The group {name!r} is left out; give its folder to convert it." for name in groups)]
    if fields is None:
        return found, notes
    left_out = [f"The array {name!r} is left out: it is not among the fields." for name in found if name not in fields]
    return {name: found[name] for name in fields}, [*notes, *left_out]


def _check_single(fields: tuple[str, ...] | None, path: Path | Url) -> None:
    if fields not in (None, ("data",)):
        raise SourceError(f"fields must be left out for {path}, a single array, whose field is 'data', got {fields!r}.")


def _list_group(group: Any, path: Path) -> tuple[dict[str, Any], list[str], list[str]]:
    """Return the arrays of a group, the names of its groups, and the warnings of zarr about the rest."""
    try:
        # zarr warns of objects that it does not recognize, such as an array that has lost its metadata.
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            arrays, groups = dict(sorted(group.arrays())), sorted(name for name, _ in group.groups())
    except Exception as error:  # malformed metadata can make zarr raise anything
        raise SourceError(f"Could not list the arrays of {path}: {type(error).__name__}: {error}") from error
    return arrays, groups, sorted({str(warning.message) for warning in warned})


def _note_missing_chunks(name: str, array: Any, stored: Any) -> list[str]:
    """Return a note on the chunks that are not stored and read as the fill value."""
    fill = f"missing chunks read as the fill value, {array.fill_value}"
    if isinstance(stored, _CheckedArray) and stored.is_remote:
        missing, total, what = *(stored.missing or (0, 0)), "chunk file"
        if not total:
            return [f"The array {name!r} has too many chunks to ask for all of them; a missing one is an error."]
    elif array.nchunks > _MOST_CHUNKS:
        return [f"The array {name!r} has {array.nchunks} chunks, too many to check that all are stored; {fill}."]
    else:
        try:
            missing, total, what = array.nchunks - array.nchunks_initialized, array.nchunks, "chunk"
        except (ReadError, PermissionError):  # at a URL, zarr-python does not list them
            return [f"Whether all chunks of the array {name!r} are stored is not known; {fill}."]
    are = "is" if missing == 1 else "are"
    return [f"{missing} of {count(total, what)} of the array {name!r} {are} not stored; {fill}."] if missing > 0 else []
