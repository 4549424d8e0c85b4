"""Which items of datasets are kept, in which part, and in which order: read once from their columns, before writing."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.convert.edit.edits import Edits
from penstock.convert.inputs.protocol import remote_of
from penstock.convert.plan import Scan
from penstock.convert.splits import WHOLE
from penstock.core.errors import SourceError
from penstock.core.text import count
from penstock.files.stores.url import Url
from penstock.source.array import ArraySource
from penstock.source.select.choose import divide, find_mask
from penstock.source.select.columns import read_columns
from penstock.source.tar.source import TarSource

__all__ = ["Arranged"]

_Int64s = NDArray[np.int64]


class Arranged:
    """The items that edits choose, as a conversion asks for them.

    Parameters
    ----------
    about
        What the manifest says, besides the edits.
    """

    def __init__(self, edits: Edits, about: Mapping[str, Any]) -> None:
        self._edits, self.group_by = edits, edits.split_by or "item"
        self.about: Mapping[str, Any] = {**about, "edits": edits.to_json()}

    def arrange(self, scans: Sequence[Scan]) -> dict[str, _Int64s]:
        """Return the items of each part; up to some 100 bytes of memory for an item if they are sorted."""
        edits = self._edits
        masks, columns = zip(*(self._read(scan) for scan in scans), strict=True)
        which = np.repeat(np.arange(len(masks), dtype=np.int32), [len(kept) for kept in masks])
        numbers = np.concatenate(masks)
        if not len(numbers):
            total = count(sum(scan.n_items for scan in scans), "item")
            raise SourceError(f"An edited dataset must have items, but where={edits.where!r} keeps none of {total}.")
        parts = np.zeros(len(numbers), np.uint16)
        if edits.split is not None:
            by = None if edits.split_by is None else _join(edits.split_by, columns)
            parts = divide(ArraySource({"item": numbers}), list(edits.split.values()), by, edits.seed)
        order = np.arange(len(numbers))
        if edits.sort_by is not None:
            order = np.argsort(_join(edits.sort_by, columns), kind="stable")
        found = {}
        for part, name in enumerate(edits.split or [WHOLE]):
            chosen = order if edits.split is None else order[parts[order] == part]
            found[name] = _find_runs(which[chosen], numbers[chosen])
        return found

    def _read(self, scan: Scan) -> tuple[_Int64s, dict[str, NDArray[Any]]]:
        """Return the items of one dataset that are kept, and what they have in the columns that are needed."""
        edits, path = self._edits, scan.input.path
        names = [name for name in (edits.sort_by, edits.split_by) if name is not None]
        if edits.where is None and not names:
            return np.arange(scan.n_items), {}
        source = TarSource(str(path), store=remote_of(scan.input).store if isinstance(path, Url) else None)
        try:
            kept = np.arange(scan.n_items)
            if edits.where is not None:
                kept = np.flatnonzero(find_mask(source, edits.where)[0])
            found = read_columns(source, list(dict.fromkeys(names)))
        finally:
            source.close()
        for name, values in found.items():
            _check_complete(name, values, kept, path)
        return kept, {name: values[kept] for name, values in found.items()}


def _check_complete(name: str, values: NDArray[Any], kept: _Int64s, path: Any) -> None:
    """Raise SourceError if an item that is kept has no value."""
    missing = values[kept] != values[kept]  # NaN
    if values.dtype.hasobject:
        missing = np.array([value is None for value in values[kept].tolist()], np.bool_)
    if missing.any():
        item = int(kept[np.flatnonzero(missing)[0]])
        raise SourceError(
            f"Every item must have a value of {name!r}, but item {item} of {path} has none. Leave such items out with "
            f"where={f'{name} != None'!r}."
        )


def _join(name: str, columns: Sequence[Mapping[str, NDArray[Any]]]) -> NDArray[Any]:
    """Return a column of all datasets; raise SourceError if it has text in one item and numbers in another."""
    values = [found[name] for found in columns if len(found[name])]
    texts = {isinstance(value, str) for one in values if one.dtype.hasobject for value in one.tolist()}
    texts |= {False for one in values if not one.dtype.hasobject}
    if len(texts) > 1:
        raise SourceError(f"A column must have text or numbers in all items, but {name!r} has both.")
    return np.concatenate(values)


def _find_runs(which: NDArray[np.int32], numbers: _Int64s) -> _Int64s:
    """Return items as runs of consecutive ones: rows of (number of a scan, start, stop)."""
    begins = np.ones(len(numbers), np.bool_)
    begins[1:] = (np.diff(numbers) != 1) | (np.diff(which) != 0)
    starts = np.flatnonzero(begins)
    runs = np.empty((len(starts), 3), np.int64)
    runs[:, 0], runs[:, 1] = which[starts], numbers[starts]
    runs[:-1, 2] = numbers[starts[1:] - 1] + 1
    runs[-1:, 2] = numbers[-1:] + 1
    return runs
