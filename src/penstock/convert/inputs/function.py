"""Items that a Python function yields, for formats that Penstock does not read."""

import functools
import itertools
import os
import pickle
from array import array
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.convert.inputs.protocol import Sample, check_numbers
from penstock.convert.plan import Alignment, Scan
from penstock.core.errors import OptionError, SourceError
from penstock.core.text import count

__all__ = ["FunctionInput", "find_beside", "function_name"]

_END = object()


@dataclass(frozen=True, slots=True, repr=False, eq=False)
class FunctionInput:
    """A file or folder, and a function that yields its items: the same in the same order, each time it is called.

    **Cost.** The function is called once to count the items, once more to write them, and once more if a split, a label
    or a table needs their metadata. Each further worker that writes calls it once, too: items that are not needed are
    discarded, and going back to an earlier item starts it again. If a call is expensive, write a `.npy` or a zarr array
    first.

    A field that is None in some items is missing there: it is filled in, with NaN, -1 (integers), 0 (unsigned integers,
    truth values) or an empty text, and all items of the dataset get a field `has_<field>`.

    An exception of the function is not wrapped; it gets a note that names the file and the item. A conversion, which
    goes on to look at the other inputs, names both in its ConversionError, whose cause is the exception.

    Parameters
    ----------
    path
        The file or folder that is passed to the function.
    function
        Takes the path and yields dicts of fields, or pairs of a dict of fields and a dict of metadata, in which
        `sample_id` is the id of the item. It must be defined at the top level of a module, so that workers find it.
    beside
        Names of other files in the same folder that the function reads: a conversion notices if one of them changes.
        None: those with the same stem, such as `a.eeg` beside `a.vhdr`. Of a folder, all files in it are compared.
    n_items
        The number of items, if they were counted.
    absent
        Name, dtype and shape of the fields that some items of the dataset lack.
    """

    path: Path
    function: Callable[[Path], Iterable[Any]]
    beside: tuple[str, ...] | None = None
    n_items: int | None = field(default=None, compare=False)
    absent: tuple[tuple[str, str, tuple[int, ...]], ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "path", Path(self.path))
        if self.beside is None:
            object.__setattr__(self, "beside", find_beside([self.path])[0])
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
        absent = f", absent={self.absent!r}" if self.absent else ""
        return f"FunctionInput({self.path!r}, {function_name(self.function)}{absent})"

    @property
    def paths(self) -> tuple[Path, ...]:
        """The file or folder, and the files beside it."""
        return (self.path, *(self.path.with_name(name) for name in self.beside or ()))

    def open(self) -> "_FunctionRecording":
        """Call the function to count its items, unless they were counted."""
        return _FunctionRecording(self)

    def align(self, scans: Sequence[Scan]) -> Alignment:
        """Return the scans with inputs that know their number of items, and fill in fields that some items lack."""
        members = []
        for name in sorted({name for scan in scans for name in scan.about.get("absent", ())}):
            known = [scan.about.get("absent", {}).get(name) for scan in scans]
            known += [(s.fields[name], s.shapes[name]) for s in scans if s.fields.get(name, "NoneType") != "NoneType"]
            member = next((member for member in known if member is not None), None)
            if member is None:
                raise SourceError(f"A field must have a value in some item, but {name!r} is None in all. Leave it out.")
            if member[0] in ("object", "dict", "list", "tuple"):
                raise SourceError(f"Only arrays, numbers and texts may be None in some items, but {name!r} is another.")
            members.append((name, member[0], tuple(member[1])))
        return Alignment(tuple(_add_absent(scan, tuple(members)) for scan in scans))


def _add_absent(scan: Scan, members: tuple[tuple[str, str, tuple[int, ...]], ...]) -> Scan:
    dtypes, shapes = dict(scan.fields), dict(scan.shapes)
    for name, dtype, shape in members:
        dtypes |= {name: dtype, f"has_{name}": "bool"}
        shapes |= {name: shape, f"has_{name}": ()}
    given: Any = scan.input
    return replace(scan, input=replace(given, n_items=scan.n_items, absent=members), fields=dtypes, shapes=shapes)


def find_beside(paths: Sequence[Path]) -> list[tuple[str, ...]]:
    """Return the names of the files that have the same stem as each path, which are in the same folder."""
    names: dict[Path, dict[str, list[str]]] = {}
    for folder in {path.parent for path in paths}:
        stems = names.setdefault(folder, defaultdict(list))
        with suppress(OSError), os.scandir(folder) as entries:  # what is wrong with it is said when it is read
            for name in sorted(entry.name for entry in entries if entry.is_file()):
                stems[Path(name).stem].append(name)
    return [
        () if path.is_dir() else tuple(name for name in names[path.parent].get(path.stem, ()) if name != path.name)
        for path in paths
    ]


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

    def __init__(self, given: FunctionInput) -> None:
        self._path, self._function, self._absent = given.path, given.function, given.absent
        self._running: Iterator[Sample] | None = None
        self._next = 0
        self._known: dict[tuple[str, ...], int] = {}
        self._fields = array("I")
        """The number of the set of fields of each item, as in `_known`; empty if the items were counted before."""
        self._first: Sample | None = None
        """The first item, until it is read: to look at it costs no call."""
        self.about: Mapping[str, Any] = {"format": "function", "function": function_name(self._function)}
        self.groups: Mapping[str, str] = {}
        self.notes: Sequence[str] = []
        self.ids: Sequence[str | None] = ()
        self.n_samples = self._count() if given.n_items is None else given.n_items

    def _count(self) -> int:
        """Call the function, and note what its items have."""
        ids: list[str | None] = []
        absent, members = set[str](), dict[str, tuple[str, list[int]]]()
        for fields, metadata in self._run():
            self._first = (fields, metadata) if self._first is None else self._first
            ids.append(metadata.get("sample_id"))
            self._fields.append(self._known.setdefault(tuple(sorted(fields)), len(self._known)))
            absent.update(name for name, value in fields.items() if value is None)
            for name in fields.keys() - members.keys():
                if fields[name] is not None:
                    value = np.asarray(fields[name])
                    members[name] = str(value.dtype), list(value.shape)
        if not ids:
            raise SourceError(
                f"A function must yield at least one item, but {function_name(self._function)} yields none for "
                f"{self._path}."
            )
        if absent:
            self.about = {**self.about, "absent": {name: members.get(name) for name in sorted(absent)}}
        self.ids = ids if any(sample_id is not None for sample_id in ids) else ()
        return len(ids)

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
            is_known = number == 0 and self._first is not None
            fields, metadata = self._take_first() if is_known else self._read_item(number)
            yield self._fill_in(fields, number), {"file": self._path.name, "row": number, **metadata}

    def _take_first(self) -> Sample:
        first, self._first = self._first, None
        assert first is not None, "asked for by the caller"
        return first

    def _fill_in(self, fields: dict[str, Any], number: int) -> dict[str, Any]:
        """Return the fields of an item with those that are missing, and whether it has them."""
        for name, dtype, shape in self._absent:
            if f"has_{name}" in fields:
                raise SourceError(
                    f"{name!r} is None in some items, so that all get a field 'has_{name}', but item {number} of "
                    f"{self._path} has one of its own. Rename it."
                )
            value = fields.get(name)
            if value is None:
                fields = {**fields, name: _make_empty(np.dtype(dtype), shape)}
            fields = {**fields, f"has_{name}": np.bool_(value is not None)}
        return fields

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
        if self._fields and self._known.get(tuple(sorted(sample[0]))) != self._fields[at]:
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


def _make_empty(dtype: np.dtype[Any], shape: tuple[int, ...]) -> Any:
    """Return what a missing field is filled in with."""
    if dtype.kind in "US" and not shape:
        return "" if dtype.kind == "U" else b""
    # Whole numbers are labels and ids, of which none is negative; pixels are unsigned.
    return np.full(shape, {"f": np.nan, "c": np.nan, "i": -1}.get(dtype.kind, 0), dtype)[()]


def _is_text(name: Any) -> bool:
    return isinstance(name, str)
