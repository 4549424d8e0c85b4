"""Random or listed windows of a recording that does not fit in memory, loaded in the background.

Each class is a thin layer over `Loader`: a plan of windows, one thread that reads ahead, and the device stage. A window
is called a chunk here.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, get_args

import torch

from penstock.core.checks import check_integer
from penstock.core.errors import LoaderError, OptionError, ResumeError
from penstock.core.index import Index
from penstock.core.protocols import Observer, Order
from penstock.core.seeds import check_seed, key_for
from penstock.feed.device import resolve_device
from penstock.feed.loader import Loader
from penstock.feed.memory import MemoryEstimate
from penstock.observe.timing import Timings
from penstock.plan.plan import Plan
from penstock.plan.world import World
from penstock.recipes.streams.windows import Coded, GivenWindows, PartitionWindows, RandomWindows, WindowData
from penstock.run.options import RunOptions
from penstock.source.dataset import DatasetSource

__all__ = ["Chunk", "PipelineChunkLoader", "RandomChunkLoader"]

LoadFn = Callable[[int, int], Any]
Coverage = Literal["random", "partition"]


class Chunk(tuple[Any, ...]):
    """The tensors of one window; unpacks as `data, stim`, and knows its place in the recording."""

    start: int
    """Its first row."""

    stop: int
    """The row after its last."""

    index: int  # type: ignore[assignment]  # replaces tuple.index(), which is of no use here
    """Its number in the epoch."""

    generator: torch.Generator
    """Random generator for batches within this chunk; depends on seed, epoch and chunk only."""


class _Watch:
    """Observer of all stages. It holds no reference to the loader: the reading thread would keep that alive."""

    def __init__(self, profiler: Observer | None) -> None:
        self.timings, self.n_loaded, self._profiler = Timings(), 0, profiler

    def record(self, stage: str, seconds: float, nbytes: int) -> None:
        """Count, add up, and pass on."""
        self.n_loaded += stage == "read"
        self.timings.record(stage, seconds, nbytes)
        if self._profiler is not None:
            self._profiler.record(stage, seconds, nbytes)


class _ChunkLoader:
    """What both loaders share: epoch after epoch, chunk by chunk."""

    def __init__(
        self,
        windows: WindowData,
        device: torch.device,
        seed: int,
        options: RunOptions,
        profiler: Observer | None,
        budget: tuple[int | None, int | None],
    ) -> None:
        self._windows, self._coded, self._device = windows, windows.coded, device
        self._budget = budget
        """Limits in bytes of main memory and of device memory; None: no limit."""
        self._seed, self._options = check_seed(seed), options
        self._watch = _Watch(profiler)
        self._loader: Loader | None = None
        self._batches: Any = None
        self._error: BaseException | None = None
        self._width = 2
        self._delivered = 0
        self._start = (0, 0)
        """The (epoch, chunk) to resume at if there is no loader."""
        self._longest: tuple[int, int] | None = None
        """The longest window of an epoch, if known."""
        self._about: dict[str, Any] = {"version": 1, "seed": self._seed}
        """What a state must agree with."""

    def _check_budget(self) -> None:
        """Raise OptionError if the stream needs more memory than its limits allow."""
        if self._budget == (None, None):
            return
        estimate = self.memory_estimate()
        needed = (estimate.host_bytes, estimate.device_bytes)
        for name, need, limit in zip(("memory_bytes", "device_bytes"), needed, self._budget, strict=True):
            if limit is not None and need > limit:
                raise OptionError(
                    f"{name} must be enough for this stream, which needs {estimate}, got {limit / 1e6:.1f} MB. Use a "
                    "smaller chunk_size or prefetch."
                )

    def _begin(self, order: Order) -> None:
        """Start an epoch of `order`: the next one, or the rest of the one in a loaded state."""
        self._check_budget()
        if self._loader is None and not self._delivered:
            self._watch.timings = Timings()
        source = DatasetSource(self._windows, identity=f"{self._coded}")
        plan = Plan(Index.uniform(len(self._windows), identity=source.index.identity), order, 1, self._seed)
        if self._loader is None or self._loader.plan.identity() != plan.identity():
            self._end()
            self._loader = Loader(
                source,
                plan,
                collate=_unwrap,
                num_workers=1,
                device=self._device,
                world=World(),
                options=self._options,
                observer=self._watch,
            )
            epoch, batch = self._start
            state = {**self._loader.state_dict(), "epoch": epoch, "batch": min(batch, plan.n_batches)}
            self._loader.load_state_dict(state)
        if self._batches is not None:
            self._batches.end("another epoch began")  # before anything of the new one is counted
        self._error, self._delivered, self._watch.n_loaded = None, 0, 0
        self._batches = iter(self._loader)

    @property
    def timings(self) -> Timings:
        """Time spent in each stage since the first epoch began; `wait_fraction` is the fraction spent waiting."""
        return self._watch.timings

    def _next(self) -> Chunk | None:
        if self._loader is None or self._batches is None:
            raise LoaderError("No epoch has been started. Call start_epoch() before get_next_chunk().")
        if self._error is not None:
            raise self._error
        state = self._loader.state_dict()
        try:
            found = next(self._batches, None)
        except BaseException as error:
            self._error = error
            raise
        if found is None:
            return None
        chunk = Chunk(found["tensors"])
        chunk.start, chunk.stop, chunk.index = found["start"], found["stop"], state["batch"]
        chunk.generator = torch.Generator(self._device).manual_seed(
            key_for(self._seed, "batches", state["epoch"], state["batch"]) >> 1
        )
        for tensor in chunk:
            tensor.penstock_generator = chunk.generator  # the default generator of sample_batch_within_chunk
        self._width = len(chunk)
        self._delivered += 1
        return chunk

    def get_stats(self) -> dict[str, Any]:
        """Return how many chunks of this epoch were loaded and delivered, and the fraction of time spent waiting."""
        return {
            "chunks_loaded": self._watch.n_loaded,
            "chunks_transferred": self._delivered,
            "wait_fraction": self.timings.wait_fraction,
        }

    def state_dict(self) -> dict[str, Any]:
        """Return the position of the stream, as plain JSON: the next chunk to deliver."""
        epoch, chunk = self._start
        if self._loader is not None:
            state = self._loader.state_dict()
            # A fully delivered epoch has nothing left to resume.
            epoch, chunk = (state["epoch"], state["batch"]) if self._loader.remaining else (state["epoch"] + 1, 0)
        return {**self._about, "epoch": epoch, "chunk": chunk}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from a state; the next `start_epoch` yields the rest of that epoch."""
        changed = [
            f"{name}={state.get(name)!r}, here {value!r}"
            for name, value in self._about.items()
            if state.get(name) != value
        ]
        if changed:
            raise ResumeError(f"The state must belong to this stream, got one with {'; '.join(changed)}.")
        epoch, chunk = state.get("epoch"), state.get("chunk")
        if not isinstance(epoch, int) or not isinstance(chunk, int) or min(epoch, chunk) < 0:
            raise ResumeError(
                f"epoch and chunk of a state must be integers >= 0, got {epoch!r} and {chunk!r}: it is damaged."
            )
        self._end()
        self._start = (epoch, chunk)

    def memory_estimate(self) -> MemoryEstimate:
        """Return the bytes that streaming takes, on host and device; loads one row if nothing was loaded yet."""
        if self._longest is None:
            raise LoaderError("The length of the chunks is not known yet. Call start_epoch() before memory_estimate().")
        start, stop = self._longest
        chunk_bytes = self._windows.row_bytes(start) * (stop - start)
        ahead, kind = self._options.device_ahead, self._device.type
        # Chunks read ahead, and those of the consumer: while it asks for the next one, its loop still holds the last.
        # With a device: chunks being copied there, and the result of load_fn while it is copied to page-locked memory.
        with_consumer = {"cpu": 2, "cuda": ahead + 2}.get(kind, 1)
        on_device = {"cpu": 0, "cuda": ahead + 2}.get(kind, 2)
        held = self._options.prefetch + with_consumer
        return MemoryEstimate(chunk_bytes, held, 0, 0, on_device * chunk_bytes)

    def cleanup(self) -> None:
        """End the stream and its thread; idempotent. The next `start_epoch` starts the next epoch."""
        self._end()

    def _end(self) -> None:
        loader, self._loader = self._loader, None
        self._batches = None
        if loader is not None:
            state = loader.state_dict()
            # An epoch with delivered chunks is over when another one starts.
            begun = self._delivered > 0
            self._start = (state["epoch"] + (state["batch"] > 0), 0) if begun else (state["epoch"], state["batch"])
            loader.close()

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: object) -> None:
        self.cleanup()


class RandomChunkLoader(_ChunkLoader):
    """Streams random windows of a recording: loaded in the background, on the device when they are needed.

    Parameters
    ----------
    load_fn
        Takes the start and end rows of a window; returns `(data, stim)`, or any number of arrays with that many rows.
        Called in the background, one call at a time.
    total_timesteps
        Rows of the recording.
    chunk_size
        Rows of a window. If larger than the recording, every chunk is the whole recording.
    device
        Device of the chunks.
    prefetch
        Chunks read ahead into main memory.
    seed
        Seed of the windows; None: 0.
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
        load_fn: LoadFn,
        total_timesteps: int,
        chunk_size: int,
        device: str | torch.device = "cuda",
        prefetch: int = 2,
        seed: int | None = None,
        time_units: int = 1,
        *,
        coverage: Coverage = "random",
        align: int = 1,
        profiler: Observer | None = None,
        memory_bytes: int | None = None,
        device_bytes: int | None = None,
    ) -> None:
        for name, value in (("time_units", time_units), ("align", align), ("prefetch", prefetch)):
            check_integer(name, value, at_least=1)
        if coverage not in get_args(Coverage):
            raise OptionError(f"coverage must be one of {', '.join(map(repr, get_args(Coverage)))}, got {coverage!r}.")
        if coverage == "random" and align != 1:
            raise OptionError(
                f"align must be 1 with coverage='random', got {align}. Align random windows by time_units."
            )
        options = RunOptions(executor="threads", prefetch=prefetch)
        resolved, budget = resolve_device(device), (memory_bytes, device_bytes)
        windows = WindowData(load_fn, Coded(total_timesteps, chunk_size), pinned=resolved.type == "cuda")
        super().__init__(windows, resolved, seed or 0, options, profiler, budget)
        self._align = time_units if coverage == "random" else math.lcm(align, time_units)
        self._coverage = coverage
        self._longest = (0, min(chunk_size, total_timesteps))
        self._about |= {"total_timesteps": int(total_timesteps), "chunk_size": int(chunk_size)}
        self._about |= {"coverage": coverage, "align": self._align}
        if coverage == "partition":
            PartitionWindows(self._coded, self._align)  # checks its arguments

    @property
    def chunks_per_pass(self) -> int:
        """Chunks that cover every row once, with `coverage="partition"`."""
        return PartitionWindows(self._coded, self._align).count

    def start_epoch(self, num_chunks: int | None = None) -> None:
        """Start to read the chunks of the next epoch; ends the current one.

        Parameters
        ----------
        num_chunks
            Chunks of this epoch. With `coverage="partition"`: None or `chunks_per_pass`.
        """
        if self._coverage == "partition":
            if num_chunks not in (None, self.chunks_per_pass):
                raise OptionError(
                    f"num_chunks must be None or {self.chunks_per_pass} (one pass over all rows), got {num_chunks}."
                )
            self._begin(PartitionWindows(self._coded, self._align))
            return
        if num_chunks is None:
            raise OptionError("num_chunks must be an integer >= 1, got None. Random windows have no end of their own.")
        check_integer("num_chunks", num_chunks, at_least=1)
        self._begin(RandomWindows(self._coded, num_chunks, self._align))

    def get_next_chunk(self) -> Chunk:
        """Return the next chunk, waiting for it if needed; `(None, None)` for every call after the last chunk."""
        chunk = self._next()
        return Chunk((None,) * self._width) if chunk is None else chunk


class PipelineChunkLoader(_ChunkLoader):
    """Streams windows listed by the caller.

    Parameters
    ----------
    load_fn
        Takes the start and end rows of a window; returns a tuple of arrays with that many rows.
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

    _LARGEST = 1 << 31

    def __init__(
        self,
        load_fn: LoadFn,
        device: str | torch.device = "cuda",
        prefetch: int = 1,
        gpu_prefetch: int = 1,
        profiler: Observer | None = None,
        *,
        seed: int = 0,
        memory_bytes: int | None = None,
        device_bytes: int | None = None,
    ) -> None:
        options = RunOptions(executor="threads", prefetch=prefetch, device_ahead=gpu_prefetch)
        resolved, budget = resolve_device(device), (memory_bytes, device_bytes)
        windows = WindowData(load_fn, Coded(self._LARGEST, self._LARGEST), pinned=resolved.type == "cuda")
        super().__init__(windows, resolved, seed, options, profiler, budget)

    def start_epoch(self, chunks: Sequence[tuple[int, int]]) -> None:
        """Start to read these chunks, each a (start, end); ends the current epoch."""
        if not len(chunks):
            raise OptionError("chunks must be a non-empty sequence of (start, end), got none.")
        windows = tuple((int(start), int(end)) for start, end in chunks)
        order = GivenWindows(self._coded, windows)
        order.check(Index.uniform(self._coded.n_items))
        self._longest = max(windows, key=lambda window: window[1] - window[0])
        self._begin(order)

    def get_next_chunk(self) -> tuple[int | None, Any]:
        """Return the first row of the next chunk, and the chunk; `(None, None)` for every call after the last chunk."""
        chunk = self._next()
        return (None, None) if chunk is None else (chunk.start, chunk)


def _unwrap(items: list[Any]) -> Any:
    return items[0]
