"""Adapts a loader to trainers that run their own loop: Lightning's Trainer and Accelerate's Accelerator.

Both request exactly as many batches as an epoch has, and never run an iterator to its end; Lightning also makes
iterators that it never uses. Both would rebuild a torch DataLoader around their own sampler.
"""

import logging
from collections.abc import Iterator, Mapping
from typing import Any

from penstock.core.errors import LoaderError
from penstock.feed.loader import Loader
from penstock.recipes.chunked.loader import ChunkedDataLoader

__all__ = ["Feed"]

_LOG = logging.getLogger("penstock")


class Feed:
    """Yields the epochs (or chunks) of a loader one after another.

    Making an iterator starts nothing, but moves on from an epoch that was delivered in full.

    Parameters
    ----------
    loader
        A `Loader`, or a `ChunkedDataLoader` with chunks.
    ranks
        Number of ranks of the trainer; the loader must deal to as many.
    """

    def __init__(self, loader: Any, ranks: int = 1) -> None:
        if not self.can_feed(loader):
            raise LoaderError(
                "loader must be a penstock Loader or a ChunkedDataLoader with a chunk_size, got "
                f"{type(loader).__name__}, which has no position to save. Pass other loaders to the trainer directly."
            )
        if loader.world.size != ranks:
            raise LoaderError(
                f"The loader must deal to the {ranks} ranks of the trainer, got {loader.world.size}. Make the loader "
                "after the ranks have started (pass a function that makes it), or pass it world=World(rank, size)."
            )
        self.loader: Loader | ChunkedDataLoader = loader
        self.begun_at: Mapping[str, Any] = loader.state_dict()
        """The state at the start, or the one that was loaded."""
        self.resumed = False
        """Whether a state was loaded."""

    @staticmethod
    def can_feed(loader: Any) -> bool:
        """Return whether a loader has a position to resume from."""
        return isinstance(loader, Loader) or (isinstance(loader, ChunkedDataLoader) and loader.is_chunked)

    @property
    def lengths(self) -> list[int]:
        """Batches of each epoch of a pass, on this rank; of one epoch if chunks are cut from an endless stream."""
        plan, world = self.loader.position.plan, self.loader.world
        epochs = plan.epochs_per_pass or 1
        first, last = (plan.epoch(number).share(world).n_steps for number in (0, epochs - 1))
        return [first] * (epochs - 1) + [last]

    @property
    def has_passes(self) -> bool:
        """Whether a whole number of epochs is one pass; False if chunks are cut from an endless stream."""
        return self.loader.position.plan.epochs_per_pass is not None

    @property
    def epoch(self) -> int:
        """The current epoch or chunk of the loader."""
        return self.loader.position.epoch

    @property
    def delivered(self) -> int:
        """Batches of this epoch delivered on this rank, including those before a resume."""
        return self.loader.position.delivered

    def go_to(self, epoch: int) -> None:
        """Yield all of `epoch` next."""
        self.loader.load_state_dict({**self.loader.state_dict(), "epoch": epoch, "batch": 0, "origin": 0})

    def begin_whole(self) -> None:
        """Yield a whole epoch next: skip the rest of an interrupted one."""
        if 0 < self.loader.remaining < len(self.loader):
            _LOG.warning(
                "The rest of the epoch after %s is skipped: a Trainer starts with a whole epoch.", self.describe()
            )
            self.go_to(self.epoch + 1)
        self.begun_at, self.resumed = self.loader.state_dict(), False

    def __iter__(self) -> Iterator[Any]:
        self.loader.position.leave_finished()
        return self._iterate()

    def _iterate(self) -> Iterator[Any]:
        yield from self.loader

    def __len__(self) -> int:
        return len(self.loader)

    def state_dict(self) -> dict[str, Any]:
        """Return the position of the loader, as plain JSON."""
        return self.loader.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from a state."""
        self.loader.load_state_dict(state)
        self.begun_at, self.resumed = dict(state), True

    def place(self) -> dict[str, int]:
        """Return pass, chunk and chunks per pass for display, counted from 1, and the next batch, counted from 0."""
        at = self.loader.position.plan.locate(self.epoch)
        return {"pass": at.of_pass + 1, "chunk": at.number + 1, "chunks": at.per_pass, "batch": self.delivered}

    def describe(self) -> str:
        """Return the position of the loader in words."""
        at = self.place()
        return f"pass {at['pass']}, chunk {at['chunk']}/{at['chunks']}, batch {at['batch']}"
