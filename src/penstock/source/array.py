"""Items from NumPy arrays and memory maps: one field per array."""

import copy
import hashlib
import math
import mmap
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from penstock.core.errors import ReadError, SourceError
from penstock.core.index import Index
from penstock.core.text import cause
from penstock.core.types import UNNAMED, Block, Field, Span
from penstock.files.regular import check_regular, open_descriptor
from penstock.source.checks import allocate_block, check_items, check_span, keep_existing
from penstock.source.file_ranges import FileRanges, StoredFile
from penstock.source.native import copy_rows, is_compiled
from penstock.source.select.selectable import Selectable, check_fields

__all__ = ["ArraySource", "refuse_foreign"]

# A chunk is what is cheap to read together: about a megabyte amortises a seek and still mixes well.
_CHUNK_BYTES = 1 << 20
# Their arrays are in memory, and an axis is known by its place.
_IN_MEMORY = {
    "array",
    "builtins",
    "datasets",
    "jax",
    "jaxlib",
    "numpy",
    "pandas",
    "polars",
    "pyarrow",
    "tensorflow",
    "torch",
}
_FOREIGN = {
    "anndata": "its matrix may be sparse, and its annotations are no arrays. Give a dense matrix, "
    "penstock.open({'x': adata.X}), or a dataset with len() and [i] that returns adata.X[i].toarray()[0]",
    "dask": "it is not computed yet. Store it, such as with to_zarr, and open that, or give x.compute() if it fits "
    "into memory",
    "h5py": "it is not in memory. Open it by its path, penstock.open('day.h5/x'), or several by fields=['x', 'y']",
    "scipy": "the rows of a sparse matrix are no arrays. Give x.toarray() if it fits into memory, or a dataset with "
    "len() and [i] that returns x[i].toarray()[0]",
    "xarray": "its axes have names, which would be paired by their places, and it may not be in memory. Open the zarr "
    "behind it, penstock.open('x.zarr', fields=['a', 'b']), or give arrays in memory whose first axes are the same, "
    "penstock.open({'a': data['a'].values})",
    "zarr": "it is not in memory. Open it by its path, penstock.open('x.zarr', fields=['a'])",
}
# What the identity hashes of the content: enough to tell two recordings apart, and read in a millisecond.
_HASHED_ITEMS, _HASHED_BYTES = 16, 1024
# A row that is not contiguous is read ahead with what lies between its values, if that is little.
_ENCLOSING_RATIO, _ENCLOSING_BYTES = 4, 1 << 15


class ArraySource(Selectable):
    """Items are the rows of one or more arrays of equal length.

    Memory maps stay on disk: they are pickled as path, offset and shape and mapped again in the process that reads
    them, so a worker process never gets a copy of the data. A file that is truncated while it is read raises ReadError
    if its rows are contiguous and in native byte order.

    `prepare` and `release` concern memory maps: the bytes of each row in its file. A row whose values lie far apart in
    the file, as in a transposed array, is neither read ahead nor given back. Rows that overlap, as in sliding windows,
    are not given back.

    Parameters
    ----------
    arrays
        Field name to NumPy array, memory map (`np.load(path, mmap_mode="r")`), or anything NumPy converts without a
        copy, such as a CPU tensor.
    chunk_items
        Items per chunk, the unit of `WindowShuffle`. None: about a megabyte.

    Examples
    --------
    >>> source = ArraySource({"x": np.arange(103), "y": np.ones((103, 2))})
    >>> source.index, source.fields["y"].shape
    (Index(103 items in 1 chunks), (2,))
    >>> source.take(np.array([5, 3]))["x"].tolist()
    [5, 3]
    """

    def __init__(self, arrays: Mapping[str, ArrayLike], *, chunk_items: int | None = None) -> None:
        checked = _check_arrays(arrays)
        self._open: dict[str, NDArray[Any]] | None = checked
        self._arrays = {name: _MappedArray.locate(array) or array for name, array in checked.items()}
        self._files = self._find_files()
        self.fields: dict[str, Field] = {
            name: Field(array.dtype.newbyteorder("="), array.shape[1:]) for name, array in checked.items()
        }
        n_items = len(next(iter(checked.values())))
        if chunk_items is None:
            item_bytes = sum(field.item_bytes or 1 for field in self.fields.values())
            chunk_items = min(n_items, max(1, _CHUNK_BYTES // max(item_bytes, 1)))
        self.index = Index.uniform(n_items, chunk_items, identity=_identity(checked))

    def __repr__(self) -> str:
        return f"ArraySource({len(self.index)} items of {', '.join(self.fields)})"

    def with_fields(self, fields: Sequence[str]) -> "ArraySource":
        """Return a source of the same items with these fields alone; their arrays are shared."""
        other = copy.copy(self)
        names = check_fields(self, fields)
        other.fields = {name: self.fields[name] for name in names}
        other._arrays = {name: self._arrays[name] for name in names}
        other._files = {name: file for name, file in self._files.items() if name in names}
        other._open = None if self._open is None else {name: self._open[name] for name in names}
        return other

    def read(self, span: Span, out: Block | None = None) -> Block:
        """Return copies of consecutive items."""
        check_span(span, self)
        block = allocate_block(self.fields, len(span)) if out is None else out
        for name, array in self._open_arrays().items():
            target = block[name]
            if len(span) and self._can_copy_bytes(name, array, target, len(span)):
                # The items are contiguous: copy them as one row; if that fails, one by one to find the missing one.
                first = np.array([span.start * (array.nbytes // len(array))])
                if not self._copy_rows(name, array, first, target.reshape(1, -1)) or self._n_stored(name) < span.stop:
                    self._copy_mapped(name, array, np.arange(span.start, span.stop), target)
            else:
                np.copyto(target, array[span.start : span.stop])
        return block

    def take(self, items: NDArray[np.int64], out: Block | None = None) -> Block:
        """Return copies of any items, in the given order."""
        items = check_items(items, self)
        block = allocate_block(self.fields, len(items)) if out is None else out
        for name, array in self._open_arrays().items():
            target = block[name]
            if self._can_copy_bytes(name, array, target, len(items)):
                self._copy_mapped(name, array, items, target)
            # np.take copies all of a non-contiguous array first, and uses a buffer unless mode="clip".
            elif array.flags.c_contiguous and array.dtype.isnative:
                array.take(items, axis=0, out=target, mode="clip")
            else:
                np.copyto(target, array[items])
        return block

    def prepare(self, items: NDArray[np.int64]) -> int:
        """Start reading the rows of memory maps into the page cache; return the bytes that were not there."""
        rows = keep_existing(items, self)
        return sum(mapped.locate_rows(rows, self._files.get(name)).read_ahead() for name, mapped in self._memory_maps())

    def release(self, items: NDArray[np.int64]) -> None:
        """Give the pages of rows of memory maps back to the system."""
        arrays = self._open or {}  # referred to, so that the maps stay while their pages are given back
        for name, mapped in self._memory_maps():
            if not mapped.has_overlaps:
                address = arrays[name].__array_interface__["data"][0] if name in arrays else None
                mapped.locate_rows(keep_existing(items, self), self._files.get(name), address).give_back()

    @property
    def stored_bytes(self) -> int | None:
        """Bytes of the memory maps in their files, 0 for arrays in memory; None if a file is gone."""
        sizes: dict[str, int] = {}
        for mapped in {mapped for _, mapped in self._memory_maps()}:
            sizes[mapped.path] = sizes.get(mapped.path, 0) + mapped.n_bytes
        try:
            # Rows of sliding windows share bytes.
            return sum(min(n_bytes, Path(path).stat().st_size) for path, n_bytes in sizes.items())
        except OSError:
            return None

    def _memory_maps(self) -> "list[tuple[str, _MappedArray]]":
        return [(name, array) for name, array in self._arrays.items() if isinstance(array, _MappedArray)]

    def _can_copy_bytes(self, name: str, array: NDArray[Any], target: NDArray[Any], n_items: int) -> bool:
        """Return whether `n_items` items can be copied byte by byte from a memory map to `target`."""
        contiguous = array.flags.c_contiguous and target.flags.c_contiguous
        fits = target.dtype == array.dtype and target.shape == (n_items, *array.shape[1:])
        return contiguous and fits and isinstance(self._arrays[name], _MappedArray)

    def _copy_mapped(self, name: str, array: NDArray[Any], items: NDArray[np.int64], target: NDArray[Any]) -> None:
        """Copy items from a memory map; if the file was truncated, raise ReadError for the first missing item."""
        n_copied = self._copy_rows(name, array, items * (array.nbytes // len(array)), target)
        missing = np.flatnonzero(items >= self._n_stored(name))
        n_copied = min(n_copied, int(missing[0])) if len(missing) else n_copied
        if n_copied < len(target):
            mapped = self._arrays[name]
            assert isinstance(mapped, _MappedArray), "called for memory maps only"
            raise ReadError(
                f"Could not read item {items[n_copied]} of field {name!r}: {mapped.path} was truncated since it was "
                "opened, or the disk failed. Restore the file, and resume from a saved state."
            )

    def _copy_rows(self, name: str, array: NDArray[Any], begins: NDArray[np.int64], target: NDArray[Any]) -> int:
        """Copy rows from a memory map, or, without C, from its file: reading from a map could end the process."""
        mapped = self._arrays[name]
        assert isinstance(mapped, _MappedArray), "called for memory maps only"
        if is_compiled():
            return copy_rows(array, begins, target)
        with mapped.open_file(self._files.get(name)) as file:
            return copy_rows(array, begins, target, file=file, offset=mapped.offset)

    def _n_stored(self, name: str) -> int:
        """Return how many items the file of a contiguous memory map has now: past its end, a page reads as zeros."""
        mapped = self._arrays[name]
        assert isinstance(mapped, _MappedArray), "called for memory maps only"
        return mapped.n_stored(self._files.get(name))

    def close(self) -> None:
        """Close memory maps; the next read opens them again."""
        self._open = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_open": None}

    def _open_arrays(self) -> dict[str, NDArray[Any]]:
        arrays = self._open
        if arrays is None:
            arrays = {
                name: array.open(name) if isinstance(array, _MappedArray) else array
                for name, array in self._arrays.items()
            }
            self._files = self._find_files()
            self._open = arrays
        return arrays

    def _find_files(self) -> dict[str, tuple[int, int] | None]:
        """Return which file each memory map is of: another one may take its name."""
        return {name: array.file() for name, array in self._arrays.items() if isinstance(array, _MappedArray)}


@dataclass(frozen=True, slots=True)
class _MappedArray:
    """The location of a memory-mapped array, pickled instead of its content."""

    path: str
    offset: int
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @classmethod
    def locate(cls, array: NDArray[Any]) -> "_MappedArray | None":
        """Return where `array` lies in its file; None if it is not memory-mapped."""
        root: Any = array
        while isinstance(root, np.ndarray) and not isinstance(root.base, mmap.mmap):
            root = root.base
        # A copy-on-write map may have changes that are not in its file.
        if not isinstance(root, np.memmap) or root.filename is None or root.mode == "c":
            return None
        # A view inherits the `offset` attribute of its map, so compute the offset from the addresses.
        offset = root.offset + array.__array_interface__["data"][0] - root.__array_interface__["data"][0]
        return cls(str(root.filename), int(offset), array.dtype, array.shape, array.strides)

    @property
    def n_bytes(self) -> int:
        """Size of the values."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def has_overlaps(self) -> bool:
        """Whether bytes of a row are also bytes of the next one."""
        low, high = self._row_bounds()
        return self.shape[0] > 1 and abs(self.strides[0]) < high - low

    def locate_rows(
        self, rows: NDArray[np.int64], file: tuple[int, int] | None, address: int | None = None
    ) -> FileRanges:
        """Return where rows lie in `file`; nothing if their values lie far apart.

        Parameters
        ----------
        address
            Where the array is mapped; None if it is not.
        """
        low, high = self._row_bounds()
        row_bytes = math.prod(self.shape[1:]) * self.dtype.itemsize
        if file is None or high - low > max(_ENCLOSING_RATIO * row_bytes, _ENCLOSING_BYTES):
            return FileRanges.none()
        begins = self.offset + rows * self.strides[0] + low
        stored = StoredFile(self.path, file, 0 if address is None else address - self.offset)
        return FileRanges.of_file(stored, begins, begins + (high - low))

    def _row_bounds(self) -> tuple[int, int]:
        """Return where the bytes of a row begin and end, relative to its first value."""
        steps = [(size - 1) * stride for size, stride in zip(self.shape[1:], self.strides[1:], strict=True)]
        return sum(min(0, step) for step in steps), sum(max(0, step) for step in steps) + self.dtype.itemsize

    def file(self) -> tuple[int, int] | None:
        """Return which file has the name now; None if there is none."""
        try:
            found = os.stat(self.path)  # noqa: PTH116  # once per read: a Path takes twice as long
        except OSError:
            return None
        return found.st_dev, found.st_ino

    def n_stored(self, file: tuple[int, int] | None) -> int:
        """Return how many rows of the array, which is contiguous, `file` has now; all, if it has another name now."""
        try:
            found = os.stat(self.path)  # noqa: PTH116
        except OSError:
            return self.shape[0]
        row_bytes = math.prod(self.shape[1:]) * self.dtype.itemsize
        if (found.st_dev, found.st_ino) != file or not row_bytes:
            return self.shape[0]
        return min(self.shape[0], max(0, (found.st_size - self.offset) // row_bytes))

    @contextmanager
    def open_file(self, file: tuple[int, int] | None) -> Iterator[int]:
        """Yield a descriptor of the file that is mapped; -1 if another one has its name now, or none."""
        handle, same = -1, False
        with suppress(OSError):
            handle, found = open_descriptor(self.path)
            same = (found.st_dev, found.st_ino) == file
        try:
            yield handle if same else -1
        finally:
            if handle >= 0:
                os.close(handle)

    def open(self, name: str) -> NDArray[Any]:
        """Map the file; raise ReadError if that fails."""
        try:
            check_regular(self.path)
            raw = np.memmap(self.path, np.uint8, mode="r")
            return np.ndarray(self.shape, self.dtype, buffer=raw.data, offset=self.offset, strides=self.strides)
        except (OSError, ValueError, TypeError) as error:
            wanted = f"{self.shape} of {self.dtype}"
            raise ReadError(f"Could not map field {name!r}, {wanted}, in {self.path}: {cause(error)}") from error


def _check_arrays(arrays: Mapping[str, ArrayLike]) -> dict[str, NDArray[Any]]:
    if not isinstance(arrays, Mapping):
        raise SourceError(
            f"arrays must be a mapping of names to arrays, such as {{'x': array}}, got {type(arrays).__name__}."
        )
    if not arrays:
        raise SourceError("arrays must have at least one array, such as {'x': array}, got none.")
    checked: dict[str, NDArray[Any]] = {}
    for name, given in arrays.items():
        if not isinstance(name, str) or name == UNNAMED:
            raise SourceError(f"A field name must be a non-empty string, got {name!r}.")
        array = _as_array(name, given)
        if array.dtype.hasobject:
            raise SourceError(
                f"Field {name!r} must hold numbers or fixed-width strings, got Python objects ({array.dtype}). "
                "Convert them, or wrap the objects in a dataset for DatasetSource."
            )
        if array.ndim == 0:
            raise SourceError(f"Field {name!r} must have one axis or more (items are its rows), got a single value.")
        checked[name] = array
    lengths = {name: len(array) for name, array in checked.items()}
    if len(set(lengths.values())) > 1:
        found = ", ".join(f"{name} has {length}" for name, length in lengths.items())
        raise SourceError(f"All fields must have the same length: {found}. Give arrays with the same first axis.")
    if not next(iter(lengths.values())):
        raise SourceError(
            f"ArraySource must have at least one item, got empty arrays ({', '.join(lengths)}). Check their origin; "
            "for an empty selection use Take(source, []) or source.index.select([])."
        )
    return checked


def refuse_foreign(what: Any, must: str = "What is opened must be a path, arrays in memory or a dataset") -> None:
    """Raise SourceError for an object of a library whose objects look like arrays or datasets, and are none."""
    library = next((name for name in _libraries(what) if name in _FOREIGN), None)
    if library is not None:
        raise SourceError(f"{must}, got {library}.{type(what).__name__}: {_FOREIGN[library]}.")


def _libraries(what: Any) -> list[str]:
    """Return the libraries that an object's classes are from."""
    return [each.__module__.partition(".")[0] for each in type(what).__mro__[:-1]]


def _as_array(name: str, given: Any) -> NDArray[Any]:
    must = f"Field {name!r} must be an array in memory or a memory map"
    refuse_foreign(given, must)
    if _IN_MEMORY.isdisjoint(_libraries(given)):
        raise SourceError(
            f"{must}, got {type(given).__module__}.{type(given).__qualname__}. Give numpy.asarray(x) if it fits into "
            "memory, or a dataset with len() and [i]."
        )
    try:
        array: NDArray[Any] = np.asanyarray(given)
    except Exception as error:  # such as of a tensor on a GPU
        raise SourceError(f"Field {name!r} must be an array that NumPy converts: {cause(error)}") from error
    if np.ma.is_masked(array):
        raise SourceError(f"Field {name!r} has masked values, which would be read as values. Fill them, x.filled(...).")
    return array


def _identity(arrays: Mapping[str, NDArray[Any]]) -> str:
    digest = hashlib.blake2b(digest_size=8)
    for name, array in sorted(arrays.items()):
        digest.update(repr((name, array.dtype.str, array.shape)).encode())
        for item in np.unique(np.linspace(0, len(array) - 1, _HASHED_ITEMS).astype(np.int64)).tolist():
            row = np.ravel(array[item])[:_HASHED_BYTES]
            digest.update(row.tobytes()[:_HASHED_BYTES])
    return digest.hexdigest()
