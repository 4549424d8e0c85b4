"""Identify an input by its content, and notice when it has been written to."""

import os
from dataclasses import dataclass
from pathlib import Path

import xxhash

from penstock.convert.inputs.protocol import Input, folders_of, local_paths_of, paths_of, remote_of
from penstock.core.errors import SourceError
from penstock.core.text import cause
from penstock.files.read_ahead import ask_range, forget_range
from penstock.files.regular import open_regular
from penstock.files.spans.options import RemoteOptions
from penstock.files.spans.remote_folder import RemoteFolder
from penstock.files.stores.open_store import open_store
from penstock.files.stores.protocol import ObjectInfo
from penstock.files.stores.url import Url

__all__ = ["Stamp", "digest_input", "fingerprint", "read_stamp", "stamp_input"]

_SLICE_BYTES, _SLICES = 1 << 20, 64
_METADATA_NAMES = {"zarr.json", ".zarray", ".zgroup", ".zattrs", ".zmetadata", "dataset_metadata.json"}


@dataclass(frozen=True, slots=True)
class Stamp:
    """Size and modification time of a file. If they differ later, the file has been written to."""

    n_bytes: int
    changed_ns: int
    versions: tuple[str | None, ...] = ()
    """Of the objects at a URL."""


def stamp_input(given: Input) -> Stamp:
    """Return the stamp of the files of an input, or of the objects at its URL."""
    if not isinstance(given.path, Url):
        return read_stamp(*local_paths_of(given))
    objects = _list_objects(given)
    return Stamp(sum(info.n_bytes for _, info in objects), 0, tuple(info.version for _, info in objects))


def digest_input(given: Input, *, give_back: bool = False) -> str:
    """Return a digest that tells an input from others: of its content, or of its URL, size and version."""
    if not isinstance(given.path, Url):
        return fingerprint(*local_paths_of(given), give_back=give_back)
    found = [f"{url}:{info.n_bytes}:{info.version};" for url, info in _list_objects(given)]
    return xxhash.xxh3_128_hexdigest("".join(found).encode())


def _list_objects(given: Input) -> list[tuple[Url, ObjectInfo]]:
    """Return the objects that an input reads; of a folder, the metadata in it."""
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
    return found


def read_stamp(*paths: Path) -> Stamp:
    """Return the stamp of files; for a folder, that of the metadata files in it."""
    path = paths[0]
    try:
        files = [file for path in paths for file in _metadata_files(path)]
        stats = [file.stat() for file in files]
    except OSError as error:
        raise SourceError(f"Could not read {path}: {cause(error)}.") from error
    return Stamp(sum(stat.st_size for stat in stats), max(stat.st_mtime_ns for stat in stats))


def fingerprint(*paths: Path, give_back: bool = False) -> str:
    """Return a digest of the content of files; of a large one, of 64 slices of 1 MB including the first and the last.

    For a folder (a zarr store): a digest of its metadata files, which hold shapes and types, not values. With
    `give_back`, pages that were not in the page cache before are not left there.
    """
    digest = xxhash.xxh3_128()
    try:
        for root, file in [(path, file) for path in paths for file in _metadata_files(path)]:
            size = file.stat().st_size
            digest.update(f"{file.relative_to(root)}:{size};".encode())
            with open_regular(file) as stream:
                starts = _slice_starts(size)
                # All at once: the disk reads the next slices while one is digested.
                missing = [at for at in starts if ask_range(stream.fileno(), at, min(at + _SLICE_BYTES, size))]
                for start in starts:
                    stream.seek(start)
                    digest.update(stream.read(_SLICE_BYTES))
                for start in missing if give_back else ():
                    forget_range(stream.fileno(), start, _SLICE_BYTES)
    except OSError as error:
        raise SourceError(f"Could not read {paths[0]}: {cause(error)}.") from error
    return digest.hexdigest()


def _metadata_files(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    found = [
        Path(folder, name)
        for folder, folders, files in os.walk(path)
        if folders.sort() is None
        for name in sorted(files)
        if name in _METADATA_NAMES
    ]
    return found or [path]


def _slice_starts(size: int) -> list[int]:
    if size <= _SLICES * _SLICE_BYTES:
        return list(range(0, size, _SLICE_BYTES))
    return [(size - _SLICE_BYTES) * number // (_SLICES - 1) for number in range(_SLICES)]
