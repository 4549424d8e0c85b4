"""What to read of a dataset, and how items get from the bytes of a request into arrays."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from penstock.core.errors import MissingDependency
from penstock.core.metadata.records import Records
from penstock.core.metadata.table import Payloads, RecordTable
from penstock.core.types import Field
from penstock.files.spans.remote_folder import RemoteFolder
from penstock.shard.codec import json_bytes
from penstock.shard.columns.row_index import METADATA_SUFFIX
from penstock.shard.decoders.decode import Decoding, decode
from penstock.shard.manifest import FieldInfo, Manifest
from penstock.shard.names import KEY
from penstock.source.native import StoredRanges
from penstock.source.tar.request import Request
from penstock.source.tar.rows import (
    fill_row_keys,
    find_row_ranges,
    locate_rows,
    make_arrays,
    put_row_metadata,
    row_payload,
)

__all__ = ["PARSE_METADATA", "ReadSpec", "Verify", "fill_block", "fill_keys", "find_ranges"]

_Int64s = NDArray[np.int64]

Verify = Literal["first", "always", "never"]

PARSE_METADATA = partial(decode, METADATA_SUFFIX)
"""Parses the JSON of metadata."""


@dataclass(frozen=True, slots=True)
class ReadSpec:
    """What to read of a dataset, and how."""

    manifest: Manifest
    infos: Mapping[str, FieldInfo]
    fields: Mapping[str, Field]
    borders: _Int64s
    """First item of each shard, then the number of items."""

    verify: Verify
    decode: Decoding
    allow_pickle: bool
    archives: RemoteFolder | None = None
    """Where the shards are; None: in a folder of this machine."""

    def reads_like(self, other: "ReadSpec") -> bool:
        """Return whether items of both are read into the same arrays, in the same way."""
        ways = [(dict(s.infos), dict(s.fields), s.verify, s.decode, s.allow_pickle, s.archives) for s in (self, other)]
        return ways[0] == ways[1]

    @property
    def suffixes(self) -> set[str]:
        """The suffixes of the members that hold the fields."""
        return {info.suffix for info in self.infos.values()}

    @property
    def fixed(self) -> dict[str, tuple[str, Field]]:
        """Suffix and field of each field of fixed size, by name."""
        sized = ((name, field) for name, field in self.fields.items() if field.item_bytes is not None)
        return {name: (self.infos[name].suffix, field) for name, field in sized}


def fill_block(request: Request, block: Mapping[str, NDArray[Any]], spec: ReadSpec) -> None:
    """Read the fixed fields extent by extent, then the others field by field."""
    if request.has_rows:
        _fill_from_rows(request, block, spec)
        return
    done: set[str] = set()
    for extent, begins, checksums_at in request.locate_extents():
        request.copy_extent(extent, begins, checksums_at, [_byte_rows(block[name]) for name in extent.names])
        done.update(extent.names)
    if KEY in block:
        request.fill_keys(block[KEY])
        done.add(KEY)
    for name, field in spec.fields.items():
        if name in done:
            continue
        suffix, column, places = spec.infos[name].suffix, block[name], request.places.tolist()
        if isinstance(column, Records):
            _fill_records(request, suffix, column)
            continue
        for number, payload in request.payloads(suffix):
            value = None if payload is None else _decode(request, number, suffix, payload, spec)
            if field.item_bytes is not None:
                _check_value(request, number, name, field, value)
            column[places[number]] = value


def _fill_records(request: Request, suffix: str, column: Records) -> None:
    """Put metadata into a column as it is stored: JSON, which is parsed when it is looked at."""
    for numbers, content, ends in request.read_payloads(suffix):
        places = request.places[numbers]
        if content is None:
            column[places] = None
            continue
        payloads = Payloads(content.tobytes(), np.concatenate([[0], ends]))
        column.put(places, RecordTable(len(numbers), {}, payloads, PARSE_METADATA, request.origins(numbers)))


def fill_keys(request: Request, out: NDArray[Any]) -> None:
    """Read the key of every item into its place of `out`."""
    if request.has_rows:
        fill_row_keys(request, out)
    else:
        request.fill_keys(out)


def find_ranges(request: Request, suffixes: Collection[str]) -> StoredRanges:
    """Return where the bytes of all fields with these suffixes lie."""
    return find_row_ranges(request, suffixes) if request.has_rows else request.find_ranges(tuple(suffixes))


def _fill_from_rows(request: Request, block: Mapping[str, NDArray[Any]], spec: ReadSpec) -> None:
    """Do the same for the layout "columns": fields whose rows are what is delivered, with one copy each."""
    places = request.places.tolist()
    for name, field in spec.fields.items():
        if name == KEY:
            fill_row_keys(request, block[KEY])
            continue
        suffix, column, is_there = spec.infos[name].suffix, block[name], np.zeros(len(places), np.bool_)
        if suffix == METADATA_SUFFIX:
            is_kept = isinstance(column, Records)
            records = column if isinstance(column, Records) else Records.blank(len(column))
            put_row_metadata(request, spec.manifest.fields, records)
            if not is_kept:
                column[request.places] = [json_bytes(records[place], "metadata") for place in places]
            continue
        for form, located in locate_rows(request, suffix):
            is_there[located.numbers] = True
            if form.kind == "array" and field.item_bytes and (form.dtype, form.shape) == (field.dtype, field.shape):
                request.copy_rows(located, _byte_rows(column), request.places[located.numbers])
                continue
            for number, payload in request.copy_payloads(located):
                assert payload is not None, "only rows that are there were located"
                if form.kind != "bytes" and spec.decode is not False:
                    (value,) = make_arrays(form, payload, np.array([0, len(payload)]))
                else:
                    stored = payload if form.kind == "bytes" else row_payload(form, payload)
                    value = _decode(request, number, suffix, stored, spec)
                if field.item_bytes is not None:
                    _check_value(request, number, name, field, value)
                column[places[number]] = value
        if not is_there.all():
            number = int(np.argmin(is_there))
            if field.item_bytes is not None:
                _check_value(request, number, name, field, None)
            column[request.places[~is_there]] = None


def _decode(request: Request, number: int, suffix: str, payload: memoryview, spec: ReadSpec) -> Any:
    try:
        return decode(suffix, payload, decoding=spec.decode, allow_pickle=spec.allow_pickle)
    except MissingDependency:
        raise
    except ValueError as error:
        raise request.damage(number, f"{suffix!r}: {error}") from error


def _byte_rows(array: NDArray[Any]) -> NDArray[np.uint8]:
    """Return a view of a contiguous array: the bytes of each item as a row."""
    width = array.nbytes // len(array)
    return array.reshape(len(array), -1).view(np.uint8) if width else np.empty((len(array), 0), np.uint8)


def _check_value(request: Request, number: int, name: str, field: Field, value: Any) -> None:
    found = (getattr(value, "dtype", None), getattr(value, "shape", None))
    if found != (field.dtype, field.shape):
        reason = f"field {name!r} is {found[0]} {found[1]}, but the manifest says {field.dtype} {field.shape}"
        raise request.damage(number, reason)
