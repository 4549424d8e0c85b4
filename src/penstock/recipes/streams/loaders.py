"""Random or listed windows of a recording that does not fit in memory, loaded in the background.

Each class is a thin layer over `Loader`: a plan whose batches are windows, one thread that reads ahead, and the device
stage. A window is called a chunk here.
"""

import logging
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal, get_args

import torch

from penstock.core.checks import check_integer, check_keys, option_names
from penstock.core.errors import LoaderError, OptionError
from penstock.core.protocols import Observer, Source
from penstock.feed.device import resolve_device
from penstock.feed.memory import MemoryEstimate
from penstock.feed.ranks import current_world
from penstock.plan.orders import RandomChunks
from penstock.plan.window_batches import ListedChunks, PartitionChunks, WindowBatches
from penstock.plan.world import World
from penstock.recipes.streams.rows import FunctionRows, LoadFn, open_rows
from penstock.recipes.streams.stream import Chunk, ChunkStream
from penstock.run.options import RunOptions

__all__ = ["PipelineChunkLoader", "RandomChunkLoader"]

_LOG = logging.getLogger("penstock")

Coverage = Literal["random", "partition"]

_NOT_LISTED = ListedChunks(((0, 1),))  # until the first start_epoch() of a pipeline brings a list


class RandomChunkLoader(ChunkStream):
    """Streams random windows of a recording: loaded in the background, on the device when they are needed.

    Parameters
    ----------
    load_fn
        Takes the start and end rows of a window; returns `(data, stim)`, or any number of arrays with that many rows,
        which are copied, or None in the place of one. Called in the background, one call at a time. Or a source, such
        as `ZarrSource`: chunks have an array for each of its fields, and are read without a copy.
    total_timesteps
        Rows of the recording; None: all rows of the source.
    chunk_size
        Rows of a window. If larger than the recording, every chunk is the whole recording.
    device
        Device of the chunks.
    prefetch
        Chunks read ahead into main memory.
    seed
        Seed of the windows, the same on all ranks; None: a random one, which is part of the state. On several ranks,
        it must be given.
    time_units
        Windows start at multiples of this many rows.
    coverage
        `"random"`: windows anywhere, with replacement. `"partition"`: every row exactly once in an epoch, in windows
        whose borders shift every epoch.
    align
        For `"partition"`: borders lie at multiples of this many rows, such as the rows of a stored chunk. Windows have
        the largest multiple of it that is <= `chunk_size`.
    profiler
        Observer of all stages, such as `PipelineProfiler()`.
    world
        Which rank this is; each rank gets its share of the windows of one order. None: from `torch.distributed`, or
        else from the environment; `World()` for all windows on every rank.
    limits
        `memory_bytes` and `device_bytes`, limits of main memory and device memory: `start_epoch` raises OptionError if
        `memory_estimate()` exceeds one.

    Examples
    --------
    >>> import numpy as np
    >>> recording = np.arange(100.0)[:, None]
    >>> with RandomChunkLoader(lambda a, b: (recording[a:b], recording[a:b] * 2), 100, 10, "cpu", seed=1) as loader:
    ...     loader.start_epoch(num_chunks=3)
    ...     data, stim = loader.get_next_chunk()
    >>> data.shape, float(stim[0] - 2 * data[0])
    (torch.Size([10, 1]), 0.0)
    """

    def __init__(
        self,
        load_fn: LoadFn | Source,
        total_timesteps: int | None = None,
        chunk_size: int | None = None,
        device: str | torch.device = "cuda",
        prefetch: int = 2,
        seed: int | None = None,
        time_units: int = 1,
        *,
        coverage: Coverage = "random",
        align: int = 1,
        profiler: Observer | None = None,
        world: World | None = None,
        **limits: int | None,
    ) -> None:
        for name, value in (("time_units", time_units), ("align", align), ("prefetch", prefetch)):
            check_integer(name, value, at_least=1)
        if coverage not in get_args(Coverage):
            raise OptionError(f"coverage must be one of {', '.join(map(repr, get_args(Coverage)))}, got {coverage!r}.")
        if coverage == "random" and align != 1:
            raise OptionError(
                f"align must be 1 with coverage='random', got {align}. Align random windows by time_units."
            )
        size, target = check_integer("chunk_size", chunk_size, at_least=1), resolve_device(device)
        rows = open_rows(load_fn, total_timesteps, pinned=target.type == "cuda")
        if total_timesteps is None and isinstance(rows[0], FunctionRows):
            raise OptionError("total_timesteps must be an integer >= 1, got None. A function has no length of its own.")
        align = time_units if coverage == "random" else math.lcm(align, time_units)
        self._order: RandomChunks | PartitionChunks = (
            PartitionChunks(size, align) if coverage == "partition" else RandomChunks(size, align=align, key="windows")
        )
        world = world or current_world()
        if seed is None and world.size > 1:
            raise OptionError(f"seed must be an integer, the same on all {world.size} ranks, got None.")
        options = RunOptions(executor="threads", prefetch=prefetch)
        first = replace(self._order, count=world.size) if isinstance(self._order, RandomChunks) else self._order
        super().__init__(rows, first, target, seed, options, profiler, world=world)
        self._budget = (limits.pop("memory_bytes", None), limits.pop("device_bytes", None))
        check_keys("Options", limits, ["memory_bytes", "device_bytes", *option_names(RandomChunkLoader)])
        self._about |= {"total_timesteps": len(self._index), "chunk_size": size, "coverage": coverage, "align": align}

    @property
    def chunks_per_pass(self) -> int:
        """Chunks that cover every row once, over all ranks, with `coverage="partition"`."""
        order = PartitionChunks(self._order.size, self._order.align)
        return WindowBatches(self._index, order).n_batches

    def start_epoch(self, num_chunks: int | None = None) -> None:
        """Start to read the chunks of the next epoch; ends the current one.

        Parameters
        ----------
        num_chunks
            Chunks of this epoch, over all ranks. With `coverage="partition"`: None or `chunks_per_pass`.
        """
        order = self._order
        if isinstance(order, RandomChunks):
            if num_chunks is None:
                raise OptionError(
                    "num_chunks must be an integer >= 1, got None. Random windows have no end of their own."
                )
            order = replace(order, count=check_integer("num_chunks", num_chunks, at_least=self._loader.world.size))
            left_out = num_chunks % self._loader.world.size
            if left_out:
                _LOG.warning(
                    "%s of %s chunks are left out, because %s ranks cannot share them equally. Use a num_chunks that "
                    "is divisible by the number of ranks.",
                    left_out, num_chunks, self._loader.world.size,
                )  # fmt: skip
        elif num_chunks not in (None, self.chunks_per_pass):
            raise OptionError(
                f"num_chunks must be None or {self.chunks_per_pass} (one pass over all rows), got {num_chunks}."
            )
        self._begin(order)

    def get_next_chunk(self) -> Chunk:
        """Return the next chunk, waiting for it if needed; `(None, None)` for every call after the last chunk."""
        chunk = self._next()
        return Chunk((None,) * self._n_arrays) if chunk is None else chunk


class PipelineChunkLoader(ChunkStream):
    """Streams windows listed by the caller.

    Parameters
    ----------
    load_fn
        Takes the start and end rows of a window; returns a tuple of arrays with that many rows, which are copied. Or a
        source, such as `ZarrSource`, which is read without a copy.
    device
        Device of the chunks.
    prefetch
        Chunks read ahead into main memory.
    gpu_prefetch
        Chunks copied ahead to the device.
    profiler
        Observer of all stages, such as `PipelineProfiler()`.
    seed
        Seed of the generators that sample batches within a chunk.
    memory_bytes, device_bytes
        Limits of main memory and device memory: `start_epoch` raises OptionError if `memory_estimate()` exceeds one.
    """

    def __init__(
        self,
        load_fn: LoadFn | Source,
        device: str | torch.device = "cuda",
        prefetch: int = 1,
        gpu_prefetch: int = 1,
        profiler: Observer | None = None,
        *,
        seed: int = 0,
        memory_bytes: int | None = None,
        device_bytes: int | None = None,
    ) -> None:
        target = resolve_device(device)
        rows = open_rows(load_fn, None, pinned=target.type == "cuda")
        options = RunOptions(executor="threads", prefetch=prefetch, device_ahead=gpu_prefetch)
        super().__init__(rows, _NOT_LISTED, target, seed, options, profiler, world=World())
        self._budget = (memory_bytes, device_bytes)

    def start_epoch(self, chunks: Sequence[tuple[int, int]]) -> None:
        """Start to read these chunks, each a (start, end); ends the current epoch."""
        if not len(chunks):
            raise OptionError("chunks must be a non-empty sequence of (start, end), got none.")
        self._begin(ListedChunks(tuple((int(start), int(end)) for start, end in chunks)))

    def memory_estimate(self) -> MemoryEstimate:
        """Return the bytes that streaming takes; LoaderError before the first epoch."""
        if self._loader.plan.order is _NOT_LISTED:
            raise LoaderError("The length of the chunks is not known yet. Call start_epoch() before memory_estimate().")
        return super().memory_estimate()

    def get_next_chunk(self) -> tuple[int | None, Any]:
        """Return the first row of the next chunk, and the chunk; `(None, None)` for every call after the last chunk."""
        chunk = self._next()
        return (None, None) if chunk is None else (chunk.start, chunk)
