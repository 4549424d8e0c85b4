"""What there is to split: which author has how much of which class, and whether it can be split at all."""

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import xxhash
from numpy.typing import ArrayLike, NDArray

from penstock.core.errors import OptionError

__all__ = ["Table", "check_members", "coded", "columns"]

_Int64s = NDArray[np.int64]

_LABELS = ("label", "class", "class_id", "labels", "species")
_AUTHORS = ("author", "authors", "group")
_SEGMENTS = "usable_segments"
_NAMED = 5  # classes or authors that an error lists


class Table(NamedTuple):
    """What there is to split: names, and which rows have them."""

    classes: list[str]
    groups: list[str]
    group: _Int64s
    """Of each row."""

    counts: _Int64s
    """(groups, classes)"""

    digest: str

    @classmethod
    def of(cls, labels: ArrayLike, authors: ArrayLike, segments: ArrayLike | None) -> "Table":
        """Return the table of rows with these labels, authors and numbers of segments."""
        (classes, label), (groups, group) = coded("labels", labels), coded("authors", authors)
        if len(label) != len(group):
            raise OptionError(
                f"There are {len(label)} labels and {len(group)} authors; give one of each for every row."
            )
        weights = np.ones(len(label), np.int64) if segments is None else np.asarray(segments)
        if weights.shape != label.shape or weights.dtype.kind not in "iu" or (weights < 1).any():
            raise OptionError("Segments are whole numbers of 1 or more, one for each row.")
        counts = np.zeros((len(groups), len(classes)), np.int64)
        np.add.at(counts, (group, label), weights.astype(np.int64))
        spelled = json.dumps([classes, groups, label.tolist(), group.tolist(), weights.tolist()])
        return cls(classes, groups, group, counts, xxhash.xxh3_128_hexdigest(spelled.encode()))

    def check(self, n_sides: int) -> None:
        """Say at once where no attempt can work."""
        if len(self.groups) < n_sides:
            raise OptionError(
                f"{len(self.groups)} authors ({_listed(self.groups)}) cannot be dealt out to {n_sides} sides, since "
                "none may be on two of them; use fewer folds, or data of more authors."
            )
        lonely = np.flatnonzero((self.counts > 0).sum(axis=0) < 2)
        if len(lonely):
            owners = [
                f"{self.classes[number]!r} has 1 author, {self.groups[int(self.counts[:, number].argmax())]!r} with "
                f"{self.counts[:, number].sum()} segments"
                for number in lonely[:_NAMED]
            ]
            more = f"; and {len(lonely) - _NAMED} more classes" if len(lonely) > _NAMED else ""
            raise OptionError(
                f"Class {'; class '.join(owners)}{more}. While that author is in validation, the class could not be "
                "trained: leave the class out, or add data of a second author."
            )

    def rarest(self) -> str:
        """Return the classes with the fewest authors, in words."""
        authors = (self.counts > 0).sum(axis=0)
        return ", ".join(
            f"{self.classes[number]!r} with {authors[number]} authors and {self.counts[:, number].sum()} segments"
            for number in np.argsort(authors, kind="stable")[:_NAMED]
        )


def columns(df: Any) -> tuple[Any, Any, Any]:
    """Return the classes, the authors and, if there are any, the segments of a table's rows."""
    names = [str(name) for name in (df.columns if hasattr(df, "columns") else df)]
    found = []
    for what, known in (("classes", _LABELS), ("authors", _AUTHORS)):
        here = [name for name in known if name in names]
        if len(here) != 1:
            raise OptionError(
                f"The table has the columns {_listed(names)}; it needs exactly one for {what}: {' or '.join(known)}."
            )
        found.append(df[here[0]])
    return found[0], found[1], df[_SEGMENTS] if _SEGMENTS in names else None


def coded(name: str, values: ArrayLike) -> tuple[list[str], _Int64s]:
    """Return the names that occur, in ascending order, and the number of each row's name."""
    given = np.asarray(values)
    if given.ndim != 1 or not given.size:
        raise OptionError(f"{name} has the shape {given.shape}; give a list with one for each row.")
    plain = given.tolist()
    kinds = {type(value) for value in plain}
    if kinds not in ({str}, {int}):
        row = next((row for row, value in enumerate(plain) if type(value) not in (str, int)), 0)
        raise OptionError(f"{name} are all text or all whole numbers, got {plain[row]!r} in row {row}.")
    names, code = np.unique(np.array(plain), return_inverse=True)
    return [str(one) for one in names], code.astype(np.int64)


def check_members(names: Sequence[str], code: _Int64s) -> None:
    """Say which classes have a single item, and so none for one of two sides."""
    few = np.flatnonzero(np.bincount(code) < 2).tolist()
    if len(few):
        raise OptionError(
            f"Class {_listed([names[number] for number in few])} has 1 item, which cannot be on both sides; "
            "leave the class out, or add data."
        )


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(map(repr, names[:_NAMED])) + more
