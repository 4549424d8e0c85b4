"""Whether the items that a source is asked for exist, and the room for those that do."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from penstock.core.errors import OptionError, ReadError
from penstock.core.protocols import Source
from penstock.core.types import Block, Field, Span

__all__ = ["check_span", "checked_items", "fitting", "room_for"]


def checked_items(items: ArrayLike, source: Source) -> NDArray[np.int64]:
    """Return `items` as an array, or say which of them `source` does not have."""
    numbers = np.asarray(items, np.int64)
    if len(numbers) and numbers.view(np.uint64).max() >= len(source.index):  # seen as unsigned, negative ones are huge
        raise ReadError(f"Could not read items {numbers.min()}–{numbers.max()} of {source!r}: {_has(source)}.")
    return numbers


def check_span(span: Span, source: Source) -> None:
    """Raise where `source` ends before `span` does."""
    if span.stop > len(source.index):
        raise ReadError(f"Could not read items {span.start}–{span.stop - 1} of {source!r}: {_has(source)}.")


def room_for(fields: Mapping[str, Field], n_items: int) -> dict[str, NDArray[Any]]:
    """Return memory for so many items, of fields that have a fixed shape."""
    return {name: np.empty((n_items, *(field.shape or ())), field.dtype) for name, field in fields.items()}


def fitting(out: Block, fields: Mapping[str, Field], n_items: int) -> Block:
    """Return `out`, or say why so many items cannot be put into it."""
    for name, field in fields.items():
        shape = (n_items, *(field.shape or ()))
        if name not in out or (out[name].shape, out[name].dtype) != (shape, field.dtype):
            found = f"{out[name].dtype} {out[name].shape}" if name in out else "missing"
            raise OptionError(f"out[{name!r}] is {found}; give an array of {field.dtype} {shape}.")
    return out


def _has(source: Source) -> str:
    return f"it has items 0–{len(source.index) - 1}" if len(source.index) else "it has no items"
