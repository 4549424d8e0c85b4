"""Metadata columns of items: labels and groups from the names of files and from a table, beside those of the inputs.

Every input writes metadata with its items. What a name pattern or a table adds is merged into these metadata when items
are written; splits (`group_by`) and labels read the same columns. All lookups happen once, after the scan.
"""

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePath
from typing import Any

from penstock.convert.plan import Label, Scan
from penstock.convert.table import read_table
from penstock.core.errors import OptionError, SourceError
from penstock.files.stores.url import Url
from penstock.shard.sample_form import RESERVED_KEYS

__all__ = ["ColumnReader", "Columns", "find_repeated_ids", "list_groups", "make_label"]

_FILE = "file"
_MOST_LINES = 20


@dataclass(frozen=True, slots=True)
class Columns:
    """Metadata columns that are added to the items of all inputs.

    The file of an item is that of its input. For functions and shards, it is the `file` in the metadata of the item, if
    there is one.

    Parameters
    ----------
    name_pattern
        A regular expression with named groups, such as `r"(?P<speaker>[a-z]+)_(?P<word>[a-z]+)"`. It is searched for in
        the name of each file, without its suffix; in the whole path if it contains a slash. Each group is a column.
    table
        A CSV, TSV or Parquet file with one row per file. Its columns are added to the items of the file.
    key
        The column of the table that names the file: by its name, with or without suffix, or by the end of its path. If
        the items have a column of that name (other than `file`), such as `subject`, rows belong to its values instead.
    label
        A column whose values become the field `label`, an integer for each item: the place of its value among all
        values, sorted. The manifest lists the values.
    """

    name_pattern: str | None = None
    table: Path | None = None
    key: str = _FILE
    label: str | None = None

    def __post_init__(self) -> None:
        if self.table is not None:
            object.__setattr__(self, "table", Path(self.table))
        elif self.key != _FILE:
            raise OptionError(f"key needs a table, got key={self.key!r} without one. Give table=... too.")
        if self.name_pattern is None:
            return
        try:
            groups = re.compile(self.name_pattern).groupindex
        except re.error as error:
            raise OptionError(
                f"name_pattern must be a regular expression, got {self.name_pattern!r}: {error}."
            ) from error
        if not groups:
            raise OptionError(
                "name_pattern must have named groups, such as '(?P<speaker>[a-z]+)_(?P<word>[a-z]+)', got "
                f"{self.name_pattern!r}."
            )


class ColumnReader:
    """Reads the columns of items from the names of their files and a table."""

    def __init__(self, columns: Columns) -> None:
        self._columns = columns
        self._pattern = None if columns.name_pattern is None else re.compile(columns.name_pattern)
        self._rows = {} if columns.table is None else _read_rows(columns.table, columns.key)
        self._added: set[str] = {*(self._pattern.groupindex if self._pattern else ())}
        from_table = {name for row in self._rows.values() for name in row}
        both = sorted(self._added & from_table)
        if both:
            raise OptionError(
                f"A column must come from name_pattern or from the table, but {', '.join(both)} is in both. Rename one."
            )
        self._added |= from_table
        reserved = sorted(self._added & {*RESERVED_KEYS})
        if reserved:
            raise OptionError(
                f"A column must not have the name {', '.join(reserved)}, which the writer of shards sets. Rename it."
            )

    def list_needed(self, *others: str | None) -> frozenset[str]:
        """Return the metadata columns of items that must be known: those to look up or compare, and `others`."""
        own = {_FILE, self._columns.key, *self._added} if self._added else set()
        return frozenset({*own, *filter(None, others)})

    def add(self, scans: Sequence[Scan]) -> list[Scan]:
        """Return the scans with the columns of each item."""
        if not self._added:
            return list(scans)
        named = self._match_names(scans)
        rows = self._join(scans, named)
        found = []
        for scan, names, joined in zip(scans, named, rows, strict=True):
            columns = tuple({**name, **row} for name, row in zip(names, joined, strict=True))
            _check_own(scan, columns)
            items = tuple({**own, **added} for own, added in zip(scan.items, columns, strict=True))
            found.append(replace(scan, items=items, columns=columns))
        return found

    def _match_names(self, scans: Sequence[Scan]) -> list[list[dict[str, Any]]]:
        """Return what the pattern finds for the items of each scan."""
        pattern = self._pattern
        if pattern is None:
            return [[{} for _ in scan.items] for scan in scans]
        known: dict[str, dict[str, Any] | None] = {}
        for scan in scans:
            for path in _paths(scan):
                if str(path) not in known:
                    match = pattern.search(path.as_posix() if "/" in pattern.pattern else path.stem)
                    known[str(path)] = match.groupdict() if match else None
        unmatched = [path for path, columns in known.items() if columns is None]
        if unmatched:
            where = "path" if "/" in pattern.pattern else "name without suffix"
            raise SourceError(
                f"name_pattern {pattern.pattern!r} must match the {where} of every file, but does not match that of "
                f"{len(unmatched)} of {len(known)}:\n{_lines(unmatched)}"
            )
        return [[known[str(path)] or {} for path in _paths(scan)] for scan in scans]

    def _join(self, scans: Sequence[Scan], named: list[list[dict[str, Any]]]) -> list[list[dict[str, Any]]]:
        """Return the row of the table for the items of each scan."""
        if not self._rows:
            return [[{} for _ in scan.items] for scan in scans]
        key = self._columns.key
        by_file = key == _FILE or not any(
            key in own or key in names
            for scan, columns in zip(scans, named, strict=True)
            for own, names in zip(scan.items, columns, strict=True)
        )
        if by_file:
            wanted = [[self._file_key(path) for path in _paths(scan)] for scan in scans]
            _check_distinct(scans, wanted, self._columns)
        else:
            wanted = [
                [str({**own, **names}.get(key)) for own, names in zip(scan.items, columns, strict=True)]
                for scan, columns in zip(scans, named, strict=True)
            ]
        missing = {value for values in wanted for value in values if value not in self._rows}
        if missing:
            total = len({value for values in wanted for value in values})
            raise SourceError(
                f"The table {self._columns.table} must have a row for every {'file' if by_file else key}, but in its "
                f"column {key!r} {len(missing)} of {total} are missing:\n{_lines(sorted(missing))}"
            )
        return [[self._rows[value] for value in values] for values in wanted]

    def _file_key(self, path: PurePath) -> str:
        """Return the key in the table that stands for a file: the longest end of its path that is there."""
        parts = path.parts
        for start in range(len(parts)):
            end = PurePath(*parts[start:])
            for key in (end.as_posix(), end.with_suffix("").as_posix()):
                if key in self._rows:
                    return key
        return path.name


def _read_rows(path: Path, key: str) -> dict[str, dict[str, Any]]:
    """Return the rows of a table by their key."""
    table = read_table(path)
    if key not in table:
        raise SourceError(f"key must be a column of {path}, which has {', '.join(table)}, got {key!r}.")
    keys = [str(value).removeprefix("./") if value is not None else "" for value in table.pop(key)]
    repeated = [f"{value} ({count} rows)" for value, count in Counter(keys).items() if count > 1]
    if repeated:
        raise SourceError(
            f"Every row of {path} must have a {key!r} of its own, but {len(repeated)} occur several times:\n"
            f"{_lines(repeated)}"
        )
    return {value: {name: column[row] for name, column in table.items()} for row, value in enumerate(keys)}


def _paths(scan: Scan) -> Iterator[PurePath]:
    """Yield the file of each item, or of all items of a scan."""
    for item in scan.items:
        name = item.get(_FILE)
        path = scan.input.path
        own = PurePath(path.path) if isinstance(path, Url) else path
        yield own if name in (None, path.name) else PurePath(str(name))


def _check_distinct(scans: Sequence[Scan], wanted: list[list[str]], columns: Columns) -> None:
    """Raise SourceError if a row of the table stands for several files."""
    files: dict[str, dict[str, None]] = {}
    for scan, keys in zip(scans, wanted, strict=True):
        for path, value in zip(_paths(scan), keys, strict=True):
            files.setdefault(value, {})[str(path)] = None
    several = [f"{value}: {', '.join(paths)}" for value, paths in files.items() if len(paths) > 1]
    if several:
        raise SourceError(
            f"A row of {columns.table} must name one file, but {len(several)} name several. Write more of the path in "
            f"the column {columns.key!r}:\n{_lines(several)}"
        )


def _check_own(scan: Scan, columns: Sequence[Mapping[str, Any]]) -> None:
    """Raise SourceError if a column would replace metadata that the items have."""
    for own, added in zip(scan.items, columns, strict=True):
        for name, value in added.items():
            if name in own and own[name] not in (None, value):
                raise SourceError(
                    f"The items of {scan.name} have {name}={own[name]!r} already, but the name pattern or the table "
                    f"says {name}={value!r}. Rename the column."
                )


def list_groups(scans: Sequence[Scan], group_by: str) -> list[tuple[str, int, int, int]]:
    """Return which items belong to which group, in the order of the scans: (group, number of the scan, start, stop)."""
    if group_by == _FILE:
        return [(scan.name, number, 0, scan.n_items) for number, scan in enumerate(scans) if scan.n_items]
    found = []
    for number, scan in enumerate(scans):
        values = _values(scan, group_by, "group_by", "Use group_by='file' or group_by='time'")
        borders = [0, *(i for i in range(1, len(values)) if values[i] != values[i - 1])]
        stops = [*borders[1:], scan.n_items]
        found += [
            (str(values[start]), number, start, stop)
            for start, stop in zip(borders, stops, strict=True)
            if stop > start
        ]
    return found


def make_label(scans: Sequence[Scan], column: str | None) -> Label | None:
    """Return the label of items: the given column, or the one that all inputs name; None if there is neither."""
    named = {scan.about.get("label_column") for scan in scans if scan.n_items}
    column = column or (named.pop() if len(named) == 1 else None)
    if column is None:
        return None
    values = {value for scan in scans for value in _values(scan, column, "label", "Use another column, label=...")}
    is_number = all(isinstance(value, int | float) for value in values)
    return Label(column, tuple(sorted(values, key=None if is_number else str)))


def _values(scan: Scan, name: str, what: str, advice: str) -> list[Any]:
    """Return the value of a column for each item of a scan, or a single one for all."""
    values = [item.get(name) for item in scan.items]
    for row, value in enumerate(values):
        if value is None:
            have = ", ".join(map(repr, sorted({*scan.names, *scan.groups})))
            which = f"Item {row} of {scan.name}" if len(values) > 1 else scan.name
            raise SourceError(
                f"{which} does not say which {name} it belongs to ({what}={name!r}). It has {have}. Add the "
                f"column with a name pattern or a table. {advice}."
            )
        if not isinstance(value, str | int | float | bool):
            raise SourceError(
                f"{what} must be a column of text or numbers, but {name} of {scan.name} is {type(value).__name__}."
            )
    return values


def find_repeated_ids(scans: Sequence[Scan]) -> list[str]:
    """Return the sample ids that several items have, sorted."""
    counts = Counter(sample_id for scan in scans for sample_id in scan.ids if sample_id is not None)
    return sorted(sample_id for sample_id, count in counts.items() if count > 1)


def _lines(lines: Sequence[str]) -> str:
    """Return at most 20 lines, indented."""
    shown = lines if len(lines) <= _MOST_LINES else lines[: _MOST_LINES - 1]
    more = [f"… and {len(lines) - len(shown):,} more"] if len(shown) < len(lines) else []
    return "\n".join(f"  {line}" for line in [*shown, *more])
