"""A loader as trainers take one: Lightning's Trainer and Accelerate's Accelerator, which have loops of their own.

Both ask for exactly as many batches as there are and never learn that an epoch has ended; Lightning also makes
iterators that it never uses. And both rebuild what is a torch DataLoader around a sampler of their own.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from penstock.core.errors import LoaderError
from penstock.feed.loader import Loader
from penstock.recipes.chunked_epochs import ChunkedDataLoader

__all__ = ["Feed"]


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
        if not isinstance(loader, Loader) and not (isinstance(loader, ChunkedDataLoader) and loader.is_chunked):
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
        self.begun_at: Mapping[str, Any] = loader.state_dict()
        """The state that it was made with, or was given."""
        self.delivered = 0
        """Batches of this epoch that were given on this rank, before a resume, too."""

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

    def __len__(self) -> int:
        return len(self.loader)

    def state_dict(self) -> dict[str, Any]:
        """Return where the loader stands, as plain JSON."""
        return self.loader.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where a state was taken."""
        self.loader.load_state_dict(state)
        self.begun_at = dict(state)

    def place(self) -> dict[str, int]:
        """Return pass, chunk and number of chunks for people, counted from 1, and the batch that comes next."""
        about = {"batch": len(self.loader) - self.loader.remaining}
        if not isinstance(self.loader, ChunkedDataLoader):
            return {"pass": self.epoch + 1, "chunk": 1, "chunks": 1, **about}
        info = self.loader.get_chunk_info()
        return {"pass": info["pass"] + 1, "chunk": info["chunk_of_pass"] + 1, "chunks": info["total_chunks"], **about}

    def said(self) -> str:
        """Return where the loader stands, in words."""
        at = self.place()
        return f"pass {at['pass']}, chunk {at['chunk']}/{at['chunks']}, batch {at['batch']}"
