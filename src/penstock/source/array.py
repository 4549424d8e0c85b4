"""Arrays in memory and on disk, several named fields side by side."""

import hashlib
import mmap
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from penstock.core.errors import ReadError, SourceError
from penstock.core.index import Index
from penstock.core.types import UNNAMED, Block, Field, Span
from penstock.source.checks import check_span, checked_items, room_for
from penstock.source.native import copy_rows

__all__ = ["ArraySource"]

# A chunk is what is cheap to read together: about a megabyte amortises a seek and still mixes well.
_CHUNK_BYTES = 1 << 20
# What the fingerprint of the content looks at: enough to tell two recordings apart, and read in a millisecond.
_SAMPLED_ITEMS, _SAMPLED_BYTES = 16, 1024


class ArraySource:
    """Items are the rows of one or more arrays of equal length.

    Memory maps stay on disk: they pickle as path, offset and shape and are opened again where they are read, so that a
    worker process never gets a copy of the data. A file that becomes shorter while it is read is a ReadError, where its
    rows lie one after the other, in the byte order of this machine.

    Parameters
    ----------
    arrays
        By field name: numpy arrays, memory maps (`np.load(path, mmap_mode="r")`), or anything numpy takes for one
        without copying, such as CPU tensors.
    chunk_items
        Items that are cheap to read together; the unit of `WindowShuffle`. None: about a megabyte.

    Examples
    --------
    >>> source = ArraySource({"x": np.arange(103), "y": np.ones((103, 2))})
    >>> source.index, source.fields["y"].shape
    (Index(103 items in 1 chunks), (2,))
    >>> source.take(np.array([5, 3]))["x"].tolist()
    [5, 3]
    """

    def __init__(self, arrays: Mapping[str, ArrayLike], *, chunk_items: int | None = None) -> None:
        opened = _checked(arrays)
        self._opened: dict[str, NDArray[Any]] | None = opened
        self._arrays = {name: _MappedArray.of(array) or array for name, array in opened.items()}
        self.fields: dict[str, Field] = {
            name: Field(array.dtype.newbyteorder("="), array.shape[1:]) for name, array in opened.items()
        }
        n_items = len(next(iter(opened.values())))
        if chunk_items is None:
            item_bytes = sum(field.item_bytes or 1 for field in self.fields.values())
            chunk_items = min(n_items, max(1, _CHUNK_BYTES // max(item_bytes, 1)))
        self.index = Index.uniform(n_items, chunk_items, identity=_identity(opened))

    def __repr__(self) -> str:
        return f"ArraySource({len(self.index)} items of {', '.join(self.fields)})"

    def read(self, span: Span, out: Block | None = None) -> Block:
        """Return consecutive items, copied."""
        check_span(span, self)
        block = room_for(self.fields, len(span)) if out is None else out
        for name, array in self._open().items():
            place = block[name]
            if len(span) and self._is_mapped(name, array, place, len(span)):
                # They lie side by side, as one row. Where it is not whole, one after the other tells which is missing.
                first = np.array([span.start * (array.nbytes // len(array))])
                if not copy_rows(array, first, place.reshape(1, -1)):
                    self._copy(name, array, np.arange(span.start, span.stop), place)
            else:
                np.copyto(place, array[span.start : span.stop])
        return block

    def take(self, items: NDArray[np.int64], out: Block | None = None) -> Block:
        """Return any items, copied, in the given order."""
        items = checked_items(items, self)
        block = room_for(self.fields, len(items)) if out is None else out
        for name, array in self._open().items():
            place = block[name]
            if self._is_mapped(name, array, place, len(items)):
                self._copy(name, array, items, place)
            # np.take copies the whole of an array that is not contiguous, and goes through a buffer unless mode="clip".
            elif array.flags.c_contiguous and array.dtype.isnative:
                array.take(items, axis=0, out=place, mode="clip")
            else:
                np.copyto(place, array[items])
        return block

    def _is_mapped(self, name: str, array: NDArray[Any], place: NDArray[Any], n_items: int) -> bool:
        """Return whether the bytes of so many items can be copied out of a memory map as they are."""
        contiguous = array.flags.c_contiguous and place.flags.c_contiguous
        fits = place.dtype == array.dtype and place.shape == (n_items, *array.shape[1:])
        return contiguous and fits and isinstance(self._arrays[name], _MappedArray)

    def _copy(self, name: str, array: NDArray[Any], items: NDArray[np.int64], place: NDArray[Any]) -> None:
        """Copy items of a map, so that a file which has become shorter is an error that names the first one missing."""
        found = copy_rows(array, items * (array.nbytes // len(array)), place)
        if found < len(place):
            where = self._arrays[name]
            assert isinstance(where, _MappedArray), "only maps are copied so"
            raise ReadError(
                f"Could not read item {items[found]} of field {name!r}: {where.path} has become shorter since it was "
                "opened, or the disk has no bytes for it. Put the file back, and go on from a saved state."
            )

    def close(self) -> None:
        """Let go of memory maps; the next read opens them again."""
        self._opened = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_opened": None}

    def _open(self) -> dict[str, NDArray[Any]]:
        opened = self._opened
        if opened is None:
            opened = {
                name: array.open(name) if isinstance(array, _MappedArray) else array
                for name, array in self._arrays.items()
            }
            self._opened = opened
        return opened


@dataclass(frozen=True, slots=True)
class _MappedArray:
    """Where a memory-mapped array lies: what is pickled in its place."""

    path: str
    offset: int
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @classmethod
    def of(cls, array: NDArray[Any]) -> "_MappedArray | None":
        """Return where `array` lies in its file; None where it lies in memory."""
        root: Any = array
        while isinstance(root, np.ndarray) and not isinstance(root.base, mmap.mmap):
            root = root.base
        # A copy-on-write map has changes that its file does not know of.
        if not isinstance(root, np.memmap) or root.filename is None or root.mode == "c":
            return None
        # A view of a map keeps the map's own offset as an attribute, so that the addresses have to tell.
        offset = root.offset + array.__array_interface__["data"][0] - root.__array_interface__["data"][0]
        return cls(str(root.filename), int(offset), array.dtype, array.shape, array.strides)

    def open(self, name: str) -> NDArray[Any]:
        """Map the file, or say what is wrong with it."""
        try:
            raw = np.memmap(self.path, np.uint8, mode="r")
            return np.ndarray(self.shape, self.dtype, buffer=raw.data, offset=self.offset, strides=self.strides)
        except (OSError, ValueError, TypeError) as error:
            wanted = f"{self.shape} of {self.dtype}"
            raise ReadError(f"Could not map field {name!r}, {wanted}, in {self.path}: {error}") from error


def _checked(arrays: Mapping[str, ArrayLike]) -> dict[str, NDArray[Any]]:
    if not isinstance(arrays, Mapping):
        raise SourceError(f"ArraySource takes arrays by name, such as {{'x': array}}, got {type(arrays).__name__}.")
    if not arrays:
        raise SourceError("ArraySource got no arrays; give at least one, such as {'x': array}.")
    checked: dict[str, NDArray[Any]] = {}
    for name, given in arrays.items():
        array = np.asanyarray(given)
        if not isinstance(name, str) or name == UNNAMED:
            raise SourceError(f"{name!r} cannot name a field; use a string that is not empty.")
        if array.dtype.hasobject:
            raise SourceError(
                f"Field {name!r} holds Python objects ({array.dtype}); give numbers or fixed-width strings, "
                "or wrap the objects in a dataset for DatasetSource."
            )
        if array.ndim == 0:
            raise SourceError(f"Field {name!r} is a single value; items are rows, so give an array of 1 axis or more.")
        checked[name] = array
    lengths = {name: len(array) for name, array in checked.items()}
    if len(set(lengths.values())) > 1:
        said = ", ".join(f"{name} has {length}" for name, length in lengths.items())
        raise SourceError(f"Fields differ in length: {said}. Give arrays with the same first axis.")
    if not next(iter(lengths.values())):
        raise SourceError(
            f"ArraySource got arrays of 0 items ({', '.join(lengths)}); check where they come from. "
            "An empty part of a data set is made with Take(source, []) or source.index.select([])."
        )
    return checked


def _identity(arrays: Mapping[str, NDArray[Any]]) -> str:
    digest = hashlib.blake2b(digest_size=8)
    for name, array in sorted(arrays.items()):
        digest.update(repr((name, array.dtype.str, array.shape)).encode())
        for item in np.unique(np.linspace(0, len(array) - 1, _SAMPLED_ITEMS).astype(np.int64)).tolist():
            row = np.ravel(array[item])[:_SAMPLED_BYTES]
            digest.update(row.tobytes()[:_SAMPLED_BYTES])
    return digest.hexdigest()
