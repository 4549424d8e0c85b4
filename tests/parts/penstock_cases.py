"""Fewer cases that still say enough: random ones for laws with expensive cases, and pairs instead of full products."""

import itertools
from collections.abc import Sequence
from typing import Any

from hypothesis import settings

__all__ = ["few_cases", "pairwise"]

few_cases = settings(max_examples=max(5, settings.default.max_examples // 4))
"""A quarter of what the profile in tests/conftest.py has."""


def pairwise(*axes: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Return few cases, one value of each axis, such that any two values of two axes come together in one of them.

    >>> len(pairwise("abcd", "xyz", (1, 8, 50)))
    12
    """
    cases = list(itertools.product(*(range(len(axis)) for axis in axes)))
    left = {pair for case in cases for pair in itertools.combinations(enumerate(case), 2)}
    chosen = []
    while left:
        best = max(cases, key=lambda case: len(left.intersection(itertools.combinations(enumerate(case), 2))))
        left.difference_update(itertools.combinations(enumerate(best), 2))
        chosen.append(best)
    return [tuple(axis[number] for axis, number in zip(axes, case, strict=True)) for case in sorted(chosen)]
