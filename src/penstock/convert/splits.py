"""Assign items to splits: by whole groups (subjects, sessions, files) or by stretches of time."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from penstock.core.errors import OptionError, SourceError
from penstock.core.seeds import check_seed
from penstock.source.select.parts import check_fractions, divide_groups

__all__ = ["WHOLE", "ItemSpan", "Split", "assign_groups", "cut_by_time", "parse_split"]

_ROUNDING = 1e-12  # of a recording: far below one item, far above the rounding error of adding fractions

ItemSpan = tuple[int, int]
"""Items [start, stop) of one input."""

WHOLE = ""
"""The name of the only split if there is no split."""


@dataclass(frozen=True, slots=True)
class Split:
    """How items are divided into named splits, and what must stay in one split.

    Parameters
    ----------
    shares
        Name to fraction of the items, as a mapping or as pairs. The fractions add up to 1.
    group_by
        `"file"`, or a metadata column such as `"subject"` or `"session"`: all items of one are in the same split.
        `"time"`: each recording is cut into stretches, and items that cross a border are left out.
    seed
        Seed of the random assignment of groups.
    """

    shares: tuple[tuple[str, float], ...] = ((WHOLE, 1.0),)
    group_by: str = "file"
    seed: int = 0

    def __post_init__(self) -> None:
        if not isinstance(self.group_by, str) or not self.group_by:
            raise OptionError(
                "group_by must be 'file', 'time' or the name of a metadata column, such as 'subject', got "
                f"{self.group_by!r}."
            )
        check_seed(self.seed)
        if isinstance(self.shares, Mapping):
            object.__setattr__(self, "shares", tuple(self.shares.items()))
        names = [name for name, _ in self.shares]
        plain = [name for name in names if name.isprintable() and "/" not in name and not name.startswith(".")]
        if len(set(plain)) != len(names) or (WHOLE in names and len(names) > 1):
            raise OptionError(
                f"Split names must be unique, printable names of folders without '/' or a leading '.', got {names}."
            )
        check_fractions(dict(self.shares))

    @property
    def column(self) -> str | None:
        """The metadata column that groups items; None if there is no split, or one by file or time."""
        return None if len(self.shares) == 1 or self.group_by in ("file", "time") else self.group_by

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the splits, in the order given."""
        return tuple(name for name, _ in self.shares)


def parse_split(text: str) -> tuple[tuple[str, float], ...]:
    """Return (name, fraction) pairs from a text such as `train=0.8,val=0.2`."""
    pairs = [pair.partition("=") for pair in text.split(",")]
    try:
        return tuple((name.strip(), float(share)) for name, _, share in pairs if name.strip() or share)
    except ValueError as error:
        raise OptionError(
            f"split must be NAME=FRACTION pairs, such as train=0.8,val=0.1,test=0.1, got {text!r}."
        ) from error


def assign_groups(groups: Sequence[str], sizes: Sequence[int], split: Split) -> dict[str, str]:
    """Return the split of each group. Item counts come near to the fractions, and no split is empty.

    Parameters
    ----------
    groups, sizes
        The group of each input, and its number of items.

    Examples
    --------
    >>> split = Split((("train", 0.5), ("val", 0.5)))
    >>> sorted(assign_groups(["a", "b", "a"], [10, 20, 10], split).values())
    ['train', 'val']
    """
    totals: dict[str, int] = {}
    for group, size in zip(groups, sizes, strict=True):
        totals[group] = totals.get(group, 0) + size
    if len(totals) < len(split.shares):
        raise SourceError(
            f"{len(split.shares)} splits need at least as many {split.group_by}s, got {len(totals)} "
            f"({', '.join(sorted(totals)[:5])}). Use fewer splits, or group_by='time'."
        )
    parts = divide_groups(totals, [share for _, share in split.shares], split.seed)
    return {group: split.names[number] for group, number in parts.items()}


def cut_by_time(spans: NDArray[np.float64], split: Split) -> dict[str, list[ItemSpan]]:
    """Return the items of one recording that lie in the stretch of each split; items across a border are in none."""
    begin, end = float(spans[:, 0].min()), float(spans[:, 1].max())
    borders = begin + (end - begin) * np.cumsum([0.0, *(share for _, share in split.shares)])
    borders[-1] = end
    slack = _ROUNDING * (end - begin)
    found = {}
    for name, left, right in zip(split.names, borders[:-1], borders[1:], strict=True):
        inside = np.flatnonzero((spans[:, 0] >= left - slack) & (spans[:, 1] <= right + slack))
        found[name] = _spans(inside)
    return found


def _spans(numbers: NDArray[np.int64]) -> list[ItemSpan]:
    if not numbers.size:
        return []
    breaks = np.flatnonzero(np.diff(numbers) != 1) + 1
    return [(int(part[0]), int(part[-1]) + 1) for part in np.split(numbers, breaks)]
