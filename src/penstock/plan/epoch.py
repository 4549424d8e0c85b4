"""One epoch, batch by batch, and the share of it that one rank makes.

Positions are counted along an endless stream of passes: position p of pass e is e x length + p. A batch is a run of
positions; where it reaches over the end of a pass (only in cycling segments), its items come from two.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from penstock.core.errors import PlanError
from penstock.core.index import Index
from penstock.core.types import Arrangement, Draw, Part, Window
from penstock.plan.world import World

__all__ = ["Epoch", "Passes", "Share", "Tail"]

Tail = Literal["drop", "short", "pad"]

_Int64s = NDArray[np.int64]

# Positions worked out at a time: a permutation of 16 384 costs about 1 ms, of 32 about 0.1 ms.
_POSITIONS_AT_ONCE = 16_384


@dataclass(frozen=True, slots=True)
class Passes:
    """The endless stream of passes over the data that epochs are cut from."""

    index: Index
    arrangement: Callable[[int], Arrangement]
    """The sequence of a pass, by its number."""

    length: int
    """Positions in one pass."""

    n_batches: int
    """Batches in one pass, over all ranks."""

    batch_size: int
    lanes: int
    tail: Tail


class Epoch:
    """The batches of one epoch (or segment) of a plan: a pure function of the batch number."""

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
        """Exact: how many batches one process makes of this epoch."""
        self.passes = passes
        # The positions of the pass that fills up a padded batch, and whose end cuts a short one.
        self._first, self._stop = first, stop
        self._starts = starts
        self._windows: dict[tuple[int, int], Window] = {}

    def draw(self, batch: int) -> Draw:
        """Return what batch `batch` is made of; the cost does not depend on the number."""
        if not 0 <= batch < self.n_batches:
            raise PlanError(f"Batch {batch} is not in epoch {self.number}, which has {self.n_batches} batches.")
        return next(self.draws(range(batch, batch + 1)))

    def draws(self, batches: range) -> Iterator[Draw]:
        """Return the draws of `batches`, worked out many at a time.

        Under `tail="pad"` numbers past the end are allowed: such a batch holds nothing but padding.
        """
        at_once = max(1, _POSITIONS_AT_ONCE // self.passes.batch_size)
        for begin in range(0, len(batches), at_once):
            numbers = np.asarray(batches[begin : begin + at_once], np.int64)
            positions, valid = self.positions(numbers)
            yield from self._drawn(numbers, positions, valid)

    def items(self, batches: range) -> Iterator[_Int64s]:
        """Yield the items of `batches`, end to end, many batches at a time; without those that only fill up."""
        at_once = max(1, _POSITIONS_AT_ONCE // self.passes.batch_size)
        for begin in range(0, len(batches), at_once):
            positions, valid = self.positions(np.asarray(batches[begin : begin + at_once], np.int64))
            passes, places = np.divmod(positions[valid], max(self.passes.length, 1))
            yield self._items(passes, places)[0]

    def positions(self, batches: _Int64s) -> tuple[_Int64s, NDArray[np.bool_]]:
        """Return the positions of each batch, (len(batches), batch_size), and which of them exist."""
        real = batches < self.n_batches
        starts = np.where(real, self._starts(np.where(real, batches, 0)), self._stop)
        positions = starts[:, None] + np.arange(self.passes.batch_size)
        return positions, positions < self._stop

    def drawn(self, batch: int, positions: _Int64s) -> Draw:
        """Return the draw of any positions that exist."""
        return next(self._drawn(np.array([batch]), positions[None, :], np.ones((1, len(positions)), np.bool_)))

    def _drawn(self, batches: _Int64s, positions: _Int64s, valid: NDArray[np.bool_]) -> Iterator[Draw]:
        padded = self.passes.tail == "pad"
        if padded:
            wrapped = self._first + (positions - self._stop) % max(self._stop - self._first, 1)
            positions = np.where(valid, positions, wrapped)
        # A short batch is a run of valid positions; what follows them is worked out like any other and cut off.
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
        """Return the window of each position; None where the order has none."""
        if passes.size == 0 or self.passes.arrangement(int(passes.flat[0])).window_starts is None:
            return None
        numbers = np.empty_like(places)
        first, last = int(passes.min()), int(passes.max())
        for number in range(first, last + 1):
            starts = self.passes.arrangement(number).window_starts
            assert starts is not None, "an order has windows in every pass or in none"
            chosen = passes == number if first != last else np.ones(passes.shape, np.bool_)
            numbers[chosen] = np.searchsorted(starts, places[chosen], side="right") - 1
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
            spans = self.passes.arrangement(epoch).spans
            assert spans is not None, "an order with windows says which spans they hold"
            self._windows[key] = Window(epoch, number, self.passes.index.stored_spans(spans(number)))
        return self._windows[key]

    def share(self, world: World, start: int = 0) -> "Share":
        """Return what rank `world.rank` makes of this epoch from batch `start` on."""
        return Share(self, world, start, self.passes.tail)


def _rows(window: Window, items: _Int64s) -> _Int64s:
    """Return where `items` lie in the window's spans, laid end to end."""
    starts, stops = window.spans[:, 0], window.spans[:, 1]
    before = np.cumsum(stops - starts) - (stops - starts)
    span = np.searchsorted(starts, items, side="right") - 1
    rows: _Int64s = before[span] + items - starts[span]
    return rows


class Share:
    """The steps of one rank: equally many on every rank, by construction.

    Step s makes batch `start + s x size + rank`. What the ranks cannot share equally is settled by the plan's tail:
    `drop` leaves those batches out, `pad` fills up with masked batches, `short` shares out the items of the last round.
    """

    def __init__(self, epoch: Epoch, world: World, start: int, tail: Tail) -> None:
        self.epoch = epoch
        self._world, self._start = world, start
        left = max(epoch.n_batches - start, 0)
        self._full_steps, over = divmod(left, world.size)
        self._split = bool(over) and tail == "short"
        if tail == "pad" and over:
            self._full_steps += 1
        self.n_steps = self._full_steps + self._split
        """How many batches this rank makes; the same on every rank."""
        self.left_out = over if tail == "drop" else 0
        """Batches that no rank makes."""
        if self._split:
            self._last_round()

    def draw(self, step: int) -> Draw:
        """Return the draw of one step."""
        if not 0 <= step < self.n_steps:
            raise PlanError(f"Step {step} is not one of the {self.n_steps} steps that this rank makes.")
        return next(self.draws(step, step + 1))

    def draws(self, first: int = 0, stop: int | None = None) -> Iterator[Draw]:
        """Return the draws of steps `first` … `stop` - 1; to the end of the epoch where `stop` is None."""
        size = self._world.size
        stop = self.n_steps if stop is None else stop
        full = min(stop, self._full_steps)
        yield from self.epoch.draws(self._world.batches(self._start + full * size, self._start + first * size))
        if self._split and first < self.n_steps <= stop:
            yield self.epoch.drawn(self._start + self._full_steps * size, self._last_round())

    def items(self) -> Iterator[_Int64s]:
        """Yield the items of all steps, end to end, many steps at a time."""
        yield from self.epoch.items(self._world.batches(self._start + self._full_steps * self._world.size, self._start))
        if self._split:
            yield self.draw(self.n_steps - 1).items

    def batch_after(self, steps: int) -> int:
        """Return how many batches of the epoch are done on all ranks after `steps` steps on each."""
        return min(self._start + steps * self._world.size, max(self.epoch.n_batches, self._start))

    def _last_round(self) -> _Int64s:
        """Return this rank's part of the positions that are left over after the full rounds."""
        begin, size = self._start + self._full_steps * self._world.size, self._world.size
        positions, valid = self.epoch.positions(np.arange(begin, self.epoch.n_batches))
        left = positions[valid]
        if len(left) < size:
            raise PlanError(
                f"tail='short' leaves {len(left)} items for the last step of {size} ranks, so some rank would have "
                "none and the others would wait for it; use tail='pad' (masked) or tail='drop'."
            )
        bounds = len(left) * np.arange(size + 1) // size
        return left[bounds[self._world.rank] : bounds[self._world.rank + 1]]
