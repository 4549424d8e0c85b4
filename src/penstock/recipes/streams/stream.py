"""A stream of chunks, each a window of rows: the base of the loaders, over `Loader` and its position."""

from collections.abc import Mapping
from typing import Any

import torch

from penstock.core.errors import LoaderError, OptionError, ResumeError
from penstock.core.index import Index
from penstock.core.protocols import Observer, Source
from penstock.core.seeds import check_seed, draw_seed, key_for
from penstock.feed.loader import Loader
from penstock.feed.memory import MemoryEstimate
from penstock.observe.timing import Timings
from penstock.plan.cursor import Cursor, check_count, is_same, show_value
from penstock.plan.plan import Plan
from penstock.plan.window_batches import WindowBatches, WindowOrder, WindowPasses
from penstock.plan.world import World
from penstock.recipes.streams.rows import ABSENT, FunctionRows
from penstock.recipes.streams.sampling import set_default_generator
from penstock.run.options import RunOptions

__all__ = ["Chunk", "ChunkStream"]

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


class ChunkStream:
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
        self._budget: tuple[int | None, int | None] = (None, None)  # of main memory and of device memory, in bytes
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
