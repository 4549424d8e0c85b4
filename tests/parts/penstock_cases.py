"""Fewer cases that still say enough: of laws, of products of parameters, and of tests whose cases take seconds."""

import itertools
import os
from collections.abc import Sequence
from typing import Any, TypeVar

import pytest
from hypothesis import HealthCheck, settings

__all__ = ["few_cases", "pairwise", "some_cases", "spread_cases", "spread_evenly"]

Case = TypeVar("Case")

# None of the profiles judges by the clock: the machine may be busy.
_UNTIMED = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow], "print_blob": True}
_CASES = {"fast": 15, "all": 60, "soak": 2000}

for _name, _count in _CASES.items():
    settings.register_profile(_name, max_examples=_count, **_UNTIMED)
settings.load_profile(os.environ.get("PENSTOCK_TESTS", "fast"))

few_cases = settings(max_examples=max(5, settings.default.max_examples // 4))
"""A quarter of the cases of the profile."""


def some_cases(count: int) -> pytest.MarkDecorator:
    """Mark a test with parameters: `count` of its cases are run, evenly spread; all with PENSTOCK_TESTS=soak."""
    return pytest.mark.some_cases(count)


def spread_cases(items: list[pytest.Item]) -> list[pytest.Item]:
    """Return the tests that are run, if those with the mark `some_cases` are run on some of their cases."""
    groups: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("some_cases") is not None:
            groups.setdefault(item.nodeid.split("[")[0], []).append(item)
    left_out: set[pytest.Item] = set()
    for cases in groups.values():
        mark = cases[0].get_closest_marker("some_cases")
        assert mark is not None, "all of them have it"
        left_out.update(set(cases) - set(spread_evenly(cases, mark.args[0])))
    return [item for item in items if item not in left_out]


def spread_evenly(cases: Sequence[Case], count: int) -> list[Case]:
    """Return `count` of the cases, or all if there are fewer.

    >>> spread_evenly("abcdef", 2)
    ['b', 'e']
    """
    count = min(count, len(cases))
    return [cases[(2 * number + 1) * len(cases) // (2 * count)] for number in range(count)]


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
