"""Any map-style dataset: whatever has `len` and `[i]`."""

import threading
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.core.errors import ReadError, SourceError
from penstock.core.index import Index
from penstock.core.types import UNNAMED, Block, Field, Span
from penstock.source.checks import check_span, checked_items

__all__ = ["DatasetSource"]


class DatasetSource:
    """Items are what a map-style dataset gives: tuples, mappings, tensors, anything.

    A dataset with `__getitems__` (a list of numbers in, a list of items out) is asked for a whole batch at once.

    Parameters
    ----------
    dataset
        A `torch.utils.data.Dataset` or anything else with `__len__` and `__getitem__`.
    identity
        What tells this data set from another one of the same class and length, such as a version; it goes into saved
        states, which another data set then refuses.
    thread_safe
        Let several threads into the dataset at once. False by default: many datasets share one file handle.

    Examples
    --------
    >>> source = DatasetSource([("a", 1), ("b", 2)])
    >>> source.take(np.array([1]))[""].tolist()
    [('b', 2)]
    """

    fields: Mapping[str, Field] = {UNNAMED: Field(np.dtype(object), None)}

    def __init__(self, dataset: Any, *, identity: str = "", thread_safe: bool = False) -> None:
        if not hasattr(dataset, "__getitem__") or not hasattr(dataset, "__len__"):
            raise SourceError(
                f"{type(dataset).__name__} has no length or cannot be asked for item i; DatasetSource needs a "
                "map-style dataset, with __len__ and __getitem__. Write a stream to disk, then read it in any order."
            )
        self._dataset = dataset
        self._thread_safe = thread_safe
        self._turn = threading.Lock()
        n_items = len(dataset)
        if not n_items:
            raise SourceError(f"{self!r} has 0 items; check where it comes from.")
        self.index = Index.uniform(n_items, identity=f"{type(dataset).__qualname__} {identity}".rstrip())

    def __repr__(self) -> str:
        return f"DatasetSource({type(self._dataset).__name__})"

    def read(self, span: Span, out: Block | None = None) -> Block:  # noqa: ARG002  # no field has a fixed shape
        """Return consecutive items."""
        check_span(span, self)
        return self.take(np.arange(span.start, span.stop))

    def take(self, items: NDArray[np.int64], out: Block | None = None) -> Block:  # noqa: ARG002
        """Return any items, in the given order, as one array of objects."""
        numbers: list[int] = checked_items(items, self).tolist()
        if self._thread_safe:
            found = self._found(numbers)
        else:
            with self._turn:
                found = self._found(numbers)
        # Item by item: numpy would take a list of equally long tuples for a matrix.
        column = np.empty(len(found), object)
        for place, item in enumerate(found):
            column[place] = item
        return {UNNAMED: column}

    def close(self) -> None:
        """Do nothing: what the dataset has open is its own."""

    def _found(self, numbers: list[int]) -> list[Any]:
        if not callable(getattr(self._dataset, "__getitems__", None)):
            return [self._item(number) for number in numbers]
        try:
            found = list(self._dataset.__getitems__(numbers))
        except IndexError as error:
            raise ReadError(
                f"Items {numbers} of {self!r} are not all in range, although its length says {len(self.index)} items; "
                "its __len__ and __getitems__ disagree."
            ) from error
        except Exception as error:
            error.add_note(f"[penstock] in __getitems__ of {self!r}, items {numbers}")
            raise
        if len(found) != len(numbers):
            raise ReadError(f"{self!r} was asked for {len(numbers)} items by __getitems__ and gave {len(found)}.")
        return found

    def _item(self, number: int) -> Any:
        try:
            return self._dataset[number]
        except IndexError as error:
            raise ReadError(
                f"Item {number} of {self!r} is out of range, although its length says {len(self.index)} items; "
                "its __len__ and __getitem__ disagree."
            ) from error
        except Exception as error:
            error.add_note(f"[penstock] in item {number} of {self!r}")
            raise

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_turn"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _turn=threading.Lock())
