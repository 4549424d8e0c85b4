"""Windows of a long recording as items: where they start, how long they are, and the order an epoch visits them in.

An item is a window, numbered `start × (size + 1) + length`. So a plan can address windows of any length at any row, and
a loader needs nothing but a plan. Users of this package call a window a chunk.
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
    """Numbers the windows of up to `size` rows in a recording of `total` rows."""

    total: int
    size: int

    def __post_init__(self) -> None:
        check_integer("total_timesteps", self.total, at_least=1)
        check_integer("chunk_size", self.size, at_least=1)

    @property
    def n_items(self) -> int:
        """One more than the largest item number."""
        return (self.total + 1) * (self.size + 1)

    def items(self, starts: _Int64s, lengths: _Int64s) -> _Int64s:
        """Return the item numbers of windows."""
        return starts * (self.size + 1) + lengths

    def window(self, item: int) -> tuple[int, int]:
        """Return the start and stop rows of a window."""
        start, length = divmod(item, self.size + 1)
        return start, start + length


@dataclass(frozen=True)
class RandomWindows:
    """Random windows, with replacement: an epoch is `count` of them, not a pass over the data."""

    coded: Coded
    count: int
    align: int = 1
    """Windows start at multiples of this many rows."""

    def check(self, index: Index) -> None:
        """Raise PlanError if the index was made for other windows."""
        _check_index(index, self.coded)

    def arrange(self, index: Index, seed: int, epoch: int) -> Arrangement:  # noqa: ARG002  # windows are not stored
        """Return the windows of `epoch`; the first k do not depend on `count`."""
        length = min(self.coded.size, self.coded.total)
        choices = np.uint64((self.coded.total - length) // self.align + 1)
        key = key_for(seed, "windows", epoch)

        def items(positions: _Int64s) -> _Int64s:
            starts = (subkeys(key, positions) % choices).astype(np.int64) * self.align
            return self.coded.items(starts, np.full(len(starts), length))

        return Arrangement(self.count, items=items, visits=lambda positions: positions)


@dataclass(frozen=True)
class PartitionWindows:
    """Adjacent windows that cover every row exactly once, permuted; their borders shift every epoch."""

    coded: Coded
    align: int = 1
    """Borders lie at multiples of this many rows, such as the rows of a stored chunk. Windows then have the largest
    multiple of it that is <= the window size."""

    def __post_init__(self) -> None:
        if self.align > self.coded.size <= self.coded.total:
            raise PlanError(
                f"chunk_size must be >= the alignment of its borders ({self.align} rows), got {self.coded.size}. Use a "
                "larger chunk_size, or a smaller align or time_units."
            )

    def check(self, index: Index) -> None:
        """Raise PlanError if the index was made for other windows."""
        _check_index(index, self.coded)

    @property
    def _step(self) -> int:
        """Rows from one border to the next; the window size if the recording is shorter than that."""
        size = self.coded.size
        return size if self.coded.total < size else size - size % self.align

    def _phases(self) -> range:
        """Return where the second window may start, such that all epochs have equally many windows."""
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
    """Windows listed by the caller, in that order."""

    coded: Coded
    windows: tuple[tuple[int, int], ...]

    def __repr__(self) -> str:
        return self._repr

    @cached_property
    def _repr(self) -> str:
        # Part of every saved state, and a loader takes one for each chunk: written each time, n windows cost O(n²).
        return f"{type(self).__qualname__}(coded={self.coded!r}, windows={self.windows!r})"

    def check(self, index: Index) -> None:
        """Raise PlanError if the index was made for other windows, or a window is empty or too long."""
        _check_index(index, self.coded)
        for start, stop in self.windows:
            if not 0 <= start < stop <= self.coded.total or stop - start > self.coded.size:
                raise PlanError(
                    f"Chunks must be (start, end) with 0 <= start < end <= {self.coded.total}, got ({start}, {stop})."
                )

    def arrange(self, index: Index, seed: int, epoch: int) -> Arrangement:  # noqa: ARG002
        """Return the windows, the same in every epoch."""
        table = np.array(self.windows, np.int64).reshape(-1, 2)
        codes = self.coded.items(table[:, 0], table[:, 1] - table[:, 0])
        return Arrangement(len(codes), items=lambda positions: codes[positions], visits=lambda positions: positions)


def _check_index(index: Index, coded: Coded) -> None:
    if len(index) != coded.n_items:
        raise PlanError(
            f"The index must have {coded.n_items} items, for windows of up to {coded.size} of {coded.total} rows, got "
            f"{index!r}."
        )


class WindowMemory:
    """Lends reusable memory for windows, which may differ in length.

    1. A window shorter than the buffers gets the head of one.
    2. A longer window: from then on, buffers have its size; older ones are freed when they are returned.
    3. Three windows in a row that need less than half of a buffer: from then on, buffers have the size of the third.
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
    """A map-style dataset of windows: what `load_fn` returns for each, as tensors that share memory with nothing else.

    Parameters
    ----------
    load_fn
        Takes start and end rows, returns one array or a tuple of arrays.
    coded
        How windows are numbered.
    pinned
        Copy the arrays into page-locked memory, for asynchronous copies to a device.
    """

    def __init__(self, load_fn: LoadFn, coded: Coded, *, pinned: bool) -> None:
        if not callable(load_fn):
            raise OptionError(f"load_fn must be a function of start and end, got {load_fn!r}.")
        self.coded = coded
        self._load_fn, self._pinned = load_fn, pinned
        self._memory: dict[tuple[Any, ...], WindowMemory] = {}
        self._row_bytes: int | None = None
        self._lock, self._turn = threading.Lock(), threading.Lock()

    def __len__(self) -> int:
        return self.coded.n_items

    def __getitem__(self, item: int) -> dict[str, Any]:
        start, stop = self.coded.window(item)
        try:
            arrays = self.load(start, stop)
        except IndexError as error:  # DatasetSource would take it to mean that there is no such window
            raise ReadError(f"load_fn({start}, {stop}) raised an IndexError: {error}") from error
        except Exception as error:
            error.add_note(f"[penstock] while loading the chunk from {start} to {stop}")
            raise
        # Two references are the list and the argument of getrefcount. With a third one, somebody else may read the
        # array later, or return it again.
        unshared = [sys.getrefcount(arrays[place]) == 2 for place in range(len(arrays))]
        tensors = tuple(self._tensor(array, unshared=own) for array, own in zip(arrays, unshared, strict=True))
        return {"start": start, "stop": stop, "tensors": tensors}

    def load(self, start: int, stop: int) -> Sequence[NDArray[Any]]:
        """Call `load_fn` for a window and check the arrays it returns; one call at a time."""
        with self._turn:
            found = self._load_fn(start, stop)
        arrays = [np.asarray(array) for array in (found if isinstance(found, tuple | list) else (found,))]
        if not arrays:
            raise OptionError(f"load_fn({start}, {stop}) must return at least one array, got none.")
        for array in arrays:
            if array.ndim == 0 or len(array) != stop - start:
                raise OptionError(
                    f"load_fn({start}, {stop}) must return arrays with {stop - start} rows on axis 0, got shape "
                    f"{array.shape}."
                )
        self._row_bytes = sum(array.nbytes for array in arrays) // (stop - start)
        return arrays

    def row_bytes(self, row: int) -> int:
        """Return the bytes of one row; loads `row` if nothing was loaded yet."""
        if self._row_bytes is None:
            self.load(row, row + 1)
        assert self._row_bytes is not None, "known after loading"
        return self._row_bytes

    def _tensor(self, array: NDArray[Any], *, unshared: bool) -> torch.Tensor:
        if self._pinned:
            room = self._memory_for(array).lend(len(array))[""]
            np.copyto(room, array)
            return torch.from_numpy(room)
        # A view of something larger, such as a memory map or an array in memory, belongs to the caller: writing to a
        # chunk must not reach it. Memory lent by a pool is meant to be written to.
        if not (
            unshared
            and (array.base is None or _is_lent(array))
            and array.flags.writeable
            and array.flags.c_contiguous
            and array.dtype.isnative
        ):
            array = np.array(array, array.dtype.newbyteorder("="), order="C")
        return torch.from_numpy(array)

    def _memory_for(self, array: NDArray[Any]) -> WindowMemory:
        key = (array.dtype.newbyteorder("=").str, array.shape[1:])
        with self._lock:
            if key not in self._memory:
                field = Field(array.dtype.newbyteorder("="), array.shape[1:])
                self._memory[key] = WindowMemory({"": field}, allocate_pinned)
            return self._memory[key]


def _is_lent(array: Any) -> bool:
    """Return whether an array lies in memory that a pool lent for it alone."""
    while isinstance(array, np.ndarray):
        array = array.base
    return type(array).__name__ == "_Lease"
