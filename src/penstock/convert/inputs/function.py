"""Samples that a Python function yields, for recordings of a kind that Penstock does not read."""

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

from penstock.convert.inputs.arrays import checked_numbers
from penstock.convert.inputs.protocol import Sample
from penstock.core.errors import OptionError, SourceError

__all__ = ["FunctionInput", "name_of"]

_END = object()


@dataclass(frozen=True, slots=True, repr=False, eq=False)
class FunctionInput:
    """A file, and a function that yields its samples: the same ones, in the same order, each time it is called.

    **What it costs.** The function runs once to count its samples, each time the input is opened. To give samples, it
    runs again, and what is not asked for is thrown away; going back to an earlier sample starts it over. Samples in
    order cost two runs, and one more for every further worker; samples in a random order can cost a run each. Where a
    run is expensive, write a `.npy` or a zarr array first.

    An exception of the function is not wrapped: it arrives as it is, with a note of the file and the sample.

    Parameters
    ----------
    path
        The file or folder that is handed to the function.
    function
        Takes the path; yields a dict of fields, or a dict and a dict of metadata. It lies at the top level of a module,
        so that workers find it.
    """

    path: Path
    function: Callable[[Path], Iterable[Any]]

    def __post_init__(self) -> None:
        object.__setattr__(self, "path", Path(self.path))
        if not callable(self.function):
            raise OptionError(f"function={self.function!r}; give a function that takes a path and yields samples.")
        try:
            pickle.dumps(self.function)
        except Exception as error:  # whatever the function carries along may raise anything
            raise OptionError(
                f"function={name_of(self.function)} cannot be handed to workers: {error}. Define it at the top "
                "level of a module, and give what it needs through functools.partial."
            ) from error

    def __eq__(self, other: object) -> bool:
        return isinstance(other, FunctionInput) and self._identity() == other._identity()

    def __hash__(self) -> int:
        return hash(self._identity())

    def _identity(self) -> tuple[Path, bytes]:
        # As pickled: a partial that has travelled to a worker twice is not equal to itself.
        return self.path, pickle.dumps(self.function)

    def __repr__(self) -> str:
        # Without the address in memory, which differs from run to run.
        return f"FunctionInput({self.path!r}, {name_of(self.function)})"

    def open(self) -> "_FunctionRecording":
        """Run the function to count its samples."""
        return _FunctionRecording(self.path, self.function)


def name_of(function: Callable[..., Any]) -> str:
    """Return what a function is called, the same in every process.

    Examples
    --------
    >>> name_of(np.linspace), name_of(functools.partial(np.linspace, 0, num=3))
    ('numpy.linspace', 'numpy.linspace(0, num=3)')
    """
    if isinstance(function, functools.partial):
        given = [*map(repr, function.args), *(f"{key}={value!r}" for key, value in function.keywords.items())]
        return f"{name_of(function.func)}({', '.join(given)})"
    named = function if hasattr(function, "__qualname__") else type(function)
    return f"{named.__module__}.{named.__qualname__}"


class _FunctionRecording:
    """What a function yields: a `Recording`.

    1. The function raises: its exception, with a note of the sample; the next call starts the function over.
    2. It yields fewer or more samples than when it was counted, or other fields: SourceError, where it is noticed.
    3. It yields other values: not noticed.
    """

    def __init__(self, path: Path, function: Callable[[Path], Iterable[Any]]) -> None:
        self._path, self._function = path, function
        self._known: dict[tuple[str, ...], int] = {}
        self._fields = array("I")
        """Which of the sets of fields each sample has."""
        self._running: Iterator[Sample] | None = None
        self._next = 0
        for fields, _ in self._run():
            self._fields.append(self._known.setdefault(tuple(sorted(fields)), len(self._known)))
        self.n_samples = len(self._fields)
        if not self.n_samples:
            raise SourceError(f"{name_of(function)} yields no samples for {path}.")
        self.about: Mapping[str, Any] = {"format": "function", "function": name_of(function)}
        self.groups: Mapping[str, str] = {}
        self.notes: Sequence[str] = []

    def span(self, numbers: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return the number of each sample, and the one after it."""
        starts = checked_numbers(numbers, self.n_samples, self._path)
        return np.stack([starts, starts + 1], axis=1).astype(np.float64)

    def samples(self, numbers: NDArray[np.int64]) -> Iterator[Sample]:
        """Yield samples, in the order of `numbers`; each step back runs the function from its beginning."""
        for number in checked_numbers(numbers, self.n_samples, self._path).tolist():
            fields, metadata = self._sample(number)
            yield fields, {"file": self._path.name, "row": number, **metadata}

    def close(self) -> None:
        """End the function where it is; nothing happens the second time."""
        running, self._running, self._next = self._running, None, 0
        if running is not None and hasattr(running, "close"):
            running.close()

    def _sample(self, number: int) -> Sample:
        if self._running is None or number < self._next:
            self.close()
            self._running = self._run()
        try:
            while True:
                at, sample = self._next, next(self._running, None)
                self._next += 1
                found = self._expected(at, sample)
                if at == number:
                    break
            if number == self.n_samples - 1:
                self._expect_end(next(self._running, None))
        except BaseException:
            self.close()
            raise
        return found

    def _expected(self, at: int, sample: Sample | None) -> Sample:
        if sample is None:
            raise SourceError(f"{self._other()}: {at} samples instead of {self.n_samples}.")
        if self._known.get(tuple(sorted(sample[0]))) != self._fields[at]:
            raise SourceError(f"{self._other()}: sample {at} has other fields, {', '.join(sample[0])}.")
        return sample

    def _expect_end(self, sample: Sample | None) -> None:
        if sample is not None:
            raise SourceError(f"{self._other()}: more than {self.n_samples} samples.")

    def _other(self) -> str:
        return f"{name_of(self._function)} yields something else for {self._path} when it is run again"

    def _run(self) -> Iterator[Sample]:
        """Yield the samples of one run."""
        running: Iterator[Any] | None = None
        for number in itertools.count():
            try:
                running = iter(self._function(self._path)) if running is None else running
                given = next(running, _END)
            except Exception as error:
                error.add_note(f"[penstock] {name_of(self._function)} was to yield sample {number} of {self._path}")
                raise
            if given is _END:
                return
            yield self._checked(given, number)

    def _checked(self, given: Any, number: int) -> Sample:
        pair = given if isinstance(given, tuple) and len(given) == 2 else (given, {})
        if not all(isinstance(part, Mapping) for part in pair) or not pair[0] or not all(map(_is_text, pair[0])):
            what = f"a {type(given).__name__}" if not isinstance(pair[0], Mapping) else f"a dict of {list(pair[0])}"
            raise SourceError(
                f"{name_of(self._function)} yields {what} as sample {number} of {self._path}; a sample is a dict of "
                "one named field or more, or a pair of that and a dict of metadata."
            )
        return dict(pair[0]), dict(pair[1])


def _is_text(name: Any) -> bool:
    return isinstance(name, str)
