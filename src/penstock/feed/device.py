"""Copy batches to the device while the step before them computes.

On the CPU nothing happens. On CUDA, one or more batches are in flight besides the one in use. They are copied from
pinned memory on a side stream. The consumer's stream, not the host, waits for the event of the copy, and
`record_stream` keeps the allocator from reusing the memory of a batch while kernels on it are still queued. This is
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

__all__ = ["CudaStreams", "allocate_pinned", "map_tensors", "move_to_device", "resolve_device"]


def resolve_device(device: str | torch.device | None) -> torch.device:
    """Return the torch device; raise OptionError if it cannot be used."""
    if device is None:
        return torch.device("cpu")
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise OptionError(
            f"device must be a torch device such as 'cuda:0' or 'cpu', got {device!r}: {error}"
        ) from error
    if found.type == "cuda" and not torch.cuda.is_available():
        raise OptionError(f"device={device!r} needs CUDA, but torch finds no CUDA device. Use device='cpu' or None.")
    return found


def allocate_pinned(n_bytes: int) -> NDArray[np.uint8]:
    """Return page-locked host memory, which the device can copy from asynchronously."""
    memory: NDArray[np.uint8] = torch.empty(n_bytes, dtype=torch.uint8, pin_memory=True).numpy()
    return memory


class CudaStreams:
    """The CUDA calls of a transfer, in one class that a test can replace."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch leaves it untyped

    def side(self) -> AbstractContextManager[Any]:
        """Return a context manager that issues work on the transfer stream."""
        return torch.cuda.stream(self._side)

    def record_copy(self) -> Any:
        """Return an event recorded after all work issued on the transfer stream so far."""
        return self._side.record_event()

    def wait(self, event: Any) -> None:
        """Let the consumer's stream, not the host, wait for `event`."""
        torch.cuda.current_stream(self._device).wait_event(event)

    def record_use(self, tensor: torch.Tensor) -> torch.Tensor:
        """Let the allocator know that the consumer's stream uses `tensor` as well, and return it."""
        tensor.record_stream(torch.cuda.current_stream(self._device))
        return tensor

    def move(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a copy on the device; it may still be in flight."""
        pinned = tensor if tensor.is_pinned() else tensor.pin_memory()
        return pinned.to(self._device, non_blocking=True)


def move_to_device(
    batches: Generator[Any, None, None],
    device: torch.device,
    streams: CudaStreams | None = None,
    *,
    ahead: int = 1,
    record: Callable[[str, float, int], None] | None = None,
) -> Generator[Any, None, None]:
    """Yield each batch on `device`, while `ahead` others are copied.

    1. Reading, collating or copying a batch fails: the batches before it are delivered first, then the error.
    2. The consumer stops early: copies in flight end by themselves; their host memory is kept until then.
    """
    return batches if device.type == "cpu" else _move(batches, device, streams, ahead, record)


def _move(
    batches: Generator[Any, None, None],
    device: torch.device,
    streams: CudaStreams | None,
    ahead: int,
    record: Callable[[str, float, int], None] | None,
) -> Generator[Any, None, None]:
    with closing(batches):
        if device.type != "cuda":
            for batch in batches:
                yield map_tensors(batch, lambda tensor: tensor.to(device))
        else:
            yield from _overlap_copies(batches, streams or CudaStreams(device), ahead + 1, record)


def _overlap_copies(
    batches: Iterator[Any],
    streams: CudaStreams,
    in_flight: int,
    record: Callable[[str, float, int], None] | None,
) -> Generator[Any, None, None]:
    copying: deque[tuple[Any, Any, Any]] = deque()
    # Host batches whose copy may not have finished: their memory must not return to the pool before it has.
    sources: deque[tuple[Any, Any]] = deque()
    try:
        yield from _deliver(_start_copies(batches, streams, record), streams, copying, sources, in_flight)
    finally:
        for *_, event in (*copying, *sources):
            event.synchronize()


def _start_copies(
    batches: Iterator[Any], streams: CudaStreams, record: Callable[[str, float, int], None] | None
) -> Iterator[tuple[Any, Any, Any]]:
    """Yield (host batch, device copy in flight, event recorded after the copy)."""
    for host in batches:
        began = time.perf_counter()
        with streams.side():
            batch = map_tensors(host, streams.move)
        event = streams.record_copy()
        if record is not None:
            record("device", time.perf_counter() - began, 0)
        yield host, batch, event
        del host, batch, event


def _deliver(
    copies: Iterator[tuple[Any, Any, Any]],
    streams: CudaStreams,
    copying: deque[tuple[Any, Any, Any]],
    sources: deque[tuple[Any, Any]],
    in_flight: int,
) -> Generator[Any, None, None]:
    error: Exception | None = None
    while True:
        while error is None and len(copying) < in_flight:
            try:
                found = next(copies, None)
            except Exception as failed:
                error = failed
            else:
                if found is None:
                    break
                copying.append(found)
                del found
        if not copying:
            if error is not None:
                raise error
            return
        host, batch, event = copying.popleft()
        sources.append((host, event))
        streams.wait(event)
        map_tensors(batch, streams.record_use)
        while sources and sources[0][1].query():
            sources.popleft()
        del host, event
        yield batch


def map_tensors(batch: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Return `batch` with `change` applied to every tensor in its mappings, tuples and lists."""
    if isinstance(batch, torch.Tensor):
        return change(batch)
    if isinstance(batch, Mapping):
        return {name: map_tensors(value, change) for name, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(map_tensors(value, change) for value in batch))
    if isinstance(batch, tuple | list):
        return type(batch)(map_tensors(value, change) for value in batch)
    return batch
