"""Pass batches from worker processes through a fixed set of reusable shared-memory slots.

Torch creates a new shared-memory segment for every tensor of every batch: its creation and its page faults cost more
than the copy. Here a worker copies the arrays of a batch into the slot named in its ticket, and sends a few hundred
bytes of pickle that refer to them. The consumer's tensors lie in the slot, which is free again when they are gone.

The memory is anonymous (memfd): it has no name to leave behind, and the size of /dev/shm does not limit it. Slots are
large and sparse: only pages that are touched take memory.

1. No slot is free because the consumer keeps batches, or the system has no memfd (only Linux has): torch sends the
   batch as usual.
2. A batch does not fit into a slot: as in 1.
3. The ring is dropped while batches in it are in use: they stay valid.
"""

import io
import mmap
import os
import pickle
import weakref
from collections import deque
from dataclasses import dataclass
from multiprocessing import context, reduction
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from penstock.run.leases import Leases

__all__ = ["PackedBatch", "Ring"]

_SLOT_BYTES = 1 << 28
_ALIGNMENT = 64


@dataclass(frozen=True, slots=True)
class PackedBatch:
    """A batch whose arrays lie in a slot."""

    slot: int
    pickled: bytes
    places: list[tuple[int, int]]
    """First and last byte (exclusive) of each array, from the start of the slot."""


class Ring:
    """Slots of shared memory, assigned by the consumer's process and written by the workers."""

    def __init__(self, slots: int) -> None:
        self._slots = slots if hasattr(os, "memfd_create") else 0
        self._fd = -1
        if self._slots:
            self._fd = os.memfd_create("penstock-ring")
            os.ftruncate(self._fd, slots * _SLOT_BYTES)
            weakref.finalize(self, os.close, self._fd)
        self._free = deque(range(self._slots))
        self._acquired: set[int] = set()
        self._leases = Leases(self._free.append)
        self._mapped: NDArray[np.uint8] | None = None

    # -- in the consumer's process -------------------------------------------------------------------------------------

    def acquire(self) -> int | None:
        """Return a free slot for a worker to write to; None if there is none."""
        try:
            slot = self._free.pop()
        except IndexError:
            return None
        self._acquired.add(slot)
        return slot

    def reclaim(self) -> None:
        """Take back the slots whose batches will never come: those of an iteration that stopped early."""
        self._free.extend(self._acquired)
        self._acquired.clear()

    def release(self, slot: int | None) -> None:
        """Take back a slot that its batch did not use."""
        if slot is not None:
            self._acquired.discard(slot)
            self._free.append(slot)

    def unpack(self, packed: PackedBatch) -> Any:
        """Return the batch; its tensors lie in the slot."""
        self._acquired.discard(packed.slot)
        whole = self._leases.lend(self._slot(packed.slot), packed.slot)
        return pickle.loads(packed.pickled, buffers=[whole[begin:end] for begin, end in packed.places])

    # -- in a worker's process -----------------------------------------------------------------------------------------

    def pack(self, slot: int, batch: Any) -> PackedBatch | None:
        """Copy the arrays of `batch` into a slot; return None if they do not fit."""
        arrays: list[pickle.PickleBuffer] = []
        stream = io.BytesIO()
        _Pickler(stream, protocol=5, buffer_callback=arrays.append).dump(batch)
        places, offset = [], 0
        raws = [np.frombuffer(array.raw(), np.uint8) for array in arrays]
        for raw in raws:
            places.append((offset, offset + len(raw)))
            offset = -(-(offset + len(raw)) // _ALIGNMENT) * _ALIGNMENT
        if offset > _SLOT_BYTES:
            return None
        memory = self._slot(slot)
        for raw, (begin, end) in zip(raws, places, strict=True):
            memory[begin:end] = raw
        return PackedBatch(slot, stream.getvalue(), places)

    # -- in both -------------------------------------------------------------------------------------------------------

    def _slot(self, slot: int) -> NDArray[np.uint8]:
        if self._mapped is None:
            self._mapped = np.frombuffer(mmap.mmap(self._fd, self._slots * _SLOT_BYTES), np.uint8)
        return self._mapped[slot * _SLOT_BYTES : (slot + 1) * _SLOT_BYTES]

    def __getstate__(self) -> dict[str, Any]:
        context.assert_spawning(self)
        return {"_slots": self._slots, "_fd": reduction.DupFd(self._fd) if self._slots else None, "_mapped": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _fd=state["_fd"].detach() if state["_slots"] else -1)


class _Pickler(pickle.Pickler):
    """Pickles CPU tensors as raw bytes, out of band."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor) and value.layout is torch.strided and value.device.type == "cpu":
            if not value.numel():  # no bytes to send, and strides with which torch may refuse a view as bytes
                return _make_empty, (value.dtype, value.shape)
            plain = value.detach().contiguous()
            return _make_tensor, (plain.reshape(-1).view(torch.uint8).numpy(), plain.dtype, plain.shape)
        return NotImplemented


def _make_tensor(raw: NDArray[np.uint8], dtype: torch.dtype, shape: torch.Size) -> torch.Tensor:
    return torch.from_numpy(raw).view(dtype).reshape(shape)


def _make_empty(dtype: torch.dtype, shape: torch.Size) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype)
