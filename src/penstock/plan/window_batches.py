"""Windows as batches: batch n of an epoch is window n of an order, whatever its length.

`RandomChunks` and the two orders here say where the windows lie.
"""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from penstock.core.checks import check_integer
from penstock.core.errors import PlanError
from penstock.core.index import Index
from penstock.core.seeds import key_for, subkeys
from penstock.core.types import Arrangement, Draw, Span, Windows
from penstock.plan.batch_plan import EpochPlace
from penstock.plan.epoch import Epoch, Passes, Tail
from penstock.plan.inspect import Inspectable
from penstock.plan.orders import RandomChunks
from penstock.plan.permute import permute
from penstock.plan.plan import Plan

__all__ = ["ListedChunks", "PartitionChunks", "WindowBatches", "WindowOrder"]

_Int64s = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class PartitionChunks:
    """Adjacent windows that cover every item exactly once, permuted; their borders shift every epoch."""

    size: int
    """Items per window; the first and the last may have fewer."""

    align: int = 1
    """Borders lie at multiples of this many items, such as the rows of a stored chunk. Windows then have the largest
    multiple of it that is <= `size`."""

    def __post_init__(self) -> None:
        for name, value in (("size", self.size), ("align", self.align)):
            check_integer(name, value, at_least=1, error=PlanError)

    def check(self, index: Index) -> None:
        """Raise PlanError if no border inside the data can be aligned."""
        if self.align > self.size <= len(index):
            raise PlanError(
                f"chunk_size must be >= the alignment of its borders ({self.align} rows), got {self.size}. Use a "
                "larger chunk_size, or a smaller align or time_units."
            )

    def arrange(self, index: Index, seed: int, epoch: int) -> Arrangement:
        """Return the windows of `epoch`; all epochs have equally many."""
        total = len(index)
        step = self.size if total < self.size else self.size - self.size % self.align
        # Where the second window may start, such that no epoch has a window more than another.
        least = max(total % step, 1)
        phases = range(0) if total < step else range(-(-least // self.align) * self.align, step, self.align)
        if phases:
            pick = int(subkeys(key_for(seed, "phase", epoch), np.zeros(1, np.int64))[0] % np.uint64(len(phases)))
            borders = np.array([0, *range(phases[pick], total, step), total])
        else:
            borders = np.append(np.arange(0, total, step), total)
        n_windows = len(borders) - 1
        order = permute(np.arange(n_windows), n_windows, key_for(seed, "windows", epoch))
        return _arrange_windows(borders[order], borders[order + 1])


@dataclass(frozen=True, eq=False, repr=False)
class ListedChunks:
    """Windows in the order of a list, the same in every epoch; they may overlap."""

    windows: tuple[tuple[int, int], ...]
    """Start and stop of each."""

    def __repr__(self) -> str:
        return self._repr

    @cached_property
    def _repr(self) -> str:
        # Part of every saved state, and a stream asks for one at each chunk.
        digest = hashlib.blake2b(np.array(self.windows, "<i8").tobytes(), digest_size=8).hexdigest()
        return f"ListedChunks({len(self.windows)} windows, {digest})"

    @cached_property
    def size(self) -> int:
        """Items in the largest window."""
        return max((stop - start for start, stop in self.windows), default=1)

    def check(self, index: Index) -> None:
        """Raise PlanError if a window is empty or does not exist."""
        for start, stop in self.windows:
            if not 0 <= start < stop <= len(index):
                raise PlanError(
                    f"Chunks must be (start, end) with 0 <= start < end <= {len(index)}, got ({start}, {stop})."
                )

    def arrange(self, index: Index, seed: int, epoch: int) -> Arrangement:  # noqa: ARG002  # the same every time
        """Return the windows."""
        starts, stops = np.array(self.windows, np.int64).reshape(-1, 2).T
        return _arrange_windows(starts, stops, overlap=True)


WindowOrder = RandomChunks | PartitionChunks | ListedChunks
"""Orders of windows, each of which is one span of at most `size` items."""


def _arrange_windows(starts: _Int64s, stops: _Int64s, *, overlap: bool = False) -> Arrangement:
    """Return the sequence of the items of windows, one window after the other."""
    borders = np.concatenate([[0], np.cumsum(stops - starts)])

    def numbers(positions: _Int64s) -> _Int64s:
        return np.searchsorted(borders, positions, side="right") - 1

    def items(positions: _Int64s) -> _Int64s:
        windows = numbers(positions)
        found: _Int64s = starts[windows] + positions - borders[windows]
        return found

    windows = Windows(
        len(starts),
        starts=lambda windows: borders[windows],
        numbers=numbers,
        spans=lambda window: np.array([[starts[window], stops[window]]]),
        largest=lambda: int((stops - starts).argmax()),
    )
    return Arrangement(int(borders[-1]), items=items, visits=numbers if overlap else None, windows=windows)


@dataclass(frozen=True)
class WindowBatches(Inspectable):
    """A plan whose batches are the windows of an order: each is one span of items, read in one read.

    Windows may differ in length.

    Examples
    --------
    >>> plan = WindowBatches(Index.uniform(10), ListedChunks(((2, 5), (0, 2))))
    >>> [plan.epoch(0).draw(n).items.tolist() for n in range(plan.n_batches)]
    [[2, 3, 4], [0, 1]]
    """

    index: Index
    order: WindowOrder
    seed: int = 0
    lanes: ClassVar[int] = 1
    tail: ClassVar[Tail] = "drop"
    epochs_per_pass: ClassVar[int] = 1

    def __post_init__(self) -> None:
        if not isinstance(self.order, WindowOrder) or getattr(self.order, "shuffle", False):
            raise PlanError(f"order must have windows of consecutive items, as RandomChunks(4), got {self.order!r}.")
        self.windows(0)  # checks the other arguments

    def __reduce__(self) -> tuple[Any, ...]:
        return WindowBatches, (self.index, self.order, self.seed)

    @cached_property
    def _plan(self) -> Plan:
        """The same items in the same order; checks the arguments and keeps the last arrangements."""
        return Plan(self.index, self.order, self.batch_size, self.seed, tail=self.tail)

    @property
    def batch_size(self) -> int:
        """Items in the largest window."""
        return max(1, min(self.order.size, len(self.index)))

    @property
    def length(self) -> int:
        """Items in all windows of an epoch."""
        return self._plan.length

    @cached_property
    def n_batches(self) -> int:
        """Windows in an epoch, over all ranks."""
        return self.windows(0).count

    @cached_property
    def passes(self) -> Passes:
        """The epochs, one after the other. Windows are batches, not kept in memory for the next one."""
        sizes = (self.length, self.n_batches, self.batch_size)
        return Passes(self.index, self._arrangement, *sizes, self.lanes, self.tail, separate=True)

    def epoch(self, number: int, origin: int = 0) -> Epoch:
        """Return epoch `number`."""
        if number < 0 or origin:
            raise PlanError(f"epoch must be >= 0 and origin must be 0, got epoch {number}, origin {origin}.")
        return _WindowEpoch(self, number)

    def span(self, epoch: int, batch: int) -> Span:
        """Return the items of batch `batch` of `epoch`."""
        ((start, stop),) = self.windows(epoch).spans(batch).tolist()
        return Span(start, stop)

    def windows(self, epoch: int) -> Windows:
        """Return the windows of `epoch`."""
        found = self._plan.arrangement(epoch).windows
        assert found is not None, "all of these orders have windows"
        return found

    def locate(self, epoch: int) -> EpochPlace:
        """Return where `epoch` lies in the passes over the data."""
        return self._plan.locate(epoch)

    def identity(self) -> dict[str, str | int]:
        """Return, by name, everything that the order of items depends on."""
        return {**self._plan.identity(), "order": f"WindowBatches({self.order!r})"}

    def with_batches(self, batch_size: int, tail: Tail) -> "WindowBatches":  # noqa: ARG002
        """Return this plan: its batches are as large as the windows."""
        return self

    def with_windows(self) -> "WindowBatches":
        """Return this plan: each of its batches is a window."""
        return self

    def convert_position(self, before: "WindowBatches", *, epoch: int, batch: int, origin: int) -> tuple[int, int]:  # noqa: ARG002
        """Return the same position: it counts windows, whatever their size."""
        return batch, origin

    def _arrangement(self, epoch: int) -> Arrangement:
        return replace(self._plan.arrangement(epoch), windows=None)


class _WindowEpoch(Epoch):
    """The windows of one epoch."""

    def __init__(self, plan: WindowBatches, number: int) -> None:
        first = number * plan.length
        self._plan, self._borders = plan, plan.windows(number).starts
        super().__init__(
            plan.passes,
            number,
            first=first,
            stop=first + plan.length,
            n_batches=plan.n_batches,
            starts=lambda batches: first + self._borders(batches),
        )

    def draws(self, batches: range) -> Iterator[Draw]:
        """Yield the draws of `batches`."""
        repeats = self.passes.arrangement(self.number).visits is not None
        for batch in batches:
            span = self._plan.span(self.number, batch)
            items = self.passes.index.stored(np.arange(span.start, span.stop))
            # An item comes once in a window; in windows that overlap, the number of the window tells its visits apart.
            visits = np.broadcast_to(np.int64(batch), len(span)) if repeats else None
            yield Draw(self.number, batch, items, visits=visits)

    def items(self, batches: range) -> Iterator[_Int64s]:
        """Yield the items of each batch."""
        return (draw.items for draw in self.draws(batches))

    def positions(self, batches: _Int64s) -> tuple[_Int64s, NDArray[np.bool_]]:
        """Return the positions of each batch, shape (len(batches), batch_size), and a mask of those that exist."""
        positions, _ = super().positions(batches)
        return positions, positions < self._first + self._borders(batches + 1)[:, None]
