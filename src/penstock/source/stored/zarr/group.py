"""Finds the arrays in a zarr group, or in a folder of arrays."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from penstock.core.errors import PenstockError, ReadError, SourceError
from penstock.core.text import cause
from penstock.files.regular import read_regular
from penstock.files.staging import describe_unfinished, is_half_published
from penstock.source.read_pool import map_at_once
from penstock.source.stored.folders import find_hdf5
from penstock.source.stored.n5 import refuse_n5
from penstock.source.stored.zarr.store_folder import LocalFolder, StoreFolder, UrlFolder

__all__ = ["check_axes", "find_arrays", "refuse_anndata"]


def find_arrays(folder: StoreFolder) -> list[str] | None:
    """Return the names of the arrays in a folder, sorted; None if it is no folder of arrays, but may be one itself."""
    if folder.remote is not None:
        return _find_remote(folder)
    if not folder.path.is_dir() or _is_local_array(folder):
        return None
    content = _read_json(folder, "zarr.json")
    refuse_anndata(str(folder), _read_json(folder, ".zattrs") if content is None else content.get("attributes"))
    found = sorted(entry.name for entry in folder.path.iterdir() if _is_local_array(LocalFolder(entry)))
    if not found or is_half_published(folder.path):
        refuse_n5(str(folder))
        unfinished = describe_unfinished(folder.path)
        below = [] if unfinished else _find_below(folder.path)
        some = f", such as fields={below[:2]}" if below else ""
        advice = f": {unfinished}" if unfinished else f". Give the folder of the arrays, or of one of them{some}."
        raise SourceError(f"No zarr arrays in {folder}{advice}")
    return found


def refuse_anndata(where: str, attributes: Any) -> None:
    """Raise SourceError for a group that AnnData wrote: its arrays are no fields with one row for each item."""
    kind = str(attributes.get("encoding-type")) if isinstance(attributes, Mapping) else ""
    if kind in ("csr_matrix", "csc_matrix"):
        raise SourceError(
            f"{where} is a sparse matrix ({kind}), whose rows are no arrays. Read it in Python, and open x.toarray() "
            "if it fits into memory, or a dataset with len() and [i] that returns x[i].toarray()[0]."
        )
    if kind in ("anndata", "raw", "dataframe"):
        raise SourceError(
            f"{where} is a group of AnnData ({kind}), not arrays of one length. Name an array in it, such as "
            "fields=['X'] if X is dense."
        )


def _is_local_array(folder: LocalFolder) -> bool:
    metadata = folder.path / "zarr.json"
    try:
        if (folder.path / ".zarray").exists():
            return True
        content = read_regular(metadata) if metadata.exists() else b""
    except OSError as error:
        raise SourceError(f"Could not read {metadata}: {cause(error)}.") from error
    if b'"array"' not in content:
        return False
    try:  # the metadata of a group may hold those of its arrays
        found = json.loads(content)
    except (ValueError, RecursionError):
        return True  # opening it says what is wrong
    return not isinstance(found, dict) or found.get("node_type") != "group"


def _find_below(group: Path) -> list[str]:
    """Return paths of arrays in groups of a group."""
    found = []
    for folder, folders, _ in os.walk(group):
        if _is_local_array(LocalFolder(Path(folder))):
            found.append(Path(folder).relative_to(group).as_posix())
            folders.clear()  # chunks
        folders.sort()
    return found


def _find_remote(folder: UrlFolder) -> list[str] | None:
    """Look for arrays at a URL: in the metadata of the group, which may list them, or in what the server lists."""
    if find_hdf5(str(folder)) is not None:
        return None
    folder.expect(("zarr.json", ".zarray", ".zgroup"))
    content = _read_json(folder, "zarr.json")
    is_group = content is not None
    if content is None:
        if _read_json(folder, ".zarray") is not None:
            return None
        is_group = _read_json(folder, ".zgroup") is not None
        content = _read_json(folder, ".zmetadata") if is_group else None
    elif content.get("node_type") != "group":
        return None
    try:
        if content is not None:
            is_v3 = "node_type" in content
            refuse_anndata(str(folder), content.get("attributes") if is_v3 else content["metadata"].get(".zattrs"))
        names = None if content is None else _list_consolidated(content)
    except (LookupError, TypeError, AttributeError) as error:
        raise SourceError(f"{folder} must have valid consolidated metadata: {error!r}.") from error
    return _list_remote(folder, is_group=is_group) if names is None else sorted(names)


def _list_consolidated(content: dict[str, Any]) -> list[str] | None:
    """Return the arrays in a group by its metadata; None if they do not list them."""
    if "node_type" in content:
        nodes = (content.get("consolidated_metadata") or {}).get("metadata")
        if nodes is None:
            return None
        return [name for name, node in nodes.items() if "/" not in name and node["node_type"] == "array"]
    keys = (key.rpartition("/") for key in content["metadata"])
    return [name for name, _, kind in keys if kind == ".zarray" and name and "/" not in name]


def _list_remote(folder: UrlFolder, *, is_group: bool) -> list[str] | None:
    try:
        below = folder.remote.list_folders(folder.inner)
    except ReadError as error:
        if not is_group:
            return None  # reading it says what is there
        raise SourceError(
            f"The arrays of the group {folder} must be named, as in fields=['x', 'y']: its server lists nothing, and "
            f"its metadata are not consolidated. {error}"
        ) from error

    def is_array(name: str) -> bool:
        (folder / name).expect(("zarr.json", ".zarray"))
        content = _read_json(folder / name, "zarr.json")
        if content is None:
            return _read_json(folder / name, ".zarray") is not None
        return content.get("node_type") == "array"

    found = sorted(name for name, is_one in zip(below, map_at_once(is_array, below), strict=True) if is_one)
    return found or None


def check_axes(folders: Mapping[str, StoreFolder]) -> None:
    """Raise SourceError if rows of an array run along an axis that another one has, too, but not as its first.

    xarray stores the names of axes; such arrays would be paired by the places of their rows.
    """
    axes = dict(zip(folders, map_at_once(_read_axes, list(folders.values())), strict=True))
    for name, (first, *_) in ((name, each) for name, each in axes.items() if each):
        other = next((other for other, each in axes.items() if first in each[1:] and each[0] != first), None)
        if other is not None:
            raise SourceError(
                f"Rows of all arrays must run along one axis, got {name!r} with axes {axes[name]} and {other!r} with "
                f"{axes[other]}. Leave one out with fields=[...], or store it transposed."
            )


def _read_axes(folder: StoreFolder) -> list[str]:
    if find_hdf5(str(folder)) is not None:
        return []
    content = _read_json(folder, "zarr.json")
    found = content or _read_json(folder, ".zattrs") or {}
    names = found.get("_ARRAY_DIMENSIONS" if content is None else "dimension_names")
    return names if isinstance(names, list) and all(isinstance(name, str) for name in names) else []


def _read_json(folder: StoreFolder, name: str) -> dict[str, Any] | None:
    """Return the content of a metadata file; None if there is none."""
    try:
        content = json.loads(folder.read_file(name))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except PenstockError:
        raise
    except (OSError, ValueError, RecursionError) as error:
        raise SourceError(f"{folder}/{name} must hold the metadata of a zarr group: {error!r}.") from error
    if not isinstance(content, dict):
        raise SourceError(f"{folder}/{name} must hold the metadata of a zarr group, got {type(content).__name__}.")
    return content
