"""Argument checks, output allocation, and what sources that are made of others do with them."""

import math
import os
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from penstock.core.errors import OptionError, ReadError
from penstock.core.protocols import Source
from penstock.core.types import Block, Field, Span

__all__ = [
    "allocate",
    "allocate_block",
    "check_items",
    "check_out",
    "check_span",
    "fill_rows",
    "keep_existing",
    "sum_memory",
    "sum_stored",
]

_LARGE_BYTES = 1 << 28  # below, asking for the memory of the machine costs more than it saves


def check_items(items: ArrayLike, source: Source) -> NDArray[np.int64]:
    """Return `items` as an int64 array; raise ReadError if `source` does not have all of them."""
    numbers = np.asarray(items, np.int64)
    if len(numbers) and numbers.view(np.uint64).max() >= len(source.index):  # negative numbers are huge as unsigned
        raise ReadError(f"Could not read items {numbers.min()}–{numbers.max()} of {source!r}: {_item_range(source)}.")
    return numbers


def keep_existing(items: ArrayLike, source: Source) -> NDArray[np.int64]:
    """Return those of `items` that `source` has: a hint for other items is no error."""
    numbers = np.asarray(items, np.int64).reshape(-1)
    return numbers[numbers.view(np.uint64) < len(source.index)]


def check_span(span: Span, source: Source) -> None:
    """Raise ReadError if `span` ends after the last item of `source`."""
    if span.stop > len(source.index):
        raise ReadError(f"Could not read items {span.start}–{span.stop - 1} of {source!r}: {_item_range(source)}.")


def allocate_block(fields: Mapping[str, Field], n_items: int) -> dict[str, NDArray[Any]]:
    """Return uninitialized arrays for `n_items` items of fields with a fixed shape."""
    return {
        name: field.blank(n_items)
        if field.holds_records
        else allocate((n_items, *(field.shape or ())), field.dtype, name)
        for name, field in fields.items()
    }


def allocate(shape: tuple[int, ...], dtype: np.dtype[Any], what: str) -> NDArray[Any]:
    """Return an uninitialized array; raise ReadError if this machine does not have that much memory.

    Systems that overcommit give any amount of memory, and kill the process when it is used.
    """
    n_bytes = math.prod(shape) * dtype.itemsize
    if n_bytes <= _LARGE_BYTES or n_bytes <= os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"):
        try:
            return np.empty(shape, dtype)
        except (MemoryError, ValueError):  # ValueError: more than an address can count
            pass
    raise ReadError(f"Could not read {what} of shape {shape}: its {n_bytes:,} bytes do not fit into memory. Read less.")


def check_out(out: Block, fields: Mapping[str, Field], n_items: int) -> Block:
    """Return `out`; raise OptionError if an array is missing or has another shape or dtype than `n_items` need."""
    for name, field in fields.items():
        shape = (n_items, *(field.shape or ()))
        if name not in out or (out[name].shape, out[name].dtype) != (shape, field.dtype):
            found = f"{out[name].dtype} {out[name].shape}" if name in out else "no such array"
            raise OptionError(f"out[{name!r}] must be an array of {field.dtype} {shape}, got {found}.")
    return out


def fill_rows(source: Source, items: NDArray[np.int64], rows: NDArray[np.int64], out: Block) -> None:
    """Read items of `source` into some rows of arrays; without a copy in between, if the source can do that."""
    fill: Callable[[NDArray[np.int64], NDArray[np.int64], Block], None] | None = getattr(source, "fill", None)
    if fill is not None:
        fill(items, rows, out)
        return
    for name, array in source.take(items).items():
        out[name][rows] = array


def sum_memory(*sources: Source) -> int:
    """Return how many bytes sources keep between reads at most; those that do not say so keep little."""
    return sum(int(getattr(source, "memory_bytes", 0)) for source in sources)


def sum_stored(*sources: object) -> int | None:
    """Return how many bytes of local files hold the items of sources; None if one of them does not know it."""
    total = 0
    for source in sources:
        n_bytes = getattr(source, "stored_bytes", None)
        if n_bytes is None:
            return None
        total += int(n_bytes)
    return total


def _item_range(source: Source) -> str:
    return f"it has items 0–{len(source.index) - 1}" if len(source.index) else "it has no items"
