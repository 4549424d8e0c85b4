"""Read items of a source or dataset in blocks of bounded memory."""

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from penstock.core.checks import check_integer
from penstock.core.errors import OptionError, ReadError
from penstock.core.types import UNNAMED, Span
from penstock.files.read_ahead import exceeds_cache

__all__ = ["ItemsAhead", "check_items", "get_field", "get_item", "read_blocks"]

_Int64s = NDArray[np.int64]

_STACK_BYTES = 1 << 20  # larger stacks are not faster, and a stack is a second copy
_LEAST_TOLD = 64  # items that a source is told to read next, if it reads them one by one


def read_blocks(
    data: Any, items: Iterable[int] | ArrayLike | None, field: str | int | None, memory_bytes: int
) -> Iterator[NDArray[Any]]:
    """Yield arrays with items on axis 0: all of `items`, sorted, each array within the memory budget.

    An array takes at most half of `memory_bytes`, because the caller may have to copy it.
    """
    room = check_integer("memory_bytes", memory_bytes, at_least=1) // 2
    if all(hasattr(data, name) for name in ("index", "fields", "take", "read")):
        return _read_source_blocks(data, check_items(items, len(data.index), repr(data)), field, room)
    if not hasattr(data, "__getitem__") or not hasattr(data, "__len__"):
        raise OptionError(f"data must be a source, or have len() and [i], got {type(data).__name__}.")
    numbers = check_items(items, len(data), type(data).__name__)
    return _stack_items((np.asarray(get_field(get_item(data, number), field)) for number in numbers.tolist()), room)


def check_items(items: Iterable[int] | ArrayLike | None, n_items: int, name: str) -> _Int64s:
    """Return item numbers in ascending order; raise OptionError if an item does not exist."""
    given: Any = np.arange(n_items) if items is None else items
    numbers = np.asarray(given if hasattr(given, "__len__") else list(given))
    if not numbers.size:
        raise OptionError(f"items must name at least one item of {name}, got none.")
    if numbers.ndim != 1 or numbers.dtype.kind not in "iu":
        hint = " Use np.flatnonzero(mask) for a mask." if numbers.dtype.kind == "b" else ""
        raise OptionError(f"items must be a 1-D list of integers, got {numbers.dtype} of shape {numbers.shape}.{hint}")
    if numbers.min() < 0 or numbers.max() >= n_items:
        wrong = int(numbers.min()) if numbers.min() < 0 else int(numbers.max())
        raise OptionError(f"items must be >= 0 and < {n_items}, the number of items of {name}, got {wrong}.")
    return np.sort(numbers).astype(np.int64)


def _read_source_blocks(source: Any, items: _Int64s, field: str | int | None, room: int) -> Iterator[NDArray[Any]]:
    name = UNNAMED if UNNAMED in source.fields else _field_name(source, field)
    # A source reads all of its fields. If their size is not known in advance, items are read one by one.
    sizes = [known.item_bytes for known in source.fields.values()]
    item_bytes = sum(size or 0 for size in sizes)
    at_once = 1 if None in sizes else max(1, room // max(item_bytes, 1))
    ahead = ItemsAhead(source, items, max(at_once, _LEAST_TOLD))
    for begin in range(0, len(items), at_once):
        ahead.follow(begin)
        values = _read_items(source, items[begin : begin + at_once])[name]
        if values.dtype.hasobject:
            yield from _stack_items(
                (np.asarray(get_field(item, field) if name == UNNAMED else item) for item in values), room
            )
        else:
            yield values
    ahead.follow(len(items))


class ItemsAhead:
    """Tells a source which items are read next, so that the disk works while the last ones are used.

    If the files of the source take more than half of the memory, items that were not in memory before are released
    when they were read. What the source raises is ignored: the read meets the same fault.

    Parameters
    ----------
    items
        In the order of reading.
    at_once
        Items that it is told in one call, before those are read that it was told in the last one.
    """

    def __init__(self, source: Any, items: _Int64s, at_once: int) -> None:
        self._items, self._at_once, self._n_told = items, at_once, 0
        self._prepare = getattr(source, "prepare", None)
        release, stored_bytes = getattr(source, "release", None), getattr(source, "stored_bytes", None)
        self._release = release if stored_bytes is not None and exceeds_cache([stored_bytes]) else None
        self._ours: deque[tuple[int, int]] = deque()
        """Begin and end of what was told and not in memory."""

    def follow(self, begin: int) -> None:
        """Items from `begin` on are read now, and those before it were used."""
        while self._n_told < min(begin + 2 * self._at_once, len(self._items)) and self._prepare is not None:
            end = min(self._n_told + self._at_once, len(self._items))
            with suppress(Exception):
                if self._prepare(self._items[self._n_told : end]) != 0:  # None: not known
                    self._ours.append((self._n_told, end))
            self._n_told = end
        while self._ours and self._ours[0][1] <= begin:
            first, end = self._ours.popleft()
            if self._release is not None:
                with suppress(Exception):
                    self._release(self._items[first:end])


def _field_name(source: Any, field: str | int | None) -> str:
    if field is None and len(source.fields) == 1:
        return str(next(iter(source.fields)))
    if field not in source.fields:
        raise OptionError(f"field must be one of {', '.join(source.fields)}, the fields of {source!r}, got {field!r}.")
    return str(field)


def _read_items(source: Any, items: _Int64s) -> Any:
    if items[-1] - items[0] == len(items) - 1 and (np.diff(items) == 1).all():
        return source.read(Span(int(items[0]), int(items[-1]) + 1))
    return source.take(items)


def get_item(dataset: Any, number: int) -> Any:
    """Return item `number` of a map-style dataset; errors name the item."""
    try:
        return dataset[number]
    except IndexError as error:
        # An IndexError would silently end a `for item in dataset` loop.
        raise ReadError(
            f"Item {number} of {type(dataset).__name__} is out of range, although its length is {len(dataset)}."
        ) from error
    except Exception as error:
        error.add_note(f"[penstock] in item {number} of {type(dataset).__name__}")
        raise


def _stack_items(values: Iterable[NDArray[Any]], room: int) -> Iterator[NDArray[Any]]:
    """Yield consecutive items of the same shape as one array, because an array costs more than a small item."""
    held: list[NDArray[Any]] = []
    held_bytes = 0
    for value in values:
        is_alike = not held or (value.shape == held[0].shape and value.dtype == held[0].dtype)
        if held and (not is_alike or held_bytes + value.nbytes > min(room, _STACK_BYTES)):
            yield np.stack(held)
            held, held_bytes = [], 0
        held.append(value)
        held_bytes += value.nbytes
    if held:
        yield np.stack(held)


def get_field(item: Any, field: str | int | None) -> Any:
    """Return a field of an item; None: the item itself, or the first element of a tuple or list.

    Examples
    --------
    >>> get_field(("x", "y"), None), get_field(("x", "y"), 1), get_field({"sound": "x"}, "sound")
    ('x', 'y', 'x')
    """
    if isinstance(item, Mapping):
        if field not in item:
            raise OptionError(
                f"field must be one of {', '.join(map(repr, item))}, the fields of the item, got {field!r}."
            )
        return item[field]
    if isinstance(item, tuple | list):
        place = 0 if field is None else field
        if not isinstance(place, int) or not 0 <= place < len(item):
            raise OptionError(
                f"field must be an index >= 0 and < {len(item)}, length of the {type(item).__name__}, got {place!r}."
            )
        return item[place]
    if field is not None:
        raise OptionError(f"field must be None for an item that is a single {type(item).__name__}, got {field!r}.")
    return item
