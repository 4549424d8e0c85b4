"""Random or listed windows of a recording that does not fit in memory, loaded in the background.

Each class is a thin layer over `Loader` and its position: a plan whose batches are windows, one thread that reads
ahead, and the device stage. A window is called a chunk here.
"""

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import torch

from penstock.core.checks import check_choice, check_integer
from penstock.core.errors import LoaderError, OptionError, ResumeError
from penstock.core.index import Index
from penstock.core.protocols import Observer, Source
from penstock.core.seeds import check_seed, draw_seed, key_for
from penstock.feed.device import resolve_device
from penstock.feed.loader import Loader
from penstock.feed.memory import MemoryEstimate
from penstock.feed.ranks import current_world
from penstock.observe.timing import Timings
from penstock.plan.cursor import Cursor, check_count, is_same, show_value
from penstock.plan.orders import RandomChunks
from penstock.plan.plan import Plan
from penstock.plan.window_batches import ListedChunks, PartitionChunks, WindowBatches, WindowOrder, WindowPasses
from penstock.plan.world import World
from penstock.recipes.streams.rows import ABSENT, FunctionRows, LoadFn, open_rows
from penstock.recipes.streams.sampling import set_default_generator
from penstock.run.options import RunOptions

__all__ = ["Chunk", "PipelineChunkLoader", "RandomChunkLoader"]

_LOG = logging.getLogger("penstock")

Coverage = Literal["random", "partition"]

_NOT_LISTED = ListedChunks(((0, 1),))  # until the first start_epoch() of a pipeline brings a list
_MAX_SEED = 1 << 128  # of a state


class Chunk(tuple[Any, ...]):
    """The tensors of one window; unpacks as `data, stim`, and knows its place in the recording."""

    start: int
    """Its first row."""

    stop: int
    """The row after its last."""

    index: int  # type: ignore[assignment]  # replaces tuple.index(), which is of no use here
    """Its number in the epoch, over all ranks."""

    generator: torch.Generator
    """Random generator for batches within this chunk; depends on seed, epoch and chunk only."""


class _Watch:
    """Observer of all stages. It holds no reference to the loader: the reading thread would keep that alive."""

    def __init__(self, profiler: Observer | None) -> None:
        self.timings, self._profiler = Timings(), profiler
        self.start()

    def start(self) -> None:
        """Count from 0."""
        self.n_read, self.n_taken = 0, 0
        if not self.timings.stages:
            self.timings = Timings()  # its clock starts with the first epoch

    def record(self, stage: str, seconds: float, nbytes: int) -> None:
        """Count, add up, and pass on."""
        self.n_read += stage == "read"
        self.n_taken += stage == "wait"
        self.timings.record(stage, seconds, nbytes)
        if self._profiler is not None:
            self._profiler.record(stage, seconds, nbytes)


class _ChunkStream:
    """What both loaders share: epoch after epoch, chunk by chunk. Its position is that of its `Loader`."""

    def __init__(
        self,
        rows: tuple[Source, Index],
        order: WindowOrder,
        device: torch.device,
        seed: int | None,
        options: RunOptions,
        profiler: Observer | None,
        *,
        world: World,
        budget: tuple[int | None, int | None],
    ) -> None:
        (self._source, self._index), self._device = rows, device
        self._has_own_seed = seed is not None
        self._seed = draw_seed() if seed is None else check_seed(seed)
        self._watch = _Watch(profiler)
        self._loader = Loader(
            self._source,
            WindowBatches(self._index, order, self._seed),
            num_workers=1,
            device=device,
            world=world,
            options=options,
            observer=self._watch,
        )
        self._batches: Any = None  # the iteration of an epoch; None before the first one and after cleanup()
        self._error: BaseException | None = None
        self._n_arrays = len(self._source.fields) or 2
        self._budget = budget  # of main memory and of device memory, in bytes
        self._about: dict[str, Any] = {"version": 1, "seed": self._seed}  # what a state must agree with

    @property
    def _chunks(self) -> WindowPasses:
        return _windows_of(self._loader.plan)

    def _begin(self, order: WindowOrder) -> None:
        """Start the next epoch, or the rest of the one in a loaded state, with the windows of `order`."""
        plan, position = WindowBatches(self._index, order, self._seed), self._loader.position
        self._check_budget(_windows_of(plan))
        if self._batches is not None:
            self._batches.end("another epoch began")  # before anything of the new one is counted
        position.leave_begun()
        start = position.cursor
        if start.batch and start.batch >= plan.n_batches:
            raise OptionError(
                f"This epoch must have more than the {start.batch} chunks that were delivered before the state was "
                f"saved, got {plan.n_batches}. Start it with as many chunks as then."
            )
        if plan != self._loader.plan:
            self._loader.set_plan(plan)
        position.go_to(start)
        self._watch.start()
        self._batches, self._error = iter(self._loader), None

    @property
    def timings(self) -> Timings:
        """Time spent in each stage since the first epoch began; `wait_fraction` is the fraction spent waiting."""
        return self._watch.timings

    def _next(self) -> Chunk | None:
        if self._batches is None:
            raise LoaderError("No epoch has been started. Call start_epoch() before get_next_chunk().")
        if self._error is not None:
            raise self._error
        place = self._loader.position.cursor
        try:
            found = next(self._batches, None)
        except BaseException as error:
            self._error = error
            raise
        if found is None:
            return None
        number = place.batch + self._loader.world.rank  # each step is a chunk on every rank
        chunk = Chunk(None if name.startswith(ABSENT) else array for name, array in found.items())
        span = self._chunks.span(place.epoch, number)
        chunk.start, chunk.stop, chunk.index = span.start, span.stop, number
        key = key_for(self._seed, "batches", place.epoch, number)
        chunk.generator = torch.Generator(self._device).manual_seed(key >> 1)
        set_default_generator(chunk, chunk.generator)
        self._n_arrays = len(chunk)
        return chunk

    def get_stats(self) -> dict[str, Any]:
        """Return how many chunks of this epoch were loaded and delivered, and the fraction of time spent waiting."""
        return {
            "chunks_loaded": self._watch.n_read,
            "chunks_transferred": self._watch.n_taken,
            "wait_fraction": self.timings.wait_fraction,
        }

    def state_dict(self) -> dict[str, Any]:
        """Return the position of the stream, as plain JSON: the seed, and the next chunk to deliver, over all ranks."""
        position = self._loader.position
        cursor = position.cursor
        if self._batches is not None and not position.remaining:  # nothing is left to resume
            cursor = Cursor(cursor.epoch + 1)
        return {**self._about, "epoch": cursor.epoch, "chunk": cursor.batch}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from a state; the next `start_epoch` yields the rest of that epoch.

        A stream that was made without a seed takes that of the state.
        """
        if not isinstance(state, Mapping):
            raise ResumeError(f"state must be what state_dict() returned, got {show_value(state)}.")
        about = dict(self._about)
        seed = state.get("seed")
        if not self._has_own_seed and isinstance(seed, int) and not isinstance(seed, bool) and 0 <= seed < _MAX_SEED:
            about["seed"] = seed
        changed = [name for name, value in about.items() if not is_same(state.get(name), value)]
        if changed:
            found = "; ".join(f"{name}={show_value(state.get(name))}, here {about[name]!r}" for name in changed)
            raise ResumeError(f"The state must belong to this stream, got one with {found}.")
        epoch, chunk = check_count("epoch", state.get("epoch")), check_count("chunk", state.get("chunk"))
        self.cleanup()
        self._about, self._seed = about, about["seed"]
        self._loader.position.go_to(Cursor(epoch, chunk))

    def memory_estimate(self) -> MemoryEstimate:
        """Return the bytes that streaming takes, on host and device; loads one row if nothing was loaded yet.

        The arrays that `load_fn` returns are its own, and not counted.
        """
        return self._estimate(self._chunks)

    def _estimate(self, chunks: WindowPasses) -> MemoryEstimate:
        if isinstance(self._source, FunctionRows):
            row_bytes = self._source.count_row_bytes(chunks.span(0, 0).start)
        else:
            row_bytes = sum(field.item_bytes or field.typical_bytes or 0 for field in self._source.fields.values())
        chunk_bytes = row_bytes * chunks.batch_size
        ahead, kind = self._loader.options.device_ahead, self._device.type
        # Chunks read ahead, and those of the consumer: while it asks for the next one, its loop still holds the last.
        # With a device: chunks being copied there.
        with_consumer = {"cpu": 2, "cuda": ahead + 1}.get(kind, 1)
        on_device = {"cpu": 0, "cuda": ahead + 2}.get(kind, 2)
        prefetch = self._loader.options.prefetch
        assert prefetch is not None, "a stream is made with a number of chunks"
        held = prefetch + with_consumer
        return MemoryEstimate(chunk_bytes, held, 0, 0, on_device * chunk_bytes)

    def _check_budget(self, chunks: WindowPasses) -> None:
        """Raise OptionError if the stream needs more memory than its limits allow."""
        if self._budget == (None, None):
            return
        estimate = self._estimate(chunks)
        needed = (estimate.host_bytes, estimate.device_bytes)
        for name, need, limit in zip(("memory_bytes", "device_bytes"), needed, self._budget, strict=True):
            if limit is not None and need > limit:
                raise OptionError(
                    f"{name} must be enough for this stream, which needs {estimate}, got {limit / 1e6:.1f} MB. Use a "
                    "smaller chunk_size or prefetch."
                )

    def cleanup(self) -> None:
        """End the stream and its thread; idempotent. The next `start_epoch` starts the next epoch."""
        batches, self._batches = self._batches, None
        if batches is not None:
            batches.end("cleanup() was called")
            self._loader.position.leave_begun()
            self._source.close()

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: object) -> None:
        self.cleanup()


def _windows_of(plan: Plan) -> WindowPasses:
    assert isinstance(plan.passes, WindowPasses), "the loader is given no other"
    return plan.passes


class RandomChunkLoader(_ChunkStream):
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
    memory_bytes, device_bytes
        Limits of main memory and device memory: `start_epoch` raises OptionError if `memory_estimate()` exceeds one.

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
        memory_bytes: int | None = None,
        device_bytes: int | None = None,
    ) -> None:
        for name, value in (("time_units", time_units), ("align", align), ("prefetch", prefetch)):
            check_integer(name, value, at_least=1)
        check_choice("coverage", coverage, Coverage)
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
        budget = (memory_bytes, device_bytes)
        super().__init__(rows, first, target, seed, options, profiler, world=world, budget=budget)
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


class PipelineChunkLoader(_ChunkStream):
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
        budget = (memory_bytes, device_bytes)
        super().__init__(rows, _NOT_LISTED, target, seed, options, profiler, world=World(), budget=budget)

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
