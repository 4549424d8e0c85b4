"""Batches cross from worker processes through a fixed set of shared-memory slots that are used again and again.

Torch makes a new shared-memory segment for every tensor of every batch: its creation and its page faults cost more than
the copy. Here a worker copies the arrays of a batch into a slot that it is told of, and sends the rest, a few hundred
bytes of pickle that refer to them; the consumer's tensors lie in the slot, which is free again when they are gone.

The memory is anonymous (memfd): it has no name to leave behind, and is not bound by the size of /dev/shm. Slots are
large and empty: only what is touched takes memory.

1. No slot is free, since the consumer keeps batches, or the system has no such memory (it is Linux's): the batch
   travels as torch sends it.
2. A batch does not fit into a slot: the same.
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

__all__ = ["Ring", "Shipped"]

_SLOT_BYTES = 1 << 28
_ALIGNMENT = 64


@dataclass(frozen=True, slots=True)
class Shipped:
    """A batch that lies in a slot."""

    slot: int
    pickled: bytes
    places: list[tuple[int, int]]
    """Begin and end of each array, in bytes from the start of the slot."""


class Ring:
    """Slots, given out by the consumer's process and written by the workers'."""

    def __init__(self, slots: int) -> None:
        self._slots = slots if hasattr(os, "memfd_create") else 0
        self._fd = -1
        if self._slots:
            self._fd = os.memfd_create("penstock-ring")
            os.ftruncate(self._fd, slots * _SLOT_BYTES)
            weakref.finalize(self, os.close, self._fd)
        self._free = deque(range(self._slots))
        self._asked: set[int] = set()
        self._leases = Leases(self._free.append)
        self._mapped: NDArray[np.uint8] | None = None

    # -- in the consumer's process -------------------------------------------------------------------------------------

    def ask(self) -> int | None:
        """Return a free slot for a worker to write into; None where there is none."""
        try:
            slot = self._free.pop()
        except IndexError:
            return None
        self._asked.add(slot)
        return slot

    def reclaim(self) -> None:
        """Take back the slots whose batches will never come: those of an iteration that was broken off."""
        self._free.extend(self._asked)
        self._asked.clear()

    def unused(self, slot: int | None) -> None:
        """Take back a slot that its batch did not use."""
        if slot is not None:
            self._asked.discard(slot)
            self._free.append(slot)

    def opened(self, shipped: Shipped) -> Any:
        """Return the batch, its tensors lying in the slot."""
        self._asked.discard(shipped.slot)
        whole = self._leases.lend(self._slot(shipped.slot), shipped.slot)
        return pickle.loads(shipped.pickled, buffers=[whole[begin:end] for begin, end in shipped.places])

    # -- in a worker's process -----------------------------------------------------------------------------------------

    def written(self, slot: int, batch: Any) -> Shipped | None:
        """Copy the arrays of `batch` into a slot; None where they do not fit."""
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
        return Shipped(slot, stream.getvalue(), places)

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
    """Pickles tensors as the bytes they lie in, out of band."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor) and value.layout is torch.strided and value.device.type == "cpu":
            if not value.numel():  # no bytes to send, and strides that torch may not take for bytes
                return _empty, (value.dtype, value.shape)
            plain = value.detach().contiguous()
            return _tensor, (plain.reshape(-1).view(torch.uint8).numpy(), plain.dtype, plain.shape)
        return NotImplemented


def _tensor(raw: NDArray[np.uint8], dtype: torch.dtype, shape: torch.Size) -> torch.Tensor:
    return torch.from_numpy(raw).view(dtype).reshape(shape)


def _empty(dtype: torch.dtype, shape: torch.Size) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype)
