"""Identify an input by its content, and notice when it has been written to."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import xxhash

from penstock.convert.inputs.protocol import Input, folders_of, local_paths_of, paths_of, remote_of
from penstock.core.errors import ReadError, SourceError
from penstock.core.text import cause
from penstock.files.regular import open_regular
from penstock.files.spans.options import RemoteOptions
from penstock.files.spans.remote_folder import RemoteFolder
from penstock.files.stores.protocol import ObjectInfo
from penstock.files.stores.store import open_store
from penstock.files.stores.url import Url
from penstock.shard.manifest import MANIFEST

__all__ = ["Stamp", "digest_input", "fingerprint", "read_stamp", "stamp_input"]

_SLICE_BYTES, _SLICES = 1 << 20, 64
_METADATA_NAMES = {"zarr.json", ".zarray", ".zgroup", ".zattrs", ".zmetadata", MANIFEST}


@dataclass(frozen=True, slots=True)
class Stamp:
    """Sizes and times of all files of an input. If they differ later, one of them has been written to."""

    n_bytes: int
    times: str
    """A digest of the name, size and times of every file; at a URL, of the name, size and version of every object."""

    unread: str = ""
    """A digest of the name, size and time of the files that the digest of the content does not cover; empty if none."""

    is_folder: bool = False
    """Whether the files of a folder had to be listed."""


def stamp_input(given: Input) -> Stamp:
    """Return the stamp of the files of an input, or of the objects at its URL."""
    if not isinstance(given.path, Url):
        return read_stamp(*local_paths_of(given))
    objects = _list_objects(given)
    n_bytes = sum(info.n_bytes for _, info in objects)
    return Stamp(n_bytes, _digest_objects(objects), is_folder=getattr(given, "is_folder", False))


def digest_input(given: Input) -> str:
    """Return a digest that tells an input from others: of its content, or of its URL, size and version."""
    if not isinstance(given.path, Url):
        return fingerprint(*local_paths_of(given))
    return _digest_objects(_list_objects(given))


def _digest_objects(objects: Sequence[tuple[Url, ObjectInfo]]) -> str:
    return xxhash.xxh3_128_hexdigest("".join(f"{url}:{info.n_bytes}:{info.version};" for url, info in objects).encode())


def _list_objects(given: Input) -> list[tuple[Url, ObjectInfo]]:
    """Return the objects that an input reads: of shards the manifest, of a zarr store all.

    If the server does not list a zarr store, only its metadata.
    """
    store = remote_of(given).store
    if not getattr(given, "is_folder", False):
        urls = [path for path in paths_of(given) if isinstance(path, Url)]
        return [(url, open_store(url.parent, store).describe(url.name)) for url in urls]
    found = []
    for url in folders_of(given):
        folder = RemoteFolder(url, RemoteOptions(store))
        infos = folder.describe_all(sorted(_METADATA_NAMES))
        found += [(url / info.key, info) for info in infos if info is not None]
        folder.close()
    if not found:
        raise SourceError(f"No such folder: {given.path} has no metadata of a zarr store or of shards.")
    root = given.path
    assert isinstance(root, Url), "called for URLs only"
    if any(url == root / MANIFEST for url, _ in found):
        return found
    try:
        return sorted((root / info.key, info) for info in open_store(root, store).list_objects())
    except ReadError:  # a plain web server
        return found


def read_stamp(*paths: Path) -> Stamp:
    """Return the stamp of files; of a folder, that of all files in it, or of the manifest if it is one of shards."""
    times, unread, n_bytes = xxhash.xxh3_128(), xxhash.xxh3_128(), 0
    has_unread = False
    try:
        for root in paths:
            for file, is_read in _list_files(root):
                status = file.stat()
                seen = f"{file.relative_to(root)}:{status.st_size}:{status.st_mtime_ns};".encode()
                n_bytes += status.st_size
                times.update(seen + f"{status.st_ctime_ns};".encode())
                if not is_read or status.st_size > _SLICES * _SLICE_BYTES:
                    has_unread = True
                    unread.update(seen)
    except OSError as error:
        raise SourceError(f"Could not read {paths[0]}: {cause(error)}.") from error
    is_folder = any(path.is_dir() for path in paths)
    return Stamp(n_bytes, times.hexdigest(), unread.hexdigest() if has_unread else "", is_folder)


def fingerprint(*paths: Path) -> str:
    """Return a digest of the content of files; of a large one, of 64 slices of 1 MB including the first and the last.

    For a zarr store: a digest of its metadata files, which hold shapes and types, not values. For any other folder: of
    all files in it.
    """
    digest = xxhash.xxh3_128()
    try:
        for root, file in [(path, file) for path in paths for file, is_read in _list_files(path) if is_read]:
            size = file.stat().st_size
            digest.update(f"{file.relative_to(root)}:{size};".encode())
            with open_regular(file) as stream:
                for start in _slice_starts(size):
                    stream.seek(start)
                    digest.update(stream.read(_SLICE_BYTES))
    except OSError as error:
        raise SourceError(f"Could not read {paths[0]}: {cause(error)}.") from error
    return digest.hexdigest()


def _list_files(path: Path) -> list[tuple[Path, bool]]:
    """Return the files of an input, each with whether the digest of the content covers it."""
    if not path.is_dir():
        return [(path, True)]
    if (path / MANIFEST).exists():  # it has the checksums of all shards
        return [(path / MANIFEST, True)]
    found = [
        Path(folder, name)
        for folder, folders, files in os.walk(path)
        if folders.sort() is None
        for name in sorted(files)
    ]
    is_store = any(file.name in _METADATA_NAMES for file in found)
    return [(file, not is_store or file.name in _METADATA_NAMES) for file in found] or [(path, True)]


def _slice_starts(size: int) -> list[int]:
    if size <= _SLICES * _SLICE_BYTES:
        return list(range(0, size, _SLICE_BYTES))
    return [(size - _SLICE_BYTES) * number // (_SLICES - 1) for number in range(_SLICES)]
