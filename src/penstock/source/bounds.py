"""Whether the items that a source is asked for exist."""

import numpy as np
from numpy.typing import ArrayLike, NDArray

from penstock.core.errors import ReadError
from penstock.core.protocols import Source
from penstock.core.types import Span

__all__ = ["check_span", "checked_items"]


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


def _has(source: Source) -> str:
    return f"it has items 0–{len(source.index) - 1}" if len(source.index) else "it has no items"
