"""Patches side by side that cover a volume. Pure functions of numbers, one axis at a time."""

import math

import numpy as np
from numpy.typing import NDArray

from penstock.core.errors import OptionError

__all__ = ["covering_places"]

_NEAR = 1e-5  # tolerance, in grid steps, for scales and translations written as decimal fractions


def covering_places(
    axis: str, bounds: tuple[float, float], tile: float, grid: tuple[float, float, int]
) -> NDArray[np.int64]:
    """Return grid positions of centers whose patches, `tile` world units long, cover all that any patch can reach.

    Patches lie side by side; the last one is moved back if it would reach over the end. A single patch that covers
    everything is centered.

    Parameters
    ----------
    bounds
        Start and stop of the region to cover, in world units.
    grid
        First center, step and number of the possible centers.

    Examples
    --------
    >>> covering_places("x", (0, 10), 4, (2, 1, 7)).tolist()
    [0, 4, 6]
    """
    origin, step, count = grid
    stride = math.floor(tile / step + _NEAR)
    if not tile > 0 or (stride < 1 and count > 1):
        raise OptionError(
            f"Patches along {axis} must be at least {step:g} long, the distance between centers, got {tile:g}: "
            "smaller ones leave gaps."
        )
    # Without padding, centers stay away from the border if another array is larger.
    low, high = max(bounds[0], origin - tile / 2), min(bounds[1], origin + (count - 1) * step + tile / 2)
    # The last position whose patch starts at or before `low`, and the first whose patch ends at or after `high`.
    first, last = (low + tile / 2 - origin) / step, (high - tile / 2 - origin) / step
    begin = min(max(math.floor(first + _NEAR), 0), count - 1)
    end = min(max(math.ceil(last - _NEAR), 0), count - 1)
    if end <= begin:
        return np.array([(begin + end) // 2], np.int64)
    return np.append(np.arange(begin, end, stride, dtype=np.int64), end)
