"""Read metadata columns of a source: one single value per item, of all items, in one pass of bounded memory.

A column is a field that holds one number or text per item, or a key of a field that holds mappings, such as the JSON
metadata of a shard. Only the fields that are asked for are read.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.core.errors import SourceError
from penstock.core.metadata.records import Records, to_column
from penstock.core.protocols import Source
from penstock.core.text import did_you_mean
from penstock.core.types import UNNAMED, Field, Span

__all__ = ["UnknownColumnError", "list_columns", "read_columns"]

_READ_BYTES = 1 << 24
_READ_ITEMS = 1 << 14  # at most: a column of objects takes more than its bytes
_OBJECT_BYTES = 1 << 10  # of an item whose size is not known
_LOOKED_AT = 16  # items whose mappings are asked for their keys
_NAMED = 12  # most columns listed in an error

_SINGLE = (str, int, float, type(None))

_Place = tuple[str, tuple[str, ...]]
"""A field, and the keys to follow in its mappings."""


class UnknownColumnError(SourceError):
    """A source has no column `name`."""

    def __init__(self, message: str, name: str) -> None:
        super().__init__(message)
        self.name = name

    def __reduce__(self) -> tuple[object, ...]:
        return UnknownColumnError, (str(self), self.name)


def read_columns(source: Source, names: Sequence[str]) -> dict[str, NDArray[Any]]:
    """Return columns of a source by name: arrays with one value per item.

    Numbers are as they are stored, or of metadata int64 or float64 (NaN where they are missing); text and mixed values
    are objects (None where they are missing).

    Examples
    --------
    >>> from penstock.source.array import ArraySource
    >>> source = ArraySource({"x": np.zeros((3, 100)), "label": np.array([1, 0, 1])})
    >>> read_columns(source, ["label"])["label"].tolist()
    [1, 0, 1]
    """
    if not names:
        return {}
    if not len(source.index):
        return _make_empty(source, names)
    places = _find_places(source, names)
    narrow = _narrow(source, list(dict.fromkeys(field for field, _ in places.values())))
    blocks: dict[str, list[NDArray[Any]]] = {name: [] for name in names}
    texts: dict[str, str] = {}  # one object for each text, however often it comes
    for start, block in _read_blocks(narrow):
        for name, (field, keys) in places.items():
            blocks[name].append(_read_values(block[field], name, keys, start, texts))
    columns = {name: _join_blocks(parts) for name, parts in blocks.items()}
    for name, (field, keys) in places.items():
        if keys:
            _check_key(source, name, field, columns[name])
    return columns


def _make_empty(source: Source, names: Sequence[str]) -> dict[str, NDArray[Any]]:
    """Return columns of no items. Any name may be one of a key if there are mappings: what keys they had is lost."""
    fields = _readable_fields(source)
    if not any(field.dtype.hasobject for field in fields.values()):
        _find_places(source, names)
    return {name: np.zeros(0, fields[name].dtype if name in fields else object) for name in names}


def list_columns(source: Source) -> list[str]:
    """Return the names of all columns; a few items are read for the keys of mappings."""
    fields = _readable_fields(source)
    plain = [name for name, field in fields.items() if name != UNNAMED and _may_be_column(field)]
    keys = _find_keys(source, fields)
    nested = [key for its_keys in keys.values() for key, is_single in its_keys.items() if is_single]
    return list(dict.fromkeys([*(name for name in plain if name not in keys), *nested]))


def _readable_fields(source: Source) -> Mapping[str, Field]:
    """Return all fields that can be read, also if the source does not deliver them."""
    found: Mapping[str, Field] = getattr(source, "stored_fields", source.fields)
    return found


def _narrow(source: Source, fields: list[str]) -> Source:
    """Return a source of these fields alone, if `source` can read them alone. It shares what `source` has open."""
    if list(source.fields) == fields or not hasattr(source, "with_fields"):
        return source
    narrow: Source = source.with_fields(fields)
    return narrow


def _may_be_column(field: Field) -> bool:
    return field.shape == () or field.dtype.hasobject


def _find_places(source: Source, names: Sequence[str]) -> dict[str, _Place]:
    """Return where each column is; raise SourceError, with the nearest name, if there is none."""
    fields = _readable_fields(source)
    found: dict[str, _Place] = {}
    keys: dict[str, dict[str, bool]] | None = None
    for name in names:
        head, *rest = name.split(".")
        if name in fields and name != UNNAMED:
            if not _may_be_column(fields[name]):
                raise SourceError(
                    f"A column must have one value per item, but {name!r} of {source!r} is an array of shape "
                    f"{fields[name].shape} per item."
                )
            found[name] = (name, ())
            continue
        if head in fields and rest and fields[head].dtype.hasobject:
            found[name] = (head, tuple(rest))
            continue
        keys = _find_keys(source, fields) if keys is None else keys
        holder = next((field for field, its_keys in keys.items() if name in its_keys or head in its_keys), None)
        if holder is None:
            raise _make_unknown_error(source, name)
        found[name] = (holder, (name,) if name in keys[holder] else (head, *rest))
    return found


def _check_key(source: Source, name: str, field: str, column: NDArray[Any]) -> None:
    """Raise SourceError if no item has this key of a field; that some items lack it is fine."""
    is_missing = column.dtype.hasobject and all(value is None for value in column.tolist())
    if is_missing and name.removeprefix(f"{field}.") not in _list_paths(source, field):
        raise _make_unknown_error(source, name, field)


def _make_unknown_error(source: Source, name: str, holder: str | None = None) -> SourceError:
    """Return the error for a column that does not exist: anywhere, or among the keys of the field `holder`."""
    is_dotted = holder is not None and name.startswith(f"{holder}.")
    known = [f"{holder}.{path}" for path in _list_paths(source, holder)] if is_dotted and holder else []
    known = known or list_columns(source)
    more = f" and {len(known) - _NAMED} more" if len(known) > _NAMED else ""
    listed = f"Its columns are {', '.join(map(repr, known[:_NAMED]))}{more}." if known else "It has no columns."
    holders = [] if is_dotted else list(_find_keys(source, _readable_fields(source)))
    near = did_you_mean(name, [*known, *(path for each in holders for path in _list_paths(source, each))])
    named = next((each for each in holders if each != UNNAMED and not near), None)
    rare = "" if named is None else f" A key that few items have is named with its field: {f'{named}.{name}'!r}."
    return UnknownColumnError(f"{source!r} has no column {name!r}.{near} {listed}{rare}", name)


def _find_keys(source: Source, fields: Mapping[str, Field]) -> dict[str, dict[str, bool]]:
    """Return, for each field that holds mappings, the keys of some items, and whether their values are single."""
    names = [name for name, field in fields.items() if field.dtype.hasobject]
    found: dict[str, dict[str, bool]] = {}
    for name, values in _look_at(source, names).items():
        for one in values:
            for key, value in one.items() if isinstance(one, Mapping) else ():
                its_keys = found.setdefault(name, {})
                its_keys[str(key)] = its_keys.get(str(key), True) and isinstance(_to_single(value), _SINGLE)
    return found


def _list_paths(source: Source, field: str) -> list[str]:
    """Return the keys of some items of a field, and those of the mappings in it: `probe`, `probe.site`."""
    found: dict[str, None] = {}

    def walk(value: Any, before: str) -> None:
        for key, inner in value.items() if isinstance(value, Mapping) else ():
            found[f"{before}{key}"] = None
            walk(inner, f"{before}{key}.")

    for one in _look_at(source, [field])[field]:
        walk(one, "")
    return list(found)


def _look_at(source: Source, names: list[str]) -> dict[str, list[Any]]:
    """Return what some items, spread over all of them, have in these fields."""
    if not names or not len(source.index):
        return {}
    items = np.unique(np.linspace(0, len(source.index) - 1, _LOOKED_AT).astype(np.int64))
    block = _narrow(source, names).take(items)
    return {name: block[name].tolist() for name in names}


def _read_blocks(source: Source) -> Iterator[tuple[int, Mapping[str, NDArray[Any]]]]:
    """Yield all items, in storage order, with the number of the first of them."""
    sizes = [field.item_bytes or field.typical_bytes or _OBJECT_BYTES for field in source.fields.values()]
    at_once = max(1, min(_READ_ITEMS, _READ_BYTES // max(1, sum(sizes))))
    chunk = source.index.usual_chunk
    if 1 < chunk <= at_once:
        at_once -= at_once % chunk  # a chunk is decoded once
    n_items = len(source.index)
    prepare = getattr(source, "prepare", None)
    for start in range(0, n_items, at_once):
        stop = min(start + at_once, n_items)
        if prepare is not None and stop < n_items:
            prepare(np.arange(stop, min(stop + at_once, n_items)))
        yield start, source.read(Span(start, stop))


def _read_values(
    values: NDArray[Any], name: str, keys: tuple[str, ...], start: int, texts: dict[str, str]
) -> NDArray[Any]:
    """Return one value per item, as numbers if all of them are; missing values of other columns are None."""
    if values.dtype.kind == "S":
        return np.char.decode(values, "utf-8", "replace").astype(object)
    if not values.dtype.hasobject:
        return values.astype(object) if values.dtype.kind == "U" else values
    if isinstance(values, Records) and keys:
        values, keys = values.columns(keys[0])[keys[0]], keys[1:]  # makes no dicts
        if not values.dtype.hasobject and not keys:
            return values
    plain: list[Any] = []
    for number, value in enumerate(values.tolist(), start):
        for key in keys:
            value = value.get(key) if isinstance(value, Mapping) else None  # noqa: PLW2901
        single = _to_single(value)
        if not isinstance(single, _SINGLE):
            raise SourceError(
                f"A column must have one number or text per item, but {name!r} of item {number} is a "
                f"{type(value).__name__}."
            )
        plain.append(texts.setdefault(single, single) if isinstance(single, str) else single)
    return to_column(plain)


def _to_single(value: Any) -> Any:
    """Return a scalar as Python has it, bytes as text, and anything else as it is."""
    single = value.item() if hasattr(value, "item") and getattr(value, "ndim", None) == 0 else value
    return single.decode("utf-8", "replace") if isinstance(single, bytes) else single


def _join_blocks(blocks: list[NDArray[Any]]) -> NDArray[Any]:
    kinds = {block.dtype.kind for block in blocks}
    if len(kinds) == 1:
        return np.concatenate(blocks)
    # Blocks were read from objects, and differ: ints here, fractions or missing values there.
    values = [None if value != value else value for block in blocks for value in block.tolist()]  # noqa: PLR0124  # NaN
    return to_column(values)
