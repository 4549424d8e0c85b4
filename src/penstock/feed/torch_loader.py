"""Loaders that take the keywords of torch's DataLoader, a sampler among them."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from penstock.core.errors import ResumeError
from penstock.core.index import Index
from penstock.core.protocols import Order, Source
from penstock.feed.loader import Loader
from penstock.feed.ranks import check_equal, current_world
from penstock.feed.torch_options import TorchOptions
from penstock.plan.cursor import Cursor, check_state, is_same
from penstock.plan.from_sampler import FromSampler
from penstock.plan.orders import Sequential, Shuffle
from penstock.plan.plan import Plan
from penstock.plan.world import World

__all__ = ["SampledLoader", "torch_loader"]


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
