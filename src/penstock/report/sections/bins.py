"""Bins of time, and the rows of a table below a chart: the same in all sections about a run."""

import math

import numpy as np

from penstock.observe.durations import Floats
from penstock.observe.run_file import Run

__all__ = ["row_step", "time_bins", "time_unit"]

_MOST_BINS = 48
_ROWS = 24  # in the table below a chart


def time_bins(run: Run) -> Floats:
    """Return the edges of equal time bins, each with a few batches."""
    count = min(_MOST_BINS, max(4, int(run.traces["items"].count.sum()) // 3))
    return np.linspace(0, max(float(run.figures["elapsed_seconds"]), 1e-6), count + 1)


def time_unit(seconds: float) -> tuple[float, str]:
    """Return the unit in which a run of so many seconds is shown: its seconds, and its name."""
    return (1.0, "s") if seconds < 300 else (60.0, "min") if seconds < 3 * 3600 else (3600.0, "h")


def row_step(count: int) -> int:
    """Return which rows of `count` a table shows: every n-th."""
    return max(1, math.ceil(count / _ROWS))
