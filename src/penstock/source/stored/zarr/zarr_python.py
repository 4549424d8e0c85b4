"""Zarr arrays read with zarr-python: those at a URL, or with codecs that the fast path does not support."""

import itertools
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from datetime import timedelta
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.core.errors import DamageError, MissingDependency, OptionError, ReadError, SourceError
from penstock.source.stored.zarr.local import Selection

__all__ = ["ZarrPythonArray", "read_remote_attributes"]

_REQUEST_SECONDS, _RETRY_SECONDS = 30.0, 120.0
"""How long one request may take, and how long those that fail or stall are repeated."""

_OBSTORE_SCHEMES = ("s3", "s3a", "gs", "az", "azure", "abfs", "abfss", "adl", "http", "https", "file")


@dataclass(frozen=True)
class ZarrPythonArray:
    """A zarr array that is read with zarr-python; picklable."""

    where: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    chunk_shape: tuple[int, ...]
    stamp: tuple[int, int] | None = None
    """Size and modification time of the metadata file; None for a URL."""

    _open: dict[int, Any] = field(default_factory=dict, compare=False, repr=False)

    @classmethod
    def open(cls, where: str) -> "ZarrPythonArray":
        """Read the metadata of an array."""
        stamp = _metadata_stamp(where)
        array = _open_node(where)
        if not array.shape or array.dtype.kind not in "biufc":
            raise SourceError(f"{where} must be a numeric array with rows, got {array.dtype} {array.shape}.")
        return cls(where, tuple(array.shape), np.dtype(array.dtype).newbyteorder("="), tuple(array.chunks), stamp)

    @property
    def chunk_rows(self) -> int:
        """Rows per chunk."""
        return self.chunk_shape[0]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_open": {}}

    def check_unchanged(self) -> None:
        """Raise ReadError if a local array has changed; for a URL, checking would cost more than reading."""
        if _metadata_stamp(self.where) == self.stamp:
            return
        try:
            now = ZarrPythonArray.open(self.where)
        except SourceError as error:
            raise ReadError(f"The array {self.where} has changed since it was opened: {error}") from error
        if replace(now, stamp=self.stamp) != self:
            raise ReadError(
                f"The array {self.where} has changed since it was opened: {self.shape} then, {now.shape} now."
            )

    def close(self) -> None:
        """Close the store of this process."""
        self._open.pop(os.getpid(), None)

    def fingerprint_bytes(self) -> bytes:
        """Return the beginning of the first row; nothing for a URL, so that opening reads no data over a network."""
        row = np.empty((0 if "://" in self.where else min(1, self.shape[0]), *self.shape[1:]), self.dtype)
        if row.size:
            self._read(0, 1, tuple((0, size) for size in self.shape[1:]), row)
        return row.tobytes()[:1024]

    def tasks(self, start: int, stop: int, selection: Selection, out: NDArray[Any]) -> Iterator[Callable[[], int]]:
        """Yield a single task; zarr-python reads chunks concurrently."""
        yield lambda: self._read(start, stop, selection, out)

    def _read(self, start: int, stop: int, selection: Selection, out: NDArray[Any]) -> int:
        try:
            array = self._open.get(os.getpid())
            if array is None:
                array = self._open[os.getpid()] = _open_node(self.where)
            if array.metadata.fill_value is None and "://" not in self.where:
                self._check_chunks_exist(array, ((start, stop), *selection))
            out[...] = array[(slice(start, stop), *(slice(low, high) for low, high in selection))]
        except DamageError:
            raise
        except Exception as error:  # zarr and its storage clients may raise anything
            raise ReadError(f"Could not read rows {start}–{stop - 1} of {self.where}: {_say(error)}") from error
        return out.nbytes

    def _check_chunks_exist(self, array: Any, bounds: Selection) -> None:
        """Raise DamageError if a chunk is missing: zarr-python would return zeros although there is no fill value."""
        grid = [range(low // size, -(-high // size)) for (low, high), size in zip(bounds, array.chunks, strict=True)]
        for coordinates in itertools.product(*grid) if all(low < high for low, high in bounds) else ():
            if not (Path(self.where) / array.metadata.encode_chunk_key(coordinates)).exists():
                first = max(bounds[0][0], coordinates[0] * array.chunks[0])
                reason = "it is missing, and the store has no fill value"
                raise DamageError(f"chunk {coordinates} of {self.where}", first, reason)


def read_remote_attributes(where: str) -> dict[str, Any]:
    """Return the attributes of the zarr group at a URL."""
    return dict(_open_node(where, "group").attrs)


def _open_node(where: str, kind: str = "array") -> Any:
    try:
        zarr: Any = import_module("zarr")
    except ImportError as error:
        raise MissingDependency("zarr", "zarr", f"Reading {where}") from error
    store = _open_remote_store(zarr, where) if "://" in where else where
    try:
        return zarr.open_array(store, mode="r") if kind == "array" else zarr.open_group(store, mode="r")
    except Exception as error:  # zarr and its storage clients may raise anything
        raise SourceError(f"Could not open {where} as a zarr {kind}: {_say(error)}") from error


def _open_remote_store(zarr: Any, where: str) -> Any:
    """Open a store at a URL: with obstore if it is installed and supports the scheme, else with fsspec."""
    try:
        scheme = where.partition("://")[0]
        if scheme in _OBSTORE_SCHEMES:
            obstore: Any = import_module("obstore.store")
            # Other schemes have options of their own in the environment (AWS_ALLOW_HTTP), which these would replace.
            client = {"allow_http": scheme == "http", "timeout": timedelta(seconds=_REQUEST_SECONDS)}
            remote = obstore.from_url(
                where,
                client_options=client if scheme in ("http", "https") else None,
                retry_config={"retry_timeout": timedelta(seconds=_RETRY_SECONDS)},
            )
            return zarr.storage.ObjectStore(remote, read_only=True)
    except ImportError:
        pass
    except Exception as error:  # for example missing credentials
        raise OptionError(f"Could not open {where}: {error}") from error
    try:
        return zarr.storage.FsspecStore.from_url(where, read_only=True)
    except ImportError as error:
        raise MissingDependency("obstore", "s3", f"Reading {where}") from error
    except Exception as error:  # for example an unknown scheme
        raise OptionError(f"Could not open {where}: {error}") from error


def _say(error: Exception) -> str:
    """Return the message of an error without the internals that obstore adds."""
    return str(error).partition("\n\nDebug source:")[0]


def _metadata_stamp(where: str) -> tuple[int, int] | None:
    """Return size and modification time of the metadata file of a local array; None for a URL."""
    for name in ("zarr.json", ".zarray"):
        try:
            status = (Path(where) / name).stat()
        except OSError:
            continue
        return status.st_size, status.st_mtime_ns
    return None
