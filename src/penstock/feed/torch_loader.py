"""Loaders that take the keywords of torch's DataLoader, a sampler among them.

`Loader` itself has options of its own. A recipe that takes the keywords of a DataLoader passes them through here, so
that they mean the same in all recipes.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch.utils.data import DataLoader

from penstock.core.checks import check_choice, check_integer, check_keys, check_number, option_names
from penstock.core.errors import OptionError, ResumeError
from penstock.core.index import Index
from penstock.core.protocols import Order, Source
from penstock.feed.loader import Loader
from penstock.feed.ranks import check_equal, current_world
from penstock.plan.cursor import Cursor, check_state, is_same
from penstock.plan.from_sampler import FromSampler
from penstock.plan.orders import Sequential, Shuffle
from penstock.plan.plan import Plan
from penstock.plan.world import World
from penstock.run.options import RunOptions

__all__ = ["SampledLoader", "TorchOptions", "refuse_keywords", "torch_loader"]

_DEFAULTS = {name: parameter.default for name, parameter in inspect.signature(DataLoader).parameters.items()}
_INSTEAD = {
    "batch_sampler": "Use batch_size; for batches of your own, Loader(source, Plan(source.index, Listed(items), n)).",
    "pin_memory_device": "Use device=: batches for a CUDA device are pinned.",
    "in_order": "Leave it out: batches come in the same order for any number of workers.",
}


@dataclass(frozen=True, slots=True)
class TorchOptions:
    """Keywords of torch's DataLoader, as they were given; `run_options` is what they mean for a `Loader`."""

    shuffle: bool | None = None
    drop_last: bool = False
    collate_fn: Callable[[list[Any]], Any] | None = None
    generator: torch.Generator | None = None
    worker_init_fn: Callable[[int], None] | None = None
    multiprocessing_context: Any = None
    persistent_workers: bool = True
    prefetch_factor: int | None = None
    timeout: float | None = None
    pin_memory: bool | None = None
    sampler: Any = None

    def __post_init__(self) -> None:
        for name in ("shuffle", "drop_last", "persistent_workers", "pin_memory"):
            check_choice(name, getattr(self, name), (True, False, None))
        for name in ("collate_fn", "worker_init_fn"):
            value = getattr(self, name)
            if value is not None and not callable(value):
                raise OptionError(f"{name} must be a function, or None, got {value!r}.")
        if self.generator is not None and not isinstance(self.generator, torch.Generator):
            raise OptionError(f"generator must be a torch.Generator, or None, got {self.generator!r}.")
        if self.prefetch_factor is not None:
            check_integer("prefetch_factor", self.prefetch_factor, at_least=1)
        if self.timeout is not None:
            check_number("timeout", self.timeout, at_least=0)

    @classmethod
    def split(
        cls, given: Mapping[str, Any], caller: Callable[..., Any], *more: Callable[..., Any]
    ) -> tuple["TorchOptions", dict[str, Any]]:
        """Return the keywords of torch's DataLoader in `given`, and all others.

        Raises OptionError for those that mean nothing in `caller`, and those that neither it nor one of `more` has.
        """
        names = {field.name for field in fields(cls)}
        refuse_keywords(given, _INSTEAD, f"in {caller.__name__}")
        others = {name: value for name, value in given.items() if name not in names and name not in _INSTEAD}
        check_keys("Options", others, option_names(cls, caller, *more))
        return cls(**{name: value for name, value in given.items() if name in names}), others

    def seed(self, given: int | None, otherwise: int) -> int:
        """Return the seed of the order: `given`, the initial seed of the generator, or `otherwise`."""
        if self.generator is None:
            return otherwise if given is None else given
        if given is not None:
            raise OptionError(f"Either seed or generator must be given, got both: seed={given!r}.")
        return int(self.generator.initial_seed()) & (2**63 - 1)

    def run_options(self, num_workers: int) -> RunOptions:
        """Return the options of a `Loader` with this many workers.

        Workers are processes if they are to be started in a certain way, or to call a function when they start.
        """
        context = self.multiprocessing_context
        if context is not None and not num_workers:
            raise OptionError("multiprocessing_context needs num_workers >= 1, got 0.")
        method: Any = context if context is None or isinstance(context, str) else context.get_start_method()
        return RunOptions(
            executor="auto" if method is None else "processes",
            prefetch=self.prefetch_factor or 2,
            start_method=method,
            persistent=bool(self.persistent_workers),
            timeout_seconds=self.timeout or None,
            pin_memory=bool(self.pin_memory),
            worker_init=self.worker_init_fn,
        )


def refuse_keywords(given: Mapping[str, Any], instead: Mapping[str, str], where: str) -> None:
    """Raise OptionError if a keyword of `instead` is given; a value that is torch's default requests nothing."""
    for name, advice in instead.items():
        default = _DEFAULTS.get(name)
        if name in given and given[name] is not default and given[name] != default:
            raise OptionError(f"{name} must be {default!r} {where}, got {given[name]!r}. {advice}")


def torch_loader(
    source: Source,
    batch_size: int,
    keywords: TorchOptions,
    *,
    order: Order | None = None,
    index: Index | None = None,
    seed: int = 0,
    collate: Callable[[list[Any]], Any] | None = None,
    **options: Any,
) -> Loader:
    """Return a `Loader` that does what the keywords of torch's DataLoader say.

    Parameters
    ----------
    keywords
        From `TorchOptions.split`.
    order
        None: `Shuffle()` with `shuffle=True`, otherwise `Sequential()`. A `sampler` gives the order of each epoch
        instead, as `FromSampler` says. On several ranks, its items are those of this rank, as with
        `DistributedSampler`; all ranks must iterate, or one alone with `world=World()`.
    index
        Items to visit: all, or a selection of `source.index`.
    collate
        Used if there is no `collate_fn`.
    options
        Other arguments of `Loader`.
    """
    sampler = keywords.sampler
    if order is None or sampler is not None:
        order = Shuffle() if keywords.shuffle and sampler is None else Sequential()
    tail = "drop" if keywords.drop_last else "short"
    plan = Plan(source.index if index is None else index, order, batch_size, seed, tail=tail)  # type: ignore[arg-type]  # a literal
    options |= {
        "collate": keywords.collate_fn or collate,
        "options": keywords.run_options(options.get("num_workers", 0)),
    }
    return Loader(source, plan, **options) if sampler is None else SampledLoader(source, plan, sampler, **options)


class SampledLoader(Loader):
    """A loader whose sampler gives the order of each epoch when it begins; workers keep running."""

    def __init__(self, source: Source, plan: Plan, sampler: Any, *, world: World | None = None, **options: Any) -> None:
        super().__init__(source, plan, world=World(), **options)  # the sampler has the items of this rank only
        self._orders = sampler if isinstance(sampler, FromSampler) else FromSampler(sampler)
        self._ranks = world or current_world()

    def __iter__(self) -> Iterator[Any]:
        """Yield an epoch that begins with its first batch: a trainer may name it after `iter`."""
        epoch = self._position.next_epoch
        if epoch + 1 != self._orders.n_drawn:
            self.set_plan(self._draw(epoch))
        check_equal(super().remaining, self._ranks, "The batches that the sampler leaves in an epoch")
        yield from super().__iter__()

    def __len__(self) -> int:
        """Return the number of batches in the next epoch."""
        items, size = len(self._orders), self.plan.passes.batch_size
        return items // size if self.plan.tail == "drop" else -(-items // size)

    @property
    def remaining(self) -> int:
        """Batches left in the current epoch on this rank."""
        return super().remaining if self.epoch < self._orders.n_drawn else len(self)

    def skip(self, n: int) -> None:
        """Skip the next `n` batches of this epoch: the sampler gives the next one only when that begins."""
        if self.epoch >= self._orders.n_drawn:
            self.set_plan(self._draw(self.epoch))
        if n > self.remaining:
            raise OptionError(f"skip(n) needs n <= {self.remaining}, the batches left in this epoch, got {n}.")
        super().skip(n)

    def leave_epoch(self) -> None:
        """Skip the rest of the current epoch; the sampler gives the next one anew."""
        super().leave_epoch()
        self._orders.redraw(self.epoch)

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the last delivered batch."""
        state = super().state_dict()
        if state["epoch"] >= self._orders.n_drawn:
            state["plan"]["order"] = repr(Sequential())  # as before the first epoch: the sampler gives it later
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume at `state`; the sampler must give the same order as when it was saved."""
        check_state(state)
        any_order = {**state, "plan": {**state["plan"], "order": self.plan.identity()["order"]}}
        if not (state["batch"] or state["origin"]):
            super().load_state_dict(any_order)  # nothing was delivered yet, so any order is right
            return
        epoch, n_drawn = Cursor.restore({**any_order, "batch": 0, "origin": 0}, self.plan).epoch, self._orders.n_drawn
        if epoch + 1 != n_drawn or not is_same(any_order, state):
            plan = self._draw(epoch)
            try:
                Cursor.restore(state, plan)
            except ResumeError as error:
                self._orders.n_drawn = n_drawn
                raise ResumeError(f"The sampler must give the order that the state was saved with: {error}") from error
            self.set_plan(plan)
        super().load_state_dict(state)

    def _copy(self, **changes: Any) -> Loader:
        assert isinstance(self.plan, Plan), "torch_loader makes no other"
        return SampledLoader(self.source, self.plan, self._orders, **(self._given | {"world": self._ranks} | changes))

    def _draw(self, epoch: int) -> Plan:
        assert isinstance(self.plan, Plan), "torch_loader makes no other"
        return replace(self.plan, order=self._orders.draw(epoch))
