"""Pass batches from worker processes through a fixed set of reusable slots of shared memory.

A worker makes a batch in a slot, or copies it there, and sends a few hundred bytes of pickle that refer to it. Small
arrays are copied out of the slot, so that a kept label keeps no more than itself. The tensors of large ones lie in the
slot, which is free again when they are gone.

The memory has no name to leave behind, and the size of /dev/shm does not limit it. Slots are large and sparse: only
pages that are touched take memory.

1. The consumer keeps batches: as soon as few slots are left, batches are copied out of them.
2. A batch does not fit into a slot: it travels through the pipe.
3. The ring is dropped while batches in it are in use: they stay valid.
"""

import io
import mmap
import pickle
from collections import deque
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from penstock.core.types import Block
from penstock.run.buffers import FieldLayout
from penstock.run.leases import Leases
from penstock.run.processes.shared_pages import SharedPages

__all__ = ["Packed", "Ring", "Slot"]

_SLOT_BYTES, _SMALL_SLOT_BYTES = 1 << 28, 1 << 22
_ALIGNMENT = 64
_COPIED_BYTES = 1 << 16  # arrays up to this size are copied out of a slot: about 10 µs

STARTING, IDLE = 0, -1
"""What a worker does, on the board; otherwise, the number of the request that it works on."""


class Packed(NamedTuple):
    """A pickled object whose arrays lie in a slot, or in `arrays` if they do not fit."""

    pickled: bytes
    places: list[tuple[int, int]]
    """First and last byte (exclusive) of each array, from the start of the slot."""

    arrays: list[bytes]

    @property
    def n_bytes(self) -> int:
        """Bytes of the object."""
        return len(self.pickled) + sum(end - begin for begin, end in self.places) + sum(map(len, self.arrays))


class Ring:
    """Slots of shared memory, assigned by the consumer's process and written by the workers.

    A few are large, and the others small: the address space of a process may be limited.
    """

    def __init__(self, slots: int, leased: int, workers: int, small: int = 0) -> None:
        self._max_leased, self._n_large = leased, slots
        self._board_bytes = -(-2 * 8 * workers // mmap.PAGESIZE) * mmap.PAGESIZE
        self._pages = SharedPages(self._board_bytes + slots * _SLOT_BYTES + small * _SMALL_SLOT_BYTES)
        self._free, self._free_small = deque(range(slots)), deque(range(slots, slots + small))
        self._leases = Leases(partial(_give_back, self._free, self._free_small, slots))
        self.board[: 2 * workers] = STARTING

    @property
    def board(self) -> NDArray[np.int64]:
        """Two numbers for each worker: the request it works on, and the first request that it must not skip."""
        return self._pages.memory[: self._board_bytes].view(np.int64)

    # -- in the consumer's process -------------------------------------------------------------------------------------

    def acquire(self, n_bytes: float = 0) -> int | None:
        """Return a free slot for a worker to write `n_bytes` to, or more; None if there is none. 0: not known."""
        if 0 < 2 * n_bytes <= _SMALL_SLOT_BYTES and self._free_small:
            return self._free_small.pop()
        return self._free.pop() if self._free else None

    def release(self, slot: int) -> None:
        """Take back a slot whose content is not needed."""
        _give_back(self._free, self._free_small, self._n_large, slot)

    def unpack(self, slot: int, packed: Packed) -> Any:
        """Return the object that a worker packed; the slot is free again when its large arrays are gone."""
        if packed.arrays:
            self.release(slot)
            return pickle.loads(packed.pickled, buffers=[bytearray(array) for array in packed.arrays])
        memory = self.slot_memory(slot)
        is_crowded = len(self._leases) >= self._max_leased
        whole: NDArray[np.uint8] | None = None
        buffers = []
        for begin, end in packed.places:
            if is_crowded or end - begin <= _COPIED_BYTES:
                buffers.append(memory[begin:end].copy())
                continue
            if whole is None:
                whole = self._leases.lend(memory, slot)
            buffers.append(whole[begin:end])
        if whole is None:
            self.release(slot)
        return pickle.loads(packed.pickled, buffers=buffers)

    # -- in both -------------------------------------------------------------------------------------------------------

    def slot_memory(self, slot: int) -> NDArray[np.uint8]:
        """Return the memory of a slot."""
        n_small = max(0, slot - self._n_large)
        begin = self._board_bytes + (slot - n_small) * _SLOT_BYTES + n_small * _SMALL_SLOT_BYTES
        return self._pages.memory[begin : begin + (_SLOT_BYTES if slot < self._n_large else _SMALL_SLOT_BYTES)]

    def __getstate__(self) -> dict[str, Any]:
        return {"_board_bytes": self._board_bytes, "_n_large": self._n_large, "_pages": self._pages}


def _give_back(large: deque[int], small: deque[int], n_large: int, slot: int) -> None:
    """Make a slot free; without the ring, which would otherwise refer to itself."""
    (large if slot < n_large else small).append(slot)


class Slot:
    """A slot in the process of the worker that writes it."""

    def __init__(self, memory: NDArray[np.uint8]) -> None:
        self._memory = memory
        self._address = memory.__array_interface__["data"][0]
        self._used = 0

    def lend(self, layout: FieldLayout, n_items: int) -> Block | None:
        """Return arrays in the slot for `n_items` items; None if they do not fit."""
        n_bytes = layout.n_bytes(n_items)
        begin, self._used = self._used, self._used + n_bytes
        if self._used > len(self._memory):
            self._used = begin
            return None
        return layout.arrays(self._memory[begin : begin + n_bytes], n_items)

    def pack(self, value: Any) -> Packed:
        """Return `value` with its arrays in the slot; those that are not there yet are copied."""
        found: list[pickle.PickleBuffer] = []
        stream = io.BytesIO()
        _Pickler(stream, protocol=5, buffer_callback=found.append).dump(value)
        arrays = [np.frombuffer(array.raw(), np.uint8) for array in found]
        places, end = [], self._used
        for array in arrays:
            begin = array.__array_interface__["data"][0] - self._address
            if not 0 <= begin <= begin + len(array) <= self._used:
                begin, end = end, -(-(end + len(array)) // _ALIGNMENT) * _ALIGNMENT
            places.append((begin, begin + len(array)))
        if end > len(self._memory):
            return Packed(stream.getvalue(), [], [array.tobytes() for array in arrays])
        for array, (begin, stop) in zip(arrays, places, strict=True):
            if begin >= self._used:
                self._memory[begin:stop] = array
        return Packed(stream.getvalue(), places, [])


class _Pickler(pickle.Pickler):
    """Pickles CPU tensors as raw bytes, out of band."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor) and value.layout is torch.strided and value.device.type == "cpu":
            if not value.numel():  # no bytes to send, and strides with which torch may refuse a view as bytes
                return _make_empty, (value.dtype, value.shape)
            plain = value.detach().contiguous()
            return _make_tensor, (plain.reshape(-1).view(torch.uint8).numpy(), plain.dtype, tuple(plain.shape))
        return NotImplemented


def _make_tensor(raw: NDArray[np.uint8], dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    return torch.from_numpy(raw).view(dtype).view(shape)


def _make_empty(dtype: torch.dtype, shape: torch.Size) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype)
