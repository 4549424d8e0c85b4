"""Splits for cross-validation: no author on both sides, every class in every training side, balanced class counts.

Authors are dealt to the sides in many attempts, and the best one is taken. It is a function of labels, authors and
options, not of the order of the rows except for the row numbers themselves. An attempt is a function of its seed, in
integers, so that it gives the same result in any batch of attempts.
"""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from penstock.core.checks import check_integer, check_number
from penstock.core.errors import OptionError
from penstock.core.seeds import check_seed, generator_for
from penstock.files.progress import track_progress

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

_Int64s = NDArray[np.int64]
_Floats = NDArray[np.float64]

_BLOCK = 512  # attempts computed at once
_WHOLE = 1 << 20  # all items of a class, in integer units
_SIZE_WEIGHT = 0.5  # of the size of a side, relative to one class: it decides if classes do not
_WEIGHT = 16  # of a side with all items; smaller sides weigh more
_NAMED = 5  # most classes or authors listed in an error
_COLUMNS = {"classes": ("label", "class", "class_id", "labels", "species"), "authors": ("author", "authors", "group")}
_SEGMENTS = "usable_segments"


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
    least = check_integer("min_val_segments", min_val_segments, at_least=0)
    groups = _Groups.of(labels, authors, segments, _equal_parts(n_splits), least, folds=True)
    score, seed = groups.search(max_attempts, show=show)
    return FoundFolds(_as_folds(groups.side_of_rows(seed), n_splits), score, seed)


def best_grouped_split(
    labels: ArrayLike,
    authors: ArrayLike,
    test_size: float = 0.2,
    *,
    max_attempts: int = 10_000,
    min_test_segments: int = 0,
    segments: ArrayLike | None = None,
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
    fraction = check_number("test_size", test_size, at_least=0.01, at_most=0.99)
    least = check_integer("min_test_segments", min_test_segments, at_least=0)
    groups = _Groups.of(labels, authors, segments, (1 - fraction, fraction), least, folds=False)
    score, seed = groups.search(max_attempts, show=show)
    side = groups.side_of_rows(seed)
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
    groups = _Groups.of(labels, authors, segments, _equal_parts(n_splits), 0, folds=True)
    if not np.isfinite(groups.scores(groups.deal([check_seed(seed)]))[0]):
        raise OptionError(f"Folds must have items, and train every class; seed={seed} does not give such. Use another.")
    return _as_folds(groups.side_of_rows(seed), n_splits)


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
    options |= {"max_attempts": max_attempts, "min_val_segments": min_val_segments}
    return best_grouped_folds(n_splits=n_splits, **_find_columns(df), **options)


def search_best_group_seed(
    df: Any, test_size: float = 0.2, max_attempts: int = 10_000, min_test_segments: int = 0, **options: Any
) -> tuple[_Int64s, _Int64s, float]:
    """Return `(train, test, score)` of `best_grouped_split` for a table as in `search_best_group_seed_kfold`."""
    options |= {"max_attempts": max_attempts, "min_test_segments": min_test_segments}
    return best_grouped_split(test_size=test_size, **_find_columns(df), **options)[:3]


def stratified_folds(labels: ArrayLike, n_splits: int = 4, *, seed: int = 0) -> list[Fold]:
    """Return folds with the classes divided as equally as possible; for items without groups.

    Examples
    --------
    >>> [fold.val.tolist() for fold in stratified_folds([0, 0, 0, 1, 1, 1], n_splits=3)]
    [[2, 3], [0, 4], [1, 5]]
    """
    check_integer("n_splits", n_splits, at_least=2)
    code = _encode_classes(labels)
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
    fraction = check_number("test_size", test_size, at_least=0.01, at_most=0.99)
    code = _encode_classes(labels)
    rng = generator_for(check_seed(seed), "stratified")
    side = np.zeros(len(code), np.int64)
    for number in range(int(code.max()) + 1):
        members = rng.permutation(np.flatnonzero(code == number))
        side[members[: min(max(1, round(fraction * len(members))), len(members) - 1)]] = 1
    return Fold(np.flatnonzero(side == 0), np.flatnonzero(side == 1))


class _Groups(NamedTuple):
    """The groups to deal, the sides to deal them to, and when the result is acceptable."""

    group: _Int64s
    """Number of the group of each row."""

    counts: _Int64s
    """(groups, classes): number of segments of each class in a group."""

    fractions: tuple[float, ...]
    """Fraction of every class that each side should get; they sum to 1."""

    least: int
    """Minimum number of segments of a class in a validation side that has any."""

    folds: bool
    """True: each side is validated once, with all others for training. False: side 0 trains, side 1 tests."""

    rarest: str
    """The classes with the fewest authors, for errors."""

    @classmethod
    def of(
        cls, labels: Any, authors: Any, segments: Any, fractions: tuple[float, ...], least: int, *, folds: bool
    ) -> "_Groups":
        (classes, label), (names, group) = _encode("labels", labels), _encode("authors", authors)
        if len(label) != len(group):
            raise OptionError(
                f"labels and authors must have one entry per row, got {len(label)} labels and {len(group)} authors."
            )
        weights = np.ones(len(label), np.int64) if segments is None else np.asarray(segments)
        if weights.shape != label.shape or weights.dtype.kind not in "iu" or (weights < 1).any():
            raise OptionError("segments must be integers >= 1, one per row.")
        counts = np.zeros((len(names), len(classes)), np.int64)
        np.add.at(counts, (group, label), weights.astype(np.int64))
        n_authors, n_segments = (counts > 0).sum(axis=0), counts.sum(axis=0)
        if len(names) < len(fractions):
            raise OptionError(
                f"There must be at least as many authors as sides, {len(fractions)}, got {len(names)} "
                f"({_join_names(names)}). Use fewer folds, or data of more authors."
            )
        lonely = np.flatnonzero(n_authors < 2)
        if len(lonely):
            owners = "; class ".join(
                f"{classes[one]!r} has 1 author, {names[counts[:, one].argmax()]!r} with {n_segments[one]} segments"
                for one in lonely[:_NAMED]
            )
            more = f"; and {len(lonely) - _NAMED} more classes" if len(lonely) > _NAMED else ""
            raise OptionError(
                "Every class must have at least two authors, since it is not trained while its only one is in "
                f"validation; class {owners}{more}. Leave it out, or add data of a second author."
            )
        rarest = ", ".join(
            f"{classes[one]!r} with {n_authors[one]} authors and {n_segments[one]} segments"
            for one in np.argsort(n_authors, kind="stable")[:_NAMED]
        )
        return cls(group, counts, fractions, least, folds, rarest)

    def search(self, max_attempts: int, *, show: bool) -> tuple[float, int]:
        """Return the best score and its seed, the smallest one if several are as good."""
        check_integer("max_attempts", max_attempts, at_least=1)
        best = (np.inf, 0)
        with track_progress("Searching for folds", max_attempts, "attempts", show=show) as bar:
            for begin in range(0, max_attempts, _BLOCK):
                seeds = range(begin, min(begin + _BLOCK, max_attempts))
                scores = self.scores(self.deal(seeds))
                best = min(best, (float(scores.min()), seeds[int(scores.argmin())]))
                bar.advance(len(seeds))
                if best[0] == 0:
                    break  # none is better, and later ones have larger seeds
        if not np.isfinite(best[0]):
            sides = " and ".join(f"{fraction:g}" for fraction in self.fractions)
            raise OptionError(
                "Every training side must have every class"
                f"{f', and validation at least {self.least} segments of it' if self.least else ''}, but none of "
                f"{max_attempts:,} attempts gives such "
                f"{f'{len(self.fractions)} folds' if self.folds else f'sides of {sides}'} of whole authors. Classes "
                f"with the fewest authors: {self.rarest}. Use fewer folds, a smaller minimum, or more attempts."
            )
        return best

    def side_of_rows(self, seed: int) -> _Int64s:
        side: _Int64s = self.deal([seed])[0][self.group]
        return side

    def deal(self, seeds: Any) -> _Int64s:
        """Return (attempts, groups), the side of each group, of the attempts with these seeds.

        One group after the other goes to the side that has the least of its classes, relative to the wanted fraction.
        This minimizes the growth of the sum of squares of what the sides have of each class, over what they should
        have. Large groups come first, since small ones even out what they leave. Randomness makes attempts differ, in
        the sequence of the groups and in the choice of sides: much in a few attempts, little in most of them, none for
        seed 0.
        """
        n_groups, n_sides, many = len(self.counts), len(self.fractions), len(seeds)
        # units: (groups, classes + 1): the fraction of each class in a group, and a column for its size
        sizes = self.counts.sum(axis=1, keepdims=True)
        parts = np.hstack([self.counts / self.counts.sum(axis=0), _SIZE_WEIGHT * sizes / sizes.sum()])
        units: _Int64s = np.rint(parts * _WHOLE).astype(np.int64)
        weights = np.array([round(_WEIGHT / fraction) for fraction in self.fractions], np.int64)
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

    def scores(self, sides: _Int64s) -> _Floats:
        """Return the mean relative deviation of the validated class counts; infinite if not acceptable."""
        first, totals = 0 if self.folds else 1, self.counts.sum(axis=0)
        members = sides[:, None, :] == np.arange(first, len(self.fractions))[:, None]
        # (attempts, validation sides, classes); exact, since no count comes near 2**53
        found = members.astype(np.float64) @ self.counts.astype(np.float64)
        wanted = np.array(self.fractions[first:])[:, None] * totals
        scores: _Floats = (np.abs(found - wanted) / wanted).reshape(len(sides), -1).mean(axis=1)
        trainable = (found < totals).all(axis=(1, 2))
        enough = (found >= max(1, self.least)) | ((found == 0) & self.folds)
        present = found.any(axis=2).all(axis=1)
        scores[~(trainable & present & enough.all(axis=(1, 2)))] = np.inf
        return scores


def _as_folds(side: _Int64s, n_splits: int) -> list[Fold]:
    return [Fold(np.flatnonzero(side != number), np.flatnonzero(side == number)) for number in range(n_splits)]


def _equal_parts(n_splits: int) -> tuple[float, ...]:
    return (1 / check_integer("n_splits", n_splits, at_least=2),) * n_splits


def _find_columns(df: Any) -> dict[str, Any]:
    """Return the classes, the authors and, if there are any, the segments of the rows of a table."""
    names = [str(name) for name in (df.columns if hasattr(df, "columns") else df)]
    found = []
    for what, known in _COLUMNS.items():
        here = [name for name in known if name in names]
        if len(here) != 1:
            raise OptionError(
                f"The table must have exactly one column for {what}, {' or '.join(known)}, got {_join_names(names)}."
            )
        found.append(df[here[0]])
    return {"labels": found[0], "authors": found[1], "segments": df[_SEGMENTS] if _SEGMENTS in names else None}


def _encode(name: str, values: ArrayLike) -> tuple[list[str], _Int64s]:
    """Return the unique names, ascending, and the number of each row's name."""
    given = np.asarray(values)
    if given.ndim != 1 or not given.size:
        raise OptionError(f"{name} must be a list with one entry per row, got shape {given.shape}.")
    plain = given.tolist()
    if {type(value) for value in plain} not in ({str}, {int}):
        row = next((row for row, value in enumerate(plain) if type(value) not in (str, int)), 0)
        raise OptionError(f"{name} must be all text or all integers, got {plain[row]!r} in row {row}.")
    names, code = np.unique(np.array(plain), return_inverse=True)
    return [str(one) for one in names], code.astype(np.int64)


def _encode_classes(labels: ArrayLike) -> _Int64s:
    names, code = _encode("labels", labels)
    few = np.flatnonzero(np.bincount(code) < 2)
    if len(few):
        raise OptionError(
            "Every class must have at least two items, one for each side, but "
            f"{_join_names([names[number] for number in few])} has 1. Leave the class out, or add data."
        )
    return code


def _join_names(names: list[str]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(map(repr, names[:_NAMED])) + more
