"""The values of some items, block by block, out of a source or a data set."""

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from penstock.core.checks import check_integer
from penstock.core.errors import OptionError, ReadError
from penstock.core.types import UNNAMED, Span
from penstock.transform.item_fields import get_field

__all__ = ["check_items", "get_item", "read_blocks"]

_Int64s = NDArray[np.int64]

_STACK_BYTES = 1 << 20  # more items at a time are not faster, and their stack is a second copy


def read_blocks(
    data: Any, items: Iterable[int] | ArrayLike | None, field: str | int | None, memory_bytes: int
) -> Iterator[NDArray[Any]]:
    """Yield arrays with items on their first axis: together all of `items`, sorted, each block within the budget.

    A block is within it twice over, since whoever takes it may have to copy it.
    """
    room = check_integer("memory_bytes", memory_bytes, at_least=1) // 2
    if all(hasattr(data, name) for name in ("index", "fields", "take", "read")):
        return _read_source_blocks(data, check_items(items, len(data.index), repr(data)), field, room)
    if not hasattr(data, "__getitem__") or not hasattr(data, "__len__"):
        raise OptionError(f"{type(data).__name__} is no source and no data set; give something with len and [i].")
    numbers = check_items(items, len(data), type(data).__name__)
    return _stack_items((np.asarray(get_field(get_item(data, number), field)) for number in numbers.tolist()), room)


def check_items(items: Iterable[int] | ArrayLike | None, n_items: int, name: str) -> _Int64s:
    """Return item numbers in ascending order, or say which of them there is not."""
    given: Any = np.arange(n_items) if items is None else items
    numbers = np.asarray(given if hasattr(given, "__len__") else list(given))
    if not numbers.size:
        raise OptionError(f"No items of {name} were named, and nothing has no mean; give at least one.")
    if numbers.ndim != 1 or numbers.dtype.kind not in "iu":
        hint = "; of a mask, np.flatnonzero(mask)" if numbers.dtype.kind == "b" else ""
        raise OptionError(
            f"Items are a list of whole numbers, got {numbers.dtype} of shape {numbers.shape}; "
            f"give the numbers of the items{hint}."
        )
    if numbers.min() < 0 or numbers.max() >= n_items:
        wrong = int(numbers.min()) if numbers.min() < 0 else int(numbers.max())
        raise OptionError(f"Item {wrong} was named, but {name} has {n_items}: 0 … {n_items - 1}.")
    return np.sort(numbers).astype(np.int64)


def _read_source_blocks(source: Any, items: _Int64s, field: str | int | None, room: int) -> Iterator[NDArray[Any]]:
    name = UNNAMED if UNNAMED in source.fields else _field_name(source, field)
    # A source reads all of its fields. Where their size is not known before, items are read one by one.
    sizes = [known.item_bytes for known in source.fields.values()]
    item_bytes = sum(size or 0 for size in sizes)
    together = 1 if None in sizes else max(1, room // max(item_bytes, 1))
    for begin in range(0, len(items), together):
        values = _read_items(source, items[begin : begin + together])[name]
        if values.dtype.hasobject:
            yield from _stack_items(
                (np.asarray(get_field(item, field) if name == UNNAMED else item) for item in values), room
            )
        else:
            yield values


def _field_name(source: Any, field: str | int | None) -> str:
    if field is None and len(source.fields) == 1:
        return str(next(iter(source.fields)))
    if field not in source.fields:
        raise OptionError(f"{source!r} has no field {field!r}; use field= one of {', '.join(source.fields)}.")
    return str(field)


def _read_items(source: Any, items: _Int64s) -> Any:
    if items[-1] - items[0] == len(items) - 1 and (np.diff(items) == 1).all():
        return source.read(Span(int(items[0]), int(items[-1]) + 1))
    return source.take(items)


def get_item(dataset: Any, number: int) -> Any:
    """Return item `number` of a map-style data set; an error says which item it was about."""
    try:
        return dataset[number]
    except IndexError as error:
        # As it is, it would end a `for item in dataset` in the middle.
        raise ReadError(
            f"Item {number} of {type(dataset).__name__} is out of range, although its length says {len(dataset)} items."
        ) from error
    except Exception as error:
        error.add_note(f"[penstock] in item {number} of {type(dataset).__name__}")
        raise


def _stack_items(values: Iterable[NDArray[Any]], room: int) -> Iterator[NDArray[Any]]:
    """Yield items of one shape together: the cost of a block is more than that of a small item."""
    held: list[NDArray[Any]] = []
    held_bytes = 0
    for value in values:
        like = not held or (value.shape == held[0].shape and value.dtype == held[0].dtype)
        if held and (not like or held_bytes + value.nbytes > min(room, _STACK_BYTES)):
            yield np.stack(held)
            held, held_bytes = [], 0
        held.append(value)
        held_bytes += value.nbytes
    if held:
        yield np.stack(held)
