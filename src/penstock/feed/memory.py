"""Estimate the memory of a loader before it allocates any."""

import math
from dataclasses import dataclass
from typing import Any

import torch

from penstock.feed.device import map_tensors
from penstock.plan.epoch import Passes

__all__ = ["MemoryEstimate", "max_window_items", "tensor_bytes", "window_capacity"]

_SHOWN_BYTES = 50_000  # less than this is 0.0 MB


@dataclass(frozen=True, slots=True)
class MemoryEstimate:
    """Peak memory of an epoch in bytes, beyond the process itself and the page cache."""

    batch_bytes: int
    """Bytes of one batch."""

    batches_held: int
    """Batches made ahead, being made, and held by the consumer."""

    window_bytes: int
    """Bytes of the largest shuffle window; 0 for orders without windows."""

    windows_held: int
    """Windows kept by all workers."""

    device_bytes: int
    """Bytes on the device: batches in use and in flight."""

    cache_bytes: int = 0
    """Most bytes that the source keeps, over all workers: tables, chunks, decompressed shards."""

    @property
    def host_bytes(self) -> int:
        """Bytes in main memory, over all workers."""
        return self.batch_bytes * self.batches_held + self.window_bytes * self.windows_held + self.cache_bytes

    def __str__(self) -> str:
        words = f"{self.host_bytes / 1e6:.1f} MB: {self.batches_held} batches of {self.batch_bytes / 1e6:.2f} MB"
        if self.windows_held:
            words += f", {self.windows_held} windows of {self.window_bytes / 1e6:.2f} MB"
        if self.cache_bytes >= _SHOWN_BYTES:
            words += f", up to {self.cache_bytes / 1e6:.1f} MB kept by the source"
        return words + (f"; {self.device_bytes / 1e6:.1f} MB on the device" if self.device_bytes else "")


def tensor_bytes(batch: Any) -> int:
    """Return the bytes of all tensors in a nested batch."""
    total = 0

    def add(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal total
        total += tensor.nbytes
        return tensor

    map_tensors(batch, add)
    return total


def max_window_items(passes: Passes) -> int:
    """Return the number of items in the largest window of an epoch; 0 for orders without windows."""
    windows = passes.arrangement(0).windows
    if windows is None or not windows.count:
        return 0
    spans = passes.index.stored_spans(windows.spans(windows.largest()))
    return int((spans[:, 1] - spans[:, 0]).sum())


def window_capacity(passes: Passes, *, lanes: int, in_flight: int) -> tuple[int, int]:
    """Return how many windows a process keeps, and how many batches ahead of its threads it reads them.

    Parameters
    ----------
    lanes
        Lanes that this process visits.
    in_flight
        Batches that threads may make at once; 0: windows are read when they are needed.
    """
    windows = passes.arrangement(0).windows
    if windows is None or not windows.count:
        return 0, 0
    size, window = passes.batch_size, passes.length / windows.count
    count = windows.count + passes.lanes - 1  # those that lie in two lanes are cut
    if in_flight == 0:
        # Each lane returns to its last window; a batch of many small windows needs all of them.
        return min(lanes + math.ceil(size / window) + 1, count), 0
    # From the oldest batch in progress to the one that is read ahead, a lane spans `reached` batches: as many as fit
    # into one window, so that no more than two windows are held. Small windows are held by the dozen.
    working = math.ceil(in_flight / lanes)
    ahead = max(1, int(window // size) - working - 1)
    reached = ahead + working + 1
    held = lanes * (math.ceil(reached * size / window) + 1)
    return min(held, count), ahead * passes.lanes
