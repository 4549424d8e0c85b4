"""Sources built from other sources: concatenated, zipped or numbered."""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from penstock.core.errors import OptionError, SourceError
from penstock.core.index import Index, join_presence
from penstock.core.protocols import Source
from penstock.core.types import UNNAMED, Block, Field, Span
from penstock.shard.names import holds_file, stored_extension
from penstock.source.checks import allocate_block, check_items, fill_rows, keep_existing
from penstock.source.select.selectable import FewerFields, Selectable, Take, as_stored, check_fields, select_fields
from penstock.source.wrapper import Wrapper, add_up, call_axis_lengths, call_prepare, call_release

__all__ = ["Concat", "Numbered", "Renamed", "Zip", "find_origins"]

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

    def axis_lengths(self, name: str) -> NDArray[np.uint32] | None:
        """Return the length of a 1-D field in every item, if all sources know it without reading items."""
        found = [call_axis_lengths(source, name) for source in self._sources]
        known = [each for each in found if each is not None]
        return np.concatenate(known) if len(known) == len(found) else None

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


class Renamed(Selectable, Wrapper):
    """A source whose fields have other names.

    Parameters
    ----------
    names
        Old to new names; other fields keep theirs.

    Examples
    --------
    >>> from penstock.source.array import ArraySource
    >>> source = Renamed(ArraySource({"x": np.arange(3), "y": np.ones(3)}), {"x": "z"})
    >>> {name: array.tolist() for name, array in source.take(np.array([2])).items()}
    {'z': [2], 'y': [1.0]}
    """

    def __init__(self, source: Source, names: Mapping[str, str]) -> None:
        check_fields(source, list(names))
        self._source, self._names, self._parts = source, dict(names), (source,)
        renamed = [self._names.get(name, name) for name in source.fields]
        double = next((name for name in renamed if renamed.count(name) > 1), None)
        if double is not None:
            raise OptionError(
                f"rename must give every field a name of its own, but two would be {double!r}. Leave one out, or use "
                "another name."
            )
        self.fields: Mapping[str, Field] = dict(zip(renamed, source.fields.values(), strict=True))
        self.index = source.index

    def __repr__(self) -> str:
        return f"Renamed({self._source!r}, {self._names!r})"

    def read(self, span: Span, out: Block | None = None) -> Block:
        """Return consecutive items."""
        return self._rename(self._source.read(span, self._inner(out)))

    def take(self, items: _Int64s, out: Block | None = None) -> Block:
        """Return any items, in the given order."""
        return self._rename(self._source.take(items, self._inner(out)))

    def with_fields(self, fields: Sequence[str]) -> "Renamed":
        """Return a source of the same items with these fields alone."""
        old = dict(zip(self.fields, self._source.fields, strict=True))
        kept = [old[name] for name in check_fields(self, fields)]
        return Renamed(select_fields(self._source, kept), {name: self._names.get(name, name) for name in kept})

    def axis_lengths(self, name: str) -> NDArray[np.uint32] | None:
        """Return the length of a 1-D field in every item, if the source knows it without reading items."""
        return call_axis_lengths(self._source, dict(zip(self.fields, self._source.fields, strict=True))[name])

    def with_source(self, source: Source) -> "Renamed":
        """Return another source whose fields are renamed in the same way."""
        return Renamed(source, self._names)

    def as_stored(self) -> "Renamed":
        """Return a source of the same items whose files are their bytes."""
        for old, new in self._names.items():
            extension = stored_extension(old)
            if holds_file(old) and stored_extension(new) != extension:
                raise OptionError(
                    f"The field {old!r} holds files, and must keep their extension to be read, such as "
                    f"{new.partition('.')[0]}.{extension}; got rename {old!r} to {new!r}."
                )
        return Renamed(as_stored(self._source), self._names)

    def _rename(self, block: Block) -> Block:
        return {self._names.get(name, name): array for name, array in block.items()}

    def _inner(self, out: Block | None) -> Block | None:
        old = dict(zip(self.fields, self._source.fields, strict=True))
        return None if out is None else {old[name]: array for name, array in out.items()}


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

    def axis_lengths(self, name: str) -> NDArray[np.uint32] | None:
        """Return the length of a 1-D field in every item, if the source that has it knows it without reading items."""
        return call_axis_lengths(next(source for source in self._sources if name in source.fields), name)

    def as_stored(self) -> "Zip":
        """Return a source of the same items whose files are their bytes."""
        return Zip([as_stored(source) for source in self._sources]).with_fields(list(self.fields))

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


def find_origins(source: Source, items: _Int64s) -> tuple[list[Source], _Int64s, _Int64s]:
    """Return where items lie behind selections and joined sources.

    Returns
    -------
    The sources that have them, and for each item the number of its source among these, and its own number in it.
    """
    if isinstance(source, Take):
        return find_origins(source._source, source._locate(items))
    if isinstance(source, Renamed | FewerFields):
        inner, its_which, its_numbers = find_origins(source._source, items)
        return [source.with_source(part) for part in inner], its_which, its_numbers
    if not isinstance(source, Concat):
        return [source], np.zeros(len(items), np.int64), items
    parts: list[Source] = []
    which, numbers = np.empty_like(items), np.empty_like(items)
    owner = np.searchsorted(source._offsets, items, side="right") - 1
    for number, part in enumerate(source._sources):
        places = np.flatnonzero(owner == number)
        found, its_which, numbers[places] = find_origins(part, items[places] - source._offsets[number])
        which[places] = its_which + len(parts)
        parts += found
    return parts, which, numbers
