"""Windows as batches: batch n of an epoch is window n of an order, whatever its length.

`RandomChunks` and the two orders here say where the windows lie.
"""

import hashlib
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from penstock.core.cached import cached_property
from penstock.core.checks import check_integer
from penstock.core.errors import PlanError
from penstock.core.index import Index
from penstock.core.seeds import key_for, subkeys
from penstock.core.types import Arrangement, Span, Windows
from penstock.plan.epoch import Passes
from penstock.plan.orders import RandomChunks
from penstock.plan.permute import permute
from penstock.plan.plan import Batching, Plan

__all__ = ["ListedChunks", "PartitionChunks", "WholeWindows", "WindowBatches", "WindowOrder", "WindowPasses"]

_Int64s = NDArray[np.int64]
_NONE = np.zeros(0, np.int64)


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
class WholeWindows(Batching):
    """Batch n is window n of the order, whatever its length: one span of items, read in one read."""

    def cut(self, plan: Plan) -> "WindowPasses":
        """Return the passes of a plan; raise PlanError if its order has no windows of consecutive items."""
        return WindowPasses(plan)

    def describe(self, plan: Plan) -> str:
        """Return the order, and that its windows are batches."""
        return f"WindowBatches({plan.order!r})"


class WindowPasses(Passes):
    """Passes whose batches are windows. These are not kept in memory for the next batch."""

    is_even = False
    separate = True

    def __init__(self, plan: Plan) -> None:
        if not isinstance(plan.order, WindowOrder) or getattr(plan.order, "shuffle", False):
            raise PlanError(f"order must have windows of consecutive items, as RandomChunks(4), got {plan.order!r}.")
        self._plan = plan
        super().__init__(
            plan.index,
            self._arrange,
            length=plan.arrangement(0).length,
            n_batches=self.windows(0).count,
            batch_size=max(1, min(plan.order.size, len(plan.index))),
            tail=plan.tail,
        )

    def span(self, number: int, batch: int) -> Span:
        """Return the items of batch `batch` of pass `number`."""
        ((start, stop),) = self.windows(number).spans(batch).tolist()
        return Span(start, stop)

    def windows(self, number: int) -> Windows:
        """Return the windows of pass `number`."""
        found = self._plan.arrangement(number).windows
        assert found is not None, "all of these orders have windows"
        return found

    def borders(self, number: int, batches: _Int64s) -> tuple[_Int64s, _Int64s, _Int64s]:
        """Return the first place of each batch, the place after its last, and its size."""
        first_places = self.windows(number).starts
        starts, stops = first_places(batches), first_places(batches + 1)
        return starts, stops, stops - starts

    def find_items(self, number: int, places: _Int64s) -> tuple[_Int64s, _Int64s | None, None]:
        """Return the items of whole windows, and the numbers of the windows if these may overlap."""
        windows, items, visits, at = self.windows(number), [_NONE], [_NONE], 0
        while at < len(places):
            window = int(windows.numbers(places[at : at + 1])[0])
            span = self.span(number, window)
            items.append(np.arange(span.start, span.stop))
            visits.append(np.full(len(span), window))
            at += len(span)
        repeats = self._plan.arrangement(number).visits is not None
        return np.concatenate(items), np.concatenate(visits) if repeats else None, None

    def _arrange(self, number: int) -> Arrangement:
        return replace(self._plan.arrangement(number), windows=None)


def WindowBatches(index: Index, order: WindowOrder, seed: int = 0) -> Plan:  # noqa: N802  # a kind of plan
    """Return a plan whose batches are the windows of an order: each is one span of items, read in one read.

    Windows may differ in length.

    Examples
    --------
    >>> plan = WindowBatches(Index.uniform(10), ListedChunks(((2, 5), (0, 2))))
    >>> [plan.epoch(0).draw(n).items.tolist() for n in range(plan.n_batches)]
    [[2, 3, 4], [0, 1]]
    """
    return Plan(index, order, WholeWindows(), seed, tail="drop")
