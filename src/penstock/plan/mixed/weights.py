"""Weights as exact fractions: integers in proportion to them, whose sum is the period of a schedule."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from penstock.core.errors import PlanError

__all__ = ["MAX_PERIOD", "count_weights"]

MAX_PERIOD = 1 << 15
"""Largest common denominator of weights: the schedule of a period is made at every start, in some 20 ms."""

_CANDIDATES = 1 << 19  # numbers that are compared to find the best denominator: some 20 ms
_EXACT = 1e-12  # relative error of weights that were given as fractions and went through floating point


def count_weights(weights: Sequence[float]) -> tuple[int, ...]:
    """Return integers >= 1 in proportion to weights, with a sum of at most `MAX_PERIOD`.

    They are exact if there are such integers; otherwise those with the smallest relative error.

    Examples
    --------
    >>> count_weights([0.7, 0.2, 0.1]), count_weights([3, 1]), count_weights([1e-9, 1])
    ((7, 2, 1), (3, 1), (1, 32767))
    """
    given = np.asarray(weights, np.float64)
    if len(given) > MAX_PERIOD:
        raise PlanError(f"A mixture must have at most {MAX_PERIOD:,} sources, got {len(given):,}.")
    fractions = given / given.sum()
    last = min(MAX_PERIOD, max(1, _CANDIDATES // len(given)))
    best, least = _round_up(fractions), np.inf
    for start in range(1, last + 1, 1024):
        periods = np.arange(start, min(start + 1024, last + 1))
        # rows: (periods, sources)
        counts = np.rint(fractions * periods[:, None])
        errors = np.abs(counts / periods[:, None] / fractions - 1).max(axis=1)
        errors[(counts.sum(axis=1) != periods) | (counts.min(axis=1) < 1)] = np.inf
        row = int(np.argmax(errors <= _EXACT)) if (errors <= _EXACT).any() else int(errors.argmin())
        if errors[row] < least:
            best, least = counts[row].astype(np.int64), errors[row]
        if least <= _EXACT:
            break
    return tuple(best.tolist())


def _round_up(fractions: NDArray[np.float64]) -> NDArray[np.int64]:
    """Return the counts of the longest period, each at least 1."""
    counts = np.maximum(1, np.floor(fractions * MAX_PERIOD)).astype(np.int64)
    # What is missing, or too much, is the least of the largest weights.
    largest = np.argsort(-fractions, kind="stable")
    missing = MAX_PERIOD - int(counts.sum())
    for place in range(abs(missing)):
        chosen = largest[place % len(largest)] if missing > 0 else int(counts.argmax())
        counts[chosen] += 1 if missing > 0 else -1
    return counts
