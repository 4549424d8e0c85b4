"""How passes over the data are cut into batches, the batches of one epoch, and the share that one rank makes.

Positions are counted along an endless stream of passes: position p of pass e is e x length + p. A batch is a run of
consecutive positions. If it crosses the end of a pass (only in cycling segments), its items come from two passes.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from penstock.core.errors import PlanError
from penstock.core.index import Index
from penstock.core.types import Arrangement, Draw, Part, Rows, Window
from penstock.plan.world import World

__all__ = ["ENDLESS", "MOST_CUT", "Epoch", "Passes", "Share", "Tail", "join_ranges"]

ENDLESS = 1 << 61
"""Beyond every reachable position, and small enough that the sum of two stays below 2**63."""

Tail = Literal["drop", "short", "pad"]

_Int64s = NDArray[np.int64]

# The first positions that are computed together are fewer, so that the first batch does not wait for many others.
_FIRST_POSITIONS = 8_192

# Items of a window in two lanes: which of more are in which lane takes longer than to read them in both.
MOST_CUT = 1 << 16


class Passes:
    """Endless stream of passes over the data, and how each is cut into batches; epochs are cut from it.

    This one has batches of one size. Others override what differs.

    Parameters
    ----------
    arrangement
        Maps the number of a pass to its sequence.
    length
        Positions in one pass.
    n_batches
        Batches in one pass, over all ranks.
    batch_size
        Positions of the largest batch.
    """

    is_even = True
    """Whether all batches have one size. Others have borders of their own, and repeat their own items as padding."""

    separate = False
    """Whether each batch is one read already, so that small ones must not be read together."""

    needs_rows = False
    """Whether items must be collated by `Pad`, which cuts and packs them as the draws say."""

    n_dropped = 0
    """Items of the index that no pass visits, because they are too long."""

    positions_at_once = 65_536
    """Positions computed at a time: a permutation of 65,536 costs about 2 ms, of 32 about 0.1 ms."""

    def __init__(
        self,
        index: Index,
        arrangement: Callable[[int], Arrangement],
        *,
        length: int,
        n_batches: int,
        batch_size: int,
        tail: Tail,
        lanes: int = 1,
    ) -> None:
        self.index, self.arrangement, self.length = index, arrangement, length
        self.n_batches, self.batch_size, self.tail, self.lanes = n_batches, batch_size, tail, lanes

    def borders(self, number: int, batches: _Int64s) -> tuple[_Int64s, _Int64s, _Int64s]:
        """Return the first place of each batch of pass `number`, the place after its last, and its size if it is full.

        Asked for only if batches are uneven: even ones begin where the epoch says.
        """
        raise NotImplementedError

    @property
    def n_over(self) -> int:
        """Items of a pass that fill no batch, if batches are uneven."""
        return 0

    def find_items(self, number: int, places: _Int64s) -> tuple[_Int64s, _Int64s | None, Rows | None]:
        """Return the items at places of pass `number`, what tells repeats apart, and how much of each is delivered.

        A place may hold several items: rows then say the place of each, counted from 0.
        """
        arrangement = self.arrangement(number)
        visits = None if arrangement.visits is None else arrangement.visits(places)
        return arrangement.items(places), visits, None

    def divide(self, starts: _Int64s, stops: _Int64s, parts: int) -> list[_Int64s] | None:
        """Return the positions of batches in `parts` parts, each of which is a batch; None if they are too few."""
        positions = join_ranges(starts, stops - starts)
        if len(positions) < parts:
            return None
        bounds = (len(positions) * np.arange(parts + 1) // parts).tolist()
        return [positions[begin:end] for begin, end in pairwise(bounds)]

    def count_tokens(self, draw: Draw) -> tuple[int, int] | None:  # noqa: ARG002
        """Return the tokens of a batch, and its tokens with the padding; None if lengths are not known."""
        return None


class Epoch:
    """One epoch (or segment) of a plan: a pure function from batch numbers to draws.

    Parameters
    ----------
    first, stop
        Positions of the epoch. They repeat to pad a batch, and `stop` ends a short one.
    starts
        Maps batches to their first positions; not asked for if they are uneven.
    lane_starts
        Maps a pass to the places at which lanes begin, ascending: a window that lies in two lanes is cut there.
    """

    def __init__(
        self,
        passes: Passes,
        number: int,
        *,
        first: int,
        stop: int,
        n_batches: int,
        starts: Callable[[_Int64s], _Int64s],
        lane_starts: Callable[[int], _Int64s] | None = None,
    ) -> None:
        self.number = number
        self.n_batches = n_batches
        """Batches in this epoch, over all ranks; exact."""
        self.passes = passes
        self._first, self._stop = first, stop
        self._starts = starts
        self._lane_starts = lane_starts if self.passes.lanes > 1 else None
        self._windows: dict[tuple[int, int, int], Window] = {}

    @property
    def first_pass(self) -> int:
        """The pass in which it begins."""
        return self._first // max(self.passes.length, 1)

    @property
    def left_out(self) -> int:
        """Items that are in no batch."""
        if self.passes.tail != "drop" or self._stop == ENDLESS:
            return 0
        if not self.passes.is_even:
            return self.passes.n_over
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
        for numbers in self._group(batches):
            starts, stops, sizes = self.borders(numbers)
            if self.passes.tail != "pad":
                counts = stops - starts
                yield from self._make_draws(numbers, join_ranges(starts, counts), counts)
                continue
            positions = join_ranges(starts, sizes)
            valid = (positions < np.repeat(stops, sizes)) & np.repeat(numbers < self.n_batches, sizes)
            # Even batches repeat the first items of the epoch.
            begins, ends = (self._first, self._stop) if self.passes.is_even else _repeat((starts, stops), sizes)
            repeated = begins + (positions - begins) % np.maximum(ends - begins, 1)
            positions = np.where(valid, positions, repeated)
            yield from self._make_draws(numbers, positions, sizes, valid)

    def items(self, batches: range) -> Iterator[_Int64s]:
        """Yield the items of `batches`, concatenated, many batches at a time; without padding."""
        for numbers in self._group(batches):
            starts, stops, _ = self.borders(numbers[numbers < self.n_batches])
            span, passes, places = self._locate(join_ranges(starts, stops - starts))
            yield self._find_items(span, passes, places)[0]

    def _group(self, batches: range) -> Iterator[_Int64s]:
        """Yield the numbers of batches that are computed at a time, more of them each time."""
        most = self.passes.positions_at_once
        begin, n_positions = 0, min(_FIRST_POSITIONS, most)
        while begin < len(batches):
            end = begin + max(1, n_positions // self.passes.batch_size)
            yield np.asarray(batches[begin:end], np.int64)
            begin, n_positions = end, min(2 * n_positions, most)

    def borders(self, batches: _Int64s) -> tuple[_Int64s, _Int64s, _Int64s]:
        """Return the first position of each batch, the position after its last, and its size if it is full."""
        if not self.passes.is_even:
            starts, stops, sizes = self.passes.borders(self.number, batches % max(self.n_batches, 1))
            return self._first + starts, self._first + stops, sizes
        real = batches < self.n_batches
        begins = np.where(real, self._starts(np.where(real, batches, 0)), self._stop)
        size = self.passes.batch_size
        return begins, np.minimum(begins + size, self._stop), np.full(len(batches), size)

    def divide(self, first: int, stop: int, parts: int) -> list[_Int64s] | None:
        """Return the positions of batches `first` … `stop` - 1 in `parts` parts; None if they are too few."""
        starts, stops, _ = self.borders(np.arange(first, stop))
        return self.passes.divide(starts, stops, parts)

    def draw_positions(self, batch: int, positions: _Int64s) -> Draw:
        """Return the draw of any positions that exist, as batch `batch`."""
        return next(self._make_draws(np.array([batch]), positions, np.array([len(positions)])))

    def _make_draws(
        self, batches: _Int64s, positions: _Int64s, counts: _Int64s, valid: NDArray[np.bool_] | None = None
    ) -> Iterator[Draw]:
        """Yield the draw of each batch: the next `counts` positions; `valid` is False where they pad it."""
        span, passes, places = self._locate(positions)
        items, visits, rows = self._find_items(span, passes, places)
        windows = self._window_numbers(span, passes, places)
        lanes = None if windows is None else self._lane_numbers(span, passes, places)
        elsewhere = None if span == range(self.number, self.number + 1) else passes != self.number
        ends = np.zeros(len(counts) + 1, np.int64)
        np.cumsum(counts, out=ends[1:])
        firsts = ends.tolist()
        if rows is not None:
            ends = np.searchsorted(rows.numbers, ends)
            valid = None if valid is None else valid[rows.numbers]
        for number, (batch, (start, stop)) in enumerate(zip(batches.tolist(), pairwise(ends.tolist()), strict=True)):
            draw = Draw(self.number, batch, items[start:stop])
            if visits is not None:
                draw.visits = visits[start:stop]
            if valid is not None:
                draw.mask = valid[start:stop]
            if rows is not None:
                draw.rows = _cut_rows(rows, slice(start, stop), firsts[number])
            if elsewhere is not None and elsewhere[start:stop].any():
                draw.epochs = passes[start:stop]
            if windows is not None and lanes is not None:
                draw.parts = self._parts(draw.epochs, windows[start:stop], lanes[start:stop], draw.items)
            yield draw

    def _locate(self, positions: _Int64s) -> tuple[range, _Int64s, _Int64s]:
        """Return the passes that positions lie in, the pass of each of them, and its place in that pass."""
        length = max(self.passes.length, 1)
        if not positions.size:
            return range(self.number, self.number + 1), positions, positions
        first, last = int(positions.min()) // length, int(positions.max()) // length
        if first != last:
            passes, places = np.divmod(positions, length)
            return range(first, last + 1), passes, places
        # A division takes ten times as long.
        return range(first, first + 1), np.full(positions.shape, first), positions - first * length

    def _find_items(self, span: range, passes: _Int64s, places: _Int64s) -> tuple[_Int64s, _Int64s | None, Rows | None]:
        if len(span) == 1:
            items, visits, rows = self.passes.find_items(span[0], places)
            return self.passes.index.stored(items), visits, rows
        items, visits = np.empty(passes.shape, np.int64), np.zeros(passes.shape, np.int64)
        repeats = False
        for number in span:
            chosen = passes == number
            found, of_pass, _ = self.passes.find_items(number, places[chosen])
            items[chosen] = self.passes.index.stored(found)
            if of_pass is not None:
                visits[chosen], repeats = of_pass, True
        return items, visits if repeats else None, None

    def _window_numbers(self, span: range, passes: _Int64s, places: _Int64s) -> _Int64s | None:
        """Return the window number of each position; None if the order has no windows."""
        if passes.size == 0 or self.passes.arrangement(span[0]).windows is None:
            return None
        numbers = np.empty_like(places)
        for number in span:
            windows = self.passes.arrangement(number).windows
            assert windows is not None, "an order has windows in every pass or in none"
            chosen = slice(None) if len(span) == 1 else passes == number
            numbers[chosen] = windows.numbers(places[chosen])
        return numbers

    def _lane_numbers(self, span: range, passes: _Int64s, places: _Int64s) -> _Int64s:
        """Return the run of slots that each position is in; 0 if there is one lane."""
        numbers = np.zeros_like(places)
        if self._lane_starts is None or not passes.size:
            return numbers
        for number in span:
            chosen = passes == number
            numbers[chosen] = np.searchsorted(self._lane_starts(number)[1:], places[chosen], side="right")
        return numbers

    def _parts(self, epochs: _Int64s | None, windows: _Int64s, lanes: _Int64s, items: _Int64s) -> tuple[Part, ...]:
        # Windows of a padded batch do not ascend: it ends with items from the beginning of the epoch.
        if epochs is None and len(items) and (windows == windows[0]).all() and (lanes == lanes[0]).all():
            window = self._window(self.number, int(windows[0]), int(lanes[0]))
            return (Part(window, 0, window.find_rows(items)),)
        changed = (windows[1:] != windows[:-1]) | (lanes[1:] != lanes[:-1])
        if epochs is not None:
            changed |= epochs[1:] != epochs[:-1]
        changes = (changed.nonzero()[0] + 1).tolist()
        parts = []
        for begin, end in zip([0, *changes], [*changes, len(items)], strict=True):
            epoch = self.number if epochs is None else int(epochs[begin])
            window = self._window(epoch, int(windows[begin]), int(lanes[begin]))
            parts.append(Part(window, begin, window.find_rows(items[begin:end])))
        return tuple(parts)

    def _window(self, epoch: int, number: int, lane: int) -> Window:
        key = (epoch, number, lane)
        if key not in self._windows:
            if len(self._windows) > 4 * self.passes.lanes:
                self._windows.clear()
            self._windows[key] = self._make_window(epoch, number, lane)
        return self._windows[key]

    def _make_window(self, epoch: int, number: int, lane: int) -> Window:
        """Return the items of a window that a lane visits: other lanes may be read elsewhere, or much later."""
        arrangement = self.passes.arrangement(epoch)
        windows = arrangement.windows
        assert windows is not None, "called for orders with windows only"
        if self._lane_starts is not None:
            begin, end = windows.starts(np.array([number, number + 1])).tolist()
            cuts = self._lane_starts(epoch)[1:]
            first = max(begin, int(cuts[lane - 1])) if lane else begin
            stop = min(end, int(cuts[lane])) if lane < len(cuts) else end
            if stop - first < min(end - begin, MOST_CUT):
                items = np.sort(self.passes.index.stored(arrangement.items(np.arange(first, stop))))
                return Window(epoch, number, _join_runs(items), cut_at=first)
        return Window(epoch, number, self.passes.index.stored_spans(windows.spans(number)))

    def share(self, world: World, start: int = 0) -> "Share":
        """Return the share of rank `world.rank` in this epoch, from batch `start` on."""
        return Share(self, world, start, self.passes.tail)


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
        if not self._start:
            raise PlanError(
                f"The last {over} of {stop} batches must have an item for each of the {size} ranks in every epoch: a "
                "rank without a batch would block the others. Use tail='pad' (masked), tail='drop', or fewer ranks."
            )
        self.left_out = over


def _join_runs(items: _Int64s) -> _Int64s:
    """Return the spans of consecutive items, given in ascending order."""
    ends = np.flatnonzero(np.diff(items, append=items[-1] + 2) != 1)
    starts = np.concatenate([[0], ends[:-1] + 1])
    return np.stack([items[starts], items[ends] + 1], axis=1)


def _cut_rows(rows: Rows, which: slice, first_row: int) -> Rows:
    """Return some of the rows, numbered from 0 on."""
    return replace(
        rows,
        numbers=rows.numbers[which] - first_row,
        begins=rows.begins[which],
        counts=rows.counts[which],
        lengths=rows.lengths[which],
    )


def _repeat(borders: tuple[_Int64s, _Int64s], sizes: _Int64s) -> tuple[_Int64s, _Int64s]:
    return np.repeat(borders[0], sizes), np.repeat(borders[1], sizes)


def join_ranges(starts: _Int64s, sizes: _Int64s) -> _Int64s:
    """Return start, start + 1, … of each range, one after the other.

    Examples
    --------
    >>> join_ranges(np.array([5, 0]), np.array([2, 3])).tolist()
    [5, 6, 0, 1, 2]
    """
    if len(sizes) == 1:
        return np.arange(starts[0], starts[0] + sizes[0])
    if len(sizes) and (sizes == sizes[0]).all():
        joined: _Int64s = (starts[:, None] + np.arange(int(sizes[0]))).reshape(-1)
        return joined
    ends = np.cumsum(sizes)
    found: _Int64s = np.arange(int(ends[-1]) if len(ends) else 0) + np.repeat(starts - (ends - sizes), sizes)
    return found
