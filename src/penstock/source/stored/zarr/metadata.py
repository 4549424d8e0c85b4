"""Reads the metadata of zarr v2 and v3 arrays: the content of `.zarray` and `zarr.json`."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from penstock.core.errors import PenstockError, SourceError
from penstock.source.stored.zarr.codec import Codec, UnsupportedStoreError, codec_v2, codec_v3
from penstock.source.stored.zarr.keys import ChunkKeys
from penstock.source.stored.zarr.store_folder import Stamp, StoreFolder

__all__ = ["METADATA_FILES", "Layout", "check_shape", "read_layout"]

METADATA_FILES = ("zarr.json", ".zarray")
"""Names of the metadata files of an array, in the order in which they are looked for."""

_MAX_BYTES = 1 << 26  # of a metadata file; attributes may be large


@dataclass(frozen=True)
class Layout:
    """How an array is stored; picklable."""

    shape: tuple[int, ...]
    chunks: tuple[int, ...]
    codec: Codec
    separator: str
    prefix: str
    fill: Any
    """Fill value of missing chunks; None: a missing chunk is an error."""

    shards: tuple[int, ...] | None = None
    """Shape of the shard files; None if each chunk is a file."""

    index_at_end: bool = True
    metadata: str = "zarr.json"
    """Name of the metadata file."""

    @property
    def keys(self) -> ChunkKeys:
        """Names of the files."""
        return ChunkKeys(self.prefix, self.separator, _count_parts(self.shape, self.shards or self.chunks))

    @property
    def chunk_keys(self) -> ChunkKeys:
        """Numbers of the chunks, which differ from those of the files if the array is sharded."""
        return ChunkKeys(self.prefix, self.separator, _count_parts(self.shape, self.chunks))


def _count_parts(shape: tuple[int, ...], part: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(-(-size // length) for size, length in zip(shape, part, strict=True))


def read_layout(folder: StoreFolder) -> tuple[Layout, Stamp]:
    """Return how the array in a folder is stored, and the stamp of its metadata file.

    Raise UnsupportedStoreError if it has to be read by zarr-python.
    """
    folder.expect(METADATA_FILES)
    for name, parse in zip(METADATA_FILES, (_parse_v3, _parse_v2), strict=True):
        try:
            stamp = folder.stamp(name)
            content = json.loads(folder.read_file(name, _MAX_BYTES))
            if content.get("shape") == []:
                raise SourceError(f"{folder} holds a single value, not rows.")
            return parse(folder, content), stamp
        except (FileNotFoundError, NotADirectoryError):
            continue
        except (UnsupportedStoreError, PenstockError):
            raise
        except (OSError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError) as error:
            raise SourceError(f"{folder}/{name} must hold the metadata of a zarr array: {error!r}.") from error
    raise SourceError(f"No zarr array in {folder}: it has neither zarr.json nor .zarray.")


def _parse_v2(_: StoreFolder, content: Mapping[str, Any]) -> Layout:
    codec = codec_v2(content)
    shape, chunks = _parse_sizes(content["shape"]), _parse_sizes(content["chunks"])
    check_shape(shape, chunks)
    fill = _parse_fill_value(content.get("fill_value"), codec.dtype)
    separator = _parse_separator(content.get("dimension_separator", "."))
    return Layout(shape, chunks, codec, separator, "", fill, metadata=".zarray")


def _parse_v3(folder: StoreFolder, content: Mapping[str, Any]) -> Layout:
    if content.get("node_type") != "array":
        raise SourceError(f"{folder} must be a zarr array, got a {content.get('node_type')}; name an array in it.")
    if content["chunk_grid"]["name"] != "regular" or not isinstance(content["data_type"], str):
        raise UnsupportedStoreError(f"chunk grid {content['chunk_grid']['name']}, data type {content['data_type']}")
    shape, chunks = _parse_sizes(content["shape"]), _parse_sizes(content["chunk_grid"]["configuration"]["chunk_shape"])
    encoding = content["chunk_key_encoding"]
    default = encoding["name"] == "default"
    if encoding["name"] not in ("default", "v2") or content.get("storage_transformers"):
        raise UnsupportedStoreError(f"chunk key encoding {encoding['name']}, or storage transformers")
    separator = _parse_separator(encoding.get("configuration", {}).get("separator", "/" if default else "."))
    codecs, shards, at_end = content["codecs"], None, True
    if codecs[0]["name"] == "sharding_indexed":
        sharding = codecs[0]["configuration"]
        _check_index_codecs(sharding["index_codecs"], len(codecs))
        shards, chunks = chunks, _parse_sizes(sharding["chunk_shape"])
        codecs, at_end = sharding["codecs"], sharding.get("index_location", "end") == "end"
        check_shape(shape, shards)
        if any(shard % chunk for shard, chunk in zip(shards, chunks, strict=True)):
            raise ValueError(f"shards of {shards} must be multiples of the chunks of {chunks}")
    codec = codec_v3(content["data_type"], codecs)
    check_shape(shape, chunks)
    return Layout(
        shape,
        chunks,
        codec,
        separator,
        f"c{separator}" if default else "",
        _parse_fill_value(content["fill_value"], codec.dtype),
        shards,
        at_end,
    )


def _check_index_codecs(codecs: Any, n_codecs: int) -> None:
    names = [codec["name"] for codec in codecs]
    if names != ["bytes", "crc32c"] or codecs[0].get("configuration", {}).get("endian") != "little" or n_codecs > 1:
        raise UnsupportedStoreError(f"index codecs {names}")


def _parse_separator(given: Any) -> str:
    if given not in (".", "/"):
        raise ValueError(f"the separator of chunk keys must be '.' or '/', got {given!r}")
    return str(given)


def _parse_sizes(given: Any) -> tuple[int, ...]:
    if not isinstance(given, list) or any(type(n) is not int or not 0 <= n < 1 << 63 for n in given):
        raise ValueError(f"sizes must be a list of integers >= 0, got {given!r}")
    return tuple(given)


def check_shape(shape: tuple[int, ...], chunks: tuple[int, ...]) -> None:
    """Raise ValueError if no array can have this shape in chunks of that shape."""
    # 1 << 59: sizes in bytes are 64-bit integers, and the widest dtype has 16 bytes.
    if not shape or len(shape) != len(chunks) or 0 in chunks or math.prod(n or 1 for n in shape) >= 1 << 59:
        raise ValueError(f"chunks of {chunks} do not fit an array of shape {shape}")


def _parse_fill_value(value: Any, dtype: np.dtype[Any]) -> Any:
    """Return the value of missing chunks; None if the store has no fill value."""
    if value is None:
        return None
    if isinstance(value, str) and value not in ("NaN", "Infinity", "-Infinity"):
        raise UnsupportedStoreError(f"fill value {value!r}")
    if isinstance(value, list):
        raise UnsupportedStoreError(f"fill value {value!r}")
    return dtype.newbyteorder("=").type(value)
