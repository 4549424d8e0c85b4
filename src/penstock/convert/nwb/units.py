"""The units of a file: their ids, where they were recorded, and which of them are kept."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.convert.nwb.file import wrap_read_errors
from penstock.convert.nwb.tables import to_json
from penstock.core.errors import SourceError
from penstock.files.stores.url import Url

__all__ = ["Units", "electrode_values"]

AREA = "area"
_AREA_COLUMNS = ("brain_area", "area", "brain_region", "region", "location")


@dataclass(frozen=True, slots=True)
class Units:
    """The units table; rows keep its order."""

    table: Any
    file: Path | Url

    @property
    def ids(self) -> list[int]:
        """The id of each unit in the file."""
        with wrap_read_errors(self.file, "the ids of the units"):
            return [int(number) for number in self.table.id[:]]

    def areas(self) -> list[str | None]:
        """Return the brain area of each unit, or None; several areas are joined by commas."""
        try:
            values = self._values(AREA)
        except SourceError:
            return [None] * len(self.table)
        return [", ".join(dict.fromkeys(str(value) for value in some)) or None for some in values]

    def select(self, filters: Sequence[tuple[str, tuple[Any, ...]]]) -> NDArray[np.int64]:
        """Return the rows of the units that pass all filters; possibly none."""
        mask = np.ones(len(self.table), np.bool_)
        for column, allowed in filters:
            wanted = {_normalize(value) for value in allowed}
            mask &= [bool(wanted & {_normalize(value) for value in some}) for some in self._values(column)]
        return np.flatnonzero(mask)

    def list_values(self, column: str) -> list[str]:
        """Return the distinct values of a column, for messages."""
        return sorted({str(value) for some in self._values(column) for value in some})

    def _values(self, column: str) -> list[list[Any]]:
        """Return the values of each unit: one from a column, or those of its electrodes."""
        if column == "id":
            return [[number] for number in self.ids]
        names = _AREA_COLUMNS if column == AREA else (column,)
        with wrap_read_errors(self.file, f"the column {column} of the units"):
            for name in names:
                if name in self.table.colnames:
                    return _column_values(self.table, name)
            if "electrodes" in self.table.colnames:
                for name in names:
                    if (found := electrode_values(self.table["electrodes"], name)) is not None:
                        return found
            if column == AREA and "electrode_group" in self.table.colnames:
                return [[group.location] for group in self.table["electrode_group"][:]]
        electrodes = self._electrode_columns()
        raise SourceError(
            f"unit_filter must use columns of the units of {self.file}, which have {', '.join(self.table.colnames)}"
            f"{f'; their electrodes have {electrodes}' if electrodes else ''}; got {column!r}."
        )

    def _electrode_columns(self) -> str:
        if "electrodes" not in self.table.colnames:
            return ""
        column = self.table["electrodes"]
        return ", ".join(getattr(column, "target", column).table.colnames)


def electrode_values(region: Any, name: str) -> list[list[Any]] | None:
    """Return the values in column `name` of the electrodes of each row; None if there is no such column."""
    ends = region.data[:] if hasattr(region, "target") else None
    rows = getattr(region, "target", region)
    if name not in rows.table.colnames:
        return None
    values = rows.table[name].data[:]
    found = [to_json(values[row]) for row in rows.data[:]]
    if ends is None:
        return [[value] for value in found]
    return [found[begin:end] for begin, end in zip([0, *ends[:-1]], ends, strict=True)]


def _column_values(table: Any, name: str) -> list[list[Any]]:
    column = table[name]
    if hasattr(column, "target"):
        return [list(map(to_json, some)) for some in column[:]]
    return [[to_json(value)] for value in column.data[:]]


def _normalize(value: Any) -> Any:
    """Return a value such that 1, 1.0, '1' and True are equal, because filters from a command line are text."""
    value = to_json(value)
    if isinstance(value, str):
        lowered = value.strip()
        if lowered.lower() in ("true", "false"):
            return float(lowered.lower() == "true")
        try:
            return float(lowered)
        except ValueError:
            return lowered
    return float(value) if isinstance(value, bool | int | float) else str(value)
