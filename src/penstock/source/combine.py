"""Sources built from other sources: concatenated, zipped or numbered."""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from penstock.core.errors import SourceError
from penstock.core.index import Index, join_presence
from penstock.core.protocols import Source
from penstock.core.types import UNNAMED, Block, Field, Span
from penstock.source.checks import allocate_block, check_items, fill_rows, keep_existing
from penstock.source.select.selectable import Selectable, check_fields, select_fields
from penstock.source.wrapper import Wrapper, add_up, call_prepare, call_release

__all__ = ["Concat", "Numbered", "Zip"]

_Int64s = NDArray[np.int64]


class Concat(Selectable, Wrapper):
    """Several sources with the same fields, one after the other.

    Examples
    --------
    >>> from penstock.source.array import ArraySource
    >>> both = Concat([ArraySource({"x": np.arange(3)}), ArraySource({"x": np.arange(10, 14)})])
    >>> both.take(np.array([6, 0, 3]))["x"].tolist()
    [13, 0, 10]
    """

    def __init__(self, sources: Sequence[Source]) -> None:
        if not sources:
            raise SourceError("sources of Concat must have at least one source, got none.")
        self._parts = self._sources = tuple(sources)
        self.fields: Mapping[str, Field] = sources[0].fields
        for number, source in enumerate(sources):
            if dict(source.fields) != dict(self.fields):
                raise SourceError(
                    f"All sources of Concat must have the same fields: source 0 has {_format_fields(self.fields)}, but "
                    f"source {number}, {source!r}, has {_format_fields(source.fields)}."
                )
        self._offsets = np.cumsum([0, *(len(source.index) for source in sources)]).astype(np.int64)
        self.index = Index.concat([source.index for source in sources])
        self._joined = _join(self._sources)

    def __repr__(self) -> str:
        return f"Concat({', '.join(map(repr, self._sources))})"

    def read(self, span: Span, out: Block | None = None) -> Block:
        """Return consecutive items, from one source or several."""
        number = int(np.searchsorted(self._offsets, span.start, side="right")) - 1
        if number < len(self._sources) and span.stop <= self._offsets[number + 1]:
            offset = int(self._offsets[number])
            return self._sources[number].read(Span(span.start - offset, span.stop - offset), out)
        return self.take(np.arange(span.start, span.stop), out)

    def take(self, items: _Int64s, out: Block | None = None) -> Block:
        """Return any items, each from its own source."""
        items = check_items(items, self)
        given = out or {}
        others = {name: field for name, field in self.fields.items() if name not in given}
        if self._joined is not None:
            block = {**given, **allocate_block(others, len(items))}
            if self._joined.take(items, block):
                return block
        numbers = np.searchsorted(self._offsets, items, side="right") - 1
        present: list[int] = np.flatnonzero(np.bincount(numbers)).tolist()
        if len(present) == 1:
            return self._sources[present[0]].take(items - self._offsets[present[0]], out)
        if not present:
            return self._sources[0].take(items, out)
        block = {**given, **allocate_block(others, len(items))}
        for number in present:
            rows = np.flatnonzero(numbers == number)
            fill_rows(self._sources[number], items[rows] - self._offsets[number], rows, block)
        return block

    def prepare(self, items: _Int64s) -> int | None:
        """Start reading items into the page cache, as far as the sources do; return the bytes that were not there."""
        return add_up([call_prepare(source, its_items) for source, its_items in self._split(items)])

    def release(self, items: _Int64s) -> None:
        """Give the pages of items back to the system, as far as the sources do; only what is remote, if a part is."""
        for source, its_items in self._split(items):
            call_release(source, its_items, only_remote=self.is_remote)

    def with_fields(self, fields: Sequence[str]) -> "Concat":
        """Return a source of the same items with these fields alone."""
        other = copy.copy(self)
        other._parts = other._sources = tuple(select_fields(source, fields) for source in self._sources)
        other.fields, other._joined = other._sources[0].fields, _join(other._sources)
        return other

    @property
    def stored_fields(self) -> Mapping[str, Field]:
        """All fields that can be read, also those that are not delivered."""
        each: list[Mapping[str, Field]] = [getattr(part, "stored_fields", part.fields) for part in self._sources]
        return {name: field for name, field in each[0].items() if all(name in fields for fields in each)}

    def _split(self, items: _Int64s) -> Iterator[tuple[Source, _Int64s]]:
        """Yield each source that has some of the items, with their numbers in it."""
        existing = keep_existing(items, self)
        numbers = np.searchsorted(self._offsets, existing, side="right") - 1
        order = np.argsort(numbers, kind="stable")
        present, begins = np.unique(numbers[order], return_index=True)
        for number, places in zip(present.tolist(), np.split(order, begins[1:]), strict=False):
            yield self._sources[number], existing[places] - self._offsets[number]


class Numbered(Selectable, Wrapper):
    """A source with an additional field: the number of each item.

    Examples
    --------
    >>> from penstock.source.array import ArraySource
    >>> source = Numbered(ArraySource({"x": np.arange(10, 14)}), "idx")
    >>> {name: array.tolist() for name, array in source.take(np.array([3, 0])).items()}
    {'x': [13, 10], 'idx': [3, 0]}
    """

    def __init__(self, source: Source, name: str = "idx") -> None:
        if name in source.fields or UNNAMED in source.fields:
            raise SourceError(
                f"{name!r} must be a new field of a source with named fields, got {source!r}; choose another name."
            )
        self._source, self._name, self._parts = source, name, (source,)
        self.fields: Mapping[str, Field] = {**source.fields, name: Field(np.dtype(np.int64), ())}
        self.index = source.index

    def __repr__(self) -> str:
        return f"Numbered({self._source!r})"

    def read(self, span: Span, out: Block | None = None) -> Block:
        """Return consecutive items, with their numbers."""
        return self._add_numbers(
            self._source.read(span, self._other_fields(out)), np.arange(span.start, span.stop), out
        )

    def take(self, items: _Int64s, out: Block | None = None) -> Block:
        """Return any items, with their numbers."""
        return self._add_numbers(self._source.take(items, self._other_fields(out)), items, out)

    def _other_fields(self, out: Block | None) -> Block | None:
        return None if out is None else {name: array for name, array in out.items() if name != self._name}

    def _add_numbers(self, block: Block, items: _Int64s, out: Block | None) -> Block:
        numbers = np.asarray(items, np.int64)
        if out is not None and self._name in out:
            out[self._name][...] = numbers
            numbers = out[self._name]
        return {**block, self._name: numbers}


class Zip(Selectable, Wrapper):
    """Several sources of equal length, side by side: item i has the fields of item i of each.

    Examples
    --------
    >>> from penstock.source.array import ArraySource
    >>> both = Zip([ArraySource({"x": np.arange(3)}), ArraySource({"y": np.arange(3) * 2})])
    >>> {name: array.tolist() for name, array in both.take(np.array([2])).items()}
    {'x': [2], 'y': [4]}
    """

    def __init__(self, sources: Sequence[Source]) -> None:
        if not sources:
            raise SourceError("sources of Zip must have at least one source, got none.")
        self._parts = self._sources = tuple(sources)
        lengths = [len(source.index) for source in sources]
        if len(set(lengths)) > 1:
            raise SourceError(f"All sources of Zip must have the same length, got {lengths} items.")
        names = [name for source in sources for name in source.fields]
        if UNNAMED in names and len(sources) > 1:
            raise SourceError(
                "All sources of Zip must have named fields, but a DatasetSource has none; zip the datasets instead."
            )
        duplicates = sorted({name for name in names if names.count(name) > 1})
        if duplicates:
            others = [name for name in sources[-1].fields if name not in duplicates]
            raise SourceError(
                f"Each field must be in one source of Zip only, got {duplicates} in several. Read one of them without, "
                f"such as source.with_fields({others or ['...']})."
            )
        self.fields: Mapping[str, Field] = {name: field for source in sources for name, field in source.fields.items()}
        identity = "&".join(source.index.content_digest for source in sources)
        presence = join_presence(source.index.presence for source in sources)
        self.index = replace(sources[0].index, identity=identity, presence=presence)

    def with_fields(self, fields: Sequence[str]) -> "Zip":
        """Return a source of the same items with these fields alone; sources without any of them are not read."""
        names = check_fields(self, fields)
        chosen = [(source, [name for name in names if name in source.fields]) for source in self._sources]
        other = copy.copy(self)
        other._parts = other._sources = tuple(select_fields(source, own) for source, own in chosen if own)
        other.fields = {name: self.fields[name] for name in names}
        return other

    def __repr__(self) -> str:
        return f"Zip({', '.join(map(repr, self._sources))})"

    def read(self, span: Span, out: Block | None = None) -> Block:
        """Return consecutive items."""
        return {
            name: a for source in self._sources for name, a in source.read(span, _select_fields(out, source)).items()
        }

    def take(self, items: _Int64s, out: Block | None = None) -> Block:
        """Return any items."""
        return {
            name: a for source in self._sources for name, a in source.take(items, _select_fields(out, source)).items()
        }


class _Joined(Protocol):
    """Reads items of several sources with one call, numbered from one source to the next."""

    def take(self, items: _Int64s, block: Block) -> bool:
        """Read items into `block`, if nothing is in the way; otherwise return False."""


def _join(sources: Sequence[Source]) -> _Joined | None:
    """Return what reads items of all sources with one call; None if they cannot do that."""
    join: Callable[[Sequence[Source]], _Joined | None] | None = getattr(sources[0], "join", None)
    return None if join is None or len(sources) == 1 else join(sources)


def _select_fields(out: Block | None, source: Source) -> Block | None:
    selected = {name: out[name] for name in source.fields if name in out} if out is not None else {}
    return selected or None


def _format_fields(fields: Mapping[str, Field]) -> str:
    return ", ".join(f"{name}: {field.dtype}{list(field.shape or ())}" for name, field in fields.items())
