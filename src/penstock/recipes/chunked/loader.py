"""Seed 001: walk a data set in pieces of a fixed number of batches, validate after each, and go on anywhere.

A chunk is a segment of a plan: for training, the next so many batches of an endless stream of passes, each in an order
of its own; for validation, the next part of one pass, in storage order. What chunk comes next is one number.
"""

import logging
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from torch.utils.data import DataLoader, Sampler

from penstock.core.checks import check_integer
from penstock.core.errors import OptionError, PlanError
from penstock.core.index import Index
from penstock.feed.position import EpochProgress
from penstock.feed.ranks import current_world
from penstock.plan.cursor import Cursor
from penstock.plan.epoch import Share, Tail
from penstock.plan.orders import Sequential, Shuffle
from penstock.plan.plan import Plan
from penstock.plan.segments import Segments
from penstock.plan.world import World

__all__ = ["ChunkPlace", "ChunkedDataLoader", "ChunkedSampler", "locate_chunk"]

_LOG = logging.getLogger("penstock")


class ChunkPlace(NamedTuple):
    """Where a chunk lies; passes and chunks are counted from 0."""

    of_pass: int
    chunk: int
    """Its number within the pass."""

    chunks: int
    """Chunks that cover the dataset once."""


def locate_chunk(segments: Segments, number: int) -> ChunkPlace:
    """Return where chunk `number` lies in the passes over the data.

    In an endless stream (tail "drop"), chunks cross the borders of passes: a chunk belongs to the pass in which it
    begins.
    """
    if segments.tail != "drop":
        chunks = int(segments.segments_per_pass)
        return ChunkPlace(*divmod(number, chunks), chunks)
    # Whole batches: chunks may hold more items than asked for, if batch_size does not divide that number.
    chunk_items, n_items = segments.length * segments.batch_size, max(1, segments.plan.length)
    of_pass, item = divmod(number * chunk_items, n_items)
    return ChunkPlace(of_pass, item // chunk_items, -(-n_items // chunk_items))


class ChunkedSampler(Sampler[int]):
    """Gives the items of one chunk: a torch sampler. Sizes are in items.

    Parameters
    ----------
    dataset_size
        Items of the data set.
    chunk_size
        Items of a chunk, over all ranks.
    seed
        Of the order.
    shuffle
        Every pass in an order of its own; False: in storage order, each pass cut exactly, its last chunk shorter.
    batch_size
        Items that stay together: what a rank is given at a time, and what a state counts.
    world
        Which rank this is; None: as `torch.distributed` or else the environment says.
    identity
        What tells this data set from another one of the same size; a saved state refuses another.

    Examples
    --------
    >>> sampler = ChunkedSampler(dataset_size=10, chunk_size=4, seed=1)
    >>> seen = [list(sampler.get_chunk_indices(chunk)) for chunk in range(5)]
    >>> sorted(sum(seen, [])) == sorted([*range(10)] * 2)  # two passes in five chunks
    True
    """

    def __init__(
        self,
        dataset_size: int,
        chunk_size: int,
        seed: int = 42,
        *,
        shuffle: bool = True,
        batch_size: int = 1,
        world: World | None = None,
        identity: str = "",
    ) -> None:
        self.dataset_size = check_integer("dataset_size", dataset_size, at_least=0)
        self.chunk_size = check_integer("chunk_size", chunk_size, at_least=1)
        self.seed = seed
        check_integer("batch_size", batch_size, at_least=1)
        self.world = world or current_world()
        """Which rank this is."""
        order = Shuffle() if shuffle else Sequential()
        # Training cycles: no batch is short. Validation sees each item once a pass: its last batch may be.
        tail: Tail = "drop" if shuffle else "short"
        plan = Plan(Index.uniform(dataset_size, identity=identity), order, batch_size, seed, tail=tail)
        self.segments = Segments(plan, -(-chunk_size // batch_size))
        self._check_shares()
        self.progress: EpochProgress | None = None
        """How far an iteration is that counts what it delivers."""
        self.cursor = Cursor()

    @property
    def cursor(self) -> Cursor:
        """Which chunk, and how many of its batches are done, over all ranks."""
        return self._cursor if self.progress is None else self.progress.cursor()

    @cursor.setter
    def cursor(self, cursor: Cursor) -> None:
        self._cursor, self.progress = cursor, None

    @property
    def current_chunk(self) -> int:
        """The chunk that is given next; counted on and on, over passes."""
        return self.cursor.epoch

    @property
    def total_chunks(self) -> int:
        """Chunks that cover the data set once."""
        return locate_chunk(self.segments, 0).chunks if self.dataset_size else 0

    def get_chunk_indices(self, chunk_idx: int) -> list[int]:
        """Return the items of a chunk, in their order, over all ranks."""
        epoch = self.segments.epoch(check_integer("chunk_idx", chunk_idx, at_least=0))
        return [item for items in epoch.items(range(epoch.n_batches)) for item in items.tolist()]

    def set_chunk(self, chunk_idx: int) -> None:
        """Give this chunk next."""
        self.cursor = Cursor(check_integer("chunk_idx", chunk_idx, at_least=0))

    def advance_chunk(self) -> None:
        """Give the next chunk from now on."""
        self.set_chunk(self.current_chunk + 1)

    def get_chunk_info(self) -> dict[str, int]:
        """Return where the sampler stands; passes, and chunks within one, are counted from 0."""
        place = locate_chunk(self.segments, self.current_chunk)
        return {
            "current_chunk": self.current_chunk,
            "total_chunks": self.total_chunks,
            "chunk_size": self.chunk_size,
            "dataset_size": self.dataset_size,
            "samples_in_current_chunk": len(self),
            "pass": place.of_pass,
            "chunk_of_pass": place.chunk,
        }

    def __iter__(self) -> Iterator[int]:
        for items in self.share().items():
            yield from items.tolist()

    def __len__(self) -> int:
        """Items that are left of this chunk, on this rank."""
        share = self.share()
        if not share.n_steps:
            return 0
        last = share.draw(share.n_steps - 1)
        return (share.n_steps - 1) * self.segments.batch_size + len(last.items)

    @property
    def n_batches(self) -> int:
        """Batches of the whole chunk, on this rank."""
        return self.segments.epoch(self.current_chunk).share(self.world).n_steps

    def state_dict(self) -> dict[str, Any]:
        """Return where the sampler stands, as plain JSON."""
        return self.cursor.state(self.segments)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where a state was taken; raise ResumeError where it belongs to other data, sizes or seed."""
        self.cursor = Cursor.restore(state, self.segments)

    def share(self) -> Share:
        """Return what is left of this chunk, on this rank."""
        return self.segments.epoch(self.cursor.epoch).share(self.world, self.cursor.batch)

    def _check_shares(self) -> None:
        """Refuse chunks that the ranks cannot share, and say so where they leave batches out."""
        last = 0 if self.segments.tail == "drop" else self.total_chunks - 1
        for chunk in {0, max(0, last)}:
            try:
                left_out = self.segments.epoch(chunk).share(self.world).left_out
            except PlanError as error:
                raise OptionError(
                    f"{self.dataset_size} items in batches of {self.segments.batch_size} and chunks of "
                    f"{self.segments.length} batches leave fewer items for a last step than there are ranks "
                    f"({self.world.size}), and one would have none; use another batch_size or chunk_size."
                ) from error
            if left_out:
                _LOG.warning(
                    "%s of %s batches of each chunk are left out, since %s ranks cannot share them equally; "
                    "use a chunk_size that the ranks divide.",
                    left_out, self.segments.length, self.world.size,
                )  # fmt: skip


class ChunkedDataLoader(DataLoader[Any]):
    """A torch DataLoader whose epochs are chunks of `chunk_size` batches; without a chunk size, a plain one.

    Iterating gives the chunk where the loader stands; when it was given to its end, the next one follows. An iteration
    that is broken off, or that nobody took a batch of, changes nothing but the count of batches that were delivered.

    Parameters
    ----------
    dataset
        Map-style; one with an `identity`, such as an audio data set, refuses the states of others.
    batch_size
        Items per batch.
    chunk_size
        Batches per chunk, over all ranks; None: no chunks, and all arguments mean what they mean to torch.
    shuffle
        With chunks, True by default: an endless stream of passes, each in an order of its own, for training. False:
        storage order, each pass cut exactly, for validation.
    seed
        Of the order, with chunks.
    drop_last
        With `shuffle=False`: leave out a last batch that is short. Chunks of a shuffled stream have none.
    world
        With chunks: which rank this is; None: as `torch.distributed` or else the environment says.
    dataloader_kwargs
        Any others of torch's DataLoader; `persistent_workers=True` keeps workers over chunks.

    Examples
    --------
    >>> loader = ChunkedDataLoader(list(range(10)), batch_size=2, chunk_size=3, seed=1)
    >>> [len(list(loader)) for _ in range(3)], loader.current_chunk
    ([3, 3, 3], 3)
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int = 1,
        chunk_size: int | None = None,
        *,
        shuffle: bool | None = None,
        seed: int = 42,
        drop_last: bool = False,
        world: World | None = None,
        **dataloader_kwargs: Any,
    ) -> None:
        self.chunked: ChunkedSampler | None = None
        if chunk_size is None:
            super().__init__(dataset, batch_size, shuffle=shuffle, drop_last=drop_last, **dataloader_kwargs)
            return
        check_integer("chunk_size", chunk_size, at_least=1)
        check_integer("batch_size", batch_size, at_least=1)
        for name in ("sampler", "batch_sampler"):
            if dataloader_kwargs.get(name) is not None:
                raise OptionError(f"{name} and chunk_size exclude each other: chunks decide over the order.")
        items = len(dataset)
        shuffled = True if shuffle is None else shuffle
        if drop_last and not shuffled:
            items -= items % batch_size
        sampler = ChunkedSampler(
            items,
            chunk_size * batch_size,
            seed,
            shuffle=shuffled,
            batch_size=batch_size,
            world=world,
            identity=str(getattr(dataset, "identity", "")),
        )
        super().__init__(dataset, batch_size, sampler=sampler, drop_last=False, **dataloader_kwargs)
        self.chunked = sampler

    @property
    def chunk_size(self) -> int | None:
        """Batches per chunk; None without chunks."""
        return None if self.chunked is None else self.chunked.segments.length

    @property
    def is_chunked(self) -> bool:
        """Whether there are chunks."""
        return self.chunked is not None

    use_chunked = is_chunked  # both words are in use

    @property
    def current_chunk(self) -> int:
        """The chunk where the loader stands; counted on and on, over passes. 0 without chunks."""
        return 0 if self.chunked is None else self.chunked.current_chunk

    @property
    def total_chunks(self) -> int:
        """Chunks that cover the data set once; 1 without chunks."""
        return 1 if self.chunked is None else self.chunked.total_chunks

    @property
    def remaining(self) -> int:
        """Batches that are left of the chunk where the loader stands, on this rank; all of them without chunks."""
        return super().__len__() if self.chunked is None else self.chunked.share().n_steps

    @property
    def world(self) -> World:
        """Which rank the chunks are dealt to."""
        return self._sampler().world

    @property
    def segments(self) -> Segments:
        """Which items each batch of each chunk holds."""
        return self._sampler().segments

    def set_chunk(self, chunk_idx: int) -> None:
        """Give this chunk next."""
        self._sampler().set_chunk(chunk_idx)

    def advance_chunk(self) -> None:
        """Give the next chunk from now on."""
        self._sampler().advance_chunk()

    def get_chunk_indices(self, chunk_idx: int) -> list[int]:
        """Return the items of a chunk, in their order, over all ranks."""
        return self._sampler().get_chunk_indices(chunk_idx)

    def get_chunk_info(self) -> dict[str, int]:
        """Return where the loader stands."""
        return self._sampler().get_chunk_info()

    def __iter__(self) -> Any:
        return super().__iter__() if self.chunked is None else self._counted(self.chunked)

    def _counted(self, sampler: ChunkedSampler) -> Iterator[Any]:
        """Yield batches, and count what was delivered; after the last one, the next chunk is due."""
        if not self.remaining:  # all was delivered, to a loop that asked for no more than that
            sampler.advance_chunk()
        progress = EpochProgress(sampler.cursor, sampler.share())
        batches = super().__iter__()
        sampler.progress = progress
        for batch in batches:
            progress.steps += 1
            yield batch
            del batch  # so that the next one may have its memory, which is in the cache of the processor
        if sampler.progress is progress:  # nobody has sent the loader elsewhere
            sampler.cursor = Cursor(progress.start.epoch + 1)

    def __len__(self) -> int:
        """Batches of the chunk where the loader stands, on this rank."""
        return super().__len__() if self.chunked is None else self.chunked.n_batches

    def state_dict(self) -> dict[str, Any]:
        """Return where the loader stands, counting what was delivered, as plain JSON."""
        return self._sampler().state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where a state was taken, in the middle of a chunk, too."""
        self._sampler().load_state_dict(state)

    def end_workers(self) -> None:
        """End workers that persist; the next chunk begins with new ones."""
        self._iterator = None

    def _sampler(self) -> ChunkedSampler:
        if self.chunked is None:
            raise OptionError("This loader has no chunks; give it a chunk_size.")
        return self.chunked
