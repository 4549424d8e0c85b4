"""Single figures of the results, in sentences: `{TABLE | ROW | FIELD FORMAT}`, and `{TABLE | ROW / ROW | FORMAT}`.

The second is how many times as fast one row is as another: the ratio within each repeat, then the median.
"""

import re
import statistics
from typing import Any

__all__ = ["Tables", "fill", "format_figure"]

Tables = dict[str, tuple[dict[str, Any], dict[str, Any]]]
"""Rows of a table with the state of the machine, and the run that measured them, by the name of the table."""

_PLACE = re.compile(r"\{(?P<table>[^{}|]+) \| (?P<rows>[^{}|]+) \| (?P<what>[^{}|]+)\}")


def fill(sentence: str, tables: Tables) -> str | None:
    """Return a sentence with its figures; None if one of them was never measured.

    Raises
    ------
    KeyError
        If a table was measured, but has no such row or field: the sentence is wrong, or the row was renamed.
    """
    places = list(_PLACE.finditer(sentence))
    if any(place["table"] not in tables for place in places):
        return None
    found = {place[0]: _figure(place, tables[place["table"]][0]["rows"]) for place in places}
    if None in found.values():
        return None
    return _PLACE.sub(lambda place: str(found[place[0]]), sentence)


def format_figure(value: Any, how: str) -> str:
    """Return a figure as text; the format `r` is for ratios: two decimals, or two digits if it is below 0.1."""
    if how != "r":
        return format(value, how)
    return f"{value:.2f}" if value >= 0.095 or value == 0 else f"{value:.2g}"


def _figure(place: re.Match[str], rows: list[dict[str, Any]]) -> str | None:
    """Return a figure as text; None if the peer that it is about failed, or was not installed."""
    by_name = {row["name"]: row for row in rows}
    names = place["rows"].split(" / ")
    if len(names) == 2 and names[1] not in by_name:
        return None
    for name in names:
        if name not in by_name:
            raise KeyError(f"{place['table']} must have a row {name!r}, got {', '.join(by_name)}.")
    chosen = [by_name[name] for name in names]
    if any(row.get("failure") for row in chosen):
        return None
    if len(chosen) == 2:
        return format_figure(_multiple(*chosen), place["what"])
    field, _, how = place["what"].partition(" ")
    return format_figure(chosen[0][field], how)


def _multiple(row: dict[str, Any], other: dict[str, Any]) -> float:
    pairs = list(zip(row.get("rates", ()), other.get("rates", ()), strict=False))
    if not pairs:
        return float(row["rate"]) / float(other["rate"])
    return statistics.median(rate / slower for rate, slower in pairs)
