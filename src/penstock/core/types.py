"""The small values that everything passes around."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.core.errors import OptionError

__all__ = ["UNNAMED", "Arrangement", "Block", "Draw", "Field", "Part", "Span", "Window"]

Block = Mapping[str, NDArray[Any]]
"""Named arrays with items on axis 0."""

UNNAMED = ""
"""The only field of a source whose items are values of their own (a dataset's tuples), not mappings of named arrays."""


@dataclass(frozen=True, slots=True)
class Span:
    """Items `[start, stop)`."""

    start: int
    stop: int

    def __post_init__(self) -> None:
        if not 0 <= self.start <= self.stop:
            raise OptionError(f"Span({self.start}, {self.stop}) runs backwards or below zero; use 0 <= start <= stop.")

    def __len__(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class Field:
    """What one item holds under one name."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...] | None
    """Shape of one item; None where it varies."""

    typical_bytes: int | None = field(default=None, compare=False, repr=False)
    """Where bytes vary: about how many an item takes; None where the source does not know."""

    @property
    def item_bytes(self) -> int | None:
        """Bytes of one item; None where they vary."""
        if self.shape is None or self.dtype.hasobject:
            return None
        return int(self.dtype.itemsize * np.prod(self.shape, dtype=np.int64))


@dataclass(frozen=True, slots=True)
class Window:
    """Spans that are held in memory together."""

    epoch: int
    number: int
    spans: NDArray[np.int64]
    """(k, 2): start and stop of each span, in items, ascending, never overlapping."""

    @property
    def key(self) -> tuple[int, int]:
        """What tells this window from every other of the same plan."""
        return (self.epoch, self.number)

    def __len__(self) -> int:
        return int((self.spans[:, 1] - self.spans[:, 0]).sum())


@dataclass(frozen=True, slots=True)
class Part:
    """The rows that a draw takes from one window, for its places `[at, at + len(rows))`."""

    window: Window
    at: int
    rows: NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Draw:
    """What one batch is made of: the reads and the rows."""

    epoch: int
    batch: int
    items: NDArray[np.int64]
    """Item numbers in the order of delivery."""

    parts: tuple[Part, ...] = ()
    """Rows of windows, covering all items in order; empty where the items are taken directly."""

    mask: NDArray[np.bool_] | None = None
    """False where an item only fills up a padded batch; None where the plan never pads."""

    epochs: NDArray[np.int64] | None = None
    """The pass each item belongs to, where one batch reaches over two; None where all belong to `epoch`."""

    visits: NDArray[np.int64] | None = None
    """Tells the occurrences of one item within a pass apart; None where each item comes once."""

    def __len__(self) -> int:
        return len(self.items)

    def seed_path(self, row: int) -> tuple[int, ...]:
        """Return what tells the item at `row` from every other occurrence of it: (epoch, item[, visit])."""
        epoch = self.epoch if self.epochs is None else int(self.epochs[row])
        visit = 0 if self.visits is None else int(self.visits[row])
        path = (epoch, int(self.items[row]))
        return (*path, visit) if visit else path


@dataclass(frozen=True, slots=True)
class Arrangement:
    """The sequence of one epoch, as a function of the position in it."""

    length: int
    """How many positions the epoch has; items may come more than once."""

    items: Callable[[NDArray[np.int64]], NDArray[np.int64]]
    """Positions to items."""

    visits: Callable[[NDArray[np.int64]], NDArray[np.int64]] | None = None
    """Positions to numbers that differ between the occurrences of one item; None where each item comes once."""

    window_starts: NDArray[np.int64] | None = None
    """The position where each window begins, ascending from 0; None where items are taken directly."""

    spans: Callable[[int], NDArray[np.int64]] | None = None
    """The number of a window to the spans, (k, 2), that hold all of its items; ascending, never overlapping."""
