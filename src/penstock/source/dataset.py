"""Items from any map-style dataset: an object with `__len__` and `__getitem__`."""

import inspect
import threading
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.core.errors import ReadError, SourceError
from penstock.core.index import Index
from penstock.core.types import UNNAMED, Block, Field, Span
from penstock.source.checks import check_items, check_span, keep_existing
from penstock.source.remote_parts import RemoteParts
from penstock.source.select.selectable import Selectable

__all__ = ["DatasetSource"]


class DatasetSource(Selectable, RemoteParts):
    """Items of a map-style dataset: tuples, mappings, tensors, any object.

    If the dataset has `__getitems__` (list of indices in, list of items out), a whole batch is one call. If it has
    `prepare(items)`, `release(items)` or `stored_bytes`, they are those of the source (see `Source`); methods of these
    names with other parameters are not called.

    Parameters
    ----------
    dataset
        A `torch.utils.data.Dataset` or anything else with `__len__` and `__getitem__`.
    identity
        Tells this dataset from another of the same class and length, for example a version. It enters saved states, so
        that a state of one dataset cannot be loaded for another.
    thread_safe
        Whether several threads may call the dataset at once. False by default: many datasets share one file handle.

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
                f"dataset must be map-style, with __len__ and __getitem__, got {type(dataset).__name__}. "
                "Convert an iterable dataset to shards, then read it in any order."
            )
        self.dataset, self._parts = dataset, (dataset,)
        """What was given; `torch.utils.data.get_worker_info().dataset` in a worker."""
        self._thread_safe = thread_safe
        self._lock = threading.Lock()
        n_items = len(dataset)
        if not n_items:
            raise SourceError(f"dataset must have at least one item, got {self!r} with none. Check its origin.")
        self.index = Index.uniform(n_items, identity=f"{type(dataset).__qualname__} {identity}".rstrip())

    def __repr__(self) -> str:
        return f"DatasetSource({type(self.dataset).__name__})"

    def read(self, span: Span, out: Block | None = None) -> Block:  # noqa: ARG002  # no field has a fixed shape
        """Return consecutive items."""
        check_span(span, self)
        return self.take(np.arange(span.start, span.stop))

    def take(self, items: NDArray[np.int64], out: Block | None = None) -> Block:  # noqa: ARG002
        """Return any items, in the given order, as one array of objects."""
        numbers: list[int] = check_items(items, self).tolist()
        if self._thread_safe:
            found = self._fetch_items(numbers)
        else:
            with self._lock:
                found = self._fetch_items(numbers)
        # One by one: NumPy would turn a list of equally long tuples into a matrix.
        column = np.empty(len(found), object)
        for row, item in enumerate(found):
            column[row] = item
        return {UNNAMED: column}

    def prepare(self, items: NDArray[np.int64]) -> int | None:
        """Call `prepare(items)` of the dataset, also while items are read; 0 if it has none."""
        prepare = self._find_method("prepare")
        return 0 if prepare is None else prepare(keep_existing(items, self))

    def release(self, items: NDArray[np.int64]) -> None:
        """Call `release(items)` of the dataset, if it has it, also while items are read."""
        release = self._find_method("release")
        if release is not None:
            release(keep_existing(items, self))

    @property
    def stored_bytes(self) -> int | None:
        """`stored_bytes` of the dataset, if it has it."""
        n_bytes = getattr(self.dataset, "stored_bytes", None)
        return n_bytes if isinstance(n_bytes, int) else None

    def _find_method(self, name: str) -> Callable[[NDArray[np.int64]], int | None] | None:
        method = getattr(self.dataset, name, None)
        return method if callable(method) and _takes_items(method) else None

    def close(self) -> None:
        """Do nothing: the dataset owns its open files."""

    def _fetch_items(self, numbers: list[int]) -> list[Any]:
        if not callable(getattr(self.dataset, "__getitems__", None)):
            return [self._fetch_item(number) for number in numbers]
        try:
            found = list(self.dataset.__getitems__(numbers))
        except IndexError as error:
            raise ReadError(
                f"Items {numbers} of {self!r} are out of range, although its length is {len(self.index)}; "
                "its __len__ and __getitems__ disagree."
            ) from error
        except Exception as error:
            error.add_note(f"[penstock] in __getitems__ of {self!r}, items {numbers}")
            raise
        if len(found) != len(numbers):
            raise ReadError(
                f"__getitems__ of {self!r} must return one item per index: {len(numbers)} expected, got {len(found)}."
            )
        return found

    def _fetch_item(self, number: int) -> Any:
        try:
            return self.dataset[number]
        except IndexError as error:
            raise ReadError(
                f"Item {number} of {self!r} is out of range, although its length is {len(self.index)}; "
                "its __len__ and __getitem__ disagree."
            ) from error
        except Exception as error:
            error.add_note(f"[penstock] in item {number} of {self!r}")
            raise

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_lock"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _lock=threading.Lock())


def _takes_items(method: Callable[..., Any]) -> bool:
    """Return whether a method has the parameter of `Source.prepare`: datasets use the name for other things."""
    try:
        return list(inspect.signature(method).parameters) == ["items"]
    except (TypeError, ValueError):  # of a built-in
        return False
