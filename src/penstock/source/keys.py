"""Sources whose items belong together by a key: which item of one belongs to which of the other."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.core.errors import OptionError, SourceError
from penstock.core.protocols import Source
from penstock.core.text import count, did_you_mean
from penstock.source.select.columns import read_columns
from penstock.source.select.selectable import Take, select_fields

__all__ = ["align_sources"]

_Int64s = NDArray[np.int64]

_NAMED = 3  # keys in a message


def align_sources(sources: Sequence[Source], on: str) -> list[Source]:
    """Return sources in the order of the first one, by their keys; only the first one keeps the key as a field.

    Keys are read once. What stays are the numbers of the items, 8 bytes each, and none of a source that is in that
    order already.
    """
    for number, source in enumerate(sources):
        if on not in source.fields:
            raise OptionError(
                f"on={on!r} must be a field of all sources of Zip, but source {number}, {source!r}, has "
                f"{', '.join(map(repr, source.fields))}.{did_you_mean(on, source.fields)}"
            )
        if list(source.fields) == [on] and number:
            raise SourceError(f"Source {number} of Zip, {source!r}, must have a field besides the key {on!r}.")
    wanted = _Keys(sources[0], on, 0)
    aligned: list[Source] = [sources[0]]
    for number, source in enumerate(sources[1:], 1):
        items = _Keys(source, on, number).find(wanted)
        others = select_fields(source, [name for name in source.fields if name != on])
        in_order = bool((items == np.arange(len(items))).all())
        aligned.append(others if in_order else Take(others, items, how=f"on {on!r}"))
    return aligned


class _Keys:
    """The keys of a source, sorted; raises SourceError for one that comes twice or is missing."""

    def __init__(self, source: Source, on: str, number: int) -> None:
        self._name = f"source {number} of Zip, {source!r}"
        self._on = on
        found = read_columns(source, [on])[on]
        self.values: NDArray[Any] = found.astype(object) if found.dtype.kind in "US" else found
        if self.values.dtype.hasobject and not all(isinstance(value, str) for value in self.values):
            kinds = sorted({type(value).__name__ for value in self.values})
            raise SourceError(f"Keys {on!r} must be integers or text, got {', '.join(kinds)} in {self._name}.")
        if self.values.dtype.kind == "f":
            raise SourceError(f"Keys {on!r} must be integers or text, got {self.values.dtype} in {self._name}.")
        self.order: _Int64s = np.argsort(self.values, kind="stable")
        self.sorted = self.values[self.order]
        repeated = self.sorted[1:][self.sorted[1:] == self.sorted[:-1]]
        if len(repeated):
            raise SourceError(
                f"Every key {on!r} must come once, but {_name_some(np.unique(repeated))} in {self._name} "
                f"{'come' if len(np.unique(repeated)) > 1 else 'comes'} several times."
            )

    def find(self, wanted: "_Keys") -> _Int64s:
        """Return the items that have the keys of another source, in its order."""
        if self.values.dtype.hasobject != wanted.values.dtype.hasobject:
            raise SourceError(
                f"Keys {self._on!r} must have one type, got {_kind(wanted.values)} in {wanted._name} and "
                f"{_kind(self.values)} in {self._name}."
            )
        wanted._check_has(self)
        self._check_has(wanted)
        found = np.empty(len(self.order), np.int64)
        found[wanted.order] = self.order  # both sorted: equal keys have equal places
        return found

    def _check_has(self, other: "_Keys") -> None:
        """Raise SourceError, which names some, if keys of another source are missing here."""
        places = np.minimum(np.searchsorted(self.sorted, other.sorted), max(0, len(self.sorted) - 1))
        missing = other.sorted if not len(self.sorted) else other.sorted[self.sorted[places] != other.sorted]
        if len(missing):
            raise SourceError(
                f"Every key {self._on!r} must be in all sources of Zip, but {_name_some(missing)} of {other._name} "
                f"{'are' if len(missing) > 1 else 'is'} not in {self._name}. Leave such items out with where(...)."
            )


def _kind(values: NDArray[Any]) -> str:
    return "text" if values.dtype.hasobject else str(values.dtype)


def _name_some(keys: NDArray[Any]) -> str:
    some = ", ".join(map(repr, keys[:_NAMED].tolist()))
    return some if len(keys) <= _NAMED else f"{some} and {count(len(keys) - _NAMED, 'other key')}"
