"""Finds the images of OME-NGFF plates and wells (high-content screening), and of files converted by bioformats2raw."""

import itertools
import os
from collections.abc import Mapping, Sequence
from typing import Any

from penstock.core.errors import OptionError, SourceError
from penstock.files.stores.options import StoreOptions
from penstock.source.read_pool import map_at_once
from penstock.source.stored.folders import Folders
from penstock.source.stored.zarr.store_folder import StoreFolder
from penstock.source.volume.attributes import parse_inner_path, read_attributes, read_ome

__all__ = ["describe_collection", "find_images", "list_images"]

_LAYOUT = "bioformats2raw.layout"


def list_images(
    where: str | os.PathLike[str], *, wells: Sequence[str] | None = None, store: StoreOptions | None = None
) -> list[str]:
    """Return the path of each image of a plate, of a well, or of a file converted by bioformats2raw.

    Wells, and the fields of a well, come in the order of the metadata. Of an image, the only path is its own.

    Parameters
    ----------
    wells
        Of a plate, only these wells, in this order, named as in its metadata: `["A/1", "B/12"]`. None for all of them.
    store
        Of a URL: endpoint, credentials, retries. None: as the environment says.

    Examples
    --------
    >>> list_images("plate.zarr", wells=["B/3"])  # doctest: +SKIP
    ['plate.zarr/B/3/0', 'plate.zarr/B/3/1']
    """
    name = os.fspath(where).rstrip("/")
    images = find_images(Folders.open_one(name, {"store": store}), wells)
    return [f"{name}/{image}" if image else name for image in images]


def find_images(folder: StoreFolder, wells: Sequence[str] | None = None) -> list[str]:
    """Return the path of each image, relative to the folder; empty for the folder itself."""
    attributes, ome = read_attributes(folder), read_ome(folder)
    if wells is not None and "plate" not in ome:
        raise OptionError(f"wells must be None unless the path is that of a plate, but {folder} is none.")
    if "plate" in ome:
        chosen = _choose_wells(_entries(ome["plate"], "wells", f"the plate {folder}"), wells, str(folder))
        found = (map if folder.remote is None else map_at_once)(lambda well: find_images(folder / well), chosen)
        return [f"{well}/{image}" for well, images in zip(chosen, found, strict=True) for image in images]
    if "well" in ome:
        return _entries(ome["well"], "images", f"the well {folder}")
    if "multiscales" not in ome and _LAYOUT in {**attributes, **ome}:
        return _list_series(folder)
    return [""]


def describe_collection(folder: StoreFolder) -> str | None:
    """Return what lies at a path that has several images; None if nothing of the kind does."""
    attributes, ome = read_attributes(folder), read_ome(folder)
    if "plate" in ome:
        n_wells = len(_entries(ome["plate"], "wells", f"the plate {folder}"))
        return f"a plate with {n_wells} {'well' if n_wells == 1 else 'wells'}"
    if "well" in ome:
        n_images = len(_entries(ome["well"], "images", f"the well {folder}"))
        return f"a well with {n_images} {'image' if n_images == 1 else 'images'}"
    if "multiscales" not in ome and _LAYOUT in {**attributes, **ome}:
        return "a file converted by bioformats2raw"
    return None


def _entries(parent: Any, kind: str, title: str) -> list[str]:
    """Return the paths of the wells of a plate, or of the images of a well."""
    entries = parent.get(kind) if isinstance(parent, Mapping) else None
    if not isinstance(entries, list) or not entries:
        raise SourceError(f"The metadata of {title} must have a list of one or more {kind}, got {entries!r}.")
    return [
        parse_inner_path(
            entry.get("path") if isinstance(entry, Mapping) else None,
            f"each of the {kind} of {title} must lead below it",
        )
        for entry in entries
    ]


def _choose_wells(found: list[str], wells: Sequence[str] | None, plate: str) -> list[str]:
    if wells is None:
        return found
    unknown = [well for well in wells if well not in found]
    if isinstance(wells, str) or unknown:
        raise OptionError(f"wells must be a list of wells of {plate} ({', '.join(found)}), got {wells!r}.")
    return list(wells)


def _list_series(folder: StoreFolder) -> list[str]:
    """Return the images that bioformats2raw wrote: those that it lists, or folders that are numbers."""
    if folder.remote is not None or (folder.path / "OME").is_dir():
        series = read_ome(folder / "OME").get("series")
        if isinstance(series, list) and series:
            what = f"each series of {folder} must lead below it"
            return [parse_inner_path(entry, what) for entry in series]
    numbers = map(str, itertools.count())
    path = None if folder.remote is not None else folder.path
    found = [] if path is None else list(itertools.takewhile(lambda name: (path / name).is_dir(), numbers))
    if not found:
        raise SourceError(f"{folder} must have images in folders called 0, 1, 2 …, as bioformats2raw writes, got none.")
    return found
