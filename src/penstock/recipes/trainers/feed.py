"""A loader as trainers take one: Lightning's Trainer and Accelerate's Accelerator, which have loops of their own.

Both ask for exactly as many batches as there are and never learn that an epoch has ended; Lightning also makes
iterators that it never uses. And both rebuild what is a torch DataLoader around a sampler of their own.
"""

import logging
from collections.abc import Iterator, Mapping
from typing import Any

from penstock.core.errors import LoaderError
from penstock.feed.loader import Loader
from penstock.plan.plan import Plan
from penstock.plan.segments import Segments
from penstock.recipes.chunked.loader import ChunkedDataLoader, ChunkPlace, locate_chunk

__all__ = ["Feed"]

_LOG = logging.getLogger("penstock")


class Feed:
    """Gives the epochs (or chunks) of a loader one after the other, and knows how many batches it gave.

    Making an iterator begins nothing, except that an epoch of which every batch was given is over.

    Parameters
    ----------
    loader
        A `Loader`, or a `ChunkedDataLoader` with chunks.
    ranks
        How many the trainer has; the loader must deal to as many.
    """

    def __init__(self, loader: Any, ranks: int = 1) -> None:
        if not self.can_feed(loader):
            raise LoaderError(
                f"{type(loader).__name__} has no position to save; use a penstock Loader or a ChunkedDataLoader with a "
                "chunk_size, or hand the trainer a plain torch DataLoader directly."
            )
        if loader.world.size != ranks:
            raise LoaderError(
                f"The trainer has {ranks} ranks, and the loader deals to {loader.world.size}; make the loader after "
                "the ranks have started (give a function that makes it), or pass it world=World(rank, size)."
            )
        self.loader: Loader | ChunkedDataLoader = loader
        self._plan: Plan | Segments = loader.plan if isinstance(loader, Loader) else loader.segments
        self.begun_at: Mapping[str, Any] = loader.state_dict()
        """The state that it was made with, or was given."""
        self.resumed = False
        """Whether it was given a state."""
        self.delivered = 0
        """Batches of this epoch that were given on this rank, before a resume, too."""

    @staticmethod
    def can_feed(loader: Any) -> bool:
        """Say whether a loader has a position to go on from."""
        return isinstance(loader, Loader) or (isinstance(loader, ChunkedDataLoader) and loader.is_chunked)

    @property
    def lengths(self) -> list[int]:
        """Batches of each epoch of a pass, on this rank; of one epoch where they are cut from an endless stream."""
        plan, world = self._plan, self.loader.world
        epochs = int(plan.segments_per_pass) if isinstance(plan, Segments) and plan.tail != "drop" else 1
        first, last = (plan.epoch(number).share(world).n_steps for number in (0, epochs - 1))
        return [first] * (epochs - 1) + [last]

    @property
    def has_passes(self) -> bool:
        """Whether some number of epochs is one pass: not where chunks are cut from an endless stream."""
        return not isinstance(self._plan, Segments) or self._plan.tail != "drop"

    @property
    def epoch(self) -> int:
        """The epoch, or the chunk, where the loader stands."""
        return self.loader.current_chunk if isinstance(self.loader, ChunkedDataLoader) else self.loader.epoch

    def go_to(self, epoch: int) -> None:
        """Give the whole of `epoch` next."""
        if isinstance(self.loader, ChunkedDataLoader):
            self.loader.set_chunk(epoch)
        else:
            self.loader.load_state_dict({**self.loader.state_dict(), "epoch": epoch, "batch": 0, "origin": 0})

    def begin_whole(self) -> None:
        """Give a whole epoch next: the one after one that was broken off."""
        if 0 < self.loader.remaining < len(self.loader):
            _LOG.warning("The rest from %s on is left out: a Trainer begins with a whole epoch.", self.said())
            self.go_to(self.epoch + 1)
        self.begun_at, self.resumed = self.loader.state_dict(), False

    def __iter__(self) -> Iterator[Any]:
        if len(self.loader) and not self.loader.remaining:
            self.go_to(self.epoch + 1)
        return self._counted()

    def _counted(self) -> Iterator[Any]:
        batches = iter(self.loader)
        self.delivered = len(self.loader) - self.loader.remaining
        for batch in batches:
            self.delivered += 1
            yield batch
            del batch

    def __len__(self) -> int:
        return len(self.loader)

    def state_dict(self) -> dict[str, Any]:
        """Return where the loader stands, as plain JSON."""
        return self.loader.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where a state was taken."""
        self.loader.load_state_dict(state)
        self.begun_at, self.resumed = dict(state), True

    def place(self) -> dict[str, int]:
        """Return pass, chunk and number of chunks for people, counted from 1, and the batch that comes next."""
        plan, epoch = self._plan, self.epoch
        at = locate_chunk(plan, epoch) if isinstance(plan, Segments) else ChunkPlace(epoch, 0, 1)
        batch = len(self.loader) - self.loader.remaining
        return {"pass": at.of_pass + 1, "chunk": at.chunk + 1, "chunks": at.chunks, "batch": batch}

    def said(self) -> str:
        """Return where the loader stands, in words."""
        at = self.place()
        return f"pass {at['pass']}, chunk {at['chunk']}/{at['chunks']}, batch {at['batch']}"
