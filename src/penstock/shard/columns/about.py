"""What is known about the items of a block: their ids, and their metadata as columns."""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from penstock.shard.codec import decode_json
from penstock.shard.columns.build_index import StoredRows
from penstock.shard.columns.row_index import KEY_COLUMN, METADATA_MEMBER, METADATA_SUFFIX
from penstock.shard.names import automatic_key

__all__ = ["AboutRows", "encode_rest"]

_PLAIN = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_ -]{0,39}")
_JSON = "json"  # the member of all other names
_DTYPES = {int: np.dtype("<i8"), float: np.dtype("<f8"), bool: np.dtype("?")}
_MOST_COLUMNS = 256  # of metadata in a shard; further names are kept as JSON
_ENCODE = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


class AboutRows:
    """Collects ids and metadata. A name whose values are all of one plain type in a block is a column of its own."""

    def __init__(self) -> None:
        self._n_rows = 0
        self._ids: dict[int, str] = {}
        self._metadata: dict[int, bytes] = {}
        self._columns: set[tuple[str, type]] = set()

    def add(self, sample_id: str | None, metadata: bytes | None) -> None:
        """Add one item: its id unless that is automatic, and its metadata as JSON unless there are none."""
        if sample_id is not None:
            self._ids[self._n_rows] = sample_id
        if metadata is not None:
            self._metadata[self._n_rows] = metadata
        self._n_rows += 1

    def add_rows(self, count: int) -> None:
        """Add items of which nothing is known."""
        self._n_rows += count

    def take(self, first: int) -> list[tuple[StoredRows, bytes]]:
        """Return the columns of a block whose first item is number `first`, with their bytes, and forget them."""
        if not self._ids and not self._metadata:
            self._n_rows = 0
            return []
        rows, ids, metadata = range(self._n_rows), self._ids, self._metadata
        self._n_rows, self._ids, self._metadata = 0, {}, {}
        columns = []
        if ids:
            names = (ids[row] if row in ids else automatic_key(first + row) for row in rows)
            columns.append(_texts(KEY_COLUMN, f"{KEY_COLUMN}.txt.npy", names))
        if metadata:
            columns += self._take_metadata([decode_json(metadata[row]) if row in metadata else {} for row in rows])
        return columns

    def _take_metadata(self, dicts: Sequence[Mapping[str, Any]]) -> list[tuple[StoredRows, bytes]]:
        columns, typed, lowered = [], set[str](), {_JSON}
        for name in list(dicts[0]):
            kind = self._common_type(name, dicts)
            if kind is None or name.lower() in lowered:
                continue
            lowered.add(name.lower())
            self._columns.add((name, kind))
            values = [one[name] for one in dicts]
            member = f"{METADATA_MEMBER}{name}"
            if kind is str:
                columns.append(_texts(METADATA_SUFFIX, f"{member}.txt.npy", values))
            else:
                array = np.array(values, _DTYPES[kind])
                sizes = np.full(len(array), array.itemsize, np.int64)
                rows = StoredRows(METADATA_SUFFIX, f"{member}.npy", "array", array.dtype, (), len(array), sizes)
                columns.append((rows, array.tobytes()))
            typed.add(name)
        rest = [{name: value for name, value in one.items() if name not in typed} for one in dicts]
        if any(rest):
            columns.append(_texts(METADATA_SUFFIX, f"{METADATA_MEMBER}{_JSON}.npy", map(encode_rest, rest)))
        return columns

    def _common_type(self, name: str, dicts: Sequence[Mapping[str, Any]]) -> type | None:
        """Return the type of all values of a name; None if it is no plain one, or an item lacks the name."""
        if _PLAIN.fullmatch(name) is None or any(name not in one for one in dicts):
            return None
        kinds = {type(one[name]) for one in dicts}
        kind = kinds.pop()
        if kinds or kind not in (int, float, bool, str):
            return None
        if kind is int and any(not -(2**63) <= one[name] < 2**63 for one in dicts):
            return None
        return kind if (name, kind) in self._columns or len(self._columns) < _MOST_COLUMNS else None


def encode_rest(rest: Mapping[str, Any]) -> str:
    """Return names that have no column of their own as JSON; empty if there are none."""
    return _ENCODE(rest) if rest else ""


def _texts(suffix: str, member: str, values: Iterable[str]) -> tuple[StoredRows, bytes]:
    rows = [value.encode() for value in values]
    sizes = np.fromiter(map(len, rows), np.int64, len(rows))
    return StoredRows(suffix, member, "bytes", None, None, len(rows), sizes), b"".join(rows)
