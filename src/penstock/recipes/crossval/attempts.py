"""Who goes to which side: many attempts at once to deal groups of items out, each of them a function of its seed.

Pure, and in whole numbers, so that an attempt comes out the same in any process, together with any others.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from penstock.core.seeds import generator_for

__all__ = ["Attempts", "Task"]

_Int64s = NDArray[np.int64]
_Floats = NDArray[np.float64]

_WHOLE = 1 << 20  # all that there is of a class, in the units of shares
_SIZE_SHARE = 0.5  # what the size of a side counts for, beside one class: it decides where classes do not
_WEIGHT = 16  # of a side that has all; of smaller sides, more


@dataclass(frozen=True, slots=True)
class Task:
    """What is dealt out to which sides, and what makes a deal acceptable."""

    counts: _Int64s
    """(groups, classes): segments of each class that a group has."""

    shares: tuple[float, ...]
    """What each side should get of every class; the sum is 1."""

    least: int
    """Segments of a class that a side of validation has at least, where it has any."""

    folds: bool
    """True: each side is once the validation, all others then the training. False: side 0 trains, side 1 tests."""

    @property
    def totals(self) -> _Int64s:
        """Segments of each class."""
        total: _Int64s = self.counts.sum(axis=0)
        return total


@dataclass(frozen=True, slots=True)
class Attempts:
    """Deals, one for each seed."""

    sides: _Int64s
    """(attempts, groups): where each group went."""

    scores: _Floats
    """Mean deviation of the class counts in validation from what they should be, over what they should be; infinite
    where a deal is not acceptable."""

    @classmethod
    def of(cls, task: Task, seeds: Sequence[int]) -> "Attempts":
        """Return the attempts of these seeds."""
        sides = _dealt(task, seeds)
        return cls(sides, _scores(task, sides))


def _dealt(task: Task, seeds: Sequence[int]) -> _Int64s:
    """Give one group after the other to the side that has the least of its classes for what it should have.

    The sum of squares of what the sides have of each class, over what they should have, grows as little as it can.
    Large groups first, since small ones even out what they leave. Randomness makes attempts differ: in the sequence of
    the groups and in who gets them, much in a few attempts and little in most of them. Seed 0 has none.
    """
    n_groups, n_sides, many = len(task.counts), len(task.shares), len(seeds)
    units = _units(task)
    weights = np.array([round(_WEIGHT / share) for share in task.shares], np.int64)
    squares: _Int64s = (units * units).sum(axis=1)
    # drawn: (attempts, groups, one for the sequence and one for each side)
    drawn = np.empty((many, n_groups, 1 + n_sides))
    heat = np.empty(many)
    for number, seed in enumerate(seeds):
        rng = generator_for(seed, "folds")
        heat[number] = rng.random() ** 4 if seed else 0.0
        rng.random(out=drawn[number])
    rank = np.empty(n_groups)
    rank[np.argsort(-squares, kind="stable")] = np.arange(n_groups)
    turns = np.argsort(rank + heat[:, None] * n_groups * drawn[:, :, 0], axis=1, kind="stable")
    # A group's sum times a whole: about as much as its classes cost on a side that is full.
    spread = heat[:, None] * (2.0 * _WEIGHT * _WHOLE) * units.sum(axis=1)
    have = np.zeros((many, n_sides, units.shape[1]), np.int64)
    sides = np.empty((many, n_groups), np.int64)
    rows = np.arange(many)
    for group in turns.T:
        new = units[group]
        cost = weights * (2 * np.einsum("akc,ac->ak", have, new) + squares[group, None])
        cost += (spread[rows, group, None] * drawn[rows, group, 1:]).astype(np.int64)
        side = cost.argmin(axis=1)
        have[rows, side] += new
        sides[rows, group] = side
    return sides


def _units(task: Task) -> _Int64s:
    """Return (groups, classes + 1): the share of each class that a group has, and a column for its size."""
    sizes = task.counts.sum(axis=1, keepdims=True)
    shares = task.counts / task.totals
    units: _Int64s = np.rint(np.hstack([shares, _SIZE_SHARE * sizes / sizes.sum()]) * _WHOLE).astype(np.int64)
    return units


def _scores(task: Task, sides: _Int64s) -> _Floats:
    first = 0 if task.folds else 1
    members = sides[:, None, :] == np.arange(first, len(task.shares))[:, None]
    # (attempts, sides of validation, classes); exact, since no count comes near 2**53
    found = members.astype(np.float64) @ task.counts.astype(np.float64)
    wanted = np.array(task.shares[first:])[:, None] * task.totals
    scores: _Floats = (np.abs(found - wanted) / wanted).reshape(len(sides), -1).mean(axis=1)
    trainable = (found < task.totals).all(axis=(1, 2))
    enough = (found >= max(1, task.least)) | ((found == 0) & task.folds)
    present = found.any(axis=2).all(axis=1)
    scores[~(trainable & present & enough.all(axis=(1, 2)))] = np.inf
    return scores
