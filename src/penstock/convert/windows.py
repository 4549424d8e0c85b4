"""Windows of a recording: equal length, equal distance."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from penstock.core.checks import check_integer
from penstock.core.errors import OptionError

__all__ = ["Windows", "check_overlap"]


def check_overlap(overlap: float) -> float:
    """Return `overlap` as a float, or raise OptionError if it is not in [0, 1)."""
    if isinstance(overlap, bool) or not isinstance(overlap, int | float) or not 0 <= overlap < 1:
        raise OptionError(
            f"overlap must be a number >= 0 and < 1, such as 0.5, got {overlap!r}. At 1, windows would never advance."
        )
    return float(overlap)


@dataclass(frozen=True, slots=True)
class Windows:
    """Windows of `length` units over `total` units (bins, rows or frames). A last window that is short is left out.

    Examples
    --------
    >>> windows = Windows(total=10, length=4, overlap=0.5)
    >>> windows.count, windows.starts(np.arange(4)).tolist(), windows.left_out
    (4, [0, 2, 4, 6], 0)
    """

    total: int
    length: int
    overlap: float = 0.0

    def __post_init__(self) -> None:
        check_integer("The window length", self.length, at_least=1)
        check_overlap(self.overlap)

    @property
    def step(self) -> int:
        """Units from the start of one window to the start of the next; at least one."""
        return max(1, round(self.length * (1 - self.overlap)))

    @property
    def count(self) -> int:
        """Number of windows; 0 if the recording is shorter than one window."""
        return max(0, (self.total - self.length) // self.step + 1)

    @property
    def left_out(self) -> int:
        """Units at the end that no window covers."""
        return self.total - ((self.count - 1) * self.step + self.length) if self.count else self.total

    def starts(self, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the first unit of the given windows."""
        return numbers * self.step
