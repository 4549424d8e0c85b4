"""Items that a Python function yields, for formats that Penstock does not read."""

import functools
import itertools
import pickle
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.convert.inputs.arrays import check_numbers
from penstock.convert.inputs.protocol import Sample
from penstock.core.errors import OptionError, SourceError
from penstock.core.text import count

__all__ = ["FunctionInput", "function_name"]

_END = object()


@dataclass(frozen=True, slots=True, repr=False, eq=False)
class FunctionInput:
    """A file, and a function that yields its items: the same items in the same order, each time it is called.

    **Cost.** Each time the input is opened, the function is called once to count its items. It is called again to read
    items, and items that are not needed are discarded; going back to an earlier item starts it again. Reading in order
    costs two calls, plus one for every further worker; reading in random order can cost one call per item. If a call is
    expensive, write a `.npy` or a zarr array first.

    An exception of the function is not wrapped; it gets a note that names the file and the item.

    Parameters
    ----------
    path
        The file or folder that is passed to the function.
    function
        Takes the path and yields dicts of fields, or pairs of a dict of fields and a dict of metadata, in which
        `sample_id` is the id of the item. It must be defined at the top level of a module, so that workers find it.
    """

    path: Path
    function: Callable[[Path], Iterable[Any]]

    def __post_init__(self) -> None:
        object.__setattr__(self, "path", Path(self.path))
        if not callable(self.function):
            raise OptionError(f"function must take a path and yield items, got {self.function!r}.")
        try:
            pickle.dumps(self.function)
        except Exception as error:  # objects that the function carries along may raise anything
            raise OptionError(
                f"function must be picklable, but {function_name(self.function)} is not: {error}. Define it at the top "
                "level of a module, and pass what it needs through functools.partial."
            ) from error

    def __eq__(self, other: object) -> bool:
        return isinstance(other, FunctionInput) and self._identity() == other._identity()

    def __hash__(self) -> int:
        return hash(self._identity())

    def _identity(self) -> tuple[Path, bytes]:
        # Compared as pickled: a partial that was sent to a worker twice is not equal to itself.
        return self.path, pickle.dumps(self.function)

    def __repr__(self) -> str:
        # Without the address in memory, which differs between processes.
        return f"FunctionInput({self.path!r}, {function_name(self.function)})"

    def open(self) -> "_FunctionRecording":
        """Call the function to count its items."""
        return _FunctionRecording(self.path, self.function)


def function_name(function: Callable[..., Any]) -> str:
    """Return the qualified name of a function, the same in every process.

    Examples
    --------
    >>> function_name(np.linspace), function_name(functools.partial(np.linspace, 0, num=3))
    ('numpy.linspace', 'numpy.linspace(0, num=3)')
    """
    if isinstance(function, functools.partial):
        given = [*map(repr, function.args), *(f"{key}={value!r}" for key, value in function.keywords.items())]
        return f"{function_name(function.func)}({', '.join(given)})"
    named = function if hasattr(function, "__qualname__") else type(function)
    return f"{named.__module__}.{named.__qualname__}"


class _FunctionRecording:
    """The `Recording` of the items that a function yields.

    1. The function raises: its exception, with a note of the item. The next read starts the function again.
    2. It yields fewer or more items than were counted, or other fields: SourceError, when this is noticed.
    3. It yields other values: not noticed.
    """

    def __init__(self, path: Path, function: Callable[[Path], Iterable[Any]]) -> None:
        self._path, self._function = path, function
        self._known: dict[tuple[str, ...], int] = {}
        self._fields = array("I")
        """The number of the set of fields of each item, as in `_known`."""
        self._running: Iterator[Sample] | None = None
        self._next = 0
        ids: list[str | None] = []
        for fields, metadata in self._run():
            ids.append(metadata.get("sample_id"))
            self._fields.append(self._known.setdefault(tuple(sorted(fields)), len(self._known)))
        self.n_samples = len(self._fields)
        if not self.n_samples:
            raise SourceError(
                f"A function must yield at least one item, but {function_name(function)} yields none for {path}."
            )
        self.about: Mapping[str, Any] = {"format": "function", "function": function_name(function)}
        self.groups: Mapping[str, str] = {}
        self.notes: Sequence[str] = []
        self.ids: Sequence[str | None] = ids if any(sample_id is not None for sample_id in ids) else ()

    def metadata(self, numbers: NDArray[np.int64]) -> Iterator[Mapping[str, Any]]:
        """Yield the metadata of items, which calls the function."""
        for _, metadata in self.samples(numbers):
            yield metadata

    def span(self, numbers: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return the number of each item, and the next number."""
        starts = check_numbers(numbers, self.n_samples, self._path)
        return np.stack([starts, starts + 1], axis=1).astype(np.float64)

    def samples(self, numbers: NDArray[np.int64]) -> Iterator[Sample]:
        """Yield items in the order of `numbers`. Each step back starts the function again."""
        for number in check_numbers(numbers, self.n_samples, self._path).tolist():
            fields, metadata = self._read_item(number)
            yield fields, {"file": self._path.name, "row": number, **metadata}

    def close(self) -> None:
        """Stop the function; idempotent."""
        running, self._running, self._next = self._running, None, 0
        if running is not None and hasattr(running, "close"):
            running.close()

    def _read_item(self, number: int) -> Sample:
        if self._running is None or number < self._next:
            self.close()
            self._running = self._run()
        try:
            while True:
                at, sample = self._next, next(self._running, None)
                self._next += 1
                found = self._check_repeated(at, sample)
                if at == number:
                    break
            if number == self.n_samples - 1:
                self._check_end(next(self._running, None))
        except BaseException:
            self.close()
            raise
        return found

    def _check_repeated(self, at: int, sample: Sample | None) -> Sample:
        if sample is None:
            raise SourceError(f"{self._difference()}: {count(at, 'item')} instead of {self.n_samples}.")
        if self._known.get(tuple(sorted(sample[0]))) != self._fields[at]:
            raise SourceError(f"{self._difference()}: item {at} has other fields, {', '.join(sample[0])}.")
        return sample

    def _check_end(self, sample: Sample | None) -> None:
        if sample is not None:
            raise SourceError(f"{self._difference()}: more than {count(self.n_samples, 'item')}.")

    def _difference(self) -> str:
        name = function_name(self._function)
        return f"A function must yield the same items each time, but {name} changed for {self._path}"

    def _run(self) -> Iterator[Sample]:
        """Yield the items of one call."""
        running: Iterator[Any] | None = None
        for number in itertools.count():
            try:
                running = iter(self._function(self._path)) if running is None else running
                given = next(running, _END)
            except Exception as error:
                error.add_note(f"[penstock] {function_name(self._function)} failed at item {number} of {self._path}")
                raise
            if given is _END:
                return
            yield self._check_item(given, number)

    def _check_item(self, given: Any, number: int) -> Sample:
        pair = given if isinstance(given, tuple) and len(given) == 2 else (given, {})
        if not all(isinstance(part, Mapping) for part in pair) or not pair[0] or not all(map(_is_text, pair[0])):
            what = f"{given!r:.60}" if not isinstance(pair[0], Mapping) else f"a dict of {list(pair[0])}"
            raise SourceError(
                "An item must be a dict of one or more named fields, or a pair of such a dict and a dict of metadata, "
                f"but {function_name(self._function)} yields {what} as item {number} of {self._path}."
            )
        sample_id = pair[1].get("sample_id")
        if sample_id is not None and (not isinstance(sample_id, str) or not sample_id):
            raise SourceError(
                f"sample_id must be a non-empty string such as 'sub-01_trial-7', but {function_name(self._function)} "
                f"yields {sample_id!r} for item {number} of {self._path}."
            )
        return dict(pair[0]), dict(pair[1])


def _is_text(name: Any) -> bool:
    return isinstance(name, str)
