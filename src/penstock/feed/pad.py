"""Pad: batches from items of different lengths, one item in a row or several."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from penstock.core.checks import check_integer
from penstock.core.errors import OptionError
from penstock.core.text import did_you_mean
from penstock.core.types import Draw, Field, Rows
from penstock.feed.collate import MASK, Collator, to_tensor

__all__ = ["Pad"]

_Int64s = NDArray[np.int64]
_Array = NDArray[Any] | torch.Tensor


class Pad:
    """Collates items whose fields differ in length: `Loader(source, plan, collate=Pad("tokens"))`.

    Fields are padded at the end of their first axis, to the longest item of the batch; their other axes must agree. A
    batch has, besides the fields, `lengths` (tokens in each row) and `mask` (True for tokens, False for padding).

    Under a `Packed` plan a row holds several items, one after the other, and has the length that the plan says. The
    batch then also has `segments` (for every token the number of its item in the row, from 1 on; 0 for padding),
    `positions` (of every token in its segment, from 0 on) and `rows` (the row of each segment). Other fields of the
    items come once for each segment, in the order of `rows`.

    Parameters
    ----------
    fields
        Names of the fields to pad. In every item they must have the same length.
    value, values
        What to pad with; `values` is by field, for those that are padded with something else.
    pad_to_multiple_of
        Pad further, to a multiple of this. With `TokenBudget`, give it to the plan, which then counts it.
    names
        Names of the lengths and of the mask in the batch.
    rest
        Collates the other fields; None: as the loader does. Another `Pad`, with other names, pads fields of
        other lengths.

    Examples
    --------
    >>> batch = Pad("tokens")([{"tokens": np.array([5, 6, 7])}, {"tokens": np.array([8])}])
    >>> batch["tokens"].tolist(), batch["lengths"].tolist()
    ([[5, 6, 7], [8, 0, 0]], [3, 1])
    """

    def __init__(
        self,
        *fields: str,
        value: float = 0,
        values: Mapping[str, float] | None = None,
        pad_to_multiple_of: int = 1,
        names: tuple[str, str] = ("lengths", MASK),
        rest: Callable[[list[Any]], Any] | None = None,
    ) -> None:
        if not fields or not all(isinstance(name, str) and name for name in fields):
            raise OptionError(f"Pad needs the names of the fields to pad, as in Pad('tokens'), got {fields!r}.")
        unknown = sorted(set(values or {}) - set(fields))
        if unknown:
            raise OptionError(f"values must be for fields that are padded ({', '.join(fields)}), got {unknown[0]!r}.")
        check_integer("pad_to_multiple_of", pad_to_multiple_of, at_least=1)
        if isinstance(names, str) or len(names) != 2:
            raise OptionError(f"names must be those of the lengths and of the mask, got {names!r}.")
        self._fields, self._names = tuple(dict.fromkeys(fields)), tuple(names)
        self._values = {name: (values or {}).get(name, value) for name in fields}
        self._multiple = pad_to_multiple_of
        self._rest = rest

    def __repr__(self) -> str:
        values = ", ".join(f"{name}={value}" for name, value in self._values.items())
        return f"Pad({values}, pad_to_multiple_of={self._multiple})"

    def __call__(self, items: list[Any]) -> dict[str, Any]:
        """Return the batch of `items`, each in a row of its own."""
        return self.collate_draw(items, None)

    def collate_draw(
        self, items: list[Any], draw: Draw | None, fields: Mapping[str, Field] | None = None
    ) -> dict[str, Any]:
        """Return the batch of `items`, in the rows that `draw` says; `fields` are those of the source."""
        columns = {name: self._find_column(items, name, draw) for name in self._fields}
        lengths = self._find_lengths(columns, draw)
        rows = _place(lengths, None if draw is None else draw.rows)
        width = self._find_width(rows)
        batch = {name: self._fill(name, column, rows, width, draw) for name, column in columns.items()}
        n_tokens = np.bincount(rows.numbers, rows.counts, minlength=rows.n_rows).astype(np.int64)
        mask = np.arange(width) < n_tokens[:, None]
        if draw is not None and draw.mask is not None:
            mask &= draw.mask[rows.firsts, None]
        added: dict[str, Any] = {self._names[0]: torch.from_numpy(n_tokens), self._names[1]: torch.from_numpy(mask)}
        if rows.row_length is not None:
            added |= _number_tokens(rows, width)
        return self._join(items, batch, added, Collator(self._rest, fields))

    def _join(
        self, items: list[Any], batch: dict[str, Any], added: dict[str, Any], collator: Collator
    ) -> dict[str, Any]:
        others = [{name: value for name, value in item.items() if name not in batch} for item in items]
        if others and others[0]:
            rest = collator.collate(others)
            if not isinstance(rest, Mapping):
                raise OptionError(f"rest must return a mapping of names to values, got {type(rest).__name__}.")
            batch = {**batch, **rest}
        twice = sorted(set(batch) & set(added))
        if twice:
            raise OptionError(
                f"Pad adds {', '.join(map(repr, added))} to each batch, but it already has {twice[0]!r}. Rename the "
                "field, or choose names=... for the lengths and the mask."
            )
        return {**batch, **added}

    def _find_column(self, items: list[Any], name: str, draw: Draw | None) -> list[_Array]:
        column: list[_Array] = []
        for place, item in enumerate(items):
            if not isinstance(item, Mapping) or name not in item:
                had = ", ".join(map(repr, item)) if isinstance(item, Mapping) else type(item).__name__
                near = did_you_mean(name, item) if isinstance(item, Mapping) else ""
                raise OptionError(f"Pad needs field {name!r}, but {_name_item(place, draw)} has {had}.{near}")
            value = item[name]
            array = value if isinstance(value, torch.Tensor) else np.asarray(value)
            if not array.ndim:
                raise OptionError(
                    f"Field {name!r} must have at least one axis to be padded, got a single value in "
                    f"{_name_item(place, draw)}."
                )
            column.append(array)
        return column

    def _find_lengths(self, columns: Mapping[str, Sequence[_Array]], draw: Draw | None) -> _Int64s:
        """Return the length of each item; raise OptionError if its fields, or the plan, say another."""
        (first, found), *others = columns.items()
        lengths = np.array([len(value) for value in found], np.int64)
        for name, column in others:
            for place, (value, length) in enumerate(zip(column, lengths.tolist(), strict=True)):
                if len(value) != length:
                    raise OptionError(
                        f"Fields that are padded together must have the same length, got {length} for {first!r} and "
                        f"{len(value)} for {name!r} in {_name_item(place, draw)}. Pad one of them with rest=Pad(...)."
                    )
        if draw is not None and draw.rows is not None and (lengths > draw.rows.lengths).any():
            place = int(np.argmax(lengths > draw.rows.lengths))
            raise OptionError(
                f"Field {first!r} must not be longer than the lengths that the plan was made with, got "
                f"{lengths[place]} instead of {draw.rows.lengths[place]} in {_name_item(place, draw)}. Measure them "
                "again with item_lengths, and count what a transform adds."
            )
        return lengths

    def _find_width(self, rows: "_Places") -> int:
        if rows.row_length is not None:
            if self._multiple > 1:
                raise OptionError("Packed rows have one length: leave out pad_to_multiple_of.")
            return rows.row_length
        if rows.multiple is not None and self._multiple not in (1, rows.multiple):
            raise OptionError(
                f"Pad(pad_to_multiple_of={self._multiple}) could exceed the budget of the plan, which counts with "
                f"{rows.multiple}. Give it to TokenBudget(pad_to_multiple_of={self._multiple})."
            )
        multiple = self._multiple if rows.multiple is None else rows.multiple
        return -(-int(rows.counts.max(initial=0)) // multiple) * multiple

    def _fill(
        self, name: str, column: list[_Array], rows: "_Places", width: int, draw: Draw | None
    ) -> torch.Tensor | Any:
        """Return the field of all items, padded: one copy of each."""
        usual = next((value for value in column if len(value)), column[0])
        for place, value in enumerate(column):
            if value.shape[1:] != usual.shape[1:] or (value.dtype != usual.dtype and len(value)):
                raise OptionError(
                    f"Items must agree in dtype and in all axes of field {name!r} but the first, got {usual.dtype} of "
                    f"shape {tuple(usual.shape)} and {value.dtype} of shape {tuple(value.shape)} in "
                    f"{_name_item(place, draw)}."
                )
        filled: Any = _allocate((rows.n_rows, width, *usual.shape[1:]), usual, self._values[name], name)
        places = zip(
            *(column, rows.numbers.tolist(), rows.offsets.tolist(), rows.begins.tolist(), rows.counts.tolist()),
            strict=True,
        )
        for value, row, offset, begin, count in places:
            filled[row, offset : offset + count] = value[begin : begin + count]
        return filled if isinstance(filled, torch.Tensor) else to_tensor(name, filled)


class _Places:
    """Where the pieces of items lie."""

    def __init__(self, rows: Rows, counts: _Int64s) -> None:
        self.numbers, self.begins, self.counts = rows.numbers, rows.begins, counts
        self.row_length, self.multiple = rows.row_length, rows.pad_to_multiple_of
        self.firsts = np.flatnonzero(np.diff(rows.numbers, prepend=-1))
        """First piece of each row."""
        self.n_rows = len(self.firsts)
        before = np.cumsum(counts) - counts
        self.offsets: _Int64s = before - before[self.firsts][rows.numbers]
        """Where each piece begins in its row."""


def _place(lengths: _Int64s, rows: Rows | None) -> _Places:
    if rows is None:
        rows = Rows(np.arange(len(lengths)), np.zeros_like(lengths), lengths, lengths)
    return _Places(rows, np.clip(lengths - rows.begins, 0, rows.counts))


def _number_tokens(rows: _Places, width: int) -> dict[str, Any]:
    """Return for every token its segment and its position there, and the row of every segment."""
    segments, positions = np.zeros((2, rows.n_rows, width), np.int64)
    in_row = np.arange(len(rows.numbers)) - rows.firsts[rows.numbers] + 1
    pieces = zip(rows.numbers.tolist(), rows.offsets.tolist(), rows.counts.tolist(), in_row.tolist(), strict=True)
    for row, offset, count, number in pieces:
        segments[row, offset : offset + count] = number
        positions[row, offset : offset + count] = np.arange(count)
    found = {"segments": segments, "positions": positions, "rows": rows.numbers.copy()}
    return {name: torch.from_numpy(array) for name, array in found.items()}


def _allocate(shape: tuple[int, ...], like: _Array, value: float, name: str) -> _Array:
    """Return an array of padding; raise OptionError if the dtype has no such value."""
    try:
        if isinstance(like, torch.Tensor):
            filled: Any = torch.full(shape, value, dtype=like.dtype)
            found = torch.full((), value, dtype=like.dtype).item()
        else:
            filled = np.full(shape, value, like.dtype.newbyteorder("="))
            found = np.full((), value, like.dtype).item()
    except (OverflowError, RuntimeError, TypeError, ValueError) as error:
        raise OptionError(f"Field {name!r} of {like.dtype} cannot be padded with {value!r}: {error}") from error
    is_exact = not (like.is_floating_point() if isinstance(like, torch.Tensor) else like.dtype.kind in "fc")
    if is_exact and found != value:
        raise OptionError(
            f"Field {name!r} of {like.dtype} cannot be padded with {value!r}, which is not one of its values."
        )
    result: _Array = filled
    return result


def _name_item(place: int, draw: Draw | None) -> str:
    return f"item {place} of the batch" if draw is None else f"item {draw.items[place]}"
