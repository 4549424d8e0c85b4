"""Seed 003: patches side by side that cover a volume. Pure: numbers in, numbers out, for one axis at a time."""

import math

import numpy as np
from numpy.typing import NDArray

from penstock.core.errors import OptionError

__all__ = ["covering_places"]

_NEAR = 1e-5  # of the distance of centres: what decimal fractions of scales and translations may be off


def covering_places(
    axis: str, bounds: tuple[float, float], tile: float, grid: tuple[float, float, int]
) -> NDArray[np.int64]:
    """Return the places of centres whose patches, `tile` world units long, cover all that any patch reaches.

    They lie side by side; one that would overlap the end is moved back to it. Where one patch covers all, it lies in
    the middle.

    Parameters
    ----------
    bounds
        What is to be covered, in world units.
    grid
        First centre, distance and number of the centres that there are.

    Examples
    --------
    >>> covering_places("x", (0, 10), 4, (2, 1, 7)).tolist()
    [0, 4, 6]
    """
    origin, step, count = grid
    stride = math.floor(tile / step + _NEAR)
    if not tile > 0 or (stride < 1 and count > 1):
        raise OptionError(
            f"Patches of {tile:g} along {axis} leave gaps, since centres are {step:g} apart; use at least {step:g}."
        )
    # Centres may keep away from the border: without padding, where another array is larger.
    low, high = max(bounds[0], origin - tile / 2), min(bounds[1], origin + (count - 1) * step + tile / 2)
    # The last place whose patch begins at `low` or before, and the first one whose patch ends at `high` or after.
    first, last = (low + tile / 2 - origin) / step, (high - tile / 2 - origin) / step
    begin = min(max(math.floor(first + _NEAR), 0), count - 1)
    end = min(max(math.ceil(last - _NEAR), 0), count - 1)
    if end <= begin:
        return np.array([(begin + end) // 2], np.int64)
    return np.append(np.arange(begin, end, stride, dtype=np.int64), end)
