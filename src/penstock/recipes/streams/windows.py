"""Windows of a long recording as items: where they begin, how long they are, and in which order an epoch visits them.

An item is a window: its number is `start × (size + 1) + length`. So a plan can deal in windows of any length, anywhere,
and a loader needs nothing but a plan.
"""

import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from penstock.core.checks import check_integer
from penstock.core.errors import OptionError, PlanError, ReadError
from penstock.core.index import Index
from penstock.core.seeds import key_for, subkeys
from penstock.core.types import Arrangement, Field
from penstock.feed.device import allocate_pinned
from penstock.plan.permute import permute
from penstock.run.buffers import BufferPool

__all__ = ["Coded", "GivenWindows", "PartitionWindows", "RandomWindows", "WindowData", "WindowMemory"]

_Int64s = NDArray[np.int64]
LoadFn = Callable[[int, int], Any]


@dataclass(frozen=True, slots=True)
class Coded:
    """Windows of up to `size` rows, out of `total`, as numbers."""

    total: int
    size: int

    def __post_init__(self) -> None:
        check_integer("total_timesteps", self.total, at_least=1)
        check_integer("chunk_size", self.size, at_least=1)

    @property
    def n_items(self) -> int:
        """One more than the largest number."""
        return (self.total + 1) * (self.size + 1)

    def items(self, starts: _Int64s, lengths: _Int64s) -> _Int64s:
        """Return the numbers of windows."""
        return starts * (self.size + 1) + lengths

    def window(self, item: int) -> tuple[int, int]:
        """Return begin and end of a window."""
        start, length = divmod(item, self.size + 1)
        return start, start + length


@dataclass(frozen=True)
class RandomWindows:
    """Windows that begin anywhere, drawn with replacement: an epoch is `count` of them, and no pass over the data."""

    coded: Coded
    count: int
    align: int = 1
    """A window begins at a multiple of this many rows."""

    def check(self, index: Index) -> None:
        """Refuse an index that was made for other windows."""
        _check_index(index, self.coded)

    def arrange(self, index: Index, seed: int, epoch: int) -> Arrangement:  # noqa: ARG002  # windows are not stored
        """Return the windows of `epoch`; the first ones are the same for any count."""
        length = min(self.coded.size, self.coded.total)
        choices = np.uint64((self.coded.total - length) // self.align + 1)
        key = key_for(seed, "windows", epoch)

        def items(positions: _Int64s) -> _Int64s:
            starts = (subkeys(key, positions) % choices).astype(np.int64) * self.align
            return self.coded.items(starts, np.full(len(starts), length))

        return Arrangement(self.count, items=items, visits=lambda positions: positions)


@dataclass(frozen=True)
class PartitionWindows:
    """Every row exactly once: windows side by side, in a permuted order, their borders shifted anew in every epoch."""

    coded: Coded
    align: int = 1
    """Borders lie at multiples of this many rows: the chunks that they are stored in. So windows have the largest
    multiple of it that is no more than the size of a window."""

    def __post_init__(self) -> None:
        if self.align > self.coded.size <= self.coded.total:
            raise PlanError(
                f"chunk_size={self.coded.size} is less than the {self.align} rows that its borders are aligned to; "
                "use a larger chunk_size, or a smaller align or time_units."
            )

    def check(self, index: Index) -> None:
        """Refuse an index that was made for other windows."""
        _check_index(index, self.coded)

    @property
    def _step(self) -> int:
        """Rows from one border to the next; a recording that is smaller than a window has none."""
        size = self.coded.size
        return size if self.coded.total < size else size - size % self.align

    def _phases(self) -> range:
        """Return where the second window may begin, such that all epochs have equally many windows."""
        if self.coded.total < self._step:
            return range(0)
        first = max(self.coded.total % self._step, 1)
        return range(-(-first // self.align) * self.align, self._step, self.align)

    @property
    def count(self) -> int:
        """Windows in an epoch."""
        whole, rest = divmod(self.coded.total, self._step)
        return whole + (1 if self._phases() else rest > 0)

    def arrange(self, index: Index, seed: int, epoch: int) -> Arrangement:  # noqa: ARG002
        """Return the windows of `epoch`."""
        size, total, phases = self._step, self.coded.total, self._phases()
        if phases:
            pick = int(subkeys(key_for(seed, "phase", epoch), np.zeros(1, np.int64))[0] % np.uint64(len(phases)))
            starts = np.array([0, *range(phases[pick], total, size)])
        else:
            starts = np.arange(0, total, size)
        lengths = np.diff(np.append(starts, total))
        codes, key = self.coded.items(starts, lengths), key_for(seed, "windows", epoch)
        return Arrangement(len(codes), items=lambda positions: codes[permute(positions, len(codes), key)])


@dataclass(frozen=True)
class GivenWindows:
    """Windows that the caller names, in that order."""

    coded: Coded
    windows: tuple[tuple[int, int], ...]

    def __repr__(self) -> str:
        return self._repr

    @cached_property
    def _repr(self) -> str:
        # Part of every saved state, and a loader takes one for each chunk: written each time, n windows cost O(n²).
        return f"{type(self).__qualname__}(coded={self.coded!r}, windows={self.windows!r})"

    def check(self, index: Index) -> None:
        """Refuse windows that do not fit."""
        _check_index(index, self.coded)
        for start, stop in self.windows:
            if not 0 <= start < stop <= self.coded.total or stop - start > self.coded.size:
                raise PlanError(f"The chunk ({start}, {stop}) is empty, or reaches out of the data.")

    def arrange(self, index: Index, seed: int, epoch: int) -> Arrangement:  # noqa: ARG002
        """Return the windows, the same in every epoch."""
        table = np.array(self.windows, np.int64).reshape(-1, 2)
        codes = self.coded.items(table[:, 0], table[:, 1] - table[:, 0])
        return Arrangement(len(codes), items=lambda positions: codes[positions], visits=lambda positions: positions)


def _check_index(index: Index, coded: Coded) -> None:
    if len(index) != coded.n_items:
        raise PlanError(f"{index!r} is not made of windows of {coded.size} of {coded.total} rows.")


class WindowMemory:
    """Lends memory for windows, which is used again, also where they differ in length.

    1. A window that is shorter than others gets the beginning of a buffer for those.
    2. One that is longer: from now on, buffers are for it; those before go when they are given back.
    3. Three in a row that need less than half of a buffer: from now on, buffers are for these.
    """

    def __init__(self, fields: Mapping[str, Field], allocate: Callable[[int], NDArray[np.uint8]] | None = None) -> None:
        self._fields, self._allocate = fields, allocate
        self._rows, self._shorter = 0, 0
        self._pool = BufferPool(fields, allocate)
        self._lock = threading.Lock()

    def lend(self, n_rows: int) -> dict[str, NDArray[Any]]:
        """Return arrays of `n_rows` rows with arbitrary content."""
        with self._lock:
            self._shorter = self._shorter + 1 if 2 * n_rows < self._rows else 0
            if n_rows > self._rows or self._shorter >= 3:
                self._rows, self._shorter = n_rows, 0
                self._pool = BufferPool(self._fields, self._allocate)
            block = self._pool.lend(self._rows)
        return {name: array[:n_rows] for name, array in block.items()}


class WindowData:
    """A map-style dataset of windows: what `load_fn` returns for each, as tensors that are nobody else's.

    Parameters
    ----------
    load_fn
        Takes begin and end, returns an array or several.
    coded
        Which windows there are.
    pinned
        Copy them into page-locked memory, from which a device copies by itself.
    """

    def __init__(self, load_fn: LoadFn, coded: Coded, *, pinned: bool) -> None:
        if not callable(load_fn):
            raise OptionError(f"load_fn={load_fn!r} cannot be called; give a function of start and end.")
        self._load_fn, self._coded, self._pinned = load_fn, coded, pinned
        self._memory: dict[tuple[Any, ...], WindowMemory] = {}
        self._row_bytes: int | None = None
        self._lock, self._turn = threading.Lock(), threading.Lock()

    def __len__(self) -> int:
        return self._coded.n_items

    def __getitem__(self, item: int) -> dict[str, Any]:
        start, stop = self._coded.window(item)
        try:
            arrays = self.loaded(start, stop)
        except IndexError as error:  # to the source of datasets, this means that there is no such window
            raise ReadError(f"load_fn({start}, {stop}) raised an IndexError: {error}") from error
        except Exception as error:
            error.add_note(f"[penstock] while loading the chunk from {start} to {stop}")
            raise
        # In the list, and on the way to getrefcount: whoever else has an array may read it later, or give it again.
        ours = [sys.getrefcount(arrays[place]) == 2 for place in range(len(arrays))]
        tensors = tuple(self._tensor(array, ours=own) for array, own in zip(arrays, ours, strict=True))
        return {"start": start, "stop": stop, "tensors": tensors}

    def loaded(self, start: int, stop: int) -> Sequence[NDArray[Any]]:
        """Return what `load_fn` gives for a window, checked; one call at a time."""
        with self._turn:
            found = self._load_fn(start, stop)
        arrays = [np.asarray(array) for array in (found if isinstance(found, tuple | list) else (found,))]
        if not arrays:
            raise OptionError(f"load_fn({start}, {stop}) gave no arrays.")
        for array in arrays:
            if array.ndim == 0 or len(array) != stop - start:
                raise OptionError(
                    f"load_fn({start}, {stop}) gave an array of shape {array.shape}; its first axis must have "
                    f"{stop - start} rows."
                )
        self._row_bytes = sum(array.nbytes for array in arrays) // (stop - start)
        return arrays

    def row_bytes(self, row: int) -> int:
        """Return the bytes of one row; that row is loaded where none was yet."""
        if self._row_bytes is None:
            self.loaded(row, row + 1)
        assert self._row_bytes is not None, "known after loading"
        return self._row_bytes

    def _tensor(self, array: NDArray[Any], *, ours: bool) -> torch.Tensor:
        if self._pinned:
            room = self._room(array).lend(len(array))[""]
            np.copyto(room, array)
            return torch.from_numpy(room)
        # A view of something larger, such as a memory map or an array in memory, is the caller's own: writing to a
        # chunk must not reach it. Memory that comes back by itself is made for this.
        if not (
            ours
            and (array.base is None or _lent(array))
            and array.flags.writeable
            and array.flags.c_contiguous
            and array.dtype.isnative
        ):
            array = np.array(array, array.dtype.newbyteorder("="), order="C")
        return torch.from_numpy(array)

    def _room(self, array: NDArray[Any]) -> WindowMemory:
        key = (array.dtype.newbyteorder("=").str, array.shape[1:])
        with self._lock:
            if key not in self._memory:
                field = Field(array.dtype.newbyteorder("="), array.shape[1:])
                self._memory[key] = WindowMemory({"": field}, allocate_pinned)
            return self._memory[key]


def _lent(array: Any) -> bool:
    """Return whether an array lies in memory that a pool has lent out for it alone."""
    while isinstance(array, np.ndarray):
        array = array.base
    return type(array).__name__ == "_Lease"
