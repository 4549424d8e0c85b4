"""The manifest of a data set, `dataset_metadata.json`: the only commit point.

What it does not name does not exist. It is written last, aside, and renamed into place; each shard is named with the
digest of its side index, which in turn has the checksum of every member, so that the fingerprint of the manifest stands
for every byte of the data set.
"""

import errno
import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from penstock.core.errors import DamageError, SourceError
from penstock.core.types import Field
from penstock.shard.compression import COMPRESSIONS, Compression, max_decompressed_bytes
from penstock.shard.side_index import SideIndex, index_name, parse_dtype, parse_shape, whole
from penstock.shard.tar import TAR_BLOCK

__all__ = ["MANIFEST", "METADATA", "FieldInfo", "Manifest", "ShardEntry", "manifest_path"]

MANIFEST = "dataset_metadata.json"
METADATA = "metadata"
"""The field that holds what is known of an item."""

_FORMAT, _VERSION = "penstock-shards", 1


@dataclass(frozen=True, slots=True)
class FieldInfo:
    """One field of all items."""

    suffix: str
    """What follows the key in the names of its members."""

    dtype: np.dtype[Any] | None
    """None for what is no array."""

    shape: tuple[int, ...] | None
    """None where it varies."""

    def field(self) -> Field:
        """Return what a reader gives: numbers in the machine's byte order, objects otherwise."""
        if self.dtype is None or self.shape is None:
            return Field(np.dtype(object), None)
        return Field(self.dtype.newbyteorder("="), self.shape)

    def merge(self, other: "FieldInfo") -> "FieldInfo":
        """Return what this field is in two shards together."""
        same = self.dtype == other.dtype
        return FieldInfo(
            self.suffix, self.dtype if same else None, self.shape if same and self.shape == other.shape else None
        )


@dataclass(frozen=True, slots=True)
class ShardEntry:
    """What the manifest says of one shard."""

    name: str
    n_items: int
    tar_bytes: int
    """The archive, decompressed."""

    stored_bytes: int
    """The file."""

    digest: str
    """Of the side index."""

    compression: Compression = "none"


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a data set holds."""

    folder: Path
    fields: Mapping[str, FieldInfo]
    shards: tuple[ShardEntry, ...]
    shard_size: int | None = None
    """Items per shard as asked for; None for archives that others wrote."""

    array_format: str = "npy"
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """What the user says of the whole data set."""

    @property
    def n_items(self) -> int:
        """Items in all shards."""
        return sum(shard.n_items for shard in self.shards)

    @property
    def compression(self) -> str:
        """How the shards are compressed: one word, or all of them."""
        return "+".join(sorted({shard.compression for shard in self.shards})) or "none"

    @property
    def modalities(self) -> list[str]:
        """The fields besides the metadata."""
        return [name for name in self.fields if name != METADATA]

    @property
    def fingerprint(self) -> str:
        """Stands for every byte of the items, and for their order; not for where the data set lies."""
        return xxhash.xxh3_128_hexdigest("\n".join(shard.digest for shard in self.shards).encode())

    def summary(self) -> dict[str, Any]:
        """Return the manifest as it is stored."""
        stored: dict[str, Any] = {
            "format": _FORMAT,
            "version": _VERSION,
            "total_samples": self.n_items,
            "total_shards": len(self.shards),
            "shard_size": self.shard_size,
            "compression": self.compression,
            "array_format": self.array_format,
            "modalities": self.modalities,
            "fields": {
                name: {
                    "suffix": info.suffix,
                    "dtype": None if info.dtype is None else repr(np.lib.format.dtype_to_descr(info.dtype)),
                    "shape": None if info.shape is None else list(info.shape),
                }
                for name, info in self.fields.items()
            },
            "metadata": dict(self.metadata),
            "fingerprint": self.fingerprint,
            "shards": [
                {
                    "shard_idx": number,
                    "shard_name": shard.name,
                    "num_samples": shard.n_items,
                    "tar_bytes": shard.tar_bytes,
                    "stored_bytes": shard.stored_bytes,
                    "compression": shard.compression,
                    "index_digest": shard.digest,
                }
                for number, shard in enumerate(self.shards)
            ],
        }
        stored["checksum"] = _checksum(stored)
        return stored

    def to_bytes(self) -> bytes:
        """Return the file's content."""
        return json.dumps(self.summary(), indent=1, ensure_ascii=False).encode() + b"\n"

    @classmethod
    def read(cls, path: Path) -> "Manifest":
        """Return the manifest at `path`; raise where it is missing, damaged or another program's."""
        try:
            stored = json.loads(path.read_bytes())
        except FileNotFoundError as error:
            raise _not_found(path) from error
        except (ValueError, RecursionError) as error:
            raise DamageError(str(path), None, f"the manifest is no valid JSON (truncated?): {error}") from error
        if not isinstance(stored, dict) or stored.get("format") != _FORMAT:
            raise SourceError(
                f"{path} was not written by Penstock. Run `penstock index {path.parent}` to give these shards an index."
            )
        if stored.get("version") != _VERSION:
            raise SourceError(
                f"{path} has version {stored.get('version')!r}; this Penstock reads {_VERSION}. Update Penstock."
            )
        if stored.pop("checksum", None) != _checksum(stored):
            raise DamageError(str(path), None, "the manifest does not match its own checksum")
        try:
            return cls._parsed(stored, path.parent)
        except (AttributeError, LookupError, TypeError, ValueError, SyntaxError, RecursionError, MemoryError) as error:
            raise DamageError(str(path), None, f"the manifest is malformed: {error}") from error

    @classmethod
    def _parsed(cls, stored: dict[str, Any], folder: Path) -> "Manifest":
        shards = tuple(_entry(entry) for entry in stored["shards"])
        fields = {
            name: FieldInfo(_text(entry["suffix"]), parse_dtype(entry["dtype"]), parse_shape(entry["shape"]))
            for name, entry in stored["fields"].items()
        }
        largest = max((shard.tar_bytes for shard in shards), default=0)
        for name, info in fields.items():
            if (
                info.shape is not None
                and info.dtype is not None
                and math.prod(info.shape) * info.dtype.itemsize > largest
            ):
                raise ValueError(f"field {name!r} is larger than any shard: {info.dtype} {info.shape}")
        if not shards or not fields or not isinstance(stored["metadata"], dict):
            raise ValueError("it has no shards, no fields or no metadata")
        return cls(folder, fields, shards, stored["shard_size"], stored["array_format"], stored["metadata"])

    def side_index(self, number: int) -> SideIndex:
        """Return the side index of a shard; raise where it is not the one that the manifest names."""
        entry = self.shards[number]
        path = self.folder / index_name(entry.name)
        try:
            stored = path.read_bytes()
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM):
                raise
            raise DamageError(entry.name, None, f"its side index {path.name} cannot be read: {error}") from error
        layout = SideIndex.from_bytes(stored, path.name)
        alike = (layout.n_items, layout.tar_bytes) == (entry.n_items, entry.tar_bytes)
        if xxhash.xxh3_128_hexdigest(stored) != entry.digest or not alike:
            raise DamageError(
                entry.name,
                None,
                "its side index is not the one that the manifest names: the shard was replaced, swapped with another "
                "one or rewritten after the manifest",
            )
        return layout


def manifest_path(where: str | os.PathLike[str]) -> Path:
    """Return where the manifest of a data set lies: of a folder, of a pattern of archives, or the file itself."""
    path = Path(where).absolute()  # a process may change its folder
    if path.suffix == ".json" and not path.is_dir():
        return path
    pattern = any(letter in path.name for letter in "{*?[") or ".tar" in path.suffixes
    return path.with_name(f"{path.name}.metadata.json") if pattern and not path.is_dir() else path / MANIFEST


def _checksum(stored: Mapping[str, Any]) -> str:
    content = json.dumps(stored, sort_keys=True, ensure_ascii=False)
    return xxhash.xxh3_64_hexdigest(content.encode())


def _entry(entry: dict[str, Any]) -> ShardEntry:
    """Return what a manifest says of a shard; raise ValueError where no shard could be like that."""
    compression = _known(entry["compression"])
    items, tar_bytes = whole(entry["num_samples"], 1), whole(entry["tar_bytes"], 0)
    stored_bytes = whole(entry["stored_bytes"], 0)
    name = _plain_name(entry["shard_name"])
    if items * TAR_BLOCK > tar_bytes or (compression == "none" and tar_bytes != stored_bytes):
        raise ValueError(f"{name} cannot hold {items} items in {stored_bytes} bytes")
    if tar_bytes > (stored_bytes if compression == "none" else max_decompressed_bytes(stored_bytes)):
        raise ValueError(f"{name} would decompress to {tar_bytes} bytes")
    return ShardEntry(name, items, tar_bytes, stored_bytes, _text(entry["index_digest"]), compression)


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{value!r} is no text")
    return value


def _plain_name(name: str) -> str:
    if not isinstance(name, str) or name in ("", ".", "..") or "/" in name or "\0" in name:
        raise ValueError(f"the shard name {name!r} points outside of the folder")
    return name


def _known(compression: str) -> Compression:
    if compression not in COMPRESSIONS:
        raise ValueError(f"the compression {compression!r} is unknown")
    return compression


def _not_found(path: Path) -> SourceError:
    folder = path.parent
    if not folder.is_dir():
        return SourceError(f"No shards found: there is no folder {folder}.")
    archives = sorted(entry.name for entry in folder.iterdir() if ".tar" in entry.suffixes or entry.suffix == ".tgz")
    if (folder / ".writing").is_dir():
        return SourceError(
            f"No data set in {folder}: a writer has not finished there. Run it again with resume=True to go on, or "
            "without to start anew."
        )
    if archives:
        return SourceError(
            f"No manifest {path.name} in {folder}, which has {len(archives)} archives ({archives[0]}, …). "
            f"Run `penstock index {folder}` to give them an index."
        )
    return SourceError(f"No shards found in {folder}: it has neither a manifest ({path.name}) nor tar archives.")
