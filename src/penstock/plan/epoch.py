"""The batches of one epoch, and the share that one rank makes.

Positions are counted along an endless stream of passes: position p of pass e is e x length + p. A batch is a run of
consecutive positions. If it crosses the end of a pass (only in cycling segments), its items come from two passes.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from penstock.core.errors import PlanError
from penstock.core.index import Index
from penstock.core.types import Arrangement, Draw, Part, Window
from penstock.plan.world import World

__all__ = ["ENDLESS", "Epoch", "Passes", "Share", "Tail"]

ENDLESS = 1 << 61
"""Beyond every reachable position, and small enough that the sum of two stays below 2**63."""

Tail = Literal["drop", "short", "pad"]

_Int64s = NDArray[np.int64]

# Positions computed at a time: a permutation of 16 384 costs about 1 ms, of 32 about 0.1 ms.
_POSITIONS_AT_ONCE = 16_384


@dataclass(frozen=True, slots=True)
class Passes:
    """Endless stream of passes over the data; epochs are cut from it."""

    index: Index
    arrangement: Callable[[int], Arrangement]
    """Maps the number of a pass to its sequence."""

    length: int
    """Positions in one pass."""

    n_batches: int
    """Batches in one pass, over all ranks."""

    batch_size: int
    lanes: int
    tail: Tail

    separate: bool = False
    """Whether each batch is one read already, so that small ones must not be read together."""


class Epoch:
    """One epoch (or segment) of a plan: a pure function from batch numbers to draws."""

    def __init__(
        self,
        passes: Passes,
        number: int,
        *,
        first: int,
        stop: int,
        n_batches: int,
        starts: Callable[[_Int64s], _Int64s],
    ) -> None:
        self.number = number
        self.n_batches = n_batches
        """Batches in this epoch, over all ranks; exact."""
        self.passes = passes
        # Positions [first, stop): they repeat to pad a batch, and stop ends a short one.
        self._first, self._stop = first, stop
        self._starts = starts
        self._windows: dict[tuple[int, int], Window] = {}

    @property
    def first_pass(self) -> int:
        """The pass in which it begins."""
        return self._first // max(self.passes.length, 1)

    @property
    def left_out(self) -> int:
        """Items that are in no batch."""
        if self.passes.tail != "drop" or self._stop == ENDLESS:
            return 0
        return max(0, self._stop - self._first - self.n_batches * self.passes.batch_size)

    def draw(self, batch: int) -> Draw:
        """Return the draw of batch `batch`; the cost does not depend on the number."""
        if not 0 <= batch < self.n_batches:
            raise PlanError(
                f"batch must be >= 0 and < {self.n_batches}, the batches of epoch {self.number}, got {batch}."
            )
        return next(self.draws(range(batch, batch + 1)))

    def draws(self, batches: range) -> Iterator[Draw]:
        """Yield the draws of `batches`, computed many at a time.

        With `tail="pad"`, numbers past the end are allowed: such a batch is all padding.
        """
        at_once = max(1, _POSITIONS_AT_ONCE // self.passes.batch_size)
        for begin in range(0, len(batches), at_once):
            numbers = np.asarray(batches[begin : begin + at_once], np.int64)
            positions, valid = self.positions(numbers)
            yield from self._make_draws(numbers, positions, valid)

    def items(self, batches: range) -> Iterator[_Int64s]:
        """Yield the items of `batches`, concatenated, many batches at a time; without padding."""
        at_once = max(1, _POSITIONS_AT_ONCE // self.passes.batch_size)
        for begin in range(0, len(batches), at_once):
            positions, valid = self.positions(np.asarray(batches[begin : begin + at_once], np.int64))
            passes, places = np.divmod(positions[valid], max(self.passes.length, 1))
            yield self._items(passes, places)[0]

    def positions(self, batches: _Int64s) -> tuple[_Int64s, NDArray[np.bool_]]:
        """Return the positions of each batch, shape (len(batches), batch_size), and a mask of those that exist."""
        real = batches < self.n_batches
        starts = np.where(real, self._starts(np.where(real, batches, 0)), self._stop)
        positions = starts[:, None] + np.arange(self.passes.batch_size)
        return positions, positions < self._stop

    def divide(self, first: int, stop: int, parts: int) -> list[_Int64s] | None:
        """Return the positions of batches `first` … `stop` - 1 in `parts` parts, each of which is a batch.

        None if there are fewer positions than parts.
        """
        found, valid = self.positions(np.arange(first, stop))
        positions = found[valid]
        if len(positions) < parts:
            return None
        bounds = (len(positions) * np.arange(parts + 1) // parts).tolist()
        return [positions[begin:end] for begin, end in pairwise(bounds)]

    def draw_positions(self, batch: int, positions: _Int64s) -> Draw:
        """Return the draw of any positions that exist, as batch `batch`."""
        return next(self._make_draws(np.array([batch]), positions[None, :], np.ones((1, len(positions)), np.bool_)))

    def _make_draws(self, batches: _Int64s, positions: _Int64s, valid: NDArray[np.bool_]) -> Iterator[Draw]:
        padded = self.passes.tail == "pad"
        if padded:
            wrapped = self._first + (positions - self._stop) % max(self._stop - self._first, 1)
            positions = np.where(valid, positions, wrapped)
        # A short batch starts with its valid positions; the rest is computed like any other and cut off.
        passes, places = np.divmod(np.minimum(positions, max(self._stop - 1, 0)), max(self.passes.length, 1))
        items, visits = self._items(passes, places)
        windows = self._window_numbers(passes, places)
        counts = valid.sum(axis=1)
        one_pass = (passes == self.number).all(axis=1)
        for row, batch in enumerate(batches.tolist()):
            size = positions.shape[1] if padded else int(counts[row])
            yield Draw(
                epoch=self.number,
                batch=batch,
                items=items[row, :size],
                parts=()
                if windows is None
                else self._parts(passes[row, :size], windows[row, :size], items[row, :size]),
                mask=valid[row] if padded else None,
                epochs=None if one_pass[row] else passes[row, :size],
                visits=None if visits is None else visits[row, :size],
            )

    def _items(self, passes: _Int64s, places: _Int64s) -> tuple[_Int64s, _Int64s | None]:
        if passes.size == 0:
            return np.zeros(passes.shape, np.int64), None
        items = np.empty(passes.shape, np.int64)
        visits = np.zeros(passes.shape, np.int64)
        counted = False
        first, last = int(passes.min()), int(passes.max())
        for number in range(first, last + 1):
            chosen = passes == number if first != last else np.ones(passes.shape, np.bool_)
            arrangement = self.passes.arrangement(number)
            items[chosen] = self.passes.index.stored(arrangement.items(places[chosen]))
            if arrangement.visits is not None:
                visits[chosen] = arrangement.visits(places[chosen])
                counted = True
        return items, visits if counted else None

    def _window_numbers(self, passes: _Int64s, places: _Int64s) -> _Int64s | None:
        """Return the window number of each position; None if the order has no windows."""
        if passes.size == 0 or self.passes.arrangement(int(passes.flat[0])).windows is None:
            return None
        numbers = np.empty_like(places)
        first, last = int(passes.min()), int(passes.max())
        for number in range(first, last + 1):
            windows = self.passes.arrangement(number).windows
            assert windows is not None, "an order has windows in every pass or in none"
            chosen = passes == number if first != last else np.ones(passes.shape, np.bool_)
            numbers[chosen] = windows.numbers(places[chosen])
        return numbers

    def _parts(self, passes: _Int64s, windows: _Int64s, items: _Int64s) -> tuple[Part, ...]:
        changes = (np.flatnonzero((windows[1:] != windows[:-1]) | (passes[1:] != passes[:-1])) + 1).tolist()
        parts = []
        for begin, end in zip([0, *changes], [*changes, len(items)], strict=True):
            window = self._window(int(passes[begin]), int(windows[begin]))
            parts.append(Part(window, begin, _rows(window, items[begin:end])))
        return tuple(parts)

    def _window(self, epoch: int, number: int) -> Window:
        key = (epoch, number)
        if key not in self._windows:
            if len(self._windows) > 4 * self.passes.lanes:
                self._windows.clear()
            windows = self.passes.arrangement(epoch).windows
            assert windows is not None, "called for orders with windows only"
            self._windows[key] = Window(epoch, number, self.passes.index.stored_spans(windows.spans(number)))
        return self._windows[key]

    def share(self, world: World, start: int = 0) -> "Share":
        """Return the share of rank `world.rank` in this epoch, from batch `start` on."""
        return Share(self, world, start, self.passes.tail)


def _rows(window: Window, items: _Int64s) -> _Int64s:
    """Return the rows of `items` in the concatenated spans of the window."""
    starts, stops = window.spans[:, 0], window.spans[:, 1]
    before = np.cumsum(stops - starts) - (stops - starts)
    span = np.searchsorted(starts, items, side="right") - 1
    rows: _Int64s = before[span] + items - starts[span]
    return rows


class Share:
    """Steps of one rank in an epoch; every rank has the same number of them.

    Step s makes batch `start + s x size + rank`. The plan's tail decides about batches that do not divide equally among
    the ranks: `drop` leaves them out, `pad` adds masked batches, `short` splits the items of the last round. If these
    are fewer than the ranks, it splits them together with those of the round before, so that a batch may have one item
    more than the others.
    """

    def __init__(self, epoch: Epoch, world: World, start: int, tail: Tail) -> None:
        self.epoch = epoch
        self._world, self._start = world, start
        left = max(epoch.n_batches - start, 0)
        self._full_steps, over = divmod(left, world.size)
        self._last_round: list[_Int64s] | None = None
        """Positions of each rank in the last step, if its items are split."""
        self.left_out = 0
        """Batches that no rank makes."""
        if over and tail == "pad":
            self._full_steps += 1
        elif over and tail == "drop":
            self.left_out = over
        elif over:
            self._split_last_round(over)
        self.n_steps = self._full_steps + (self._last_round is not None)
        """Number of batches this rank makes; the same on every rank."""

    def draw(self, step: int) -> Draw:
        """Return the draw of one step."""
        if not 0 <= step < self.n_steps:
            raise PlanError(f"step must be >= 0 and < {self.n_steps}, got {step}.")
        return next(self.draws(step, step + 1))

    def draws(self, first: int = 0, stop: int | None = None) -> Iterator[Draw]:
        """Yield the draws of steps `first` … `stop` - 1; `stop=None` is the end of the epoch."""
        size = self._world.size
        stop = self.n_steps if stop is None else stop
        full = min(stop, self._full_steps)
        yield from self.epoch.draws(self._world.batches(self._start + full * size, self._start + first * size))
        if self._last_round is not None and first < self.n_steps <= stop:
            mine = self._last_round[self._world.rank]
            yield self.epoch.draw_positions(self._start + self._full_steps * size, mine)

    def items(self) -> Iterator[_Int64s]:
        """Yield the items of all steps, concatenated, many steps at a time."""
        yield from self.epoch.items(self._world.batches(self._start + self._full_steps * self._world.size, self._start))
        if self._last_round is not None:
            yield self.draw(self.n_steps - 1).items

    def batch_after(self, steps: int) -> int:
        """Return the number of batches done, over all ranks, after `steps` steps on each."""
        end = max(self.epoch.n_batches, self._start)
        if self._last_round is not None and steps >= self.n_steps:
            return end
        return min(self._start + steps * self._world.size, end)

    def _split_last_round(self, over: int) -> None:
        """Let all ranks share the items of the last `over` batches."""
        size, stop = self._world.size, self.epoch.n_batches
        self._last_round = self.epoch.divide(stop - over, stop, size)
        if self._last_round is None and self._full_steps:
            self._last_round = self.epoch.divide(stop - over - size, stop, size)
            self._full_steps -= self._last_round is not None
        if self._last_round is not None:
            return
        if self.epoch.passes.length < size:
            raise PlanError(
                f"An epoch must have an item for each of the {size} ranks, got {self.epoch.passes.length}: a rank "
                "without a batch would block the others. Use fewer ranks, or tail='pad' (masked)."
            )
        self.left_out = over
