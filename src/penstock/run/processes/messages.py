"""Messages between the consumer's process and its workers: tickets for draws, and deliveries of batches."""

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
from penstock.run.make_batch import BatchMaker, Failure
from penstock.run.processes.ring import Ring

__all__ = ["Delivery", "Ticket", "TicketRange", "TicketSampler", "WorkerDataset"]


@dataclass(frozen=True, slots=True)
class TicketRange:
    """The requested draws: `steps` of an epoch that a rank resumes at batch `start`."""

    epoch: int
    origin: int
    start: int
    steps: range


@dataclass(frozen=True, slots=True)
class Ticket:
    """One draw requested from a worker."""

    epoch: int
    origin: int
    start: int
    step: int
    slot: int | None
    """Slot of the ring that the batch may be written to."""


class TicketSampler(Sampler[Ticket]):
    """Yields tickets; read in the main process, one whenever a worker has room for it."""

    def __init__(self, ring: Ring) -> None:
        self._ring = ring
        self.tickets: TicketRange | None = None

    def __iter__(self) -> Iterator[Ticket]:
        # Torch takes the first ticket when the workers are new, or have answered all earlier tickets.
        self._ring.reclaim()
        if (requested := self.tickets) is not None:
            for step in requested.steps:
                yield Ticket(requested.epoch, requested.origin, requested.start, step, self._ring.acquire())

    def __len__(self) -> int:
        return len(self.tickets.steps) if self.tickets is not None else 0


class WorkerDataset(Dataset[Any]):
    """What a worker process holds: the plan, and the maker of batches."""

    def __init__(self, plan: Plan | Segments, world: World, maker: BatchMaker, ring: Ring) -> None:
        self.plan, self.world, self.maker = plan, world, maker
        self._ring = ring
        self._share: tuple[tuple[int, int, int], Share] | None = None

    def __getitem__(self, ticket: Ticket) -> "Delivery":
        records: list[tuple[str, float, int]] = []
        try:
            draw = self._share_of(ticket).draw(ticket.step)
            result = next(self.maker.make_batches([draw], lambda *stage: records.append(stage)))
        except Exception as error:  # the plan itself failed
            result = Failure(error)
        if isinstance(result, Failure):
            return Delivery(None, ticket.slot, _RemoteFailure.of(result.error), records)
        packed = None if ticket.slot is None else self._ring.pack(ticket.slot, result)
        return Delivery(packed or result, ticket.slot, None, records)

    def _share_of(self, ticket: Ticket) -> Share:
        key = (ticket.epoch, ticket.origin, ticket.start)
        if self._share is None or self._share[0] != key:
            self._share = (key, self.plan.epoch(ticket.epoch, ticket.origin).share(self.world, ticket.start))
        return self._share[1]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_share": None}


@dataclass(frozen=True, slots=True)
class Delivery:
    """A worker's answer to a ticket."""

    batch: Any
    """The batch itself, or a PackedBatch in the ring; None if it failed."""

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
            pickle.loads(self.pickled)
            if self.pickled is not None
            else WorkerError("A worker raised an error that cannot be pickled.")
        )
        assert isinstance(found, BaseException), "only exceptions are put in"
        found.add_note(f"[penstock] in a worker process:\n{self.text}")
        return found
