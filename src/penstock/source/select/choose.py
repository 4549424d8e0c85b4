"""Which items of a source a condition or a split means: columns in, a mask or the numbers of parts out."""

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from penstock.core.errors import OptionError, SourceError
from penstock.core.protocols import Source
from penstock.core.seeds import key_for
from penstock.core.text import count
from penstock.source.select.columns import UnknownColumnError, read_columns
from penstock.source.select.expression import parse_condition
from penstock.source.select.parts import divide_groups, divide_items

__all__ = ["divide", "encode_groups", "find_mask"]

_EXAMPLE = "lambda subject, quality: (subject == 'A') & (quality > 0.5)"


def find_mask(source: Source, condition: str | Callable[..., ArrayLike] | ArrayLike) -> tuple[NDArray[np.bool_], str]:
    """Return which items fulfil a condition, and the condition in words."""
    if isinstance(condition, str):
        parsed = parse_condition(condition)
        try:
            columns = read_columns(source, parsed.columns)
        except UnknownColumnError as error:
            if error.name not in parsed.compared_names:
                raise
            raise SourceError(f"{error} Text is written in quotes: {error.name!r}.") from error
        return parsed.evaluate(columns), f"where({parsed.text!r})"
    if callable(condition):
        how = f"where({getattr(condition, '__name__', type(condition).__name__)})"
        return _check_mask(_call(condition, source), source, how), how
    return _check_mask(condition, source, "where(mask)"), "where(mask)"


def divide(source: Source, fractions: Sequence[float], by: str | ArrayLike | None, seed: int) -> NDArray[Any]:
    """Return the number of the part that each item is in."""
    if by is None:
        n_items = len(source.index)
        ends = np.round(np.cumsum(fractions) * n_items).astype(np.int64)
        ends[-1] = n_items
        return divide_items(n_items, np.diff(ends, prepend=0).tolist(), key_for(seed, "split items"))
    values, codes = encode_groups(source, by)
    # Groups with the same text are one: 1 and "1" never land in two parts.
    names = [str(value) for value in values]
    totals: dict[str, int] = {}
    for name, size in zip(names, np.bincount(codes, minlength=len(names)).tolist(), strict=True):
        totals[name] = totals.get(name, 0) + size
    if len(totals) < len(fractions):
        what = f"values of {by!r}" if isinstance(by, str) else "groups"
        raise SourceError(
            f"A split in {len(fractions)} parts needs at least as many {what}, got {len(totals)} "
            f"({', '.join(sorted(totals)[:5])}). Use fewer parts, or split without by=."
        )
    of_group = divide_groups(totals, fractions, seed)
    return np.array([of_group[name] for name in names], np.uint16)[codes]


def encode_groups(source: Source, by: str | ArrayLike) -> tuple[list[Any], NDArray[np.int64]]:
    """Return the distinct values of a column, and the number of its value for each item.

    Parameters
    ----------
    by
        The name of a column, or one value per item.
    """
    column = read_columns(source, [by])[by] if isinstance(by, str) else np.asarray(by)
    if column.shape != (len(source.index),):
        raise OptionError(
            f"by must be a column or have one value for each of the {count(len(source.index), 'item')} of {source!r}, "
            f"got shape {column.shape}."
        )
    if not column.dtype.hasobject:
        values, codes = np.unique(column, return_inverse=True)
        plain: list[Any] = values.tolist()
    else:
        numbers: dict[Any, int] = {}
        codes = np.fromiter((numbers.setdefault(value, len(numbers)) for value in column.tolist()), np.int64)
        plain = list(numbers)
    missing = [number for number, value in enumerate(plain) if value is None or value != value]  # noqa: PLR0124  # NaN
    if missing:
        item = int(np.flatnonzero(np.isin(codes, missing))[0])
        raise SourceError(
            f"Every item must have a value of {by if isinstance(by, str) else 'by'!r}, but item {item} of {source!r} "
            "has none. Leave such items out first, with where(...)."
        )
    return plain, codes.astype(np.int64, copy=False)


def _call(condition: Callable[..., ArrayLike], source: Source) -> ArrayLike:
    """Call a function with the columns that its parameters name."""
    try:
        parameters = list(inspect.signature(condition).parameters.values())
    except (TypeError, ValueError):  # of a built-in
        parameters = []
    names = [each.name for each in parameters if each.default is each.empty]
    if not names or any(each.kind in (each.VAR_POSITIONAL, each.VAR_KEYWORD) for each in parameters):
        raise OptionError(
            "A condition that is a function must have parameters that are named like columns, such as "
            f"lambda quality: quality > 0.5, got {condition!r}."
        )
    try:
        columns = read_columns(source, names)
    except SourceError as error:
        error.add_note("[penstock] the parameters of the function name the columns to read")
        raise
    try:
        return condition(*(columns[name] for name in names))
    except ValueError as error:
        if "truth value of an" not in str(error):
            raise
        raise OptionError(
            "A condition that is a function gets whole columns: use &, | and ~ in place of and, or and not, with "
            f"parentheses around comparisons, such as {_EXAMPLE}; np.isin(a, values) in place of a in values."
        ) from error


def _check_mask(found: ArrayLike, source: Source, how: str) -> NDArray[np.bool_]:
    mask = np.asarray(found)
    if mask.dtype != np.bool_ or mask.shape != (len(source.index),):
        raise OptionError(
            f"{how} must give one bool for each of {count(len(source.index), 'item')}, got {mask.dtype} of shape "
            f"{mask.shape}. A function gets whole columns: use &, | and ~ in place of and, or and not."
        )
    return mask
