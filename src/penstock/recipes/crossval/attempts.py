"""Deal groups of items to folds or sides: many attempts at once, each a function of its seed.

Pure, and in integers, so that an attempt gives the same result in any process and in any batch of attempts.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from penstock.core.seeds import generator_for

__all__ = ["Attempts", "Task"]

_Int64s = NDArray[np.int64]
_Floats = NDArray[np.float64]

_WHOLE = 1 << 20  # all items of a class, in integer units
_SIZE_WEIGHT = 0.5  # of the size of a side, relative to one class: it decides if classes do not
_WEIGHT = 16  # of a side with all items; smaller sides weigh more


@dataclass(frozen=True, slots=True)
class Task:
    """The groups to deal, the sides to deal them to, and when the result is acceptable."""

    counts: _Int64s
    """(groups, classes): number of segments of each class in a group."""

    fractions: tuple[float, ...]
    """Fraction of every class that each side should get; they sum to 1."""

    least: int
    """Minimum number of segments of a class in a validation side that has any."""

    folds: bool
    """True: each side is validated once, with all others for training. False: side 0 trains, side 1 tests."""

    @property
    def totals(self) -> _Int64s:
        """Number of segments of each class."""
        total: _Int64s = self.counts.sum(axis=0)
        return total


@dataclass(frozen=True, slots=True)
class Attempts:
    """Results of dealing, one for each seed."""

    sides: _Int64s
    """(attempts, groups): the side of each group."""

    scores: _Floats
    """Mean relative deviation of the class counts in validation from the wanted ones; infinite if not acceptable."""

    @classmethod
    def of(cls, task: Task, seeds: Sequence[int]) -> "Attempts":
        """Return the attempts with these seeds."""
        sides = _deal(task, seeds)
        return cls(sides, _scores(task, sides))


def _deal(task: Task, seeds: Sequence[int]) -> _Int64s:
    """Give one group after the other to the side that has the least of its classes, relative to the wanted fraction.

    This minimizes the growth of the sum of squares of what the sides have of each class, over what they should have.
    Large groups come first, since small ones even out what they leave. Randomness makes attempts differ, in the
    sequence of the groups and in the choice of sides: much in a few attempts, little in most of them, none for seed 0.
    """
    n_groups, n_sides, many = len(task.counts), len(task.fractions), len(seeds)
    units = _units(task)
    weights = np.array([round(_WEIGHT / fraction) for fraction in task.fractions], np.int64)
    squares: _Int64s = (units * units).sum(axis=1)
    # random: (attempts, groups, one for the sequence and one for each side)
    random = np.empty((many, n_groups, 1 + n_sides))
    heat = np.empty(many)
    for number, seed in enumerate(seeds):
        rng = generator_for(seed, "folds")
        heat[number] = rng.random() ** 4 if seed else 0.0
        rng.random(out=random[number])
    rank = np.empty(n_groups)
    rank[np.argsort(-squares, kind="stable")] = np.arange(n_groups)
    turns = np.argsort(rank + heat[:, None] * n_groups * random[:, :, 0], axis=1, kind="stable")
    # The sum of a group times _WHOLE: about the cost of its classes on a full side.
    spread = heat[:, None] * (2.0 * _WEIGHT * _WHOLE) * units.sum(axis=1)
    have = np.zeros((many, n_sides, units.shape[1]), np.int64)
    sides = np.empty((many, n_groups), np.int64)
    rows = np.arange(many)
    for group in turns.T:
        new = units[group]
        cost = weights * (2 * np.einsum("akc,ac->ak", have, new) + squares[group, None])
        cost += (spread[rows, group, None] * random[rows, group, 1:]).astype(np.int64)
        side = cost.argmin(axis=1)
        have[rows, side] += new
        sides[rows, group] = side
    return sides


def _units(task: Task) -> _Int64s:
    """Return (groups, classes + 1): the fraction of each class in a group, and a column for its size."""
    sizes = task.counts.sum(axis=1, keepdims=True)
    fractions = task.counts / task.totals
    units: _Int64s = np.rint(np.hstack([fractions, _SIZE_WEIGHT * sizes / sizes.sum()]) * _WHOLE).astype(np.int64)
    return units


def _scores(task: Task, sides: _Int64s) -> _Floats:
    first = 0 if task.folds else 1
    members = sides[:, None, :] == np.arange(first, len(task.fractions))[:, None]
    # (attempts, validation sides, classes); exact, since no count comes near 2**53
    found = members.astype(np.float64) @ task.counts.astype(np.float64)
    wanted = np.array(task.fractions[first:])[:, None] * task.totals
    scores: _Floats = (np.abs(found - wanted) / wanted).reshape(len(sides), -1).mean(axis=1)
    trainable = (found < task.totals).all(axis=(1, 2))
    enough = (found >= max(1, task.least)) | ((found == 0) & task.folds)
    present = found.any(axis=2).all(axis=1)
    scores[~(trainable & present & enough.all(axis=(1, 2)))] = np.inf
    return scores
