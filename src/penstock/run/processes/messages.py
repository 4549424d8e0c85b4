"""What crosses between the consumer's process and its workers: which draw is wanted, and what came of it."""

import pickle
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch.utils.data import Dataset, Sampler

from penstock.core.errors import WorkerError
from penstock.plan.epoch import Share
from penstock.plan.plan import Plan
from penstock.plan.segments import Segments
from penstock.plan.world import World
from penstock.run.make_batch import Failure, Work
from penstock.run.processes.ring import Ring

__all__ = ["Asked", "Delivered", "Draws", "Ticket", "Tickets"]


@dataclass(frozen=True, slots=True)
class Tickets:
    """Which draws are wanted: `steps` of an epoch that a rank goes on with at batch `start`."""

    epoch: int
    origin: int
    start: int
    steps: range


@dataclass(frozen=True, slots=True)
class Ticket:
    """One draw that a worker is asked for."""

    epoch: int
    origin: int
    start: int
    step: int
    slot: int | None
    """Where in the ring the batch may be put."""


class Asked(Sampler[Ticket]):
    """What the workers are asked for; read in the main process, one ticket whenever a worker has room for it."""

    def __init__(self, ring: Ring) -> None:
        self._ring = ring
        self.tickets: Tickets | None = None

    def __iter__(self) -> Iterator[Ticket]:
        # Torch asks for the first ticket when the workers are new, or have answered all that was asked of them before.
        self._ring.reclaim()
        if (wanted := self.tickets) is not None:
            for step in wanted.steps:
                yield Ticket(wanted.epoch, wanted.origin, wanted.start, step, self._ring.ask())

    def __len__(self) -> int:
        return len(self.tickets.steps) if self.tickets is not None else 0


class Draws(Dataset[Any]):
    """What a worker process has: the plan, and the work to do."""

    def __init__(self, plan: Plan | Segments, world: World, work: Work, ring: Ring) -> None:
        self.plan, self.world, self.work = plan, world, work
        self._ring = ring
        self._share: tuple[tuple[int, int, int], Share] | None = None

    def __getitem__(self, ticket: Ticket) -> "Delivered":
        records: list[tuple[str, float, int]] = []
        try:
            draw = self._share_of(ticket).draw(ticket.step)
            result = next(self.work.batches([draw], lambda *stage: records.append(stage)))
        except Exception as error:  # the plan itself failed
            result = Failure(error)
        if isinstance(result, Failure):
            return Delivered(None, ticket.slot, _RemoteFailure.of(result.error), records)
        shipped = None if ticket.slot is None else self._ring.written(ticket.slot, result)
        return Delivered(shipped or result, ticket.slot, None, records)

    def _share_of(self, ticket: Ticket) -> Share:
        key = (ticket.epoch, ticket.origin, ticket.start)
        if self._share is None or self._share[0] != key:
            self._share = (key, self.plan.epoch(ticket.epoch, ticket.origin).share(self.world, ticket.start))
        return self._share[1]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_share": None}


@dataclass(frozen=True, slots=True)
class Delivered:
    """What came of a ticket."""

    batch: Any
    """The batch itself, or where in the ring it lies; None where it failed."""

    slot: int | None
    failure: "_RemoteFailure | None"
    records: list[tuple[str, float, int]]


@dataclass(frozen=True, slots=True)
class _RemoteFailure:
    """An exception on its way out of a worker process."""

    pickled: bytes | None
    text: str

    @classmethod
    def of(cls, error: BaseException) -> "_RemoteFailure":
        text = "".join(traceback.format_exception(error))
        try:
            pickled = pickle.dumps(error)
            pickle.loads(pickled)
        except Exception:
            return cls(None, text)
        return cls(pickled, text)

    def error(self) -> BaseException:
        found = (
            pickle.loads(self.pickled) if self.pickled is not None else WorkerError("An error that cannot be pickled.")
        )
        assert isinstance(found, BaseException), "only exceptions are put in"
        found.add_note(f"[penstock] in a worker process:\n{self.text}")
        return found
