"""What every source can do: choose items by their metadata, at random or by groups, and leave fields out.

Each choice is a source of its own, whose fingerprint depends on that of the source and on which items were chosen.
"""

import copy
import hashlib
import logging
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import numpy as np
from numpy.typing import ArrayLike, NDArray

from penstock.core.errors import OptionError, SourceError
from penstock.core.index import Index
from penstock.core.protocols import Source
from penstock.core.seeds import check_seed, key_for
from penstock.core.text import count, did_you_mean
from penstock.core.types import UNNAMED, Block, Field, Span
from penstock.source.checks import check_items, check_span, keep_existing, sum_stored
from penstock.source.select.choose import divide, encode_groups, find_mask
from penstock.source.select.columns import list_columns, read_columns
from penstock.source.select.parts import check_fractions, divide_items
from penstock.source.wrapper import Wrapper, call_axis_lengths, call_prepare, call_release

__all__ = ["FewerFields", "Selectable", "Take", "as_stored", "check_fields", "select_fields"]

_LOG = logging.getLogger("penstock")
_Int64s = NDArray[np.int64]

_AT_ONCE = 1 << 18  # items
_MAX_PARTS = 1000
_MIN_SHARE = 1 / 64  # of the items of a source; fewer are read faster than the lengths of all

# Columns by source and name. Not in the source, which is sent to workers.
_KEPT: "weakref.WeakKeyDictionary[Selectable, dict[str, NDArray[Any]]]" = weakref.WeakKeyDictionary()


class Selectable:
    """Gives a source its selections; none of them reads more than the columns it needs, or writes anything."""

    @property
    def column_names(self) -> list[str]:
        """Fields with one value per item, and keys of metadata: what `where`, `split` and `columns` can name."""
        return list_columns(cast("Source", self))

    def columns(self, *names: str) -> dict[str, NDArray[Any]]:
        """Return columns by name, with one value per item; they are read in one pass."""
        return read_columns(cast("Source", self), names)

    def metadata(self, name: str) -> NDArray[Any]:
        """Return one column, with one value per item; it is read once, and not to be changed.

        Numbers are typed, text and mixed values are objects. Only the column is read: `source.index.select(mask)` then
        gives a plan some of the items, and `source.where(mask)` is a source of them.
        """
        kept = _KEPT.setdefault(self, {})
        if name not in kept:
            column = read_columns(cast("Source", self), [name])[name]
            column = column.copy() if column.base is not None else column
            column.flags.writeable = False
            kept[name] = column
        return kept[name]

    def where(self, condition: "str | Callable[..., ArrayLike] | ArrayLike") -> "Take":
        """Return a source of the items that fulfil a condition, in storage order.

        Parameters
        ----------
        condition
            A text such as `"subject == 'A' and quality > 0.5"`; a function whose parameters are named like columns, and
            which returns one bool per item: `lambda subject, quality: (subject == "A") & (quality > 0.5)`; or a mask.
        """
        source = cast("Source", self)
        mask, how = find_mask(source, condition)
        found = Take(source, mask, how=how)
        _LOG.info("%s keeps %s of %s.", how, f"{len(found.index):,}", count(len(source.index), "item"))
        if not len(found.index):
            _LOG.warning("%s keeps none of the %s of %r.", how, count(len(source.index), "item"), source)
        return found

    def sample(self, fraction: float, seed: int = 0) -> "Take":
        """Return a source of a random fraction of the items, in storage order; at least one item.

        The same seed gives the same items. A smaller fraction with the same seed is within a larger one.
        """
        source = cast("Source", self)
        if isinstance(fraction, bool) or not isinstance(fraction, int | float | np.number) or not 0 < fraction <= 1:
            raise OptionError(f"fraction must be > 0 and <= 1, got {fraction!r}.")
        n_items = len(source.index)
        parts = divide_items(n_items, [max(1, round(fraction * n_items))], key_for(check_seed(seed), "sample"))
        return Take(source, parts == 0, how=f"sample({fraction}, seed={seed})")

    def split(self, *, by: "str | ArrayLike | None" = None, seed: int = 0, **fractions: float) -> "dict[str, Take]":
        """Return a source for each part of a split: `source.split(train=0.8, val=0.2, by="subject", seed=7)`.

        Every item is in exactly one part. Nothing is written: the same source, fractions and seed give the same parts.

        Parameters
        ----------
        by
            A column, or an array with one value per item: items with the same value are in the same part. None: items
            are divided one by one.
        seed
            Seed of the random division.
        fractions
            Name and fraction of each part; together 1. By groups, the sizes come as near to them as whole groups allow.
        """
        source = cast("Source", self)
        check_fractions(fractions)
        if len(fractions) > _MAX_PARTS:
            raise OptionError(f"A split must have at most {_MAX_PARTS} parts, got {len(fractions)}.")
        numbers = divide(source, list(fractions.values()), by, check_seed(seed))
        found = {}
        for number, name in enumerate(fractions):
            grouped = "" if by is None else f", by={by if isinstance(by, str) else '...'!r}"
            found[name] = Take(source, numbers == number, how=f"split({name}={fractions[name]}{grouped}, seed={seed})")
        empty = [name for name, part in found.items() if not len(part.index)]
        if empty:
            _LOG.warning("split() leaves %s without items: %r has %s.", ", ".join(empty), source, len(source.index))
        return found

    def sort_by(self, column: str) -> "Take":
        """Return a source of all items in ascending order of a column; items with the same value stay in their order.

        Every item must have a value: leave the others out with `where("column != None")`.
        """
        source = cast("Source", self)
        values = read_columns(source, [column])[column]
        if values.dtype.hasobject:
            kinds = {isinstance(value, str) for value in values.tolist() if value is not None}
            if len(kinds) > 1:
                raise SourceError(f"A column must have text or numbers in all items, but {column!r} has both.")
            missing = np.array([value is None for value in values.tolist()], np.bool_)
        else:
            missing = np.isnan(values) if values.dtype.kind == "f" else np.zeros(len(values), np.bool_)
        if missing.any():
            item = int(np.argmax(missing))
            raise SourceError(
                f"Every item must have a value of {column!r}, but item {item} of {source!r} has none. Leave such items "
                f"out with where={f'{column} != None'!r}."
            )
        return Take(source, np.argsort(values, kind="stable"), how=f"sort_by({column!r})")

    def class_weights(self, by: str) -> dict[Any, float]:
        """Return a weight for each value of a column, in sorted order: the rarer the value, the larger the weight.

        The weights of all items have the mean 1, as a loss function wants it:
        `CrossEntropyLoss(weight=torch.tensor(list(source.class_weights("label").values())))`.
        """
        values, codes = encode_groups(cast("Source", self), by)
        counts = np.bincount(codes, minlength=len(values))
        weights = {value: len(codes) / (len(values) * int(n)) for value, n in zip(values, counts, strict=True)}
        is_text = any(isinstance(value, str) for value in weights)
        return {value: weights[value] for value in sorted(weights, key=str if is_text else None)}

    def with_fields(self, fields: Sequence[str]) -> Any:
        """Return a source of the same items with these fields alone."""
        return FewerFields(cast("Source", self), fields)

    def as_stored(self) -> "Source":
        """Return a source of the same items whose files, such as images, are their bytes; itself if it has none."""
        return cast("Source", self)


class Take(Selectable, Wrapper):
    """A selection of items as a source of its own, in the given order; repeats are allowed.

    To train on a subset of a source, `source.index.select(mask)` is lighter: it keeps the item numbers of the source.

    Parameters
    ----------
    items
        A mask with one bool per item, or item numbers.
    how
        How the items were chosen, for the repr.

    Examples
    --------
    >>> from penstock.source.array import ArraySource
    >>> part = Take(ArraySource({"x": np.arange(10) * 10}), [7, 2, 2])
    >>> part.read(Span(0, 3))["x"].tolist()
    [70, 20, 20]
    """

    def __init__(self, source: Source, items: ArrayLike, *, how: str = "") -> None:
        self._source, self._parts, self._how = source, (source,), how
        self.fields: Mapping[str, Field] = source.fields
        numbers = np.asarray(items)
        if numbers.ndim != 1 or (numbers.size and numbers.dtype.kind not in "iub"):
            raise SourceError(
                f"items must be a 1-d mask or 1-d item numbers, got {numbers.dtype} with {numbers.ndim} axes."
            )
        if numbers.dtype != np.bool_:
            numbers = check_items(numbers.astype(np.int64), source)
        # Ascending items keep the chunks of the source, and take little memory. In any other order, no two items count
        # as stored together.
        is_ascending = numbers.dtype == np.bool_ or bool((np.diff(numbers) > 0).all())
        self._selected = source.index.select(numbers) if is_ascending else None
        self._items = None if is_ascending else numbers
        n_items = len(numbers) if self._selected is None else len(self._selected)
        self._n_distinct = n_items if is_ascending else len(np.unique(numbers))
        content = hashlib.blake2b(source.index.content_digest.encode(), digest_size=8)
        for begin in range(0, n_items, _AT_ONCE):
            content.update(self._locate(np.arange(begin, min(begin + _AT_ONCE, n_items))).tobytes())
        chunks = self._selected
        sizes = np.ones(n_items, np.int64) if chunks is None else chunks.chunk_sizes(np.arange(chunks.n_chunks))
        index = Index.from_sizes(sizes, identity=content.hexdigest())
        self.index = replace(index, presence=source.index.presence)

    def __repr__(self) -> str:
        return f"Take({len(self.index)} of {self._source!r}{f', {self._how}' if self._how else ''})"

    def read(self, span: Span, out: Block | None = None) -> Block:
        """Return consecutive items of the selection."""
        check_span(span, self)
        items = self._locate(np.arange(span.start, span.stop))
        if len(items) and items[-1] - items[0] + 1 == len(items) and (np.diff(items) == 1).all():
            return self._source.read(Span(int(items[0]), int(items[-1]) + 1), out)
        return self._source.take(items, out)

    def take(self, items: _Int64s, out: Block | None = None) -> Block:
        """Return any items of the selection."""
        return self._source.take(self._locate(check_items(items, self)), out)

    def prepare(self, items: _Int64s) -> int | None:
        """Start reading items into the page cache, as far as the source does; return the bytes that were not there."""
        return call_prepare(self._source, self._locate(keep_existing(items, self)))

    def release(self, items: _Int64s) -> None:
        """Give the pages of items back to the system, as far as the source does."""
        call_release(self._source, self._locate(keep_existing(items, self)))

    def with_fields(self, fields: Sequence[str]) -> "Take":
        """Return a source of the same items with these fields alone."""
        other = copy.copy(self)
        other._source = select_fields(self._source, fields)
        other._parts, other.fields = (other._source,), other._source.fields
        return other

    def axis_lengths(self, name: str) -> NDArray[np.uint32] | None:
        """Return the length of a 1-D field in every item, if the source knows it without reading items."""
        n_items = len(self.index)
        known = None if n_items < _MIN_SHARE * len(self._source.index) else call_axis_lengths(self._source, name)
        return None if known is None else known[self._locate(np.arange(n_items))]

    @property
    def stored_fields(self) -> Mapping[str, Field]:
        """All fields that can be read, also those that are not delivered."""
        found: Mapping[str, Field] = getattr(self._source, "stored_fields", self._source.fields)
        return found

    @property
    def stored_bytes(self) -> int | None:
        """Bytes of the local files of the source, in proportion to the items; None if it does not know them."""
        n_bytes = sum_stored(self._source)
        return None if n_bytes is None else n_bytes * self._n_distinct // max(1, len(self._source.index))

    def _locate(self, places: _Int64s) -> _Int64s:
        """Return the numbers in the source."""
        if self._items is not None:
            return self._items[places]
        assert self._selected is not None, "items are listed or selected"
        return self._selected.stored(places)


class FewerFields(Selectable, Wrapper):
    """A source with some of its fields; all of them are read if the source cannot read them alone.

    Examples
    --------
    >>> from penstock.source.combine import Numbered
    >>> from penstock.source.array import ArraySource
    >>> source = FewerFields(Numbered(ArraySource({"x": np.arange(3), "y": np.arange(3)})), ["x", "idx"])
    >>> list(source.fields), list(source.take(np.array([2])))
    (['x', 'idx'], ['x', 'idx'])
    """

    def __init__(self, source: Source, fields: Sequence[str]) -> None:
        names = check_fields(source, fields)
        self._source, self._parts = source, (source,)
        self.fields: Mapping[str, Field] = {name: source.fields[name] for name in names}
        self.index = source.index

    def __repr__(self) -> str:
        return f"FewerFields({', '.join(self.fields)} of {self._source!r})"

    def read(self, span: Span, out: Block | None = None) -> Block:
        """Return consecutive items."""
        return self._keep_fields(self._source.read(span), out)

    def take(self, items: _Int64s, out: Block | None = None) -> Block:
        """Return any items, in the given order."""
        return self._keep_fields(self._source.take(items), out)

    def with_fields(self, fields: Sequence[str]) -> "FewerFields":
        """Return a source of the same items with these fields alone."""
        return FewerFields(self._source, fields)

    def with_source(self, source: Source) -> "FewerFields":
        """Return the same fields of another source."""
        return FewerFields(source, list(self.fields))

    def as_stored(self) -> Source:
        """Return a source of the same items whose files are their bytes."""
        return self.with_source(as_stored(self._source))

    def axis_lengths(self, name: str) -> NDArray[np.uint32] | None:
        """Return the length of a 1-D field in every item, if the source knows it without reading items."""
        return call_axis_lengths(self._source, name)

    @property
    def stored_fields(self) -> Mapping[str, Field]:
        """All fields of the source."""
        return self._source.fields

    def _keep_fields(self, block: Block, out: Block | None) -> Block:
        kept = {name: block[name] for name in self.fields}
        for name, given in (out or {}).items():
            given[...] = kept[name]
            kept[name] = given
        return kept


def select_fields(source: Source, fields: Sequence[str]) -> Source:
    """Return a source of the same items with these fields alone, which are read alone if the source can do that."""
    found: Source = source.with_fields(fields) if hasattr(source, "with_fields") else FewerFields(source, fields)
    return found


def as_stored(source: Source) -> Source:
    """Return a source of the same items whose files, such as images, are their bytes."""
    return source.as_stored() if isinstance(source, Selectable) else source


def check_fields(source: Source, fields: Sequence[str]) -> list[str]:
    """Return names of fields as a list; raise OptionError if `source` does not have them all."""
    known = list(source.fields)
    names = [fields] if isinstance(fields, str) else list(fields)
    unknown = [name for name in names if name not in known]
    if known == [UNNAMED] and unknown:
        raise OptionError(
            f"The items of {source!r} are objects without named fields, got fields={fields!r}. Choose from them by a "
            "transform, such as map(lambda item: {'x': item['x']})."
        )
    if isinstance(fields, str) or unknown or not names or len(set(names)) < len(names):
        near = did_you_mean(unknown[0], known) if unknown else ""
        raise OptionError(f"fields must be different fields of {source!r}, some of {known}, got {fields!r}.{near}")
    return names
