"""Reads packed shards by their side index alone, row by row, as a plain program would."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from penstock.shard.columns.read_index import parse_index
from penstock.shard.columns.row_index import KEY_COLUMN, METADATA_SUFFIX, RowColumn, RowIndex, metadata_name
from penstock.shard.decoders.decode import decode
from penstock.shard.manifest import Manifest
from penstock.shard.names import automatic_key, field_name
from penstock.shard.side_index import MISSING

__all__ = ["read_rows", "unpack_dataset", "unpack_shard"]


def read_rows(index: RowIndex, content: bytes, column: RowColumn) -> list[bytes | None]:
    """Return the bytes of each item's row, after a look at its checksum."""
    begins, sizes = column.places(np.arange(index.n_items), index.starts)
    found: list[bytes | None] = []
    for begin, size, checksum in zip(begins.tolist(), sizes.tolist(), column.checksums.tolist(), strict=True):
        if begin == MISSING:
            found.append(None)
            continue
        row = content[begin : begin + size]
        assert xxhash.xxh3_64_intdigest(row) & ((1 << 8 * column.checksums.itemsize) - 1) == checksum
        found.append(row)
    return found


def unpack_shard(path: Path, number: int) -> list[dict[str, Any]]:
    """Return the items of a shard, with their metadata as the other layout has them."""
    content = path.read_bytes()
    index = parse_index(Path(f"{path}.index").read_bytes(), path.name)
    assert isinstance(index, RowIndex)
    items: list[dict[str, Any]] = [{} for _ in range(index.n_items)]
    keys = [automatic_key(index.first + row) for row in range(index.n_items)]
    about: list[dict[str, Any]] = [{} for _ in items]
    for column in index.columns:
        for place, row in enumerate(read_rows(index, content, column)):
            if row is None:
                continue
            if column.suffix == KEY_COLUMN:
                keys[place] = row.decode()
            elif column.suffix == METADATA_SUFFIX:
                name = metadata_name(column)
                about[place] |= (json.loads(row) if row else {}) if name is None else {name: _value(column, row)}
            else:
                items[place][field_name(column.suffix)] = _field(column, row)
    for place, item in enumerate(items):
        reserved = {"sample_id": keys[place], "modalities": list(item), "shard_idx": number}
        item["metadata"] = {**reserved, "sample_idx_in_shard": place, **about[place]}
    return items


def unpack_dataset(folder: Path) -> list[dict[str, Any]]:
    """Return the items of a dataset all of whose shards are packed."""
    manifest = Manifest.read(folder / "dataset_metadata.json")
    return [item for number, shard in enumerate(manifest.shards) for item in unpack_shard(folder / shard.name, number)]


def _field(column: RowColumn, row: bytes) -> Any:
    if column.kind == "bytes":
        return decode(column.extension, row, decoding="basic")
    assert column.shape is not None
    array = np.frombuffer(row, column.dtype)
    return array.reshape(column.shape if column.kind == "array" else (-1, *column.shape))


def _value(column: RowColumn, row: bytes) -> Any:
    return row.decode() if column.dtype is None else np.frombuffer(row, column.dtype)[0].item()
