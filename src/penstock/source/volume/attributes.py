"""Reads the attributes of zarr groups, and the OME-NGFF metadata in them. Nothing is ever written."""

import json
from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import Any

from penstock.core.errors import PenstockError, SourceError
from penstock.source.stored.n5 import refuse_n5
from penstock.source.stored.zarr.store_folder import StoreFolder

__all__ = ["parse_inner_path", "read_attributes", "read_ome"]


def read_attributes(folder: StoreFolder) -> Mapping[str, Any]:
    """Return the attributes of the group at a path or URL."""
    if folder.remote is None:
        if not folder.path.exists():
            raise SourceError(f"No volume at {folder}: the path does not exist.")
    else:
        refuse_n5(str(folder))
    names = ("zarr.json", ".zattrs")
    folder.expect(names)
    for name in names:
        try:
            content = json.loads(folder.read_file(name))
            found: Any = content.get("attributes", {}) if name == "zarr.json" else content
        except (FileNotFoundError, NotADirectoryError):
            continue
        except PenstockError:
            raise
        except (OSError, ValueError, TypeError, AttributeError, RecursionError) as error:
            raise SourceError(f"{folder}/{name} must hold the attributes of a zarr group: {error!r}.") from error
        if not isinstance(found, dict):
            raise SourceError(f"{folder}/{name} must hold the attributes of a zarr group, got {type(found).__name__}.")
        return found
    refuse_n5(str(folder))
    raise SourceError(f"{folder} has no OME-NGFF metadata: it has neither zarr.json nor .zattrs.")


def read_ome(folder: StoreFolder) -> Mapping[str, Any]:
    """Return the OME-NGFF metadata at a path or URL: the attribute `ome` in version 0.5, all attributes before."""
    attributes = read_attributes(folder)
    found = attributes.get("ome", attributes)
    return found if isinstance(found, Mapping) else {}


def parse_inner_path(given: Any, what: str) -> str:
    """Return a path inside a group; metadata may have a number, for a folder that is called so."""
    path = str(given) if isinstance(given, int) and not isinstance(given, bool) else given
    if not isinstance(path, str) or not path or path.startswith("/") or ".." in PurePosixPath(path).parts:
        raise SourceError(f"The path of {what}, got {given!r}.")
    return path
