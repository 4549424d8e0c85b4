"""Facts about a dataset of shards, as plain JSON; reads only the manifest."""

import math
import os
from pathlib import Path
from typing import Any

from penstock.core.errors import DamageError, OptionError, SourceError
from penstock.files.stores.url import is_url
from penstock.observe.faults import read_quarantine
from penstock.shard.manifest import MANIFEST, METADATA, Manifest, manifest_path
from penstock.shard.places.open_dataset import open_dataset
from penstock.shard.summary import find_problems

__all__ = ["dataset_facts", "dataset_path"]

_OF_CONVERSIONS = ("conversion", "identity")
_MOST_LETTERS = 300
_MOST_GROUPS = 40
_FIRST_SPLIT = "train"


def dataset_path(where: str | os.PathLike[str]) -> str:
    """Return the path or URL of the dataset at `where`; in a folder of splits, `train`, or else the first split.

    Raises
    ------
    OptionError
        There is nothing at `where`, or it is not a dataset of shards.
    """
    if is_url(where):
        return os.fspath(where)  # opening it says what is there
    path = Path(where)
    if not manifest_path(path).exists():
        splits = _list_splits(path)
        if splits:
            return str(path / (_FIRST_SPLIT if _FIRST_SPLIT in splits else splits[0]))
        if path.is_file() and ".tar" not in path.suffixes:
            raise OptionError(
                "A report requires a folder of shards, a pattern of tars given to `penstock index`, or a file written "
                f"by Watch.save, got {path}."
            )
        if not path.exists() and not any(letter in path.name for letter in "{*?["):
            raise OptionError(f"{path} does not exist. Give a folder of shards, or a file written by Watch.save.")
    return str(path)


def dataset_facts(where: str) -> dict[str, Any]:
    """Return totals, fields, splits and faults of a dataset."""
    manifest, archives = open_dataset(where)
    counts = [shard.n_items for shard in manifest.shards]
    converted = manifest.metadata.get("conversion") or {}
    return {
        "path": str(where),
        "items": manifest.n_items,
        "shards": len(counts),
        "items_per_shard": [min(counts), max(counts)],
        "bytes": sum(shard.stored_bytes for shard in manifest.shards),
        "compression": manifest.compression,
        "fingerprint": manifest.fingerprint,
        "fields": _fields(manifest),
        "split": (converted.get("split") or {}).get("name"),
        "group_by": (converted.get("split") or {}).get("group_by"),
        "splits": _splits(manifest, converted),
        "groups": _groups(converted),
        "inputs": len(converted.get("inputs", [])),
        "skipped": [
            {"file": str(entry["file"]), "reason": str(entry["reason"])[:_MOST_LETTERS]}
            for entry in converted.get("skipped", [])
        ],
        "metadata": {
            str(name): str(value)[:_MOST_LETTERS]
            for name, value in manifest.metadata.items()
            if name not in _OF_CONVERSIONS
        },
        "problems": find_problems(manifest, archives),
        "quarantine": _find_quarantine(where, manifest.fingerprint),
    }


def _find_quarantine(where: str, fingerprint: str) -> dict[str, Any]:
    if is_url(where):  # a loader keeps it on its own machine, and a run file says where
        return {"path": "", "count": 0, "entries": []}
    return read_quarantine(manifest_path(where).with_name("quarantine.jsonl"), fingerprint)


def _fields(manifest: Manifest) -> list[dict[str, Any]]:
    found = []
    for name, info in manifest.fields.items():
        known = info.dtype is not None and info.shape is not None
        found.append(
            {
                "name": name,
                "dtype": None if info.dtype is None else str(info.dtype),
                "shape": None if info.shape is None else list(info.shape),
                "stored_as": info.suffix.rpartition(".")[2],
                "item_bytes": math.prod(info.shape or ()) * info.dtype.itemsize if known and info.dtype else None,
                "is_metadata": name == METADATA,
            }
        )
    return found


def _splits(manifest: Manifest, converted: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the splits of the conversion that this dataset is one of, as far as they are next to it."""
    split = converted.get("split")
    if not split:
        return []
    found = []
    for name in split["shares"]:
        try:
            part = manifest if name == split["name"] else open_dataset(manifest.folder.parent / str(name))[0]
        except (SourceError, DamageError):
            continue
        groups = sorted(_groups(part.metadata.get("conversion") or {}))
        found.append(
            {
                "name": str(name),
                "items": part.n_items,
                "shards": len(part.shards),
                "bytes": sum(shard.stored_bytes for shard in part.shards),
                "groups": groups,
            }
        )
    return found


def _groups(converted: dict[str, Any]) -> dict[str, int]:
    """Return the number of items of each group that a split keeps together; without a split, of each subject."""
    kind = (converted.get("split") or {}).get("group_by") or "subject"
    found: dict[str, int] = {}
    for entry in converted.get("inputs", []):
        group = entry["file"] if kind in ("file", "time") else entry.get("groups", {}).get(kind)
        if group is not None:
            found[str(group)] = found.get(str(group), 0) + int(entry["samples"])
    return dict(sorted(found.items())[:_MOST_GROUPS])


def _list_splits(path: Path) -> list[str]:
    if not path.is_dir():
        return []
    return sorted(entry.name for entry in path.iterdir() if (entry / MANIFEST).is_file())
