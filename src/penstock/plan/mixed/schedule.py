"""Which source comes at each position, so that every stretch from the beginning has the weights to within one item.

Item j of a source with the weight w must not come before position j / w, and must have come when position (j + 1) / w
is reached. Of the items that may come at a position, the one that is due first does. Every item comes in time, because
the weights add up to 1: between any two positions, no more items must come than there are positions (Tijdeman, The
chairman assignment problem, 1980). With "the source that is furthest behind comes next", that is so for some weights
only.

Weights are integers here, so the schedule has a period, their sum: a table, made once.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from heapq import heappop, heappush

import numpy as np
from numpy.typing import NDArray

__all__ = ["Schedule"]

_Int64s = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class _Period:
    """One period of a schedule."""

    counts: _Int64s
    """Positions of each source."""

    sources: NDArray[np.uint16]
    """Source of each position."""

    turns: NDArray[np.int32]
    """Number of earlier positions of the same source, for each position."""

    per_period: _Int64s
    """Positions of its source in a period, for each position."""

    places: list[_Int64s]
    """Positions of each source, ascending."""


class Schedule:
    """The sources of an endless sequence of positions; a pure function, at the same cost everywhere.

    Parameters
    ----------
    phases
        First position, ascending from 0, and weight of each source from there on.

    Examples
    --------
    >>> Schedule([(0, (2, 1)), (6, (1, 1))]).locate(np.arange(10))[0].tolist()
    [0, 0, 1, 0, 0, 1, 0, 1, 0, 1]
    """

    def __init__(self, phases: Sequence[tuple[int, tuple[int, ...]]]) -> None:
        self._starts = np.array([start for start, _ in phases], np.int64)
        self._periods = [_make_period(counts) for _, counts in phases]
        self._before = np.zeros((len(phases), len(phases[0][1])), np.int64)
        for number in range(1, len(phases)):
            length = int(self._starts[number] - self._starts[number - 1])
            self._before[number] = self._before[number - 1] + _count(self._periods[number - 1], length)

    def locate(self, positions: _Int64s) -> tuple[NDArray[np.uint16], _Int64s]:
        """Return the source of each of `positions`, and the number of its earlier ones."""
        if len(self._periods) == 1:
            return _locate(self._periods[0], positions)
        phases = np.searchsorted(self._starts, positions, side="right") - 1
        sources, turns = np.empty(positions.shape, np.uint16), np.empty_like(positions)
        for phase in np.unique(phases).tolist():
            chosen = phases == phase
            found, passed = _locate(self._periods[phase], positions[chosen] - self._starts[phase])
            sources[chosen], turns[chosen] = found, passed + self._before[phase][found]
        return sources, turns

    def count(self, position: int) -> _Int64s:
        """Return how often each source comes before `position`."""
        phase = int(np.searchsorted(self._starts, position, side="right")) - 1
        counts: _Int64s = self._before[phase] + _count(self._periods[phase], position - int(self._starts[phase]))
        return counts

    def find(self, source: int, turn: int) -> int:
        """Return the position of `turn` of a source, counted from 0; for schedules of one phase."""
        period = self._periods[0]
        periods, place = divmod(turn, int(period.counts[source]))
        return periods * len(period.sources) + int(period.places[source][place])


def _locate(period: _Period, positions: _Int64s) -> tuple[NDArray[np.uint16], _Int64s]:
    periods = positions // len(period.sources)  # np.divmod takes several times as long
    places = positions - periods * len(period.sources)
    turns = period.per_period.take(places, mode="clip")  # faster, and nothing is outside
    turns *= periods
    turns += period.turns.take(places, mode="clip")
    return period.sources.take(places, mode="clip"), turns


def _count(period: _Period, position: int) -> _Int64s:
    periods, place = divmod(position, len(period.sources))
    begun = [int(np.searchsorted(places, place)) for places in period.places]
    counts: _Int64s = periods * period.counts + np.array(begun, np.int64)
    return counts


@lru_cache(maxsize=16)
def _make_period(weights: tuple[int, ...]) -> _Period:
    counts = np.array(weights, np.int64)
    length, n_sources = int(counts.sum()), len(counts)
    sources = np.repeat(np.arange(n_sources), counts)
    turns = np.arange(length) - np.repeat(np.cumsum(counts) - counts, counts)
    earliest = turns * length // counts[sources]
    latest = -(-(turns + 1) * length // counts[sources]) - 1
    by_earliest = np.lexsort((sources, latest, earliest))
    begins = [*earliest[by_earliest].tolist(), length]
    urgency = (latest * n_sources + sources)[by_earliest].tolist()
    waiting: list[int] = []
    chosen: list[int] = []
    entered = 0
    for position in range(length):
        while begins[entered] <= position:
            heappush(waiting, urgency[entered])
            entered += 1
        chosen.append(heappop(waiting))
    order = np.array(chosen) % n_sources
    places = np.split(np.argsort(order, kind="stable"), np.cumsum(counts)[:-1])
    passed = np.empty(length, np.int32)
    passed[np.concatenate(places)] = turns
    return _Period(counts, order.astype(np.uint16), passed, counts[order], places)
