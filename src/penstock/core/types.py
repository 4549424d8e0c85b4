"""Small value types used throughout the package."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.core.errors import OptionError
from penstock.core.metadata.records import Records

__all__ = ["UNNAMED", "Arrangement", "Block", "Draw", "Field", "Part", "Rows", "Span", "Window", "Windows"]

Block = Mapping[str, NDArray[Any]]
"""Named arrays with items on axis 0."""

UNNAMED = ""
"""Name of the only field of a source whose items are single values (such as tuples), not mappings of named arrays."""


@dataclass(frozen=True, slots=True)
class Span:
    """Items `[start, stop)`."""

    start: int
    stop: int

    def __post_init__(self) -> None:
        if not 0 <= self.start <= self.stop:
            raise OptionError(f"A span must have 0 <= start <= stop, got Span({self.start}, {self.stop}).")

    def __len__(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class Field:
    """One named array of every item: its dtype and its shape."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...] | None
    """Shape in one item; None if it varies."""

    typical_bytes: int | None = field(default=None, compare=False, repr=False)
    """Approximate bytes per item if they vary; None if the source does not know."""

    holds_records: bool = field(default=False, compare=False, repr=False)
    """Whether its values are dicts that are made when they are looked at: a column of it is `Records`."""

    @property
    def item_bytes(self) -> int | None:
        """Bytes per item; None if they vary."""
        if self.shape is None or self.dtype.hasobject:
            return None
        return self.dtype.itemsize * math.prod(self.shape)

    def blank(self, n_items: int) -> Any:
        """Return a column of `n_items` items, to be filled."""
        return Records.blank(n_items) if self.holds_records else np.empty((n_items, *(self.shape or ())), self.dtype)


@dataclass(frozen=True, slots=True)
class Window:
    """A shuffle window: spans that are held in memory together."""

    epoch: int
    number: int
    spans: NDArray[np.int64]
    """Shape (k, 2): start and stop of each span, in items, ascending, never overlapping."""

    cut_at: int | None = None
    """If it lies in two lanes: the first position of the epoch whose item is in the spans, which hold those of one lane
    only. None: all items of the window."""

    # Worked out once, and asked for with every batch.
    _size: int = field(init=False, repr=False, compare=False)
    _shifts: NDArray[np.int64] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        ends = np.cumsum(self.spans[:, 1] - self.spans[:, 0])
        object.__setattr__(self, "_size", int(ends[-1]) if len(ends) else 0)
        object.__setattr__(self, "_shifts", ends - self.spans[:, 1])

    @property
    def key(self) -> tuple[int, int, int | None]:
        """(epoch, number, cut_at), unique within a plan."""
        return (self.epoch, self.number, self.cut_at)

    def __len__(self) -> int:
        return self._size

    def find_rows(self, items: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the rows of `items` if the spans are laid end to end.

        Examples
        --------
        >>> Window(0, 0, np.array([[10, 13], [50, 60]])).find_rows(np.array([12, 50, 53])).tolist()
        [2, 3, 6]
        """
        found: NDArray[np.int64] = items + self._shifts[self.spans[:, 0].searchsorted(items, side="right") - 1]
        return found


@dataclass(frozen=True, slots=True)
class Part:
    """Rows of one window that fill places `[at, at + len(rows))` of a draw."""

    window: Window
    at: int
    rows: NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Rows:
    """How much of each item of a draw is delivered, and in which row of the batch it lies. Lengths are in tokens."""

    numbers: NDArray[np.int64]
    """Row of each item, ascending."""

    begins: NDArray[np.int64]
    """First token of the item that is delivered."""

    counts: NDArray[np.int64]
    """How many tokens are delivered."""

    lengths: NDArray[np.int64]
    """Length of the item that the plan counts on; it must not have more tokens."""

    row_length: int | None = None
    """Tokens of every row, into which several items are packed; None: a row is an item, as long as the longest."""

    pad_to_multiple_of: int | None = None
    """What the plan rounds the longest up to; None if that is left to the collate function."""


@dataclass(slots=True)
class Draw:
    """What one batch is made of: the items, and the rows of the windows that hold them. Nobody changes one.

    It is not frozen: an epoch makes a million of them, and freezing one takes longer than all else about it.
    """

    epoch: int
    batch: int
    items: NDArray[np.int64]
    """Item numbers in order of delivery."""

    parts: tuple[Part, ...] = ()
    """Rows of windows, covering all items in order; empty if the items are taken directly from the source."""

    mask: NDArray[np.bool_] | None = None
    """False for items that only pad the batch; None if the plan never pads."""

    epochs: NDArray[np.int64] | None = None
    """Pass of each item, if the batch spans two passes; None if all items belong to `epoch`."""

    visits: NDArray[np.int64] | None = None
    """Numbers that tell repeats of one item within a pass apart; None if each item comes once."""

    rows: Rows | None = None
    """How much of each item is delivered, and where; None if all of it is, each item in a row of its own."""

    def __len__(self) -> int:
        return len(self.items)

    def seed_path(self, row: int) -> tuple[int, ...]:
        """Return (epoch, item[, visit]), which is unique to this occurrence of the item at `row`."""
        epoch = self.epoch if self.epochs is None else int(self.epochs[row])
        visit = 0 if self.visits is None else int(self.visits[row])
        path = (epoch, int(self.items[row]))
        return (*path, visit) if visit else path


@dataclass(frozen=True, slots=True)
class Windows:
    """All windows of one epoch, as functions: there may be too many for a table."""

    count: int

    starts: Callable[[NDArray[np.int64]], NDArray[np.int64]]
    """Map window numbers to the positions where they start, ascending from 0; `count` to the length of the epoch."""

    numbers: Callable[[NDArray[np.int64]], NDArray[np.int64]]
    """Map positions to window numbers."""

    spans: Callable[[int], NDArray[np.int64]]
    """Map a window number to the spans, shape (k, 2), that hold its items; ascending, never overlapping."""

    largest: Callable[[], int]
    """Return the number of a window with the most items; never called if there are no windows."""

    @classmethod
    def from_borders(cls, borders: NDArray[np.int64], spans: Callable[[int], NDArray[np.int64]]) -> "Windows":
        """Return windows of a table: the position where each one starts, then the length of the epoch.

        Examples
        --------
        >>> windows = Windows.from_borders(np.array([0, 2, 6, 7]), spans=lambda window: np.zeros((0, 2), np.int64))
        >>> windows.count, windows.numbers(np.array([1, 2, 6])).tolist(), windows.largest()
        (3, [0, 1, 2], 1)
        """
        return cls(
            len(borders) - 1,
            starts=lambda windows: borders[windows],
            numbers=lambda positions: np.searchsorted(borders, positions, side="right") - 1,
            spans=spans,
            largest=lambda: int(np.diff(borders).argmax()),
        )


@dataclass(frozen=True, slots=True)
class Arrangement:
    """Sequence of one epoch, as a function of the position."""

    length: int
    """Number of positions in the epoch; items may come more than once."""

    items: Callable[[NDArray[np.int64]], NDArray[np.int64]]
    """Map positions to items."""

    visits: Callable[[NDArray[np.int64]], NDArray[np.int64]] | None = None
    """Map positions to numbers that tell repeats of one item apart; None if each item comes once."""

    windows: Windows | None = None
    """Windows of the epoch; None if items are taken directly from the source."""

    spread: Callable[[NDArray[np.int64]], NDArray[np.float64]] | None = None
    """Map items to places in 0 … 1 that a well mixed epoch visits evenly; None: their places in storage."""
