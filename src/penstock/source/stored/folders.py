"""Opens folders by path or URL, so that all URLs of a bucket share the requests and memory of one remote folder."""

import os
from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from typing import TypedDict, Unpack

from penstock.files.spans.options import RemoteOptions
from penstock.files.spans.remote_folder import RemoteFolder
from penstock.files.stores.options import StoreOptions
from penstock.files.stores.url import Url, parse_place
from penstock.source.read_pool import map_at_once
from penstock.source.stored.zarr.store_folder import LocalFolder, StoreFolder, UrlFolder

__all__ = ["HDF5_SUFFIXES", "Folders", "RemoteArguments", "find_hdf5", "find_stored"]

HDF5_SUFFIXES = (".h5", ".hdf5", ".nwb", ".h5ad")


class RemoteArguments(TypedDict, total=False):
    """Keyword arguments of what reads from a path or URL."""

    store: StoreOptions | None
    cache: str | os.PathLike[str] | None
    cache_bytes: int | None


class Folders:
    """Folders of one source.

    Parameters
    ----------
    remote
        How URLs are read, as the source was given it.
    """

    def __init__(self, **remote: Unpack[RemoteArguments]) -> None:
        unknown = sorted(set(remote) - set(RemoteArguments.__annotations__))
        if unknown:
            raise TypeError(f"Options of a URL must be among store, cache, cache_bytes, got {', '.join(unknown)}.")
        self._given = (remote.get("store"), remote.get("cache"), remote.get("cache_bytes"))
        self._local: Path | None = None
        self._remotes: dict[Url, RemoteFolder] = {}

    @classmethod
    def open_one(cls, where: str | os.PathLike[str], remote: RemoteArguments) -> StoreFolder:
        """Return the folder at a path or URL that is the only one."""
        folders = cls(**remote)
        folder = folders.open(where)
        folders.check_used()
        return folder

    def open(self, where: str | os.PathLike[str]) -> StoreFolder:
        """Return the folder at a path or URL; nothing is read yet."""
        place = parse_place(where)
        if not isinstance(place, Url):
            self._local = place
            return LocalFolder(place)
        root, inner = _split(place)
        if root not in self._remotes:
            self._remotes[root] = RemoteFolder(root, RemoteOptions.parse(root, *self._given))
        return UrlFolder(self._remotes[root], inner and f"{inner}/")

    def check_used(self) -> None:
        """Raise OptionError if options of URLs were given, but all paths are of this machine."""
        if not self._remotes and self._local is not None:
            RemoteOptions.parse(self._local, *self._given)


def find_stored(folders: Sequence[StoreFolder]) -> list[bool]:
    """Return whether each folder exists; at a URL, where there are no folders, whether it is a zarr array or group."""

    def is_stored(folder: StoreFolder) -> bool:
        if folder.remote is None:
            return folder.path.is_dir()
        return any(size is not None for size in folder.list_sizes(("zarr.json", ".zattrs", ".zgroup", ".zarray")))

    is_remote = any(folder.remote is not None for folder in folders)
    return list((map_at_once if is_remote else map)(is_stored, folders))


def find_hdf5(where: str) -> str | None:
    """Return the part of a URL that names an HDF5 file; None if there is none.

    Examples
    --------
    >>> find_hdf5("s3://bucket/day1.nwb/acquisition/ecephys/data"), find_hdf5("s3://bucket/day1.zarr")
    ('s3://bucket/day1.nwb', None)
    """
    scheme, _, path = where.partition("://")
    parts = path.split("/")
    for number, part in enumerate(parts[1:], 2):  # the first one is a bucket or a host
        if PurePosixPath(part).suffix in HDF5_SUFFIXES:
            return f"{scheme}://{'/'.join(parts[:number])}"
    return None


def _split(url: Url) -> tuple[Url, str]:
    """Return the URL that a remote folder is opened for, and the path of `url` in it.

    Examples
    --------
    >>> _split(Url("s3://bucket/a.zarr/s0")), _split(Url("https://host/public/a.zarr"))
    ((Url('s3://bucket'), 'a.zarr/s0'), (Url('https://host/public'), 'a.zarr'))
    """
    if url.scheme == "file":
        return url, ""
    first, _, rest = url.path.partition("/")
    if url.is_http:  # some hosts have buckets as folders
        return Url(url.root) / first, rest
    return Url(url.root), url.path
