"""Seed 000: random windows of a recording that does not fit in memory, made ready in the background.

Each of these is a page over `Loader`: a plan of windows, one thread that reads ahead, the device stage.
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
from penstock.feed.device import checked_device
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
    """The tensors of one window; unpacks as `data, stim`, and knows where it lies."""

    start: int
    """Its first row."""

    stop: int
    """The row after its last."""

    index: int  # type: ignore[assignment]  # the document's word; a tuple's own is of no use here
    """Its number in the epoch."""

    generator: torch.Generator
    """Draws the batches within this chunk: the same ones for the same seed, epoch and chunk."""


class _Watch:
    """Told of every stage. It does not know the loader, which the thread that tells it would otherwise keep alive."""

    def __init__(self, profiler: Observer | None) -> None:
        self.timings, self.loaded, self._profiler = Timings(), 0, profiler

    def record(self, stage: str, seconds: float, nbytes: int) -> None:
        """Count, add up, and pass on."""
        self.loaded += stage == "read"
        self.timings.record(stage, seconds, nbytes)
        if self._profiler is not None:
            self._profiler.record(stage, seconds, nbytes)


class _ChunkLoader:
    """What both loaders share: one epoch after the other, chunk by chunk."""

    def __init__(
        self,
        load_fn: LoadFn,
        coded: Coded,
        device: str | torch.device | None,
        seed: int,
        options: RunOptions,
        profiler: Observer | None,
        budget: tuple[int | None, int | None],
    ) -> None:
        self._device = checked_device(device)
        self._budget = budget
        """Bytes that may be taken in main memory and on the device; None: no limit."""
        self._coded, self._seed, self._options = coded, check_seed(seed), options
        self._windows = WindowData(load_fn, coded, pinned=self._device.type == "cuda")
        self._watch = _Watch(profiler)
        self._loader: Loader | None = None
        self._batches: Any = None
        self._error: BaseException | None = None
        self._width = 2
        self._delivered = 0
        self._start = (0, 0)
        """The epoch and the chunk to go on with, where no loader stands anywhere."""
        self._longest: tuple[int, int] | None = None
        """The longest window of an epoch, where it is known."""
        self._about: dict[str, Any] = {"version": 1, "seed": self._seed}
        """What a state must agree with."""

    def _check_budget(self) -> None:
        """Refuse to start where more memory is needed than may be taken."""
        if self._budget == (None, None):
            return
        estimate = self.memory_estimate()
        needed = (estimate.host_bytes, estimate.device_bytes)
        for name, need, limit in zip(("memory_bytes", "device_bytes"), needed, self._budget, strict=True):
            if limit is not None and need > limit:
                raise OptionError(
                    f"This stream needs {estimate}; {name} allows {limit / 1e6:.1f} MB. Use a smaller chunk_size or "
                    "prefetch."
                )

    def _begin(self, order: Order) -> None:
        """Run an epoch of `order`: the next one, or the rest of the one that a state was loaded for."""
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
                collate=_only,
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
        self._error, self._delivered, self._watch.loaded = None, 0, 0
        self._batches = iter(self._loader)

    @property
    def timings(self) -> Timings:
        """What took how long since the first epoch began; `wait_fraction` is the share that was spent waiting."""
        return self._watch.timings

    def _next(self) -> Chunk | None:
        if self._loader is None or self._batches is None:
            raise LoaderError("There is no epoch; call start_epoch() before get_next_chunk().")
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
            tensor.penstock_generator = chunk.generator  # so that sampling within it finds it by itself
        self._width = len(chunk)
        self._delivered += 1
        return chunk

    def get_stats(self) -> dict[str, Any]:
        """Return how many chunks of this epoch were loaded and delivered, and the share of time spent waiting."""
        return {
            "chunks_loaded": self._watch.loaded,
            "chunks_transferred": self._delivered,
            "wait_fraction": self.timings.wait_fraction,
        }

    def state_dict(self) -> dict[str, Any]:
        """Return where the stream stands, as plain JSON: at the chunk that is delivered next."""
        epoch, chunk = self._start
        if self._loader is not None:
            state = self._loader.state_dict()
            # Of an epoch that is delivered, no rest is left to go on with.
            epoch, chunk = (state["epoch"], state["batch"]) if self._loader.remaining else (state["epoch"] + 1, 0)
        return {**self._about, "epoch": epoch, "chunk": chunk}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where a state was taken; the next `start_epoch` gives the rest of that epoch."""
        changed = [
            f"{name}={state.get(name)!r}, here {value!r}"
            for name, value in self._about.items()
            if state.get(name) != value
        ]
        if changed:
            raise ResumeError(f"This state belongs to another stream: {'; '.join(changed)}.")
        epoch, chunk = state.get("epoch"), state.get("chunk")
        if not isinstance(epoch, int) or not isinstance(chunk, int) or min(epoch, chunk) < 0:
            raise ResumeError(f"This state is at chunk {chunk!r} of epoch {epoch!r}; it is damaged.")
        self._end()
        self._start = (epoch, chunk)

    def memory_estimate(self) -> MemoryEstimate:
        """Return the bytes that streaming takes, host and device apart; where nothing was loaded yet, one row is."""
        if self._longest is None:
            raise LoaderError("How long the chunks will be is not known; call start_epoch() before memory_estimate().")
        start, stop = self._longest
        chunk_bytes = self._windows.row_bytes(start) * (stop - start)
        ahead, kind = self._options.device_ahead, self._device.type
        # Read ahead, and with the consumer: while the next one is asked for, the loop still holds the last. Beside a
        # device: those that are being copied there, and what load_fn gave while it is copied to page-locked memory.
        with_consumer = {"cpu": 2, "cuda": ahead + 2}.get(kind, 1)
        on_device = {"cpu": 0, "cuda": ahead + 2}.get(kind, 2)
        held = self._options.prefetch + with_consumer
        return MemoryEstimate(chunk_bytes, held, 0, 0, on_device * chunk_bytes)

    def cleanup(self) -> None:
        """End the stream and its thread; twice is fine. The next `start_epoch` goes on with the next epoch."""
        self._end()

    def _end(self) -> None:
        loader, self._loader = self._loader, None
        self._batches = None
        if loader is not None:
            state = loader.state_dict()
            # An epoch that was begun is over when another one is asked for.
            begun = self._delivered > 0
            self._start = (state["epoch"] + (state["batch"] > 0), 0) if begun else (state["epoch"], state["batch"])
            loader.close()

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: object) -> None:
        self.cleanup()


class RandomChunkLoader(_ChunkLoader):
    """Streams random windows of a recording: read in the background, on the device when they are asked for.

    Parameters
    ----------
    load_fn
        Takes begin and end of a window; returns `(data, stim)`, or any number of arrays with that many rows. Called in
        the background, one call at a time.
    total_timesteps
        Rows of the recording.
    chunk_size
        Rows of a window; where it is larger than the recording, each chunk is all of it.
    device
        Where chunks arrive.
    prefetch
        Chunks that are read ahead, in main memory.
    seed
        Which windows; None: 0.
    time_units
        Windows begin at multiples of this many rows.
    coverage
        `"random"`: windows anywhere, with replacement. `"partition"`: every row exactly once in an epoch, in windows
        whose borders are shifted anew each time.
    align
        For `"partition"`: borders lie at multiples of this many rows, such as those that are stored together. Windows
        have the largest multiple of it that is no more than `chunk_size`.
    profiler
        Told of every stage, such as `PipelineProfiler()`.
    memory_bytes, device_bytes
        Refuse to start where `memory_estimate()` says that more is needed, in main memory or on the device.

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
            raise OptionError(f"coverage={coverage!r}; use one of {', '.join(get_args(Coverage))}.")
        if coverage == "random" and align != 1:
            raise OptionError(f"align={align} is for coverage='partition'; random windows are aligned by time_units.")
        options = RunOptions(executor="threads", prefetch=prefetch)
        coded, budget = Coded(total_timesteps, chunk_size), (memory_bytes, device_bytes)
        super().__init__(load_fn, coded, device, seed or 0, options, profiler, budget)
        self._align = time_units if coverage == "random" else math.lcm(align, time_units)
        self._coverage = coverage
        self._longest = (0, min(chunk_size, total_timesteps))
        self._about |= {"total_timesteps": int(total_timesteps), "chunk_size": int(chunk_size)}
        self._about |= {"coverage": coverage, "align": self._align}
        if coverage == "partition":
            PartitionWindows(self._coded, self._align)  # says by itself where it cannot be

    @property
    def chunks_per_pass(self) -> int:
        """Chunks that cover every row once, with `coverage="partition"`."""
        return PartitionWindows(self._coded, self._align).count

    def start_epoch(self, num_chunks: int | None = None) -> None:
        """Begin to read the chunks of the next epoch; one that is still running is over.

        Parameters
        ----------
        num_chunks
            Chunks of this epoch. With `coverage="partition"` it is what it is: None, or `chunks_per_pass`.
        """
        if self._coverage == "partition":
            if num_chunks not in (None, self.chunks_per_pass):
                raise OptionError(
                    f"num_chunks={num_chunks}, but a pass over all rows has {self.chunks_per_pass} chunks; use None."
                )
            self._begin(PartitionWindows(self._coded, self._align))
            return
        if num_chunks is None:
            raise OptionError("start_epoch() needs num_chunks, since random windows have no end.")
        check_integer("num_chunks", num_chunks, at_least=1)
        self._begin(RandomWindows(self._coded, num_chunks, self._align))

    def get_next_chunk(self) -> Chunk:
        """Return the next chunk, waiting for it if need be; `(None, None)` after the last, again and again."""
        chunk = self._next()
        return Chunk((None,) * self._width) if chunk is None else chunk


class PipelineChunkLoader(_ChunkLoader):
    """Streams the windows that the caller names.

    Parameters
    ----------
    load_fn
        Takes begin and end of a window; returns a tuple of arrays with that many rows.
    device
        Where chunks arrive.
    prefetch
        Chunks that are read ahead, in main memory.
    gpu_prefetch
        Chunks that are copied ahead, to the device.
    profiler
        Told of every stage, such as `PipelineProfiler()`.
    seed
        Of the generators that draw batches within a chunk.
    memory_bytes, device_bytes
        Refuse to start where `memory_estimate()` says that more is needed, in main memory or on the device.
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
        coded, budget = Coded(self._LARGEST, self._LARGEST), (memory_bytes, device_bytes)
        super().__init__(load_fn, coded, device, seed, options, profiler, budget)

    def start_epoch(self, chunks: Sequence[tuple[int, int]]) -> None:
        """Begin to read these chunks, each a begin and an end; an epoch that is still running is over."""
        if not len(chunks):
            raise OptionError("start_epoch() got no chunks; give (start, end) of each.")
        windows = tuple((int(start), int(end)) for start, end in chunks)
        order = GivenWindows(self._coded, windows)
        order.check(Index.uniform(self._coded.n_items))
        self._longest = max(windows, key=lambda window: window[1] - window[0])
        self._begin(order)

    def get_next_chunk(self) -> tuple[int | None, Any]:
        """Return the first row of the next chunk, and the chunk; `(None, None)` after the last, again and again."""
        chunk = self._next()
        return (None, None) if chunk is None else (chunk.start, chunk)


def _only(items: list[Any]) -> Any:
    return items[0]
