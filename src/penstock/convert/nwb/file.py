"""Open an NWB file, translate the errors of its libraries, and list its series, tables and images."""

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from penstock.core.errors import MissingDependency, PenstockError, ReadError, SourceError
from penstock.core.text import cause, count
from penstock.files.byte_files import open_bytes, read_range
from penstock.files.regular import check_tree
from penstock.files.spans.options import RemoteOptions
from penstock.files.stores.url import Url
from penstock.source.stored.self_contained import check_dataset, check_links, check_read

__all__ = ["Entry", "NWBFile", "Thing", "open_nwb", "wrap_read_errors"]

_HDF5 = b"\x89HDF\r\n\x1a\n"
_QUIET = r"(pynwb|hdmf|hdmf_zarr)(\.|$)"
"""Libraries that warn of namespace versions and of how a file was written; none of it changes what is read here."""


@contextmanager
def wrap_read_errors(
    file: Path | Url, what: str, begin: float | None = None, end: float | None = None
) -> Iterator[None]:
    """Turn any error of the reading libraries into a ReadError that names the object and the time range."""
    try:
        yield
    except PenstockError:
        raise
    except Exception as error:
        when = "" if begin is None or end is None else f", from {begin:.3f} to {end:.3f} s"
        raise ReadError(f"Could not read {what} of {file}{when}: {error}") from error


@dataclass(frozen=True, slots=True)
class Entry:
    """A series of the file: its path and its types."""

    path: str
    kinds: frozenset[str]
    """The names of its type and of all base types."""

    inside: frozenset[str]
    """The names of the types of the containers around it."""

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
        """Whether its data are an array of numbers."""
        data = self.series.data
        dtype = getattr(data, "dtype", None)
        return bool(getattr(data, "shape", ())) and isinstance(dtype, np.dtype) and dtype.kind in "iufb"

    def __str__(self) -> str:
        shape = " × ".join(map(str, getattr(self.series.data, "shape", ()))) or "no array"
        rate = self.series.rate
        return f"{self.path} ({self.type}, {shape}, {'timestamps' if rate is None else f'{rate:g} Hz'})"


@dataclass(frozen=True, slots=True)
class Thing:
    """A table, a list of events, an image or a folder of images: its path and its types."""

    path: str
    kinds: frozenset[str]
    """The names of its type and of all base types."""

    value: Any

    @property
    def type(self) -> str:
        """The name of its type."""
        return type(self.value).__name__


class NWBFile:
    """An open file with its series, tables and images, each sorted by path."""

    def __init__(self, path: Path | Url, io: Any, nwb: Any) -> None:
        self.path = path
        self.nwb = nwb
        self._io = io
        with wrap_read_errors(path, "the list of series"):
            # Old files have trials under two names.
            unique = {thing.path: thing for thing in _list_things(nwb)}
        found = [unique[path] for path in sorted(unique)]
        self.entries = [thing for thing in found if isinstance(thing, Entry)]
        things = [thing for thing in found if isinstance(thing, Thing)]
        self.tables = [thing for thing in things if "DynamicTable" in thing.kinds]
        self.events = [thing for thing in things if "Events" in thing.kinds]  # of the extension ndx-events
        self.images = [thing for thing in things if thing.kinds & {"Image", "Images"}]

    @property
    def n_units(self) -> int:
        """Number of rows of the units table."""
        return 0 if self.nwb.units is None else len(self.nwb.units)

    def describe(self) -> str:
        """Return a list of the content, for messages."""
        tables = [f"{thing.path} ({thing.type}, {count(len(thing.value), 'row')})" for thing in self.tables]
        return "; ".join([*map(str, self.entries), *tables, count(self.n_units, "unit")])

    def close(self) -> None:
        """Close the file; idempotent."""
        self._io.close()


def open_nwb(path: Path | Url, remote: RemoteOptions | None = None) -> NWBFile:
    """Open an NWB file: HDF5, also at a URL, or a zarr folder written by hdmf-zarr.

    1. It does not exist, or is not HDF5 or not NWB: SourceError.
    2. It is truncated, or another process is writing to it: ReadError, with the reason.
    """
    if isinstance(path, Path) and not path.exists():
        raise SourceError(f"No such file or folder: {path}. Give the path of an NWB file.")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module=_QUIET)
        is_folder = isinstance(path, Path) and path.is_dir()
        io = _zarr_io(path) if is_folder and isinstance(path, Path) else _hdf5_io(path, remote)
        try:
            return NWBFile(path, io, io.read())
        except PenstockError:
            io.close()
            raise
        except Exception as error:
            io.close()
            kind = ReadError if isinstance(error, OSError) else SourceError
            raise kind(f"Could not read {path} as NWB: {error}") from error


def _hdf5_io(path: Path | Url, remote: RemoteOptions | None) -> Any:
    try:
        from pynwb import NWBHDF5IO  # type: ignore[import-untyped]  # noqa: PLC0415  # pynwb has no types
    except ImportError as error:
        raise MissingDependency("pynwb", "nwb", "Reading NWB files") from error
    import h5py  # type: ignore[import-untyped]  # noqa: PLC0415  # pynwb needs it; it has no types

    stream = open_bytes(path, remote)
    try:
        head = read_range(stream, len(_HDF5), 0)
    except PenstockError:
        raise
    except OSError as error:
        raise ReadError(f"Could not open {path}: {cause(error)}") from error
    finally:
        if isinstance(path, Path):
            stream.close()
    if head != _HDF5:
        raise SourceError(f"An NWB file must be HDF5 or a zarr folder, but {path} begins with {head!r}.")
    try:
        if isinstance(path, Url):
            file = h5py.File(stream, "r")
            _check_content(file, path)
            return NWBHDF5IO(file=file, mode="r", load_namespaces=True)
        with h5py.File(path, "r") as file:
            _check_content(file, path)
        return NWBHDF5IO(str(path), mode="r", load_namespaces=True)
    except PenstockError:
        raise
    except OSError as error:
        if isinstance(error, BlockingIOError) or "lock file" in str(error) or "already open for" in str(error):
            raise ReadError(
                f"Could not open {path}: another process is writing to it and holds a lock ({error}). Wait until the "
                "file is closed."
            ) from error
        raise ReadError(f"Could not open {path}: {cause(error)}") from error
    except Exception as error:
        raise SourceError(f"Could not read {path} as NWB: {error}") from error


def _check_content(file: Any, path: Path | Url) -> None:
    """Raise SourceError if the file refers to other files, or if anything in it expands beyond the limit of an item.

    The data of a series are read in windows, each of which is checked. Everything else is read whole.
    """
    import h5py  # noqa: PLC0415

    def check(name: str, node: Any) -> None:
        if isinstance(node, h5py.Dataset):
            check_dataset(node, path)
            if name.rpartition("/")[2] != "data":
                check_read(node, None, f"{name} in {path}")

    check_links(file, path)
    file.visititems(check)


def _zarr_io(path: Path) -> Any:
    try:
        from hdmf_zarr import NWBZarrIO  # type: ignore[import-not-found]  # noqa: PLC0415  # installed in a separate environment
    except ImportError as error:
        raise MissingDependency("hdmf-zarr", "nwb-zarr", "Reading NWB files that are zarr folders") from error
    try:
        check_tree(path)
        return NWBZarrIO(str(path), mode="r")
    except Exception as error:
        raise SourceError(f"Could not open the folder {path} as NWB in zarr: {error}") from error


def _list_things(nwb: Any) -> Iterator[Entry | Thing]:
    roots = [
        ("acquisition", nwb.acquisition),
        ("stimulus", nwb.stimulus),
        ("stimulus/templates", nwb.stimulus_template),
        ("analysis", nwb.analysis),
        ("events", getattr(nwb, "events", None) or {}),  # since NWB 2.9
        ("intervals", nwb.intervals or {}),
    ]
    roots += [(f"processing/{name}", module.data_interfaces) for name, module in nwb.processing.items()]
    for path, found in roots:
        for name, thing in found.items():
            yield from _walk(f"{path}/{name}", thing, frozenset())
    for name in ("trials", "epochs", "invalid_times"):
        if (table := getattr(nwb, name)) is not None:
            yield Thing(f"intervals/{name}", _kinds(table), table)


def _kinds(thing: Any) -> frozenset[str]:
    return frozenset(kind.__name__ for kind in type(thing).__mro__)


def _walk(path: str, thing: Any, inside: frozenset[str]) -> Iterator[Entry | Thing]:
    kinds = _kinds(thing)
    if "TimeSeries" in kinds:
        yield Entry(path, kinds, inside, thing)
        return
    if kinds & {"DynamicTable", "Image", "Images", "Events"}:
        yield Thing(path, kinds, thing)
    if "DynamicTable" not in kinds:
        for child in _children(thing):
            yield from _walk(f"{path}/{child.name}", child, inside | kinds)


def _children(thing: Any) -> Iterator[Any]:
    for held in getattr(thing, "fields", {}).values():
        # A container holds series by name, or a single one. Anything else is a setting or a reference.
        for child in held.values() if isinstance(held, Mapping) else (held,):
            if _kinds(child) & {"NWBDataInterface", "DynamicTable", "Image"}:
                yield child
