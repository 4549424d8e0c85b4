"""How much memory a loader will take, told before it takes any."""

from dataclasses import dataclass

import numpy as np

from penstock.core.types import Arrangement
from penstock.plan.plan import Plan

__all__ = ["MemoryEstimate", "largest_window", "windows_held"]


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


def windows_held(plan: Plan, *, lanes: int, threads: int) -> int:
    """Return how many windows a process keeps: for each of its lanes one in use, and with threads the next one."""
    window = largest_window(plan)
    starts = plan.arrangement(0).window_starts
    if not window or starts is None:
        return 0
    # A batch of many small windows needs all of them at once, for every thread that works on one.
    per_draw = -(-plan.batch_size // window) + 1
    return min(lanes * (2 if threads else 1) + max(threads, 1) * per_draw, len(starts))
