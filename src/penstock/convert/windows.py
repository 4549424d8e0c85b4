"""Where windows lie in a recording: of equal length, at equal distances."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from penstock.core.checks import check_integer
from penstock.core.errors import OptionError

__all__ = ["Windows", "checked_overlap"]


def checked_overlap(overlap: float) -> float:
    """Return the share of a window that the next one repeats, or say why it cannot be one."""
    if isinstance(overlap, bool) or not isinstance(overlap, int | float) or not 0 <= overlap < 1:
        raise OptionError(
            f"overlap={overlap!r}; use a share of at least 0 and below 1, such as 0.5: at 1, windows never advance."
        )
    return float(overlap)


@dataclass(frozen=True, slots=True)
class Windows:
    """Windows of `length` units over `total` units, such as bins, rows or frames; a last one that is short is left out.

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
        check_integer("the length of a window", self.length, at_least=1)
        checked_overlap(self.overlap)

    @property
    def step(self) -> int:
        """Units from the start of one window to that of the next; at least one."""
        return max(1, round(self.length * (1 - self.overlap)))

    @property
    def count(self) -> int:
        """How many windows there are; none where the recording is shorter than one."""
        return max(0, (self.total - self.length) // self.step + 1)

    @property
    def left_out(self) -> int:
        """Units at the end that are in no window."""
        return self.total - ((self.count - 1) * self.step + self.length) if self.count else self.total

    def starts(self, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the first unit of windows."""
        return numbers * self.step
