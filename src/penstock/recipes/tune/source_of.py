"""From a path to a source, for commands: the files decide which kind of source it is."""

from pathlib import Path

from penstock.core.errors import SourceError
from penstock.core.protocols import Source
from penstock.core.text import cause
from penstock.files.stores.options import StoreOptions
from penstock.files.stores.url import is_url
from penstock.source.array import ArraySource
from penstock.source.stored.npy import map_npy
from penstock.source.stored.source import ZarrSource
from penstock.source.tar.source import TarSource

__all__ = ["source_of"]

_ZARR_FILES = ("zarr.json", ".zarray", ".zgroup")


def source_of(where: str, store: StoreOptions | None = None) -> Source:
    """Return a source for a path: a folder of shards (or a pattern), a zarr store, or an npy file; or for a URL.

    Examples
    --------
    >>> source_of("nowhere.npy")
    Traceback (most recent call last):
    ...
    penstock.core.errors.SourceError: No file nowhere.npy. Check the path.
    """
    if is_url(where):
        return ZarrSource(where) if where.rstrip("/").endswith(".zarr") else TarSource(where, store=store)
    path = Path(where)
    if path.suffix == ".npy":
        try:
            return ArraySource({path.stem or "x": map_npy(path)})
        except FileNotFoundError as error:
            raise SourceError(f"No file {where}. Check the path.") from error
        except OSError as error:
            raise SourceError(f"Could not read {where} as an npy file: {cause(error)}") from error
    if any((path / name).is_file() for name in _ZARR_FILES):
        return ZarrSource(where)
    return TarSource(where, store=store)  # of archives at a URL, if they were indexed to this machine
