"""Divide groups or items into parts of given sizes: a function of names and a seed, the same on every machine."""

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from penstock.core.errors import OptionError
from penstock.core.seeds import key_for, subkeys

__all__ = ["check_fractions", "divide_groups", "divide_items"]

_AT_ONCE = 1 << 18


def check_fractions(fractions: Mapping[str, float]) -> None:
    """Raise OptionError unless all fractions are > 0 and they add up to 1."""
    values = list(fractions.values())
    known = [value for value in values if isinstance(value, int | float | np.number) and 0 < value <= 1]
    if not values or len(known) < len(values) or abs(sum(values) - 1) > 1e-6:
        raise OptionError(
            f"The fractions of a split must be > 0 and add up to 1, such as train=0.8,val=0.1,test=0.1, got "
            f"{dict(fractions)}."
        )


def divide_groups(totals: Mapping[str, int], fractions: Sequence[float], seed: int) -> dict[str, int]:
    """Return the part of each group. Item counts come near to the fractions, and no part is empty.

    Groups are sorted by a hash of their names and cut near the borders of the fractions: a group that is added moves
    each border by less than its own size, and the other groups stay where they are.

    Parameters
    ----------
    totals
        Name and number of items of each group; at least as many groups as parts.

    Examples
    --------
    >>> sorted(divide_groups({"a": 20, "b": 20, "c": 1}, [0.5, 0.5], seed=0).values())
    [0, 0, 1]
    """
    order = sorted(totals, key=lambda group: (key_for(seed, "split", group), group))
    before = np.cumsum([0, *(totals[group] for group in order)])
    borders = np.cumsum(fractions) * before[-1]
    borders[-1] = before[-1]
    found: dict[str, int] = {}
    cut = 0
    for number, border in enumerate(borders):
        # At least one group here, and one for each part that follows.
        last = len(order) - (len(borders) - 1 - number)
        start, cut = cut, cut + 1 + int(np.argmin(np.abs(before[cut + 1 : last + 1] - border)))
        found |= dict.fromkeys(order[start:cut], number)
    return found


def divide_items(n_items: int, counts: Sequence[int], key: int) -> NDArray[np.uint16]:
    """Return the part of each item: `counts[0]` items at random are in part 0, the next in part 1, and so on.

    Items that are in none have the number `len(counts)`. Part 0 of a smaller count is within part 0 of a larger one.

    Examples
    --------
    >>> np.bincount(divide_items(10, [5, 3], key=7)).tolist()
    [5, 3, 2]
    """
    hashes = np.empty(n_items, np.uint64)  # all differ: `subkeys` is a bijection
    for begin in range(0, n_items, _AT_ONCE):
        hashes[begin : begin + _AT_ONCE] = subkeys(key, np.arange(begin, min(begin + _AT_ONCE, n_items)))
    cuts = np.cumsum(counts).astype(np.int64)
    inner = cuts[(cuts > 0) & (cuts < n_items)]
    borders = np.zeros(int(np.searchsorted(cuts, n_items)), np.uint64)  # where all items are taken, no border is needed
    borders[cuts[: len(borders)] > 0] = np.partition(hashes, np.unique(inner))[inner]
    parts = np.empty(n_items, np.uint16)
    for begin in range(0, n_items, _AT_ONCE):
        parts[begin : begin + _AT_ONCE] = np.searchsorted(borders, hashes[begin : begin + _AT_ONCE], side="right")
    return parts
