"""`order="auto"`: a loader whose order is that of the state it loads, or else one that fits the storage."""

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from penstock.core.errors import OptionError, ResumeError
from penstock.core.index import Index
from penstock.feed.loader import Loader
from penstock.feed.position import Position
from penstock.feed.ranks import agree
from penstock.files.machine import this_machine
from penstock.observe.storage.advise import advise_order, delivered_bytes
from penstock.observe.storage.measure import leave_unmeasured, measure_storage
from penstock.observe.storage.shards import describe_shards
from penstock.plan.batch_plan import BatchPlan
from penstock.plan.cursor import Cursor, check_count, show_value
from penstock.plan.orders import Shuffle, WindowShuffle
from penstock.plan.plan import Plan
from penstock.recipes.webdataset.shuffle_options import select_index
from penstock.source.tar.source import STRETCH_ITEMS, TarSource

__all__ = ["AutoOrderLoader", "OrderChoice"]

_LOG = logging.getLogger("penstock")

_KEY = "chosen_order"


@dataclass(frozen=True, slots=True)
class ChosenOrder:
    """An order that was chosen, as it is recorded in states."""

    window: int | None
    """Chunks per window; None: a full shuffle."""

    chunk_items: int
    held: bool

    @property
    def order(self) -> Shuffle | WindowShuffle:
        """The order itself."""
        return Shuffle() if self.window is None else WindowShuffle(self.window, held=self.held)

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain JSON."""
        return {"window": self.window, "chunk_items": self.chunk_items, "held": self.held}

    @classmethod
    def from_dict(cls, stored: Any) -> "ChosenOrder":
        """Return what a state records; raise ResumeError if that is damaged."""
        if not isinstance(stored, Mapping) or not {"window", "chunk_items", "held"} <= set(stored):
            raise ResumeError(f"This state is damaged: chosen_order is {show_value(stored)}.")
        window = stored["window"]
        return cls(
            None if window is None else check_count("window", window, at_least=1),
            check_count("chunk_items", stored["chunk_items"], at_least=1),
            held=stored["held"] is True,
        )


@dataclass(frozen=True, slots=True)
class OrderChoice:
    """The orders that some shards allow, and the measurement that chooses among them."""

    source: TarSource
    shards: Sequence[int]
    reach_items: int

    def measure(self, batch_size: int) -> ChosenOrder:
        """Measure the storage of the shards, and return the order that fits it."""
        items = describe_shards(
            self.source.manifest,
            chunk_items=STRETCH_ITEMS,
            held_bytes=delivered_bytes(self.source),
            shards=self.shards,
        )
        url = self.source.url
        speed = (
            measure_storage(items.files, items.read_bytes) if url is None else leave_unmeasured(url, items.read_bytes)
        )
        memory_bytes = this_machine().memory_bytes
        found = advise_order(
            speed, items, memory_bytes=memory_bytes, batch_size=batch_size, reach_items=self.reach_items
        )
        _LOG.info("order='auto' chose %s Storage: %s.", found, speed)
        return ChosenOrder(found.window, found.chunk_items, found.is_held)

    def plan(self, plan: Plan, chosen: ChosenOrder) -> Plan:
        """Return a plan with another order."""
        table = self.source.manifest.table
        chunk = np.where(table.is_plain, chosen.chunk_items, table.n_items)
        index = Index.from_sizes(table.n_items, identity=self.source.manifest.fingerprint, chunk=chunk)
        return replace(plan, index=select_index(self.source, self.shards, index), order=chosen.order)


class AutoOrderLoader(Loader):
    """A loader whose order is that of the state it loads; without one, it is chosen when it is first needed.

    With several ranks, it is chosen at once: all ranks make a loader, but one alone may ask for a state.

    Parameters
    ----------
    choice
        Chooses the order.
    source, plan, options
        As for `Loader`; the plan has any of the orders.
    """

    _choice: OrderChoice | None = None  # while `Loader` is made
    _chosen: ChosenOrder | None = None
    _is_settled = False

    def __init__(self, choice: OrderChoice, source: TarSource, plan: Plan, **options: Any) -> None:
        super().__init__(source, plan, **options)
        self._choice, self._start = choice, plan
        if self.world.size > 1:
            self._settle()

    def __iter__(self) -> Iterator[Any]:
        self._settle()
        return super().__iter__()

    @property
    def plan(self) -> BatchPlan:
        """Says which items each batch holds."""
        self._settle()
        return super().plan

    @property
    def position(self) -> Position:
        """What was delivered, and what comes next."""
        self._settle()
        return super().position

    def at(self, epoch: int, batch: int) -> Any:
        """Return batch `batch` of `epoch`, counted over all ranks, without moving the loader."""
        self._settle()
        return super().at(epoch, batch)

    def skip(self, n: int) -> None:
        """Skip the next `n` batches of this rank as if they had been delivered, without reading them."""
        self._settle()
        super().skip(n)

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the last delivered batch, and the order that was chosen."""
        self._settle()
        state = super().state_dict()
        return state if self._chosen is None else {**state, _KEY: self._chosen.to_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume where `state` was taken, in the order that it records; raise ResumeError if it belongs elsewhere."""
        if self._choice is not None and isinstance(state, Mapping) and _KEY in state:
            self._resume_order(self._choice, state)
        else:
            self._settle()
        super().load_state_dict(state)

    def set_plan(self, plan: BatchPlan) -> None:
        """Take another plan over the same source; states have the order of that plan."""
        super().set_plan(plan)
        self._chosen = None

    def _settle(self) -> None:
        """Choose the order, unless that was done."""
        if self._choice is None or self._is_settled:
            return
        choice = self._choice
        chosen = agree(lambda: choice.measure(self._start.batch_size), self.world, "order='auto'")
        self._adopt(chosen, choice.plan(self._start, chosen))

    def _resume_order(self, choice: OrderChoice, state: Mapping[str, Any]) -> None:
        """Adopt the order of a state; raise ResumeError if the state does not fit, and change nothing."""
        chosen = ChosenOrder.from_dict(state[_KEY])
        if chosen == self._chosen:
            return
        try:
            plan = choice.plan(self._start, chosen)
        except OptionError as error:
            raise ResumeError(f"This state belongs to another dataset: {error}") from error
        Cursor.restore(state, plan)
        _LOG.info("order='auto' resumes with %r over chunks of %s items.", chosen.order, chosen.chunk_items)
        self._adopt(chosen, plan)

    def _adopt(self, chosen: ChosenOrder, plan: Plan) -> None:
        self._is_settled = True
        if self._closed:  # its state can still be read
            self._position.set_plan(plan)
        else:
            super().set_plan(plan)
        self._chosen = chosen
