"""Batches move to the device while the step before them computes.

On the CPU nothing happens. On CUDA, one batch or more is in flight besides the one that computes. They are copied from
pinned memory on a stream of their own, the consumer's stream waits for the copy's event and not for the host, and
`record_stream` keeps the allocator from giving a batch's memory away while kernels on it are still queued. The logic is
tested on the CPU with a stand-in for `CudaStreams`; it has not been run on CUDA hardware.
"""

import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import AbstractContextManager, closing
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from penstock.core.errors import OptionError

__all__ = ["CudaStreams", "checked_device", "on_device", "pinned_memory"]


def checked_device(device: str | torch.device | None) -> torch.device:
    """Return the device, or say why it cannot be used."""
    if device is None:
        return torch.device("cpu")
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise OptionError(
            f"device={device!r} is no torch device: {error}. Use for example 'cuda:0' or 'cpu'."
        ) from error
    if found.type == "cuda" and not torch.cuda.is_available():
        raise OptionError(f"device={device!r}, but this torch sees no CUDA device; use device='cpu' or None.")
    return found


def pinned_memory(n_bytes: int) -> NDArray[np.uint8]:
    """Return page-locked host memory, from which the device copies by itself."""
    memory: NDArray[np.uint8] = torch.empty(n_bytes, dtype=torch.uint8, pin_memory=True).numpy()
    return memory


class CudaStreams:
    """What a transfer needs of CUDA, in one place so that a test can stand in for it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch leaves it untyped

    def side(self) -> AbstractContextManager[Any]:
        """Issue what follows on the transfer stream."""
        return torch.cuda.stream(self._side)

    def copied(self) -> Any:
        """Return an event that is over when all that was issued on the transfer stream is."""
        return self._side.record_event()

    def wait(self, event: Any) -> None:
        """Let the consumer's stream, not the host, wait for `event`."""
        torch.cuda.current_stream(self._device).wait_event(event)

    def kept(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return `tensor`, of which the allocator now knows that the consumer's stream uses it, too."""
        tensor.record_stream(torch.cuda.current_stream(self._device))
        return tensor

    def move(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a copy on the device, perhaps still on its way."""
        pinned = tensor if tensor.is_pinned() else tensor.pin_memory()
        return pinned.to(self._device, non_blocking=True)


def on_device(
    batches: Generator[Any, None, None],
    device: torch.device,
    streams: CudaStreams | None = None,
    *,
    ahead: int = 1,
    record: Callable[[str, float, int], None] | None = None,
) -> Generator[Any, None, None]:
    """Yield each batch on `device`, `ahead` others being copied meanwhile.

    1. Reading, merging or copying a batch fails: the batches before it are delivered first, then the error.
    2. The consumer stops early: the copies under way end by themselves; their host memory is kept until they have.
    """
    with closing(batches):
        if device.type == "cpu":
            yield from batches
        elif device.type != "cuda":
            for batch in batches:
                yield mapped(batch, lambda tensor: tensor.to(device))
        else:
            yield from _overlapped(batches, streams or CudaStreams(device), ahead + 1, record)


def _overlapped(
    batches: Iterator[Any],
    streams: CudaStreams,
    in_flight: int,
    record: Callable[[str, float, int], None] | None,
) -> Generator[Any, None, None]:
    moving: deque[tuple[Any, Any, Any]] = deque()
    # Host batches whose copy may not be over: their memory must not go back to the pool before.
    reading: deque[tuple[Any, Any]] = deque()
    try:
        yield from _delivered(_sent(batches, streams, record), streams, moving, reading, in_flight)
    finally:
        for *_, event in (*moving, *reading):
            event.synchronize()


def _sent(
    batches: Iterator[Any], streams: CudaStreams, record: Callable[[str, float, int], None] | None
) -> Iterator[tuple[Any, Any, Any]]:
    """Yield each batch with its copy, which is under way, and the event that is over when it has come."""
    for host in batches:
        began = time.perf_counter()
        with streams.side():
            batch = mapped(host, streams.move)
        event = streams.copied()
        if record is not None:
            record("device", time.perf_counter() - began, 0)
        yield host, batch, event
        del host, batch, event


def _delivered(
    sent: Iterator[tuple[Any, Any, Any]],
    streams: CudaStreams,
    moving: deque[tuple[Any, Any, Any]],
    reading: deque[tuple[Any, Any]],
    in_flight: int,
) -> Generator[Any, None, None]:
    error: Exception | None = None
    while True:
        while error is None and len(moving) < in_flight:
            try:
                found = next(sent, None)
            except Exception as failed:
                error = failed
            else:
                if found is None:
                    break
                moving.append(found)
                del found
        if not moving:
            if error is not None:
                raise error
            return
        host, batch, event = moving.popleft()
        reading.append((host, event))
        streams.wait(event)
        mapped(batch, streams.kept)
        while reading and reading[0][1].query():
            reading.popleft()
        del host, event
        yield batch


def mapped(batch: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Return `batch` with every tensor in its mappings, tuples and lists changed."""
    if isinstance(batch, torch.Tensor):
        return change(batch)
    if isinstance(batch, Mapping):
        return {name: mapped(value, change) for name, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(mapped(value, change) for value in batch))
    if isinstance(batch, tuple | list):
        return type(batch)(mapped(value, change) for value in batch)
    return batch
