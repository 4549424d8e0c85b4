"""The table to split: how much of each class each author has, and whether it can be split at all."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from penstock.core.errors import OptionError

__all__ = ["Table", "check_members", "encode", "find_columns"]

_Int64s = NDArray[np.int64]

_LABELS = ("label", "class", "class_id", "labels", "species")
_AUTHORS = ("author", "authors", "group")
_SEGMENTS = "usable_segments"
_NAMED = 5  # most classes or authors listed in an error


class Table(NamedTuple):
    """Names of classes and groups, and the rows that have them."""

    classes: list[str]
    groups: list[str]
    group: _Int64s
    """Number of the group of each row."""

    counts: _Int64s
    """(groups, classes)"""

    @classmethod
    def of(cls, labels: ArrayLike, authors: ArrayLike, segments: ArrayLike | None) -> "Table":
        """Return the table of rows with these labels, authors and numbers of segments."""
        (classes, label), (groups, group) = encode("labels", labels), encode("authors", authors)
        if len(label) != len(group):
            raise OptionError(
                f"labels and authors must have one entry per row, got {len(label)} labels and {len(group)} authors."
            )
        weights = np.ones(len(label), np.int64) if segments is None else np.asarray(segments)
        if weights.shape != label.shape or weights.dtype.kind not in "iu" or (weights < 1).any():
            raise OptionError("segments must be integers >= 1, one per row.")
        counts = np.zeros((len(groups), len(classes)), np.int64)
        np.add.at(counts, (group, label), weights.astype(np.int64))
        return cls(classes, groups, group, counts)

    def check(self, n_sides: int) -> None:
        """Raise if no attempt can succeed."""
        if len(self.groups) < n_sides:
            raise OptionError(
                f"There must be at least as many authors as sides, {n_sides}, got {len(self.groups)} "
                f"({_join_names(self.groups)}). Use fewer folds, or data of more authors."
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
                "Every class must have at least two authors, since it is not trained while its only one is in "
                f"validation; class {'; class '.join(owners)}{more}. Leave it out, or add data of a second author."
            )

    def rarest(self) -> str:
        """Return the classes with the fewest authors, as text."""
        authors = (self.counts > 0).sum(axis=0)
        return ", ".join(
            f"{self.classes[number]!r} with {authors[number]} authors and {self.counts[:, number].sum()} segments"
            for number in np.argsort(authors, kind="stable")[:_NAMED]
        )


def find_columns(df: Any) -> tuple[Any, Any, Any]:
    """Return the classes, the authors and, if there are any, the segments of the rows of a table."""
    names = [str(name) for name in (df.columns if hasattr(df, "columns") else df)]
    found = []
    for what, known in (("classes", _LABELS), ("authors", _AUTHORS)):
        here = [name for name in known if name in names]
        if len(here) != 1:
            raise OptionError(
                f"The table must have exactly one column for {what}, {' or '.join(known)}, got {_join_names(names)}."
            )
        found.append(df[here[0]])
    return found[0], found[1], df[_SEGMENTS] if _SEGMENTS in names else None


def encode(name: str, values: ArrayLike) -> tuple[list[str], _Int64s]:
    """Return the unique names, ascending, and the number of each row's name."""
    given = np.asarray(values)
    if given.ndim != 1 or not given.size:
        raise OptionError(f"{name} must be a list with one entry per row, got shape {given.shape}.")
    plain = given.tolist()
    kinds = {type(value) for value in plain}
    if kinds not in ({str}, {int}):
        row = next((row for row, value in enumerate(plain) if type(value) not in (str, int)), 0)
        raise OptionError(f"{name} must be all text or all integers, got {plain[row]!r} in row {row}.")
    names, code = np.unique(np.array(plain), return_inverse=True)
    return [str(one) for one in names], code.astype(np.int64)


def check_members(names: Sequence[str], code: _Int64s) -> None:
    """Raise if a class has a single item, which can only be on one side."""
    few = np.flatnonzero(np.bincount(code) < 2).tolist()
    if len(few):
        lonely = _join_names([names[number] for number in few])
        raise OptionError(
            f"Every class must have at least two items, one for each side, but {lonely} has 1. "
            "Leave the class out, or add data."
        )


def _join_names(names: Sequence[str]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(map(repr, names[:_NAMED])) + more
