"""BatchPlan: what loaders and executors know about a plan. They ask no more, and never which class it is."""

from typing import NamedTuple, Protocol, Self, runtime_checkable

from penstock.core.index import Index
from penstock.plan.epoch import Passes, Tail
from penstock.plan.inspect import Inspectable

__all__ = ["BatchPlan", "EpochPlace"]


class EpochPlace(NamedTuple):
    """Where an epoch lies in the passes over the data; all numbers are counted from 0."""

    of_pass: int
    """The pass in which the epoch begins."""

    number: int
    """Its number among the epochs that begin in this pass."""

    per_pass: int
    """Epochs that cover the data once."""


@runtime_checkable
class BatchPlan(Inspectable, Protocol):
    """Defines what every batch of every epoch is made of; `Plan` and `Segments` do."""

    @property
    def index(self) -> Index:
        """Number of items and chunk borders."""

    @property
    def batch_size(self) -> int:
        """Items per batch, on one rank."""

    @property
    def seed(self) -> int:
        """Seed of order and augmentation."""

    @property
    def lanes(self) -> int:
        """Number of runs of consecutive batches that a pass is divided into."""

    @property
    def tail(self) -> Tail:
        """What happens to items that do not fill a batch."""

    @property
    def passes(self) -> Passes:
        """Stream of passes that the epochs are cut from."""

    @property
    def epochs_per_pass(self) -> int | None:
        """Epochs that make up one pass exactly; None if epochs are cut from an endless stream."""

    def locate(self, epoch: int) -> EpochPlace:
        """Return where `epoch` lies in the passes over the data."""

    def identity(self) -> dict[str, str | int]:
        """Return, by name, everything that the order of items depends on, as a small plain JSON mapping."""

    def with_batches(self, batch_size: int, tail: Tail) -> Self:
        """Return the same plan with another batch size and tail."""

    def with_windows(self) -> Self:
        """Return the same plan, with windows if its order has some that it does not hold in memory."""

    def convert_position(self, before: Self, *, epoch: int, batch: int, origin: int) -> tuple[int, int]:
        """Return the batch and origin at which this plan resumes a position in `epoch` of `before`.

        `before` is this plan with another batch size or tail. Raises ResumeError if its batches end at items where no
        batch of this plan begins.
        """
