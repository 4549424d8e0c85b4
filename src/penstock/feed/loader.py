"""The loader: a plan over a source, as an iterable of batches that can stop and go on anywhere."""

import logging
import weakref
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch

from penstock.core.errors import LoaderError, OptionError
from penstock.core.protocols import Observer, Source, Transform
from penstock.core.types import UNNAMED
from penstock.feed.collate import MASK, Merge, block_batch
from penstock.feed.device import checked_device, mapped, on_device, pinned_memory
from penstock.feed.memory import MemoryEstimate, largest_window, tensor_bytes, window_room
from penstock.feed.position import Iteration, Progress
from penstock.feed.ranks import current_world
from penstock.plan.cursor import Cursor
from penstock.plan.epoch import Share
from penstock.plan.plan import Plan
from penstock.plan.segments import Segments
from penstock.plan.world import World
from penstock.run.auto import threads_overlap
from penstock.run.handoff import Handoff
from penstock.run.make_batch import Failure, Record, Work
from penstock.run.options import Executor, RunOptions
from penstock.run.processes.executor import WorkerPool
from penstock.run.threads import inline, threaded

__all__ = ["Loader"]

_LOG = logging.getLogger("penstock")

# Draws smaller than this are made several at a time: below it, the cost of a call is more than that of the copy.
_TOGETHER_BYTES = 1 << 21
_MOST_TOGETHER = 64


class Loader:
    """Batches of a plan, in its order, whoever makes them.

    Iterating gives one epoch, from where the loader stands; the next `iter` gives the next epoch. An epoch that was
    left early is over: the next one is whole. `len(loader)` is the length of a whole epoch on this rank.

    Parameters
    ----------
    source
        Where the items are.
    plan
        Which items each batch holds, made over `source.index` or a selection of it.
    transform
        Called as `transform(item, rng)` for each item, with a generator that depends on seed, epoch and item only.
    collate
        Makes a batch of a list of items; None: tensors, as torch does it, tuples staying tuples.
    num_workers
        0: batches are made when they are asked for. More: that many threads or processes make them ahead;
        `options.executor` says which.
    device
        Where batches arrive; None: main memory.
    world
        Which rank this is; None: as `torch.distributed` or else the environment says.
    options
        How the plan is executed.
    observer
        Told how long each stage takes, such as `Timings()`.

    Examples
    --------
    >>> import numpy as np
    >>> from penstock import ArraySource, Plan, Sequential
    >>> source = ArraySource({"x": np.arange(10)})
    >>> with Loader(source, Plan(source.index, Sequential(), batch_size=4)) as loader:
    ...     [batch["x"].tolist() for batch in loader]
    [[0, 1, 2, 3], [4, 5, 6, 7]]
    """

    def __init__(
        self,
        source: Source,
        plan: Plan | Segments,
        *,
        transform: Transform | None = None,
        collate: Callable[[list[Any]], Any] | None = None,
        num_workers: int = 0,
        device: str | torch.device | None = None,
        world: World | None = None,
        options: RunOptions | None = None,
        observer: Observer | None = None,
    ) -> None:
        self.source, self.plan, self.observer = source, plan, observer
        self._options = options or RunOptions()
        self._num_workers = num_workers
        self._executor = self._options.executor_for(num_workers)
        self._device = checked_device(device)
        self._world = world or current_world()
        if self._world.workers != 1:
            raise OptionError(f"world={world!r} names a worker, but a loader deals to its own; use World(rank, size).")
        self._record: Record = observer.record if observer is not None else _ignore
        _check_fit(source, plan)
        self._transform, self._collate = transform, collate
        self._by_item = transform is not None or collate is not None or UNNAMED in source.fields
        self._work = self._made_work(transform, collate)
        self._pool: WorkerPool | None = None
        self._start = Cursor()
        self._progress: Progress | None = None
        self._live: weakref.ref[Iteration] | None = None
        self._closed = False
        self._check_shares()
        self._check_budget()

    # -- iterating -----------------------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Any]:
        """Return the rest of the epoch where the loader stands, or the next epoch where that one was begun."""
        self._refuse_if_closed()
        self._supersede("another iteration of this loader began; make a second Loader to walk it twice at once")
        self._start = self._next_start()
        self._progress = progress = Progress(self._start, self._share(self._start))
        batches, wake = self._batches(self._start)
        iteration = Iteration(batches, progress, self._record, wake)
        self._live = weakref.ref(iteration)
        if self._closed:  # meanwhile, from another thread
            iteration.end("the loader was closed")
        return iteration

    def __len__(self) -> int:
        return self._share(Cursor(self._cursor().epoch)).n_steps

    @property
    def remaining(self) -> int:
        """Batches left in the epoch where the loader stands, on this rank."""
        return self._share(self._cursor()).n_steps

    @property
    def epoch(self) -> int:
        """The epoch where the loader stands."""
        return self._cursor().epoch

    @property
    def world(self) -> World:
        """Which rank the batches are dealt to."""
        return self._world

    def at(self, epoch: int, batch: int) -> Any:
        """Return batch `batch` of `epoch`, counted over all ranks, without moving the loader."""
        self._refuse_if_closed()
        (result,) = self._work.batches([self.plan.epoch(epoch).draw(batch)], _ignore)
        if isinstance(result, Failure):
            raise result.error
        return mapped(result, lambda tensor: tensor.to(self._device))

    def skip(self, n: int) -> None:
        """Pass over the next `n` batches of this rank, as if they had been delivered, and go on there; reads nothing.

        After an error or a break, too, the next `iter` goes on with the epoch that `state_dict` says.
        In the middle of an iteration, `n` is at most `remaining`; before one, it may reach into later epochs.
        """
        if n < 0:
            raise OptionError(f"skip({n}) goes back; use 0 or more, or load_state_dict() to go anywhere.")
        cursor, share = self._cursor(), self._share(self._cursor())
        live = self._live() if self._live is not None else None
        if live is not None and not live.over:
            if n > share.n_steps:
                raise OptionError(f"skip({n}), but {share.n_steps} batches are left in this epoch; break off instead.")
            self._start = Cursor(cursor.epoch, share.batch_after(n), cursor.origin)
            self._progress = Progress(self._start, self._share(self._start), steps=0, begun=True)
            batches, wake = self._batches(self._start)
            live.go_on(batches, self._progress, wake)
            return
        while n > share.n_steps:
            if not self._share(Cursor(cursor.epoch + 1)).n_steps:
                raise OptionError(f"skip({n}) reaches past the end: epoch {cursor.epoch + 1} has no batches.")
            n -= share.n_steps
            cursor = Cursor(cursor.epoch + 1)
            share = self._share(cursor)
        self._start, self._progress = Cursor(cursor.epoch, share.batch_after(n), cursor.origin), None

    # -- state ---------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return where the loader stands, counting what was delivered: small plain JSON, the same on every rank."""
        return self._cursor().state(self.plan)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state` was taken; raise ResumeError where it belongs to another data set, seed or order.

        The number of workers and ranks may have changed. A changed batch size goes on at the very next item.
        """
        cursor = Cursor.restore(state, self.plan)
        self._supersede("load_state_dict() was called in the middle of this iteration; iterate anew")
        self._start, self._progress = cursor, None

    def set_epoch(self, epoch: int) -> None:
        """Make the next `iter` give `epoch`; a state that was loaded for the middle of that epoch is kept."""
        if epoch < 0:
            raise OptionError(f"set_epoch({epoch}): epochs are counted from 0.")
        fresh = self._progress is None or not self._progress.begun
        if not (fresh and self._start.epoch == epoch):
            self._supersede("set_epoch() was called in the middle of this iteration; iterate anew")
            self._start, self._progress = Cursor(epoch), None

    def run_as(self, num_workers: int, options: RunOptions) -> "Loader":
        """Return another loader of the same batches, at its beginning, that is executed otherwise."""
        return Loader(
            self.source,
            self.plan,
            transform=self._transform,
            collate=self._collate,
            num_workers=num_workers,
            device=self._device,
            world=self._world,
            options=options,
        )

    @property
    def options(self) -> RunOptions:
        """How the plan is executed."""
        return self._options

    def memory_estimate(self) -> MemoryEstimate:
        """Return the bytes that an epoch will take at its peak; where item sizes vary, one batch is made to tell."""
        sizes = [field.item_bytes for field in self.source.fields.values()]
        known = [size for size in sizes if size is not None]
        batch_bytes = sum(known) * self.plan.batch_size
        if len(known) < len(sizes) and self.plan.epoch(0).n_batches:
            batch_bytes = tensor_bytes(self.at(0, 0))
        together, workers = self._together(), self._num_workers
        made = {"inline": together, "threads": workers * self._options.prefetch * together}
        held = made.get(self._executor, max(made["threads"], workers * (self._options.prefetch + 1))) + 1
        window_bytes = largest_window(self._base_plan()) * (batch_bytes // self.plan.batch_size)
        windows = self._work.windows_held
        if self._executor in ("processes", "auto"):
            windows = max(windows, workers * self._window_room("processes")[0])
        on_device = 0 if self._device.type == "cpu" else (2 + self._options.device_ahead) * batch_bytes
        return MemoryEstimate(batch_bytes, held, window_bytes, windows, on_device)

    # -- ending --------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """End every thread and process and let go of files; the state can still be read. Twice is fine."""
        if not self._closed:
            self._start = self._cursor()
            self._progress = None
        self._closed = True
        self._supersede("the loader was closed")
        if self._pool is not None:
            self._pool.close()
        self.source.close()

    def __enter__(self) -> "Loader":
        self._refuse_if_closed()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Loader({self.source!r}, {self.plan!r}, num_workers={self._num_workers}, executor={self._executor!r})"

    # -- inside --------------------------------------------------------------------------------------------------------

    def _cursor(self) -> Cursor:
        return self._start if self._progress is None else self._progress.cursor()

    def _next_start(self) -> Cursor:
        progress = self._progress
        if progress is None or not progress.begun:
            return self._start
        return Cursor(progress.start.epoch + 1)

    def _share(self, cursor: Cursor) -> Share:
        return self.plan.epoch(cursor.epoch, cursor.origin).share(self._world, cursor.batch)

    def _batches(self, start: Cursor) -> "tuple[Generator[Any, None, None], Callable[[], None] | None]":
        """Return the batches on the device, and what wakes a consumer that waits for one."""
        batches, wake = self._executed(start)
        return on_device(batches, self._device, ahead=self._options.device_ahead, record=self._record), wake

    def _executed(self, start: Cursor) -> "tuple[Generator[Any, None, None], Callable[[], None] | None]":
        if self._executor == "auto":
            self._executor = self._measured_executor(start)
            self._work = replace(self._work, windows_held=self._window_room(self._executor)[0])
        if self._executor == "inline":
            draws = self._share(start).draws()
            return inline(draws, self._work, together=self._together(), record=self._record), None
        if self._executor == "threads":
            handoff = Handoff(self._num_workers * self._options.prefetch)
            batches = threaded(
                lambda: self._share(start).draws(),
                self._work,
                threads=self._num_workers,
                handoff=handoff,
                windows_ahead=self._window_room("threads")[1],
                together=self._together(),
                timeout_seconds=self._options.timeout_seconds,
                record=self._record,
            )
            return batches, handoff.close
        if self._pool is None:
            self._pool = WorkerPool(
                self.plan, self._world, self._work, workers=self._num_workers, options=self._options
            )
        return self._pool.run(start.epoch, start.origin, start.batch, self._record), None

    def _measured_executor(self, start: Cursor) -> Executor:
        draws = list(self._share(start).draws(stop=2))
        return "threads" if not draws or threads_overlap(draws, self._work) else "processes"

    def _made_work(self, transform: Transform | None, collate: Callable[[list[Any]], Any] | None) -> Work:
        pin = self._device.type == "cuda" or (self._options.pin_memory and torch.cuda.is_available())
        return Work(
            source=self.source,
            seed=self.plan.seed,
            transform=transform,
            merge_block=None if self._by_item else block_batch,
            merge_items=Merge(collate),
            windows_held=self._window_room(self._executor)[0],
            allocate=pinned_memory if pin else None,
        )

    def _window_room(self, executor: str) -> tuple[int, int]:
        """Return the windows that one process keeps, and how far ahead it reads them."""
        lanes = -(-self.plan.lanes // self._world.size)
        if executor == "processes":
            return window_room(self._base_plan(), lanes=-(-lanes // self._num_workers), in_flight=0)
        in_flight = self._num_workers * self._options.prefetch * self._together()
        return window_room(self._base_plan(), lanes=lanes, in_flight=in_flight)

    def _base_plan(self) -> Plan:
        return self.plan.plan if isinstance(self.plan, Segments) else self.plan

    def _together(self) -> int:
        fields = self.source.fields.values()
        sizes = [field.typical_bytes if field.item_bytes is None else field.item_bytes for field in fields]
        if self._by_item or any(size is None for size in sizes):
            return 1
        batch_bytes = self.plan.batch_size * sum(size or 0 for size in sizes)
        return max(1, min(_MOST_TOGETHER, _TOGETHER_BYTES // max(batch_bytes, 1)))

    def _supersede(self, why: str) -> None:
        live = self._live() if self._live is not None else None
        if live is not None:
            live.end(why)
        self._live = None

    def _refuse_if_closed(self) -> None:
        if self._closed:
            raise LoaderError("This loader is closed; make another one, and give it this one's state_dict() to go on.")

    def _check_shares(self) -> None:
        share = self._share(Cursor())
        if not share.n_steps:
            _LOG.warning(
                "Epochs of this loader have no batches: %s items, batch_size=%s, tail=%r, %s ranks.",
                len(self.plan.index), self.plan.batch_size, self.plan.tail, self._world.size,
            )  # fmt: skip
        elif share.left_out:
            _LOG.warning(
                "%s of %s batches per epoch are left out, since %s ranks cannot share them equally; "
                "tail='pad' leaves out nothing.",
                share.left_out, share.epoch.n_batches, self._world.size,
            )  # fmt: skip

    def _check_budget(self) -> None:
        budget = self._options.memory_bytes
        if budget is None:
            return
        estimate = self.memory_estimate()
        if estimate.host_bytes > budget:
            raise OptionError(
                f"This loader needs {estimate}; options.memory_bytes allows {budget / 1e6:.1f} MB. "
                "Use a smaller batch_size, prefetch, num_workers or window."
            )


def _check_fit(source: Source, plan: Plan | Segments) -> None:
    if not isinstance(plan, Plan | Segments):
        raise OptionError(f"A loader runs a Plan or Segments, got {type(plan).__name__}.")
    index = source.index
    if plan.index.n_stored != index.n_stored or plan.index.identity != index.identity:
        raise OptionError(
            f"The plan was made over {plan.index!r}, but {source!r} has {index!r}"
            f"{' with other content' if plan.index.n_stored == index.n_stored else ''}; "
            "make the plan over source.index or source.index.select(...)."
        )
    if plan.tail == "pad" and MASK in source.fields:
        raise OptionError(f"tail='pad' adds a field {MASK!r}, which {source!r} has already; rename that field.")


def _ignore(stage: str, seconds: float, nbytes: int) -> None:
    """Take no note."""
