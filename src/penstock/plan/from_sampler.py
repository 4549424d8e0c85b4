"""The orders that a sampler of torch gives, one for each epoch."""

from collections.abc import Iterable
from typing import Any

import numpy as np

from penstock.core.errors import OptionError
from penstock.plan.orders import Listed

__all__ = ["FromSampler"]


class FromSampler:
    """Draws the order of each epoch from a sampler, once, in the process that iterates.

    Parameters
    ----------
    sampler
        Yields items: a sampler of torch or a list, or a function without arguments that returns one, called once per
        epoch. If it has `set_epoch`, that is called first. Otherwise, resuming in a later epoch iterates it for the
        epochs before, so that a seeded generator of its own reaches the same state.

    Examples
    --------
    >>> orders = FromSampler([3, 1])
    >>> len(orders), orders.draw(0), orders.n_drawn
    (2, Listed(2 items, c8c657ddd3eb1ff8), 1)
    """

    def __init__(self, sampler: Any) -> None:
        self._sampler, self._next = sampler, None
        self.n_drawn = 0
        """Epochs whose order was drawn."""

    def __len__(self) -> int:
        """Return the number of items in the next epoch."""
        return len(self._find_next())

    def draw(self, epoch: int) -> Listed:
        """Return the order of `epoch`."""
        for before in range(self.n_drawn, epoch):
            self._draw(before)
        return Listed(np.array(self._draw(epoch), np.int64))

    def redraw(self, epoch: int) -> None:
        """Draw `epoch` and those after it again; a sampler that has `refresh` chooses its items again."""
        self.n_drawn, self._next = min(self.n_drawn, epoch), None
        refresh = getattr(self._sampler, "refresh", None)
        if callable(refresh):
            refresh()

    def _draw(self, epoch: int) -> list[int]:
        sampler, self._next = self._find_next(), None
        if not isinstance(sampler, Iterable):
            raise OptionError(f"sampler must be a torch sampler or a function that returns one, got {sampler!r}.")
        if callable(getattr(sampler, "set_epoch", None)):
            sampler.set_epoch(epoch)  # type: ignore[attr-defined]  # such as DistributedSampler
        self.n_drawn = epoch + 1
        return [int(item) for item in sampler]

    def _find_next(self) -> Any:
        """Return the sampler of the next epoch."""
        if isinstance(self._sampler, Iterable) or not callable(self._sampler):
            return self._sampler
        if self._next is None:
            self._next = self._sampler()
        return self._next
