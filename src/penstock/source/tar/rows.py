"""Rows of items in shards of the layout "columns": where they lie, in which form, and whose they are."""

import itertools
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from penstock.core.metadata.records import Records
from penstock.core.metadata.table import Column, Computed, Constant, Payloads, RecordTable
from penstock.shard.codec import decode_json, npy_header_bytes
from penstock.shard.columns.row_index import KEY_COLUMN, METADATA_SUFFIX
from penstock.shard.manifest import FieldInfo
from penstock.shard.names import automatic_key, encode_key
from penstock.shard.side_index import MISSING
from penstock.source.native import StoredRanges
from penstock.source.tar.request import Request
from penstock.source.tar.row_places import ColumnPlaces, RowForm
from penstock.source.tar.visit import Located

__all__ = ["fill_row_keys", "find_row_ranges", "locate_rows", "make_arrays", "put_row_metadata", "row_payload"]

_Int64s = NDArray[np.int64]


def locate_rows(request: Request, suffix: str) -> Iterator[tuple[RowForm, Located]]:
    """Yield where the rows of a field lie, for each form in which some items have it."""
    columns = [shard.rows.columns.get(suffix, {}) for shard in request.open_shards if shard.rows is not None]
    for form in dict.fromkeys(form for each in columns for form in each):
        numbers = np.flatnonzero(np.array([form in each for each in columns])[request.which])
        places = np.array([[-1, -1, -1] if form not in each else each[form][1:4] for each in columns])
        at = places[request.which[numbers]]
        if form.kind == "array":
            begins = _find_begins(request, [each.get(form) for each in columns], form.row_bytes)[numbers]
            sizes = np.full(len(numbers), form.row_bytes)
        else:
            begins, sizes = (request.read_index(at[:, place], numbers) for place in (0, 1))
        here = begins != MISSING
        numbers, begins, sizes, checksums_at = numbers[here], begins[here], sizes[here], at[here, 2]
        if len(numbers):
            nothing = np.zeros_like(begins)
            yield form, Located(suffix, numbers, begins, nothing, sizes, sizes, checksums_at, form.checksum_bytes)


def _find_begins(request: Request, columns: list[ColumnPlaces | None], row_bytes: int) -> _Int64s:
    """Return where the row of each item begins, of arrays that lie side by side in each block."""
    begins = np.full(len(request.which), MISSING, np.int64)
    for place, (shard, column) in enumerate(zip(request.open_shards, columns, strict=True)):
        if column is None or column.begins is None or shard.rows is None:
            continue
        mine = np.flatnonzero(request.which == place)
        rows, starts = request.rows[mine], shard.rows.starts
        blocks = np.searchsorted(starts, rows, side="right") - 1
        first = column.begins[blocks]
        begins[mine] = np.where(first == MISSING, MISSING, first + (rows - starts[blocks]) * row_bytes)
    return begins


def find_row_ranges(request: Request, suffixes: Collection[str]) -> StoredRanges:
    """Return the bytes of the rows of fields."""
    found = [located for suffix in suffixes for _, located in locate_rows(request, suffix)]
    nothing = [np.empty(0, np.int64)]
    which = np.concatenate(nothing + [request.which[located.numbers] for located in found])
    begins = np.concatenate(nothing + [located.begins for located in found])
    sizes = np.concatenate(nothing + [located.sizes for located in found])
    return request.ranges(which, begins, begins + sizes)


def row_payload(form: RowForm, row: memoryview) -> memoryview:
    """Return a row of arrays as the `.npy` file that the other layout has."""
    assert form.dtype is not None, "arrays have a dtype"
    assert form.shape is not None, "arrays have a shape"
    shape = form.shape if form.kind == "array" else (len(row) // max(1, form.row_bytes), *form.shape)
    return memoryview(bytearray(npy_header_bytes(form.dtype, shape) + row))


def make_arrays(form: RowForm, content: bytes | memoryview, borders: _Int64s) -> list[NDArray[Any]]:
    """Return rows of arrays that lie one after the other, each with its own memory."""
    assert form.dtype is not None, "arrays have a dtype"
    assert form.shape is not None, "arrays have a shape"
    native = form.dtype.newbyteorder("=")
    if not form.row_bytes:
        return [np.empty(form.shape, native) for _ in borders[1:]]
    values = np.frombuffer(content, form.dtype).astype(native, copy=False).reshape(-1, *form.shape)
    if form.kind == "array":
        return [values[row, ...].copy() for row in range(len(values))]
    bounds = (borders // form.row_bytes).tolist()
    return [values[begin:end].copy() for begin, end in itertools.pairwise(bounds)]


def put_row_metadata(request: Request, fields: Mapping[str, FieldInfo], out: Records) -> None:
    """Put the metadata of all items into their places, equal to those that the other layout has, as they are stored."""
    found = list(locate_rows(request, METADATA_SUFFIX))
    names = {info.suffix: name for name, info in fields.items()}
    suffixes = [shard.rows.suffixes if shard.rows is not None else [] for shard in request.open_shards]
    modalities = [tuple(names[one] for one in dict.fromkeys(each) if one in names) for each in suffixes]
    kinds = list(dict.fromkeys(modalities))
    ids = read_sample_ids(request)
    # Items that have the same columns are a table.
    which = np.array([kinds.index(each) for each in modalities])[request.which]
    for _, located in found:
        if len(located.numbers) < len(which):
            which *= 2
            which[located.numbers] += 1
            which = np.unique(which, return_inverse=True)[1]
    for place in np.unique(which).tolist():
        numbers = np.flatnonzero(which == place)
        own = [
            (form, located.take(np.searchsorted(located.numbers, numbers)))
            for form, located in found
            if numbers[0] in located.numbers
        ]
        table = _make_table(request, numbers, own)
        about: dict[str, Column] = {
            "sample_id": ids.choose(numbers) if isinstance(ids, Payloads) else Computed(ids[numbers], automatic_key),
            "modalities": Constant(list(modalities[int(request.which[numbers[0]])])),
            "shard_idx": np.array([shard.number for shard in request.open_shards])[request.which[numbers]],
            "sample_idx_in_shard": request.rows[numbers],
        }
        out.put(request.places[numbers], replace(table, columns={**about, **table.columns}))


def _make_table(request: Request, numbers: _Int64s, found: list[tuple[RowForm, Located]]) -> RecordTable:
    """Return the columns of items that have all of them."""
    columns: dict[str, Column] = {}
    json: Payloads | None = None
    for form, located in found:
        if form.kind == "array" and form.dtype is not None:
            values = np.empty(len(numbers), form.dtype)
            request.copy_rows(located, values.view(np.uint8).reshape(len(values), -1), np.arange(len(values)))
            columns[str(form.name)] = values
        elif form.name is not None:
            columns[form.name] = _read_texts(request, located)
        else:
            json = _read_texts(request, located)
    return RecordTable(len(numbers), columns, json, decode_json, request.origins(numbers))


def _read_texts(request: Request, located: Located) -> Payloads:
    parts = [(content.tobytes(), ends) for _, content, ends in request.read_located(located) if content is not None]
    ends = np.cumsum([0, *(len(content) for content, _ in parts)])
    borders = [each + before for (_, each), before in zip(parts, ends[:-1], strict=True)]
    return Payloads(b"".join(content for content, _ in parts), np.concatenate([[0], *borders]))


def read_sample_ids(request: Request) -> "Payloads | _Int64s":
    """Return the id of each item, as text; or numbers, if all are automatic. Those that are stored are verified."""
    firsts = np.array([0 if shard.rows is None else shard.rows.first for shard in request.open_shards])
    numbers: _Int64s = firsts[request.which] + request.rows
    found: list[bytes] | None = None
    for _, located in locate_rows(request, KEY_COLUMN):
        found = found or [automatic_key(number).encode() for number in numbers.tolist()]
        for number, payload in request.copy_payloads(located):
            found[number] = bytes(payload or b"")
    return numbers if found is None else Payloads.join(found)


def fill_row_keys(request: Request, out: NDArray[Any]) -> None:
    """Read the key of every item into its place of `out`; the side index has a hash of each that is stored."""
    ids, places = read_sample_ids(request), request.places.tolist()
    if not isinstance(ids, Payloads):
        for place, number in zip(places, ids.tolist(), strict=True):
            out[place] = automatic_key(number)
        return
    keys_at = np.array([0 if shard.rows is None else shard.rows.keys_at for shard in request.open_shards])
    at = keys_at[request.which]
    stored = np.flatnonzero(at)
    hashes = dict(zip(stored.tolist(), request.read_index(at[stored], stored).view(np.uint64).tolist(), strict=True))
    for number, place in enumerate(places):
        try:
            sample_id = ids.at(number).decode()
        except UnicodeDecodeError as error:
            raise request.damage(number, f"its id is no text: {error}") from error
        key = encode_key(sample_id) if sample_id else ""
        if number in hashes and xxhash.xxh3_64_intdigest(key.encode()) != hashes[number]:
            raise request.damage(number, f"its key {key!r} does not match the side index")
        out[place] = key
