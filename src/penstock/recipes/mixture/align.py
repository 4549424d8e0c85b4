"""Sources of different fields, brought to the fields of their mixture."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from penstock.core.checks import check_keys
from penstock.core.errors import OptionError, SourceError
from penstock.core.protocols import Source
from penstock.core.types import UNNAMED, Block, Field, Span
from penstock.source.checks import allocate_block, check_items, fill_rows
from penstock.source.select.selectable import select_fields
from penstock.source.wrapper import Wrapper

__all__ = ["SOURCE", "Aligned", "FieldChoice", "align_sources"]

SOURCE = "source"
"""Field with the number of the source that an item is of."""

FieldChoice = Literal["common", "union"] | Mapping[str, Mapping[str, str]]

_Int64s = NDArray[np.int64]


class Aligned(Wrapper):
    """A source with the fields of a mixture: some of its own, under other names, and the number of the source.

    Parameters
    ----------
    names
        Field of the source, for each field of the mixture that it has.
    fields
        All fields of the mixture. Those that the source does not have are zeros; None if their shape varies.
    """

    def __init__(self, source: Source, number: int, names: Mapping[str, str], fields: Mapping[str, Field]) -> None:
        if names and set(names.values()) < set(source.fields):
            source = select_fields(source, list(names.values()))
        self._source, self._number, self._names, self._parts = source, number, dict(names), (source,)
        self.fields: Mapping[str, Field] = dict(fields)
        self.index = source.index
        # Whether the source can read into arrays of the mixture.
        self._is_direct = set(names.values()) == set(source.fields) and all(
            source.fields[here] == fields[name] for name, here in names.items()
        )
        self._constants = self._list_constants()

    def __repr__(self) -> str:
        return repr(self._source)

    def read(self, span: Span, out: Block | None = None) -> Block:
        """Return consecutive items."""
        return self._complete(self._source.read(span, self._own_arrays(out)), len(span), out)

    def take(self, items: _Int64s, out: Block | None = None) -> Block:
        """Return any items."""
        items = check_items(items, self)
        return self._complete(self._source.take(items, self._own_arrays(out)), len(items), out)

    def fill(self, items: _Int64s, rows: _Int64s, out: Block) -> None:
        """Read any items into rows of `out`."""
        if self._is_direct:
            fill_rows(self._source, items, rows, {here: out[name] for name, here in self._names.items()})
        else:
            found = self._source.take(items)
            for name, here in self._names.items():
                out[name][rows] = found[here]
        self._add_constants(rows, out)

    def join(self, sources: "Sequence[Source]") -> "_JoinedSources | None":
        """Return what reads items of several sources of a mixture with one call; None if that is not possible."""
        join: Callable[[Sequence[Source]], Any] | None = getattr(self._source, "join", None)
        mine = [source for source in sources if isinstance(source, Aligned)]
        if join is None or len(mine) < len(sources):
            return None
        if not all(source._is_direct and source._names == self._names for source in mine):
            return None
        joined = join([source._source for source in mine])
        return None if joined is None else _JoinedSources(joined, self._names, mine)

    def _add_constants(self, rows: _Int64s, out: Block) -> None:
        if UNNAMED in self.fields:
            self._number_items(out[UNNAMED], rows)
        for name, value in self._constants.items():
            out[name][rows] = value

    def with_fields(self, fields: Sequence[str]) -> "Aligned":
        """Return the same items with these fields of the mixture; the source reads no others."""
        names = {name: here for name, here in self._names.items() if name in fields}
        other = Aligned(self._source, self._number, names, {name: self.fields[name] for name in fields})
        # A mask may be chosen without the field that it is of, which the other cannot know.
        other._constants = {name: value for name, value in self._constants.items() if name in fields}
        return other

    def _own_arrays(self, out: Block | None) -> Block | None:
        """Return the arrays that the source itself reads into; None if it cannot."""
        if out is None or not self._is_direct:
            return None
        return {here: out[name] for name, here in self._names.items() if name in out} or None

    def _complete(self, found: Block, n_items: int, out: Block | None) -> Block:
        given = out or {}
        others = {name: field for name, field in self.fields.items() if name not in given}
        # Arrays that the source made are delivered as they are, unless they are to have another type.
        made = {name: found[here] for name, here in self._names.items() if name in others}
        own = {name: array for name, array in made.items() if array.dtype == self.fields[name].dtype}
        block = {**given, **own, **allocate_block({n: f for n, f in others.items() if n not in own}, n_items)}
        for name, here in self._names.items():
            if block[name] is not found[here]:
                block[name][...] = found[here]
        if UNNAMED in self.fields:
            self._number_items(block[UNNAMED], np.arange(n_items))
        for name, value in self._constants.items():
            block[name][...] = value
        return {name: block[name] for name in self.fields}

    def _list_constants(self) -> dict[str, Any]:
        """Return what all items of this source have in the fields that it does not have itself."""
        values: dict[str, Any] = {}
        for name, field in self.fields.items():
            if name == SOURCE:
                values[name] = self._number
            elif name not in self._names:
                values[name] = None if field.dtype.hasobject else np.zeros((), field.dtype)
        return values | {_mask_of(name): name in self._names for name in self.fields if _mask_of(name) in self.fields}

    def _number_items(self, column: NDArray[Any], rows: _Int64s) -> None:
        """Add the number of the source to items that have no named fields."""
        for row in rows.tolist():
            item = column[row]
            if isinstance(item, Mapping):
                column[row] = {**item, SOURCE: self._number}
            else:
                column[row] = (*item, self._number) if type(item) is tuple else (item, self._number)


class _JoinedSources:
    """Reads items of sources that have the same fields with one call, and adds which source they are of."""

    def __init__(self, joined: Any, names: Mapping[str, str], sources: Sequence[Aligned]) -> None:
        self._joined, self._names = joined, names
        self._starts = np.cumsum([len(source.index) for source in sources[:-1]]).astype(np.int64)
        self._constants = {name: np.array([s._constants[name] for s in sources]) for name in sources[0]._constants}

    def take(self, items: _Int64s, block: Block) -> bool:
        """Read items into `block`, if nothing is in the way; otherwise return False."""
        if not self._joined.take(items, {here: block[name] for name, here in self._names.items()}):
            return False
        numbers = np.searchsorted(self._starts, items, side="right")
        for name, values in self._constants.items():
            block[name][...] = values[numbers]
        return True


def align_sources(sources: Mapping[str, Source], choice: FieldChoice) -> list[Aligned]:
    """Return the sources with the fields of their mixture."""
    renames = choice if isinstance(choice, Mapping) else {}
    if not isinstance(choice, Mapping) and choice not in ("common", "union"):
        raise OptionError(
            f"fields must be 'common', 'union', or names by source, such as {{'a': {{'image': 'x'}}}}, got {choice!r}."
        )
    check_keys("Names in fields", renames, sources, error=SourceError)
    tables = {name: _rename(name, source, renames.get(name, {})) for name, source in sources.items()}
    unnamed = [name for name, table in tables.items() if UNNAMED in table]
    if unnamed and len(unnamed) < len(sources):
        raise SourceError(
            f"Source {unnamed[0]!r} has items without named fields (a dataset), and others have named fields. Give all "
            "sources named fields, or none."
        )
    every = list(dict.fromkeys(name for table in tables.values() for name in table))
    shared = [name for name in every if all(name in table for table in tables.values())]
    if choice != "union" and not shared:
        has = "; ".join(f"{name!r} has {', '.join(table)}" for name, table in tables.items())
        raise SourceError(
            f"The sources must have a field in common, but {has}. Name fields alike with "
            f"fields={{{next(iter(sources))!r}: {{'image': 'x'}}}}, or use fields='union'."
        )
    kept = every if choice == "union" else shared
    fields = {name: _join_fields(name, sources, tables) for name in kept}
    for name in kept:
        if name not in shared:
            if _mask_of(name) in fields:
                raise SourceError(f"fields='union' adds {_mask_of(name)!r}, which is a field already; rename that one.")
            fields[_mask_of(name)] = Field(np.dtype(np.bool_), ())
    if not unnamed:
        fields[SOURCE] = Field(np.dtype(np.int64), ())
    return [
        Aligned(source, number, {field: tables[name][field] for field in kept if field in tables[name]}, fields)
        for number, (name, source) in enumerate(sources.items())
    ]


def _mask_of(name: str) -> str:
    return f"{name}_mask"


def _rename(name: str, source: Source, names: Mapping[str, str]) -> dict[str, str]:
    """Return the fields of a source by their names in the mixture."""
    if not isinstance(names, Mapping) or not all(isinstance(new, str) and new for new in names.values()):
        raise OptionError(f"fields[{name!r}] must be new names by field, such as {{'image': 'x'}}, got {names!r}.")
    check_keys(f"Fields in fields[{name!r}]", names, source.fields, error=SourceError)
    table = {names.get(field, field): field for field in source.fields}
    if len(table) < len(source.fields):
        raise SourceError(f"fields[{name!r}] must give different names to different fields, got {dict(names)}.")
    if SOURCE in table:
        raise SourceError(
            f"Source {name!r} has a field {SOURCE!r}, the name of the field that tells which source an item is of. "
            f"Rename it with fields={{{name!r}: {{{SOURCE!r}: 'origin'}}}}."
        )
    return table


def _join_fields(name: str, sources: Mapping[str, Source], tables: Mapping[str, Mapping[str, str]]) -> Field:
    """Return the field of the mixture; strings are as long as the longest."""
    found = {each: sources[each].fields[table[name]] for each, table in tables.items() if name in table}
    first, *others = found
    field = found[first]
    for other in others:
        next_field = found[other]
        widens = field.dtype.kind == next_field.dtype.kind and field.dtype.kind in "US"
        if next_field.shape != field.shape or not (widens or next_field.dtype == field.dtype):
            raise SourceError(
                f"Field {name!r} is {_describe(field)} in source {first!r}, but {_describe(next_field)} in source "
                f"{other!r}. Convert one of them, or leave it out by another name: "
                f"fields={{{other!r}: {{{tables[other][name]!r}: {f'{name}_{other}'!r}}}}}."
            )
        if widens:
            field = Field(np.promote_types(field.dtype, next_field.dtype), field.shape)
    return field


def _describe(field: Field) -> str:
    return f"{field.dtype} of shape {'that varies' if field.shape is None else field.shape}"
