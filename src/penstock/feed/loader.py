"""The loader: an iterable over the batches of a plan that can stop and resume anywhere."""

import logging
import sys
import threading
import weakref
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch.utils.data import get_worker_info

from penstock.core.errors import LoaderError, OptionError
from penstock.core.protocols import Observer, Source, Transform
from penstock.core.text import count
from penstock.core.transfers import Transfers
from penstock.core.types import UNNAMED, Draw
from penstock.feed.collate import MASK, Collator, collate_group
from penstock.feed.device import allocate_pinned, map_tensors, move_to_device, resolve_device
from penstock.feed.execution import Execution
from penstock.feed.iteration import Iteration
from penstock.feed.memory import MemoryEstimate, tensor_bytes
from penstock.feed.position import Delivery, Position
from penstock.feed.ranks import current_world
from penstock.files.progress import track_progress
from penstock.plan.cursor import Cursor
from penstock.plan.plan import Plan
from penstock.plan.world import World
from penstock.run.first_wait import FirstWait
from penstock.run.make_batch import BatchMaker, Failure, Record
from penstock.run.options import RunOptions

__all__ = ["Loader"]

_LOG = logging.getLogger("penstock")


class Loader:
    """Iterates over the batches of a plan, in its order, with any executor.

    Each `iter` yields one epoch, or the rest of it after a resume; the next `iter` yields the next epoch. Leaving an
    epoch early ends it: the next `iter` begins the next one. `len(loader)` is the number of batches of a whole epoch on
    this rank. One thread at a time iterates a loader; any thread may close it.

    Parameters
    ----------
    source
        Reads the items.
    plan
        Says which items each batch holds; made over `source.index` or a selection of it.
    transform
        Called as `transform(item, rng)` for each item, with a generator that depends on seed, epoch and item only.
    collate
        Makes a batch from a list of items; None: torch's default collation, except that tuples stay tuples. `Pad` pads
        items of different lengths.
    num_workers
        0: each batch is made when it is asked for. Otherwise, the number of threads or processes that make batches
        ahead; `options.executor` says which.
    device
        Device that batches are moved to; None: main memory.
    world
        Rank of this process; None: as given by `torch.distributed`, or else by the environment.
    options
        How the plan is executed.
    observer
        Receives the time that each stage takes, such as `Timings()`.

    Examples
    --------
    >>> import numpy as np
    >>> from penstock import ArraySource, Plan, Sequential
    >>> source = ArraySource({"x": np.arange(10)})
    >>> with Loader(source, Plan(source.index, Sequential(), batch_size=4)) as loader:
    ...     [batch["x"].tolist() for batch in loader]
    [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    """

    def __init__(
        self,
        source: Source,
        plan: Plan,
        *,
        transform: Transform | None = None,
        collate: Callable[[list[Any]], Any] | None = None,
        num_workers: int = 0,
        device: str | torch.device | None = None,
        world: World | None = None,
        options: RunOptions | Mapping[str, Any] | None = None,
        observer: Observer | None = None,
    ) -> None:
        self._given: dict[str, Any] = {
            "transform": transform, "collate": collate, "num_workers": num_workers, "device": device,
            "options": options, "observer": observer,
        }  # fmt: skip
        self.source, self.observer = source, observer
        self._options = RunOptions(**options) if isinstance(options, Mapping) else options or RunOptions()
        self._num_workers = num_workers
        self._device = resolve_device(device)
        if world is None:
            _warn_in_worker()
        world = world or current_world()
        if world.workers != 1:
            raise OptionError(f"world must not name a worker, got {world!r}. Use World(rank, size).")
        self._record: Record = observer.record if observer is not None else _ignore
        _check_plan(source, plan, collate)
        self._position = Position(plan, world)
        self._transform, self._collate = transform, collate
        self._execution = Execution(plan, world, self._make_maker(), num_workers=num_workers, options=self._options)
        self._live: weakref.ref[Iteration] | None = None
        self._is_beginning = threading.RLock()
        """Held, and never waited for, while an iteration begins."""
        self._first_wait = FirstWait(source)
        self._closed = False
        self._report_left_out()
        self._check_memory()

    # -- iterating -----------------------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Any]:
        """Return an iterator over the rest of the current epoch, or over the next epoch if that one was begun."""
        if not self._is_beginning.acquire(blocking=False):
            raise LoaderError("Another thread begins to iterate this loader. Use a second Loader in this thread.")
        try:
            return self._begin()
        finally:
            self._is_beginning.release()

    def _begin(self) -> Iteration:
        self._check_open()
        live = self._live_iteration()
        if live is not None:
            live.check_thread()
        self._end_live_iteration("another iteration of this loader began; use a second Loader to iterate twice at once")
        self._position.report_left_behind()
        self._position.leave_begun()
        delivery = self._position.begin()
        if delivery.start == Cursor():
            _report_accelerator()
        self._first_wait = FirstWait(self.source)
        if self.plan.tail == "short" and delivery.share.left_out:
            _LOG.warning(
                "Epoch %s ends without its %s: there are too few items for %s ranks, and a rank without a batch would "
                "block the others.",
                delivery.start.epoch, count(delivery.share.left_out, "last batch"), self.world.size,
            )  # fmt: skip
        batches, wake = self._batches(delivery)
        iteration = Iteration(batches, delivery, None if self.observer is None else self._record, wake)
        self._live = weakref.ref(iteration)
        if self._closed:  # meanwhile, from another thread
            iteration.end("the loader was closed")
        return iteration

    def __len__(self) -> int:
        return len(self._position)

    def progress(self, what: str = "", *, show: bool = True) -> Iterator[Any]:
        """Yield the batches of `iter(loader)`, and show on rank 0 how far the epoch is, its speed and the time left.

        On stderr: a bar on a terminal, else a line now and then, after `what` or the number of the epoch.
        """
        batches, total, name = iter(self), len(self), what or f"Epoch {self.epoch}"
        before = max(0, total - self.remaining)
        with track_progress(name, total, "batches", show=show and not self.world.rank, before=before) as bar:
            for batch in batches:
                yield batch
                bar.advance()

    @property
    def plan(self) -> Plan:
        """Says which items each batch holds."""
        return self._position.plan

    @property
    def position(self) -> Position:
        """What was delivered, and what comes next."""
        return self._position

    @property
    def batch_sampler(self) -> "_TrainerEpochs":
        """Receives the epochs of a trainer, such as Lightning's, which calls `batch_sampler.sampler.set_epoch()`."""
        return _TrainerEpochs(self._follow)

    @property
    def remaining(self) -> int:
        """Batches left in the current epoch on this rank."""
        return self._position.remaining

    @property
    def epoch(self) -> int:
        """The current epoch."""
        return self._position.epoch

    @property
    def world(self) -> World:
        """The rank that receives the batches."""
        return self._position.world

    @property
    def device(self) -> torch.device:
        """The device of the batches."""
        return self._device

    @property
    def transfers(self) -> Transfers | None:
        """What was downloaded from a URL so far: requests, bytes, retries, cache hits and time; None for local data.

        Those of this process, by all loaders that share the source, and of all workers of this loader, as far as they
        have answered.
        """
        return self._execution.transfers

    def at(self, epoch: int, batch: int) -> Any:
        """Return batch `batch` of `epoch`, counted over all ranks, without moving the loader."""
        return self._make_now(self.plan.epoch(epoch).draw(batch))

    def take(self, items: ArrayLike) -> Any:
        """Return items by number as one batch, transformed as in the current epoch, without moving the loader."""
        numbers = np.atleast_1d(np.asarray(items))
        if numbers.ndim != 1 or not numbers.size or numbers.dtype.kind not in "iu":
            raise OptionError(f"items must be an item number, or a list of one or more, got {items!r}.")
        wrong = numbers[(numbers < 0) | (numbers >= len(self.source.index))]
        if len(wrong):
            raise IndexError(f"Item numbers must be from 0 to {len(self.source.index) - 1}, got {wrong[0]}.")
        return self._make_now(Draw(self.epoch, 0, numbers.astype(np.int64)))

    def _make_now(self, draw: Draw) -> Any:
        self._check_open()
        (result,) = self._execution.maker.make_batches([draw], _ignore)
        if isinstance(result, Failure):
            raise result.error
        return map_tensors(result, lambda tensor: tensor.to(self._device))

    def skip(self, n: int) -> None:
        """Skip the next `n` batches of this rank as if they had been delivered, without reading them.

        After an error or a break as well, the next `iter` resumes the epoch of `state_dict`.
        During an iteration, `n` is at most `remaining`; before one, it may reach into later epochs.
        """
        if n < 0:
            raise OptionError(f"skip(n) needs n >= 0, got {n}. Use load_state_dict() to go anywhere.")
        live = self._live_iteration()
        if live is None or live.is_over:
            self._position.skip(n)
            return
        live.check_thread()
        if n > self.remaining:
            raise OptionError(
                f"skip(n) needs n <= {self.remaining}, the batches left in this epoch, got {n}. "
                "Leave the loop to skip further."
            )
        self._position.skip(n)
        self._continue(live, is_begun=True)

    # -- state ---------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the last delivered batch: small, plain JSON, the same on every rank."""
        return self._position.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume where `state` was taken; raise ResumeError if it belongs to another dataset, seed or order.

        The number of workers and ranks may have changed. With another batch size, it resumes at the very next item.
        """
        self._position.load_state_dict(state)
        self._end_live_iteration("load_state_dict() was called during this iteration; call iter() again")

    def set_epoch(self, epoch: int) -> None:
        """Make the next `iter` yield `epoch`; a state loaded in the middle of that epoch is kept."""
        if self._position.set_epoch(epoch):
            self._end_live_iteration("set_epoch() was called during this iteration; call iter() again")

    def leave_epoch(self) -> None:
        """Skip the rest of the current epoch: the next `iter` yields the next one. Workers keep running."""
        self.set_epoch(self.epoch + bool(self._position.delivered))

    def set_plan(self, plan: Plan) -> None:
        """Take another plan over the same source, such as another order for each epoch. Workers keep running.

        The next `iter` yields the next epoch, by the new plan; numbers of epochs continue. States are of the new plan.
        """
        self._check_open()
        _check_plan(self.source, plan, self._collate)
        self._end_live_iteration("set_plan() was called during this iteration; call iter() again")
        before, cursor = self.plan, self._position.cursor
        self._execution.set_plan(plan)
        self._position.set_plan(plan)
        try:
            self._check_memory()
        except OptionError:
            self._execution.set_plan(before)
            self._position.set_plan(before)
            self._position.go_to(cursor)
            raise

    def run_as(self, num_workers: int, options: RunOptions, *, source: Source | None = None) -> "Loader":
        """Return a new loader of the same batches, at its beginning, with another execution or a copy of its source."""
        changes = {"num_workers": num_workers, "options": options, "world": self.world, "observer": None}
        return Loader(self.source if source is None else source, self.plan, **(self._given | changes))

    def run_on(self, device: str | torch.device | None) -> "Loader":
        """Return a new loader at this position whose batches are on `device`, and close this one."""
        other = self._copy(device=device)
        other._position.go_to(self._position.cursor)
        self.close()
        return other

    def _copy(self, **changes: Any) -> "Loader":
        return Loader(self.source, self.plan, **(self._given | {"world": self.world} | changes))

    @property
    def options(self) -> RunOptions:
        """Options of execution."""
        return self._options

    def memory_estimate(self) -> MemoryEstimate:
        """Return the peak memory of an epoch; if item sizes vary, one batch is made to measure it."""
        sizes = [field.item_bytes for field in self.source.fields.values()]
        known = [size for size in sizes if size is not None]
        batch_bytes = sum(known) * self.plan.passes.batch_size
        if len(known) < len(sizes) and self.plan.epoch(0).n_batches:
            batch_bytes = tensor_bytes(self.at(0, 0))
        device_bytes = 0 if self._device.type == "cpu" else (2 + self._options.device_ahead) * batch_bytes
        return replace(self._execution.memory_estimate(batch_bytes), device_bytes=device_bytes)

    # -- ending --------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """End all threads and processes and close files; the state can still be read. Idempotent."""
        if not self._closed:
            self._position.go_to(self._position.cursor)  # a batch that another thread still gets does not count
        self._closed = True
        self._end_live_iteration("the loader was closed")
        self._execution.close()
        self.source.close()

    def __reduce__(self) -> NoReturn:
        raise LoaderError("A Loader cannot be pickled: pickle its source, its plan and its state_dict() instead.")

    def __enter__(self) -> "Loader":
        self._check_open()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        executor = self._execution.executor
        return f"Loader({self.source!r}, {self.plan!r}, num_workers={self._num_workers}, executor={executor!r})"

    # -- inside --------------------------------------------------------------------------------------------------------

    def _continue(self, live: Iteration, *, is_begun: bool) -> None:
        """Let an iteration continue at the position."""
        delivery = self._position.begin(is_begun=is_begun)
        batches, wake = self._batches(delivery)
        live.continue_with(batches, delivery, wake)

    def _follow(self, epoch: int) -> None:
        """Go to an epoch that a trainer names, as may do an iteration that it has asked for just before."""
        live = self._live() if self._live is not None else None
        if self._position.follow(epoch) and live is not None and not live.is_over:
            self._continue(live, is_begun=False)

    def _batches(self, delivery: Delivery) -> "tuple[Generator[Any, None, None], Callable[[], None] | None]":
        """Return the batches on the device, and a function that wakes a consumer waiting for one."""
        batches, wake = self._execution.run(delivery.start, self._record, self._first_wait)
        return move_to_device(batches, self._device, ahead=self._options.device_ahead, record=self._record), wake

    def _make_maker(self) -> BatchMaker:
        by_item = self._transform is not None or self._collate is not None or UNNAMED in self.source.fields
        pin = self._device.type == "cuda" or (self._options.pin_memory and torch.cuda.is_available())
        return BatchMaker(
            source=self.source,
            seed=self.plan.seed,
            transform=self._transform,
            collate_group=None if by_item else collate_group,
            collate_items=Collator(self._collate, self.source.fields),
            windows_held=0,
            allocate=allocate_pinned if pin else None,
        )

    def _live_iteration(self) -> Iteration | None:
        return self._live() if self._live is not None else None

    def _end_live_iteration(self, why: str) -> None:
        live = self._live_iteration()
        if live is not None:
            live.end(why)
        self._live = None

    def _check_open(self) -> None:
        if self._closed:
            raise LoaderError("This loader is closed. To resume, make a new one and load this one's state_dict().")

    def _report_left_out(self) -> None:
        share = self._position.share()
        # The last segment of a pass has the fewest items: it is refused now, not when it comes.
        self.plan.epoch((self.plan.epochs_per_pass or 1) - 1).share(self.world)
        if not share.n_steps:
            _LOG.warning(
                "The epochs of this loader have no batches: %s items, batch_size=%s, tail=%r, %s ranks.",
                len(self.plan.index), self.plan.passes.batch_size, self.plan.tail, self.world.size,
            )  # fmt: skip
        elif share.left_out:
            _LOG.warning(
                "%s of %s batches per epoch are left out, because %s ranks cannot share them equally. "
                "Use tail='short' or tail='pad' to leave out none.",
                share.left_out, share.epoch.n_batches, self.world.size,
            )  # fmt: skip
        if self.plan.n_dropped:
            _LOG.warning(
                "%s of %s items are left out, because they are too long for the plan (too_long='drop').",
                self.plan.n_dropped, len(self.plan.index),
            )  # fmt: skip
        if share.epoch.left_out:
            _LOG.info(
                "tail='drop' leaves out %s of %s items per epoch, which do not fill a batch.",
                share.epoch.left_out, self.plan.passes.length,
            )  # fmt: skip

    def _check_memory(self) -> None:
        budget = self._options.memory_bytes
        if budget is None:
            return
        estimate = self.memory_estimate()
        if estimate.host_bytes > budget:
            raise OptionError(
                f"options.memory_bytes allows {budget / 1e6:.1f} MB, but this loader needs {estimate}. "
                "Use a smaller batch_size, prefetch, num_workers or window."
            )


@dataclass(frozen=True, slots=True)
class _TrainerEpochs:
    """Looks to a trainer like a batch sampler of torch, and its sampler."""

    set_epoch: Callable[[int], None]

    @property
    def sampler(self) -> "_TrainerEpochs":
        return self


def _report_accelerator() -> None:
    """Say that an accelerator does not know of a loader, which `accelerator.prepare` gives back as it is."""
    state = sys.modules.get("accelerate.state")
    if state is not None and state.is_initialized() and not state.GradientState().in_dataloader:
        _LOG.warning(
            "A loader begins at its first epoch while an Accelerator is in use, which saves its position only after "
            "prepare_loader(accelerator, loader), or accelerator.register_for_checkpointing(loader). "
            "accelerator.prepare(loader) does nothing."
        )


def _check_plan(source: Source, plan: Plan, collate: Callable[[list[Any]], Any] | None) -> None:
    if not isinstance(plan, Plan):
        raise OptionError(f"plan must be a Plan, got {type(plan).__name__}.")
    index = source.index
    if plan.index.n_stored != index.n_stored or plan.index.identity != index.identity:
        raise OptionError(
            f"The plan must be over the index of its source: it is over {plan.index!r}, but {source!r} has {index!r}"
            f"{' with other content' if plan.index.n_stored == index.n_stored else ''}. "
            "Make the plan over source.index or source.index.select(...)."
        )
    if plan.passes.needs_rows and not hasattr(collate, "collate_draw"):
        raise OptionError(
            "This plan cuts or packs items when they are collated: collate must be Pad('tokens'), with "
            f"the names of your fields, got {collate!r}."
        )
    if plan.tail == "pad" and MASK in source.fields:
        raise OptionError(f"tail='pad' adds a field {MASK!r}, but {source!r} already has one. Rename that field.")


def _warn_in_worker() -> None:
    """Warn if this process is one of several workers of another loader, each of which would deliver all batches."""
    info = get_worker_info()
    if info is not None and info.num_workers > 1:
        _LOG.warning(
            "A Loader was made in worker %s of %s: each worker that makes one delivers all batches, so every batch "
            "comes several times. Use the Loader itself, with num_workers=%s, in place of torch's DataLoader.",
            info.id, info.num_workers, info.num_workers,
        )  # fmt: skip


def _ignore(stage: str, seconds: float, nbytes: int) -> None:
    """Record nothing."""
