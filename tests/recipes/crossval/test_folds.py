"""Folds keep authors apart and classes trainable, and are the best that were tried, whoever tried them."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from penstock_cases import few_cases

from penstock.core.errors import OptionError
from penstock.recipes.crossval.folds import (
    _Groups,
    best_grouped_folds,
    best_grouped_split,
    grouped_folds,
    search_best_group_seed,
    search_best_group_seed_kfold,
    stratified_folds,
    stratified_split,
)


def _table(rows: int, classes: int, authors: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Return labels and authors; every author has two classes, so that classes and authors are correlated."""
    rng = np.random.default_rng(seed)
    author = rng.integers(0, authors, rows)
    return (author + rng.integers(0, 2, rows)) % classes, author


def _groups(counts: np.ndarray, fractions: tuple[float, ...], *, folds: bool = True) -> _Groups:
    return _Groups(np.arange(len(counts)), counts, fractions, 0, folds, "")


def _score(labels: np.ndarray, sides: list[np.ndarray], shares: list[float]) -> float:
    """Return the score by its definition: a loop over sides and classes."""
    found = []
    for rows, share in zip(sides, shares, strict=True):
        for name in np.unique(labels):
            wanted = share * np.sum(labels == name)
            found.append(abs(np.sum(labels[rows] == name) - wanted) / wanted)
    return float(np.mean(found))


def _is_valid(labels: np.ndarray, authors: np.ndarray, side_of: dict[int, int], n_splits: int) -> bool:
    side = np.array([side_of[author] for author in authors])
    return all((side == number).any() and set(labels[side != number]) == set(labels) for number in range(n_splits))


tables = st.integers(1, 24).flatmap(
    lambda rows: st.tuples(
        st.lists(st.integers(0, 3), min_size=rows, max_size=rows),
        st.lists(st.integers(10, 15), min_size=rows, max_size=rows),
    )
)


@given(table=tables, n_splits=st.integers(2, 4))
def test_folds_keep_authors_apart_and_classes_trainable_whenever_possible(
    table: tuple[list[int], list[int]], n_splits: int
) -> None:
    labels, authors = map(np.array, table)
    names = np.unique(authors)
    possible = any(
        _is_valid(labels, authors, dict(zip(names.tolist(), sides, strict=True)), n_splits)
        for sides in itertools.product(range(n_splits), repeat=len(names))
    )
    if not possible:
        with pytest.raises(OptionError):
            best_grouped_folds(labels, authors, n_splits, max_attempts=50)
        return
    found = best_grouped_folds(labels, authors, n_splits, max_attempts=1024)
    assert len(found.folds) == n_splits
    for train, val in found.folds:
        assert len(val) > 0
        assert not set(authors[train]) & set(authors[val])
        assert set(labels[train]) == set(labels)
        assert sorted([*train, *val]) == list(range(len(labels)))
    assert sorted(np.concatenate([val for _, val in found.folds])) == list(range(len(labels)))
    assert found.score == pytest.approx(_score(labels, [val for _, val in found.folds], [1 / n_splits] * n_splits))
    again = grouped_folds(labels, authors, n_splits, seed=found.seed)
    for one, other in zip(found.folds, again, strict=True):
        assert np.array_equal(one.train, other.train)
        assert np.array_equal(one.val, other.val)


@given(table=tables, share=st.floats(0.1, 0.6))
def test_a_split_in_two_has_every_class_on_both_sides(table: tuple[list[int], list[int]], share: float) -> None:
    labels, authors = map(np.array, table)
    try:
        found = best_grouped_split(labels, authors, share, max_attempts=256)
    except OptionError:
        return
    assert sorted([*found.train, *found.test]) == list(range(len(labels)))
    assert not set(authors[found.train]) & set(authors[found.test])
    assert set(labels[found.train]) == set(labels[found.test]) == set(labels)
    assert found.score == pytest.approx(_score(labels, [found.test], [share]))


def test_the_best_attempt_is_taken_and_attempts_do_not_depend_on_each_other() -> None:
    labels, authors = _table(300, 5, 20)
    counts = np.zeros((20, 5), np.int64)
    np.add.at(counts, (authors, labels), 1)
    groups = _groups(counts, (0.25,) * 4)
    alone = np.concatenate([groups.deal([seed]) for seed in range(600)])
    together = groups.deal(range(600))
    assert np.array_equal(together, alone)
    scores = groups.scores(together)
    assert np.array_equal(scores, np.concatenate([groups.scores(sides[None]) for sides in alone]))
    found = best_grouped_folds(labels, authors, 4, max_attempts=600)
    assert (found.score, found.seed) == (scores.min(), scores.argmin())
    assert len(np.unique(together, axis=0)) > 100  # attempts differ


def test_an_empty_fold_or_an_untrained_class_has_an_infinite_score() -> None:
    counts = np.array([[3, 0], [3, 2], [3, 2], [3, 0]])
    sides = np.array([[0, 0, 1, 1], [0, 1, 2, 0], [0, 1, 1, 2], [0, 0, 1, 0]])
    two = _groups(counts, (0.5, 0.5)).scores(sides[[0, 3]])
    three = _groups(counts, (1 / 3,) * 3).scores(sides)
    # Of the first class, 6 of 12 and 9 of 12; of the second, 2 of 4 each. Of three folds: 6, 3, 3 and 0, 2, 2.
    assert two.tolist() == pytest.approx([0, (0.5 + 0.5) / 4])
    assert np.isinf(three).tolist() == [True, False, True, True]
    assert three[1] == pytest.approx((0.5 + 0.25 + 0.25 + 1 + 0.5 + 0.5) / 6)
    assert np.isinf(_groups(counts, (0.5, 0.5), folds=False).scores(np.array([[0, 0, 0, 1]])))  # none of a class


def test_folds_are_better_than_random_ones() -> None:
    labels, authors = _table(2000, 12, 60)
    counts = np.zeros((60, 12), np.int64)
    np.add.at(counts, (authors, labels), 1)
    rng = np.random.default_rng(0)
    tries = [rng.integers(0, 4, 60)[authors] for _ in range(500)]
    chance = min(_score(labels, [np.flatnonzero(side == fold) for fold in range(4)], [0.25] * 4) for side in tries)
    assert best_grouped_folds(labels, authors, 4, max_attempts=500).score < 0.5 * chance


@given(seed=st.integers(0, 10**6))
@few_cases
def test_the_order_of_the_rows_moves_no_author_to_another_fold(seed: int) -> None:
    labels, authors = _table(80, 4, 9)
    moved = np.random.default_rng(seed).permutation(80)
    plain = best_grouped_folds(labels, authors, 3, max_attempts=40)
    other = best_grouped_folds(labels[moved], authors[moved], 3, max_attempts=40)
    assert [set(authors[fold.val]) for fold in plain.folds] == [set(authors[moved][fold.val]) for fold in other.folds]


def test_a_validated_class_has_the_minimum_of_segments() -> None:
    labels, authors = _table(200, 5, 12)
    found = best_grouped_folds(labels, authors, 4, max_attempts=2000, min_val_segments=6)
    counts = [np.bincount(labels[fold.val], minlength=5) for fold in found.folds]
    assert all(((count == 0) | (count >= 6)).all() for count in counts)
    train, test, _ = search_best_group_seed({"class": labels, "author": authors}, 0.3, 2000, 7)
    assert (np.bincount(labels[test], minlength=5) >= 7).all()
    assert not set(authors[train]) & set(authors[test])
    with pytest.raises(OptionError, match=r"at least 100 segments of it, but none of 50 attempts gives such 4 folds"):
        best_grouped_folds(labels, authors, 4, max_attempts=50, min_val_segments=100)


def test_rows_may_stand_for_several_segments() -> None:
    labels, authors = ["a"] * 4, ["w", "x", "y", "z"]
    found = best_grouped_folds(labels, authors, 2, segments=[3, 1, 1, 1], max_attempts=20)
    assert sorted(fold.val.tolist() for fold in found.folds) == [[0], [1, 2, 3]]
    assert found.score == 0
    with pytest.raises(OptionError, match="segments must be integers >= 1, one per row"):
        best_grouped_folds(labels, authors, 2, segments=[3, 1, 0, 1])


def test_tables_of_pandas_and_plain_mappings_give_the_same() -> None:
    pandas = pytest.importorskip("pandas")
    labels, authors = _table(120, 3, 9)
    columns = {
        "class_id": [f"species {label}" for label in labels],
        "author": [f"author {author}" for author in authors],
        "usable_segments": np.arange(120) % 3 + 1,
    }
    plain = search_best_group_seed_kfold(columns, 100, 0, 3)
    framed = search_best_group_seed_kfold(pandas.DataFrame(columns, index=range(500, 620)), 100, 0, 3)
    folds, score, seed = plain
    assert (score, seed) == (framed.score, framed.seed)
    for one, other in zip(folds, framed.folds, strict=True):
        assert np.array_equal(one.val, other.val)
        assert max(one.val) < 120  # numbers of rows, not of the index
    weights = columns["usable_segments"]
    assert score == pytest.approx(
        _score(np.repeat(labels, weights), [np.flatnonzero(np.repeat(np.isin(np.arange(120), fold.val), weights))
                                            for fold in folds], [1 / 3] * 3)
    )  # fmt: skip
    with pytest.raises(OptionError, match=r"exactly one column for classes, .*got 'species_name', 'author'"):
        search_best_group_seed_kfold({"species_name": labels, "author": authors})


def test_impossible_splits_are_refused_with_names_and_counts() -> None:
    with pytest.raises(OptionError, match=r"class 'owl' has 1 author, 'ann' with 2 segments"):
        best_grouped_folds(["owl", "owl", "lark", "lark"], ["ann", "ann", "ann", "bob"], 2)
    with pytest.raises(OptionError, match=r"as many authors as sides, 3, got 2 \('1', '2'\)"):
        best_grouped_folds([0, 0, 1, 1], [1, 2, 1, 2], 3)
    # Each pair of three authors has a class of its own: one of two sides must hold both authors of a class.
    with pytest.raises(
        OptionError, match=r"none of 64 attempts gives such 2 folds .* fewest authors: '0' with 2 authors"
    ):
        best_grouped_folds([0, 0, 1, 1, 2, 2], [1, 2, 2, 3, 3, 1], 2, max_attempts=64)
    with pytest.raises(OptionError, match="authors must be all text or all integers, got None in row 1"):
        best_grouped_folds([0, 0], ["ann", None], 2)
    with pytest.raises(OptionError, match="got 3 labels and 2 authors"):
        best_grouped_folds([0, 0, 1], ["ann", "bob"], 2)
    for wrong in ({"n_splits": 1}, {"max_attempts": 0}, {"min_val_segments": -1}):
        with pytest.raises(OptionError, match=f"{next(iter(wrong))} must be an integer"):
            best_grouped_folds([0, 0], [1, 2], **{"n_splits": 2, **wrong})
    with pytest.raises(OptionError, match=r"test_size must be a finite number >= 0\.01 and <= 0\.99, got 1\.5"):
        best_grouped_split([0, 0], [1, 2], 1.5)


@given(labels=st.lists(st.integers(0, 3), min_size=2, max_size=40), n_splits=st.integers(2, 5), seed=st.integers(0, 9))
def test_stratified_folds_divide_each_class_evenly(labels: list[int], n_splits: int, seed: int) -> None:
    classes = np.array(labels)
    if np.unique(classes, return_counts=True)[1].min() < 2 or len(labels) < n_splits:
        with pytest.raises(OptionError):
            stratified_folds(labels, n_splits, seed=seed)
        return
    found = stratified_folds(labels, n_splits, seed=seed)
    assert sorted(np.concatenate([val for _, val in found])) == list(range(len(labels)))
    for name in set(labels):
        counts = [int(np.sum(classes[val] == name)) for _, val in found]
        assert max(counts) - min(counts) <= 1
    for train, val in found:
        assert sorted([*train, *val]) == list(range(len(labels)))
        assert set(classes[train]) == set(labels)
    train, test = stratified_split(labels, 0.3, seed=seed)
    assert sorted([*train, *test]) == list(range(len(labels)))
    for name in set(labels):
        total, there = int(np.sum(classes == name)), int(np.sum(classes[test] == name))
        assert there == min(max(1, round(0.3 * total)), total - 1)
