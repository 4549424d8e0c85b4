"""From a path or a URL to a dataset: its manifest, and the remote folder of its shards if they are at a URL."""

import os
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from penstock.core.errors import DamageError, ReadError
from penstock.core.text import cause
from penstock.files.spans.options import RemoteOptions
from penstock.files.spans.remote_folder import RemoteFolder
from penstock.files.stores.options import StoreOptions
from penstock.files.stores.url import Url
from penstock.shard.manifest import Manifest, manifest_place

__all__ = ["find_sizes", "open_complete", "open_dataset"]

_LISTED_SHARDS = 10_000  # listing a folder of so many shards takes some 20 ms; a stat of every file would take more


def open_dataset(
    where: str | os.PathLike[str] | Url,
    *,
    store: StoreOptions | None = None,
    cache: str | os.PathLike[str] | None = None,
    cache_bytes: int | None = None,
) -> tuple[Manifest, RemoteFolder | None]:
    """Read the manifest of a dataset; return it, and where its shards are if they are not on this machine.

    Parameters
    ----------
    where
        A folder, a pattern of archives or a manifest; or the URL of one.
    store, cache, cache_bytes
        How to reach a URL, and what is kept of it where; refused if the shards are on this machine.
    """
    place = manifest_place(where)
    if not isinstance(place, Path):
        folder = RemoteFolder(place.parent, RemoteOptions.parse(place.parent, store, cache, cache_bytes))
        return Manifest.fetch(folder, place.name), folder
    manifest = Manifest.read(place)
    options = RemoteOptions.parse(manifest.archives or place.parent, store, cache, cache_bytes)
    return manifest, None if manifest.archives is None else RemoteFolder(manifest.archives, options)


def open_complete(
    where: str | os.PathLike[str] | Url,
    *,
    store: StoreOptions | None = None,
    cache: str | os.PathLike[str] | None = None,
    cache_bytes: int | None = None,
) -> tuple[Manifest, RemoteFolder | None]:
    """Do as `open_dataset`, and raise DamageError if a shard is missing; of very many, the first read finds out.

    Of a URL, the manifest and the names of objects beside it are asked for at the same time; what lies below is not
    listed.
    """
    place = manifest_place(where)
    if isinstance(place, Path):
        manifest, archives = open_dataset(place, store=store, cache=cache, cache_bytes=cache_bytes)
        _check_present(manifest, archives)
        return manifest, archives
    folder = RemoteFolder(place.parent, RemoteOptions.parse(place.parent, store, cache, cache_bytes))
    with ThreadPoolExecutor(1, "penstock-list") as pool:
        listing = pool.submit(folder.list_folder)
        manifest = Manifest.fetch(folder, place.name)
    if len(manifest.shards) > _LISTED_SHARDS:
        return manifest, folder
    names = {shard.name for shard in manifest.shards}
    try:
        present = {folder.pin(info).key for info in listing.result() if info.key in names}
    except ReadError:  # a server that lists nothing: the first read of each shard finds out
        return manifest, folder
    if present != names:
        _check_present(manifest, folder)  # again: it may have been published after the list was made
    return manifest, folder


def find_sizes(archives: RemoteFolder, names: Collection[str]) -> dict[str, int]:
    """Return the sizes of those objects that are there; raise ReadError if the server cannot tell.

    What was found is pinned: if it is replaced, reading it is an error.
    """
    wanted = set(names)
    return {info.key: archives.pin(info).n_bytes for info in archives.list_folder() if info.key in wanted}


def _check_present(manifest: Manifest, archives: RemoteFolder | None) -> None:
    """Raise DamageError if a shard is missing; of very many, only the first one to be read raises an error."""
    if len(manifest.shards) > _LISTED_SHARDS:
        return
    names = [shard.name for shard in manifest.shards]
    where = manifest.folder if archives is None else archives.url
    try:
        # The names alone: a Path for each of tens of thousands of files takes longer.
        present = set(os.listdir(manifest.local_folder) if archives is None else find_sizes(archives, names))  # noqa: PTH208
    except ReadError:  # a server that lists nothing: the first read of each shard finds out
        return
    except OSError as error:
        raise ReadError(f"Could not list the folder {where}: {cause(error)}") from error
    missing = [name for name in names if name not in present]
    if missing:
        which = f"the shard and {len(missing) - 1} more are" if len(missing) > 1 else "the shard is"
        raise DamageError(missing[0], None, f"{which} missing from {where}")
