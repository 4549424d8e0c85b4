"""Which samples go to which split: whole groups (subjects, sessions, files), or stretches of time."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from penstock.core.errors import OptionError, SourceError
from penstock.core.seeds import check_seed, key_for

__all__ = ["WHOLE", "GroupBy", "Run", "Split", "grouped", "parsed_split", "stretches"]

GroupBy = Literal["subject", "session", "file", "time"]

_ROUNDING = 1e-12  # of a recording: far below one sample of it, far above what adding up shares costs

Run = tuple[int, int]
"""Samples of one input, from the first to before the second."""

WHOLE = ""
"""The name of the only split where there is none."""


@dataclass(frozen=True, slots=True)
class Split:
    """Shares of the samples by name, and what may not be torn apart.

    Parameters
    ----------
    shares
        Name to share, as a mapping or as pairs; they add up to 1.
    group_by
        `"subject"`, `"session"` or `"file"`: all samples of one are on one side. `"time"`: each recording is cut into
        stretches, and samples across a border are left out.
    seed
        Which groups go where.
    """

    shares: tuple[tuple[str, float], ...] = ((WHOLE, 1.0),)
    group_by: GroupBy = "file"
    seed: int = 0

    def __post_init__(self) -> None:
        if self.group_by not in get_args(GroupBy):
            raise OptionError(f"group_by={self.group_by!r}; use one of {', '.join(get_args(GroupBy))}.")
        check_seed(self.seed)
        if isinstance(self.shares, Mapping):
            object.__setattr__(self, "shares", tuple(self.shares.items()))
        names = [name for name, _ in self.shares]
        plain = [name for name in names if name.isprintable() and "/" not in name and not name.startswith(".")]
        if len(set(plain)) != len(names) or (WHOLE in names and len(names) > 1):
            raise OptionError(f"The splits {names} cannot be folders; use plain names, each once.")
        if any(not 0 < share <= 1 for _, share in self.shares) or abs(sum(s for _, s in self.shares) - 1) > 1e-6:
            raise OptionError(
                f"The shares {dict(self.shares)} do not add up to 1; use for example train=0.8,val=0.1,test=0.1."
            )

    @property
    def names(self) -> tuple[str, ...]:
        """The splits, in the order in which they were given."""
        return tuple(name for name, _ in self.shares)


def parsed_split(text: str) -> tuple[tuple[str, float], ...]:
    """Return the shares that a text such as `train=0.8,val=0.2` gives."""
    pairs = [pair.partition("=") for pair in text.split(",")]
    try:
        return tuple((name.strip(), float(share)) for name, _, share in pairs if name.strip() or share)
    except ValueError as error:
        raise OptionError(f"split={text!r}; use for example train=0.8,val=0.1,test=0.1.") from error


def grouped(groups: Sequence[str], sizes: Sequence[int], split: Split) -> dict[str, str]:
    """Return the split of each group, so that the numbers of samples come near to the shares and no split is empty.

    Parameters
    ----------
    groups, sizes
        The group of each input, and its samples.

    Examples
    --------
    >>> split = Split((("train", 0.5), ("val", 0.5)))
    >>> sorted(grouped(["a", "b", "a"], [10, 20, 10], split).values())
    ['train', 'val']
    """
    totals: dict[str, int] = {}
    for group, size in zip(groups, sizes, strict=True):
        totals[group] = totals.get(group, 0) + size
    if len(totals) < len(split.shares):
        raise SourceError(
            f"{len(totals)} {split.group_by}s ({', '.join(sorted(totals)[:5])}) cannot be on {len(split.shares)} "
            "sides; use fewer splits, or --group-by time."
        )
    # In a row by a hash of their names, cut near the borders of the shares: another group that is added moves
    # each border by less than its own size, and leaves the others where they are.
    order = sorted(totals, key=lambda group: (key_for(split.seed, "split", group), group))
    before = np.cumsum([0, *(totals[group] for group in order)])
    borders = np.cumsum([share for _, share in split.shares]) * before[-1]
    borders[-1] = before[-1]
    found: dict[str, str] = {}
    cut = 0
    for number, name in enumerate(split.names):
        # At least one group here, and one for each of the splits that follow.
        last = len(order) - (len(split.names) - 1 - number)
        start, cut = cut, cut + 1 + int(np.argmin(np.abs(before[cut + 1 : last + 1] - borders[number])))
        found |= dict.fromkeys(order[start:cut], name)
    return found


def stretches(spans: NDArray[np.float64], split: Split) -> dict[str, list[Run]]:
    """Return the samples of one recording that lie in the stretch of each split; those across a border in none."""
    begin, end = float(spans[:, 0].min()), float(spans[:, 1].max())
    borders = begin + (end - begin) * np.cumsum([0.0, *(share for _, share in split.shares)])
    borders[-1] = end
    slack = _ROUNDING * (end - begin)
    found = {}
    for name, left, right in zip(split.names, borders[:-1], borders[1:], strict=True):
        inside = np.flatnonzero((spans[:, 0] >= left - slack) & (spans[:, 1] <= right + slack))
        found[name] = _runs(inside)
    return found


def _runs(numbers: NDArray[np.int64]) -> list[Run]:
    if not numbers.size:
        return []
    breaks = np.flatnonzero(np.diff(numbers) != 1) + 1
    return [(int(part[0]), int(part[-1]) + 1) for part in np.split(numbers, breaks)]
