"""How much memory a loader will take, told before it takes any."""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from penstock.core.types import Arrangement
from penstock.feed.device import mapped
from penstock.plan.plan import Plan

__all__ = ["MemoryEstimate", "largest_window", "tensor_bytes", "window_room"]


@dataclass(frozen=True, slots=True)
class MemoryEstimate:
    """Bytes at the peak of an epoch, beyond the process itself and the page cache."""

    batch_bytes: int
    """One batch."""

    batches_held: int
    """Batches made ahead, being made, and held by the consumer."""

    window_bytes: int
    """The largest window; 0 for orders without windows."""

    windows_held: int
    """Windows kept, over all workers."""

    device_bytes: int
    """On the device: what computes and what is on its way."""

    @property
    def host_bytes(self) -> int:
        """In main memory, over all workers."""
        return self.batch_bytes * self.batches_held + self.window_bytes * self.windows_held

    def __str__(self) -> str:
        words = f"{self.host_bytes / 1e6:.1f} MB: {self.batches_held} batches of {self.batch_bytes / 1e6:.2f} MB"
        if self.windows_held:
            words += f", {self.windows_held} windows of {self.window_bytes / 1e6:.2f} MB"
        return words + (f"; {self.device_bytes / 1e6:.1f} MB on the device" if self.device_bytes else "")


def tensor_bytes(batch: Any) -> int:
    """Return the bytes of the tensors in a batch, however it is nested."""
    total = 0

    def add(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal total
        total += tensor.nbytes
        return tensor

    mapped(batch, add)
    return total


def largest_window(plan: Plan) -> int:
    """Return the items in the largest window of an epoch; 0 for orders without windows."""
    arrangement = plan.arrangement(0)
    if arrangement.window_starts is None or not len(arrangement.window_starts):
        return 0
    sizes = np.diff(np.append(arrangement.window_starts, arrangement.length))
    return _stored_items(plan, arrangement, int(sizes.argmax()))


def _stored_items(plan: Plan, arrangement: Arrangement, window: int) -> int:
    assert arrangement.spans is not None, "an order with windows says which spans they hold"
    spans = plan.index.stored_spans(arrangement.spans(window))
    return int((spans[:, 1] - spans[:, 0]).sum())


def window_room(plan: Plan, *, lanes: int, in_flight: int) -> tuple[int, int]:
    """Return how many windows a process keeps, and how many batches ahead of the workers it reads them.

    Parameters
    ----------
    lanes
        Lanes that this process visits.
    in_flight
        Batches that threads may be working on at once; 0: windows are read when they are needed.
    """
    starts = plan.arrangement(0).window_starts
    if starts is None or not len(starts):
        return 0, 0
    size, window = plan.batch_size, plan.length / len(starts)
    if in_flight == 0:
        # Each lane comes back to the window it was in; a batch of many small windows needs all of them.
        return min(lanes + math.ceil(size / window) + 1, len(starts)), 0
    # From the last batch that is still worked on to the one that is read ahead, a lane has `reached` batches. They are
    # as many as fit into one window, so that no more than two of them are held; small windows are held by the dozen.
    working = math.ceil(in_flight / lanes)
    ahead = max(1, int(window // size) - working - 1)
    reached = ahead + working + 1
    held = lanes * (math.ceil(reached * size / window) + 1)
    return min(held, len(starts)), ahead * plan.lanes
