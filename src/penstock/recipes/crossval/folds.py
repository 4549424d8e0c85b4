"""Splits for cross-validation: no author on both sides, every class in every training side, balanced class counts.

Authors are dealt to the sides in many ways, and the best result is taken. It is a function of labels, authors and
options: not of the number of processes, nor of the order of the rows except for the row numbers themselves.
"""

import logging
import time
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from penstock.convert.engines import LocalEngine
from penstock.core.checks import check_integer
from penstock.core.errors import OptionError
from penstock.core.seeds import check_seed, generator_for
from penstock.files.machine import this_machine
from penstock.observe.progress import track_progress
from penstock.recipes.crossval.attempts import Attempts, Task
from penstock.recipes.crossval.group_table import Table, check_members, encode, find_columns

__all__ = [
    "Fold",
    "FoundFolds",
    "FoundSplit",
    "best_grouped_folds",
    "best_grouped_split",
    "grouped_folds",
    "search_best_group_seed",
    "search_best_group_seed_kfold",
    "stratified_folds",
    "stratified_split",
]

_LOG = logging.getLogger("penstock")
_Int64s = NDArray[np.int64]

_BLOCK = 512  # attempts computed at once
_PAYS_SECONDS = 2.0  # processes are worth starting for more work than this


class Fold(NamedTuple):
    """Row numbers, ascending: `train, val = fold`."""

    train: _Int64s
    val: _Int64s


class FoundFolds(NamedTuple):
    """The best folds, their score (0 is ideal), and the seed of the attempt that found them."""

    folds: list[Fold]
    score: float
    seed: int


class FoundSplit(NamedTuple):
    """The best split in two, its score (0 is ideal), and the seed of the attempt that found it."""

    train: _Int64s
    test: _Int64s
    score: float
    seed: int


def best_grouped_folds(
    labels: ArrayLike,
    authors: ArrayLike,
    n_splits: int = 4,
    *,
    max_attempts: int = 30_000,
    min_val_segments: int = 0,
    segments: ArrayLike | None = None,
    workers: int | None = None,
    show: bool = True,
) -> FoundFolds:
    """Return folds with no author on both sides and every class in every training side: the best of many attempts.

    The score is the mean over folds and classes of |segments in validation - wanted| / wanted, where `1 / n_splits` of
    each class is wanted.

    Parameters
    ----------
    labels, authors
        One of each per row.
    min_val_segments
        Minimum number of segments of a class in a validation side that has the class.
    segments
        Number of segments of each row; None for one each.
    workers
        Processes for the search, if it takes seconds; None for the number of available CPUs. The result does not
        depend on it.

    Raises
    ------
    OptionError
        There is no such split, or none was found.

    Examples
    --------
    >>> labels, authors = ["owl", "owl", "lark", "lark"] * 2, ["ann", "bob", "ann", "bob", "cy", "dee", "cy", "dee"]
    >>> found = best_grouped_folds(labels, authors, n_splits=2, max_attempts=10)
    >>> [fold.val.tolist() for fold in found.folds], found.score
    ([[0, 2, 4, 6], [1, 3, 5, 7]], 0.0)
    """
    check_integer("n_splits", n_splits, at_least=2)
    table = Table.of(labels, authors, segments)
    table.check(n_splits)
    least = check_integer("min_val_segments", min_val_segments, at_least=0)
    task = Task(table.counts, (1 / n_splits,) * n_splits, least, folds=True)
    score, seed = _find_best(table, task, max_attempts=max_attempts, workers=workers, show=show)
    sides = Attempts.of(task, [seed]).sides[0]
    return FoundFolds(_as_folds(sides[table.group], n_splits), score, seed)


def best_grouped_split(
    labels: ArrayLike,
    authors: ArrayLike,
    test_size: float = 0.2,
    *,
    max_attempts: int = 10_000,
    min_test_segments: int = 0,
    segments: ArrayLike | None = None,
    workers: int | None = None,
    show: bool = True,
) -> FoundSplit:
    """Return a split with no author on both sides and every class on both: the best of many attempts.

    Parameters that are not described here are those of `best_grouped_folds`.

    Parameters
    ----------
    test_size
        Fraction of each class for the test side, from 0.01 to 0.99.
    min_test_segments
        Minimum number of segments of each class on the test side.

    Examples
    --------
    >>> labels, authors = ["owl", "lark"] * 4, ["ann", "ann", "bob", "bob", "cy", "cy", "dee", "dee"]
    >>> found = best_grouped_split(labels, authors, test_size=0.25, max_attempts=10)
    >>> found.train.tolist(), found.test.tolist(), found.score
    ([0, 1, 2, 3, 6, 7], [4, 5], 0.0)
    """
    fraction = _check_fraction(test_size)
    table = Table.of(labels, authors, segments)
    table.check(2)
    least = check_integer("min_test_segments", min_test_segments, at_least=0)
    task = Task(table.counts, (1 - fraction, fraction), least, folds=False)
    score, seed = _find_best(table, task, max_attempts=max_attempts, workers=workers, show=show)
    side = Attempts.of(task, [seed]).sides[0][table.group]
    return FoundSplit(np.flatnonzero(side == 0), np.flatnonzero(side == 1), score, seed)


def grouped_folds(
    labels: ArrayLike, authors: ArrayLike, n_splits: int = 4, *, seed: int = 0, segments: ArrayLike | None = None
) -> list[Fold]:
    """Return the folds of one attempt: the result of `best_grouped_folds`, from its seed alone.

    Examples
    --------
    >>> labels, authors = ["owl", "lark"] * 4, ["ann", "ann", "bob", "bob", "cy", "cy", "dee", "dee"]
    >>> [fold.val.tolist() for fold in grouped_folds(labels, authors, n_splits=2)]
    [[0, 1, 4, 5], [2, 3, 6, 7]]
    """
    check_integer("n_splits", n_splits, at_least=2)
    table = Table.of(labels, authors, segments)
    table.check(n_splits)
    task = Task(table.counts, (1 / n_splits,) * n_splits, 0, folds=True)
    attempt = Attempts.of(task, [check_seed(seed)])
    if not np.isfinite(attempt.scores[0]):
        raise OptionError(f"Folds must have items, and train every class; seed={seed} does not give such. Use another.")
    return _as_folds(attempt.sides[0][table.group], n_splits)


def search_best_group_seed_kfold(
    df: Any, max_attempts: int = 30_000, min_val_segments: int = 0, n_splits: int = 4, **options: Any
) -> FoundFolds:
    """Return `(folds, score, seed)` for a table: `best_grouped_folds`, with its other options.

    Parameters
    ----------
    df
        A pandas DataFrame or a mapping of arrays, with columns for classes ("label", "class" or "class_id"), authors
        ("author"), and optionally the number of segments of a row ("usable_segments"). Folds are row numbers, for
        `df.iloc` and for datasets alike.
    """
    labels, authors, segments = find_columns(df)
    return best_grouped_folds(
        labels,
        authors,
        n_splits,
        max_attempts=max_attempts,
        min_val_segments=min_val_segments,
        segments=segments,
        **options,
    )


def search_best_group_seed(
    df: Any, test_size: float = 0.2, max_attempts: int = 10_000, min_test_segments: int = 0, **options: Any
) -> tuple[_Int64s, _Int64s, float]:
    """Return `(train, test, score)` of `best_grouped_split` for a table as in `search_best_group_seed_kfold`."""
    labels, authors, segments = find_columns(df)
    found = best_grouped_split(
        labels,
        authors,
        test_size,
        max_attempts=max_attempts,
        min_test_segments=min_test_segments,
        segments=segments,
        **options,
    )
    return found.train, found.test, found.score


def stratified_folds(labels: ArrayLike, n_splits: int = 4, *, seed: int = 0) -> list[Fold]:
    """Return folds with the classes divided as equally as possible; for items without groups.

    Examples
    --------
    >>> [fold.val.tolist() for fold in stratified_folds([0, 0, 0, 1, 1, 1], n_splits=3)]
    [[2, 3], [0, 4], [1, 5]]
    """
    check_integer("n_splits", n_splits, at_least=2)
    names, code = encode("labels", labels)
    check_members(names, code)
    if len(code) < n_splits:
        raise OptionError(f"n_splits must be at most the number of items, {len(code)}, got {n_splits}.")
    shuffled = generator_for(check_seed(seed), "stratified").permutation(len(code))
    # By class, and at random within it; then dealt in turn, each class continuing where the one before ended.
    by_class = shuffled[np.argsort(code[shuffled], kind="stable")]
    side = np.empty(len(code), np.int64)
    side[by_class] = np.arange(len(code)) % n_splits
    return _as_folds(side, n_splits)


def stratified_split(labels: ArrayLike, test_size: float = 0.2, *, seed: int = 0) -> Fold:
    """Return a split with a fraction of each class on the second side, and at least one item of each on both.

    Examples
    --------
    >>> train, test = stratified_split([0, 0, 0, 0, 1, 1, 1, 1], test_size=0.25)
    >>> test.tolist()
    [2, 4]
    """
    fraction = _check_fraction(test_size)
    names, code = encode("labels", labels)
    check_members(names, code)
    rng = generator_for(check_seed(seed), "stratified")
    test: list[int] = []
    for number in range(len(names)):
        members = rng.permutation(np.flatnonzero(code == number))
        test += members[: min(max(1, round(fraction * len(members))), len(members) - 1)].tolist()
    return Fold(np.setdiff1d(np.arange(len(code)), test), np.sort(np.array(test, np.int64)))


def _find_best(table: Table, task: Task, *, max_attempts: int, workers: int | None, show: bool) -> tuple[float, int]:
    """Return the best score and its seed, the smallest one if several are as good."""
    check_integer("max_attempts", max_attempts, at_least=1)
    if workers is not None:
        check_integer("workers", workers, at_least=1)
    score, seed = _search(task, max_attempts, workers, show=show)
    if not np.isfinite(score):
        sides = (
            f"{len(task.fractions)} folds"
            if task.folds
            else f"sides of {task.fractions[0]:g} and {task.fractions[1]:g}"
        )
        raise OptionError(
            "Every training side must have every class"
            f"{f', and validation at least {task.least} segments of it' if task.least else ''}, but none of "
            f"{max_attempts:,} attempts gives such {sides} of whole authors. Classes with the fewest authors: "
            f"{table.rarest()}. Use fewer folds, a smaller minimum, or more attempts."
        )
    return score, seed


def _search(task: Task, max_attempts: int, workers: int | None, *, show: bool) -> tuple[float, int]:
    blocks = [range(begin, min(begin + _BLOCK, max_attempts)) for begin in range(0, max_attempts, _BLOCK)]
    with track_progress("Searching for folds", max_attempts, "attempts", show=show) as bar:
        began = time.monotonic()
        best = _best_attempt(task, blocks[0])
        bar.advance(len(blocks[0]))
        if best[0] == 0:
            return best  # none is better, and later ones have larger seeds
        left_seconds = (time.monotonic() - began) * (len(blocks) - 1)
        many = 1 if left_seconds < _PAYS_SECONDS else (workers or this_machine().cpus)
        for number, found in LocalEngine(many).run(partial(_best_attempt, task), blocks[1:]):
            bar.advance(len(blocks[1 + number]))
            best = min(best, found)
    return best


def _best_attempt(task: Task, seeds: range) -> tuple[float, int]:
    scores = Attempts.of(task, seeds).scores
    return float(scores.min()), seeds[int(scores.argmin())]


def _as_folds(side: _Int64s, n_splits: int) -> list[Fold]:
    return [Fold(np.flatnonzero(side != number), np.flatnonzero(side == number)) for number in range(n_splits)]


def _check_fraction(test_size: Any) -> float:
    if isinstance(test_size, bool) or not isinstance(test_size, int | float) or not 0.01 <= test_size <= 0.99:
        raise OptionError(f"test_size must be a number from 0.01 to 0.99, got {test_size!r}.")
    return float(test_size)
