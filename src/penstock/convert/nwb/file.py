"""An NWB file that is open: how it is opened, which errors mean what, and which series it holds where."""

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from penstock.core.errors import MissingDependency, PenstockError, ReadError, SourceError

__all__ = ["Entry", "NWBFile", "opened", "reading"]

_HDF5 = b"\x89HDF\r\n\x1a\n"
_QUIET = r"(pynwb|hdmf|hdmf_zarr)(\.|$)"
"""Who warns of versions of namespaces and of how a file was written; nothing of it changes what is read here."""


@contextmanager
def reading(file: Path, what: str, begin: float | None = None, end: float | None = None) -> Iterator[None]:
    """Turn any failure of the libraries that read into a ReadError that says of what, and from when to when."""
    try:
        yield
    except (PenstockError, MemoryError, AttributeError, NameError, AssertionError):
        raise
    except Exception as error:
        when = "" if begin is None or end is None else f", from {begin:.3f} to {end:.3f} s"
        raise ReadError(f"Could not read {what} of {file}{when}: {error}") from error


@dataclass(frozen=True, slots=True)
class Entry:
    """A series of the file: where it lies, and what it is."""

    path: str
    kinds: frozenset[str]
    """The names of its type and of the types that it extends."""

    inside: frozenset[str]
    """The names of the types of the containers that it lies in."""

    series: Any

    @property
    def type(self) -> str:
        """The name of its type."""
        return type(self.series).__name__

    @property
    def name(self) -> str:
        """The last part of its path."""
        return self.path.rpartition("/")[2]

    @property
    def is_numeric(self) -> bool:
        """Whether it holds numbers in rows."""
        data = self.series.data
        dtype = getattr(data, "dtype", None)
        return bool(getattr(data, "shape", ())) and isinstance(dtype, np.dtype) and dtype.kind in "iufb"

    def __str__(self) -> str:
        shape = " × ".join(map(str, getattr(self.series.data, "shape", ()))) or "no array"
        rate = self.series.rate
        return f"{self.path} ({self.type}, {shape}, {'timestamps' if rate is None else f'{rate:g} Hz'})"


class NWBFile:
    """An open file, and the list of its series in the order of their paths."""

    def __init__(self, path: Path, io: Any, nwb: Any) -> None:
        self.path = path
        self.nwb = nwb
        self._io = io
        with reading(path, "the list of series"):
            self.entries = sorted(_entries(nwb), key=lambda entry: entry.path)

    @property
    def n_units(self) -> int:
        """Rows of the units table."""
        return 0 if self.nwb.units is None else len(self.nwb.units)

    def listing(self) -> str:
        """Return what there is, for a message."""
        return "; ".join([*map(str, self.entries), f"{self.n_units} units"])

    def close(self) -> None:
        """Let go of the file; twice does nothing."""
        self._io.close()


def opened(path: Path) -> NWBFile:
    """Open an NWB file: HDF5, or a folder that hdmf-zarr wrote.

    1. It does not exist, is no HDF5 file or no NWB: SourceError.
    2. It is truncated, or another process writes to it: ReadError, with the reason.
    """
    if not path.exists():
        raise SourceError(f"{path} does not exist; give the path of an NWB file.")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module=_QUIET)
        io = _zarr_io(path) if path.is_dir() else _hdf5_io(path)
        try:
            return NWBFile(path, io, io.read())
        except PenstockError:
            io.close()
            raise
        except Exception as error:
            io.close()
            kind = ReadError if isinstance(error, OSError) else SourceError
            raise kind(f"{path} could not be read as NWB: {error}") from error


def _hdf5_io(path: Path) -> Any:
    try:
        from pynwb import NWBHDF5IO  # type: ignore[import-untyped]  # noqa: PLC0415  # pynwb has no types
    except ImportError as error:
        raise MissingDependency("pynwb", "nwb", "Reading NWB files") from error
    try:
        with path.open("rb") as stream:
            head = stream.read(len(_HDF5))
    except OSError as error:
        raise ReadError(f"Could not open {path}: {error}") from error
    if head != _HDF5:
        raise SourceError(f"{path} is no HDF5 file: it begins with {head!r}. An NWB file is HDF5, or a zarr folder.")
    try:
        return NWBHDF5IO(str(path), mode="r", load_namespaces=True)
    except OSError as error:
        if isinstance(error, BlockingIOError) or "lock file" in str(error) or "already open for" in str(error):
            raise ReadError(
                f"{path} is being written by another process, which holds a lock on it: {error}. Wait until it is "
                "closed."
            ) from error
        raise ReadError(f"Could not open {path}: {error}") from error
    except Exception as error:
        raise SourceError(f"{path} could not be read as NWB: {error}") from error


def _zarr_io(path: Path) -> Any:
    try:
        from hdmf_zarr import NWBZarrIO  # type: ignore[import-not-found]  # noqa: PLC0415  # in an environment of its own
    except ImportError as error:
        raise MissingDependency("hdmf-zarr", "nwb-zarr", "Reading NWB files that are zarr folders") from error
    try:
        return NWBZarrIO(str(path), mode="r")
    except Exception as error:
        raise SourceError(f"{path} is a folder, but no NWB file in zarr: {error}") from error


def _entries(nwb: Any) -> Iterator[Entry]:
    roots = [("acquisition", nwb.acquisition), ("stimulus", nwb.stimulus), ("analysis", nwb.analysis)]
    roots += [(f"processing/{name}", module.data_interfaces) for name, module in nwb.processing.items()]
    for path, found in roots:
        for name, thing in found.items():
            yield from _series(f"{path}/{name}", thing, frozenset())


def _series(path: str, thing: Any, inside: frozenset[str]) -> Iterator[Entry]:
    kinds = frozenset(kind.__name__ for kind in type(thing).__mro__)
    if "TimeSeries" in kinds:
        yield Entry(path, kinds, inside, thing)
    elif "DynamicTable" not in kinds:
        for child in _children(thing):
            yield from _series(f"{path}/{child.name}", child, inside | kinds)


def _children(thing: Any) -> Iterator[Any]:
    for held in getattr(thing, "fields", {}).values():
        # A container holds series by name, or one by itself; anything else is a setting, or points somewhere else.
        for child in held.values() if isinstance(held, Mapping) else (held,):
            if any(kind.__name__ == "NWBDataInterface" for kind in type(child).__mro__):
                yield child
