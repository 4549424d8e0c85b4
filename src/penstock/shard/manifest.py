"""The manifest of a dataset, `dataset_metadata.json`: the only commit point.

Shards that it does not list do not exist. It is written last, to a temporary file that is renamed into place. It lists
each shard with the digest of its side index, which holds the checksum of every member. The fingerprint of the manifest
thus covers every byte of the dataset.
"""

import errno
import json
import math
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from penstock.core.errors import DamageError, ReadError, SourceError
from penstock.core.text import cause
from penstock.core.types import Field
from penstock.files.kinds import local_path
from penstock.files.regular import read_regular
from penstock.files.spans.remote_folder import RemoteFolder
from penstock.files.stores.errors import MissingObjectError
from penstock.files.stores.url import Url, is_url, parse_place
from penstock.shard.columns.read_index import ShardIndex
from penstock.shard.compression import COMPRESSIONS, Compression
from penstock.shard.parse_values import parse_dtype, parse_int, parse_shape, parse_text
from penstock.shard.places.missing import INDEXED, explain_missing_path, explain_missing_url
from penstock.shard.side_index import index_name
from penstock.shard.table import ShardEntry, ShardTable, read_table, table_path

__all__ = ["MANIFEST", "METADATA", "FieldInfo", "Manifest", "ShardEntry", "manifest_path", "manifest_place"]

MANIFEST = "dataset_metadata.json"
METADATA = "metadata"
"""The field that holds the metadata of an item."""

_FORMAT, _VERSION = "penstock-shards", 1
_TABLE_FROM = 1000  # shards; fewer are parsed from JSON in some milliseconds
_LEAST_ENTRY_BYTES = 150  # of a shard in a manifest
_MALFORMED = (AttributeError, LookupError, TypeError, ValueError, SyntaxError, RecursionError, MemoryError)


@dataclass(frozen=True, slots=True)
class FieldInfo:
    """How one field is stored, for all items."""

    suffix: str
    """The part of its members' names after the key."""

    dtype: np.dtype[Any] | None
    """None if the field is not an array, or its dtype differs between items."""

    shape: tuple[int, ...] | None
    """None if it varies."""

    def field(self) -> Field:
        """Return the field as sources deliver it: native byte order if its shape is fixed, objects otherwise."""
        if self.dtype is None or self.shape is None:
            return Field(np.dtype(object), None)
        return Field(self.dtype.newbyteorder("="), self.shape)

    def merge(self, other: "FieldInfo") -> "FieldInfo":
        """Return the description that holds for the shards of both."""
        same = self.dtype == other.dtype
        return FieldInfo(
            self.suffix, self.dtype if same else None, self.shape if same and self.shape == other.shape else None
        )


@dataclass(frozen=True, slots=True)
class Manifest:
    """The fields and shards of a dataset."""

    folder: Path | Url
    """Where the manifest and the side indexes are, and the shards unless `archives` says otherwise."""

    fields: Mapping[str, FieldInfo]
    shards: Sequence[ShardEntry]
    shard_size: int | None = None
    """Requested items per shard; None for archives that were written elsewhere and indexed."""

    array_format: str = "npy"
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """The user's metadata about the whole dataset."""

    archives: Url | None = None
    """Where the shards are, if they were indexed from elsewhere."""

    layout: str = "samples"
    """How items lie in the shards: "samples", "columns" or "columns+samples"."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "shards", ShardTable.from_entries(self.shards))

    @property
    def table(self) -> ShardTable:
        """The shards, with their numbers of items and bytes as arrays."""
        assert isinstance(self.shards, ShardTable), "made one on construction"
        return self.shards

    @property
    def local_folder(self) -> Path:
        """The folder of a dataset that is on this machine."""
        assert isinstance(self.folder, Path), "called for datasets of this machine only"
        return self.folder

    @property
    def n_items(self) -> int:
        """Number of items in all shards."""
        return int(self.table.n_items.sum())

    @property
    def compression(self) -> str:
        """The compression of the shards; several are joined by `+`."""
        return "+".join(sorted(self.table.compressions)) or "none"

    @property
    def modalities(self) -> list[str]:
        """All fields except the metadata."""
        return [name for name in self.fields if name != METADATA]

    @property
    def fingerprint(self) -> str:
        """Digest of every byte of the items and of their order; independent of the folder."""
        return self.table.digest

    def summary(self) -> dict[str, Any]:
        """Return the manifest as the JSON object that is stored."""
        stored: dict[str, Any] = {
            **self._head(),
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

    def _head(self) -> dict[str, Any]:
        """Return all of the JSON object but the shards."""
        return {
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
            **({} if self.archives is None else {"archives": str(self.archives)}),
            **({} if self.layout == "samples" else {"layout": self.layout}),
        }

    def to_bytes(self) -> bytes:
        """Return the content of the file."""
        return json.dumps(self.summary(), indent=1, ensure_ascii=False).encode() + b"\n"

    def table_bytes(self, stored: bytes) -> bytes | None:
        """Return the content of the shard table, given the output of `to_bytes`; None if it needs no table."""
        if len(self.shards) < _TABLE_FROM:
            return None
        return self.table.to_bytes(json.dumps(self._head(), ensure_ascii=False).encode(), stored)

    @classmethod
    def read(cls, path: Path) -> "Manifest":
        """Read the manifest at `path`; raise if it is missing, damaged or was written by another program."""
        found = read_table(path)
        if found is not None:
            with suppress(SourceError, *_MALFORMED):  # the manifest itself may be valid
                return cls._parse(json.loads(found[1]), found[0], path)
        try:
            content = read_regular(path)
        except FileNotFoundError as error:
            raise explain_missing_path(path) from error
        except (OSError, ValueError) as error:  # ValueError: a name that no file can have
            raise ReadError(f"Could not read the manifest {path}: {cause(error)}.") from error
        return cls.from_bytes(content, path)

    @classmethod
    def fetch(cls, folder: RemoteFolder, name: str) -> "Manifest":
        """Read a manifest of a URL; raise as `read` does."""
        place = folder.url / name
        try:
            stored = folder.read_object(name)
        except MissingObjectError as error:
            raise explain_missing_url(folder, name) from error
        if len(stored) >= _TABLE_FROM * _LEAST_ENTRY_BYTES:
            with suppress(ReadError, SourceError, *_MALFORMED):
                table, head = ShardTable.from_bytes(
                    folder.read_object(table_path(Path(name)).name), xxhash.xxh3_128_digest(stored)
                )
                return cls._parse(json.loads(head), table, place)
        return cls.from_bytes(stored, place)

    @classmethod
    def from_bytes(cls, content: bytes, path: Path | Url) -> "Manifest":
        """Return the manifest with this content, which is at `path`; raise if it is damaged or another program's."""
        try:
            stored = json.loads(content)
        except (ValueError, RecursionError) as error:
            raise DamageError(str(path), None, f"the manifest is not valid JSON (truncated?): {error}") from error
        _check_format(stored, path)
        try:
            if stored.pop("checksum", None) != _checksum(stored):
                raise DamageError(str(path), None, "the manifest does not match its own checksum")
            table = ShardTable.from_entries([_parse_shard(entry) for entry in stored["shards"]])
            table.validate(parse_text(stored.get("layout", "samples")))
            return cls._parse(stored, table, path)
        except _MALFORMED as error:
            raise DamageError(str(path), None, f"the manifest is malformed: {error}") from error

    @classmethod
    def _parse(cls, stored: dict[str, Any], shards: ShardTable, path: Path | Url) -> "Manifest":
        _check_format(stored, path)
        fields = {
            name: FieldInfo(parse_text(entry["suffix"]), parse_dtype(entry["dtype"]), parse_shape(entry["shape"]))
            for name, entry in stored["fields"].items()
        }
        largest = int(shards.tar_bytes.max(initial=0))
        for name, info in fields.items():
            if (
                info.shape is not None
                and info.dtype is not None
                and math.prod(info.shape) * info.dtype.itemsize > largest
            ):
                raise ValueError(f"field {name!r} is larger than any shard: {info.dtype} {info.shape}")
        if not len(shards) or not fields or not isinstance(stored["metadata"], dict):
            raise ValueError("it must have shards, fields and metadata")
        archives = None if stored.get("archives") is None else _parse_archives(stored["archives"])
        about = stored["shard_size"], stored["array_format"], stored["metadata"]
        return cls(path.parent, fields, shards, *about, archives, parse_text(stored.get("layout", "samples")))

    def side_index(self, number: int, archives: RemoteFolder | None = None) -> ShardIndex:
        """Read the side index of a shard, from a folder or from the URL; raise if it is not the one in the manifest."""
        return self.shards[number].parse_index(self.read_index(number, archives))

    def read_index(self, number: int, archives: RemoteFolder | None = None) -> bytes:
        """Return the side index of a shard as it is stored."""
        shard = self.shards[number].name
        name = index_name(shard)
        try:
            if isinstance(self.folder, Path):
                return read_regular(self.folder / name, max_bytes=None)
            assert archives is not None, "the dataset of a URL is read with its folder"
            return archives.read_object(name)
        except OSError as error:
            is_unreachable = isinstance(error, ReadError) and not isinstance(error, MissingObjectError)
            if is_unreachable or error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM):
                raise
            raise DamageError(shard, None, f"its side index {name} cannot be read: {error}") from error


def manifest_place(where: str | os.PathLike[str] | Url) -> Path | Url:
    """Return where the manifest is, given a folder, a pattern of archives or the manifest itself; or a URL of one."""
    place = parse_place(where)
    if isinstance(place, Path):
        return manifest_path(place)
    if place.name.endswith(".json"):
        return place
    is_pattern = any(letter in place.name for letter in "{*?[") or ".tar" in Path(place.name).suffixes
    return place.with_name(f"{place.name}{INDEXED}") if is_pattern else place / MANIFEST


def manifest_path(where: str | os.PathLike[str]) -> Path:
    """Return the same for a path of this machine; raise OptionError for a URL."""
    path = local_path(where)  # absolute: the process may change its working directory
    is_folder = os.path.isdir(path)  # noqa: PTH112  # which is False, not an error, if the name is too long
    if path.suffix == ".json" and not is_folder:
        return path
    is_pattern = any(letter in path.name for letter in "{*?[") or ".tar" in path.suffixes
    return path.with_name(f"{path.name}{INDEXED}") if is_pattern and not is_folder else path / MANIFEST


def _checksum(stored: Mapping[str, Any]) -> str:
    content = json.dumps(stored, sort_keys=True, ensure_ascii=False)
    return xxhash.xxh3_64_hexdigest(content.encode())


def _check_format(stored: Any, path: Path | Url) -> None:
    """Raise SourceError if this is no manifest that this version of Penstock can read."""
    if not isinstance(stored, dict) or stored.get("format") != _FORMAT:
        raise SourceError(
            f"{path} was not written by Penstock. Run `penstock index {path.parent}` to index these shards."
        )
    if stored.get("version") != _VERSION:
        raise SourceError(f"The version of {path} must be {_VERSION}, got {stored.get('version')!r}. Update Penstock.")


def _parse_shard(entry: dict[str, Any]) -> ShardEntry:
    """Return the entry of a shard; `ShardTable.validate` checks its values."""
    return ShardEntry(
        parse_text(entry["shard_name"]),
        parse_int(entry["num_samples"]),
        parse_int(entry["tar_bytes"]),
        parse_int(entry["stored_bytes"]),
        parse_text(entry["index_digest"]),
        _parse_compression(entry["compression"]),
    )


def _parse_compression(compression: str) -> Compression:
    if compression not in COMPRESSIONS:
        raise ValueError(f"compression must be one of {COMPRESSIONS}, got {compression!r}")
    return compression


def _parse_archives(text: Any) -> Url:
    if not is_url(parse_text(text)):
        raise ValueError(f"archives must be a URL, got {text!r}")
    place = parse_place(text)
    assert isinstance(place, Url), "a URL, as was checked"
    return place
