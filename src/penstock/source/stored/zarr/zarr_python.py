"""Zarr arrays that zarr-python reads for us: at a URL, or with codecs that only it has."""

import itertools
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.core.errors import DamageError, MissingDependency, OptionError, ReadError, SourceError
from penstock.source.stored.zarr.local import Selection

__all__ = ["OtherArray", "remote_attributes"]

_OBSTORE_SCHEMES = ("s3", "s3a", "gs", "az", "azure", "abfs", "abfss", "adl", "http", "https", "file")


@dataclass(frozen=True)
class OtherArray:
    """A zarr array that is read by zarr-python: at a URL, or with codecs that only it has."""

    where: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    chunk_shape: tuple[int, ...]
    stamp: tuple[int, int] | None = None
    """Size and time of what describes a local array."""

    _open: dict[int, Any] = field(default_factory=dict, compare=False, repr=False)

    @classmethod
    def opened(cls, where: str) -> "OtherArray":
        """Look at an array."""
        stamp = _stamp(where)
        array = _zarr_array(where)
        if not array.shape or array.dtype.kind not in "biufc":
            raise SourceError(f"{where} is {array.dtype} {array.shape}; use an array of numbers with rows.")
        return cls(where, tuple(array.shape), np.dtype(array.dtype).newbyteorder("="), tuple(array.chunks), stamp)

    @property
    def chunk_rows(self) -> int:
        """Rows that are stored together."""
        return self.chunk_shape[0]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_open": {}}

    def check_unchanged(self) -> None:
        """Raise where somebody has changed a local array; asking a server each time would cost more than reading."""
        if _stamp(self.where) == self.stamp:
            return
        try:
            now = OtherArray.opened(self.where)
        except SourceError as error:
            raise ReadError(f"The array {self.where} has changed since it was opened: {error}") from error
        if replace(now, stamp=self.stamp) != self:
            raise ReadError(
                f"The array {self.where} has changed since it was opened: {self.shape} then, {now.shape} now."
            )

    def close(self) -> None:
        """Let go of the store."""
        self._open.pop(os.getpid(), None)

    def sampled(self) -> bytes:
        """Return the first row of a local array; reading over a network is what a source is there to plan."""
        row = np.empty((0 if "://" in self.where else min(1, self.shape[0]), *self.shape[1:]), self.dtype)
        if row.size:
            self._read(0, 1, tuple((0, size) for size in self.shape[1:]), row)
        return row.tobytes()[:1024]

    def tasks(self, start: int, stop: int, selection: Selection, out: NDArray[Any]) -> Iterator[Callable[[], int]]:
        """Yield one read of all; zarr-python reads its chunks at once."""
        yield lambda: self._read(start, stop, selection, out)

    def _read(self, start: int, stop: int, selection: Selection, out: NDArray[Any]) -> int:
        try:
            array = self._open.get(os.getpid())
            if array is None:
                array = self._open[os.getpid()] = _zarr_array(self.where)
            if array.metadata.fill_value is None and "://" not in self.where:
                self._check_there(array, ((start, stop), *selection))
            out[...] = array[(slice(start, stop), *(slice(low, high) for low, high in selection))]
        except DamageError:
            raise
        except Exception as error:  # zarr and the clients below it raise whatever they like
            raise ReadError(f"Rows {start}–{stop - 1} of {self.where} cannot be read: {error}") from error
        return out.nbytes

    def _check_there(self, array: Any, bounds: Selection) -> None:
        """Raise where a chunk is missing: zarr-python takes zeros for it, also where the store does not say so."""
        grid = [range(low // size, -(-high // size)) for (low, high), size in zip(bounds, array.chunks, strict=True)]
        for coordinates in itertools.product(*grid) if all(low < high for low, high in bounds) else ():
            if not (Path(self.where) / array.metadata.encode_chunk_key(coordinates)).exists():
                first = max(bounds[0][0], coordinates[0] * array.chunks[0])
                reason = "it is missing, and the store does not say what a missing chunk holds"
                raise DamageError(f"chunk {coordinates} of {self.where}", first, reason)


def remote_attributes(where: str) -> dict[str, Any]:
    """Return the attributes of the zarr group at a URL."""
    return dict(_zarr_array(where, "group").attrs)


def _zarr_array(where: str, kind: str = "array") -> Any:
    try:
        zarr: Any = import_module("zarr")
    except ImportError as error:
        raise MissingDependency("zarr", "zarr", f"Reading {where}") from error
    store = _remote(zarr, where) if "://" in where else where
    try:
        return zarr.open_array(store, mode="r") if kind == "array" else zarr.open_group(store, mode="r")
    except Exception as error:  # whatever zarr and the clients below it raise
        raise SourceError(f"{where} cannot be opened as a zarr {kind}: {error}") from error


def _remote(zarr: Any, where: str) -> Any:
    """Return a store at a URL: through obstore where it is installed and knows the scheme, else through fsspec."""
    try:
        if where.partition("://")[0] in _OBSTORE_SCHEMES:
            obstore: Any = import_module("obstore.store")
            return zarr.storage.ObjectStore(obstore.from_url(where), read_only=True)
    except ImportError:
        pass
    except Exception as error:  # credentials that it does not find, and whatever it raises
        raise OptionError(f"{where} cannot be opened: {error}") from error
    try:
        return zarr.storage.FsspecStore.from_url(where, read_only=True)
    except ImportError as error:
        raise MissingDependency("obstore", "s3", f"Reading {where}") from error
    except Exception as error:  # a scheme that fsspec does not know either
        raise OptionError(f"{where} cannot be opened: {error}") from error


def _stamp(where: str) -> tuple[int, int] | None:
    """Return size and time of the file that describes a local array."""
    for name in ("zarr.json", ".zarray"):
        try:
            status = (Path(where) / name).stat()
        except OSError:
            continue
        return status.st_size, status.st_mtime_ns
    return None
